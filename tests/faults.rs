//! Ranks at fault: whatever one rank does, every other one gets an error that names it, within the deadline; nothing hangs, and
//! the process can go on.

#![allow(missing_docs)]

mod common;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use async_tensor_parallel::{
    Blocks, DType, Error, Group, LinearMode, Link, LocalWorld, Overlap, Placement, ReduceOp, Result, ShardLayout,
    TensorParallelColumnLinear, TensorParallelRowLinear,
};
use common::{Layer, MODES, OVERLAPS};

/// Runs `test` in a thread of its own and fails if it takes longer than `seconds`.
fn watched<R: Send + 'static>(seconds: u64, test: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = sender.send(test());
    });
    match receiver.recv_timeout(Duration::from_secs(seconds)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hung for {seconds} s"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

/// A process in which something failed can still compute.
fn still_usable() {
    let sums = LocalWorld::new(3)
        .unwrap()
        .run(|group| {
            let x = group.tensor(&[group.rank() as f32 + 1.0], &[1], Placement::Partial)?;
            group.all_reduce(&x)?.wait()?.to_vec()
        })
        .unwrap();
    assert_eq!(sums, vec![vec![6.0]; 3]);
}

/// Whether the error says that `rank` is at fault.
fn blames(error: &Error, rank: usize) -> bool {
    match error {
        Error::PeerLost { rank: lost, .. } => *lost == rank,
        Error::Timeout { missing, .. } => missing.contains(&format!("rank {rank} ")),
        Error::Mismatch { rank: ours, peer, .. } => *ours == rank || *peer == rank,
        Error::Closed { cause, .. } => cause.contains(&format!("rank {rank}")),
        _ => false,
    }
}

/// A step of either layer, with something that happens on the way.
fn step(group: &Group, layer: Layer, mode: LinearMode, overlap: Overlap, between: impl Fn(usize)) -> Result<()> {
    let (n, rows, features) = (group.world_size(), 4 * group.world_size(), 3 * group.world_size());
    let (outer_rows, outer) = match mode {
        LinearMode::AllReduce => (rows, Placement::Replicated),
        LinearMode::ReduceScatter => (rows / n, Placement::Rows),
    };
    let outer_tensor = group.tensor(&vec![1.0f32; outer_rows * features], &[outer_rows, features], outer)?;
    let inner_tensor = group.tensor(&vec![1.0f32; rows * 3], &[rows, 3], Placement::Features)?;
    between(0);
    match layer {
        Layer::Column => {
            let layer =
                TensorParallelColumnLinear::builder(features, features).mode(mode).overlap(overlap).build(group)?;
            let (_, saved) = layer.forward(&outer_tensor)?;
            between(1);
            layer.backward(saved, &inner_tensor)?;
        }
        Layer::Row => {
            let layer =
                TensorParallelRowLinear::builder(features, features).mode(mode).overlap(overlap).build(group)?;
            let (_, saved) = layer.forward(&inner_tensor)?;
            between(1);
            layer.backward(saved, &outer_tensor)?;
        }
    }
    group.barrier()
}

fn worlds() -> [LocalWorld; 2] {
    let world = LocalWorld::new(4).unwrap().with_threads(1).with_deadline(Duration::from_secs(20));
    [world.clone(), world.with_link(Link::gbit(1.0, 10.0)).unwrap()]
}

#[test]
fn a_rank_that_panics_fails_or_returns_is_named_by_all_others() {
    for layer in [Layer::Column, Layer::Row] {
        watched(120, move || {
            for (world, mode, overlap) in
                worlds().iter().flat_map(|w| MODES.map(|m| (w, m))).flat_map(|(w, m)| OVERLAPS.map(|o| (w, m, o)))
            {
                for when in [0, 1] {
                    for fault in ["panic", "error", "return"] {
                        let context = format!("{layer:?} {mode:?} {overlap} {fault} at {when}");
                        let begun = Instant::now();
                        let outcomes = world.run_all(|group| {
                            if group.rank() != 2 {
                                return step(group, layer, mode, overlap, |_| ());
                            }
                            if when == 1 {
                                // What the others need of the forward pass.
                                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                                    step(group, layer, mode, overlap, |at| {
                                        if at == 1 {
                                            std::panic::resume_unwind(Box::new("enough"))
                                        }
                                    })
                                }));
                                assert!(done.is_err(), "{context}");
                            }
                            match fault {
                                "panic" => std::panic::resume_unwind(Box::new("deliberate")),
                                "error" => {
                                    Err(Error::Argument { what: "test", got: "a fault".into(), wanted: "none".into() })
                                }
                                _ => Ok(()),
                            }
                        });
                        assert!(begun.elapsed() < Duration::from_secs(15), "{context}: nobody waits for the deadline");
                        for (rank, outcome) in outcomes.iter().enumerate() {
                            if rank == 2 {
                                assert_eq!(outcome.is_ok(), fault == "return", "{context}: {outcome:?}");
                            } else {
                                let error = outcome.as_ref().expect_err(&context);
                                assert!(blames(error, 2), "{context}, rank {rank}: {error}");
                            }
                        }
                    }
                }
            }
            still_usable();
        });
    }
}

