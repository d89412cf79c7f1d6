//! What the two linear layers share: modes, overlaps, configuration, and the products of one shard.

pub(crate) mod column;
mod gather;
pub(crate) mod init;
pub(crate) mod reduce;
pub(crate) mod row;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::comm::Blocks;
use crate::device::{Matmul, Matrix};
use crate::dtype::{DType, Element, Float};
use crate::group::Group;
use crate::layout::{ContiguousChunks, ShardLayout};
use crate::memory::{Buffer, BufferMut};
use crate::meter::Meter;
use crate::mode::{LinearMode, Overlap};
use crate::parameter::Parameter;
use crate::plan::{LayerKind, Pass, Site};
use crate::tensor::{Placement, Shape, Tensor};
use crate::{Error, Result};

/// The sizes and options of a linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearConfig {
    /// Features of the whole input.
    pub in_features: usize,
    /// Features of the whole output.
    pub out_features: usize,
    /// Which collectives are used. Default: [`LinearMode::ReduceScatter`].
    pub mode: LinearMode,
    /// How they are hidden. Default: [`Overlap::Async`].
    pub overlap: Overlap,
    /// Whether there is a bias. Default: false.
    pub bias: bool,
    /// Whether a gathered input is gathered again in the backward pass instead of being kept. Default: true.
    pub recompute_all_gather: bool,
    /// Sizes of the parts of a fused weight, along the dimension that is sharded. Default: one part.
    pub contiguous_chunks: Vec<usize>,
    /// Seed of the initial weights. Default: 0.
    pub seed: u64,
}

mod sealed {
    use super::{Arc, Group, LinearConfig, Parameter, Result};
    use crate::dtype::Float;

    pub trait Sealed {
        type Element: Float;
        const SHARDED: super::Sharded;
        fn assemble(
            group: &Group,
            config: LinearConfig,
            weight: Arc<Parameter<Self::Element>>,
            bias: Option<Parameter<Self::Element>>,
        ) -> Result<Self>
        where
            Self: Sized;
    }
}

/// Which dimension of the weight `[out_features, in_features]` is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharded {
    /// The output features: the column layer.
    Out,
    /// The input features: the row layer.
    In,
}

/// One of the two linear layers.
pub trait LinearLayer: sealed::Sealed {}
impl<L: sealed::Sealed> LinearLayer for L {}

/// Builds a linear layer: options first, then [`build`](Self::build), [`from_full`](Self::from_full) or
/// [`from_shard`](Self::from_shard).
#[derive(Debug, Clone)]
pub struct LinearBuilder<L> {
    config: LinearConfig,
    _layer: PhantomData<fn() -> L>,
}

impl<L: LinearLayer> LinearBuilder<L> {
    pub(crate) fn new(in_features: usize, out_features: usize) -> Self {
        let config = LinearConfig {
            in_features,
            out_features,
            mode: LinearMode::ReduceScatter,
            overlap: Overlap::Async,
            bias: false,
            recompute_all_gather: true,
            contiguous_chunks: Vec::new(),
            seed: 0,
        };
        Self { config, _layer: PhantomData }
    }

    pub(crate) fn into_config(self) -> LinearConfig {
        self.config
    }

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

    /// Sets whether there is a bias.
    pub fn bias(mut self, bias: bool) -> Self {
        self.config.bias = bias;
        self
    }

    /// Sets whether a gathered input is gathered again in the backward pass instead of being kept.
    pub fn recompute_all_gather(mut self, recompute: bool) -> Self {
        self.config.recompute_all_gather = recompute;
        self
    }

    /// Sets the parts of a fused weight (QKV, gate-up), sizes over all ranks along the sharded dimension. See
    /// [`ContiguousChunks`].
    pub fn contiguous_chunks(mut self, sizes: &[usize]) -> Self {
        self.config.contiguous_chunks = sizes.to_vec();
        self
    }

    /// Sets the seed of the initial weights.
    pub fn seed(mut self, seed: u64) -> Self {
        self.config.seed = seed;
        self
    }

