//! What the simulated driver's race detector finds, and what it does not find in the layers.
//!
//! Bugs are planted in child processes, which must die of them; the same without the bug must live. Needs the simulator
//! (`scripts/with_cuda_sim.sh`); without it, it says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::process::{Command, Output};
use std::sync::Arc;

use async_tensor_parallel::{
    Group, LinearMode, Overlap, Placement, Result, TensorParallelColumnLinear, TensorParallelRowLinear,
};
use common::cuda::{Kind, World, devices};
use common::{MODES, OVERLAPS, real};
use cudarc::driver::{CudaContext, CudaStream, result};

/// Runs this program's `child` with that job, and settings of the simulator; `None` where there is no simulator.
fn run_child(job: &str, settings: &[(&str, String)]) -> Option<Output> {
    if std::env::var_os("CUDA_SIM_RACES").is_none() || devices() == 0 {
        assert!(std::env::var_os("CUDA_REQUIRED").is_none_or(|_| std::env::var_os("CUDA_SIM_RACES").is_none()));
        eprintln!("skipped: not on the simulated driver");
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "child", "--nocapture"]).env("ATP_CHILD", job).env("CUDA_SIM_RACES", "abort");
    let output = command.envs(settings.iter().map(|(name, value)| (name, value))).output();
    Some(output.expect("this program runs"))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Whether the detector ended it.
fn found(output: &Output) -> bool {
    let said = text(output);
    !output.status.success() && (said.contains("RACE over bytes") || said.contains("MEMORY THAT IS NOT THERE"))
}

#[track_caller]
fn assert_clean(output: &Output, context: &str) {
    assert!(output.status.success(), "{context}: {}", text(output));
}

#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let Ok(job) = std::env::var("ATP_CHILD") else { return };
    let (name, argument) = job.split_once(':').unwrap_or((&job, ""));
    match name {
        "layers" => layers(argument.parse().unwrap()),
        "steps" => steps(if argument == "nccl" { Kind::Nccl } else { Kind::Peer }),
        "workspace" => workspace(argument == "bug"),
        "dropped" => dropped(argument == "bug"),
        "gather" => gather(argument == "bug"),
        _ => panic!("no such job: {job}"),
    }
}

/// One step of a column and a row layer, whose results depend on all ranks.
fn step(group: &Group, mode: LinearMode, overlap: Overlap, rows: usize, micro_batches: usize) -> Result<Vec<f32>> {
    let n = group.world_size();
    let column = TensorParallelColumnLinear::<f32>::builder(4, 2 * n)
        .mode(mode)
        .overlap(overlap)
        .bias(true)
        .seed(1)
        .build(group)?;
    let row = TensorParallelRowLinear::<f32>::builder(2 * n, 4)
        .mode(mode)
        .overlap(overlap)
        .bias(true)
        .seed(2)
        .build(group)?;
    let placement = if mode == LinearMode::ReduceScatter { Placement::Rows } else { Placement::Replicated };
    for batch in 0..micro_batches {
        let seed = if mode == LinearMode::ReduceScatter { group.rank() } else { 0 };
        let x: Vec<f32> = (0..rows * 4).map(|index| real(seed, batch, index) as f32).collect();
        let x = group.tensor(&x, &[rows, 4], placement)?;
        let (hidden, saved_column) = column.forward(&x)?;
        drop(x);
        let (y, saved_row) = row.forward(&hidden)?;
        drop(hidden);
        column.backward(saved_column, &row.backward(saved_row, &y)?)?;
    }
    column.weight_grad()?.to_vec()
}

/// Worlds of both communicators, all modes and overlaps.
fn layers(seed: usize) {
    for world in 0..25 {
        let number = seed * 25 + world;
        let kind = Kind::ALL[number % 2];
        let n = 2 + number % 3;
        let (mode, overlap) = (MODES[number / 2 % 2], OVERLAPS[number / 4 % 4]);
        World::new(kind, n).run(|group| step(group, mode, overlap, n, 2)).unwrap();
    }
}

/// Micro-batches back to back.
fn steps(kind: Kind) {
    World::new(kind, 2).run(|group| step(group, LinearMode::ReduceScatter, Overlap::Async, 2, 8)).unwrap();
}

/// At least 200 worlds, shuffled by as many seeds as children: no race.
#[test]
fn the_layers_have_no_race() {
    for seed in 0..8 {
        let settings = [("CUDA_SIM_SEED", (seed + 100).to_string()), ("CUDA_SIM_JITTER_US", "60".into())];
        let Some(output) = run_child(&format!("layers:{seed}"), &settings) else { return };
        assert_clean(&output, &format!("seed {seed}"));
    }
}

