//! Faults that users of other implementations reported, each as a small test with the values worked by hand.

#![allow(missing_docs)]

mod common;

use async_tensor_parallel::{
    Group, LinearMode, Link, LocalWorld, Overlap, Placement, Result, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};
use common::{MODES, OVERLAPS};

fn run<R: Send>(world_size: usize, test: impl Fn(&Group) -> Result<R> + Sync) -> Vec<R> {
    LocalWorld::new(world_size).unwrap().with_threads(1).run(test).unwrap()
}

fn cases() -> impl Iterator<Item = (LinearMode, Overlap)> {
    MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap)))
}

/// Megatron-LM#360: an even split of a fused gate-up weight pairs the wrong halves.
#[test]
fn a_fused_gate_up_weight_is_split_part_by_part() {
    for (mode, overlap) in cases() {
        // Gate rows 1–4, up rows 5–8, each holding its number.
        let weight: Vec<f32> = (1..=8).map(|row| row as f32).collect();
        let held = run(2, |group| {
            let layer = TensorParallelColumnLinear::builder(1, 8)
                .mode(mode)
                .overlap(overlap)
                .contiguous_chunks(&[4, 4])
                .from_full(group, &weight, None)?;
            let x = match mode {
                LinearMode::AllReduce => group.tensor(&[1.0, 10.0], &[2, 1], Placement::Replicated)?,
                LinearMode::ReduceScatter => group.tensor(&[[1.0, 10.0][group.rank()]], &[1, 1], Placement::Rows)?,
            };
            Ok((layer.weight().value().to_vec()?, layer.forward(&x)?.0.to_vec()?))
        });
        assert_eq!(held[0].0, [1.0, 2.0, 5.0, 6.0]);
        assert_eq!(held[1].0, [3.0, 4.0, 7.0, 8.0]);
        assert_eq!(held[0].1, [1.0, 2.0, 5.0, 6.0, 10.0, 20.0, 50.0, 60.0], "{mode:?} {overlap}");
    }
}

/// Megatron-LM#6407: a pooled gather buffer is overwritten while it is still read.
#[test]
fn a_second_gather_does_not_touch_the_first_ones_result() {
    let world = LocalWorld::new(3).unwrap().with_threads(1);
    for world in [world.clone(), world.with_link(Link::gbit(1.0, 20.0)).unwrap()] {
        world
            .run(|group| {
                let shard = |round: usize| {
                    let value = (round * 3 + group.rank()) as f32;
                    group.tensor(&[value; 64], &[4, 16], Placement::Rows)
                };
                for round in 0..100 {
                    let first = group.all_gather(&shard(2 * round)?)?.wait()?;
                    let second = group.all_gather(&shard(2 * round + 1)?)?;
                    // The consumer of the first is late.
                    std::thread::yield_now();
                    let of = |tensor: async_tensor_parallel::Tensor<f32>, round: usize| -> Result<()> {
                        let want = (0..3).flat_map(|rank| vec![(round * 3 + rank) as f32; 64]).collect::<Vec<_>>();
                        assert_eq!(tensor.to_vec()?, want);
                        Ok(())
                    };
                    of(first, 2 * round)?;
                    of(second.wait()?, 2 * round + 1)?;
                }
                Ok(())
            })
            .unwrap();
    }
}

