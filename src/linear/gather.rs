//! Rows that are gathered and multiplied, under each overlap.

use std::ops::Range;

use super::{Call, Overlap, Shard};
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
    /// This rank's rows first, then every piece as it arrives.
    Arrival,
}

impl From<Overlap> for Order {
    fn from(overlap: Overlap) -> Self {
        match overlap {
            Overlap::Blocking => Order::Whole,
            Overlap::Async => Order::OwnFirst,
            Overlap::Pipelined { .. } | Overlap::Auto => Order::Arrival,
        }
    }
}

/// All ranks' rows on their way here.
#[derive(Debug)]
pub(super) struct Gathering {
    gather: Gather,
    blocks: Blocks,
    rank: usize,
    own: Range<usize>,
    shard: Buffer,
}

impl Gathering {
    /// Starts to gather every rank's `shard`, rows of `features` elements, as `call` cuts them. Under `Blocking` it is waited
    /// for at once.
    pub(super) fn start<T: Float>(
        layer: &Shard<T>,
        call: &Call,
        rows: ShardLayout,
        features: usize,
        shard: &Buffer,
    ) -> Result<Self> {
        let blocks = call.overlap.cut(layer.blocks(rows, features));
        let gather = layer.group.start_gather(T::DTYPE, blocks, shard)?.metered(&call.meter);
        let gather = if call.overlap == Overlap::Blocking { Gather::Ready(gather.wait()?) } else { gather };
        let rank = layer.group.rank();
        Ok(Self { gather, blocks, rank, own: rows.own(rank), shard: shard.clone() })
    }

    /// Rows that are all here already.
    pub(super) fn ready(whole: Buffer, rows: ShardLayout, rank: usize) -> Self {
        let gather = Gather::Ready(whole.clone());
        Self { gather, blocks: Blocks::new(rows, 0), rank, own: rows.own(rank), shard: whole }
    }

    /// Calls `each` for all rows, each once, as `order` says: with the rows' numbers and their bytes; and `sum` likewise,
    /// but in an order and in portions that do not depend on what arrives when. What `each` computes row by row does not
    /// depend on it either; what `sum` adds up over rows would. Returns all rows.
    ///
    /// Pieces that arrive together are still handed to `each` one by one: a matmul may round differently when it is given
    /// other rows beside the same ones, and a run repeated must give the same bits.
    pub(super) fn for_each(
        mut self,
        order: Order,
        mut each: impl FnMut(Range<usize>, &Buffer) -> Result<()>,
        mut sum: impl FnMut(Range<usize>, &Buffer) -> Result<()>,
    ) -> Result<Buffer> {
        let (layout, width) = (self.blocks.layout, self.blocks.unit_bytes);
        if order == Order::Whole || matches!(self.gather, Gather::Ready(_)) {
            let whole = self.gather.wait()?;
            each(0..layout.total(), &whole)?;
            sum(0..layout.total(), &whole)?;
            return Ok(whole);
        }
        each(self.own.clone(), &self.shard)?;
        sum(self.own.clone(), &self.shard)?;
        if order == Order::OwnFirst {
            let whole = self.gather.wait()?;
            for rows in [0..self.own.start, self.own.end..layout.total()] {
                let part = whole.slice(rows.start * width..rows.end * width)?;
                each(rows.clone(), &part)?;
                sum(rows, &part)?;
            }
            return Ok(whole);
        }
        let mut complete = InOrder::new(layout.world_size(), self.rank);
        while let Some((pieces, bytes)) = self.gather.next()? {
            let start = self.blocks.bytes(pieces.start).start;
            for piece in pieces {
                let (rows, range) = (self.blocks.units(piece), self.blocks.bytes(piece));
                let part = bytes.slice(range.start - start..range.end - start)?;
                if !rows.is_empty() {
                    each(rows, &part)?;
                }
                complete.add(piece / self.blocks.chunks, part);
            }
            while let Some((rank, block)) = complete.next(|rank, block| block.len() == layout.len(rank) * width) {
                sum(layout.own(rank), &block)?;
            }
        }
        let whole = self.gather.wait()?;
        while let Some(rank) = complete.missing() {
            let rows = layout.own(rank);
            sum(rows.clone(), &whole.slice(rows.start * width..rows.end * width)?)?;
        }
        Ok(whole)
    }
}

/// Hands the ranks' blocks on in one order: that in which they are expected, from the rank before this one backwards.
struct InOrder {
    blocks: [Option<Buffer>; InOrder::LOOK_AHEAD],
    world_size: usize,
    rank: usize,
    /// How far before this rank the next block's rank is.
    step: usize,
}

impl InOrder {
    /// Blocks further ahead than this are left until all are there.
    const LOOK_AHEAD: usize = 32;

    fn new(world_size: usize, rank: usize) -> Self {
        Self { blocks: [const { None }; Self::LOOK_AHEAD], world_size, rank, step: 1 }
    }

    fn rank_at(&self, step: usize) -> usize {
        (self.rank + self.world_size - step) % self.world_size
    }

    /// Keeps a piece of `rank`'s block, if it follows those before it.
    fn add(&mut self, rank: usize, part: Buffer) {
        let step = (self.rank + self.world_size - rank) % self.world_size;
        let Some(slot) = self.blocks.get_mut(step) else { return };
        *slot = match slot.take() {
            None => Some(part),
            Some(block) => Some(block.join(&part).unwrap_or(block)),
        };
    }

    /// The next rank's block, if it is complete.
    fn next(&mut self, complete: impl Fn(usize, &Buffer) -> bool) -> Option<(usize, Buffer)> {
        let rank = self.rank_at(self.step);
        let block = self.blocks.get_mut(self.step)?.take_if(|block| complete(rank, block))?;
        self.step += 1;
        Some((rank, block))
    }

    /// The next rank, whether or not its block was seen to be complete; `None` after the last.
    fn missing(&mut self) -> Option<usize> {
        (self.step < self.world_size).then(|| {
            self.step += 1;
            self.rank_at(self.step - 1)
        })
    }
}
