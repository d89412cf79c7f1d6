//! Compares modes and overlaps: what is hidden, what it saves, and that nothing is computed differently.
//!
//! `cargo run --release --example overlap_modes -- --help` lists the flags. Every result is compared with a dense float64
//! one, and the process fails where it differs.

#![allow(unreachable_pub)]

mod layers;
mod measure;
mod options;
#[path = "../common/world.rs"]
mod world;

use std::io::Write as _;
use std::process::ExitCode;

use async_tensor_parallel::timeline::{self, Span};
use async_tensor_parallel::{DType, Float, Group, LinearMode, Link, LocalWorld, Overlap, Pass, Result};
use half::{bf16, f16};
use layers::{Bench, Data, Kind, Problem};
use measure::{Parts, parts, timed};
use options::{HELP, LinkChoice, Options};
use world::{Engine, World};

const OVERLAPS: [Overlap; 4] = [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 0 }, Overlap::Auto];
/// Those whose timelines are drawn: Auto is one of them.
const DRAWN: [Overlap; 3] = [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 0 }];

fn main() -> ExitCode {
    let options = match Options::from_args() {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}{}", world::HELP);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{HELP}{}", world::HELP);
            return ExitCode::from(2);
        }
    };
    let outcome = match options.dtype {
        DType::F64 => compare::<f64>(&options, 1e-12),
        DType::BF16 => compare::<bf16>(&options, 6e-2),
        DType::F16 => compare::<f16>(&options, 8e-3),
        _ => compare::<f32>(&options, 1e-4),
    };
    world::finish();
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One line of the table.
struct Row {
    kind: Kind,
    mode: LinearMode,
    overlap: Overlap,
    forward: Timing,
    backward: Timing,
    max_error: f64,
}

/// One direction of one line, in seconds.
#[derive(Clone, Copy)]
struct Timing {
    time: f64,
    compute: f64,
    communication: f64,
    /// The larger of compute and communication.
    bound: f64,
    /// What the overlap's own schedule cannot go below.
    schedule_bound: f64,
    speedup: f64,
}

impl Timing {
    /// `None` where there is nothing to hide.
    fn hidden_percent(&self) -> Option<f64> {
        (self.communication > 0.0)
            .then(|| 100.0 * timeline::hidden_fraction(self.compute, self.communication, self.time))
    }
}

fn compare<T: Float>(options: &Options, tolerance: f64) -> Result<bool> {
    let &Options { ranks, rows, in_features, out_features, .. } = options;
    if options.engine == Engine::Mpi && !World::new(Engine::Mpi, ranks)?.is_first() {
        QUIET.store(true, std::sync::atomic::Ordering::Relaxed);
    }
    let column = Problem { kind: Kind::Column, recompute: options.recompute, rows, in_features, out_features };
    let row = Problem {
        kind: Kind::Row,
        recompute: options.recompute,
        rows,
        in_features: out_features,
        out_features: in_features,
    };
    note("computing the dense float64 results");
    let problems = [(column, Data::<T>::new(column)?), (row, Data::<T>::new(row)?)];

    let world = match (options.engine, &options.link) {
        // Other engines have a link of their own.
        (Engine::Local, LinkChoice::Fixed(link)) => World::Local(LocalWorld::new(ranks)?.with_link(*link)?),
        (Engine::Local, LinkChoice::Balanced) => {
            note("measuring the matmul, to choose a link that is as fast");
            World::Local(LocalWorld::new(ranks)?.with_link(balanced::<T>(&problems[0], ranks)?)?)
        }
        (engine, _) => World::new(engine, ranks)?,
    };
    let mut results = world.run(|group| measure_all(group, options, &problems))?;
    let table = results.swap_remove(0);
    let recorded = record(&world, &problems)?;

    let ranks = world.launched_ranks().unwrap_or(ranks);
    if !world.is_first() {
        return Ok(table.iter().all(|row| row.max_error <= tolerance));
    }
    if options.json {
        table.iter().for_each(|row| println!("{}", json(row, ranks)));
    } else {
        print_table(&table, &Options { ranks, ..options.clone() }, &world);
    }
    write_timelines(options, &recorded)?;
    let worst = table.iter().fold(0f64, |worst, row| worst.max(row.max_error));
    let holds = worst <= tolerance;
    if holds {
        note(&format!("every result agrees with the dense float64 one: largest relative error {worst:.1e}"));
    } else {
        eprintln!("FAILED: largest relative error {worst:.1e}, allowed {tolerance:.0e}");
    }
    Ok(holds)
}

