//! The block that tensor parallelism was made for: column layer, activation, row layer, forward and backward, in both
//! modes. The hidden activation is never whole anywhere, and only the outer ones travel.
//!
//! `cargo run --release --example mlp_block` trains it for a few steps and checks that every mode, overlap and number of
//! ranks follows the same losses as one rank. `-- --backend cuda` does so on CUDA devices.

#[path = "common/world.rs"]
mod world;

use std::process::ExitCode;

use async_tensor_parallel::{
    Group, LinearMode, Overlap, Placement, Result, Tensor, TensorParallelColumnLinear, TensorParallelRowLinear,
};
use world::{Engine, Flags, World};

const ROWS: usize = 12;
const HIDDEN: usize = 12;
const FFN: usize = 24;
const STEPS: usize = 30;

fn main() -> ExitCode {
    let engine = match engine() {
        Ok(engine) => engine,
        Err(error) => {
            eprintln!("{error}\n\n{}", world::HELP);
            return ExitCode::from(2);
        }
    };
    let outcome = compare(engine);
    world::finish();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn engine() -> std::result::Result<Engine, lexopt::Error> {
    let (mut flags, mut parser) = (Flags::default(), lexopt::Parser::from_env());
    while let Some(argument) = parser.next()? {
        let known = match argument {
            lexopt::Arg::Long(name) => {
                let name = name.to_string();
                flags.take(&name, &mut parser)?
            }
            _ => false,
        };
        if !known {
            return Err("an unknown argument".into());
        }
    }
    Ok(flags.engine()?)
}

fn compare(engine: Engine) -> Result<()> {
    // Whatever the others run on, one rank needs nobody.
    let one = if engine == Engine::Mpi { Engine::Local } else { engine };
    let alone = train(one, 1, LinearMode::AllReduce, Overlap::Blocking)?;
    let first = World::new(engine, 1)?;
    println!("1 rank: losses {:.4} … {:.4}", alone[0], alone[STEPS - 1]);
    assert!(alone[STEPS - 1] < 0.6 * alone[0], "it does not learn: {alone:?}");
    let launched = first.launched_ranks();
    let most = if engine == Engine::Nccl { engine.most_ranks() } else { None };
    let several = || [1, 2, 4].into_iter().filter(|ranks| most.is_none_or(|most| *ranks <= most)).collect();
    for ranks in launched.map_or_else(several, |ranks| vec![ranks]) {
        for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
            for overlap in [Overlap::Blocking, Overlap::Async] {
                let losses = train(engine, ranks, mode, overlap)?;
                let worst = losses.iter().zip(&alone).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
                if first.is_first() {
                    println!("{ranks} ranks, {mode:?}, {overlap:?}: losses differ by at most {worst:.1e}");
                }
                assert!(worst < 1e-5, "{losses:?} against {alone:?}");
            }
        }
    }
    Ok(())
}

/// The losses of a few steps of gradient descent.
fn train(engine: Engine, ranks: usize, mode: LinearMode, overlap: Overlap) -> Result<Vec<f32>> {
    let mut losses = World::new(engine, ranks)?.run(|group| {
        let up = TensorParallelColumnLinear::<f32>::builder(HIDDEN, FFN)
            .mode(mode)
            .overlap(overlap)
            .bias(true)
            .seed(1)
            .build(group)?;
        let down = TensorParallelRowLinear::<f32>::builder(FFN, HIDDEN)
            .mode(mode)
            .overlap(overlap)
            .bias(true)
            .seed(2)
            .build(group)?;
        let x = outer(group, mode, |r, i| ((r * 5 + i * 3) % 7) as f32 / 7.0 - 0.5)?;
        let target = outer(group, mode, |r, i| ((r * 2 + i) % 5) as f32 / 5.0 - 0.5)?;

        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let (hidden, saved_up) = up.forward(&x)?;
            let active = map(group, &hidden, |value| value.max(0.0))?;
            let (y, saved_down) = down.forward(&active)?;

            let (loss, dy) = mean_square(group, mode, &y, &target)?;
            losses.push(loss);

            let d_active = down.backward(saved_down, &dy)?;
            let d_hidden = zip(group, &d_active, &hidden, |grad, value| if value > 0.0 { grad } else { 0.0 })?;
            up.backward(saved_up, &d_hidden)?;

            for parameter in [Some(up.weight()), up.bias(), Some(down.weight()), down.bias()].into_iter().flatten() {
                parameter.add_grad(-2.0)?;
                parameter.zero_grad();
            }
        }
        Ok(losses)
    })?;
    Ok(losses.swap_remove(0))
}

/// An outer activation: whole in AllReduce mode, this rank's rows in ReduceScatter mode.
fn outer(group: &Group, mode: LinearMode, value: impl Fn(usize, usize) -> f32) -> Result<Tensor<f32>> {
    let (first, rows, placement) = match mode {
        LinearMode::AllReduce => (0, ROWS, Placement::Replicated),
        LinearMode::ReduceScatter => {
            let rows = ROWS / group.world_size();
            (group.rank() * rows, rows, Placement::Rows)
        }
    };
    let values: Vec<f32> = (0..rows * HIDDEN).map(|k| value(first + k / HIDDEN, k % HIDDEN)).collect();
    group.tensor(&values, &[rows, HIDDEN], placement)
}

fn map(group: &Group, x: &Tensor<f32>, f: impl Fn(f32) -> f32) -> Result<Tensor<f32>> {
    let values: Vec<f32> = x.to_vec()?.into_iter().map(f).collect();
    group.tensor(&values, x.shape(), x.placement())
}

fn zip(group: &Group, a: &Tensor<f32>, b: &Tensor<f32>, f: impl Fn(f32, f32) -> f32) -> Result<Tensor<f32>> {
    let values: Vec<f32> = a.to_vec()?.into_iter().zip(b.to_vec()?).map(|(a, b)| f(a, b)).collect();
    group.tensor(&values, a.shape(), a.placement())
}

/// The mean square error over the whole, the same on all ranks, and its gradient.
fn mean_square(group: &Group, mode: LinearMode, y: &Tensor<f32>, target: &Tensor<f32>) -> Result<(f32, Tensor<f32>)> {
    let count = (ROWS * HIDDEN) as f32;
    let difference = zip(group, y, target, |y, target| y - target)?;
    let own: f32 = difference.to_vec()?.iter().map(|d| d * d).sum::<f32>() / count;
    let loss = match mode {
        // Every rank holds all rows already.
        LinearMode::AllReduce => own,
        LinearMode::ReduceScatter => {
            group.all_reduce(&group.tensor(&[own], &[1], Placement::Partial)?)?.wait()?.to_vec()?[0]
        }
    };
    Ok((loss, map(group, &difference, |d| 2.0 * d / count)?))
}
