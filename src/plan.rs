//! Which overlap is fastest here: measured once, predicted for every shape.
//!
//! [`Plan::measure`] times this group's matmuls and collectives for a second or two. From the few numbers that come out it
//! predicts what each overlap takes for a layer's shape, by playing its schedule through: which product can begin when, and
//! which message. [`Overlap::Auto`](crate::Overlap::Auto) takes the fastest. Results do not depend on the choice.

mod fit;
mod measure;
mod schedule;

use std::fmt;
use std::str::FromStr;

use crate::dtype::DType;
use crate::mode::Overlap;
use crate::{Error, Result};

pub use schedule::{Pass, Prediction, Site};

/// The layer that a prediction is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// [`TensorParallelColumnLinear`](crate::TensorParallelColumnLinear).
    Column,
    /// [`TensorParallelRowLinear`](crate::TensorParallelRowLinear).
    Row,
}

/// What a matmul over `rows` rows and a weight `[out, in]` takes:
/// `fixed + per_product · rows · in · out + per_weight · in · out + per_row · rows · (in + out)`, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProductCost {
    /// Seconds a call.
    pub fixed: f64,
    /// Seconds a multiplication and addition.
    pub per_product: f64,
    /// Seconds an element of the weight: what packing or loading it costs, however many rows there are.
    pub per_weight: f64,
    /// Seconds an element of the activations.
    pub per_row: f64,
}

impl ProductCost {
    /// Seconds for a product; 0 for no rows.
    pub fn seconds(&self, rows: usize, in_features: usize, out_features: usize) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let (rows, weight) = (rows as f64, in_features as f64 * out_features as f64);
        self.fixed
            + self.per_product * rows * weight
            + self.per_weight * weight
            + self.per_row * rows * (in_features + out_features) as f64
    }
}

/// What a collective takes: `latency + per_piece · pieces + per_byte · bytes`, in seconds, where `bytes` are those that each
/// rank receives.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WireCost {
    /// Seconds until the first byte has arrived.
    pub latency: f64,
    /// Seconds a piece.
    pub per_piece: f64,
    /// Seconds a byte.
    pub per_byte: f64,
}

impl WireCost {
    /// Seconds that `bytes` in `pieces` keep a rank's port busy, without the latency.
    pub fn seconds(&self, bytes: f64, pieces: usize) -> f64 {
        self.per_piece * pieces as f64 + self.per_byte * bytes
    }
}

/// What one group's matmuls and collectives cost for one dtype.
///
/// It prints as text and reads from it, so that it can be kept; all ranks of a group must use the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Ranks of the group.
    pub world_size: usize,
    /// The activations' dtype.
    pub dtype: DType,
    /// The forward product x·Wᵀ.
    pub forward: ProductCost,
    /// The input gradient's product dy·W.
    pub input_grad: ProductCost,
    /// The weight gradient's product dyᵀ·x.
    pub weight_grad: ProductCost,
    /// An all-gather.
    pub gather: WireCost,
    /// A reduce-scatter: its all-to-all and its sum.
    pub reduce: WireCost,
    /// The part of a communication that costs no compute time when it runs beside it: 1 on a link of its own, less where
    /// cores move the bytes.
    pub free: f64,
}

impl Plan {
    /// The overlaps that are candidates for [`Plan::choose`].
    pub const CANDIDATES: [Overlap; 5] = [
        Overlap::Blocking,
        Overlap::Async,
        Overlap::Pipelined { chunks: 1 },
        Overlap::Pipelined { chunks: 2 },
        Overlap::Pipelined { chunks: 4 },
    ];

    /// An overlap must promise to save this part of the time of a simpler one to be chosen instead.
    const WORTHWHILE: f64 = 0.03;

    /// The fastest overlap for a call.
    pub fn choose(&self, site: &Site) -> Overlap {
        self.fastest(site, &Self::CANDIDATES)
    }

    /// The number of chunks with which Pipelined is fastest.
    pub(crate) fn chunks(&self, site: &Site) -> usize {
        match self.fastest(site, &Self::CANDIDATES[2..]) {
            Overlap::Pipelined { chunks } => chunks,
            _ => 1,
        }
    }

    fn fastest(&self, site: &Site, candidates: &[Overlap]) -> Overlap {
        let mut best = (candidates[0], self.predict(site, candidates[0]).seconds);
        for &overlap in &candidates[1..] {
            let seconds = self.predict(site, overlap).seconds;
            if seconds < best.1 * (1.0 - Self::WORTHWHILE) {
                best = (overlap, seconds);
            }
        }
        best.0
    }

