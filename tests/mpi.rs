//! Ranks as processes over MPI: runs itself under `mpirun`, and looks at how the ranks end.
//!
//! `cargo test --features mpi --test mpi`. Without `mpirun` on the path it says so and fails: the feature was asked for.

#![allow(missing_docs)]

mod common;

use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_tensor_parallel::{
    DType, Error, Float, Group, LinearMode, MpiWorld, Overlap, Placement, Result, TensorParallelColumnLinear,
};
use common::{Data, LAYERS, MODES, OVERLAPS, Spec, dense, integer, run_rank};
use half::{bf16, f16};

const CASE: &str = "ATP_MPI_CASE";
/// What a rank that did nothing wrong says in the end.
const TOLD: &str = "survivor blames rank 2";

fn main() {
    match std::env::var(CASE) {
        Ok(case) => worker(&case),
        Err(_) => driver(),
    }
}

/// How a job ended.
struct Ended {
    success: bool,
    text: String,
    elapsed: Duration,
}

/// Runs a case on `ranks` ranks, for a minute at most.
fn mpirun(ranks: usize, case: &str) -> Ended {
    let begun = Instant::now();
    let mut child = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        // A rank that fails does not take the others with it: how they end is what is looked at.
        .args(["--mca", "orte_abort_on_non_zero_status", "0", "--mca", "btl_base_warn_component_unused", "0"])
        .arg(std::env::current_exe().unwrap())
        .env(CASE, case)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun is on the path");
    let text = Arc::new(Mutex::new(String::new()));
    let readers: [Box<dyn std::io::Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    let readers = readers.map(|reader| {
        let text = Arc::clone(&text);
        std::thread::spawn(move || {
            for line in std::io::BufReader::new(reader).lines().map_while(|line| line.ok()) {
                *text.lock().unwrap() += &(line + "\n");
            }
        })
    });
    let success = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.success(),
            // Some launchers wait for ever for a rank that was killed: the survivors have ended, and that is what counts.
            None if text.lock().unwrap().matches(TOLD).count() == 3 => {
                std::thread::sleep(Duration::from_millis(200));
                let _ = child.kill();
                let _ = child.wait();
                break false;
            }
            None if begun.elapsed() > Duration::from_secs(60) => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("{case} on {ranks} ranks: hung for a minute: {}", text.lock().unwrap());
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let elapsed = begun.elapsed();
    // A stopped rank may hold the pipes open for a while.
    if success {
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    }
    let text = text.lock().unwrap().clone();
    Ended { success, text, elapsed }
}

fn driver() {
    for ranks in 1..=4 {
        for case in ["exact", "collectives"] {
            let ended = mpirun(ranks, case);
            assert!(ended.success, "{case} on {ranks} ranks: {}", ended.text);
            assert_eq!(ended.text.matches("passed").count(), ranks, "{case}: {}", ended.text);
            println!("{case} on {ranks} ranks: ok in {:.1} s", ended.elapsed.as_secs_f64());
        }
    }
    let ended = mpirun(4, "training");
    assert!(ended.success && ended.text.matches("passed").count() == 4, "training: {}", ended.text);
    println!("training on 2 × 2 ranks: ok in {:.1} s", ended.elapsed.as_secs_f64());
    // Every survivor says which rank was at fault, and in time: the deadline is 2 s.
    for case in ["returns", "fails", "panics", "killed", "stopped", "mismatch", "size", "deaf"] {
        let ended = mpirun(4, case);
        let told = ended.text.matches(TOLD).count();
        assert_eq!(told, 3, "{case}: {}", ended.text);
        assert!(ended.elapsed < Duration::from_secs(20), "{case}: {:?}", ended.elapsed);
        println!("{case}: ok in {:.1} s", ended.elapsed.as_secs_f64());
    }
    // A rank is killed at any moment; nobody hangs and no result is wrong. `ATP_MPI_KILLS` says how often.
    let kills = std::env::var("ATP_MPI_KILLS").map_or(4, |text| text.parse().expect("a number"));
    for kill in 0..kills {
        let ended = mpirun(4, &format!("random {kill}"));
        let told = ended.text.matches(TOLD).count();
        assert!(told == 3 && !ended.text.contains("wrong result"), "kill {kill}: {}", ended.text);
    }
    println!("killed at {kills} random moments: ok");
    println!("test result: ok. 18 passed");
}

fn worker(case: &str) {
    let world = MpiWorld::init()
        .unwrap()
        .with_threads(1)
        .with_deadline(Duration::from_secs(if matches!(case, "exact" | "collectives" | "training") { 50 } else { 2 }));
    let world = world.with_check(case == "mismatch");
    let world = if case.starts_with("random") { world.with_deadline(Duration::from_secs(1)) } else { world };
    let outcome = match case {
        _ if case.starts_with("random") => world.run(|group| killed_at_random(group, case)),
        "exact" => world.run(exact),
        "collectives" => world.run(collectives),
        "training" => world.run(training),
        _ => world.run(|group| fault(group, case)),
    };
    match outcome {
        Ok(()) => println!("rank {} passed", world.rank()),
        Err(error) => {
            println!("rank {}: {error}", world.rank());
            if world.rank() != 2 && blames(&error, 2) {
                println!("{TOLD}");
            }
            use std::io::Write as _;
            let _ = std::io::stdout().flush();
            // What is left of MPI is of no use: the process goes at once.
            std::process::exit(1);
        }
    }
}

fn blames(error: &Error, rank: usize) -> bool {
    match error {
        // Who waits for a rank that gave up waiting is told what that one waited for.
        Error::PeerLost { rank: lost, reason, .. } => {
            *lost == rank || (reason.contains("not arrived") && reason.contains(&format!("rank {rank} ")))
        }
        Error::Timeout { missing, .. } => missing.contains(&format!("rank {rank} ")),
        Error::Mismatch { peer, .. } => *peer == rank,
        Error::Closed { cause, .. } => cause.contains(&format!("rank {rank}")),
        _ => false,
    }
}

/// Every layer, mode and overlap, bit for bit.
fn exact(group: &Group) -> Result<()> {
    fn all<T: Float>(group: &Group, overlaps: &[Overlap]) -> Result<()> {
        let n = group.world_size();
        for layer in LAYERS {
            for mode in MODES {
                for &overlap in overlaps {
                    let spec = Spec {
                        layer,
                        mode,
                        overlap,
                        world_size: n,
                        leading: 2 * n,
                        middle: vec![3],
                        in_features: 2 * n,
                        out_features: 3 * n,
                        bias: true,
                        recompute: true,
                        chunks: vec![],
                    };
                    let steps: Vec<Data> = (0..2)
                        .map(|step| {
                            Data::new(&spec, |which, i| integer(if which % 3 == 0 { step } else { 0 }, which, i))
                        })
                        .collect();
                    let got = run_rank::<T>(group, &spec, &steps)?;
                    for (got, want) in got.iter().zip(dense(&spec, &steps, group.rank())) {
                        let same = (&got.y, &got.dx, &got.dw, &got.db) == (&want.y, &want.dx, &want.dw, &want.db);
                        assert!(same, "rank {} of {spec:?}", group.rank());
                    }
                }
            }
        }
        Ok(())
    }
    all::<f32>(group, &OVERLAPS)?;
    all::<f64>(group, &[Overlap::Async, Overlap::Pipelined { chunks: 2 }])?;
    all::<bf16>(group, &[Overlap::Async, Overlap::Pipelined { chunks: 2 }])?;
    all::<f16>(group, &[Overlap::Blocking])?;
    all::<f32>(group, &[Overlap::Auto])
}

fn collectives(group: &Group) -> Result<()> {
    let (n, rank) = (group.world_size(), group.rank());
    for round in 0..200 {
        let value = (rank + round) as f32;
        let sum: f32 = (0..n).map(|rank| (rank + round) as f32).sum();
        let rows = group.tensor(&vec![value; 1000], &[10, 100], Placement::Rows)?;
        let gathered = group.all_gather(&rows)?;
        let whole = group.tensor(&vec![value; n * 50], &[n * 5, 10], Placement::Partial)?;
        let scattered = group.reduce_scatter(&whole)?;
        let reduced = group.all_reduce(&whole)?;
        let largest = group.all_reduce_max(&whole)?;
        let sent = group.broadcast(round % n, &rows)?;
        assert!(
            gathered
                .wait()?
                .to_vec()?
                .chunks(1000)
                .enumerate()
                .all(|(r, rows)| rows.iter().all(|v| *v == (r + round) as f32))
        );
        assert_eq!(scattered.wait()?.to_vec()?, vec![sum; 50]);
        assert_eq!(reduced.wait()?.to_vec()?, vec![sum; n * 50]);
        assert_eq!(largest.wait()?.to_vec()?, vec![(n - 1 + round) as f32; n * 50]);
        assert_eq!(sent.wait()?.to_vec()?, vec![(round % n + round) as f32; 1000]);
    }
    // A large message, round a ring, both directions at once.
    if n > 1 {
        let big = group.tensor(&vec![rank as f64; 1 << 20], &[1 << 20], Placement::Replicated)?;
        let send = group.send((rank + 1) % n, &big)?;
        let got = group.receive::<f64>((rank + n - 1) % n, &[1 << 20], Placement::Replicated)?.wait()?;
        send.wait()?;
        assert!(got.to_vec()?.iter().all(|value| *value == ((rank + n - 1) % n) as f64));
    }
    // Groups of their own, in another order of ranks.
    let half = group.split(Some(rank % 2), n - rank)?.expect("every rank has a color");
    let total = half.all_reduce(&half.tensor(&[rank as f32], &[1], Placement::Partial)?)?.wait()?.to_vec()?;
    assert_eq!(total, [(0..n).filter(|other| other % 2 == rank % 2).sum::<usize>() as f32]);
    let none = group.split((rank > 0).then_some(7), rank)?;
    assert_eq!(none.is_some(), rank > 0);
    if let Some(rest) = none {
        assert_eq!((rest.world_size(), rest.rank()), (n - 1, rank - 1));
        rest.barrier()?;
    }
    drop(half);
    group.barrier()?;
    assert_eq!(group.tensor(&[1f32], &[1], Placement::Rows)?.dtype(), DType::F32);
    Ok(())
}

/// Two copies of two ranks each lose what one rank does, step by step.
fn training(group: &Group) -> Result<()> {
    let want = common::training::losses_of_one_rank(20)?;
    for mode in MODES {
        for overlap in [Overlap::Async, Overlap::Pipelined { chunks: 2 }] {
            let got = common::training::losses(group, 2, 2, mode, overlap, 20)?;
            let close = |(got, want): (&f64, &f64)| (got - want).abs() <= 1e-5 * want.max(1.0);
            assert!(got.iter().zip(&want).all(close), "{mode:?} {overlap}: {got:?}, wanted {want:?}");
        }
    }
    Ok(())
}

/// Rank 2 is killed at a moment that the case's number chooses; the others check every result until they notice.
fn killed_at_random(group: &Group, case: &str) -> Result<()> {
    let number: u64 = case.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_default();
    if group.rank() == 2 {
        let micros = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46;
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(micros));
            let _ = Command::new("kill").args(["-KILL", &std::process::id().to_string()]).status();
        });
    }
    for round in 0u32.. {
        let value = round as f32 + group.rank() as f32;
        let rows = group.tensor(&vec![value; 4096], &[4, 1024], Placement::Rows)?;
        let whole = group.tensor(&vec![value; 4096], &[4, 1024], Placement::Partial)?;
        let (gathered, sum) = (group.all_gather(&rows)?, group.reduce_scatter(&whole)?);
        let (gathered, sum) = (gathered.wait()?.to_vec()?, sum.wait()?.to_vec()?);
        let right =
            gathered.chunks(4096).enumerate().all(|(r, rows)| rows.iter().all(|v| *v == (round as usize + r) as f32));
        if !right || sum.iter().any(|v| *v != 4.0 * round as f32 + 6.0) {
            println!("wrong result in round {round}");
        }
    }
    Ok(())
}

