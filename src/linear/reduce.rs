//! Rows that are computed and summed over the ranks, under each overlap.

use std::ops::Range;

use super::{Call, LinearMode, Overlap, Shard};
use crate::Result;
use crate::comm::{Blocks, Reduce, ReduceOp};
use crate::dtype::Float;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};

/// A sum on its way: in AllReduce mode all of it, in ReduceScatter mode this rank's rows.
#[derive(Debug)]
pub(super) enum Sum {
    One(Reduce),
    /// Two halves of the rows.
    Two(Reduce, Reduce),
}

impl Sum {
    /// The sum, with all later compute ordered after it.
    pub(super) fn wait(self) -> Result<Buffer> {
        match self {
            Sum::One(reduce) => reduce.wait(),
            Sum::Two(first, second) => first.wait()?.join(&second.wait()?),
        }
    }
}

/// Computes this rank's summand of `rows` (rows of `features` elements) with `compute(rows, out, at)`, which writes the
/// given rows to those of `out` that begin at row `at`, and starts to sum it over the ranks.
///
/// - `Blocking`: everything is computed, then summed and waited for.
/// - `Async`: as Blocking, but not waited for, where the caller has `more` to compute meanwhile. Otherwise, in
///   ReduceScatter mode the other ranks' rows are computed first and travel while this rank's own are computed; in
///   AllReduce mode the first half of the rows travels while the second is computed.
/// - `Pipelined`: block by block, each leaving as soon as it is computed, this rank's own last.
pub(super) fn sum_rows<T: Float>(
    layer: &Shard<T>,
    call: &Call,
    rows: ShardLayout,
    features: usize,
    more: bool,
    mut compute: impl FnMut(Range<usize>, &mut BufferMut, usize) -> Result<()>,
) -> Result<Sum> {
    let (group, rank) = (&layer.group, layer.group.rank());
    let scatter = layer.is(LinearMode::ReduceScatter);
    let start = |blocks: Blocks| -> Result<Reduce> {
        let reduce = if scatter {
            group.start_reduce_scatter(T::DTYPE, blocks)
        } else {
            group.start_all_reduce_of(T::DTYPE, ReduceOp::Sum, blocks)
        };
        Ok(reduce?.metered(&call.meter))
    };
    let blocks = call.overlap.cut(layer.blocks(rows, features));
    match call.overlap {
        Overlap::Pipelined { .. } => {
            let mut reduce = start(blocks)?;
            for piece in blocks.order(rank) {
                let rows = blocks.units(piece);
                let mut block = layer.allocate(rows.len(), features)?;
                compute(rows, &mut block, 0)?;
                reduce.contribute(piece, block.freeze())?;
            }
            Ok(Sum::One(reduce))
        }
        Overlap::Async if !more && scatter => {
            let mut reduce = start(blocks)?;
            let own = rows.own(rank);
            let mut others = layer.allocate(rows.total() - own.len(), features)?;
            compute(0..own.start, &mut others, 0)?;
            compute(own.end..rows.total(), &mut others, own.start)?;
            let others = others.freeze();
            for owner in blocks.order(rank).filter(|owner| *owner != rank) {
                let range = rows.own(owner);
                let gap = if owner > rank { own.len() } else { 0 };
                let block = layer.slice(&others, range.start - gap..range.end - gap, features)?;
                reduce.contribute(owner, block)?;
            }
            let mut block = layer.allocate(own.len(), features)?;
            compute(own, &mut block, 0)?;
            reduce.contribute(rank, block.freeze())?;
            Ok(Sum::One(reduce))
        }
        Overlap::Async if !more => {
            let halves = ShardLayout::uneven(rows.total(), 2)?;
            let mut sum = layer.allocate(rows.total(), features)?;
            let mut half = |half: usize| {
                let rows = halves.own(half);
                let blocks = layer.blocks(ShardLayout::uneven(rows.len(), group.world_size())?, features);
                let into = sum.split_to(blocks.total_bytes())?;
                let mut block = layer.allocate(rows.len(), features)?;
                compute(rows, &mut block, 0)?;
                let reduce = group.start_all_reduce_into(T::DTYPE, ReduceOp::Sum, blocks, into)?;
                let mut reduce = reduce.metered(&call.meter);
                reduce.contribute_all(blocks, rank, &block.freeze())?;
                Ok(reduce)
            };
            Ok(Sum::Two(half(0)?, half(1)?))
        }
        overlap => {
            let mut whole = layer.allocate(rows.total(), features)?;
            compute(0..rows.total(), &mut whole, 0)?;
            let mut reduce = start(blocks)?;
            reduce.contribute_all(blocks, rank, &whole.freeze())?;
            let blocking = overlap == Overlap::Blocking;
            Ok(Sum::One(if blocking { Reduce::Ready(Some(reduce.wait()?)) } else { reduce }))
        }
    }
}