    /// A table of all candidates for a call: predicted milliseconds, hidden communication, and the choice.
    pub fn explain(&self, site: &Site) -> String {
        let choice = self.choose(site);
        let mut table =
            format!("{site}\n{:<14} {:>10} {:>10} {:>12} {:>8}\n", "overlap", "ms", "compute", "communicate", "hidden");
        for overlap in Self::CANDIDATES {
            let Prediction { seconds, compute, communication } = self.predict(site, overlap);
            let hidden = crate::timeline::hidden_fraction(compute, communication, seconds);
            table += &format!(
                "{:<14} {:>10.3} {:>10.3} {:>12.3} {:>6.0} %{}\n",
                overlap.to_string(),
                seconds * 1e3,
                compute * 1e3,
                communication * 1e3,
                hidden * 100.0,
                if overlap == choice { "  <- chosen" } else { "" }
            );
        }
        table
    }
}

/// The names under which the numbers are written.
macro_rules! fields {
    ($plan:expr, $call:ident) => {{
        $call("forward.fixed", &mut $plan.forward.fixed);
        $call("forward.per_product", &mut $plan.forward.per_product);
        $call("forward.per_weight", &mut $plan.forward.per_weight);
        $call("forward.per_row", &mut $plan.forward.per_row);
        $call("input_grad.fixed", &mut $plan.input_grad.fixed);
        $call("input_grad.per_product", &mut $plan.input_grad.per_product);
        $call("input_grad.per_weight", &mut $plan.input_grad.per_weight);
        $call("input_grad.per_row", &mut $plan.input_grad.per_row);
        $call("weight_grad.fixed", &mut $plan.weight_grad.fixed);
        $call("weight_grad.per_product", &mut $plan.weight_grad.per_product);
        $call("weight_grad.per_weight", &mut $plan.weight_grad.per_weight);
        $call("weight_grad.per_row", &mut $plan.weight_grad.per_row);
        $call("gather.latency", &mut $plan.gather.latency);
        $call("gather.per_piece", &mut $plan.gather.per_piece);
        $call("gather.per_byte", &mut $plan.gather.per_byte);
        $call("reduce.latency", &mut $plan.reduce.latency);
        $call("reduce.per_piece", &mut $plan.reduce.per_piece);
        $call("reduce.per_byte", &mut $plan.reduce.per_byte);
        $call("free", &mut $plan.free);
    }};
}

impl fmt::Display for Plan {
    /// One `name value` a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "async-tensor-parallel plan 1")?;
        writeln!(f, "world_size {}", self.world_size)?;
        writeln!(f, "dtype {:?}", self.dtype)?;
        let mut plan = *self;
        let mut outcome = Ok(());
        let mut write = |name: &str, value: &mut f64| outcome = outcome.and_then(|()| writeln!(f, "{name} {value:e}"));
        fields!(plan, write);
        outcome
    }
}

