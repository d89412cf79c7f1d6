//! The layers on CUDA devices: every overlap, mode and dtype over both communicators equals the dense result bit for bit,
//! on integers. Needs CUDA devices, real or simulated; without one it says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::time::{Duration, Instant};

use async_tensor_parallel::{
    Float, Group, LinearMode, LocalWorld, NcclConfig, NcclWorld, Overlap, Placement, Reduction, Result,
    TensorParallelColumnLinear, TensorParallelRowLinear,
};
use common::cuda::{Kind, World, devices};
use common::{Data, LAYERS, Layer, MODES, OVERLAPS, Seen, Spec, assert_close, dense, integer, real, run_rank};
use half::{bf16, f16};

/// `(leading, middle, in_features, out_features, chunks of the sharded dimension)`.
type Size = (usize, &'static [usize], usize, usize, Vec<usize>);

/// Specs of one world size: sizes that fill no tile, one row a rank, four dimensions, fused weights.
fn specs(world_size: usize) -> Vec<Spec> {
    let n = world_size;
    let sizes: [Size; 3] =
        [(n, &[], n, n, vec![]), (3 * n, &[], 5 * n, 3 * n, vec![]), (n, &[2, 3], 4 * n, 4 * n, vec![3 * n, n])];
    let mut specs = Vec::new();
    for (leading, middle, in_features, out_features, chunks) in sizes {
        for (layer, mode) in LAYERS.into_iter().flat_map(|layer| MODES.map(|mode| (layer, mode))) {
            for (index, overlap) in OVERLAPS.into_iter().enumerate() {
                // Each overlap meets both, over the sizes and modes.
                let flag = (index + middle.len() + usize::from(mode == LinearMode::AllReduce)) % 2 == 0;
                specs.push(Spec {
                    layer,
                    mode,
                    overlap,
                    world_size,
                    leading,
                    middle: middle.to_vec(),
                    in_features,
                    out_features,
                    bias: flag,
                    recompute: flag,
                    chunks: chunks.clone(),
                });
            }
        }
    }
    specs
}

/// Three micro-batches with the same weight: gradients must add up.
fn micro_batches(spec: &Spec, value: impl Fn(usize, usize, usize) -> f64) -> Vec<Data> {
    let first = Data::new(spec, |which, index| value(1, which, index));
    let more = |seed| Data {
        w: first.w.clone(),
        b: first.b.clone(),
        ..Data::new(spec, |which, index| value(seed, which, index))
    };
    vec![first.clone(), more(2), more(3)]
}

/// Runs all specs one after another in one world: their communications follow each other without a pause.
fn run_all<T: Float>(group: &Group, cases: &[(Spec, Vec<Data>)]) -> Result<Vec<Vec<Seen>>> {
    cases.iter().map(|(spec, steps)| run_rank::<T>(group, spec, steps)).collect()
}

fn all_exact<T: Float>() {
    let (count, mut checked) = (devices().min(6), 0);
    for world_size in 1..=count {
        let cases: Vec<_> =
            specs(world_size).into_iter().map(|spec| (spec.clone(), micro_batches(&spec, integer))).collect();
        for kind in Kind::ALL {
            let got = World::new(kind, world_size).run(|group| run_all::<T>(group, &cases)).unwrap();
            for (rank, got) in got.iter().enumerate() {
                for ((spec, steps), got) in cases.iter().zip(got) {
                    for (step, (got, want)) in got.iter().zip(dense(spec, steps, rank)).enumerate() {
                        let context = format!("{kind:?} {spec:?} rank {rank} step {step} {:?}", T::DTYPE);
                        assert_close(got, &want, 0.0, &context);
                        checked += 1;
                    }
                }
            }
        }
    }
    // 48 specs of 3 steps on every rank of every world, twice: a test that silently skipped would show here.
    assert_eq!(checked, count * (count + 1) / 2 * 48 * 3 * 2);
}

#[test]
fn f32_is_exact() {
    all_exact::<f32>();
}

#[test]
fn f64_is_exact() {
    all_exact::<f64>();
}

#[test]
fn bf16_is_exact() {
    all_exact::<bf16>();
}

#[test]
fn f16_is_exact() {
    all_exact::<f16>();
}

/// Random values: close to the dense result, and the same bits in every run and over both communicators.
#[test]
fn random_values_are_close_and_repeatable() {
    let world_size = devices().min(4);
    if world_size == 0 {
        return;
    }
    let cases: Vec<_> = specs(world_size)
        .into_iter()
        .map(|spec| {
            let steps = micro_batches(&spec, real).into_iter().map(Data::rounded::<f32>).collect();
            (spec, steps)
        })
        .collect();
    let run = |kind| World::new(kind, world_size).run(|group| run_all::<f32>(group, &cases)).unwrap();
    let got = run(Kind::Nccl);
    assert_eq!(got, run(Kind::Nccl), "a second run");
    assert_eq!(got, run(Kind::Peer), "the other communicator");
    for (rank, got) in got.iter().enumerate() {
        for ((spec, steps), got) in cases.iter().zip(got) {
            for (got, want) in got.iter().zip(dense(spec, steps, rank)) {
                assert_close(got, &want, 5e-6, &format!("{spec:?}"));
            }
        }
    }
}

/// NCCL's own reductions under every overlap: exact on integers as well.
#[test]
fn native_reductions_are_exact_on_integers() {
    for world_size in 1..=devices().min(4) {
        let mut config = NcclConfig::default();
        config.reduction = Reduction::Native;
        config.whole_gathers = true;
        let cases: Vec<_> =
            specs(world_size).into_iter().map(|spec| (spec.clone(), micro_batches(&spec, integer))).collect();
        let world = NcclWorld::new(world_size).unwrap().with_config(config);
        let got = world.run(|group| run_all::<bf16>(group, &cases)).unwrap();
        for (rank, got) in got.iter().enumerate() {
            for ((spec, steps), got) in cases.iter().zip(got) {
                for (got, want) in got.iter().zip(dense(spec, steps, rank)) {
                    assert_close(got, &want, 0.0, &format!("{spec:?} rank {rank}"));
                }
            }
        }
    }
}

/// One step of a pair of layers whose every result depends on every rank: what came out, as bits.
fn step(
    group: &Group,
    (column, row): &(TensorParallelColumnLinear<f32>, TensorParallelRowLinear<f32>),
    rows: usize,
    seed: usize,
    mode: LinearMode,
) -> Result<[async_tensor_parallel::Tensor<f32>; 2]> {
    let scatter = mode == LinearMode::ReduceScatter;
    let placement = if scatter { Placement::Rows } else { Placement::Replicated };
    // Scaled by rank where ranks hold different rows: a shard in the wrong place shows.
    let scale = if scatter { 0.01 * (group.rank() + 1) as f64 } else { 0.01 };
    let draw: Vec<f32> = (0..rows * 12).map(|index| (scale * real(seed, 0, index)) as f32).collect();
    let x = group.tensor(&draw, &[rows, 12], placement)?;
    let (hidden, saved_column) = column.forward(&x)?;
    let (y, saved_row) = row.forward(&hidden)?;
    drop(hidden);
    let dx = column.backward(saved_column, &row.backward(saved_row, &y)?)?;
    Ok([y, dx])
}

/// Many steps launched back to back without a look at their results, then some that are looked at, of random sizes: what
/// buffers are reused too early, or read too early, shows.
fn stress(group: &Group, mode: LinearMode, overlap: Overlap) -> Result<Vec<Vec<f32>>> {
    let column = TensorParallelColumnLinear::<f32>::builder(12, 24)
        .mode(mode)
        .overlap(overlap)
        .bias(true)
        .seed(3)
        .build(group)?;
    let row =
        TensorParallelRowLinear::<f32>::builder(24, 12).mode(mode).overlap(overlap).bias(true).seed(4).build(group)?;
    let layers = (column, row);
    let size = |index: usize| 1 + (index * 7919 + 13) % 17;
    for index in 0..40 {
        step(group, &layers, size(index), index, mode)?;
    }
    let mut seen = Vec::new();
    for index in 40..50 {
        for tensor in step(group, &layers, size(index), index, mode)? {
            seen.push(tensor.to_vec()?);
        }
    }
    for grad in [layers.0.weight_grad()?, layers.1.weight_grad()?] {
        seen.push(grad.to_vec()?);
    }
    Ok(seen)
}

#[test]
fn back_to_back_steps_do_not_meet() {
    let world_size = [4, 3, 2, 1].into_iter().find(|n| *n <= devices());
    let Some(world_size) = world_size else { return };
    for mode in MODES {
        for overlap in OVERLAPS {
            let want = LocalWorld::new(world_size).unwrap().run(|group| stress(group, mode, overlap)).unwrap();
            for kind in Kind::ALL {
                let got = World::new(kind, world_size).run(|group| stress(group, mode, overlap)).unwrap();
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert_eq!(got.len(), want.len());
                    let largest = want.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                    for (got, want) in got.iter().zip(want) {
                        let close = (got - want).abs() <= 1e-5 * largest;
                        assert!(close, "{kind:?} {mode:?} {overlap:?}: {got}, wanted {want}");
                    }
                }
            }
        }
    }
}

