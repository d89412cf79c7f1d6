//! Bad input is a clear error that names the values, changes nothing, and leaves the layer and the group usable.

#![allow(missing_docs)]

mod common;

use async_tensor_parallel::{
    Error, Group, LinearMode, LocalWorld, Overlap, Placement, Result, Shape, Tensor, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};
use common::{MODES, OVERLAPS};

type Column = TensorParallelColumnLinear<f32>;
type Row = TensorParallelRowLinear<f32>;

fn on_two<R: Send>(test: impl Fn(&Group) -> Result<R> + Sync) -> Vec<R> {
    LocalWorld::new(2).unwrap().with_threads(1).run(test).unwrap()
}

/// The error, which must be of the given kind and mention all of `words`.
#[track_caller]
fn refused<R>(result: Result<R>, kind: fn(&Error) -> bool, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, wanted an error with {words:?}") };
    let text = error.to_string();
    assert!(kind(&error), "{error:?}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not mention {word:?}");
    }
}

fn indivisible(error: &Error) -> bool {
    matches!(error, Error::NotDivisible { .. })
}
fn argument(error: &Error) -> bool {
    matches!(error, Error::Argument { .. })
}
fn shape(error: &Error) -> bool {
    matches!(error, Error::Shape { .. })
}
fn placement(error: &Error) -> bool {
    matches!(error, Error::Placement { .. })
}

fn filled(group: &Group, dims: &[usize], placement: Placement) -> Tensor<f32> {
    group.tensor(&vec![1.0; dims.iter().product()], dims, placement).unwrap()
}