/// Megatron-LM#236, torchtitan#4332: the row bias is added by every rank, its gradient is partial or divided by n.
#[test]
fn a_row_bias_counts_once_and_its_gradient_is_the_whole_sum() {
    for (mode, overlap) in cases() {
        let scatter = mode == LinearMode::ReduceScatter;
        // 4 in, weight of ones, bias 10. Four tokens on four ranks; in AllReduce mode three.
        let (ranks, tokens) = if scatter { (2, 4) } else { (4, 3) };
        run(ranks, |group| {
            let layer = TensorParallelRowLinear::builder(4, 1).mode(mode).overlap(overlap).bias(true).from_full(
                group,
                &[1.0f32; 4],
                Some(&[10.0]),
            )?;
            let each = 4 / ranks;
            let x = group.tensor(&vec![1.0; tokens * each], &[tokens, each], Placement::Features)?;
            let (y, saved) = layer.forward(&x)?;
            let rows = if scatter { tokens / ranks } else { tokens };
            assert_eq!(y.to_vec()?, vec![14.0; rows], "{mode:?} {overlap}");
            let placement = if scatter { Placement::Rows } else { Placement::Replicated };
            layer.backward(saved, &group.tensor(&vec![1.0; rows], &[rows, 1], placement)?)?;
            assert_eq!(layer.bias_grad()?.unwrap().to_vec()?, [tokens as f32], "{mode:?} {overlap}");
            Ok(())
        });
    }
}

/// nanotron#46, #172: every rank gets the same input gradient.
#[test]
fn each_rank_gets_its_own_features_of_the_row_input_gradient() {
    for overlap in OVERLAPS {
        let dx = run(2, |group| {
            let layer = TensorParallelRowLinear::builder(2, 1)
                .mode(LinearMode::ReduceScatter)
                .overlap(overlap)
                .from_full(group, &[1.0f32, 2.0], None)?;
            let (_, saved) = layer.forward(&group.tensor(&[1.0, 1.0], &[2, 1], Placement::Features)?)?;
            let dy = group.tensor(&[[1.0, 10.0][group.rank()]], &[1, 1], Placement::Rows)?;
            layer.backward(saved, &dy)?.to_vec()
        });
        assert_eq!(dx, [[1.0, 10.0], [2.0, 20.0]], "{overlap}");
    }
}

/// TransformerEngine#530: features are gathered along the rows.
#[test]
fn the_features_of_two_ranks_belong_side_by_side() {
    for (mode, overlap) in cases() {
        // Weight rows that copy: y_r is x's first column on rank 0 and its second on rank 1, [[1],[2]] and [[3],[4]].
        let parts = run(2, |group| {
            let layer = TensorParallelColumnLinear::builder(2, 2).mode(mode).overlap(overlap).from_full(
                group,
                &[1.0f32, 0.0, 0.0, 1.0],
                None,
            )?;
            let x = match mode {
                LinearMode::AllReduce => group.tensor(&[1.0, 3.0, 2.0, 4.0], &[2, 2], Placement::Replicated)?,
                LinearMode::ReduceScatter => {
                    group.tensor(&[[1.0, 3.0], [2.0, 4.0]][group.rank()], &[1, 2], Placement::Rows)?
                }
            };
            let y = layer.forward(&x)?.0;
            // A row layer with the identity brings them together again.
            let row = TensorParallelRowLinear::builder(2, 2).mode(LinearMode::AllReduce).overlap(overlap).from_full(
                group,
                &[1.0f32, 0.0, 0.0, 1.0],
                None,
            )?;
            Ok((y.to_vec()?, row.forward(&y)?.0.to_vec()?))
        });
        assert_eq!([&parts[0].0[..], &parts[1].0[..]], [[1.0, 2.0], [3.0, 4.0]], "{mode:?} {overlap}");
        assert_eq!(parts[0].1, [1.0, 3.0, 2.0, 4.0], "{mode:?} {overlap}");
    }
}

