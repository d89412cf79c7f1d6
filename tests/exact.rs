//! Every mode × overlap × dtype × world size equals the dense result bit for bit, on integers: schedules have nowhere to
//! hide.

mod common;

use async_tensor_parallel::{Float, LocalWorld, Overlap};
use common::{Data, LAYERS, Layer, MODES, OVERLAPS, Spec, assert_close, dense, integer, real, run};
use half::{bf16, f16};

/// All specs of one world size whose sizes are multiples of it.
fn specs(world_size: usize) -> Vec<Spec> {
    let n = world_size;
    // (leading, middle, in, out, chunks of the sharded dimension): odd sizes, one row a rank, three to five dimensions.
    type Sizes<'a> = (usize, &'a [usize], usize, usize, Vec<usize>);
    let sizes: [Sizes<'_>; 4] = [
        (n, &[], n, n, vec![]),
        (3 * n, &[], 5 * n, 3 * n, vec![]),
        (n, &[2, 3], 4 * n, 4 * n, vec![3 * n, n]),
        (2 * n, &[1, 2, 1], 3 * n, 7 * n, vec![]),
    ];
    let mut specs = Vec::new();
    for (leading, middle, in_features, out_features, chunks) in sizes {
        for layer in LAYERS {
            for mode in MODES {
                for overlap in OVERLAPS {
                    for (bias, recompute) in [(true, true), (false, false)] {
                        let (middle, chunks) = (middle.to_vec(), chunks.clone());
                        specs.push(Spec {
                            layer,
                            mode,
                            overlap,
                            world_size,
                            leading,
                            middle,
                            in_features,
                            out_features,
                            bias,
                            recompute,
                            chunks,
                        });
                    }
                }
            }
        }
    }
    specs
}