#[test]
fn a_rank_that_never_calls_is_named_when_the_deadline_passes() {
    watched(60, || {
        for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
            let deadline = Duration::from_millis(300);
            let world = LocalWorld::new(3).unwrap().with_threads(1).with_deadline(deadline);
            let outcomes = world.run_all(|group| {
                if group.rank() == 1 {
                    std::thread::sleep(deadline * 4);
                    return Ok(Duration::ZERO);
                }
                let begun = Instant::now();
                let error = step(group, Layer::Column, mode, overlap, |_| ()).expect_err("nobody answered");
                assert!(blames(&error, 1), "{mode:?} {overlap}: {error}");
                let text = error.to_string();
                assert!(text.contains('#') && text.contains("has called nothing yet"), "{text}");
                Ok(begun.elapsed())
            });
            for outcome in outcomes {
                assert!(outcome.unwrap() < deadline + Duration::from_secs(1));
            }
        }
        still_usable();
    });
}

#[test]
fn different_collectives_or_sizes_name_both_sides() {
    type Call = fn(&Group) -> Result<()>;
    fn tensor(group: &Group, rows: usize, placement: Placement) -> async_tensor_parallel::Tensor<f32> {
        group.tensor(&vec![1.0; rows * 3], &[rows, 3], placement).unwrap()
    }
    let calls: [(&str, Call); 8] = [
        ("all_gather", |g| g.all_gather(&tensor(g, 3, Placement::Rows))?.wait().map(drop)),
        ("all_gather of more", |g| g.all_gather(&tensor(g, 6, Placement::Rows))?.wait().map(drop)),
        ("all_gather of f64", |g| g.all_gather(&g.tensor(&[1.0f64; 9], &[3, 3], Placement::Rows)?)?.wait().map(drop)),
        ("reduce_scatter", |g| g.reduce_scatter(&tensor(g, 9, Placement::Partial))?.wait().map(drop)),
        ("all_reduce", |g| g.all_reduce(&tensor(g, 3, Placement::Partial))?.wait().map(drop)),
        ("all_reduce_max", |g| g.all_reduce_max(&tensor(g, 3, Placement::Partial))?.wait().map(drop)),
        ("broadcast from 0", |g| g.broadcast(0, &tensor(g, 3, Placement::Replicated))?.wait().map(drop)),
        ("broadcast from 2", |g| g.broadcast(2, &tensor(g, 3, Placement::Replicated))?.wait().map(drop)),
    ];
    watched(120, move || {
        for (index, (one, call)) in calls.iter().enumerate() {
            for (other, different) in &calls[..index] {
                for (odd, late) in [(0, 0), (1, 30), (2, 30)] {
                    let world = LocalWorld::new(3).unwrap().with_deadline(Duration::from_secs(10));
                    let begun = Instant::now();
                    let outcomes = world.run_all(|group| {
                        group.barrier()?;
                        if group.rank() == odd {
                            std::thread::sleep(Duration::from_millis(late));
                            call(group)?;
                        } else {
                            different(group)?;
                        }
                        // A broadcast's root may be done before anybody disagrees.
                        group.barrier()
                    });
                    let context = format!("rank {odd}: {one}, others: {other}");
                    assert!(begun.elapsed() < Duration::from_secs(5), "{context}: waited for the deadline");
                    let errors: Vec<_> = outcomes.into_iter().map(|outcome| outcome.expect_err(&context)).collect();
                    assert!(
                        errors.iter().any(|error| matches!(error, Error::Mismatch { .. })),
                        "{context}: {errors:?}"
                    );
                    for error in &errors {
                        let text = error.to_string();
                        assert!(blames(error, odd), "{context}: {text}");
                        assert!(text.contains('#'), "{context}: {text}");
                    }
                }
            }
        }
        still_usable();
    });
}

#[test]
fn messages_without_a_partner_time_out() {
    watched(30, || {
        for sends in [true, false] {
            let deadline = Duration::from_millis(300);
            let world = LocalWorld::new(2).unwrap().with_deadline(deadline);
            let outcomes = world.run_all(|group| {
                if group.rank() == 1 {
                    std::thread::sleep(deadline * 4);
                    return Ok(());
                }
                let tensor = group.tensor(&[1.0f32; 4], &[4], Placement::Replicated)?;
                if sends {
                    group.send(1, &tensor)?.wait().map(drop)
                } else {
                    group.receive::<f32>(1, &[4], Placement::Replicated)?.wait().map(drop)
                }
            });
            let error = outcomes[0].as_ref().expect_err("no partner");
            assert!(matches!(error, Error::Timeout { .. }) && blames(error, 1), "{error}");
        }
        // A message of another size or dtype than expected.
        let outcomes = LocalWorld::new(2).unwrap().with_deadline(Duration::from_secs(10)).run_all(|group| {
            if group.rank() == 0 {
                group.send(1, &group.tensor(&[1.0f32; 4], &[4], Placement::Replicated)?)?.wait().map(drop)
            } else {
                group.receive::<f32>(0, &[5], Placement::Replicated)?.wait().map(drop)
            }
        });
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))), "{outcomes:?}");
        still_usable();
    });
}