/// A link over which the column layer's gather takes as long as its matmul.
fn balanced<T: Float>((problem, data): &(Problem, Data<T>), ranks: usize) -> Result<Link> {
    let seconds = LocalWorld::new(ranks)?.run(|group| {
        let bench = Bench::new(group, *problem, LinearMode::AllReduce, Overlap::Blocking, data)?;
        let mut times = (0..4).map(|_| parts(group, &bench).map(|parts| parts.forward)).collect::<Result<Vec<_>>>()?;
        Ok(median(&mut times[1..]))
    })?;
    let received = problem.rows * problem.in_features * T::DTYPE.size() * (ranks - 1) / ranks;
    Ok(Link { bandwidth: (received as f64 / seconds[0]).max(1e6), latency: std::time::Duration::from_micros(10) })
}

/// All lines of the table, as this rank sees them (times are the slowest rank's, and so the same on all).
fn measure_all<T: Float>(group: &Group, options: &Options, problems: &[(Problem, Data<T>); 2]) -> Result<Vec<Row>> {
    let mut table = Vec::new();
    for (problem, data) in problems {
        for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
            let benches = OVERLAPS
                .map(|overlap| Bench::new(group, *problem, mode, overlap, data))
                .into_iter()
                .collect::<Result<Vec<_>>>()?;
            let errors = benches.iter().map(|bench| bench.error(group, data)).collect::<Result<Vec<_>>>()?;
            let mut alone: Vec<Parts> = Vec::new();
            let mut times = vec![[Vec::new(), Vec::new()]; benches.len()];
            // The first round warms up. The variants take turns, so that a change of the machine's mood meets them all.
            for round in 0..=options.repeat {
                if group.rank() == 0 {
                    progress(&format!("{:?} {mode:?}: round {round} of {}", problem.kind, options.repeat));
                }
                let measured = parts(group, &benches[0])?;
                if round > 0 {
                    alone.push(measured);
                }
                for (bench, times) in benches.iter().zip(&mut times) {
                    let mut saved = None;
                    let forward = timed(group, || {
                        saved = Some(bench.forward()?.1);
                        Ok(())
                    })?;
                    let backward = timed(group, || match saved {
                        Some(saved) => bench.backward(saved).map(drop),
                        None => Ok(()),
                    })?;
                    if round > 0 {
                        times[0].push(forward);
                        times[1].push(backward);
                    }
                }
            }
            let alone = median_parts(&alone);
            let baseline = [median(&mut times[0][0].clone()), median(&mut times[0][1].clone())];
            for ((bench, times), error) in benches.iter().zip(&mut times).zip(errors) {
                let pass = |time: f64, compute: f64, communication: f64, schedule_bound, baseline: f64| Timing {
                    time,
                    compute,
                    communication,
                    bound: compute.max(communication),
                    schedule_bound,
                    speedup: baseline / time,
                };
                let n = group.world_size();
                let schedules = [bench.schedule(Pass::Forward)?, bench.schedule(Pass::Backward)?];
                table.push(Row {
                    kind: problem.kind,
                    mode,
                    overlap: bench.overlap,
                    forward: pass(
                        median(&mut times[0]),
                        alone.forward,
                        alone.forward_communication,
                        alone.forward_bound(problem.kind, mode, schedules[0], n),
                        baseline[0],
                    ),
                    backward: pass(
                        median(&mut times[1]),
                        alone.backward(),
                        alone.backward_communication(),
                        alone.backward_bound(problem.kind, mode, schedules[1], n),
                        baseline[1],
                    ),
                    max_error: worst_of_ranks(group, error)?,
                });
            }
        }
    }
    Ok(table)
}