/// After a few steps everything is reused.
#[test]
fn the_steady_state_allocates_nothing_on_the_device() {
    let world_size = devices().min(3);
    if world_size == 0 {
        return;
    }
    for (kind, mode) in Kind::ALL.into_iter().flat_map(|kind| MODES.map(|mode| (kind, mode))) {
        for overlap in OVERLAPS {
            let outcome = World::new(kind, world_size).run(|group| {
                let builder = TensorParallelColumnLinear::<f32>::builder(12, 24).mode(mode).overlap(overlap);
                let column = builder.bias(true).seed(3).build(group)?;
                let builder = TensorParallelRowLinear::<f32>::builder(24, 12).mode(mode).overlap(overlap);
                let layers = (column, builder.bias(true).seed(4).build(group)?);
                for index in 0..4 {
                    step(group, &layers, 5, index, mode)?;
                }
                let before = group.device().memory_bytes();
                for index in 0..20 {
                    step(group, &layers, 5, index, mode)?;
                }
                Ok((before, group.device().memory_bytes()))
            });
            for (before, after) in outcome.unwrap() {
                assert!(before > 0);
                assert_eq!(before, after, "{kind:?} {mode:?} {overlap:?}");
            }
        }
    }
}

/// A rank that stops before a layer's forward or between its passes, and one with other rows: every survivor's error names
/// it, within the deadline, and the process goes on.
#[test]
fn faults_end_in_errors() {
    let world_size = devices().min(3);
    if world_size < 2 {
        return;
    }
    for kind in Kind::ALL {
        for overlap in OVERLAPS {
            for layer in LAYERS {
                for fault in ["missing", "backward", "rows"] {
                    let begun = Instant::now();
                    let world = World::new(kind, world_size).with_deadline(Duration::from_secs(60));
                    let outcomes = world.run_all(|group| fault_in_layer(group, layer, overlap, fault));
                    let context = format!("{kind:?} {overlap:?} {layer:?} {fault}: {outcomes:?}");
                    assert!(begun.elapsed() < Duration::from_secs(30), "{context}");
                    for (rank, outcome) in outcomes.iter().enumerate() {
                        match (fault, rank) {
                            // Whoever meets rank 1 says so; who does not is told.
                            ("rows", _) => {
                                let text = outcome.as_ref().unwrap_err().to_string();
                                assert!(text.contains("rank 1") && text.contains("called"), "{context}");
                            }
                            (_, 1) => assert!(outcome.is_ok(), "{context}"),
                            _ => {
                                let text = outcome.as_ref().unwrap_err().to_string();
                                assert!(text.contains("rank 1 is lost"), "{context}");
                            }
                        }
                    }
                }
            }
        }
        let spec = specs(world_size).remove(0);
        let steps = micro_batches(&spec, integer);
        let got = World::new(kind, world_size).run(|group| run_rank::<f32>(group, &spec, &steps)).unwrap();
        assert_close(&got[0][2], &dense(&spec, &steps, 0)[2], 0.0, "after the faults");
    }
}