#[test]
fn what_is_dropped_unwaited_is_waited_for() {
    watched(60, || {
        for world in worlds() {
            world
                .run(|group| {
                    for round in 0..50 {
                        let value = (round * 10 + group.rank()) as f32;
                        let rows = group.tensor(&[value; 6], &[2, 3], Placement::Rows)?;
                        let partial = group.tensor(&[value; 12], &[4, 3], Placement::Partial)?;
                        drop(group.all_gather(&rows)?);
                        let reduced = group.reduce_scatter(&partial)?;
                        drop(group.all_reduce(&partial)?);
                        // The buffers of what was dropped have come back and are used again: the results are still right.
                        let sum = (4 * round * 10 + 6) as f32;
                        assert_eq!(reduced.wait()?.to_vec()?, vec![sum; 3]);
                        assert_eq!(group.all_reduce(&partial)?.wait()?.to_vec()?, vec![sum; 12]);
                    }
                    Ok(())
                })
                .unwrap();
        }
    });
}

#[test]
fn what_is_dropped_in_a_panic_is_given_up_and_the_others_are_told() {
    watched(30, || {
        for world in worlds() {
            let outcomes = world.run_all(|group| {
                let rows = group.tensor(&[1.0f32; 6], &[2, 3], Placement::Rows)?;
                if group.rank() == 3 {
                    let _pending = group.all_gather(&rows)?;
                    std::panic::resume_unwind(Box::new("with a gather in flight"));
                }
                group.all_gather(&rows)?.wait()?;
                group.barrier()?;
                group.barrier()
            });
            for (rank, outcome) in outcomes.iter().enumerate() {
                let error = outcome.as_ref().expect_err("rank 3 panicked");
                assert!(rank == 3 || blames(error, 3), "rank {rank}: {error}");
            }
        }
        still_usable();
    });
}

#[test]
fn a_reduction_given_up_before_all_blocks_are_handed_in_ends_for_all() {
    watched(60, || {
        for max in [false, true] {
            for hand_in in [0, 1, 2] {
                let world = LocalWorld::new(3).unwrap().with_deadline(Duration::from_millis(500));
                let outcomes = world.run_all(|group| {
                    let layout = ShardLayout::even("elements", 6, 3)?;
                    let blocks = Blocks::new(layout, 4);
                    let device = group.device();
                    let communicator = group.communicator();
                    let operation = if max {
                        communicator.all_reduce(DType::F32, ReduceOp::Max, blocks, device.allocate(24)?)?
                    } else {
                        communicator.reduce_scatter(DType::F32, blocks, device.allocate(8)?)?
                    };
                    let whole = group.tensor(&[1.0f32; 6], &[6], Placement::Partial)?;
                    let parts = if group.rank() == 1 { hand_in } else { 3 };
                    for piece in blocks.order(group.rank()).take(parts) {
                        operation.clone().contribute(piece, whole.buffer().slice(blocks.bytes(piece))?)?;
                    }
                    if group.rank() == 1 {
                        return Ok(());
                    }
                    operation.wait()?;
                    group.barrier()
                });
                for rank in [0, 2] {
                    let error = outcomes[rank].as_ref().expect_err("a block never came");
                    assert!(blames(error, 1), "{hand_in} blocks, rank {rank}: {error}");
                }
            }
        }
        still_usable();
    });
}

#[test]
fn a_closed_group_says_why() {
    watched(30, || {
        let world = LocalWorld::new(2).unwrap().with_deadline(Duration::from_millis(200));
        let outcomes = world.run_all(|group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(600));
            }
            let first = group.barrier().expect_err("rank 1 is late");
            let again = group.barrier().expect_err("the group is closed");
            assert!(matches!(again, Error::Closed { .. }), "{again}");
            let tensor = group.tensor(&[1.0f32; 2], &[2], Placement::Partial)?;
            assert!(matches!(group.all_reduce(&tensor).map(drop), Err(Error::Closed { .. })));
            Ok((first.to_string(), again.to_string()))
        });
        let (first, again) = outcomes[0].as_ref().unwrap();
        assert!(first.contains("barrier") && first.contains("rank 1 "), "{first}");
        assert!(again.contains("barrier") && again.contains("rank 1 "), "{again}");
        let (first, _) = outcomes[1].as_ref().unwrap();
        assert!(first.contains("barrier"), "{first}");
        still_usable();
    });
}

#[test]
fn a_subgroup_fails_with_its_world() {
    watched(30, || {
        let world = LocalWorld::new(4).unwrap().with_deadline(Duration::from_secs(20));
        let outcomes = world.run_all(|group| {
            let pair = group.split(Some(group.rank() / 2), group.rank())?.expect("every rank has a color");
            pair.barrier()?;
            if group.rank() == 0 {
                return Ok(());
            }
            pair.barrier()?;
            pair.barrier()
        });
        let error = outcomes[1].as_ref().expect_err("its partner returned");
        assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
        assert!(outcomes[2].is_ok() && outcomes[3].is_ok(), "the other pair needs nobody: {outcomes:?}");
        still_usable();
    });
}