    /// A layer with random weights: weight and bias uniform in ±1/√in_features, as in PyTorch's `nn.Linear`. The values
    /// are those of the full matrix, of which each rank takes its shard: every world size starts from the same weights.
    ///
    /// # Errors
    /// [`Error::NotDivisible`] or [`Error::Argument`] for sizes that cannot be sharded.
    pub fn build(self, group: &Group) -> Result<L> {
        let shards = self.shards(group)?;
        let (in_features, seed) = (self.config.in_features, self.config.seed);
        let weight: Vec<L::Element> = shards.elements().map(|index| init::uniform(seed, index, in_features)).collect();
        // The bias takes the numbers after the weight's.
        let first = self.config.out_features * in_features;
        let bias: Option<Vec<L::Element>> = self
            .config
            .bias
            .then(|| shards.bias().map(|index| init::uniform(seed, first + index, in_features)).collect());
        self.assemble(group, &shards, &weight, bias.as_deref())
    }

    /// A layer from the whole weight `[out_features, in_features]` and, if [`bias`](Self::bias) is set, the whole bias
    /// `[out_features]`; every rank gives the same and keeps its shard.
    ///
    /// # Errors
    /// [`Error::Shape`] for wrong lengths; as [`build`](Self::build).
    pub fn from_full(self, group: &Group, weight: &[L::Element], bias: Option<&[L::Element]>) -> Result<L> {
        let shards = self.shards(group)?;
        let LinearConfig { in_features, out_features, .. } = self.config;
        length("weight", weight.len(), &[out_features, in_features])?;
        let weight: Vec<L::Element> = shards.elements().map(|index| weight[index]).collect();
        let bias = bias
            .map(|bias| {
                length("bias", bias.len(), &[out_features])?;
                Ok(shards.bias().map(|index| bias[index]).collect::<Vec<_>>())
            })
            .transpose()?;
        self.assemble(group, &shards, &weight, bias.as_deref())
    }

    /// A layer from this rank's own shard of the weight (`[out_features / n, in_features]` for the column layer,
    /// `[out_features, in_features / n]` for the row layer) and of the bias (`[out_features / n]`; for the row layer
    /// whole, `[out_features]`, and the same on all ranks).
    ///
    /// # Errors
    /// [`Error::Shape`] for wrong lengths; as [`build`](Self::build).
    pub fn from_shard(self, group: &Group, weight: &[L::Element], bias: Option<&[L::Element]>) -> Result<L> {
        let shards = self.shards(group)?;
        self.assemble(group, &shards, weight, bias)
    }

    fn shards(&self, group: &Group) -> Result<Shards> {
        let LinearConfig { in_features, out_features, ref contiguous_chunks, .. } = self.config;
        for (what, size) in [("in_features", in_features), ("out_features", out_features)] {
            if size == 0 {
                return Err(Error::Argument { what, got: "0".into(), wanted: "at least 1".into() });
            }
        }
        Shape::new(&[out_features, in_features])?;
        let (what, total) = match L::SHARDED {
            Sharded::Out => ("out_features", out_features),
            Sharded::In => ("in_features", in_features),
        };
        // An uneven whole is named before its chunks are.
        ShardLayout::even(what, total, group.world_size())?;
        let chunks = ContiguousChunks::new(what, total, contiguous_chunks, group.world_size())?;
        Ok(Shards {
            sharded: L::SHARDED,
            in_features,
            out_features,
            chunks,
            rank: group.rank(),
            world_size: group.world_size(),
        })
    }

    fn assemble(self, group: &Group, shards: &Shards, weight: &[L::Element], bias: Option<&[L::Element]>) -> Result<L> {
        let [rows, columns] = shards.weight_shape();
        length("weight", weight.len(), &[rows, columns])?;
        if bias.is_some() != self.config.bias {
            let word = |given| if given { "a bias" } else { "no bias" };
            return Err(Error::Argument {
                what: "bias",
                got: word(bias.is_some()).into(),
                wanted: format!("{}, as the layer's options say", word(self.config.bias)),
            });
        }
        let weight = group.tensor(weight, &[rows, columns], Parameter::<L::Element>::PLACEMENT)?;
        let bias = bias
            .map(|bias| {
                length("bias", bias.len(), &[rows])?;
                group.tensor(bias, &[rows], Parameter::<L::Element>::PLACEMENT)
            })
            .transpose()?;
        self.with_tensors(group, weight, bias)
    }

    /// A layer over tensors of the shard's shapes.
    pub(crate) fn with_tensors(
        self,
        group: &Group,
        weight: Tensor<L::Element>,
        bias: Option<Tensor<L::Element>>,
    ) -> Result<L> {
        let bias = bias.map(|bias| Parameter::new("bias", bias));
        L::assemble(group, self.config, Arc::new(Parameter::new("weight", weight)), bias)
    }

