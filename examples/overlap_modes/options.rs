//! Command-line flags.

use std::path::PathBuf;

use async_tensor_parallel::{DType, Link};

use crate::world::{Engine, Flags};

pub const HELP: &str = "\
Compares the modes and overlaps of tensor-parallel linear layers, checks them against a dense float64 result, and draws
their timelines.

  --ranks N              ranks, each a thread [4, or one a GPU]
  --rows N               rows of the whole input [2048]
  --in-features N        of the column layer; the row layer goes back [1024]
  --out-features N       of the column layer [8192]
  --dtype T              f32, f64, bf16 or f16 [f32]
  --link GBIT[:LAT_US]   with cpu: a modelled link of GBIT Gbit/s each way and rank, and LAT_US microseconds [balanced]
         balanced        as fast as makes the column layer's gather take as long as its matmul
         none            no link: messages are copies in memory
  --no-recompute         the column layer keeps its gathered input instead of gathering it again
  --repeat N             measured repetitions, interleaved; medians are reported [5]
  --json                 one JSON object a line instead of a table
  --timeline DIR         where the timelines go [target/timeline]
";

#[derive(Debug, Clone)]
pub enum LinkChoice {
    Balanced,
    None,
    Fixed(Link),
}

#[derive(Debug, Clone)]
pub struct Options {
    pub ranks: usize,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    pub dtype: DType,
    pub engine: Engine,
    pub link: LinkChoice,
    pub recompute: bool,
    pub repeat: usize,
    pub json: bool,
    pub timeline: PathBuf,
}

impl Options {
    /// Reads the process's arguments; `None` where help was asked for.
    pub fn from_args() -> Result<Option<Self>, lexopt::Error> {
        use lexopt::prelude::*;
        let mut ranks = None;
        let mut options = Self {
            ranks: 4,
            rows: 2048,
            in_features: 1024,
            out_features: 8192,
            dtype: DType::F32,
            engine: Engine::Local,
            link: LinkChoice::Balanced,
            recompute: true,
            repeat: 5,
            json: false,
            timeline: "target/timeline".into(),
        };
        let (mut flags, mut parser) = (Flags::default(), lexopt::Parser::from_env());
        while let Some(argument) = parser.next()? {
            match argument {
                Long("ranks") => ranks = Some(parser.value()?.parse()?),
                Long("rows") => options.rows = parser.value()?.parse()?,
                Long("in-features") => options.in_features = parser.value()?.parse()?,
                Long("out-features") => options.out_features = parser.value()?.parse()?,
                Long("repeat") => options.repeat = parser.value()?.parse::<usize>()?.max(1),
                Long("no-recompute") => options.recompute = false,
                Long("json") => options.json = true,
                Long("timeline") => options.timeline = parser.value()?.into(),
                Long("dtype") => {
                    options.dtype = match parser.value()?.to_str() {
                        Some("f32") => DType::F32,
                        Some("f64") => DType::F64,
                        Some("bf16") => DType::BF16,
                        Some("f16") => DType::F16,
                        other => return Err(format!("--dtype is {other:?}, wanted f32, f64, bf16 or f16").into()),
                    }
                }
                Long("link") => options.link = link(&parser.value()?.string()?)?,
                Short('h') | Long("help") => return Ok(None),
                Long(name) => {
                    let name = name.to_string();
                    if !flags.take(&name, &mut parser)? {
                        return Err(format!("unknown flag --{name}").into());
                    }
                }
                _ => return Err(argument.unexpected()),
            }
        }
        options.engine = flags.engine()?;
        options.ranks = options.engine.ranks(ranks, options.ranks);
        Ok(Some(options))
    }
}

fn link(text: &str) -> Result<LinkChoice, lexopt::Error> {
    match text {
        "balanced" => return Ok(LinkChoice::Balanced),
        "none" => return Ok(LinkChoice::None),
        _ => {}
    }
    let (gbit, latency) = text.split_once(':').unwrap_or((text, "0"));
    match (gbit.parse::<f64>(), latency.parse::<f64>()) {
        (Ok(gbit), Ok(latency)) if gbit > 0.0 && gbit.is_finite() && (0.0..1e9).contains(&latency) => {
            Ok(LinkChoice::Fixed(Link::gbit(gbit, latency)))
        }
        _ => Err(format!("--link is {text:?}, wanted GBIT[:LATENCY_US], balanced or none").into()),
    }
}
