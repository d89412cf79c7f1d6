//! Rows that are computed and summed over the ranks, under each overlap.

use std::ops::Range;

use super::{Call, LinearMode, Overlap};
use crate::Result;
use crate::comm::{Blocks, Reduce, ReduceOp};
use crate::dtype::Float;
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};

/// A sum on its way: in AllReduce mode all of it, in ReduceScatter mode this rank's rows.
#[derive(Debug)]
pub(crate) enum Sum {
    One(Reduce),
    /// Two halves of the rows.
    Two(Reduce, Reduce),
}

impl Sum {
    /// The sum, with all later compute ordered after it.
    pub(crate) fn wait(self) -> Result<Buffer> {
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
pub(crate) fn sum_rows<T: Float>(
    group: &Group,
    mode: LinearMode,
    call: &Call,
    rows: ShardLayout,
    features: usize,
    more: bool,
    mut compute: impl FnMut(Range<usize>, &mut BufferMut, usize) -> Result<()>,
) -> Result<Sum> {
    let rank = group.rank();
    let scatter = mode == LinearMode::ReduceScatter;
    let width = features * T::DTYPE.size();
    let allocate = |rows: usize| group.device().allocate(rows * width);
    let start = |blocks: Blocks| -> Result<Reduce> {
        let reduce = if scatter {
            group.start_reduce_scatter(T::DTYPE, blocks)
        } else {
            group.start_all_reduce_of(T::DTYPE, ReduceOp::Sum, blocks)
        };
        Ok(reduce?.metered(&call.meter))
    };
    let blocks = call.overlap.cut(Blocks::new(rows, width));
    match call.overlap {
        Overlap::Pipelined { .. } => {
            let mut reduce = start(blocks)?;
            for piece in blocks.order(rank) {
                let rows = blocks.units(piece);
                let mut block = allocate(rows.len())?;
                compute(rows, &mut block, 0)?;
                reduce.contribute(piece, block.freeze())?;
            }
            Ok(Sum::One(reduce))
        }
        Overlap::Async if !more && scatter => {
            let mut reduce = start(blocks)?;
            let own = rows.own(rank);
            let mut others = allocate(rows.total() - own.len())?;
            compute(0..own.start, &mut others, 0)?;
            compute(own.end..rows.total(), &mut others, own.start)?;
            let others = others.freeze();
            for owner in blocks.order(rank).filter(|owner| *owner != rank) {
                let range = rows.own(owner);
                let gap = if owner > rank { own.len() } else { 0 };
                let block = others.slice((range.start - gap) * width..(range.end - gap) * width)?;
                reduce.contribute(owner, block)?;
            }
            let mut block = allocate(own.len())?;
            compute(own, &mut block, 0)?;
            reduce.contribute(rank, block.freeze())?;
            Ok(Sum::One(reduce))
        }
        Overlap::Async if !more => {
            let halves = ShardLayout::uneven(rows.total(), 2)?;
            let mut sum = allocate(rows.total())?;
            let mut half = |half: usize| {
                let rows = halves.own(half);
                let blocks = Blocks::new(ShardLayout::uneven(rows.len(), group.world_size())?, width);
                let into = sum.split_to(blocks.total_bytes())?;
                let mut block = allocate(rows.len())?;
                compute(rows, &mut block, 0)?;
                let reduce = group.start_all_reduce_into(T::DTYPE, ReduceOp::Sum, blocks, into)?;
                let mut reduce = reduce.metered(&call.meter);
                reduce.contribute_all(blocks, rank, &block.freeze())?;
                Ok(reduce)
            };
            Ok(Sum::Two(half(0)?, half(1)?))
        }
        overlap => {
            let mut whole = allocate(rows.total())?;
            compute(0..rows.total(), &mut whole, 0)?;
            let mut reduce = start(blocks)?;
            reduce.contribute_all(blocks, rank, &whole.freeze())?;
            let blocking = overlap == Overlap::Blocking;
            Ok(Sum::One(if blocking { Reduce::Ready(Some(reduce.wait()?)) } else { reduce }))
        }
    }
}
