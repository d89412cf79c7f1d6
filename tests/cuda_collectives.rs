//! The CUDA communicators against threads on the CPU: every collective, bit for bit, as sums are formed in rank order
//! everywhere. Needs CUDA devices, real or simulated; without one it says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_tensor_parallel::timeline::{Lane, Recorder};
use async_tensor_parallel::{
    CudaDevice, DType, Element, Error, Float, Group, LocalWorld, NcclCommunicator, NcclConfig, NcclId, NcclWorld,
    PeerWorld, Placement, Reduction, Result, TensorParallelColumnLinear,
};
use common::cuda::{Kind, World, devices};
use common::real;
use half::{bf16, f16};

/// What a rank draws for its `which`-th tensor.
fn draw<T: Float>(group: &Group, which: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::from_f64(real(group.rank() + 1, which, index))).collect()
}

fn bits<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// Every collective of a group, in sizes that divide and sizes that do not; everything that came out.
fn all_collectives<T: Float>(group: &Group) -> Result<Vec<Vec<u8>>> {
    let (n, even) = (group.world_size(), group.rank().is_multiple_of(2));
    let mut seen = Vec::new();
    for (which, rows) in [1, 2, 7].into_iter().enumerate() {
        let shard = group.tensor(&draw::<T>(group, which, rows * 5), &[rows, 5], Placement::Rows)?;
        seen.push(bits(&group.all_gather(&shard)?.wait()?.to_vec()?));
        let summand = group.tensor(&draw::<T>(group, 10 + which, rows * n * 3), &[rows * n, 3], Placement::Partial)?;
        let scattered = group.reduce_scatter(&summand)?;
        // Two in flight at once.
        let reduced = group.all_reduce(&summand)?;
        seen.push(bits(&reduced.wait()?.to_vec()?));
        seen.push(bits(&scattered.wait()?.to_vec()?));
        seen.push(bits(&group.all_reduce_max(&summand)?.wait()?.to_vec()?));
    }
    for len in [0, 1, 2, 5, 1000, 4097] {
        let summand = group.tensor(&draw::<T>(group, 20, len), &[len], Placement::Partial)?;
        seen.push(bits(&group.all_reduce(&summand)?.wait()?.to_vec()?));
    }
    for root in 0..n {
        let tensor = group.tensor(&draw::<T>(group, 30 + root, 33), &[33], Placement::Replicated)?;
        seen.push(bits(&group.broadcast(root, &tensor)?.wait()?.to_vec()?));
    }
    if n > 1 {
        // Round a ring, the even ranks first.
        let tensor = group.tensor(&draw::<T>(group, 40, 17), &[17], Placement::Replicated)?;
        let (to, from) = ((group.rank() + 1) % n, (group.rank() + n - 1) % n);
        let receive = || group.receive::<T>(from, &[17], Placement::Replicated)?.wait()?.to_vec();
        let got = if even {
            let sent = group.send(to, &tensor)?;
            let got = receive()?;
            sent.wait()?;
            got
        } else {
            let got = receive()?;
            group.send(to, &tensor)?.wait()?;
            got
        };
        seen.push(bits(&got));
    }
    group.barrier()?;
    // Odd and even ranks, the latter in reverse.
    let key = if even { n - group.rank() } else { group.rank() };
    let part = group.split(Some(group.rank() % 2), key)?.expect("every rank has a color");
    let tensor = group.tensor(&draw::<T>(group, 50, 6), &[1, 6], Placement::Rows)?;
    seen.push(bits(&part.all_gather(&tensor)?.wait()?.to_vec()?));
    assert_eq!(part.world_size(), (n + 1 - group.rank() % 2) / 2);
    let some = group.split((group.rank() == 0).then_some(7), 0)?;
    assert_eq!(some.is_some(), group.rank() == 0);
    // Both groups side by side.
    let whole = group.tensor(&draw::<T>(group, 51, 8), &[8], Placement::Partial)?;
    let (a, b) = (group.all_reduce(&whole)?, part.all_gather(&tensor)?);
    seen.push(bits(&b.wait()?.to_vec()?));
    seen.push(bits(&a.wait()?.to_vec()?));
    Ok(seen)
}

