//! The embedding.

use std::borrow::Borrow;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::comm::Blocks;
use crate::device::Matrix;
use crate::dtype::{Element, Float};
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::linear::reduce::sum_rows;
use crate::linear::{Call, init};
use crate::memory::Buffer;
use crate::meter::Meter;
use crate::mode::{LinearMode, Overlap};
use crate::parameter::Parameter;
use crate::plan::Pass;
use crate::tensor::{Placement, Shape, Tensor};
use crate::{Error, Result};

/// A table of vectors, one for each token id, whose rows are sharded over the ranks ("vocab-parallel").
///
/// Rank r holds rows `r · p … (r + 1) · p` of the table, `p = ⌈num_embeddings / n⌉`. Where n does not divide
/// `num_embeddings`, the last rows are padding, which no id names and no gradient reaches. Each rank looks up the ids that it
/// holds and gives zeros for the others; the sum over the ranks is the output, exactly.
///
/// | | output | backward |
/// | --- | --- | --- |
/// | `AllReduce` | all_reduce of the parts, replicated | rows of dY are added to the rows of the ids |
/// | `ReduceScatter` | reduce_scatter of the parts by rows | dY is gathered first |
///
/// ```
/// use async_tensor_parallel::{LinearMode, LocalWorld, Placement, TensorParallelEmbedding};
///
/// // Three ids, one number each; rank 0 holds ids 0 and 1, rank 1 holds id 2 and a row of padding.
/// LocalWorld::new(2)?.run(|group| {
///     let layer = TensorParallelEmbedding::<f32>::builder(3, 1)
///         .mode(LinearMode::AllReduce)
///         .from_full(group, &[10.0, 20.0, 30.0])?;
///     let ids = group.tensor(&[2i64, 0, 2], &[3], Placement::Replicated)?;
///     let (y, saved) = layer.forward(&ids)?;
///     assert_eq!(y.to_vec()?, [30.0, 10.0, 30.0]);
///     layer.backward(saved, &group.tensor(&[1.0, 2.0, 4.0], &[3, 1], Placement::Replicated)?)?;
///     assert_eq!(layer.weight_grad()?.to_vec()?, [[2.0, 0.0], [5.0, 0.0]][group.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorParallelEmbedding<T: Float> {
    group: Group,
    config: EmbeddingConfig,
    weight: Arc<Parameter<T>>,
    /// This rank's ids.
    layout: ShardLayout,
    meter: Arc<Meter>,
}

/// The sizes and options of an embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingConfig {
    /// Ids of the whole table, from 0.
    pub num_embeddings: usize,
    /// Numbers an id.
    pub embedding_dim: usize,
    /// Which collectives are used. Default: [`LinearMode::ReduceScatter`].
    pub mode: LinearMode,
    /// How they are hidden. Default: [`Overlap::Async`]. [`Overlap::Auto`] means it.
    pub overlap: Overlap,
    /// An id whose row receives no gradient. Default: none.
    pub padding_idx: Option<usize>,
    /// Seed of the initial values. Default: 0.
    pub seed: u64,
}

/// Builds an embedding: options first, then [`build`](Self::build), [`from_full`](Self::from_full) or
/// [`from_shard`](Self::from_shard).
#[derive(Debug, Clone)]
pub struct EmbeddingBuilder<T: Float> {
    config: EmbeddingConfig,
    _element: PhantomData<fn() -> T>,
}

impl<T: Float> EmbeddingBuilder<T> {
    /// Sets which collectives are used.
    pub fn mode(mut self, mode: LinearMode) -> Self {
        self.config.mode = mode;
        self
    }

