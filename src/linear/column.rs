//! `Y = X Wᵀ + b` with the weight's rows (output features) sharded.
//!
//! Rank r holds rows r of `W` and of `b`. In [`LinearMode::ReduceScatter`] it also holds rows r of `X`; its output is *its
//! weight shard applied to every rank's rows*: the rows before its own, its own, and those after.
//!
//! | | forward | backward |
//! | --- | --- | --- |
//! | `ReduceScatter` | gather X; Y_r = X W_rᵀ + b_r | dX = reduce_scatter(dY_r W_r); dW_r = dY_rᵀ X; db_r = column sums of dY_r |
//! | `AllReduce` | Y_r = X W_rᵀ + b_r | dX = all_reduce(dY_r W_r); dW_r, db_r as above |
//!
//! ```
//! use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, TensorParallelColumnLinear};
//!
//! // W = [[1, 2], [3, 4]]: rank 0 holds the first row, rank 1 the second. Each holds one row of X.
//! LocalWorld::new(2)?.run(|group| {
//!     let layer = TensorParallelColumnLinear::<f32>::builder(2, 2)
//!         .mode(LinearMode::ReduceScatter)
//!         .overlap(Overlap::Async)
//!         .from_full(group, &[1.0, 2.0, 3.0, 4.0], None)?;
//!     let x = group.tensor(&[[1.0, 0.0], [0.0, 1.0]][group.rank()], &[1, 2], Placement::Rows)?;
//!     let (y, saved) = layer.forward(&x)?;
//!     // Y = X Wᵀ = [[1, 3], [2, 4]]: all rows, this rank's column.
//!     assert_eq!(y.to_vec()?, [[1.0, 2.0], [3.0, 4.0]][group.rank()]);
//!
//!     let dy = group.tensor(&[1.0, 1.0], &[2, 1], Placement::Features)?;
//!     let dx = layer.backward(saved, &dy)?;
//!     // dX = dY W = [[4, 6], [4, 6]]: this rank's row.
//!     assert_eq!(dx.to_vec()?, [4.0, 6.0]);
//!     assert_eq!(layer.weight_grad()?.to_vec()?, [1.0, 1.0]);
//!     Ok(())
//! })?;
//! # Ok::<(), async_tensor_parallel::Error>(())
//! ```

use std::borrow::Borrow;

use super::{
    Cut, LinearBuilder, LinearConfig, LinearMode, Saved, Shard, Sharded, around, common_methods, reduced, sealed,
    settled,
};
use crate::comm::{Gather, ReduceOp};
use crate::dtype::Float;
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::parameter::Parameter;
use crate::tensor::{Placement, Tensor};
use crate::{Result, linear::Overlap};

/// A linear layer whose output features are sharded over the ranks. See the [module](self).
#[derive(Debug)]
pub struct TensorParallelColumnLinear<T: Float> {
    shard: Shard<T>,
}

impl<T: Float> TensorParallelColumnLinear<T> {
    /// A layer from `in_features` to `out_features`, both of the whole.
    pub fn builder(in_features: usize, out_features: usize) -> LinearBuilder<Self> {
        LinearBuilder::new(in_features, out_features)
    }

    common_methods!();

    /// The output `[b, …, out_features / n]` ([`Placement::Features`]), and what the backward pass needs.
    ///
    /// `input` is `[b, …, in_features]`, whole ([`Placement::Replicated`]) in AllReduce mode; in ReduceScatter mode each
    /// rank gives its rows `[b / n, …, in_features]` ([`Placement::Rows`]). A vector counts as one row.
    ///
    /// # Errors
    /// [`Error::Placement`](crate::Error::Placement) and [`Error::Shape`](crate::Error::Shape) for an input that does not
    /// fit; [`Error::Mismatch`](crate::Error::Mismatch) where the ranks' rows differ; errors of communication.
    pub fn forward(&self, input: &Tensor<T>) -> Result<(Tensor<T>, Saved<T>)> {
        let (shard, group) = (&self.shard, &self.shard.group);
        shard.check("input", input, self.input_placement(), shard.in_features)?;
        let bias = shard.bias_value();
        let bias = bias.as_ref().map(Tensor::buffer);
        let rows = self.rows(input)?;
        let shape = input.shape().with_leading(self.leading(input)).with_features(shard.out_features);
        let mut y = shard.allocate(rows.total(), shard.out_features)?;

        let (y, gathered) = if shard.is(LinearMode::AllReduce) {
            shard.multiply(input.buffer(), &mut y, bias)?;
            (y.freeze(), None)
        } else {
            let blocks = shard.blocks(rows, shard.in_features);
            let gather = group.start_gather(T::DTYPE, blocks, input.buffer())?;
            if shard.config.overlap == Overlap::Blocking {
                let x = gather.wait()?;
                shard.multiply(&x, &mut y, bias)?;
                (y.freeze(), Some(x))
            } else {
                let mut y = Cut::new(y, shard.blocks(rows, shard.out_features), group.rank())?;
                shard.multiply(input.buffer(), &mut y.own, bias)?;
                let x = gather.wait()?;
                let (before, after) = around(&x, blocks, group.rank())?;
                shard.multiply(&before, &mut y.before, bias)?;
                shard.multiply(&after, &mut y.after, bias)?;
                (y.join()?, Some(x))
            }
        };
        let keep = gathered.filter(|_| !shard.config.recompute_all_gather);
        Ok((shard.tensor(y, shape, Placement::Features), shard.save(input, keep, shape)))
    }

