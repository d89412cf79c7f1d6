//! The column layer.

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

use super::gather::{Gathering, Order};
use super::reduce::sum_rows;
use super::{LinearBuilder, LinearConfig, LinearMode, Overlap, Saved, Shard, Sharded, common_methods, sealed};
use crate::dtype::{Element, Float};
use crate::embedding::TensorParallelEmbedding;
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::memory::BufferMut;
use crate::parameter::Parameter;
use crate::plan::{LayerKind, Pass};
use crate::tensor::{Placement, Tensor};
use crate::{Error, Result};

/// A linear layer whose output features are sharded over the ranks: `Y = X Wᵀ + b` with the weight's rows (output features) sharded.
///
/// Rank r holds rows r of `W` and of `b`. In [`LinearMode::ReduceScatter`] it also holds rows r of `X`; its output is *its
/// weight shard applied to every rank's rows*: the rows before its own, its own, and those after.
///
/// | | forward | backward |
/// | --- | --- | --- |
/// | `ReduceScatter` | gather X; Y_r = X W_rᵀ + b_r | dX = reduce_scatter(dY_r W_r); dW_r = dY_rᵀ X; db_r = column sums of dY_r |
/// | `AllReduce` | Y_r = X W_rᵀ + b_r | dX = all_reduce(dY_r W_r); dW_r, db_r as above |
///
/// ```
/// use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, TensorParallelColumnLinear};
///
/// // W = [[1, 2], [3, 4]]: rank 0 holds the first row, rank 1 the second. Each holds one row of X.
/// LocalWorld::new(2)?.run(|group| {
///     let layer = TensorParallelColumnLinear::<f32>::builder(2, 2)
///         .mode(LinearMode::ReduceScatter)
///         .overlap(Overlap::Async)
///         .from_full(group, &[1.0, 2.0, 3.0, 4.0], None)?;
///     let x = group.tensor(&[[1.0, 0.0], [0.0, 1.0]][group.rank()], &[1, 2], Placement::Rows)?;
///     let (y, saved) = layer.forward(&x)?;
///     // Y = X Wᵀ = [[1, 3], [2, 4]]: all rows, this rank's column.
///     assert_eq!(y.to_vec()?, [[1.0, 2.0], [3.0, 4.0]][group.rank()]);
///
///     let dy = group.tensor(&[1.0, 1.0], &[2, 1], Placement::Features)?;
///     let dx = layer.backward(saved, &dy)?;
///     // dX = dY W = [[4, 6], [4, 6]]: this rank's row.
///     assert_eq!(dx.to_vec()?, [4.0, 6.0]);
///     assert_eq!(layer.weight_grad()?.to_vec()?, [1.0, 1.0]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorParallelColumnLinear<T: Float> {
    shard: Shard<T>,
}

impl<T: Float> TensorParallelColumnLinear<T> {
    /// A layer from `in_features` to `out_features`, both of the whole.
    pub fn builder(in_features: usize, out_features: usize) -> LinearBuilder<Self> {
        LinearBuilder::new(in_features, out_features)
    }

    /// A layer whose weight is an embedding's table: the output head of a model with tied embeddings (nanotron's
    /// `TiedLinear`). Both see the same values, and both add to the same gradient.
    ///
    /// It maps `embedding_dim` features to the table's rows, padding included, in the embedding's mode, without bias.
    ///
    /// # Errors
    /// As [`LinearBuilder::build`].
    pub fn tied(embedding: &TensorParallelEmbedding<T>, overlap: Overlap) -> Result<Self> {
        let (group, weight) = (embedding.group(), Arc::clone(embedding.shared_weight()));
        let [rows, dim] = weight.value().shape()[..] else { return Err(no_layers()) };
        let builder = Self::builder(dim, rows * group.world_size()).mode(embedding.config().mode).overlap(overlap);
        Ok(Self { shard: Shard::new(LayerKind::Column, group, builder.into_config(), weight, None) })
    }

    common_methods!();

    pub(crate) fn group(&self) -> &crate::Group {
        &self.shard.group
    }

    /// The output `[b, …, out_features / n]` ([`Placement::Features`]), and what the backward pass needs.
    ///
    /// `input` is `[b, …, in_features]`, whole ([`Placement::Replicated`]) in AllReduce mode; in ReduceScatter mode each
    /// rank gives its rows `[b / n, …, in_features]` ([`Placement::Rows`]). A vector counts as one row.
    ///
    /// # Errors
    /// [`Error::Placement`] and [`Error::Shape`] for an input that does not fit; [`Error::Mismatch`] where the ranks' rows
    /// differ; errors of communication.
    pub fn forward(&self, input: &Tensor<T>) -> Result<(Tensor<T>, Saved<T>)> {
        let ([y], saved) = Self::forward_many([self], input)?;
        Ok((y, saved))
    }