    /// Sets how they are hidden.
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.config.overlap = overlap;
        self
    }

    /// Sets the id whose row receives no gradient.
    pub fn padding_idx(mut self, id: usize) -> Self {
        self.config.padding_idx = Some(id);
        self
    }

    /// Sets the seed of the initial values.
    pub fn seed(mut self, seed: u64) -> Self {
        self.config.seed = seed;
        self
    }

    /// A table of random values, uniform in ±√3 (variance 1, as PyTorch's `nn.Embedding` has, but bounded); those of
    /// `padding_idx` are 0. Every world size starts from the same table.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes of 0 or a `padding_idx` that is no id.
    pub fn build(self, group: &Group) -> Result<TensorParallelEmbedding<T>> {
        let layout = self.layout(group)?;
        let (dim, config) = (self.config.embedding_dim, self.config);
        let value = |id: usize, column: usize| {
            let number = init::uniform::<f64>(config.seed, id * dim + column, 1) * 3f64.sqrt();
            T::from_f64(if config.padding_idx == Some(id) { 0.0 } else { number })
        };
        let own: Vec<T> = layout
            .own(group.rank())
            .flat_map(|id| (0..dim).map(move |column| (id, column)))
            .map(|(id, column)| value(id, column))
            .collect();
        self.assemble(group, layout, &own)
    }

    /// An embedding from the whole table `[num_embeddings, embedding_dim]`; every rank gives the same and keeps its rows.
    ///
    /// # Errors
    /// [`Error::Shape`] for a wrong length; as [`build`](Self::build).
    pub fn from_full(self, group: &Group, weight: &[T]) -> Result<TensorParallelEmbedding<T>> {
        let layout = self.layout(group)?;
        let EmbeddingConfig { num_embeddings, embedding_dim, .. } = self.config;
        if weight.len() != num_embeddings * embedding_dim {
            let (got, wanted) = (Shape::new(&[weight.len()])?, format!("[{num_embeddings}, {embedding_dim}]"));
            return Err(Error::Shape { what: "weight", got, wanted });
        }
        let own = layout.own(group.rank());
        self.assemble(group, layout, &weight[own.start * embedding_dim..own.end * embedding_dim])
    }

    /// An embedding from this rank's own rows, with or without the padding.
    ///
    /// # Errors
    /// As [`from_full`](Self::from_full).
    pub fn from_shard(self, group: &Group, weight: &[T]) -> Result<TensorParallelEmbedding<T>> {
        let layout = self.layout(group)?;
        self.assemble(group, layout, weight)
    }

    fn layout(&self, group: &Group) -> Result<ShardLayout> {
        let EmbeddingConfig { num_embeddings, embedding_dim, padding_idx, .. } = self.config;
        for (what, size) in [("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)] {
            if size == 0 {
                return Err(Error::Argument { what, got: "0".into(), wanted: "at least 1".into() });
            }
        }
        Shape::new(&[num_embeddings, embedding_dim])?;
        if let Some(id) = padding_idx.filter(|id| *id >= num_embeddings) {
            let wanted = format!("an id below {num_embeddings}");
            return Err(Error::Argument { what: "padding_idx", got: id.to_string(), wanted });
        }
        ShardLayout::uneven(num_embeddings, group.world_size())
    }

    fn assemble(self, group: &Group, layout: ShardLayout, own: &[T]) -> Result<TensorParallelEmbedding<T>> {
        let dim = self.config.embedding_dim;
        let (held, rows) = (layout.len(group.rank()), layout.largest());
        if own.len() != held * dim && own.len() != rows * dim {
            let (got, wanted) = (Shape::new(&[own.len()])?, format!("[{held}, {dim}] or [{rows}, {dim}]"));
            return Err(Error::Shape { what: "weight", got, wanted });
        }
        let mut padded = own[..held * dim].to_vec();
        padded.resize(rows * dim, T::from_f64(0.0));
        let weight = group.tensor(&padded, &[rows, dim], Parameter::<T>::PLACEMENT)?;
        Ok(self.over(group, layout, weight))
    }

    fn over(self, group: &Group, layout: ShardLayout, weight: Tensor<T>) -> TensorParallelEmbedding<T> {
        let weight = Arc::new(Parameter::new("weight", weight));
        TensorParallelEmbedding { group: group.clone(), config: self.config, weight, layout, meter: Arc::default() }
    }

    /// An embedding over a table that `read` makes, of so many bytes, padding included.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn with_table(
        self,
        group: &Group,
        read: impl FnOnce(usize) -> Result<crate::Buffer>,
    ) -> Result<TensorParallelEmbedding<T>> {
        let layout = self.layout(group)?;
        let shape = Shape::new(&[layout.largest(), self.config.embedding_dim])?;
        let table = read(shape.elements() * T::DTYPE.size())?;
        Ok(self.over(group, layout, Tensor::from_buffer(group.device(), table, shape, Parameter::<T>::PLACEMENT)))
    }

    #[cfg(feature = "checkpoint")]
    pub(crate) fn options(&self) -> &EmbeddingConfig {
        &self.config
    }
}