impl FromStr for Plan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |message: String| Error::Format { what: "plan".into(), message };
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        if first != "async-tensor-parallel plan 1" {
            return Err(wrong(format!("it begins with {first:?}, wanted \"async-tensor-parallel plan 1\"")));
        }
        let mut pairs = std::collections::HashMap::new();
        for line in lines.filter(|line| !line.trim().is_empty()) {
            let pair = line.trim().split_once(' ').ok_or_else(|| wrong(format!("line {line:?} has no value")))?;
            if pairs.insert(pair.0, pair.1.trim()).is_some() {
                return Err(wrong(format!("{} stands twice", pair.0)));
            }
        }
        let mut take = |name: &str| pairs.remove(name).ok_or_else(|| wrong(format!("{name} is missing")));
        let world_size = take("world_size")?;
        let dtype = take("dtype")?;
        let zero = ProductCost::default();
        let mut plan = Plan {
            world_size: match world_size.parse() {
                Ok(ranks) if ranks > 0 => ranks,
                _ => return Err(wrong(format!("world_size is {world_size:?}"))),
            },
            dtype: [DType::F32, DType::F64, DType::BF16, DType::F16]
                .into_iter()
                .find(|known| format!("{known:?}") == dtype)
                .ok_or_else(|| wrong(format!("dtype is {dtype:?}")))?,
            forward: zero,
            input_grad: zero,
            weight_grad: zero,
            gather: WireCost::default(),
            reduce: WireCost::default(),
            free: 0.0,
        };
        let mut outcome = Ok(());
        let mut read = |name: &str, value: &mut f64| {
            let parsed = take(name).and_then(|text| match text.parse::<f64>() {
                Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
                _ => Err(wrong(format!("{name} is {text:?}, wanted a number of seconds"))),
            });
            match parsed {
                Ok(number) => *value = number,
                Err(error) if outcome.is_ok() => outcome = Err(error),
                Err(_) => {}
            }
        };
        fields!(plan, read);
        outcome?;
        match pairs.keys().next() {
            Some(name) => Err(wrong(format!("{name} is not known"))),
            None => Ok(plan),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::mode::LinearMode;

    /// A device of 1 TFLOP/s and a link of 1 GB/s.
    pub(crate) fn simple(world_size: usize) -> Plan {
        let product = ProductCost { per_product: 2e-12, ..ProductCost::default() };
        let wire = WireCost { per_byte: 1e-9, ..WireCost::default() };
        Plan {
            world_size,
            dtype: DType::F32,
            forward: product,
            input_grad: product,
            weight_grad: product,
            gather: wire,
            reduce: wire,
            free: 1.0,
        }
    }

    #[test]
    fn a_plan_survives_being_written_and_read() {
        let mut plan = simple(4);
        plan.forward.fixed = 1.5e-6;
        plan.free = 0.25;
        assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
    }

    #[test]
    fn what_is_not_a_plan_is_refused_by_name() {
        let text = simple(4).to_string();
        for (broken, word) in [
            (String::new(), "begins"),
            (text.replace("world_size 4", "world_size 0"), "world_size"),
            (text.replace("dtype F32", "dtype I64"), "dtype"),
            (text.replace("gather.latency", "gather.latencies"), "gather.latency"),
            (text.replace("free 1e0", "free NaN"), "free"),
            (text.replace("free 1e0", "free -1"), "free"),
            (text.clone() + "free 1\n", "twice"),
            (text.clone() + "colour 1\n", "colour"),
        ] {
            let error = broken.parse::<Plan>().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_simplest_overlap_is_chosen_where_there_is_nothing_to_hide() {
        for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
            for layer in [LayerKind::Column, LayerKind::Row] {
                for pass in [Pass::Forward, Pass::Backward] {
                    let site = Site {
                        layer,
                        mode,
                        pass,
                        rows: 1024,
                        in_features: 1024,
                        out_features: 4096,
                        gathers_again: true,
                    };
                    let mut plan = simple(4);
                    (plan.gather.per_byte, plan.reduce.per_byte) = (0.0, 0.0);
                    plan.forward.per_weight = 1e-12;
                    assert_eq!(plan.choose(&site), Overlap::Blocking, "{site}");
                    assert_eq!(simple(1).choose(&site), Overlap::Blocking, "{site}");
                }
            }
        }
    }

    #[test]
    fn the_gather_is_hidden_by_arrival_where_it_takes_as_long_as_the_product() {
        // 2 · 4096 · 1024 · 1024 FLOP a rank: 8.6 ms; 3/4 of 16 MiB: 12.6 ms.
        let site = Site {
            layer: LayerKind::Column,
            mode: LinearMode::ReduceScatter,
            pass: Pass::Forward,
            rows: 4096,
            in_features: 1024,
            out_features: 4096,
            gathers_again: true,
        };
        let plan = simple(4);
        let blocking = plan.predict(&site, Overlap::Blocking);
        assert!((blocking.compute - 8.59e-3).abs() < 1e-5 && (blocking.communication - 12.58e-3).abs() < 1e-5);
        assert!((blocking.seconds - 21.17e-3).abs() < 1e-5);
        // Own shard under the gather, then the rest.
        assert!((plan.predict(&site, Overlap::Async).seconds - (12.58e-3 + 0.75 * 8.59e-3)).abs() < 1e-5);
        // The last piece comes after the gather.
        let pipelined = plan.predict(&site, Overlap::Pipelined { chunks: 1 }).seconds;
        assert!((pipelined - (12.58e-3 + 0.25 * 8.59e-3)).abs() < 1e-5, "{pipelined}");
        assert_eq!(plan.choose(&site), Overlap::Pipelined { chunks: 4 });
        assert!(plan.explain(&site).lines().last().unwrap().ends_with("<- chosen"));
    }
}