    /// The gradient of the input, in its shape and placement; the weight's and bias's gradients are added to theirs.
    ///
    /// `saved` is what [`forward`](Self::forward) returned, by value or by reference; `grad_output` is as its output.
    ///
    /// # Errors
    /// [`Error::Saved`](crate::Error::Saved), [`Error::Placement`](crate::Error::Placement) and
    /// [`Error::Shape`](crate::Error::Shape) where they do not fit, with nothing changed; errors of communication.
    pub fn backward(&self, saved: impl Borrow<Saved<T>>, grad_output: &Tensor<T>) -> Result<Tensor<T>> {
        let (shard, group, saved) = (&self.shard, &self.shard.group, saved.borrow());
        shard.check_saved(saved, grad_output, Placement::Features)?;
        let dy = grad_output.buffer();
        let rows = self.rows(&saved.input)?;
        let blocks = shard.blocks(rows, shard.in_features);
        let blocking = shard.blocking();

        let gather = match &saved.gathered {
            _ if shard.is(LinearMode::AllReduce) => Gather::Ready(None, saved.input.buffer().clone()),
            Some(x) => Gather::Ready(None, x.clone()),
            None => settled(group.start_gather(T::DTYPE, blocks, saved.input.buffer())?, blocking)?,
        };
        let mut dx = shard.allocate(rows.total(), shard.in_features)?;
        shard.multiply_back(dy, &mut dx)?;
        let dx = dx.freeze();
        let reduce = if shard.is(LinearMode::AllReduce) {
            group.start_all_reduce(T::DTYPE, ReduceOp::Sum, &dx)?
        } else {
            let mut reduce = group.start_reduce_scatter(T::DTYPE, blocks)?;
            for rank in 0..group.world_size() {
                reduce.contribute(rank, dx.slice(blocks.own_bytes(rank))?)?;
            }
            reduce
        };
        let reduce = reduced(reduce, blocking)?;
        shard.add_bias_grad(dy)?;
        shard.add_weight_grad(dy, &gather.wait()?)?;
        Ok(shard.tensor(reduce.wait()?, *saved.input.shape(), self.input_placement()))
    }

    fn input_placement(&self) -> Placement {
        match self.shard.config.mode {
            LinearMode::AllReduce => Placement::Replicated,
            LinearMode::ReduceScatter => Placement::Rows,
        }
    }

    /// The first dimension of the gathered input.
    fn leading(&self, input: &Tensor<T>) -> usize {
        match self.shard.config.mode {
            LinearMode::AllReduce => input.shape().leading(),
            LinearMode::ReduceScatter => input.shape().leading() * self.shard.group.world_size(),
        }
    }

    /// All rows, and whose they are.
    fn rows(&self, input: &Tensor<T>) -> Result<ShardLayout> {
        match self.shard.config.mode {
            LinearMode::AllReduce => ShardLayout::uneven(input.shape().rows(), self.shard.group.world_size()),
            LinearMode::ReduceScatter => {
                let world_size = self.shard.group.world_size();
                ShardLayout::even("rows", input.shape().rows() * world_size, world_size)
            }
        }
    }
}

impl<T: Float> sealed::Sealed for TensorParallelColumnLinear<T> {
    type Element = T;
    const SHARDED: Sharded = Sharded::Out;

    fn assemble(group: &Group, config: LinearConfig, weight: Parameter<T>, bias: Option<Parameter<T>>) -> Result<Self> {
        Ok(Self { shard: Shard::new("column linear", group, config, weight, bias) })
    }
}
