//! Timing a group's matmuls and collectives.

use std::time::Instant;

use super::{Plan, ProductCost, WireCost, fit};
use crate::comm::Blocks;
use crate::device::{Matmul, Matrix};
use crate::dtype::{DType, Element, Float};
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};
use crate::tensor::Placement;
use crate::{Error, Result};

/// A sample lasts at least this long, in seconds: many calls, if one is short. A few of the scheduler's time slices, since
/// ranks may share cores.
const SAMPLE: f64 = 20e-3;
/// Samples of each size; their median counts.
const SAMPLES: usize = 3;
/// The largest collective that is timed takes about this long, in seconds.
const LONGEST: f64 = 20e-3;

/// The three products of a layer.
#[derive(Clone, Copy)]
enum Product {
    Forward,
    InputGrad,
    WeightGrad,
}

impl Plan {
    /// Measures a group: all its ranks call it together. It takes a second or two.
    ///
    /// The times are those of the slowest rank, and so the same on all: every rank gets the same plan.
    ///
    /// # Errors
    /// [`Error::DType`] for a dtype that layers do not have; errors of the device and of communication.
    pub fn measure(group: &Group, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => measure::<f32>(group),
            DType::F64 => measure::<f64>(group),
            DType::BF16 => measure::<half::bf16>(group),
            DType::F16 => measure::<half::f16>(group),
            got => Err(Error::DType { what: "the plan", got, wanted: DType::F32 }),
        }
    }
}

fn measure<T: Float>(group: &Group) -> Result<Plan> {
    let base = base_size::<T>(group)?;
    let plan = Plan {
        world_size: group.world_size(),
        dtype: T::DTYPE,
        forward: product::<T>(group, Product::Forward, base)?,
        input_grad: product::<T>(group, Product::InputGrad, base)?,
        weight_grad: product::<T>(group, Product::WeightGrad, base)?,
        gather: WireCost::default(),
        reduce: WireCost::default(),
        free: 1.0,
    };
    let plan = if group.world_size() > 1 { wires::<T>(group, plan, base)? } else { plan };
    group.device().trim();
    Ok(plan)
}

/// Seconds a call: the median of some samples, each of as many calls as last long enough.
fn seconds(group: &Group, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut sample = |calls: usize| {
        group.barrier()?;
        let begun = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        group.device().synchronize()?;
        slowest(group, begun.elapsed().as_secs_f64() / calls as f64)
    };
    sample(1)?;
    let once = sample(1)?;
    let calls = ((SAMPLE / once.max(1e-9)).ceil() as usize).clamp(2, 10_000);
    let mut samples = [0.0; SAMPLES];
    for seconds in &mut samples {
        *seconds = sample(calls)?;
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[SAMPLES / 2])
}

/// The slowest rank's time: the same on all, and what a layer's call takes.
fn slowest(group: &Group, seconds: f64) -> Result<f64> {
    let seconds = group.tensor(&[seconds], &[1], Placement::Partial)?;
    let all = group.all_reduce_max(&seconds)?.wait()?.to_vec()?;
    Ok(all.first().copied().unwrap_or_default())
}

fn zeros(group: &Group, elements: usize, dtype: DType) -> Result<BufferMut> {
    let mut buffer = group.device().allocate(elements * dtype.size())?;
    group.device().zero(&mut buffer)?;
    Ok(buffer)
}

/// Operands of products over up to `rows` rows and a weight of up to `out × inner` elements.
struct Operands {
    x: Buffer,
    dy: Buffer,
    w: Buffer,
    y: BufferMut,
}

impl Operands {
    fn new<T: Float>(group: &Group, rows: usize, inner: usize, out: usize) -> Result<Self> {
        let largest = (rows * inner.max(out)).max(inner * out);
        Ok(Self {
            x: zeros(group, rows * inner, T::DTYPE)?.freeze(),
            dy: zeros(group, rows * out, T::DTYPE)?.freeze(),
            w: zeros(group, inner * out, T::DTYPE)?.freeze(),
            y: zeros(group, largest, T::Accumulator::DTYPE)?,
        })
    }

    fn run<T: Float>(&mut self, group: &Group, product: Product, rows: usize, inner: usize, out: usize) -> Result<()> {
        let size = T::DTYPE.size();
        let (x, dy) = (self.x.slice(0..rows * inner * size)?, self.dy.slice(0..rows * out * size)?);
        let w = self.w.slice(0..inner * out * size)?;
        let (x, dy, w) = (Matrix::new(&x, rows, inner), Matrix::new(&dy, rows, out), Matrix::new(&w, out, inner));
        let (a, b, out_dtype, accumulate) = match product {
            Product::Forward => (x, w.t(), T::DTYPE, false),
            Product::InputGrad => (dy, w, T::DTYPE, false),
            Product::WeightGrad => (dy.t(), x, T::Accumulator::DTYPE, true),
        };
        group.device().matmul(Matmul {
            name: "measured",
            dtype: T::DTYPE,
            a,
            b,
            out: &mut self.y,
            out_offset: 0,
            out_dtype,
            accumulate,
            bias: None,
        })
    }
}

