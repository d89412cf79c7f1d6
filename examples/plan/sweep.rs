//! Predictions against measurements.

use std::time::Instant;

use async_tensor_parallel::{
    Group, LayerKind, LinearMode, LocalWorld, Overlap, Pass, Placement, Plan, Result, Site, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};

const OVERLAPS: [Overlap; 5] = [
    Overlap::Blocking,
    Overlap::Async,
    Overlap::Pipelined { chunks: 1 },
    Overlap::Pipelined { chunks: 2 },
    Overlap::Pipelined { chunks: 4 },
];
const ROUNDS: usize = 9;

/// 10 shapes × two directions × two modes.
fn shapes() -> Vec<(LayerKind, LinearMode, usize, usize, usize)> {
    let mut shapes = Vec::new();
    for layer in [LayerKind::Column, LayerKind::Row] {
        for mode in [LinearMode::ReduceScatter, LinearMode::AllReduce] {
            for (rows, narrow, wide) in
                [(1024, 1024, 2048), (2048, 1024, 2048), (2048, 512, 4096), (2048, 1024, 4096), (4096, 1024, 2048)]
            {
                let (inner, out) = if layer == LayerKind::Column { (narrow, wide) } else { (wide, narrow) };
                shapes.push((layer, mode, rows, inner, out));
            }
        }
    }
    shapes
}

/// Measures every shape under every overlap and compares with the plan.
pub(crate) fn sweep(world: &LocalWorld, plan: &Plan) -> Result<()> {
    println!("{:<58} {:<12} {:>9} {:>9} {:>7}  best measured", "call", "chosen", "predicted", "measured", "error");
    let (mut close, mut predictions, mut right, mut calls) = (0, 0, 0, 0);
    for (layer, mode, rows, in_features, out_features) in shapes() {
        let times = world.run(|group| measure(group, layer, mode, rows, in_features, out_features))?.swap_remove(0);
        for (index, pass) in [Pass::Forward, Pass::Backward].into_iter().enumerate() {
            let site = Site { layer, mode, pass, rows, in_features, out_features, gathers_again: true };
            let measured: Vec<f64> = times.iter().map(|passes| passes[index]).collect();
            for (overlap, measured) in OVERLAPS.iter().zip(&measured) {
                predictions += 1;
                close += usize::from((plan.predict(&site, *overlap).seconds / measured - 1.0).abs() <= 0.15);
            }
            let choice = plan.choose(&site);
            // What the plan may choose beyond those measured is like the last of them.
            let at = OVERLAPS.iter().position(|overlap| *overlap == choice).unwrap_or(OVERLAPS.len() - 1);
            let best = measured.iter().copied().fold(f64::INFINITY, f64::min);
            let fastest = OVERLAPS[measured.iter().position(|time| *time == best).unwrap_or_default()];
            // Where nothing is communicated all overlaps do the same, and the best of them is the luckiest.
            let differs = plan.predict(&site, Overlap::Blocking).communication > 0.0;
            let good = !differs || measured[at] <= best * 1.05;
            calls += usize::from(differs);
            right += usize::from(differs && good);
            let predicted = plan.predict(&site, OVERLAPS[at]).seconds;
            println!(
                "{:<58} {:<12} {:>9.2} {:>9.2} {:>5.0} %  {} {:.2}{}",
                site.to_string(),
                choice.to_string(),
                predicted * 1e3,
                measured[at] * 1e3,
                (predicted / measured[at] - 1.0) * 100.0,
                fastest,
                best * 1e3,
                if good { "" } else { "  <- missed" }
            );
        }
    }
    let percent = |part: usize, whole: usize| 100.0 * part as f64 / whole as f64;
    println!("\n{predictions} predictions; {calls} calls that communicate");
    println!("within 15 % of the measured time: {:.0} % of the predictions (goal: 80 %)", percent(close, predictions));
    println!("choice within 5 % of the best measured: {:.0} % of the calls (goal: 95 %)", percent(right, calls));
    Ok(())
}

/// Median seconds of forward and backward under each overlap, interleaved.
fn measure(
    group: &Group,
    layer: LayerKind,
    mode: LinearMode,
    rows: usize,
    in_features: usize,
    out_features: usize,
) -> Result<Vec<[f64; 2]>> {
    let n = group.world_size();
    let (outer_rows, outer) = match mode {
        LinearMode::AllReduce => (rows, Placement::Replicated),
        LinearMode::ReduceScatter => (rows / n, Placement::Rows),
    };
    let filled = |rows: usize, features: usize, placement| {
        group.tensor(&vec![0.5f32; rows * features], &[rows, features], placement)
    };
    macro_rules! times {
        ($layer:ident, $x:expr, $dy:expr) => {{
            let layers = OVERLAPS
                .iter()
                .map(|overlap| {
                    $layer::<f32>::builder(in_features, out_features).mode(mode).overlap(*overlap).build(group)
                })
                .collect::<Result<Vec<_>>>()?;
            let (x, dy) = ($x?, $dy?);
            let mut samples = vec![[Vec::new(), Vec::new()]; layers.len()];
            for round in 0..=ROUNDS {
                for (layer, samples) in layers.iter().zip(&mut samples) {
                    let mut saved = None;
                    let forward = slowest(group, || {
                        saved = Some(layer.forward(&x)?.1);
                        Ok(())
                    })?;
                    let backward = slowest(group, || match saved {
                        Some(saved) => layer.backward(saved, &dy).map(drop),
                        None => Ok(()),
                    })?;
                    if round > 0 {
                        samples[0].push(forward);
                        samples[1].push(backward);
                    }
                }
            }
            Ok(samples.into_iter().map(|passes| passes.map(median)).collect())
        }};
    }
    match layer {
        LayerKind::Column => times!(
            TensorParallelColumnLinear,
            filled(outer_rows, in_features, outer),
            filled(rows, out_features / n, Placement::Features)
        ),
        LayerKind::Row => times!(
            TensorParallelRowLinear,
            filled(rows, in_features / n, Placement::Features),
            filled(outer_rows, out_features, outer)
        ),
    }
}

fn slowest(group: &Group, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    group.barrier()?;
    let begun = Instant::now();
    work()?;
    group.device().synchronize()?;
    let seconds = group.tensor(&[begun.elapsed().as_secs_f64()], &[1], Placement::Partial)?;
    Ok(group.all_reduce_max(&seconds)?.wait()?.to_vec()?[0])
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