    /// The shapes of this rank's weight and bias.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn shard_shapes(&self, group: &Group) -> Result<([usize; 2], [usize; 1])> {
        let shape = self.shards(group)?.weight_shape();
        Ok((shape, [shape[0]]))
    }

    #[cfg(feature = "checkpoint")]
    pub(crate) fn options(&self) -> &LinearConfig {
        &self.config
    }
}

fn length(what: &'static str, got: usize, wanted: &[usize]) -> Result<()> {
    if got == wanted.iter().product::<usize>() {
        return Ok(());
    }
    Err(Error::Shape { what, got: Shape::new(&[got])?, wanted: format!("{wanted:?}") })
}

/// Which elements of the whole weight and bias a rank holds.
struct Shards {
    sharded: Sharded,
    in_features: usize,
    out_features: usize,
    chunks: ContiguousChunks,
    rank: usize,
    world_size: usize,
}

impl Shards {
    fn weight_shape(&self) -> [usize; 2] {
        match self.sharded {
            Sharded::Out => [self.out_features / self.world_size, self.in_features],
            Sharded::In => [self.out_features, self.in_features / self.world_size],
        }
    }

    /// Indices into the whole weight of this rank's elements, in the order in which it holds them.
    fn elements(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        let width = self.in_features;
        match self.sharded {
            Sharded::Out => {
                Box::new(self.chunks.of_rank(self.rank).flat_map(move |rows| rows.start * width..rows.end * width))
            }
            Sharded::In => Box::new((0..self.out_features).flat_map(move |row| {
                self.chunks
                    .of_rank(self.rank)
                    .flat_map(move |columns| row * width + columns.start..row * width + columns.end)
            })),
        }
    }

    /// Indices into the whole bias of this rank's elements.
    fn bias(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self.sharded {
            Sharded::Out => Box::new(self.chunks.of_rank(self.rank).flatten()),
            Sharded::In => Box::new(0..self.out_features),
        }
    }
}

/// What a forward pass leaves for its backward pass: the input, and the gathered input where it is kept.
#[derive(Debug, Clone)]
pub struct Saved<T: Element> {
    layer: u64,
    input: Tensor<T>,
    gathered: Option<Buffer>,
    output: Shape,
    rows: ShardLayout,
}

/// One call of a layer.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) overlap: Overlap,
    pub(crate) pass: Pass,
    pub(crate) rows: usize,
    pub(crate) meter: Arc<Meter>,
}

/// One shard of a linear layer: what both layers are made of.
#[derive(Debug)]
pub(crate) struct Shard<T: Float> {
    id: u64,
    name: &'static str,
    kind: LayerKind,
    group: Group,
    config: LinearConfig,
    weight: Arc<Parameter<T>>,
    bias: Option<Parameter<T>>,
    /// Features of this rank's input and output.
    in_features: usize,
    out_features: usize,
    /// Forward and backward.
    meters: [Arc<Meter>; 2],
}

