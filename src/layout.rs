//! Who owns which rows or features: pure arithmetic, no memory.

use std::ops::Range;

use crate::{Error, Result};

/// How one dimension of `total` units is divided over `world_size` ranks.
///
/// Shards are contiguous and in rank order. Each has `ceil(total / world_size)` units, the last ones fewer or none
/// where `total` is not divisible; [`ShardLayout::even`] refuses that case.
///
/// ```
/// use async_tensor_parallel::ShardLayout;
/// let rows = ShardLayout::even("rows", 12, 4)?;
/// assert_eq!(rows.before(2), 0..6);
/// assert_eq!(rows.own(2), 6..9);
/// assert_eq!(rows.after(2), 9..12);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardLayout {
    total: usize,
    world_size: usize,
    /// Units that are never separated.
    together: usize,
}

impl ShardLayout {
    /// Equal shards.
    ///
    /// # Errors
    /// [`Error::NotDivisible`] with `what` where `world_size` does not divide `total`, or is 0.
    pub fn even(what: &'static str, total: usize, world_size: usize) -> Result<Self> {
        if world_size == 0 || !total.is_multiple_of(world_size) {
            return Err(Error::NotDivisible { what, value: total, by: world_size });
        }
        Ok(Self { total, world_size, together: 1 })
    }

    /// Shards of `ceil(total / world_size)` units, the last ones shorter, possibly empty.
    ///
    /// # Errors
    /// [`Error::Argument`] where `world_size` is 0.
    pub fn uneven(total: usize, world_size: usize) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::Argument { what: "world_size", got: "0".into(), wanted: "at least 1".into() });
        }
        Ok(Self { total, world_size, together: 1 })
    }

    /// The same shards of something of which every unit holds `each` smaller ones: from sequences to tokens, say.
    pub fn of_each(self, each: usize) -> Self {
        Self { total: self.total * each, together: self.together * each, ..self }
    }

    /// Units of the whole dimension.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Units of the largest shard.
    pub fn largest(&self) -> usize {
        match self.together {
            0 => 0,
            together => (self.total / together).div_ceil(self.world_size) * together,
        }
    }

    /// The units that `rank` owns.
    pub fn own(&self, rank: usize) -> Range<usize> {
        let each = self.largest();
        (rank * each).min(self.total)..((rank + 1) * each).min(self.total)
    }

    /// The units of all ranks before `rank`.
    pub fn before(&self, rank: usize) -> Range<usize> {
        0..self.own(rank).start
    }

    /// The units of all ranks after `rank`.
    pub fn after(&self, rank: usize) -> Range<usize> {
        self.own(rank).end..self.total
    }

    /// The number of units that `rank` owns.
    pub fn len(&self, rank: usize) -> usize {
        self.own(rank).len()
    }

    /// Whether there are no units at all.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// The `chunk`-th of `chunks` nearly equal parts of `rank`'s units (some empty where there are more chunks than
    /// units).
    pub fn chunk(&self, rank: usize, chunk: usize, chunks: usize) -> Range<usize> {
        let own = self.own(rank);
        let inner = ShardLayout { total: own.len(), world_size: chunks.max(1), together: 1 }.own(chunk);
        own.start + inner.start..own.start + inner.end
    }
}

/// Fused weights: a dimension made of contiguous chunks, each of which is sharded on its own.
///
/// A fused QKV weight of `[q, k, v]` rows, or a fused gate-up weight, must give every rank its part of *each* chunk:
/// an even split of the whole would give rank 0 the gate and rank 1 the up half. nanotron calls this
/// `contiguous_chunks`.
///
/// ```
/// use async_tensor_parallel::ContiguousChunks;
/// // gate rows 0..4, up rows 4..8, 2 ranks: rank 0 holds rows 0, 1 of each.
/// let chunks = ContiguousChunks::new("out_features", 8, &[4, 4], 2)?;
/// assert_eq!(chunks.of_rank(0).collect::<Vec<_>>(), [0..2, 4..6]);
/// assert_eq!(chunks.of_rank(1).collect::<Vec<_>>(), [2..4, 6..8]);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContiguousChunks {
    sizes: Vec<usize>,
    world_size: usize,
}

impl ContiguousChunks {
    /// Chunks of `sizes` units (empty: one chunk of `total`), divided over `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] where the sizes do not add up to `total`; [`Error::NotDivisible`] where `world_size` does
    /// not divide a chunk.
    pub fn new(what: &'static str, total: usize, sizes: &[usize], world_size: usize) -> Result<Self> {
        let sizes = if sizes.is_empty() { vec![total] } else { sizes.to_vec() };
        if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) != Some(total) {
            return Err(Error::Argument {
                what: "contiguous_chunks",
                got: format!("{sizes:?}"),
                wanted: format!("sizes that add up to {what} = {total}"),
            });
        }
        for size in &sizes {
            ShardLayout::even(what, *size, world_size)?;
        }
        Ok(Self { sizes, world_size })
    }

    /// The chunks' sizes over all ranks.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The ranges of the whole dimension that `rank` holds, in the order in which it holds them.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        self.sizes.iter().scan(0, move |start, size| {
            let each = size / self.world_size;
            let range = *start + rank * each..*start + (rank + 1) * each;
            *start += size;
            Some(range)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_cover_everything_once(
            total in 0usize..200, each in 0usize..4, world_size in 1usize..9, chunks in 1usize..9,
        ) {
            let layout = ShardLayout::uneven(total, world_size).unwrap().of_each(each);
            let total = total * each;
            let mut next = 0;
            for rank in 0..world_size {
                prop_assert_eq!(layout.before(rank), 0..next);
                for chunk in 0..chunks {
                    let range = layout.chunk(rank, chunk, chunks);
                    prop_assert_eq!(range.start, next);
                    next = range.end;
                }
                prop_assert_eq!(layout.own(rank).end, next);
                prop_assert_eq!(layout.len(rank) % each.max(1), 0);
                prop_assert_eq!(layout.after(rank), next..total);
            }
            prop_assert_eq!(next, total);
        }

        #[test]
        fn chunks_cover_everything_once(sizes in prop::collection::vec(0usize..20, 1..5), world_size in 1usize..7) {
            let sizes: Vec<usize> = sizes.into_iter().map(|size| size * world_size).collect();
            let total = sizes.iter().sum();
            let chunks = ContiguousChunks::new("out_features", total, &sizes, world_size).unwrap();
            let mut seen = vec![0; total];
            for rank in 0..world_size {
                chunks.of_rank(rank).flatten().for_each(|unit| seen[unit] += 1);
            }
            prop_assert!(seen.iter().all(|count| *count == 1));
        }
    }

    #[test]
    fn refusals_name_the_numbers() {
        let error = ShardLayout::even("out_features", 10, 4).unwrap_err();
        assert_eq!(error.to_string(), "out_features is 10, which is not divisible by 4");
        let error = ContiguousChunks::new("out_features", 8, &[4, 5], 2).unwrap_err();
        assert!(error.to_string().contains("[4, 5]") && error.to_string().contains("= 8"), "{error}");
        let error = ContiguousChunks::new("out_features", 8, &[5, 3], 2).unwrap_err();
        assert_eq!(error, Error::NotDivisible { what: "out_features", value: 5, by: 2 });
    }
}
