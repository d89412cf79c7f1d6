//! `Y = X Wᵀ + b` with the weight's columns (input features) sharded.
//!
//! Rank r holds columns r of `W` and features r of `X`: the product of the two is a summand of `Y`. The bias is whole on
//! every rank and counts once: the first rank adds it to its summand. Its gradient is the same on all ranks.
//!
//! | | forward | backward |
//! | --- | --- | --- |
//! | `ReduceScatter` | Y = reduce_scatter(X_r W_rᵀ) by rows, + b | gather dY; dX_r = dY W_r; dW_r = dYᵀ X_r; db = column sums of dY |
//! | `AllReduce` | Y = all_reduce(X_r W_rᵀ) + b | dX_r = dY W_r; dW_r = dYᵀ X_r; db as above |
//!
//! ```
//! use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, TensorParallelRowLinear};
//!
//! // W = [[1, 2]]: rank 0 holds the first column, rank 1 the second. Each holds one feature of X = [[1, 1], [2, 3]].
//! LocalWorld::new(2)?.run(|group| {
//!     let layer = TensorParallelRowLinear::<f32>::builder(2, 1)
//!         .mode(LinearMode::ReduceScatter)
//!         .overlap(Overlap::Async)
//!         .from_full(group, &[1.0, 2.0], None)?;
//!     let x = group.tensor(&[[1.0, 2.0], [1.0, 3.0]][group.rank()], &[2, 1], Placement::Features)?;
//!     let (y, saved) = layer.forward(&x)?;
//!     // Y = X Wᵀ = [[3], [8]]: this rank's row.
//!     assert_eq!(y.to_vec()?, [[3.0], [8.0]][group.rank()]);
//!
//!     let dy = group.tensor(&[[1.0], [10.0]][group.rank()], &[1, 1], Placement::Rows)?;
//!     let dx = layer.backward(saved, &dy)?;
//!     // dX = dY W = [[1, 2], [10, 20]]: all rows, this rank's feature.
//!     assert_eq!(dx.to_vec()?, [[1.0, 10.0], [2.0, 20.0]][group.rank()]);
//!     Ok(())
//! })?;
//! # Ok::<(), async_tensor_parallel::Error>(())
//! ```

use std::borrow::Borrow;

use super::{Cut, LinearBuilder, LinearConfig, LinearMode, Saved, Shard, Sharded, around, common_methods, sealed};
use crate::Result;
use crate::comm::ReduceOp;
use crate::dtype::Float;
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::memory::Buffer;
use crate::parameter::Parameter;
use crate::tensor::{Placement, Tensor};

/// A linear layer whose input features are sharded over the ranks. See the [module](self).
#[derive(Debug)]
pub struct TensorParallelRowLinear<T: Float> {
    shard: Shard<T>,
}

impl<T: Float> TensorParallelRowLinear<T> {
    /// A layer from `in_features` to `out_features`, both of the whole.
    pub fn builder(in_features: usize, out_features: usize) -> LinearBuilder<Self> {
        LinearBuilder::new(in_features, out_features)
    }

    common_methods!();