fn all_exact<T: Float>() {
    let mut checked = 0;
    for world_size in 1..=6 {
        let world = LocalWorld::new(world_size).unwrap().with_threads(1);
        for spec in specs(world_size) {
            // Two micro-batches with the same weight: gradients must add up.
            let first = Data::new(&spec, |which, index| integer(1, which, index));
            let second = Data {
                w: first.w.clone(),
                b: first.b.clone(),
                ..Data::new(&spec, |which, index| integer(2, which, index))
            };
            let steps = [first, second];
            let got = run::<T>(&world, &spec, &steps).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
            for (rank, got) in got.iter().enumerate() {
                for (step, (got, want)) in got.iter().zip(dense(&spec, &steps, rank)).enumerate() {
                    assert_close(got, &want, 0.0, &format!("{spec:?} rank {rank} step {step} {:?}", T::DTYPE));
                    checked += 1;
                }
            }
        }
    }
    // 21 ranks over the six world sizes, 128 specs, 2 steps: a test that silently skipped would show here.
    assert_eq!(checked, 21 * 128 * 2);
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

/// Random values: close to the dense result, the same bits in every run, and between overlaps no further apart than the
/// order of the sums over rows allows.
#[test]
fn random_values_are_close_and_repeatable() {
    for spec in specs(3).into_iter().chain(specs(4)) {
        let world = LocalWorld::new(spec.world_size).unwrap().with_threads(1);
        let steps = [Data::new(&spec, |which, index| real(5, which, index)).rounded::<f32>()];
        let got = run::<f32>(&world, &spec, &steps).unwrap();
        assert_eq!(got, run::<f32>(&world, &spec, &steps).unwrap(), "{spec:?}: a second run");
        for (rank, got) in got.iter().enumerate() {
            assert_close(&got[0], &dense(&spec, &steps, rank)[0], 2e-6, &format!("{spec:?}"));
        }
        let blocking = run::<f32>(&world, &Spec { overlap: Overlap::Blocking, ..spec.clone() }, &steps).unwrap();
        for (got, want) in got.iter().zip(&blocking) {
            assert_close(&got[0], &want[0], 1e-6, &format!("{spec:?}: against Blocking"));
        }
    }
}

/// Values that are not numbers go where a dense layer takes them, and nowhere else.
#[test]
fn nan_and_infinity_pass_through() {
    for layer in LAYERS {
        for mode in MODES {
            for overlap in OVERLAPS {
                let spec = Spec {
                    layer,
                    mode,
                    overlap,
                    world_size: 2,
                    leading: 4,
                    middle: vec![],
                    in_features: 4,
                    out_features: 6,
                    bias: true,
                    recompute: true,
                    chunks: vec![],
                };
                let mut data = Data::new(&spec, |which, index| 1.0 + integer(3, which, index).abs());
                data.x[2] = f64::NAN;
                data.dy[7] = f64::INFINITY;
                let steps = [data];
                let got = run::<f32>(&LocalWorld::new(2).unwrap(), &spec, &steps).unwrap();
                for (rank, got) in got.iter().enumerate() {
                    assert_close(&got[0], &dense(&spec, &steps, rank)[0], 0.0, &format!("{spec:?}"));
                }
            }
        }
    }
}

/// Inputs of one to five dimensions, at world size 1 and beyond, and no rows at all.
#[test]
fn any_number_of_dimensions_and_no_rows() {
    use async_tensor_parallel::{LinearMode, Placement, TensorParallelColumnLinear, TensorParallelRowLinear};
    for world_size in [1, 2, 3] {
        for mode in MODES {
            for overlap in OVERLAPS {
                let outcome = LocalWorld::new(world_size).unwrap().run(|group| {
                    let column = TensorParallelColumnLinear::<f32>::builder(6, 6)
                        .mode(mode)
                        .overlap(overlap)
                        .bias(true)
                        .seed(1)
                        .build(group)?;
                    let row = TensorParallelRowLinear::<f32>::builder(6, 6)
                        .mode(mode)
                        .overlap(overlap)
                        .bias(true)
                        .seed(2)
                        .build(group)?;
                    let placement = if mode == LinearMode::AllReduce { Placement::Replicated } else { Placement::Rows };
                    for dims in [&[6][..], &[2, 6], &[2, 3, 6], &[1, 2, 3, 6], &[2, 1, 1, 2, 6], &[0, 6], &[2, 0, 6]] {
                        let len = dims.iter().product::<usize>();
                        let x = group.tensor(&vec![1f32; len], dims, placement)?;
                        let (hidden, saved_column) = column.forward(&x)?;
                        let (y, saved_row) = row.forward(&hidden)?;
                        if dims.len() > 1 || mode == LinearMode::AllReduce || world_size == 1 {
                            assert_eq!(&**y.shape(), dims, "{mode:?} {overlap:?}");
                        } else {
                            // A vector a rank is a row each.
                            assert_eq!(&**hidden.shape(), [world_size, 6 / world_size]);
                            assert_eq!(&**y.shape(), [1, 6]);
                        }
                        assert_eq!(y.placement(), placement);
                        let dx = column.backward(saved_column, &row.backward(saved_row, &y)?)?;
                        assert_eq!(&**dx.shape(), dims);
                        assert!(dx.to_vec()?.iter().all(|value| value.is_finite()));
                    }
                    assert!(column.weight_grad()?.to_vec()?.iter().all(|value| value.is_finite()));
                    Ok(())
                });
                outcome.unwrap();
            }
        }
    }
}

/// The same seed gives every world size the same whole weights.
#[test]
fn every_world_size_starts_from_the_same_weights() {
    use async_tensor_parallel::{TensorParallelColumnLinear, TensorParallelRowLinear};
    let whole = |world_size: usize| {
        let shards = LocalWorld::new(world_size).unwrap().run(|group| {
            let column = TensorParallelColumnLinear::<f32>::builder(4, 12)
                .bias(true)
                .seed(42)
                .contiguous_chunks(&[6, 6])
                .build(group)?;
            let row = TensorParallelRowLinear::<f32>::builder(12, 4).bias(true).seed(42).build(group)?;
            Ok((
                column.weight().value().to_vec()?,
                column.bias().unwrap().value().to_vec()?,
                row.weight().value().to_vec()?,
                row.bias().unwrap().value().to_vec()?,
            ))
        });
        let shards = shards.unwrap();
        // Put the chunks and columns back where they belong.
        let (per_chunk, per_row) = (6 / world_size, 12 / world_size);
        let column: Vec<f32> = (0..2)
            .flat_map(|chunk| {
                shards.iter().flat_map(move |s| s.0[chunk * per_chunk * 4..(chunk + 1) * per_chunk * 4].to_vec())
            })
            .collect();
        let bias: Vec<f32> = (0..2)
            .flat_map(|chunk| shards.iter().flat_map(move |s| s.1[chunk * per_chunk..(chunk + 1) * per_chunk].to_vec()))
            .collect();
        let row: Vec<f32> = (0..4)
            .flat_map(|r| shards.iter().flat_map(move |s| s.2[r * per_row..(r + 1) * per_row].to_vec()))
            .collect();
        assert!(shards.iter().all(|s| s.3 == shards[0].3));
        (column, bias, row, shards[0].3.clone())
    };
    let one = whole(1);
    assert!(one.0.iter().any(|value| *value != one.0[0]));
    for world_size in [2, 3, 6] {
        assert_eq!(whole(world_size), one);
    }
}

/// A layer of half precision accumulates its gradients in f32: many small steps are not lost.
#[test]
fn main_grad_accumulates_in_f32() {
    let spec = Spec {
        layer: Layer::Column,
        mode: MODES[1],
        overlap: Overlap::Async,
        world_size: 2,
        leading: 2,
        middle: vec![],
        in_features: 1,
        out_features: 2,
        bias: true,
        recompute: true,
        chunks: vec![],
    };
    // 300 steps of gradient 1 in bf16 would stop growing at 256.
    let steps = vec![Data { x: vec![1.0, 0.0], w: vec![1.0, 1.0], b: vec![0.0, 0.0], dy: vec![1.0; 4] }; 300];
    let got = run::<bf16>(&LocalWorld::new(2).unwrap(), &spec, &steps).unwrap();
    assert!(got.iter().all(|rank| rank[299].dw == [300.0] && rank[299].db == [600.0]));
}