/// Leaves out one wait for an event after the other, in the steady state. Not every wait is needed, and which one is the n-th is for
/// the threads to settle; among so many are the one before the rest of the rows is multiplied, without which a matmul reads what
/// a transfer still writes, and the one between two micro-batches, without which it writes what a transfer still reads.
#[test]
fn a_missing_wait_is_found() {
    for kind in ["nccl", "peer"] {
        let job = format!("steps:{kind}");
        let Some(output) = run_child(&job, &[]) else { return };
        assert_clean(&output, "nothing is left out");
        let (mut read_early, mut overwritten, mut said) = (false, false, String::new());
        for which in 90..154 {
            let Some(output) = run_child(&job, &[("CUDA_SIM_FORGET_WAIT", which.to_string())]) else { return };
            assert_eq!(found(&output), !output.status.success(), "{kind}, wait {which}: {}", text(&output));
            let report = text(&output);
            let side = |how: &str, what: &[&str]| {
                report.lines().any(|line| what.iter().any(|what| line.trim().starts_with(&format!("{how} by {what}"))))
            };
            let transfer = ["nccl:", "dtod", "kernel:combine"];
            read_early |= side("read", &["lt_matmul"]) && side("write", &transfer);
            overwritten |= side("write", &["lt_matmul"]) && side("read", &transfer);
            said += &report;
        }
        assert!(read_early && overwritten, "{kind}, {read_early}, {overwritten}: {said}");
    }
}

fn two_streams() -> (Arc<CudaStream>, Arc<CudaStream>) {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: this program orders its own use, or not, as it is told to.
    unsafe { context.disable_event_tracking() };
    (context.new_stream().unwrap(), context.new_stream().unwrap())
}

/// A workspace that two streams use, one after the other if `bug` does not leave that out.
fn workspace(bug: bool) {
    let (one, two) = two_streams();
    // SAFETY: sizes are those allocated. Where the order is wrong, the simulator ends the program.
    unsafe {
        let raw = [one.cu_stream(), two.cu_stream()];
        let [shared, input, output] = [0; 3].map(|_: i32| result::malloc_async(raw[0], 64).unwrap());
        result::memset_d8_async(input, 7, 64, raw[0]).unwrap();
        one.synchronize().unwrap();
        result::memcpy_dtod_async(shared, input, 64, raw[0]).unwrap();
        result::memcpy_dtod_async(output, shared, 64, raw[0]).unwrap();
        if !bug {
            two.join(&one).unwrap();
        }
        // The next step's, a step too early.
        result::memcpy_dtod_async(shared, input, 64, raw[1]).unwrap();
        two.synchronize().unwrap();
        one.synchronize().unwrap();
        for pointer in [shared, input, output] {
            result::free_async(pointer, raw[0]).unwrap();
        }
    }
    one.synchronize().unwrap();
}

/// A buffer that is freed on one stream while another still reads it.
fn dropped(bug: bool) {
    let (one, two) = two_streams();
    // SAFETY: as above.
    unsafe {
        let raw = [one.cu_stream(), two.cu_stream()];
        let [source, target] = [0; 2].map(|_: i32| result::malloc_async(raw[0], 64).unwrap());
        result::memset_d8_async(source, 7, 64, raw[0]).unwrap();
        one.synchronize().unwrap();
        result::memcpy_dtod_async(target, source, 64, raw[1]).unwrap();
        if !bug {
            one.join(&two).unwrap();
        }
        result::free_async(source, raw[0]).unwrap();
        one.synchronize().unwrap();
        two.synchronize().unwrap();
        result::free_async(target, raw[0]).unwrap();
    }
    one.synchronize().unwrap();
}

/// A buffer that is freed while an all-gather into it is under way.
fn gather(bug: bool) {
    let (compute, communication) = two_streams();
    // SAFETY: as above; the communicator is of one rank, and used by this thread alone.
    unsafe {
        let mut comm = std::ptr::null_mut();
        let id = cudarc::nccl::result::get_uniqueid().unwrap();
        cudarc::nccl::result::comm_init_rank(&mut comm, 1, id, 0).unwrap();
        let raw = [compute.cu_stream(), communication.cu_stream()];
        let [shard, whole] = [0; 2].map(|_: i32| result::malloc_async(raw[0], 64).unwrap());
        result::memset_d8_async(shard, 7, 64, raw[0]).unwrap();
        compute.synchronize().unwrap();
        let kind = cudarc::nccl::sys::ncclDataType_t::ncclFloat32;
        cudarc::nccl::result::all_gather(shard as *const _, whole as *mut _, 16, kind, comm, raw[1].cast()).unwrap();
        if !bug {
            compute.join(&communication).unwrap();
        }
        result::free_async(whole, raw[0]).unwrap();
        compute.synchronize().unwrap();
        communication.synchronize().unwrap();
        result::free_async(shard, raw[0]).unwrap();
        compute.synchronize().unwrap();
        cudarc::nccl::result::comm_destroy(comm).unwrap();
    }
}

#[test]
fn planted_bugs_are_found() {
    for (job, word) in [("workspace", "dtod"), ("dropped", "dtod"), ("gather", "AllGather")] {
        for seed in 0..10 {
            let settings = [("CUDA_SIM_SEED", seed.to_string()), ("CUDA_SIM_JITTER_US", "50".into())];
            let Some(good) = run_child(&format!("{job}:"), &settings) else { return };
            assert_clean(&good, job);
            let Some(bad) = run_child(&format!("{job}:bug"), &settings) else { return };
            let said = text(&bad);
            assert!(found(&bad) && said.contains(word), "{job}: {said}");
        }
    }
}
