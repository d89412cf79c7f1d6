//! What the layers keep whole, and how they hide their communication.

use std::fmt;
use std::str::FromStr;

use crate::comm::Blocks;
use crate::{Error, Result};

/// What tensor-parallel layers keep whole between them, and so which collectives they need.
///
/// | | column input | column output | row input | row output |
/// | --- | --- | --- | --- | --- |
/// | `AllReduce` | replicated | features | features | replicated |
/// | `ReduceScatter` | rows | features | features | rows |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearMode {
    /// Activations between layers are whole on every rank; sums are formed by all-reduces. (Megatron-LM's tensor
    /// parallelism.)
    AllReduce,
    /// Activations between layers are sharded by rows; inputs are gathered, sums reduce-scattered: the same bytes, and
    /// 1/n of the memory. (Megatron-LM's sequence parallelism.)
    ReduceScatter,
}

/// How communication and computation are ordered. It never changes what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overlap {
    /// Communicate, then compute: the baseline.
    Blocking,
    /// Start one collective, compute what needs no communication meanwhile, wait, compute the rest: nanotron's schedule,
    /// which hides 1/n of a gather's matmul at best.
    Async,
    /// Take the collective apart: multiply each rank's rows as they arrive, and let each block of a reduction leave as soon
    /// as it is computed, the own block last. Hides (n−1)/n.
    Pipelined {
        /// Pieces that each rank's rows are cut into; 0 lets the layer choose: as the group's [`Plan`](crate::Plan) says, if it
        /// has one; otherwise about eight pieces over all ranks, none of them too small to be worth a product of its own.
        chunks: usize,
    },
    /// Whichever of these is predicted to be fastest, for each direction and number of rows: see [`Plan`](crate::Plan). The
    /// first call measures the group, which takes a second or two, unless it has been given a plan
    /// ([`Group::set_plan`](crate::Group::set_plan)).
    Auto,
}

impl Overlap {
    /// Cuts each rank's block into the pieces that it asks for.
    pub(crate) fn cut(self, blocks: Blocks) -> Blocks {
        match self {
            Overlap::Pipelined { chunks } => blocks.in_chunks(chunks),
            _ => blocks,
        }
    }
}

impl fmt::Display for Overlap {
    /// `blocking`, `async`, `auto`, `pipelined`, or `pipelined:3` for three pieces a rank.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Overlap::Blocking => f.pad("blocking"),
            Overlap::Async => f.pad("async"),
            Overlap::Pipelined { chunks: 0 } => f.pad("pipelined"),
            Overlap::Pipelined { chunks } => f.pad(&format!("pipelined:{chunks}")),
            Overlap::Auto => f.pad("auto"),
        }
    }
}

impl FromStr for Overlap {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let chunks = |text: &str| text.parse().ok().map(|chunks| Overlap::Pipelined { chunks });
        let overlap = match text.split_once(':') {
            None if text == "blocking" => Some(Overlap::Blocking),
            None if text == "async" => Some(Overlap::Async),
            None if text == "auto" => Some(Overlap::Auto),
            None if text == "pipelined" => chunks("0"),
            Some(("pipelined", count)) => chunks(count),
            _ => None,
        };
        overlap.ok_or_else(|| Error::Argument {
            what: "overlap",
            got: format!("{text:?}"),
            wanted: "blocking, async, auto, pipelined or pipelined:CHUNKS".into(),
        })
    }
}
