//! The row layer.

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

use super::gather::Gathering;
use super::reduce::sum_rows;
use super::{LinearBuilder, LinearConfig, LinearMode, Saved, Shard, Sharded, common_methods, sealed};
use crate::Result;
use crate::dtype::Float;
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::parameter::Parameter;
use crate::plan::{LayerKind, Pass};
use crate::tensor::{Placement, Tensor};

/// A linear layer whose input features are sharded over the ranks: `Y = X Wᵀ + b` with the weight's columns (input features) sharded.
///
/// Rank r holds columns r of `W` and features r of `X`: the product of the two is a summand of `Y`. The bias is whole on
/// every rank and counts once: the first rank adds it to its summand. Its gradient is the same on all ranks.
///
/// | | forward | backward |
/// | --- | --- | --- |
/// | `ReduceScatter` | Y = reduce_scatter(X_r W_rᵀ) by rows, + b | gather dY; dX_r = dY W_r; dW_r = dYᵀ X_r; db = column sums of dY |
/// | `AllReduce` | Y = all_reduce(X_r W_rᵀ) + b | dX_r = dY W_r; dW_r = dYᵀ X_r; db as above |
///
/// ```
/// use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, TensorParallelRowLinear};
///
/// // W = [[1, 2]]: rank 0 holds the first column, rank 1 the second. Each holds one feature of X = [[1, 1], [2, 3]].
/// LocalWorld::new(2)?.run(|group| {
///     let layer = TensorParallelRowLinear::<f32>::builder(2, 1)
///         .mode(LinearMode::ReduceScatter)
///         .overlap(Overlap::Async)
///         .from_full(group, &[1.0, 2.0], None)?;
///     let x = group.tensor(&[[1.0, 2.0], [1.0, 3.0]][group.rank()], &[2, 1], Placement::Features)?;
///     let (y, saved) = layer.forward(&x)?;
///     // Y = X Wᵀ = [[3], [8]]: this rank's row.
///     assert_eq!(y.to_vec()?, [[3.0], [8.0]][group.rank()]);
///
///     let dy = group.tensor(&[[1.0], [10.0]][group.rank()], &[1, 1], Placement::Rows)?;
///     let dx = layer.backward(saved, &dy)?;
///     // dX = dY W = [[1, 2], [10, 20]]: all rows, this rank's feature.
///     assert_eq!(dx.to_vec()?, [[1.0, 10.0], [2.0, 20.0]][group.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
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

    #[cfg(feature = "checkpoint")]
    pub(crate) fn group(&self) -> &crate::Group {
        &self.shard.group
    }

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
        if self.shard.is(LinearMode::ReduceScatter) {
            ShardLayout::even("the input's first dimension", input.shape().leading(), self.shard.group.world_size())?;
        }
        self.forward_uneven(input)
    }

    /// The same for a first dimension that the world size need not divide: the ranks get the rows that
    /// [`ShardLayout::uneven`] gives them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), but for divisibility.
    pub fn forward_uneven(&self, input: &Tensor<T>) -> Result<(Tensor<T>, Saved<T>)> {
        let (shard, x) = (&self.shard, input.buffer());
        shard.check("input", input, Placement::Features, shard.in_features)?;
        let leading = ShardLayout::uneven(input.shape().leading(), shard.group.world_size())?;
        let rows = leading.of_each(input.shape().rows_per_leading());
        // Once over all ranks.
        let bias = shard.bias_value().filter(|_| shard.group.rank() == 0);
        let bias = bias.as_ref().map(Tensor::buffer);

        let call = shard.call(rows, Pass::Forward)?;
        let sum =
            sum_rows::<T>(&shard.group, shard.config.mode, &call, rows, shard.out_features, false, |rows, y, at| {
                shard.multiply(&shard.slice(x, rows, shard.in_features)?, y, at, bias)
            })?;

        let leading = if shard.is(LinearMode::AllReduce) { leading.total() } else { leading.len(shard.group.rank()) };
        let shape = input.shape().with_leading(leading).with_features(shard.out_features);
        let y = sum.wait()?;
        shard.called(&call);
        Ok((shard.tensor(y, shape, self.output_placement()), shard.save(input, None, shape, rows)))
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
        let (shard, saved) = (&self.shard, saved.borrow());
        shard.check_saved(saved, grad_output, self.output_placement(), saved.output)?;
        let (x, rows, own) = (saved.input.buffer(), saved.rows, grad_output.buffer());
        let mut dx = shard.allocate(rows.total(), shard.in_features)?;

        // Both products of this rank's own rows need no communication; the others' follow as they come.
        let call = shard.call(rows, Pass::Backward)?;
        let gathering = if shard.is(LinearMode::AllReduce) {
            Gathering::ready(own.clone(), rows, 0)
        } else {
            Gathering::start(shard, &call, rows, shard.out_features, own)?
        };
        let product = |rows: Range<usize>, dy: &_| shard.multiply_back(dy, &mut dx, rows.start, T::DTYPE, false);
        let add_weight_grad =
            |rows: Range<usize>, dy: &_| shard.add_weight_grad(dy, &shard.slice(x, rows, shard.in_features)?);
        let dy = gathering.for_each(call.overlap.into(), product, add_weight_grad)?;
        shard.called(&call);

        shard.add_bias_grad(&dy)?;
        Ok(shard.tensor(dx.freeze(), *saved.input.shape(), Placement::Features))
    }

    fn output_placement(&self) -> Placement {
        match self.shard.config.mode {
            LinearMode::AllReduce => Placement::Replicated,
            LinearMode::ReduceScatter => Placement::Rows,
        }
    }
}

impl<T: Float> sealed::Sealed for TensorParallelRowLinear<T> {
    type Element = T;
    const SHARDED: Sharded = Sharded::In;

    fn assemble(
        group: &Group,
        config: LinearConfig,
        weight: Arc<Parameter<T>>,
        bias: Option<Parameter<T>>,
    ) -> Result<Self> {
        Ok(Self { shard: Shard::new(LayerKind::Row, group, config, weight, bias) })
    }
}