#[test]
fn features_that_the_world_size_does_not_divide() {
    LocalWorld::new(3)
        .unwrap()
        .run(|group| {
            refused(Column::builder(6, 7).build(group), indivisible, &["out_features", "7", "3"]);
            refused(Row::builder(7, 6).build(group), indivisible, &["in_features", "7", "3"]);
            refused(Column::builder(6, 0).build(group), argument, &["out_features", "0"]);
            refused(Row::builder(0, 6).build(group), argument, &["in_features", "0"]);
            // The other dimension is whole on every rank.
            Column::builder(7, 6).build(group)?;
            Row::builder(6, 7).build(group)?;
            refused(Column::builder(usize::MAX, 6).build(group), |_| true, &["18446744073709551615"]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn contiguous_chunks_that_do_not_fit() {
    on_two(|group| {
        let build = |chunks: &[usize]| Column::builder(4, 8).contiguous_chunks(chunks).build(group);
        refused(build(&[4, 3]), argument, &["[4, 3]", "8"]);
        refused(build(&[5, 3]), |error| indivisible(error) || argument(error), &["5", "2"]);
        refused(build(&[usize::MAX, 9]), |_| true, &[]);
        build(&[8, 0])?;
        build(&[2, 6])?;
        Ok(())
    });
}

#[test]
fn weights_and_biases_of_the_wrong_length() {
    on_two(|group| {
        let bias = || Column::builder(3, 4).bias(true);
        refused(Column::builder(3, 4).from_full(group, &[1.0; 11], None), shape, &["weight", "11", "4, 3"]);
        refused(Column::builder(3, 4).from_shard(group, &[1.0; 12], None), shape, &["weight", "12", "2, 3"]);
        refused(bias().from_full(group, &[1.0; 12], Some(&[1.0; 3])), shape, &["bias", "3", "4"]);
        refused(bias().from_full(group, &[1.0; 12], None), argument, &["bias", "no bias"]);
        refused(Column::builder(3, 4).from_full(group, &[1.0; 12], Some(&[1.0; 4])), argument, &["a bias", "no bias"]);
        refused(bias().from_shard(group, &[1.0; 6], Some(&[1.0; 4])), shape, &["bias", "4", "2"]);
        let row = || Row::builder(4, 3).bias(true);
        refused(row().from_shard(group, &[1.0; 6], Some(&[1.0; 2])), shape, &["bias", "2", "3"]);
        refused(row().from_shard(group, &[1.0; 12], Some(&[1.0; 3])), shape, &["weight", "12", "3, 2"]);
        Ok(())
    });
}

#[test]
fn tensors_whose_placement_or_shape_is_not_the_modes() {
    for overlap in OVERLAPS {
        on_two(|group| {
            use Placement::{Features, Partial, Replicated, Rows};
            let column = |mode| Column::builder(3, 4).mode(mode).overlap(overlap).bias(true).build(group);
            let row = |mode| Row::builder(4, 3).mode(mode).overlap(overlap).bias(true).build(group);
            for (mode, right) in [(LinearMode::AllReduce, Replicated), (LinearMode::ReduceScatter, Rows)] {
                let rows = if right == Rows { 2 } else { 4 };
                let (column, row) = (column(mode)?, row(mode)?);
                let right_name = format!("{right:?}");
                for wrong in [Replicated, Rows, Features, Partial] {
                    if wrong != right {
                        let wrong_name = format!("{wrong:?}");
                        let words = [wrong_name.as_str(), right_name.as_str(), "input"];
                        refused(column.forward(&filled(group, &[rows, 3], wrong)), placement, &words);
                    }
                    if wrong != Features {
                        let wrong_name = format!("{wrong:?}");
                        let words = [wrong_name.as_str(), "Features", "input"];
                        refused(row.forward(&filled(group, &[4, 2], wrong)), placement, &words);
                    }
                }
                refused(column.forward(&filled(group, &[rows, 4], right)), shape, &["input", "4", "3"]);
                refused(row.forward(&filled(group, &[4, 4], Features)), shape, &["input", "4", "2"]);

                // Backward: nothing is added to any gradient by a call that is refused.
                let (_, saved) = column.forward(&filled(group, &[rows, 3], right))?;
                let words = ["grad_output", "Replicated", "Features"];
                refused(column.backward(&saved, &filled(group, &[4, 2], Replicated)), placement, &words);
                refused(
                    column.backward(&saved, &filled(group, &[2, 2], Features)),
                    shape,
                    &["grad_output", "2, 2", "4, 2"],
                );
                refused(column.backward(&saved, &filled(group, &[4, 3], Features)), shape, &["grad_output", "3", "2"]);
                assert_eq!(column.weight_grad()?.to_vec()?, vec![0.0; 6]);
                assert_eq!(column.bias_grad()?.unwrap().to_vec()?, vec![0.0; 2]);
                let (_, others) = row.forward(&filled(group, &[4, 2], Features))?;
                refused(
                    column.backward(&others, &filled(group, &[4, 2], Features)),
                    |e| matches!(e, Error::Saved { .. }),
                    &["layer"],
                );
                refused(
                    row.backward(&saved, &filled(group, &[rows, 3], right)),
                    |e| matches!(e, Error::Saved { .. }),
                    &["layer"],
                );
                refused(
                    row.backward(&others, &filled(group, &[rows, 3], Partial)),
                    placement,
                    &["Partial", &right_name],
                );
                refused(row.backward(&others, &filled(group, &[rows + 1, 3], right)), shape, &["grad_output"]);
                assert_eq!(row.weight_grad()?.to_vec()?, vec![0.0; 6]);

                // And the layers still work.
                column.backward(&saved, &filled(group, &[4, 2], Features))?;
                row.backward(&others, &filled(group, &[rows, 3], right))?;
                assert_eq!(column.weight_grad()?.to_vec()?, vec![4.0; 6]);
                assert_eq!(row.bias_grad()?.unwrap().to_vec()?, vec![4.0; 3]);
            }
            Ok(())
        });
    }
}

#[test]
fn rows_that_differ_between_ranks() {
    for overlap in OVERLAPS {
        for odd in [0, 1, 2] {
            let outcomes = LocalWorld::new(3).unwrap().with_threads(1).run_all(|group| {
                let layer = Column::builder(2, 3).mode(LinearMode::ReduceScatter).overlap(overlap).build(group)?;
                let rows = if group.rank() == odd { 3 } else { 2 };
                layer.forward(&filled(group, &[rows, 2], Placement::Rows)).map(drop)
            });
            let errors: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap_err()).collect();
            let named =
                |error: &Error| matches!(error, Error::Mismatch { rank, peer, .. } if *rank == odd || *peer == odd);
            assert!(errors.iter().any(named), "{overlap}: {errors:?}");
            for error in errors {
                let text = error.to_string();
                assert!(text.contains(&format!("rank {odd}")), "{overlap}: {text}");
                assert!(text.contains("18 F32") && text.contains("12 F32"), "{overlap}: {text}");
            }
        }
    }
}

#[test]
fn rows_that_cannot_be_scattered() {
    for overlap in OVERLAPS {
        LocalWorld::new(3)
            .unwrap()
            .run(|group| {
                let layer = Row::builder(3, 2).mode(LinearMode::ReduceScatter).overlap(overlap).build(group)?;
                let x = filled(group, &[4, 1], Placement::Features);
                refused(layer.forward(&x), indivisible, &["4", "3"]);
                // A layer that can, says so.
                let (y, _) = layer.forward_uneven(&x)?;
                assert_eq!(y.shape()[0], [2, 2, 0][group.rank()]);
                let column = Column::builder(2, 3).mode(LinearMode::ReduceScatter).overlap(overlap).build(group)?;
                let wrong = filled(group, &[2, 2], Placement::Rows);
                if group.rank() < 2 {
                    column.forward_uneven(&wrong, 4)?;
                } else {
                    refused(column.forward_uneven(&wrong, 4), shape, &["input", "2, 2", "4"]);
                    column.forward_uneven(&filled(group, &[0, 2], Placement::Rows), 4)?;
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn no_rows_are_legal() {
    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
        on_two(|group| {
            let outer = if mode == LinearMode::AllReduce { Placement::Replicated } else { Placement::Rows };
            for dims in [vec![0, 3], vec![0, 5, 3], vec![2, 0, 3]] {
                let last = |features: usize| [&dims[..dims.len() - 1], &[features]].concat();
                let layer = Column::builder(3, 4).mode(mode).overlap(overlap).bias(true).build(group)?;
                let (y, saved) = layer.forward(&filled(group, &dims, outer))?;
                assert_eq!(y.to_vec()?, Vec::<f32>::new());
                let dy = group.tensor(&[], y.shape(), Placement::Features)?;
                let dx = layer.backward(saved, &dy)?;
                assert_eq!(dx.shape()[..], dims[..]);
                assert_eq!(layer.weight_grad()?.to_vec()?, vec![0.0; 6]);
                assert_eq!(layer.bias_grad()?.unwrap().to_vec()?, vec![0.0; 2]);

                let layer = Row::builder(4, 3).mode(mode).overlap(overlap).bias(true).build(group)?;
                let (y, saved) = layer.forward(&filled(group, &last(2), Placement::Features))?;
                assert_eq!(y.to_vec()?, Vec::<f32>::new());
                let dy = group.tensor(&[], y.shape(), outer)?;
                assert_eq!(layer.backward(saved, &dy)?.shape()[..], last(2)[..]);
                assert_eq!(layer.bias_grad()?.unwrap().to_vec()?, vec![0.0; 3]);
            }
            Ok(())
        });
    }
}

#[test]
fn shapes_and_worlds_that_make_no_sense() {
    refused(Shape::new(&[1; 9]), |_| true, &["9"]);
    refused(Shape::new(&[usize::MAX, 2]), |_| true, &[]);
    refused(LocalWorld::new(0), argument, &["0"]);
    refused(LocalWorld::new(1 << 40), argument, &["1099511627776"]);
    let link = |bandwidth| {
        let latency = std::time::Duration::ZERO;
        LocalWorld::new(2).unwrap().with_link(async_tensor_parallel::Link { bandwidth, latency })
    };
    for bandwidth in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(link(bandwidth), argument, &["bandwidth"]);
    }
    on_two(|group| {
        refused(group.tensor(&[1.0f32; 5], &[2, 3], Placement::Rows), shape, &["5", "2, 3"]);
        let tensor = filled(group, &[2, 3], Placement::Rows);
        refused(group.all_reduce(&tensor), placement, &["Rows", "Partial"]);
        refused(group.reduce_scatter(&tensor), placement, &["Rows", "Partial"]);
        let replicated = filled(group, &[2, 3], Placement::Replicated);
        refused(group.all_gather(&replicated), placement, &["Replicated", "Rows"]);
        refused(group.reduce_scatter(&filled(group, &[3, 2], Placement::Partial)), indivisible, &["3", "2"]);
        refused(group.broadcast(7, &replicated), argument, &["7", "2"]);
        refused(group.send(group.rank(), &replicated), argument, &["receiver"]);
        refused(group.receive::<f32>(9, &[1], Placement::Rows), argument, &["9"]);
        for text in ["", "pipeline", "pipelined:", "pipelined:-1", "async:2"] {
            refused(text.parse::<Overlap>(), argument, &["overlap", "pipelined"]);
        }
        for overlap in OVERLAPS {
            assert_eq!(overlap.to_string().parse::<Overlap>()?, overlap);
        }
        Ok(())
    });
}

/// Links whose times no clock could hold.
#[test]
fn links_that_are_none_are_refused() {
    let link =
        |bandwidth, latency| LocalWorld::new(2).unwrap().with_link(async_tensor_parallel::Link { bandwidth, latency });
    use std::time::Duration;
    for bandwidth in [0.0, -1.0, 1e-20, f64::NAN, f64::INFINITY] {
        assert!(matches!(link(bandwidth, Duration::ZERO), Err(Error::Argument { .. })), "{bandwidth}");
    }
    assert!(matches!(link(1e9, Duration::MAX), Err(Error::Argument { .. })));
    // The slowest that there is: the wait ends by its deadline.
    let world = link(1.0, Duration::from_secs(86_400)).unwrap().with_deadline(Duration::from_millis(200));
    let outcome = world.run(|group| {
        let shard = group.tensor(&[1f32; 1024], &[1, 1024], Placement::Rows)?;
        group.all_gather(&shard)?.wait().map(drop)
    });
    assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
}
