//! Runs parity cases: `parity FILE_OR_DIR… [--overlap NAME]… [--backend cpu|cuda] [--communicator local|nccl|peer]`.
//!
//! Each case holds what every rank of one layer saw and returned in another implementation (the format is described in
//! `case.rs`). It is run here with one thread a rank, under every overlap, and all outputs and gradients are compared. A
//! line a case; the last line is `N passed, N failed`; the exit status is 1 where any failed. Users check their own dumps
//! with it.

#![allow(unreachable_pub)]

mod case;
mod run;
#[path = "../common/world.rs"]
mod world;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use async_tensor_parallel::Overlap;
use case::Case;
use world::{Engine, Flags};

fn main() -> ExitCode {
    let (paths, overlaps, engine) = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            let usage = "usage: parity FILE_OR_DIR... [--overlap blocking|async|pipelined[:CHUNKS]|auto]...";
            eprintln!("{error}\n{usage}\n{}", world::HELP);
            return ExitCode::from(2);
        }
    };
    let files = match paths.iter().map(|path| files(path)).collect::<Result<Vec<_>, _>>() {
        Ok(files) => files.concat(),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    // Of the processes of a job, one speaks.
    let (ranks, speaks) = match run::job(engine) {
        Ok(job) => job,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let say = |text: String| {
        if speaks {
            println!("{text}");
        }
    };
    let (mut passed, mut failed, mut skipped) = (0, 0, Vec::new());
    for file in &files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let case = Case::read(file);
        if let (Ok(case), Some(ranks)) = (&case, ranks)
            && case.world_size != ranks
        {
            say(format!("{name}: skipped, it is for {} ranks", case.world_size));
            skipped.push(name.to_string());
            continue;
        }
        let most = if engine == Engine::Nccl { engine.most_ranks() } else { None };
        if let (Ok(case), Some(most)) = (&case, most)
            && case.world_size > most
        {
            say(format!("{name}: skipped, it is for {} ranks and there are {most} GPUs", case.world_size));
            skipped.push(name.to_string());
            continue;
        }
        let outcome = case.map_err(|error| error.to_string()).and_then(|case| run::run(&case, &overlaps, engine));
        match outcome {
            Ok(run::Outcome::Compared { worst, passes: true, .. }) => {
                say(format!("{name}: ok, largest relative error {worst:.1e}"));
                passed += 1;
            }
            Ok(run::Outcome::Compared { worst, which, .. }) => {
                say(format!("{name}: FAILED, relative error {worst:.1e} in {which}"));
                failed += 1;
            }
            Ok(run::Outcome::Unknown) => {
                say(format!("{name}: skipped, its layer is not known here"));
                skipped.push(name.to_string());
            }
            Err(error) => {
                say(format!("{name}: FAILED, {error}"));
                failed += 1;
            }
        }
    }
    if !skipped.is_empty() {
        say(format!("{} skipped: {}", skipped.len(), skipped.join(", ")));
    }
    say(format!("{passed} passed, {failed} failed"));
    world::finish();
    if failed > 0 || passed + skipped.len() == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn arguments() -> Result<(Vec<PathBuf>, Vec<Overlap>, Engine), lexopt::Error> {
    use lexopt::prelude::*;
    let (mut paths, mut overlaps) = (Vec::new(), Vec::new());
    let (mut flags, mut parser) = (Flags::default(), lexopt::Parser::from_env());
    while let Some(argument) = parser.next()? {
        match argument {
            Value(path) => paths.push(path.into()),
            Long("overlap") => overlaps.push(parser.value()?.parse()?),
            Long(name) => {
                let name = name.to_string();
                if !flags.take(&name, &mut parser)? {
                    return Err(format!("unknown flag --{name}").into());
                }
            }
            _ => return Err(argument.unexpected()),
        }
    }
    if paths.is_empty() {
        return Err("no file or directory given".into());
    }
    if overlaps.is_empty() {
        overlaps =
            vec![Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 0 }, Overlap::Pipelined { chunks: 3 }];
    }
    Ok((paths, overlaps, flags.engine()?))
}

/// The file itself, or all `.safetensors` files of a directory, in order.
fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if !std::fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut files: Vec<PathBuf> = entries
        .into_iter()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    Ok(files)
}
