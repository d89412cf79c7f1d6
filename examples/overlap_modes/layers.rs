//! The two layers behind one face, their data, and the dense result that they are compared with.

use async_tensor_parallel::{
    Float, Group, LinearMode, LocalWorld, Overlap, Pass, Placement, Result, Saved, Tensor, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Column,
    Row,
}

/// One layer's sizes, all of the whole.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    pub kind: Kind,
    /// Whether the column layer gathers its input again for its backward pass.
    pub recompute: bool,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
}

/// The whole input, weight and output gradient, in the layer's dtype, and the dense float64 results.
pub struct Data<T> {
    pub x: Vec<T>,
    pub w: Vec<T>,
    pub dy: Vec<T>,
    dense: [Vec<f64>; 3],
}

/// Numbers in ±1 that look random.
fn draw<T: Float>(stream: u64, len: usize) -> Vec<T> {
    let number = |index: usize| {
        let mut mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (stream << 32);
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 32)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..len).map(|index| T::from_f64(number(index))).collect()
}

fn wide<T: Float>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

impl<T: Float> Data<T> {
    pub fn new(problem: Problem) -> Result<Self> {
        let Problem { rows, in_features, out_features, .. } = problem;
        let (x, w, dy) =
            (draw(1, rows * in_features), draw(2, out_features * in_features), draw(3, rows * out_features));
        // One rank, float64: no shards, no communication.
        let dense = LocalWorld::new(1)?.run(|group| {
            let layer = TensorParallelColumnLinear::<f64>::builder(in_features, out_features)
                .mode(LinearMode::AllReduce)
                .from_full(group, &wide(&w), None)?;
            let (y, saved) = layer.forward(&group.tensor(&wide(&x), &[rows, in_features], Placement::Replicated)?)?;
            let dy = group.tensor(&wide(&dy), &[rows, out_features], Placement::Features)?;
            let dx = layer.backward(saved, &dy)?;
            Ok([y.to_vec()?, dx.to_vec()?, layer.weight_grad()?.to_vec()?])
        })?;
        let [dense] = dense.try_into().unwrap_or_else(|_| unreachable!("one rank, one result"));
        Ok(Self { x, w, dy, dense })
    }
}

/// A rank's columns or rows of a whole matrix.
fn shard<T: Copy>(matrix: &[T], width: usize, by_rows: bool, group: &Group) -> Vec<T> {
    let (rank, n) = (group.rank(), group.world_size());
    if by_rows {
        let each = matrix.len() / n;
        return matrix[rank * each..(rank + 1) * each].to_vec();
    }
    let each = width / n;
    matrix.chunks(width).flat_map(|row| row[rank * each..(rank + 1) * each].iter().copied()).collect()
}

enum Layer<T: Float> {
    Column(TensorParallelColumnLinear<T>),
    Row(TensorParallelRowLinear<T>),
}

/// A layer with this rank's part of its data.
pub struct Bench<T: Float> {
    pub problem: Problem,
    pub mode: LinearMode,
    pub overlap: Overlap,
    layer: Layer<T>,
    x: Tensor<T>,
    dy: Tensor<T>,
}

impl<T: Float> Bench<T> {
    pub fn new(group: &Group, problem: Problem, mode: LinearMode, overlap: Overlap, data: &Data<T>) -> Result<Self> {
        let Problem { kind, recompute, rows, in_features, out_features } = problem;
        let scatter = mode == LinearMode::ReduceScatter;
        let whole = if scatter { Placement::Rows } else { Placement::Replicated };
        let n = group.world_size();
        let outer_rows = if scatter { rows / n } else { rows };
        let whole_or_rows =
            |matrix: &[T], width| if scatter { shard(matrix, width, true, group) } else { matrix.to_vec() };
        let (layer, x, dy) = match kind {
            Kind::Column => (
                Layer::Column(
                    TensorParallelColumnLinear::builder(in_features, out_features)
                        .mode(mode)
                        .overlap(overlap)
                        .recompute_all_gather(recompute)
                        .from_full(group, &data.w, None)?,
                ),
                group.tensor(&whole_or_rows(&data.x, in_features), &[outer_rows, in_features], whole)?,
                group.tensor(
                    &shard(&data.dy, out_features, false, group),
                    &[rows, out_features / n],
                    Placement::Features,
                )?,
            ),
            Kind::Row => (
                Layer::Row(
                    TensorParallelRowLinear::builder(in_features, out_features)
                        .mode(mode)
                        .overlap(overlap)
                        .from_full(group, &data.w, None)?,
                ),
                group.tensor(
                    &shard(&data.x, in_features, false, group),
                    &[rows, in_features / n],
                    Placement::Features,
                )?,
                group.tensor(&whole_or_rows(&data.dy, out_features), &[outer_rows, out_features], whole)?,
            ),
        };
        Ok(Self { problem, mode, overlap, layer, x, dy })
    }

    pub fn forward(&self) -> Result<(Tensor<T>, Saved<T>)> {
        match &self.layer {
            Layer::Column(layer) => layer.forward(&self.x),
            Layer::Row(layer) => layer.forward(&self.x),
        }
    }

    pub fn backward(&self, saved: Saved<T>) -> Result<Tensor<T>> {
        match &self.layer {
            Layer::Column(layer) => layer.backward(saved, &self.dy),
            Layer::Row(layer) => layer.backward(saved, &self.dy),
        }
    }

    /// The overlap as it is carried out.
    pub fn schedule(&self, pass: Pass) -> Result<Overlap> {
        match &self.layer {
            Layer::Column(layer) => layer.schedule(self.problem.rows, pass),
            Layer::Row(layer) => layer.schedule(self.problem.rows, pass),
        }
    }

    pub fn weight(&self) -> Tensor<T> {
        match &self.layer {
            Layer::Column(layer) => layer.weight().value(),
            Layer::Row(layer) => layer.weight().value(),
        }
    }

    /// The largest error of one forward and backward pass, relative to the largest value of each tensor.
    pub fn error(&self, group: &Group, data: &Data<T>) -> Result<f64> {
        match &self.layer {
            Layer::Column(layer) => layer.zero_grad(),
            Layer::Row(layer) => layer.zero_grad(),
        }
        let (y, saved) = self.forward()?;
        let dx = self.backward(saved)?;
        let dw = match &self.layer {
            Layer::Column(layer) => layer.weight_grad()?,
            Layer::Row(layer) => layer.weight_grad()?,
        };
        let Problem { kind, in_features, out_features, .. } = self.problem;
        let scatter = self.mode == LinearMode::ReduceScatter;
        let outer = |matrix: &[f64], width| if scatter { shard(matrix, width, true, group) } else { matrix.to_vec() };
        let [dense_y, dense_dx, dense_dw] = &data.dense;
        let want = match kind {
            Kind::Column => [
                shard(dense_y, out_features, false, group),
                outer(dense_dx, in_features),
                shard(dense_dw, in_features, true, group),
            ],
            Kind::Row => [
                outer(dense_y, out_features),
                shard(dense_dx, in_features, false, group),
                shard(dense_dw, in_features, false, group),
            ],
        };
        let got = [wide(&y.to_vec()?), wide(&dx.to_vec()?), wide(&dw.to_vec()?)];
        let worst = got.iter().zip(&want).map(|(got, want)| {
            let largest = want.iter().fold(f64::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
            got.iter().zip(want).fold(0f64, |worst, (got, want)| worst.max((got - want).abs() / largest))
        });
        Ok(worst.fold(0.0, f64::max))
    }
}