impl<T: Float> Shard<T> {
    fn new(
        kind: LayerKind,
        group: &Group,
        config: LinearConfig,
        weight: Arc<Parameter<T>>,
        bias: Option<Parameter<T>>,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shape = *weight.value().shape();
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: match kind {
                LayerKind::Column => "column linear",
                LayerKind::Row => "row linear",
            },
            kind,
            group: group.clone(),
            config,
            weight,
            bias,
            in_features: shape[1],
            out_features: shape[0],
            meters: Default::default(),
        }
    }

    fn is(&self, mode: LinearMode) -> bool {
        self.config.mode == mode
    }

    /// A call of this layer, as a plan knows it.
    fn site(&self, rows: usize, pass: Pass) -> Site {
        Site {
            layer: self.kind,
            mode: self.config.mode,
            pass,
            rows,
            in_features: self.config.in_features,
            out_features: self.config.out_features,
            gathers_again: self.config.recompute_all_gather,
        }
    }

    /// A call over the given rows: how it is carried out, and where what it spends is counted.
    fn call(&self, rows: ShardLayout, pass: Pass) -> Result<Call> {
        let meter = Arc::clone(&self.meters[pass as usize]);
        Ok(Call { overlap: self.schedule(rows, pass)?, pass, rows: rows.total(), meter })
    }

    /// Notes that a call has ended.
    fn called(&self, call: &Call) {
        call.meter.called(self.name, call.pass, call.overlap, call.rows);
    }

    /// The overlap that is used for the given rows, with the number of chunks that is. One rank has nothing to overlap.
    fn schedule(&self, rows: ShardLayout, pass: Pass) -> Result<Overlap> {
        if self.group.world_size() == 1 {
            return Ok(Overlap::Blocking);
        }
        let site = self.site(rows.total(), pass);
        Ok(match self.config.overlap {
            Overlap::Auto => self.group.plan(T::DTYPE)?.choose(&site),
            Overlap::Pipelined { chunks: 0 } => match self.group.known_plan(T::DTYPE) {
                Some(plan) => Overlap::Pipelined { chunks: plan.chunks(&site) },
                None => {
                    let wanted = 8usize.div_ceil(self.group.world_size());
                    let most = rows.largest() / self.group.device().rows_worth_a_product();
                    Overlap::Pipelined { chunks: wanted.min(most).max(1) }
                }
            },
            overlap => overlap,
        })
    }

    fn zero_grad(&self) {
        self.weight.zero_grad();
        if let Some(bias) = &self.bias {
            bias.zero_grad();
        }
    }

    /// Refuses a tensor whose placement or last dimension is not the one given.
    fn check(&self, what: &'static str, tensor: &Tensor<T>, placement: Placement, features: usize) -> Result<()> {
        if tensor.placement() != placement {
            let hint = match (placement, tensor.placement()) {
                (_, Placement::Partial) => "; it is a sum that has not been reduced yet",
                (Placement::Rows, Placement::Replicated) => {
                    "; the layer is in ReduceScatter mode, whose input is sharded"
                }
                (Placement::Replicated, Placement::Rows) => "; the layer is in AllReduce mode, whose input is whole",
                _ => "",
            };
            return Err(Error::Placement { what, got: tensor.placement(), wanted: placement, hint });
        }
        if tensor.shape().features() != features {
            return Err(Error::Shape { what, got: *tensor.shape(), wanted: format!("[…, {features}]") });
        }
        Ok(())
    }

    /// Refuses what was saved by another layer, or a gradient that is not as the output was.
    fn check_saved(
        &self,
        saved: &Saved<T>,
        grad_output: &Tensor<T>,
        placement: Placement,
        output: Shape,
    ) -> Result<()> {
        if saved.layer != self.id {
            return Err(Error::Saved {
                got: format!("layer {}", saved.layer),
                wanted: format!("layer {} ({})", self.id, self.name),
            });
        }
        self.check("grad_output", grad_output, placement, output.features())?;
        if *grad_output.shape() != output {
            let wanted = format!("{output}, as the output had");
            return Err(Error::Shape { what: "grad_output", got: *grad_output.shape(), wanted });
        }
        Ok(())
    }

    fn save(&self, input: &Tensor<T>, gathered: Option<Buffer>, output: Shape, rows: ShardLayout) -> Saved<T> {
        Saved { layer: self.id, input: input.clone(), gathered, output, rows }
    }

    fn tensor(&self, buffer: Buffer, shape: Shape, placement: Placement) -> Tensor<T> {
        Tensor::from_buffer(self.group.device(), buffer, shape, placement)
    }

    /// Memory for `rows` rows of `features` elements.
    fn allocate(&self, rows: usize, features: usize) -> Result<BufferMut> {
        self.group.device().allocate(rows * features * T::DTYPE.size())
    }

    /// Rows of `features` elements divided over the ranks.
    fn blocks(&self, rows: ShardLayout, features: usize) -> Blocks {
        Blocks::new(rows, features * T::DTYPE.size())
    }

    /// `x Wᵀ (+ bias)` for all rows of `x`, into those rows of `y` that begin at `row`.
    fn multiply(&self, x: &Buffer, y: &mut BufferMut, row: usize, bias: Option<&Buffer>) -> Result<()> {
        let weight = self.weight.value();
        self.group.device().matmul(Matmul {
            name: "x·Wᵀ",
            dtype: T::DTYPE,
            a: Matrix::new(x, self.rows_of(x, self.in_features), self.in_features),
            b: Matrix::new(weight.buffer(), self.out_features, self.in_features).t(),
            out: y,
            out_offset: row * self.out_features * T::DTYPE.size(),
            out_dtype: T::DTYPE,
            accumulate: false,
            bias,
        })
    }

    /// `dy W` for all rows of `dy`, into (or, to `accumulate`, added to) those rows of `dx` that begin at `row`; `dx` has
    /// `dtype`.
    fn multiply_back(&self, dy: &Buffer, dx: &mut BufferMut, row: usize, dtype: DType, accumulate: bool) -> Result<()> {
        let weight = self.weight.value();
        self.group.device().matmul(Matmul {
            name: "dy·W",
            dtype: T::DTYPE,
            a: Matrix::new(dy, self.rows_of(dy, self.out_features), self.out_features),
            b: Matrix::new(weight.buffer(), self.out_features, self.in_features),
            out: dx,
            out_offset: row * self.in_features * dtype.size(),
            out_dtype: dtype,
            accumulate,
            bias: None,
        })
    }

    /// How many rows of `features` elements a buffer holds.
    fn rows_of(&self, buffer: &Buffer, features: usize) -> usize {
        buffer.len() / (features * T::DTYPE.size())
    }

    /// The bytes of the given rows of `features` elements.
    fn slice(&self, whole: &Buffer, rows: Range<usize>, features: usize) -> Result<Buffer> {
        let width = features * T::DTYPE.size();
        whole.slice(rows.start * width..rows.end * width)
    }

    /// `dW += dyᵀ x`, over all rows of both.
    fn add_weight_grad(&self, dy: &Buffer, x: &Buffer) -> Result<()> {
        let rows = self.rows_of(x, self.in_features);
        if rows == 0 {
            return self
                .weight
                .accumulate(|out, accumulate| if accumulate { Ok(()) } else { self.group.device().zero(out) });
        }
        self.weight.accumulate(|out, accumulate| {
            self.group.device().matmul(Matmul {
                name: "dyᵀ·x",
                dtype: T::DTYPE,
                a: Matrix::new(dy, rows, self.out_features).t(),
                b: Matrix::new(x, rows, self.in_features),
                out,
                out_offset: 0,
                out_dtype: T::Accumulator::DTYPE,
                accumulate,
                bias: None,
            })
        })
    }

    /// `db += column sums of dy`.
    fn add_bias_grad(&self, dy: &Buffer) -> Result<()> {
        let Some(bias) = &self.bias else { return Ok(()) };
        bias.accumulate(|out, accumulate| {
            if !accumulate {
                self.group.device().zero(out)?;
            }
            self.group.device().add_column_sums(T::DTYPE, dy, out)
        })
    }

    /// The bias's memory, if there is one.
    fn bias_value(&self) -> Option<Tensor<T>> {
        self.bias.as_ref().map(Parameter::value)
    }
}

