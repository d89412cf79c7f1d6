//! What each overlap costs: predicted and measured here, and predicted for machines that are not here.
//!
//! `cargo run --release --example plan -- --help` lists the flags. With `--sweep` the predictions are held against
//! measurements over 40 shapes.

mod sweep;

use std::process::ExitCode;
use std::time::Duration;

use async_tensor_parallel::{
    DType, LayerKind, LinearMode, Link, LocalWorld, Overlap, Pass, Plan, ProductCost, Result, Site, WireCost,
};

const HELP: &str = "\
Measures this machine, predicts what each overlap takes for layers of Llama-3 8B (scaled down), and explains the choice;
then predicts the true layers for machines that are not here.

  --ranks N             ranks, each a thread [2]
  --link GBIT[:LAT_US]  a modelled link [as fast as the matmuls]; `none` for copies in memory
  --sweep               predicts and measures 40 shapes, and prints how often the prediction and the choice were right
  --save FILE           keeps the plan
  --load FILE           uses a plan that was kept, instead of measuring
";

/// Layers of Llama-3 8B and 70B: kind, features of the whole.
const LAYERS: [(&str, LayerKind, usize, usize); 6] = [
    ("8B qkv", LayerKind::Column, 4096, 6144),
    ("8B gate-up", LayerKind::Column, 4096, 28672),
    ("8B down", LayerKind::Row, 14336, 4096),
    ("70B qkv", LayerKind::Column, 8192, 10240),
    ("70B gate-up", LayerKind::Column, 8192, 57344),
    ("70B down", LayerKind::Row, 28672, 8192),
];

struct Options {
    ranks: usize,
    link: Option<Option<Link>>,
    sweep: bool,
    save: Option<std::path::PathBuf>,
    load: Option<std::path::PathBuf>,
}

fn options() -> std::result::Result<Option<Options>, lexopt::Error> {
    use lexopt::prelude::*;
    let mut options = Options { ranks: 2, link: None, sweep: false, save: None, load: None };
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("ranks") => options.ranks = parser.value()?.parse()?,
            Long("sweep") => options.sweep = true,
            Long("save") => options.save = Some(parser.value()?.into()),
            Long("load") => options.load = Some(parser.value()?.into()),
            Long("link") => {
                let text = parser.value()?.string()?;
                let (gbit, latency) = text.split_once(':').unwrap_or((&text, "0"));
                options.link = Some(match (text.as_str(), gbit.parse::<f64>(), latency.parse::<f64>()) {
                    ("none", ..) => None,
                    (_, Ok(gbit), Ok(latency)) if gbit > 0.0 && gbit.is_finite() && (0.0..1e9).contains(&latency) => {
                        Some(Link::gbit(gbit, latency))
                    }
                    _ => return Err(format!("--link is {text:?}, wanted GBIT[:LATENCY_US] or none").into()),
                });
            }
            Short('h') | Long("help") => return Ok(None),
            _ => return Err(argument.unexpected()),
        }
    }
    Ok(Some(options))
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let world = LocalWorld::new(options.ranks)?;
    let world = match options.link {
        Some(None) => world,
        Some(Some(link)) => world.with_link(link)?,
        None => {
            // As many bytes a second as make a gather of rows last as long as their product with 1024 features.
            let plan = measure(&world)?;
            let bandwidth = 4.0 / (1024.0 * plan.forward.per_product.max(1e-15));
            world.with_link(Link { bandwidth, latency: Duration::from_micros(10) })?
        }
    };
    let io = |path: &std::path::Path, error: std::io::Error| async_tensor_parallel::Error::Io {
        what: path.display().to_string(),
        message: error.to_string(),
    };
    let plan: Plan = match &options.load {
        Some(path) => std::fs::read_to_string(path).map_err(|error| io(path, error))?.parse()?,
        None => measure(&world)?,
    };
    if let Some(path) = &options.save {
        std::fs::write(path, plan.to_string()).map_err(|error| io(path, error))?;
    }
    println!(
        "This machine, {} ranks as threads, {}:\n",
        options.ranks,
        match world.link() {
            Some(link) => format!("a modelled link of {:.3} Gbit/s", link.bandwidth * 8.0 / 1e9),
            None => "copies in memory".into(),
        }
    );
    println!("{plan}");
    if options.sweep {
        return sweep::sweep(&world, &plan);
    }
    for (name, layer, in_features, out_features) in &LAYERS[..3] {
        for pass in [Pass::Forward, Pass::Backward] {
            let site = site(*layer, LinearMode::ReduceScatter, pass, 512, in_features / 4, out_features / 4);
            println!("{name} / 4: {}", plan.explain(&site));
        }
    }
    elsewhere();
    Ok(())
}

fn measure(world: &LocalWorld) -> Result<Plan> {
    let mut plans = world.run(|group| Plan::measure(group, DType::F32))?;
    Ok(plans.swap_remove(0))
}

fn site(layer: LayerKind, mode: LinearMode, pass: Pass, rows: usize, in_features: usize, out_features: usize) -> Site {
    Site { layer, mode, pass, rows, in_features, out_features, gathers_again: true }
}

/// Forward and backward of the true layers, 8192 rows in bf16, on the machines of `machines.txt`.
fn elsewhere() {
    println!("Machines that are not here (machines.txt), bf16, 8192 rows, forward + backward in ms, predicted:\n");
    println!(
        "{:<26} {:<12} {:>9} {:>9} {:>9} {:>9}  fastest forward, backward",
        "machine", "layer", "compute", "comm.", "blocking", "best"
    );
    for line in include_str!("machines.txt").lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let number = |index: usize| fields[index].parse::<f64>().expect("machines.txt holds numbers");
        let product = ProductCost { fixed: 5e-6, per_product: 2.0 / number(2), ..ProductCost::default() };
        let wire = WireCost { latency: number(4), per_piece: 4e-6, per_byte: 1.0 / number(3) };
        let plan = Plan {
            world_size: number(1) as usize,
            dtype: DType::BF16,
            forward: product,
            input_grad: product,
            weight_grad: product,
            gather: wire,
            reduce: wire,
            free: 0.9,
        };
        for (name, layer, in_features, out_features) in LAYERS {
            let calls = [Pass::Forward, Pass::Backward]
                .map(|pass| site(layer, LinearMode::ReduceScatter, pass, 8192, in_features, out_features));
            let total =
                |overlap: Overlap| calls.iter().map(|call| plan.predict(call, overlap).seconds).sum::<f64>() * 1e3;
            let parts = calls.map(|call| plan.predict(&call, Overlap::Blocking));
            println!(
                "{:<26} {:<12} {:>9.3} {:>9.3} {:>9.3} {:>9.3}  {}, {}",
                fields[0],
                name,
                parts.iter().map(|part| part.compute).sum::<f64>() * 1e3,
                parts.iter().map(|part| part.communication).sum::<f64>() * 1e3,
                total(Overlap::Blocking),
                total(Overlap::Auto),
                plan.choose(&calls[0]),
                plan.choose(&calls[1]),
            );
        }
    }
    println!(
        "\nAllReduce against ReduceScatter on 8 x H100 is the same bytes; where compute exceeds communication, the overlap hides"
    );
    println!("nearly all of it, and more ranks pay; where it does not, splitting further only moves bytes.");
}