/// Rank 2 does what the case says in the middle of a run; the others go on until they notice.
fn fault(group: &Group, case: &str) -> Result<()> {
    let n = group.world_size();
    if case == "deaf" {
        // Nothing is to come from rank 2: it does not take what it is sent.
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_secs(5));
            return Ok(());
        }
        return group
            .send(2, &group.tensor(&vec![1f64; 1 << 20], &[1 << 20], Placement::Replicated)?)?
            .wait()
            .map(drop);
    }
    let layer = TensorParallelColumnLinear::<f32>::builder(64, 64 * n).mode(LinearMode::ReduceScatter).build(group)?;
    let x = group.tensor(&vec![1.0; 64 * 64], &[64, 64], Placement::Rows)?;
    for round in 0.. {
        if round == 20 && group.rank() == 2 {
            match case {
                "returns" => return Ok(()),
                "fails" => return Err(Error::Argument { what: "test", got: "a fault".into(), wanted: "none".into() }),
                "panics" => panic!("deliberate"),
                "killed" | "stopped" => {
                    let signal = if case == "killed" { "-KILL" } else { "-STOP" };
                    let pid = std::process::id();
                    // A stopped process does not end by itself: something else must end it later.
                    let later = format!("sleep 8; kill -KILL {pid} 2>/dev/null");
                    let _ = Command::new("sh")
                        .args(["-c", &later])
                        .stdin(Stdio::null())
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .spawn();
                    let _ = Command::new("kill").args([signal, &pid.to_string()]).status();
                    std::thread::sleep(Duration::from_secs(30));
                }
                "mismatch" => {
                    group.all_reduce(&group.tensor(&[1f32; 8], &[8], Placement::Partial)?)?.wait().map(drop)?
                }
                _ => {
                    let other = group.tensor(&vec![1.0; 32 * 64], &[32, 64], Placement::Rows)?;
                    layer.forward(&other)?;
                }
            }
        }
        layer.forward(&x)?;
    }
    Ok(())
}
