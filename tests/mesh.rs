//! Meshes, gradients over data-parallel ranks, pipeline neighbours, and the differentiable pairs.

#![allow(missing_docs)]

mod common;

use async_tensor_parallel::{
    Combine, CopyToRegion, Error, GatherRows, GradientBuckets, Group, LinearMode, Link, LocalWorld, Mesh, Overlap,
    Placement, ReduceFromRegion, Result, ScatterSum, TensorParallelColumnLinear, TensorParallelRowLinear,
    sum_replicated_gradients,
};
use common::training::{losses, losses_of_one_rank};
use common::{MODES, OVERLAPS, real};

#[test]
fn ranks_are_numbered_with_tp_innermost() {
    LocalWorld::new(12)
        .unwrap()
        .run(|world| {
            let mesh = Mesh::new(world, 2, 3, 2)?;
            let rank = world.rank();
            assert_eq!((mesh.dp_rank(), mesh.pp_rank(), mesh.tp_rank()), (rank / 6, rank / 2 % 3, rank % 2));
            assert_eq!((mesh.dp().world_size(), mesh.pp().world_size(), mesh.tp().world_size()), (2, 3, 2));
            // Who is in which group: sums of 2^rank tell.
            let one = |group: &Group| -> Result<f64> {
                let own = group.tensor(&[(1u64 << rank) as f64], &[1], Placement::Partial)?;
                Ok(group.all_reduce(&own)?.wait()?.to_vec()?[0])
            };
            let bits = |ranks: &[usize]| ranks.iter().map(|rank| (1u64 << rank) as f64).sum::<f64>();
            let (d, p, t) = (rank / 6, rank / 2 % 3, rank % 2);
            assert_eq!(one(mesh.tp())?, bits(&[d * 6 + p * 2, d * 6 + p * 2 + 1]));
            assert_eq!(one(mesh.pp())?, bits(&[d * 6 + t, d * 6 + 2 + t, d * 6 + 4 + t]));
            assert_eq!(one(mesh.dp())?, bits(&[p * 2 + t, 6 + p * 2 + t]));
            Ok(())
        })
        .unwrap();
}

#[test]
fn sizes_that_do_not_fit_or_differ_are_named_on_every_rank() {
    for outcome in LocalWorld::new(4).unwrap().run_all(|world| Mesh::new(world, 2, 1, 3).map(drop)) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("dp 2 × pp 1 × tp 3") && error.contains("4 ranks"), "{error}");
    }
    let differ = |world: &Group| {
        let odd = world.rank() == 2;
        Mesh::new(world, if odd { 1 } else { 2 }, 1, if odd { 4 } else { 2 }).map(drop)
    };
    for outcome in LocalWorld::new(4).unwrap().run_all(differ) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 2") && text.contains("dp 1 × pp 1 × tp 4") && text.contains("tp 2"), "{text}");
    }
}