/// Public methods that both layers have.
macro_rules! common_methods {
    () => {
        /// The layer's options.
        pub fn config(&self) -> &LinearConfig {
            &self.shard.config
        }

        /// The overlap that is used for inputs of `rows` rows over all ranks: what [`Overlap::Auto`](crate::Overlap::Auto)
        /// chooses, and how many chunks where that is left to the layer. One rank has nothing to overlap.
        ///
        /// # Errors
        /// As [`ShardLayout::uneven`]; those of measuring the group, if [`Overlap::Auto`](crate::Overlap::Auto) has no plan yet.
        pub fn schedule(&self, rows: usize, pass: crate::Pass) -> Result<crate::Overlap> {
            self.shard.schedule(ShardLayout::uneven(rows, self.shard.group.world_size())?, pass)
        }

        /// What this layer's calls in one direction have spent on communication so far, and how much of it was hidden. Where an
        /// overlap was asked for and hides nothing, the layer warns once through `tracing`.
        pub fn overlap_report(&self, pass: crate::Pass) -> crate::OverlapReport {
            self.shard.meters[pass as usize].report()
        }

        /// The weight and its gradient: this rank's shard.
        pub fn weight(&self) -> &Parameter<T> {
            &self.shard.weight
        }

        /// The bias and its gradient, if there is one.
        pub fn bias(&self) -> Option<&Parameter<T>> {
            self.shard.bias.as_ref()
        }

        /// The weight's gradient, accumulated since the last [`zero_grad`](Self::zero_grad).
        ///
        /// # Errors
        /// What the device reports.
        pub fn weight_grad(&self) -> Result<Tensor<T::Accumulator>> {
            self.shard.weight.grad()
        }

        /// The bias's gradient, accumulated since the last [`zero_grad`](Self::zero_grad); `None` without a bias.
        ///
        /// # Errors
        /// What the device reports.
        pub fn bias_grad(&self) -> Result<Option<Tensor<T::Accumulator>>> {
            self.shard.bias.as_ref().map(Parameter::grad).transpose()
        }

        /// Makes all gradients zero.
        pub fn zero_grad(&self) {
            self.shard.zero_grad();
        }
    };
}
pub(crate) use common_methods;