fn as_on_the_cpu<T: Float>() {
    for n in 1..=devices().min(6) {
        let want = LocalWorld::new(n).unwrap().run(all_collectives::<T>).unwrap();
        for kind in Kind::ALL {
            let got = World::new(kind, n).run(all_collectives::<T>).unwrap();
            assert_eq!(got.len(), n);
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.len(), want.len());
                for (index, (got, want)) in got.iter().zip(want).enumerate() {
                    assert!(got == want, "{kind:?}, {:?}, {n} ranks: result {index} of rank {rank}", T::DTYPE);
                }
            }
        }
    }
}

#[test]
fn f32_as_on_the_cpu() {
    as_on_the_cpu::<f32>();
}

#[test]
fn f64_as_on_the_cpu() {
    as_on_the_cpu::<f64>();
}

#[test]
fn bf16_as_on_the_cpu() {
    as_on_the_cpu::<bf16>();
}

#[test]
fn f16_as_on_the_cpu() {
    as_on_the_cpu::<f16>();
}

/// Integers travel as bytes.
#[test]
fn integers_are_gathered_and_broadcast() {
    for n in 1..=devices().min(4) {
        for kind in Kind::ALL {
            let outcome = World::new(kind, n).run(|group| {
                let ids: Vec<i64> = (0..3).map(|index| (group.rank() as i64 + 1) << (20 * index)).collect();
                let ids = group.tensor(&ids, &[3], Placement::Rows)?;
                let all = group.all_gather(&ids)?.wait()?.to_vec()?;
                let last = group.broadcast(n - 1, &ids)?.wait()?.to_vec()?;
                Ok((all, last))
            });
            for (all, last) in outcome.unwrap() {
                let want = |rank: i64| [rank + 1, (rank + 1) << 20, (rank + 1) << 40];
                assert_eq!(all, (0..n as i64).flat_map(want).collect::<Vec<_>>());
                assert_eq!(last, want(n as i64 - 1));
            }
        }
    }
}

/// Several ranks on one device.
#[test]
fn peers_may_share_a_device() {
    if devices() == 0 {
        return;
    }
    for (n, ordinals) in [(3, vec![0, 0, 0]), (4, vec![0, devices() - 1, 0, devices() - 1])] {
        let want = LocalWorld::new(n).unwrap().run(all_collectives::<f32>).unwrap();
        let world = PeerWorld::new(n).unwrap().devices(&ordinals).unwrap();
        assert_eq!(world.run(all_collectives::<f32>).unwrap(), want);
    }
    assert!(matches!(PeerWorld::new(2).unwrap().devices(&[0]), Err(Error::Argument { .. })));
}

/// Ranks on devices in another order than theirs.
#[test]
fn ranks_of_nccl_may_be_on_any_devices() {
    let n = devices().min(3);
    if n == 0 {
        return;
    }
    let want = LocalWorld::new(n).unwrap().run(all_collectives::<bf16>).unwrap();
    let ordinals: Vec<usize> = (0..n).rev().collect();
    let world = NcclWorld::new(n).unwrap().devices(&ordinals).unwrap();
    assert_eq!(world.run(all_collectives::<bf16>).unwrap(), want);
    assert!(matches!(NcclWorld::new(n).unwrap().devices(&[]), Err(Error::Argument { .. })));
    assert!(matches!(NcclWorld::new(devices() + 1), Err(Error::Argument { .. })));
}