    /// The same for ranks with different numbers of rows, as [`ShardLayout::uneven`] divides the first dimension: `total` of
    /// them over all ranks. In AllReduce mode `total` is the input's own first dimension.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Shape`] where the input has not this rank's part of `total`.
    pub fn forward_uneven(&self, input: &Tensor<T>, total: usize) -> Result<(Tensor<T>, Saved<T>)> {
        let ([y], saved) = Self::forward_many_uneven([self], input, total)?;
        Ok((y, saved))
    }

    /// The outputs of several layers that share one input, such as Q, K and V, or gate and up: it is gathered once.
    ///
    /// The layers must be of one group and have the same `in_features` and options of mode and overlap; the first one's
    /// count. The backward pass is [`backward_many`](Self::backward_many).
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Argument`] for no layers or layers that do not fit together.
    pub fn forward_many<const N: usize>(layers: [&Self; N], input: &Tensor<T>) -> Result<([Tensor<T>; N], Saved<T>)> {
        let first = first(&layers)?;
        let leading = match first.config.mode {
            LinearMode::AllReduce => input.shape().leading(),
            LinearMode::ReduceScatter => input.shape().leading() * first.group.world_size(),
        };
        Self::forward_many_uneven(layers, input, leading)
    }

    /// [`forward_many`](Self::forward_many) and [`forward_uneven`](Self::forward_uneven) in one.
    ///
    /// # Errors
    /// As these.
    pub fn forward_many_uneven<const N: usize>(
        layers: [&Self; N],
        input: &Tensor<T>,
        total: usize,
    ) -> Result<([Tensor<T>; N], Saved<T>)> {
        let shard = first(&layers)?;
        shard.check("input", input, shard.column_input(), shard.in_features)?;
        let rows = shard.column_rows(input, total)?;
        let biases = layers.map(|layer| layer.shard.bias_value());
        let mut outputs = each(|index| layers[index].shard.allocate(rows.total(), layers[index].shard.out_features))?;
        let multiply = |row: usize, x: &_, outputs: &mut [BufferMut; N]| {
            let mut products = layers.iter().zip(outputs).zip(&biases);
            products
                .try_for_each(|((layer, y), bias)| layer.shard.multiply(x, y, row, bias.as_ref().map(Tensor::buffer)))
        };

        let gathered = if shard.is(LinearMode::AllReduce) {
            multiply(0, input.buffer(), &mut outputs)?;
            None
        } else {
            // All ranks' rows: this rank's own while the others travel, then those before and after them.
            let call = shard.call(rows, Pass::Forward)?;
            let gathering = Gathering::start(shard, &call, rows, shard.in_features, input.buffer())?;
            let product = |rows: Range<usize>, x: &_| multiply(rows.start, x, &mut outputs);
            let gathered = gathering.for_each(call.overlap.into(), product, |_, _| Ok(()))?;
            shard.called(&call);
            Some(gathered)
        };

        let keep = gathered.filter(|_| !shard.config.recompute_all_gather);
        let shape = input.shape().with_leading(total);
        let saved = shard.save(input, keep, shape.with_features(shard.out_features), rows);
        let mut outputs = outputs.map(Some);
        let outputs = each(|index| {
            let shape = shape.with_features(layers[index].shard.out_features);
            Ok(shard.tensor(outputs[index].take().ok_or_else(no_layers)?.freeze(), shape, Placement::Features))
        })?;
        Ok((outputs, saved))
    }

    /// The gradient of the input, in its shape and placement; the weight's and bias's gradients are added to theirs.
    ///
    /// `saved` is what [`forward`](Self::forward) returned, by value or by reference; `grad_output` is as its output.
    ///
    /// # Errors
    /// [`Error::Saved`], [`Error::Placement`] and [`Error::Shape`] where they do not fit, with nothing changed; errors of
    /// communication.
    pub fn backward(&self, saved: impl Borrow<Saved<T>>, grad_output: &Tensor<T>) -> Result<Tensor<T>> {
        Self::backward_many([self], saved, [grad_output])
    }

    /// The gradient of the input that several layers shared: theirs are summed before they are reduced over the ranks,
    /// once.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_many<const N: usize>(
        layers: [&Self; N],
        saved: impl Borrow<Saved<T>>,
        grad_outputs: [&Tensor<T>; N],
    ) -> Result<Tensor<T>> {
        let (shard, saved) = (first(&layers)?, saved.borrow());
        for (index, (layer, grad_output)) in layers.iter().zip(grad_outputs).enumerate() {
            let layer = &layer.shard;
            let output = saved.output.with_features(layer.out_features);
            shard.check_saved(
                saved,
                grad_output,
                Placement::Features,
                if index == 0 { saved.output } else { output },
            )?;
        }
        let rows = saved.rows;
        let call = shard.call(rows, Pass::Backward)?;

        // The input again, for the weights' gradients, under the input gradient's product.
        let gathering = match &saved.gathered {
            _ if shard.is(LinearMode::AllReduce) => Gathering::ready(saved.input.buffer().clone(), rows, 0),
            Some(x) => Gathering::ready(x.clone(), rows, shard.group.rank()),
            None => Gathering::start(shard, &call, rows, shard.in_features, saved.input.buffer())?,
        };
        // The input's gradient, whose reduction runs under the weights' gradients.
        let sum =
            sum_rows::<T>(&shard.group, shard.config.mode, &call, rows, shard.in_features, true, |rows, dx, at| {
                let products = || layers.iter().zip(grad_outputs).enumerate();
                let part = |layer: &Self, dy: &Tensor<T>| {
                    layer.shard.slice(dy.buffer(), rows.clone(), layer.shard.out_features)
                };
                if N == 1 || T::DTYPE == T::Accumulator::DTYPE {
                    return products().try_for_each(|(index, (layer, dy))| {
                        layer.shard.multiply_back(&part(layer, dy)?, dx, at, T::DTYPE, index > 0)
                    });
                }
                // Several products of 16-bit elements are added up in f32 and rounded once.
                let dtype = T::Accumulator::DTYPE;
                let mut wide = shard.group.device().allocate(rows.len() * shard.in_features * dtype.size())?;
                products().try_for_each(|(index, (layer, dy))| {
                    layer.shard.multiply_back(&part(layer, dy)?, &mut wide, 0, dtype, index > 0)
                })?;
                shard.group.device().cast((&wide.freeze(), dtype), (dx, T::DTYPE))
            })?;

        let order = if call.overlap == Overlap::Async { Order::Whole } else { call.overlap.into() };
        for (layer, dy) in layers.iter().zip(grad_outputs) {
            layer.shard.add_bias_grad(dy.buffer())?;
        }
        let add_weight_grads = |rows: Range<usize>, x: &_| {
            layers.iter().zip(grad_outputs).try_for_each(|(layer, dy)| {
                let dy = layer.shard.slice(dy.buffer(), rows.clone(), layer.shard.out_features)?;
                layer.shard.add_weight_grad(&dy, x)
            })
        };
        gathering.for_each(order, |_, _| Ok(()), add_weight_grads)?;
        let dx = sum.wait()?;
        shard.called(&call);
        Ok(shard.tensor(dx, *saved.input.shape(), shard.column_input()))
    }
}

/// The first layer's shard, with which the others must agree.
fn first<'a, T: Float, const N: usize>(layers: &[&'a TensorParallelColumnLinear<T>; N]) -> Result<&'a Shard<T>> {
    let shard = &layers.first().ok_or_else(no_layers)?.shard;
    let key = |shard: &Shard<T>| (shard.in_features, shard.config.mode, shard.config.overlap, shard.group.rank());
    match layers.iter().find(|layer| key(&layer.shard) != key(shard)) {
        None => Ok(shard),
        Some(other) => Err(Error::Argument {
            what: "layers that share an input",
            got: format!("{:?} beside {:?}", other.shard.config, shard.config),
            wanted: "the same in_features, mode and overlap".into(),
        }),
    }
}

fn no_layers() -> Error {
    Error::Argument { what: "layers", got: "none".into(), wanted: "at least one".into() }
}

/// An array of what `make` gives for each index, or its first error.
fn each<R, const N: usize>(mut make: impl FnMut(usize) -> Result<R>) -> Result<[R; N]> {
    let mut failed = None;
    let made = std::array::from_fn(|index| match failed {
        Some(_) => None,
        None => make(index).map_err(|error| failed = Some(error)).ok(),
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(made.map(|value| value.expect("every index was made"))),
    }
}

impl<T: Float> Shard<T> {
    fn column_input(&self) -> Placement {
        match self.config.mode {
            LinearMode::AllReduce => Placement::Replicated,
            LinearMode::ReduceScatter => Placement::Rows,
        }
    }

    /// All rows of a column layer's input, and whose they are, where its first dimension is `total` over all ranks.
    fn column_rows(&self, input: &Tensor<T>, total: usize) -> Result<ShardLayout> {
        let shape = input.shape();
        let layout = ShardLayout::uneven(total, self.group.world_size())?;
        let wanted = if self.is(LinearMode::AllReduce) { total } else { layout.len(self.group.rank()) };
        if shape.leading() != wanted {
            let wanted = format!("a first dimension of {wanted}, this rank's part of {total}");
            return Err(Error::Shape { what: "input", got: *shape, wanted });
        }
        Ok(layout.of_each(shape.rows_per_leading()))
    }
}

impl<T: Float> sealed::Sealed for TensorParallelColumnLinear<T> {
    type Element = T;
    const SHARDED: Sharded = Sharded::Out;

    fn assemble(
        group: &Group,
        config: LinearConfig,
        weight: Arc<Parameter<T>>,
        bias: Option<Parameter<T>>,
    ) -> Result<Self> {
        Ok(Self { shard: Shard::new(LayerKind::Column, group, config, weight, bias) })
    }
}