/// What a forward pass leaves for its backward pass: the ids.
#[derive(Debug, Clone)]
pub struct SavedIds {
    ids: Tensor<i64>,
    output: Shape,
    rows: ShardLayout,
}

impl<T: Float> TensorParallelEmbedding<T> {
    /// A table of `num_embeddings` ids, `embedding_dim` numbers each, both of the whole.
    pub fn builder(num_embeddings: usize, embedding_dim: usize) -> EmbeddingBuilder<T> {
        let config = EmbeddingConfig {
            num_embeddings,
            embedding_dim,
            mode: LinearMode::ReduceScatter,
            overlap: Overlap::Async,
            padding_idx: None,
            seed: 0,
        };
        EmbeddingBuilder { config, _element: PhantomData }
    }

    /// The layer's options.
    pub fn config(&self) -> &EmbeddingConfig {
        &self.config
    }

    /// The table and its gradient: this rank's rows, `[⌈num_embeddings / n⌉, embedding_dim]`.
    pub fn weight(&self) -> &Parameter<T> {
        &self.weight
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// The table, to share it.
    pub(crate) fn shared_weight(&self) -> &Arc<Parameter<T>> {
        &self.weight
    }

    /// The table's gradient, accumulated since the last [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    /// What the device reports.
    pub fn weight_grad(&self) -> Result<Tensor<T::Accumulator>> {
        self.weight.grad()
    }

    /// Makes the gradient zero.
    pub fn zero_grad(&self) {
        self.weight.zero_grad();
    }

    /// The rows of `ids` (`[b, …]`, the same on every rank): `[b, …, embedding_dim]`, replicated in AllReduce mode; in
    /// ReduceScatter mode each rank gets its part of the first dimension, `[b / n, …, embedding_dim]`.
    ///
    /// # Errors
    /// [`Error::Argument`] for an id that is none, with its position; [`Error::Placement`]; [`Error::NotDivisible`]; errors of
    /// communication.
    pub fn forward(&self, ids: &Tensor<i64>) -> Result<(Tensor<T>, SavedIds)> {
        let EmbeddingConfig { num_embeddings, embedding_dim: dim, mode, .. } = self.config;
        if ids.placement() != Placement::Replicated {
            let (got, wanted) = (ids.placement(), Placement::Replicated);
            return Err(Error::Placement { what: "ids", got, wanted, hint: "; every rank looks up all of them" });
        }
        // Ids are one-dimensional at least: their own first dimension is what is scattered.
        let (mut dims, count) = ([dim; Shape::MAX_DIMS + 1], ids.shape().len());
        dims[..count].copy_from_slice(ids.shape());
        let whole = Shape::new(&dims[..=count])?;
        let n = self.group.world_size();
        let leading = match mode {
            LinearMode::AllReduce => ShardLayout::uneven(whole.leading(), n)?,
            LinearMode::ReduceScatter => ShardLayout::even("the ids' first dimension", whole.leading(), n)?,
        };
        let device = self.group.device();
        if let Some((position, id)) = device.find_outside(ids.buffer(), 0..num_embeddings as i64, None)? {
            return Err(Error::Argument {
                what: "token id",
                got: format!("{id} at position {position}"),
                wanted: format!("0 to {}", num_embeddings - 1),
            });
        }
        let rows = leading.of_each(whole.rows_per_leading());
        let weight = self.weight.value();
        let first = self.layout.own(self.group.rank()).start as i64;
        let call = self.call(rows);
        let (size, width) = (i64::DTYPE.size(), dim * T::DTYPE.size());
        let sum = sum_rows::<T>(&self.group, mode, &call, rows, dim, false, |rows, out, at| {
            let ids = ids.buffer().slice(rows.start * size..rows.end * size)?;
            let table = Matrix::new(weight.buffer(), self.layout.largest(), dim);
            let part = at * width..(at + rows.len()) * width;
            out.within(part, |out| device.gather_rows(T::DTYPE, table, &ids, first, out))
        })?;
        let shape = match mode {
            LinearMode::AllReduce => whole,
            LinearMode::ReduceScatter => whole.with_leading(leading.len(self.group.rank())),
        };
        let y = Tensor::from_buffer(device, sum.wait()?, shape, self.output_placement());
        Ok((y, SavedIds { ids: ids.clone(), output: shape, rows }))
    }

    /// Adds to the table's gradient: each row of `grad_output` (as the output was) to its id's. Ids that occur more than once
    /// add up in their order, in f32 (f64 for f64); that of `padding_idx` receives nothing.
    ///
    /// # Errors
    /// [`Error::Placement`] and [`Error::Shape`] where it does not fit; errors of communication.
    pub fn backward(&self, saved: impl Borrow<SavedIds>, grad_output: &Tensor<T>) -> Result<()> {
        let saved = saved.borrow();
        if grad_output.placement() != self.output_placement() {
            let (got, wanted) = (grad_output.placement(), self.output_placement());
            return Err(Error::Placement { what: "grad_output", got, wanted, hint: "" });
        }
        if *grad_output.shape() != saved.output {
            let wanted = format!("{}, as the output had", saved.output);
            return Err(Error::Shape { what: "grad_output", got: *grad_output.shape(), wanted });
        }
        let dim = self.config.embedding_dim;
        let whole: Buffer = match self.config.mode {
            LinearMode::AllReduce => grad_output.buffer().clone(),
            LinearMode::ReduceScatter => {
                let blocks = Blocks::new(saved.rows, dim * T::DTYPE.size());
                self.group.start_gather(T::DTYPE, blocks, grad_output.buffer())?.metered(&self.meter).wait()?
            }
        };
        let device = self.group.device();
        let first = self.layout.own(self.group.rank()).start as i64;
        let skip = self.config.padding_idx.map(|id| id as i64);
        self.weight.accumulate(|out, accumulate| {
            if !accumulate {
                device.zero(out)?;
            }
            let rows = Matrix::new(&whole, saved.rows.total(), dim);
            device.scatter_add_rows(T::DTYPE, rows, saved.ids.buffer(), first, skip, out)
        })
    }

    fn call(&self, rows: ShardLayout) -> Call {
        let overlap = match self.config.overlap {
            _ if self.group.world_size() == 1 => Overlap::Blocking,
            Overlap::Auto => Overlap::Async,
            Overlap::Pipelined { chunks } => Overlap::Pipelined { chunks: chunks.max(1) },
            overlap => overlap,
        };
        Call { overlap, pass: Pass::Forward, rows: rows.total(), meter: Arc::clone(&self.meter) }
    }

    fn output_placement(&self) -> Placement {
        match self.config.mode {
            LinearMode::AllReduce => Placement::Replicated,
            LinearMode::ReduceScatter => Placement::Rows,
        }
    }
}
