//! Rows that are gathered and multiplied, under each overlap.

use std::ops::Range;

use super::{Overlap, Shard};
use crate::Result;
use crate::comm::{Blocks, Gather};
use crate::dtype::Float;
use crate::layout::ShardLayout;
use crate::memory::Buffer;

/// When the products of gathered rows are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// All rows at once, after the gather.
    Whole,
    /// This rank's rows while the others' travel, then those before and those after.
    OwnFirst,
    /// This rank's rows first, then every run of rows as it arrives.
    Arrival,
}

impl From<Overlap> for Order {
    fn from(overlap: Overlap) -> Self {
        match overlap {
            Overlap::Blocking => Order::Whole,
            Overlap::Async => Order::OwnFirst,
            Overlap::Pipelined { .. } => Order::Arrival,
        }
    }
}

/// All ranks' rows on their way here.
#[derive(Debug)]
pub(super) struct Gathering {
    gather: Gather,
    blocks: Blocks,
    own: Range<usize>,
    shard: Buffer,
}

impl Gathering {
    /// Starts to gather every rank's `shard`, rows of `features` elements. Under `Blocking` it is waited for at once.
    pub(super) fn start<T: Float>(
        layer: &Shard<T>,
        rows: ShardLayout,
        features: usize,
        shard: &Buffer,
    ) -> Result<Self> {
        let blocks = layer.cut(layer.blocks(rows, features));
        let gather = layer.group.start_gather(T::DTYPE, blocks, shard)?;
        let gather = if layer.overlap() == Overlap::Blocking { Gather::Ready(gather.wait()?) } else { gather };
        Ok(Self { gather, blocks, own: rows.own(layer.group.rank()), shard: shard.clone() })
    }

    /// Rows that are all here already.
    pub(super) fn ready(whole: Buffer, rows: ShardLayout, rank: usize) -> Self {
        Self { gather: Gather::Ready(whole.clone()), blocks: Blocks::new(rows, 0), own: rows.own(rank), shard: whole }
    }

    /// Calls `each` for all rows, each once, as `order` says: with the rows' numbers and their bytes. Returns all of them.
    pub(super) fn for_each(
        mut self,
        order: Order,
        mut each: impl FnMut(Range<usize>, &Buffer) -> Result<()>,
    ) -> Result<Buffer> {
        let total = self.blocks.layout.total();
        if order == Order::Whole || matches!(self.gather, Gather::Ready(_)) {
            let whole = self.gather.wait()?;
            each(0..total, &whole)?;
            return Ok(whole);
        }
        each(self.own.clone(), &self.shard)?;
        if order == Order::Arrival {
            while let Some((pieces, rows)) = self.gather.next()? {
                let (first, last) = (self.blocks.units(pieces.start), self.blocks.units(pieces.end - 1));
                each(first.start..last.end, &rows)?;
            }
            return self.gather.wait();
        }
        let whole = self.gather.wait()?;
        let width = self.blocks.unit_bytes;
        for rows in [0..self.own.start, self.own.end..total] {
            each(rows.clone(), &whole.slice(rows.start * width..rows.end * width)?)?;
        }
        Ok(whole)
    }
}