    /// The output, and what the backward pass needs.
    ///
    /// `input` is `[b, …, in_features / n]` ([`Placement::Features`]). The output is `[b, …, out_features]`, whole
    /// ([`Placement::Replicated`]) in AllReduce mode; in ReduceScatter mode each rank gets its rows `[b / n, …,
    /// out_features]` ([`Placement::Rows`]).
    ///
    /// # Errors
    /// [`Error::Placement`](crate::Error::Placement) and [`Error::Shape`](crate::Error::Shape) for an input that does not
    /// fit; [`Error::NotDivisible`](crate::Error::NotDivisible) where the world size does not divide `b` in
    /// ReduceScatter mode; [`Error::Mismatch`](crate::Error::Mismatch) where the ranks' rows differ; errors of
    /// communication.
    pub fn forward(&self, input: &Tensor<T>) -> Result<(Tensor<T>, Saved<T>)> {
        let shard = &self.shard;
        shard.check("input", input, Placement::Features, shard.in_features)?;
        let rows = self.rows(input)?;
        // Once over all ranks.
        let bias = shard.bias_value().filter(|_| shard.group.rank() == 0);
        let bias = bias.as_ref().map(Tensor::buffer);
        let leading = input.shape().leading();
        let (y, leading) = if shard.is(LinearMode::AllReduce) {
            (self.all_reduce(input.buffer(), rows, bias)?, leading)
        } else {
            (self.reduce_scatter(input.buffer(), rows, bias)?, leading / shard.group.world_size())
        };
        let shape = input.shape().with_leading(leading).with_features(shard.out_features);
        Ok((shard.tensor(y, shape, self.output_placement()), shard.save(input, None, shape)))
    }

    /// This rank's rows of the sum. Async multiplies the other ranks' rows first and its own while those travel.
    fn reduce_scatter(&self, x: &Buffer, rows: ShardLayout, bias: Option<&Buffer>) -> Result<Buffer> {
        let (shard, group) = (&self.shard, &self.shard.group);
        let (blocks, x_blocks) = (shard.blocks(rows, shard.out_features), shard.blocks(rows, shard.in_features));
        let mut y = shard.allocate(rows.total(), shard.out_features)?;
        let mut reduce = group.start_reduce_scatter(T::DTYPE, blocks)?;
        if shard.blocking() {
            shard.multiply(x, &mut y, bias)?;
            let y = y.freeze();
            for rank in 0..group.world_size() {
                reduce.contribute(rank, y.slice(blocks.own_bytes(rank))?)?;
            }
            return reduce.wait();
        }
        let rank = group.rank();
        let mut y = Cut::new(y, blocks, rank)?;
        let (before, after) = around(x, x_blocks, rank)?;
        shard.multiply(&before, &mut y.before, bias)?;
        shard.multiply(&after, &mut y.after, bias)?;
        let (before, after) = (y.before.freeze(), y.after.freeze());
        for peer in 0..rank {
            reduce.contribute(peer, before.slice(blocks.own_bytes(peer))?)?;
        }
        let end = blocks.own_bytes(rank).end;
        for peer in rank + 1..group.world_size() {
            let range = blocks.own_bytes(peer);
            reduce.contribute(peer, after.slice(range.start - end..range.end - end)?)?;
        }
        shard.multiply(&x.slice(x_blocks.own_bytes(rank))?, &mut y.own, bias)?;
        reduce.contribute(rank, y.own.freeze())?;
        reduce.wait()
    }

    /// The sum, whole. Async reduces the first half of the rows while the second is multiplied.
    fn all_reduce(&self, x: &Buffer, rows: ShardLayout, bias: Option<&Buffer>) -> Result<Buffer> {
        let (shard, group) = (&self.shard, &self.shard.group);
        let mut y = shard.allocate(rows.total(), shard.out_features)?;
        if group.world_size() == 1 {
            shard.multiply(x, &mut y, bias)?;
            return Ok(y.freeze());
        }
        let halves = ShardLayout::uneven(rows.total(), if shard.blocking() { 1 } else { 2 })?;
        let (y_half, x_half) = (shard.blocks(halves, shard.out_features), shard.blocks(halves, shard.in_features));
        let mut sum = shard.allocate(rows.total(), shard.out_features)?;
        let mut start = |half: usize| {
            let mut part = y.split_to(y_half.own_bytes(half).len())?;
            shard.multiply(&x.slice(x_half.own_bytes(half))?, &mut part, bias)?;
            let into = sum.split_to(part.len())?;
            group.start_all_reduce_into(T::DTYPE, ReduceOp::Sum, &part.freeze(), into)
        };
        let first = start(0)?;
        if shard.blocking() {
            return first.wait();
        }
        let second = start(1)?;
        first.wait()?.join(&second.wait()?)
    }