/// NCCL's own reductions and whole gathers: close to the ordered ones, and exact on integers.
#[test]
fn native_reductions_and_whole_gathers() {
    for n in 1..=devices().min(5) {
        let mut config = NcclConfig::default();
        config.reduction = Reduction::Native;
        config.whole_gathers = true;
        let world = NcclWorld::new(n).unwrap().with_config(config);
        let outcome = world.run(|group| {
            let mut sums = Vec::new();
            for len in [n, 4 * n, 4 * n + 1, 1] {
                let values: Vec<f32> = (0..len).map(|index| (index * (group.rank() + 1)) as f32).collect();
                let summand = group.tensor(&values, &[len, 1], Placement::Partial)?;
                let sum = group.all_reduce(&summand)?.wait()?.to_vec()?;
                let ranks = (n * (n + 1) / 2) as f32;
                assert_eq!(sum, (0..len).map(|index| index as f32 * ranks).collect::<Vec<_>>());
                if len % n == 0 {
                    let part = group.reduce_scatter(&summand)?.wait()?.to_vec()?;
                    assert_eq!(part, sum[group.rank() * len / n..(group.rank() + 1) * len / n]);
                }
                sums.push(sum);
            }
            let shard = group.tensor(&[group.rank() as f32; 6], &[2, 3], Placement::Rows)?;
            let all = group.all_gather(&shard)?.wait()?.to_vec()?;
            assert_eq!(all, (0..6 * n).map(|index| (index / 6) as f32).collect::<Vec<_>>());
            let max = group.tensor(&[-(group.rank() as f32), group.rank() as f32], &[2], Placement::Partial)?;
            assert_eq!(group.all_reduce_max(&max)?.wait()?.to_vec()?, [0.0, (n - 1) as f32]);
            Ok(sums)
        });
        assert_eq!(outcome.unwrap().len(), n);
    }
}

/// While the timeline is recorded, what both streams do shows, communication with its bytes.
#[test]
fn both_streams_show_on_the_timeline() {
    if devices() < 2 {
        return;
    }
    for kind in Kind::ALL {
        let outcome = World::new(kind, 2).run(|group| {
            let tensor = group.tensor(&[1f32; 64], &[8, 8], Placement::Partial)?;
            let layer = TensorParallelColumnLinear::<f32>::builder(8, 4).seed(1).build(group)?;
            let x = group.tensor(&[1f32; 64], &[8, 8], Placement::Rows)?;
            group.all_reduce(&tensor)?.wait()?;
            layer.forward(&x)?;
            group.barrier()?;
            if group.rank() == 0 {
                group.recorder().start();
            }
            group.barrier()?;
            group.all_reduce(&tensor)?.wait()?;
            layer.forward(&x)?;
            group.device().synchronize()?;
            group.barrier()?;
            Ok(if group.rank() == 0 { group.recorder().stop() } else { Vec::new() })
        });
        let spans = outcome.unwrap().swap_remove(0);
        let sums = spans.iter().filter(|span| span.name == "sum").count();
        assert!(sums >= 1, "{kind:?}: {spans:?}");
        let received: u64 =
            spans.iter().filter(|s| s.rank == 0 && s.lane == Lane::Communication).map(|s| s.bytes).sum();
        assert!(received >= 256, "{kind:?}: {spans:?}");
        for rank in 0..2 {
            let computed = spans.iter().filter(|span| span.rank == rank && span.lane == Lane::Compute).count();
            assert!(computed >= 2, "{kind:?}, rank {rank}, own rows and the others: {spans:?}");
        }
        assert!(spans.iter().all(|span| span.start <= span.end && span.end < Duration::from_secs(600)));
    }
}

/// Two ranks that both send first, and what is received while nobody waits for the send.
#[test]
fn both_may_send_first() {
    if devices() < 2 {
        return;
    }
    for kind in Kind::ALL {
        let outcome = World::new(kind, 2).run(|group| {
            let other = 1 - group.rank();
            let mut seen = Vec::new();
            for len in [1, 100_000] {
                let values: Vec<f32> = (0..len).map(|index| (index + group.rank()) as f32).collect();
                let tensor = group.tensor(&values, &[len], Placement::Replicated)?;
                let sent = group.send(other, &tensor)?;
                let received = group.receive::<f32>(other, &[len], Placement::Replicated)?;
                drop(tensor);
                seen.push(received.wait()?.to_vec()?[len - 1]);
                assert_eq!(sent.wait()?.to_vec()?, values);
            }
            // The sender only waits on the host, for something else.
            let tensor = group.tensor(&[5f32], &[1], Placement::Replicated)?;
            if group.rank() == 0 {
                let sent = group.send(1, &tensor)?;
                std::thread::sleep(Duration::from_millis(50));
                sent.wait()?;
            } else {
                let begun = Instant::now();
                let got = group.receive::<f32>(0, &[1], Placement::Replicated)?.wait()?.to_vec()?;
                assert_eq!(got, [5.0]);
                assert!(begun.elapsed() < Duration::from_secs(5));
            }
            Ok(seen)
        });
        assert_eq!(outcome.unwrap(), [[1.0, 100_000.0], [0.0, 99_999.0]], "{kind:?}");
    }
}