fn fault_in_layer(group: &Group, layer: Layer, overlap: Overlap, fault: &str) -> Result<Vec<f32>> {
    let n = group.world_size();
    macro_rules! drive {
        ($layer:ident, $placement:expr, $out:expr, $dims:expr, $out_dims:expr) => {{
            let layer = $layer::<f32>::builder(2 * n, 2 * n)
                .mode(LinearMode::ReduceScatter)
                .overlap(overlap)
                .seed(1)
                .build(group)?;
            let rows = if fault == "rows" && group.rank() == 1 { 2 * n } else { n };
            let dims = $dims(rows);
            let x = group.tensor(&vec![1f32; dims.iter().product()], &dims, $placement)?;
            if fault == "missing" && group.rank() == 1 {
                return Ok(vec![]);
            }
            let (y, saved) = layer.forward(&x)?;
            y.to_vec()?;
            if fault == "backward" && group.rank() == 1 {
                return Ok(vec![]);
            }
            let dims: [usize; 2] = $out_dims(rows);
            let dy = group.tensor(&vec![1f32; dims.iter().product()], &dims, $out)?;
            layer.backward(saved, &dy)?.to_vec()
        }};
    }
    match layer {
        Layer::Column => {
            drive!(TensorParallelColumnLinear, Placement::Rows, Placement::Features, |rows| [rows, 2 * n], |rows| [
                rows * n,
                2
            ])
        }
        Layer::Row => drive!(TensorParallelRowLinear, Placement::Features, Placement::Rows, |rows| [rows, 2], |rows| [
            rows / n,
            2 * n
        ]),
    }
}