    /// The gradient of the input `[b, …, in_features / n]` ([`Placement::Features`]); the weight's and bias's gradients
    /// are added to theirs.
    ///
    /// `saved` is what [`forward`](Self::forward) returned, by value or by reference; `grad_output` is as its output.
    ///
    /// # Errors
    /// [`Error::Saved`](crate::Error::Saved), [`Error::Placement`](crate::Error::Placement) and
    /// [`Error::Shape`](crate::Error::Shape) where they do not fit, with nothing changed; errors of communication.
    pub fn backward(&self, saved: impl Borrow<Saved<T>>, grad_output: &Tensor<T>) -> Result<Tensor<T>> {
        let (shard, group, saved) = (&self.shard, &self.shard.group, saved.borrow());
        shard.check_saved(saved, grad_output, self.output_placement())?;
        let x = saved.input.buffer();
        let rows = self.rows(&saved.input)?;
        let mut dx = shard.allocate(rows.total(), shard.in_features)?;
        let whole = if shard.is(LinearMode::AllReduce) {
            Some(grad_output.buffer().clone())
        } else if shard.blocking() {
            let blocks = shard.blocks(rows, shard.out_features);
            Some(group.start_gather(T::DTYPE, blocks, grad_output.buffer())?.wait()?)
        } else {
            None
        };
        let (dx, dy) = match whole {
            Some(dy) => {
                shard.multiply_back(&dy, &mut dx)?;
                shard.add_weight_grad(&dy, x)?;
                (dx.freeze(), dy)
            }
            None => {
                // Both products of this rank's own rows need no communication.
                let (rank, own) = (group.rank(), grad_output.buffer());
                let (blocks, x_blocks) =
                    (shard.blocks(rows, shard.out_features), shard.blocks(rows, shard.in_features));
                let gather = group.start_gather(T::DTYPE, blocks, own)?;
                let mut dx = Cut::new(dx, x_blocks, rank)?;
                shard.multiply_back(own, &mut dx.own)?;
                shard.add_weight_grad(own, &x.slice(x_blocks.own_bytes(rank))?)?;
                let dy = gather.wait()?;
                let ((dy_before, dy_after), (x_before, x_after)) =
                    (around(&dy, blocks, rank)?, around(x, x_blocks, rank)?);
                shard.multiply_back(&dy_before, &mut dx.before)?;
                shard.multiply_back(&dy_after, &mut dx.after)?;
                shard.add_weight_grad(&dy_before, &x_before)?;
                shard.add_weight_grad(&dy_after, &x_after)?;
                (dx.join()?, dy)
            }
        };
        shard.add_bias_grad(&dy)?;
        Ok(shard.tensor(dx, *saved.input.shape(), Placement::Features))
    }

    fn output_placement(&self) -> Placement {
        match self.shard.config.mode {
            LinearMode::AllReduce => Placement::Replicated,
            LinearMode::ReduceScatter => Placement::Rows,
        }
    }

    /// All rows, and whose they are.
    fn rows(&self, input: &Tensor<T>) -> Result<ShardLayout> {
        let (shape, world_size) = (input.shape(), self.shard.group.world_size());
        match self.shard.config.mode {
            LinearMode::AllReduce => ShardLayout::uneven(shape.rows(), world_size),
            LinearMode::ReduceScatter => {
                ShardLayout::even("the input's first dimension", shape.leading(), world_size)?;
                ShardLayout::even("rows", shape.rows(), world_size)
            }
        }
    }
}

impl<T: Float> sealed::Sealed for TensorParallelRowLinear<T> {
    type Element = T;
    const SHARDED: Sharded = Sharded::In;

    fn assemble(group: &Group, config: LinearConfig, weight: Parameter<T>, bias: Option<Parameter<T>>) -> Result<Self> {
        Ok(Self { shard: Shard::new("row linear", group, config, weight, bias) })
    }
}