/// The faults of a group: how each ends, within what time, and that the process works afterwards.
fn faulty<R: Send>(kind: Kind, n: usize, deadline: Duration, f: impl Fn(&Group) -> Result<R> + Sync) -> Vec<Result<R>> {
    let begun = Instant::now();
    let outcomes = World::new(kind, n).with_deadline(deadline).run_all(f);
    let limit = deadline + Duration::from_secs(10);
    assert!(begun.elapsed() < limit, "{kind:?}: took {:?}, with a deadline of {deadline:?}", begun.elapsed());
    let again = World::new(kind, n).run(all_collectives::<f32>);
    assert_eq!(again.map(|seen| seen.len()), Ok(n), "{kind:?}: a new world after the fault");
    outcomes
}

fn sum(group: &Group, len: usize) -> Result<Vec<f32>> {
    let tensor = group.tensor(&vec![1f32; len], &[len], Placement::Partial)?;
    group.all_reduce(&tensor)?.wait()?.to_vec()
}

#[test]
fn a_rank_that_returns_is_lost() {
    if devices() < 3 {
        return;
    }
    for kind in Kind::ALL {
        let outcomes = faulty(kind, 3, Duration::from_secs(60), |group| {
            sum(group, 8)?;
            if group.rank() == 2 { Ok(vec![]) } else { sum(group, 8) }
        });
        assert!(outcomes[2].is_ok(), "{outcomes:?}");
        for outcome in &outcomes[..2] {
            let text = outcome.as_ref().unwrap_err().to_string();
            assert!(text.contains("rank 2 is lost (returned"), "{kind:?}: {outcomes:?}");
        }
    }
}

#[test]
fn a_rank_that_panics_is_lost() {
    if devices() < 3 {
        return;
    }
    for kind in Kind::ALL {
        let outcomes = faulty(kind, 3, Duration::from_secs(60), |group| {
            sum(group, 8)?;
            let tensor = group.tensor(&[1f32; 9], &[9], Placement::Partial)?;
            let pending = group.all_reduce(&tensor)?;
            if group.rank() == 1 {
                panic!("as the test wants");
            }
            pending.wait()?.to_vec()?;
            sum(group, 8)
        });
        assert!(matches!(outcomes[1], Err(Error::Panicked { rank: 1, .. })), "{kind:?}: {outcomes:?}");
        for rank in [0, 2] {
            let text = outcomes[rank].as_ref().unwrap_err().to_string();
            assert!(text.contains("rank 1 is lost (panicked"), "{kind:?}: {outcomes:?}");
        }
    }
}

