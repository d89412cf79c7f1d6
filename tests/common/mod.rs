//! The dense reference: one matrix on one rank, in double precision, and what each rank should see of it.

#![allow(dead_code, unreachable_pub)]

#[cfg(feature = "cuda")]
pub mod cuda;

pub mod training;

use async_tensor_parallel::{
    DType, Float, Group, LinearBuilder, LinearLayer, LinearMode, LocalWorld, Overlap, Placement, Plan, ProductCost,
    Result, Tensor, TensorParallelColumnLinear, TensorParallelRowLinear, WireCost,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    Column,
    Row,
}

pub const MODES: [LinearMode; 2] = [LinearMode::AllReduce, LinearMode::ReduceScatter];
pub const OVERLAPS: [Overlap; 4] =
    [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 1 }, Overlap::Pipelined { chunks: 3 }];
pub const LAYERS: [Layer; 2] = [Layer::Column, Layer::Row];

/// One layer, its options, and the shape of its input: `[leading, middle…, in_features]` of the whole.
#[derive(Debug, Clone)]
pub struct Spec {
    pub layer: Layer,
    pub mode: LinearMode,
    pub overlap: Overlap,
    pub world_size: usize,
    pub leading: usize,
    pub middle: Vec<usize>,
    pub in_features: usize,
    pub out_features: usize,
    pub bias: bool,
    pub recompute: bool,
    pub chunks: Vec<usize>,
}

impl Spec {
    pub fn rows(&self) -> usize {
        self.leading * self.middle.iter().product::<usize>()
    }

    /// A tensor's whole shape with the given first and last dimensions.
    fn dims(&self, leading: usize, features: usize) -> Vec<usize> {
        [&[leading], &self.middle[..], &[features]].concat()
    }
}

/// The whole input, weight, bias and output gradient of one step.
#[derive(Debug, Clone)]
pub struct Data {
    pub x: Vec<f64>,
    pub w: Vec<f64>,
    pub b: Vec<f64>,
    pub dy: Vec<f64>,
}

impl Data {
    /// Values of `value(which tensor, index)`.
    pub fn new(spec: &Spec, value: impl Fn(usize, usize) -> f64) -> Self {
        let draw = |which, len: usize| (0..len).map(|index| value(which, index)).collect();
        let (rows, i, o) = (spec.rows(), spec.in_features, spec.out_features);
        Data { x: draw(0, rows * i), w: draw(1, o * i), b: draw(2, o), dy: draw(3, rows * o) }
    }

    /// Rounded to what `T` holds.
    pub fn rounded<T: Float>(mut self) -> Self {
        for values in [&mut self.x, &mut self.w, &mut self.b, &mut self.dy] {
            values.iter_mut().for_each(|value| *value = T::from_f64(*value).to_f64());
        }
        self
    }
}

/// Small integers that look random: sums of a few dozen products stay below 256, which every dtype holds exactly.
pub fn integer(seed: usize, which: usize, index: usize) -> f64 {
    let mixed = (index * 2654435761 + which * 40503 + seed * 97).wrapping_mul(2246822519) >> 13;
    [0.0, 1.0, -1.0, 2.0, 0.0, -2.0, 1.0, -3.0][mixed % 8]
}