fn worst_of_ranks(group: &Group, error: f64) -> Result<f64> {
    let error = group.tensor(&[error], &[1], async_tensor_parallel::Placement::Partial)?;
    Ok(group.all_reduce_max(&error)?.wait()?.to_vec()?[0])
}

/// Records one forward and backward pass of each layer in ReduceScatter mode under every overlap.
fn record<T: Float>(world: &World, problems: &[(Problem, Data<T>); 2]) -> Result<Vec<(Kind, Overlap, Vec<Span>)>> {
    let mut recorded = Vec::new();
    for (problem, data) in problems {
        for overlap in DRAWN {
            let mut spans = world.run(|group| {
                let bench = Bench::new(group, *problem, LinearMode::ReduceScatter, overlap, data)?;
                for _ in 0..2 {
                    let (y, saved) = bench.forward()?;
                    drop((y, bench.backward(saved)?));
                }
                group.barrier()?;
                if group.rank() == 0 {
                    group.recorder().start();
                }
                group.barrier()?;
                let (_, saved) = bench.forward()?;
                bench.backward(saved)?;
                // Nobody is recorded beyond this point but in the barrier itself.
                group.barrier()?;
                Ok(if group.rank() == 0 { group.recorder().stop() } else { Vec::new() })
            })?;
            let mut spans = spans.swap_remove(0);
            spans.retain(|span| span.name != "barrier");
            recorded.push((problem.kind, overlap, spans));
        }
    }
    Ok(recorded)
}

fn write_timelines(options: &Options, recorded: &[(Kind, Overlap, Vec<Span>)]) -> Result<()> {
    let write = |name: String, content: String| {
        let path = options.timeline.join(name);
        std::fs::write(&path, content).map_err(|error| async_tensor_parallel::Error::Io {
            what: format!("writing {}", path.display()),
            message: error.to_string(),
        })
    };
    std::fs::create_dir_all(&options.timeline).map_err(|error| async_tensor_parallel::Error::Io {
        what: format!("making {}", options.timeline.display()),
        message: error.to_string(),
    })?;
    for kind in [Kind::Column, Kind::Row] {
        let name = format!("{kind:?}").to_lowercase();
        let of_kind: Vec<_> = recorded.iter().filter(|(recorded, ..)| *recorded == kind).collect();
        for (_, overlap, spans) in &of_kind {
            write(format!("{name}_{overlap}.json"), timeline::chrome_json(spans))?;
        }
        let titled: Vec<(String, &[Span])> = of_kind
            .iter()
            .map(|(_, overlap, spans)| (format!("{kind:?} linear, ReduceScatter, {overlap}"), &spans[..]))
            .collect();
        let titled: Vec<(&str, &[Span])> = titled.iter().map(|(title, spans)| (title.as_str(), *spans)).collect();
        write(format!("{name}.svg"), timeline::stacked(&titled))?;
    }
    note(&format!(
        "timelines are in {}: open column.svg, or the .json files in ui.perfetto.dev",
        options.timeline.display()
    ));
    Ok(())
}