#[test]
fn a_rank_that_calls_something_else_is_named() {
    if devices() < 2 {
        return;
    }
    for kind in Kind::ALL {
        let outcomes = faulty(kind, 2, Duration::from_secs(60), |group| {
            sum(group, 8)?;
            sum(group, if group.rank() == 0 { 8 } else { 9 })
        });
        for (rank, outcome) in outcomes.iter().enumerate() {
            let Err(Error::Mismatch { rank: seen_by, sequence, ours, theirs, .. }) = outcome else {
                panic!("{kind:?}: {outcomes:?}")
            };
            assert_eq!((*seen_by, *sequence), (rank, 1));
            assert!(ours.contains(["8 F32", "9 F32"][rank]) && theirs.contains(["9 F32", "8 F32"][rank]));
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_a_timeout() {
    if devices() < 2 {
        return;
    }
    for kind in Kind::ALL {
        let deadline = Duration::from_millis(1500);
        let outcomes = faulty(kind, 2, deadline, |group| {
            sum(group, 8)?;
            if group.rank() == 1 {
                std::thread::sleep(deadline * 3);
            }
            sum(group, 8)
        });
        assert!(matches!(outcomes[0], Err(Error::Timeout { rank: 0, .. })), "{kind:?}: {outcomes:?}");
        let text = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(text.contains("all_reduce of 8 F32 elements #1") && text.contains("rank 1"), "{text}");
        assert!(outcomes[1].is_err(), "{kind:?}: {outcomes:?}");
    }
}

#[test]
fn no_memory_is_an_error_of_one_rank() {
    if devices() < 2 {
        return;
    }
    for kind in Kind::ALL {
        let outcomes = faulty(kind, 2, Duration::from_secs(60), |group| {
            if group.rank() == 0 {
                group.device().allocate(1 << 46)?;
            }
            sum(group, 8)
        });
        assert!(matches!(outcomes[0], Err(Error::OutOfMemory { .. })), "{kind:?}: {outcomes:?}");
        let text = outcomes[1].as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 0 is lost (failed"), "{kind:?}: {outcomes:?}");
    }
}

/// Communicators made one by one from an id, as ranks of several processes make them: nobody tells them what the others
/// do.
fn by_hand<R: Send>(n: usize, deadline: Duration, f: impl Fn(&Group) -> Result<R> + Sync) -> Vec<Result<R>> {
    let id = NcclId::new().unwrap().to_bytes();
    let join = |rank: usize| {
        let device = CudaDevice::new(rank)?;
        let mut config = NcclConfig::default();
        config.deadline = deadline;
        let communicator = NcclCommunicator::new(NcclId::from_bytes(id), rank, n, &device, config)?;
        let group = Group::new(Arc::new(communicator), device, Recorder::disabled());
        f(&group)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn communicators_made_by_hand() {
    let n = devices().min(3);
    if n == 0 {
        return;
    }
    let want = LocalWorld::new(n).unwrap().run(all_collectives::<f32>).unwrap();
    let got: Result<Vec<_>> = by_hand(n, Duration::from_secs(60), all_collectives::<f32>).into_iter().collect();
    assert_eq!(got.unwrap(), want);
    let device = CudaDevice::new(0).unwrap();
    let refused = NcclCommunicator::new(NcclId::new().unwrap(), 2, 2, &device, NcclConfig::default());
    assert!(matches!(refused, Err(Error::Argument { what: "rank", .. })));
}

/// Without a word from the others there is still the deadline.
#[test]
fn by_hand_a_rank_that_does_not_come_is_a_timeout() {
    if devices() < 2 {
        return;
    }
    let deadline = Duration::from_secs(1);
    let begun = Instant::now();
    let outcomes = by_hand(2, deadline, |group| {
        sum(group, 8)?;
        if group.rank() == 1 {
            std::thread::sleep(deadline * 3);
            return Ok(vec![]);
        }
        sum(group, 8)
    });
    assert!(begun.elapsed() < Duration::from_secs(15), "{outcomes:?}");
    assert!(matches!(outcomes[0], Err(Error::Timeout { rank: 0, sequence: 1, .. })), "{outcomes:?}");
}

/// A block that is not the next one is refused, and the group goes on.
#[test]
fn blocks_out_of_order_are_refused() {
    use async_tensor_parallel::{Blocks, ReduceOp, ShardLayout};
    if devices() < 2 {
        return;
    }
    let outcome = NcclWorld::new(2).unwrap().run(|group| {
        let (device, communicator) = (group.device(), group.communicator());
        let blocks = Blocks::new(ShardLayout::even("elements", 4, 2)?, 4);
        let ones = group.tensor(&[1f32; 4], &[4], Placement::Partial)?;
        let out = device.allocate(16)?;
        let operation = communicator.all_reduce(DType::F32, ReduceOp::Sum, blocks, out)?;
        let block = |piece: usize| ones.buffer().slice(blocks.bytes(piece));
        let own = group.rank();
        let refused = Arc::clone(&operation).contribute(own, block(own)?);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
        for piece in blocks.order(own) {
            Arc::clone(&operation).contribute(piece, block(piece)?)?;
        }
        let refused = Arc::clone(&operation).contribute(own, block(own)?);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
        let whole = operation.wait()?;
        let mut bytes = [0; 16];
        device.download(&whole, &mut bytes)?;
        Ok(bytemuck::cast_slice::<u8, f32>(&bytes).to_vec())
    });
    assert_eq!(outcome.unwrap(), vec![vec![2.0; 4]; 2]);
}