#[test]
fn neighbours_of_a_pipeline_exchange_activations_and_gradients() {
    LocalWorld::new(3)
        .unwrap()
        .run(|world| {
            let mesh = Mesh::new(world, 1, 3, 1)?;
            let stage = mesh.pp_rank();
            let own = world.tensor(&[1f32], &[1, 1], Placement::Replicated)?;
            let x =
                if stage == 0 { own.clone() } else { mesh.receive_previous(&[1, 1], Placement::Replicated)?.wait()? };
            let value = x.to_vec()?[0] * 10.0 + stage as f32;
            let y = world.tensor(&[value], &[1, 1], Placement::Replicated)?;
            if stage < 2 {
                mesh.send_next(&y)?.wait()?;
            }
            assert_eq!(value, [10.0, 101.0, 1012.0][stage]);
            let grad = if stage == 2 { own } else { mesh.receive_next(&[1, 1], Placement::Replicated)?.wait()? };
            if stage > 0 {
                let back = world.tensor(&[grad.to_vec()?[0] * 2.0], &[1, 1], Placement::Replicated)?;
                mesh.send_previous(&back)?.wait()?;
            }
            assert_eq!(grad.to_vec()?, [[4.0], [2.0], [1.0]][stage]);
            // The ends have no neighbour.
            let refused = if stage == 0 { mesh.send_previous(&y).map(drop) } else { mesh.send_next(&y).map(drop) };
            assert_eq!(matches!(refused, Err(Error::Argument { .. })), stage != 1);
            if stage == 1 {
                // The send above has a partner after all.
                return Ok(());
            }
            if stage == 2 {
                mesh.receive_previous::<f32>(&[1, 1], Placement::Replicated)?.wait()?;
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn tensor_and_data_parallel_training_gives_the_losses_of_one_rank() {
    let want = losses_of_one_rank(20).unwrap();
    assert!(want[19] < 0.7 * want[0], "it learns: {want:?}");
    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
        let world = LocalWorld::new(4).unwrap().with_threads(1);
        for got in world.run(|world| losses(world, 2, 2, mode, overlap, 20)).unwrap() {
            for (step, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(
                    (got - want).abs() <= 1e-5 * want.max(1.0),
                    "{mode:?} {overlap} step {step}: {got}, wanted {want}"
                );
            }
        }
    }
}

#[test]
fn buckets_fill_in_order_and_say_what_is_wrong() {
    LocalWorld::new(3)
        .unwrap()
        .with_link(Link::gbit(1.0, 5.0))
        .unwrap()
        .run(|dp| {
            let alone = dp.split(Some(dp.rank()), 0)?.expect("a group of one");
            let layers: Vec<_> = [4, 2, 8, 1]
                .into_iter()
                .map(|out| TensorParallelColumnLinear::<f32>::builder(2, out).mode(LinearMode::AllReduce).build(&alone))
                .collect::<Result<_>>()?;
            let weights: Vec<_> = layers.iter().map(|layer| layer.weight()).collect();
            // 32, 16, 64 and 8 bytes: three buckets of at most 50.
            let mut buckets = GradientBuckets::new(dp, &weights, 50)?;
            assert_eq!(buckets.buckets(), 3);
            for (step, combine) in [(1, Combine::Sum), (2, Combine::Mean)] {
                let x = alone.tensor(&[dp.rank() as f32 + 1.0, 1.0], &[1, 2], Placement::Replicated)?;
                for layer in &layers {
                    layer.zero_grad();
                    let (y, saved) = layer.forward(&x)?;
                    layer.backward(
                        saved,
                        &alone.tensor(&vec![1.0; y.shape().elements()], y.shape(), Placement::Features)?,
                    )?;
                }
                for (index, weight) in weights.iter().enumerate() {
                    assert!(
                        buckets.finish(&weights, combine).unwrap_err().to_string().contains(&format!("number {index}"))
                    );
                    buckets.ready(index, weight)?;
                    assert!(buckets.ready(index, weight).unwrap_err().to_string().contains("again"));
                }
                assert!(buckets.ready(4, weights[0]).unwrap_err().to_string().contains("number 4"));
                assert!(buckets.finish(&weights[..3], combine).is_err());
                buckets.finish(&weights, combine)?;
                let want = if combine == Combine::Sum { [6.0, 3.0] } else { [2.0, 1.0] };
                for weight in &weights {
                    assert_eq!(weight.grad()?.to_vec()?, want.repeat(weight.value().shape()[0]), "step {step}");
                }
            }
            assert!(buckets.ready(0, weights[1]).unwrap_err().to_string().contains("bytes"));
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_of_replicated_parameters_are_summed() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let alone = group.split(Some(group.rank()), 0)?.expect("a group of one");
            let layer =
                TensorParallelRowLinear::<f32>::builder(1, 2).mode(LinearMode::AllReduce).bias(true).build(&alone)?;
            let x = alone.tensor(&[3.0], &[1, 1], Placement::Features)?;
            let (_, saved) = layer.forward(&x)?;
            let grad = [[1.0, 2.0], [10.0, 20.0]][group.rank()];
            layer.backward(saved, &alone.tensor(&grad, &[1, 2], Placement::Replicated)?)?;
            sum_replicated_gradients(group, &[layer.weight(), layer.bias().expect("it has one")])?;
            assert_eq!(layer.weight_grad()?.to_vec()?, [33.0, 66.0]);
            assert_eq!(layer.bias_grad()?.unwrap().to_vec()?, [11.0, 22.0]);
            Ok(())
        })
        .unwrap();
}

/// ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ over all ranks, where what is the same everywhere counts once.
#[test]
fn pairs_are_adjoint() {
    for n in 1..=5 {
        LocalWorld::new(n)
            .unwrap()
            .run(|group| {
                let rank = group.rank();
                let draw = |seed: usize, len: usize| -> Vec<f64> { (0..len).map(|i| real(seed, 0, i)).collect() };
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let over_ranks = |value: f64| -> Result<f64> {
                    let own = group.tensor(&[value], &[1], Placement::Partial)?;
                    Ok(group.all_reduce(&own)?.wait()?.to_vec()?[0])
                };
                let same = |a: f64, b: f64, what: &str| assert!((a - b).abs() < 1e-12, "{what}: {a} {b}");
                let (whole, own) = (2 * n * 3, 2 * 3);
                let (shared_x, shared_y) = (draw(1, whole), draw(2, whole));
                let (partial_x, partial_y) = (draw(10 + rank, whole), draw(50 + rank, whole));
                let (rows_x, rows_y) = (draw(90 + rank, own), draw(130 + rank, own));
                let tensor = |values: &[f64], placement| group.tensor(values, &[values.len() / 3, 3], placement);

                let copy = CopyToRegion::new(group);
                let ax = copy.forward(&tensor(&shared_x, Placement::Replicated)?).to_vec()?;
                let aty = copy.backward(&tensor(&partial_y, Placement::Partial)?)?.wait()?.to_vec()?;
                same(over_ranks(dot(&ax, &partial_y))?, dot(&shared_x, &aty), "copy");

                let reduce = ReduceFromRegion::new(group);
                let ax = reduce.forward(&tensor(&partial_x, Placement::Partial)?)?.wait()?.to_vec()?;
                let aty = reduce.backward(&tensor(&shared_y, Placement::Replicated)?).to_vec()?;
                same(dot(&ax, &shared_y), over_ranks(dot(&partial_x, &aty))?, "reduce");

                let gather = GatherRows::new(group);
                let ax = gather.forward(&tensor(&rows_x, Placement::Rows)?)?.wait()?.to_vec()?;
                let aty = gather.backward(&tensor(&partial_y, Placement::Partial)?)?.wait()?.to_vec()?;
                same(over_ranks(dot(&ax, &partial_y))?, over_ranks(dot(&rows_x, &aty))?, "gather");

                let scatter = ScatterSum::new(group);
                let ax = scatter.forward(&tensor(&partial_x, Placement::Partial)?)?.wait()?.to_vec()?;
                let aty = scatter.backward(&tensor(&rows_y, Placement::Rows)?)?.wait()?.to_vec()?;
                same(over_ranks(dot(&ax, &rows_y))?, over_ranks(dot(&partial_x, &aty))?, "scatter");
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn overlap_auto_is_exercised_in_training_too() {
    let want = losses_of_one_rank(3).unwrap();
    let world = LocalWorld::new(4).unwrap().with_threads(1);
    let got = world.run(|world| losses(world, 2, 2, LinearMode::ReduceScatter, Overlap::Auto, 3)).unwrap();
    assert!((got[0][2] - want[2]).abs() < 1e-5);
}