fn print_table(table: &[Row], options: &Options, world: &World) {
    let Options { ranks, rows, in_features, out_features, dtype, repeat, .. } = options;
    println!(
        "{ranks} ranks, {rows} rows, column {in_features} -> {out_features}, row {out_features} -> {in_features}, {dtype:?}; {}",
        world.describe()
    );
    println!("medians of {repeat} interleaved repetitions; the slowest rank counts\n");
    println!(
        "                               |            forward, ms             |            backward, ms            |"
    );
    println!(
        "layer  mode          overlap   |  time comm. hidden speedup  bound  |  time comm. hidden speedup  bound  | max error"
    );
    println!(
        "-------------------------------|------------------------------------|------------------------------------|----------"
    );
    for row in table {
        let pass = |pass: &Timing| {
            let hidden = pass.hidden_percent().map_or("-".into(), |hidden| format!("{hidden:.0} %"));
            format!(
                "{:6.1} {:5.1} {hidden:>6} {:6.2}x  {:6.1}  ",
                pass.time * 1e3,
                pass.communication * 1e3,
                pass.speedup,
                pass.schedule_bound * 1e3,
            )
        };
        println!(
            "{:6} {:13} {:9} | {} | {} | {:.1e}",
            format!("{:?}", row.kind),
            format!("{:?}", row.mode),
            row.overlap,
            pass(&row.forward),
            pass(&row.backward),
            row.max_error
        );
    }
    println!();
    for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
        let step = |overlap: Overlap| -> f64 {
            let rows = table.iter().filter(|row| row.mode == mode && row.overlap == overlap);
            rows.map(|row| row.forward.time + row.backward.time).sum()
        };
        let of =
            |overlap| format!("{overlap} {:.0} ms ({:.2}x)", step(overlap) * 1e3, step(OVERLAPS[0]) / step(overlap));
        println!("whole step of both layers, {mode:?}: {}", OVERLAPS.map(of).join(", "));
    }
    println!("\nbound: what the schedule cannot go below, from its matmuls and collectives measured alone");
}

fn json(row: &Row, ranks: usize) -> String {
    let pass = |name: &str, pass: &Timing| {
        let hidden = pass.hidden_percent().map_or("null".into(), |hidden| format!("{hidden:.2}"));
        format!(
            "\"{name}_ms\":{:.4},\"{name}_compute_ms\":{:.4},\"{name}_communication_ms\":{:.4},\"{name}_hidden_percent\":{hidden},\
             \"{name}_bound_ms\":{:.4},\"{name}_schedule_bound_ms\":{:.4},\"{name}_speedup_over_blocking\":{:.4}",
            pass.time * 1e3,
            pass.compute * 1e3,
            pass.communication * 1e3,
            pass.bound * 1e3,
            pass.schedule_bound * 1e3,
            pass.speedup,
        )
    };
    format!(
        "{{\"layer\":\"{}\",\"mode\":\"{}\",\"overlap\":\"{}\",\"ranks\":{ranks},{},{},\"max_error\":{:e}}}",
        format!("{:?}", row.kind).to_lowercase(),
        match row.mode {
            LinearMode::AllReduce => "all_reduce",
            LinearMode::ReduceScatter => "reduce_scatter",
        },
        row.overlap,
        pass("forward", &row.forward),
        pass("backward", &row.backward),
        row.max_error
    )
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    (low + high) / 2.0
}

fn median_parts(parts: &[Parts]) -> Parts {
    let of = |part: fn(&Parts) -> f64| median(&mut parts.iter().map(part).collect::<Vec<_>>());
    Parts {
        forward: of(|parts| parts.forward),
        input_grad: of(|parts| parts.input_grad),
        weight_grad: of(|parts| parts.weight_grad),
        forward_communication: of(|parts| parts.forward_communication),
        gather: of(|parts| parts.gather),
        reduce: of(|parts| parts.reduce),
    }
}

/// Set in the processes that do not speak for all.
static QUIET: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

fn quiet() -> bool {
    QUIET.load(std::sync::atomic::Ordering::Relaxed)
}

/// A line on standard error, in the progress line's place.
fn note(text: &str) {
    if quiet() {
        return;
    }
    eprintln!("\r{text:<78}");
}

fn progress(text: &str) {
    if quiet() {
        return;
    }
    eprint!("\r{text:<78}");
    let _ = std::io::stderr().flush();
}