/// Numbers in ±1 that look random.
pub fn real(seed: usize, which: usize, index: usize) -> f64 {
    let mut mixed =
        (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((which as u64 + 7 * seed as u64 + 1) << 32);
    mixed ^= mixed >> 29;
    mixed = mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^= mixed >> 32;
    (mixed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// What a rank saw, or should see: values as f64.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Seen {
    pub y: Vec<f64>,
    pub dx: Vec<f64>,
    pub dw: Vec<f64>,
    pub db: Vec<f64>,
    pub shapes: Vec<Vec<usize>>,
}

/// Columns `range` of a row-major matrix.
fn columns(matrix: &[f64], width: usize, ranges: &[std::ops::Range<usize>]) -> Vec<f64> {
    matrix.chunks(width.max(1)).flat_map(|row| ranges.iter().flat_map(|r| row[r.clone()].to_vec())).collect()
}

/// The features that a rank holds of a sharded dimension.
fn owned(spec: &Spec, total: usize, rank: usize) -> Vec<std::ops::Range<usize>> {
    let sizes = if spec.chunks.is_empty() { vec![total] } else { spec.chunks.clone() };
    let mut start = 0;
    let mut ranges = Vec::new();
    for size in sizes {
        let each = size / spec.world_size;
        ranges.push(start + rank * each..start + (rank + 1) * each);
        start += size;
    }
    ranges
}

/// A rank's rows of a whole matrix.
fn rows(matrix: &[f64], spec: &Spec, rank: usize) -> Vec<f64> {
    let each = matrix.len() / spec.world_size;
    matrix[rank * each..(rank + 1) * each].to_vec()
}

/// The dense result of `steps`, seen by `rank`; gradients of weight and bias add up over the steps.
pub fn dense(spec: &Spec, steps: &[Data], rank: usize) -> Vec<Seen> {
    let (m, k, n) = (spec.rows(), spec.in_features, spec.out_features);
    let (mut dw, mut db) = (vec![0.0; n * k], vec![0.0; n]);
    let mut seen = Vec::new();
    for data in steps {
        let bias = |o: usize| if spec.bias { data.b[o] } else { 0.0 };
        let mut y = vec![0.0; m * n];
        let mut dx = vec![0.0; m * k];
        for r in 0..m {
            for o in 0..n {
                let (x, w) = (&data.x[r * k..(r + 1) * k], &data.w[o * k..(o + 1) * k]);
                y[r * n + o] = x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() + bias(o);
                let g = data.dy[r * n + o];
                for i in 0..k {
                    dx[r * k + i] += g * w[i];
                    dw[o * k + i] += g * x[i];
                }
                db[o] += g;
            }
        }
        let scatter = spec.mode == LinearMode::ReduceScatter;
        let own = |matrix: Vec<f64>| if scatter { rows(&matrix, spec, rank) } else { matrix };
        let db = if spec.bias { db.clone() } else { Vec::new() };
        let outs = || owned(spec, n, rank);
        let ins = || owned(spec, k, rank);
        seen.push(match spec.layer {
            Layer::Column => Seen {
                y: columns(&y, n, &outs()),
                dx: own(dx),
                dw: outs().into_iter().flat_map(|r| dw[r.start * k..r.end * k].to_vec()).collect(),
                db: if spec.bias { columns(&db, n, &outs()) } else { db },
                shapes: Vec::new(),
            },
            Layer::Row => {
                Seen { y: own(y), dx: columns(&dx, k, &ins()), dw: columns(&dw, k, &ins()), db, shapes: Vec::new() }
            }
        });
    }
    seen
}

fn cast<T: Float>(values: &[f64]) -> Vec<T> {
    values.iter().map(|value| T::from_f64(*value)).collect()
}

fn wide<T: Float>(tensor: &Tensor<T>) -> Result<Vec<f64>> {
    Ok(tensor.to_vec()?.into_iter().map(T::to_f64).collect())
}

fn configure<L: LinearLayer>(builder: LinearBuilder<L>, spec: &Spec) -> LinearBuilder<L> {
    builder
        .mode(spec.mode)
        .overlap(spec.overlap)
        .bias(spec.bias)
        .recompute_all_gather(spec.recompute)
        .contiguous_chunks(&spec.chunks)
}

/// Gives the group a made-up plan, if `Auto` will ask for one: what it chooses depends on `seed`.
pub fn planned(group: &Group, overlap: Overlap, seed: usize) -> Result<()> {
    if overlap != Overlap::Auto {
        return Ok(());
    }
    // From communication that is free to communication that is all there is.
    let per_byte = [0.0, 1e-12, 1e-10, 1e-9, 1e-8, 1e-6][seed % 6];
    let product = ProductCost { per_product: 1e-10, fixed: 1e-9, ..ProductCost::default() };
    let wire = WireCost { per_byte, ..WireCost::default() };
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        group.set_plan(Plan {
            world_size: group.world_size(),
            dtype,
            forward: product,
            input_grad: product,
            weight_grad: product,
            gather: wire,
            reduce: wire,
            free: 1.0,
        })?;
    }
    Ok(())
}

/// Runs the steps through the layer, on every rank of `world`; each rank's outcome after each step.
pub fn run<T: Float>(world: &LocalWorld, spec: &Spec, steps: &[Data]) -> Result<Vec<Vec<Seen>>> {
    world.run(|group| run_rank::<T>(group, spec, steps))
}

/// The same on one rank of a group.
pub fn run_rank<T: Float>(group: &Group, spec: &Spec, steps: &[Data]) -> Result<Vec<Seen>> {
    planned(group, spec.overlap, spec.rows() + spec.in_features)?;
    let weight = cast::<T>(&steps[0].w);
    let bias = spec.bias.then(|| cast::<T>(&steps[0].b));
    let scatter = spec.mode == LinearMode::ReduceScatter;
    let rank = group.rank();
    let local = spec.leading / spec.world_size;
    macro_rules! drive {
        ($layer:ident, $placement_in:expr, $placement_out:expr, $x:expr, $dy:expr, $x_dims:expr, $dy_dims:expr) => {{
            let builder = $layer::<T>::builder(spec.in_features, spec.out_features);
            let layer = configure(builder, spec).from_full(group, &weight, bias.as_deref())?;
            let mut seen = Vec::new();
            for data in steps {
                let x = group.tensor(&cast::<T>(&$x(data)), &$x_dims, $placement_in)?;
                let (y, saved) = layer.forward(&x)?;
                assert_eq!(y.placement(), $placement_out);
                let dy = group.tensor(&cast::<T>(&$dy(data)), &$dy_dims, $placement_out)?;
                let dx = layer.backward(saved, &dy)?;
                assert_eq!(dx.placement(), $placement_in);
                let db = layer.bias_grad()?;
                seen.push(Seen {
                    y: wide(&y)?,
                    dx: wide(&dx)?,
                    dw: wide(&layer.weight_grad()?)?,
                    db: db.map(|db| wide(&db)).transpose()?.unwrap_or_default(),
                    shapes: vec![y.shape().to_vec(), dx.shape().to_vec()],
                });
            }
            Ok(seen)
        }};
    }
    match spec.layer {
        Layer::Column => {
            let features = spec.out_features / spec.world_size;
            drive!(
                TensorParallelColumnLinear,
                if scatter { Placement::Rows } else { Placement::Replicated },
                Placement::Features,
                |data: &Data| if scatter { rows(&data.x, spec, rank) } else { data.x.clone() },
                |data: &Data| columns(&data.dy, spec.out_features, &owned(spec, spec.out_features, rank)),
                spec.dims(if scatter { local } else { spec.leading }, spec.in_features),
                spec.dims(spec.leading, features)
            )
        }
        Layer::Row => {
            let features = spec.in_features / spec.world_size;
            drive!(
                TensorParallelRowLinear,
                Placement::Features,
                if scatter { Placement::Rows } else { Placement::Replicated },
                |data: &Data| columns(&data.x, spec.in_features, &owned(spec, spec.in_features, rank)),
                |data: &Data| if scatter { rows(&data.dy, spec, rank) } else { data.dy.clone() },
                spec.dims(spec.leading, features),
                spec.dims(if scatter { local } else { spec.leading }, spec.out_features)
            )
        }
    }
}

/// Asserts that what a rank saw is the dense result, to `tolerance` times the largest value of each tensor.
pub fn assert_close(got: &Seen, want: &Seen, tolerance: f64, context: &str) {
    for (name, got, want) in
        [("y", &got.y, &want.y), ("dx", &got.dx, &want.dx), ("dw", &got.dw, &want.dw), ("db", &got.db, &want.db)]
    {
        assert_eq!(got.len(), want.len(), "{context}: {name}");
        let largest = want.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        for (index, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (got - want).abs();
            let same = got == want || (got.is_nan() && want.is_nan());
            assert!(same || error <= tolerance * largest, "{context}: {name}[{index}] is {got}, wanted {want}");
        }
    }
}
