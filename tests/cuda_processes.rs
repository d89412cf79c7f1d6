//! Ranks as processes over NCCL: an id is made by one and handed to all. Needs a CUDA device for each, real or simulated; without
//! them it says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_tensor_parallel::timeline::Recorder;
use async_tensor_parallel::{
    CudaDevice, Group, LinearMode, LocalWorld, NcclCommunicator, NcclConfig, NcclId, Overlap, Placement, Result,
    TensorParallelColumnLinear, TensorParallelRowLinear,
};
use common::cuda::devices;
use common::{MODES, OVERLAPS};

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(5);

/// A step of both layers on small integers, which every dtype and order adds up exactly.
fn step(group: &Group, mode: LinearMode, overlap: Overlap) -> Result<Vec<f32>> {
    let n = group.world_size();
    let weight: Vec<f32> = (0..4 * n * 4).map(|i| (i % 5) as f32 - 2.0).collect();
    let column = TensorParallelColumnLinear::<f32>::builder(4, 4 * n).mode(mode).overlap(overlap);
    let column = column.from_full(group, &weight, None)?;
    let row = TensorParallelRowLinear::<f32>::builder(4 * n, 4).mode(mode).overlap(overlap);
    let row = row.from_full(group, &weight, None)?;
    let scatter = mode == LinearMode::ReduceScatter;
    let (seed, placement) = if scatter { (group.rank(), Placement::Rows) } else { (0, Placement::Replicated) };
    let x: Vec<f32> = (0..n * 4).map(|i| ((i + seed) % 3) as f32 - 1.0).collect();
    let (hidden, saved_column) = column.forward(&group.tensor(&x, &[n, 4], placement)?)?;
    let (y, saved_row) = row.forward(&hidden)?;
    let dx = column.backward(saved_column, &row.backward(saved_row, &y)?)?;
    let mut seen = y.to_vec()?;
    seen.extend(dx.to_vec()?);
    seen.extend(column.weight_grad()?.to_vec()?);
    Ok(seen)
}

/// All modes and overlaps in the whole group, then a sum in the group of the first ranks.
fn all(group: &Group) -> Result<Vec<f32>> {
    let mut seen = Vec::new();
    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
        seen.extend(step(group, mode, overlap)?);
    }
    let last = group.world_size() - 1;
    let part = group.split(Some(usize::from(group.rank() == last)), last - group.rank())?;
    if let Some(part) = part {
        let own = part.tensor(&[group.rank() as f32, part.rank() as f32], &[2], Placement::Partial)?;
        seen.extend(part.all_reduce(&own)?.wait()?.to_vec()?);
        let own = part.tensor(&[group.rank() as f32], &[1, 1], Placement::Rows)?;
        seen.extend(part.all_gather(&own)?.wait()?.to_vec()?);
    }
    Ok(seen)
}

/// A rank. The first says what the id is.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let Ok(rank) = std::env::var("ATP_RANK") else { return };
    let rank: usize = rank.parse().unwrap();
    let id = match std::env::var("ATP_ID") {
        Ok(text) => {
            let bytes: Vec<u8> = text.split(',').map(|byte| byte.parse().unwrap()).collect();
            NcclId::from_bytes(bytes.try_into().unwrap())
        }
        Err(_) => {
            let id = NcclId::new().unwrap();
            let bytes: Vec<String> = id.to_bytes().iter().map(u8::to_string).collect();
            println!("\nid {}", bytes.join(","));
            id
        }
    };
    let device = CudaDevice::new(rank).unwrap();
    let mut config = NcclConfig::default();
    config.deadline = DEADLINE;
    let communicator = NcclCommunicator::new(id, rank, RANKS, &device, config).unwrap();
    let group = Group::new(Arc::new(communicator), device, Recorder::disabled());
    let dies = std::env::var("ATP_DIES").ok();
    if dies.as_ref().is_some_and(|who| *who == rank.to_string()) {
        step(&group, LinearMode::ReduceScatter, Overlap::Async).unwrap();
        std::process::abort();
    }
    let begun = Instant::now();
    let outcome = if dies.is_some() {
        let many = || (0..1000).try_for_each(|_| step(&group, LinearMode::ReduceScatter, Overlap::Async).map(drop));
        many().map(|()| Vec::new())
    } else {
        all(&group)
    };
    match outcome {
        Ok(seen) => println!("\nsaw {seen:?}"),
        Err(error) => println!("\nerror after {:.1} s: {error}", begun.elapsed().as_secs_f64()),
    }
}

fn start(rank: usize, id: Option<&str>, dies: Option<usize>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "child", "--nocapture"]).env("ATP_RANK", rank.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(id) = id {
        command.env("ATP_ID", id);
    }
    if let Some(who) = dies {
        command.env("ATP_DIES", who.to_string());
    }
    command.spawn().unwrap()
}

/// What each rank's process said last; `dies` is killed after a step.
fn run(dies: Option<usize>) -> Vec<String> {
    let mut first = start(0, None, dies);
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    let id = lines.by_ref().map(|line| line.unwrap()).find_map(|line| line.strip_prefix("id ").map(str::to_string));
    let id = id.expect("the first rank makes an id");
    let others: Vec<Child> = (1..RANKS).map(|rank| start(rank, Some(&id), dies)).collect();
    let word = |line: &String| line.starts_with("saw ") || line.starts_with("error ");
    let mut said = vec![lines.map(|line| line.unwrap()).find(word).unwrap_or_default()];
    first.wait().unwrap();
    for other in others {
        let output = other.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        said.push(
            text.lines()
                .map(str::to_string)
                .find(word)
                .unwrap_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned()),
        );
    }
    said
}

#[test]
fn processes_see_what_threads_see() {
    if devices() < RANKS {
        return;
    }
    let want = LocalWorld::new(RANKS).unwrap().run(all).unwrap();
    for (rank, (said, want)) in run(None).iter().zip(want).enumerate() {
        assert_eq!(*said, format!("saw {want:?}"), "rank {rank}");
    }
}

#[test]
fn a_process_that_dies_ends_the_others_with_an_error() {
    if devices() < RANKS {
        return;
    }
    for dies in [0, RANKS - 1] {
        let begun = Instant::now();
        let said = run(Some(dies));
        assert!(begun.elapsed() < DEADLINE * 3, "{said:?}");
        for (rank, said) in said.iter().enumerate().filter(|(rank, _)| *rank != dies) {
            let after: f64 = said
                .strip_prefix("error after ")
                .and_then(|rest| rest.split(' ').next()?.parse().ok())
                .unwrap_or_else(|| panic!("rank {rank}: {said:?}"));
            assert!(after < DEADLINE.as_secs_f64() + 1.5, "rank {rank}: {said}");
            eprintln!("rank {dies} dies, rank {rank}: {said}");
        }
    }
}