/// The edge of a cube whose product lasts some milliseconds, at most 4096: its weight does not fit a small cache.
fn base_size<T: Float>(group: &Group) -> Result<usize> {
    let mut base = 128;
    loop {
        let mut operands = Operands::new::<T>(group, base, base, base)?;
        let once = seconds(group, || operands.run::<T>(group, Product::Forward, base, base, base))?;
        if once >= 4e-3 || base >= 4096 {
            return Ok(base);
        }
        base *= 2;
    }
}

fn product<T: Float>(group: &Group, product: Product, base: usize) -> Result<ProductCost> {
    let (half, quarter, eighth) = (base / 2, base / 4, base / 8);
    let sizes = [
        (base, base, base),
        (quarter, base, base),
        (eighth, base, base),
        (eighth / 2, base, base),
        (base, quarter, base),
        (base, base, quarter),
        (quarter, 2 * base, base),
        (eighth, half, half),
        (1, 64, 64),
    ];
    let mut operands = Operands::new::<T>(group, 2 * base, 2 * base, base)?;
    let (mut features, mut targets) = (Vec::new(), Vec::new());
    for (rows, inner, out) in sizes {
        targets.push(seconds(group, || operands.run::<T>(group, product, rows, inner, out))?);
        let weight = (inner * out) as f64;
        features.push([1.0, rows as f64 * weight, weight, (rows * (inner + out)) as f64]);
    }
    let [fixed, per_product, per_weight, per_row] = fit::non_negative(&features, &targets);
    Ok(ProductCost { fixed, per_product, per_weight, per_row })
}

/// Times collectives of one message a rank, and of several.
fn wires<T: Float>(group: &Group, mut plan: Plan, base: usize) -> Result<Plan> {
    let n = group.world_size();
    let unit = T::DTYPE.size();
    let blocks = |bytes: usize, chunks: usize| -> Result<Blocks> {
        Ok(Blocks::new(ShardLayout::even("elements", (bytes / unit / n).max(chunks) * n, n)?, unit).in_chunks(chunks))
    };
    let gather = |blocks: Blocks| {
        let shard = zeros(group, blocks.layout.len(group.rank()), T::DTYPE)?.freeze();
        seconds(group, || group.start_gather(T::DTYPE, blocks, &shard)?.wait().map(drop))
    };
    let reduce = |blocks: Blocks| {
        let whole = zeros(group, blocks.layout.total(), T::DTYPE)?.freeze();
        seconds(group, || {
            let mut reduce = group.start_reduce_scatter(T::DTYPE, blocks)?;
            reduce.contribute_all(blocks, group.rank(), &whole)?;
            reduce.wait().map(drop)
        })
    };
    // As many bytes as take long enough to tell the bandwidth.
    let mut most = 1 << 16;
    while most < 1 << 26 && gather(blocks(most, 1)?)? < LONGEST / 4.0 {
        most *= 4;
    }
    let fit = |time: &dyn Fn(Blocks) -> Result<f64>| -> Result<WireCost> {
        let (mut features, mut targets) = (Vec::new(), Vec::new());
        for (bytes, chunks) in [(1 << 10, 1), (1 << 10, 8), (most / 16, 1), (most / 4, 1), (most, 1), (most, 8)] {
            let blocks = blocks(bytes, chunks)?;
            let received = (blocks.total_bytes() / n * (n - 1)) as f64;
            targets.push(time(blocks)?);
            features.push([1.0, ((n - 1) * chunks) as f64, received]);
        }
        let [latency, per_piece, per_byte] = fit::non_negative(&features, &targets);
        Ok(WireCost { latency, per_piece, per_byte })
    };
    plan.gather = fit(&gather)?;
    plan.reduce = fit(&reduce)?;

    // A gather beside products that take about as long.
    let mut operands = Operands::new::<T>(group, base, base, base)?;
    let product = seconds(group, || operands.run::<T>(group, Product::Forward, base, base, base))?;
    let products = ((3.0 * LONGEST / product.max(1e-9)).ceil() as usize).clamp(1, 1000);
    let mut compute = || (0..products).try_for_each(|_| operands.run::<T>(group, Product::Forward, base, base, base));
    let computing = seconds(group, &mut compute)?;
    let received = (computing / plan.gather.per_byte.max(1e-12)).min(1e8) as usize;
    let blocks = blocks(received.clamp(1 << 12, 1 << 26) * n / (n - 1), 1)?;
    let alone = gather(blocks)?;
    let shard = zeros(group, blocks.layout.len(group.rank()), T::DTYPE)?.freeze();
    let both = seconds(group, || {
        let gather = group.start_gather(T::DTYPE, blocks, &shard)?;
        compute()?;
        gather.wait().map(drop)
    })?;
    plan.free = crate::timeline::hidden_fraction(computing, alone, both);
    Ok(plan)
}