/// TransformerEngine#1616: weight gradients differ with overlap on.
#[test]
fn weight_gradients_do_not_depend_on_overlap_or_chunks() {
    let overlaps = [
        Overlap::Blocking,
        Overlap::Async,
        Overlap::Pipelined { chunks: 1 },
        Overlap::Pipelined { chunks: 2 },
        Overlap::Pipelined { chunks: 4 },
    ];
    for mode in MODES {
        let gradients = overlaps.map(|overlap| {
            run(2, |group| {
                let scatter = mode == LinearMode::ReduceScatter;
                let values = |len: usize, salt: usize| -> Vec<f32> {
                    (0..len).map(|i| ((i * 7 + salt) % 17) as f32 - 8.0).collect()
                };
                let (rows, placement) = if scatter { (6, Placement::Rows) } else { (12, Placement::Replicated) };
                let salt = if scatter { group.rank() * 5 } else { 0 };
                let outer = group.tensor(&values(rows * 4, salt), &[rows, 4], placement)?;
                let inner = group.tensor(&values(12 * 3, group.rank()), &[12, 3], Placement::Features)?;
                let column =
                    TensorParallelColumnLinear::builder(4, 6).mode(mode).overlap(overlap).seed(1).build(group)?;
                let row = TensorParallelRowLinear::builder(6, 4).mode(mode).overlap(overlap).seed(1).build(group)?;
                for _ in 0..3 {
                    let (_, saved) = column.forward(&outer)?;
                    column.backward(saved, &inner)?;
                    let (_, saved) = row.forward(&inner)?;
                    row.backward(saved, &outer)?;
                }
                Ok((column.weight_grad()?.to_vec()?, row.weight_grad()?.to_vec()?))
            })
        });
        for (gradient, overlap) in gradients.iter().zip(overlaps) {
            assert_eq!(gradient, &gradients[0], "{mode:?} {overlap}");
        }
    }
}

/// pytorch#153595: a reduce-scatter along the second dimension is wrong.
#[test]
fn a_sum_is_scattered_along_the_second_dimension_by_scattering_its_transpose() {
    // The collective scatters the first dimension, as the layers do; the second is scattered by transposing.
    let parts = run(2, |group| {
        let summand = [[1.0f32, 3.0, 2.0, 4.0], [10.0, 30.0, 20.0, 40.0]][group.rank()];
        group.reduce_scatter(&group.tensor(&summand, &[2, 2], Placement::Partial)?)?.wait()?.to_vec()
    });
    assert_eq!(parts, [[11.0, 33.0], [22.0, 44.0]]);
}

/// mistral.rs#1223, TransformerEngine#409, nccl#829: stuck for ever at the start or in a collective.
#[test]
fn a_rank_that_dies_or_never_starts_ends_the_others_waits() {
    let deadline = std::time::Duration::from_millis(400);
    for (mode, overlap) in cases() {
        for dies in [true, false] {
            let world = LocalWorld::new(4).unwrap().with_threads(1).with_deadline(deadline);
            let begun = std::time::Instant::now();
            let outcomes = world.run_all(|group| {
                if group.rank() == 3 {
                    if dies {
                        std::panic::resume_unwind(Box::new("killed"));
                    }
                    std::thread::sleep(2 * deadline);
                    return Ok(());
                }
                let layer = TensorParallelRowLinear::<f32>::builder(4, 4).mode(mode).overlap(overlap).build(group)?;
                layer.forward(&group.tensor(&[1.0; 8], &[8, 1], Placement::Features)?)?;
                Ok(())
            });
            assert!(begun.elapsed() < deadline + std::time::Duration::from_secs(1));
            for outcome in &outcomes[..3] {
                let text = outcome.as_ref().unwrap_err().to_string();
                assert!(text.contains("rank 3"), "{mode:?} {overlap}: {text}");
                let operation = if mode == LinearMode::AllReduce { "all_reduce" } else { "reduce_scatter" };
                assert!(text.contains(operation), "{mode:?} {overlap}: {text}");
            }
        }
    }
}

/// vllm#33088: an average where a sum was meant.
#[test]
fn reductions_sum() {
    for world in [LocalWorld::new(4).unwrap(), LocalWorld::new(4).unwrap().with_link(Link::gbit(1.0, 1.0)).unwrap()] {
        let sums = world
            .run(|group| {
                let value = group.rank() as f32 + 1.0;
                let whole = group.tensor(&[value; 8], &[8, 1], Placement::Partial)?;
                Ok((group.all_reduce(&whole)?.wait()?.to_vec()?, group.reduce_scatter(&whole)?.wait()?.to_vec()?))
            })
            .unwrap();
        assert!(sums.iter().all(|(all, own)| all == &[10.0; 8] && own == &[10.0; 2]), "{sums:?}");
    }
}
