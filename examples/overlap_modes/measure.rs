//! Timing: whole passes, and matmuls and collectives alone, on all ranks at once.

use std::time::Instant;

use async_tensor_parallel::{
    Buffer, DType, Element, Float, Group, LinearMode, Matmul, Matrix, Overlap, Placement, Result,
};

use crate::layers::{Bench, Kind};

/// Seconds that `work` takes on the slowest rank, all having started together.
pub fn timed(group: &Group, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    group.barrier()?;
    let begun = Instant::now();
    work()?;
    group.device().synchronize()?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok(group.all_reduce_max(&group.tensor(&[seconds], &[1], Placement::Partial)?)?.wait()?.to_vec()?[0])
}

/// What one layer and mode is made of, each measured alone, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Parts {
    /// The forward product.
    pub forward: f64,
    /// The product that gives the input's gradient.
    pub input_grad: f64,
    /// The product that gives the weight's gradient.
    pub weight_grad: f64,
    /// The forward pass's collective.
    pub forward_communication: f64,
    /// Backward's gather (the input's again, or the output gradient's).
    pub gather: f64,
    /// Backward's reduction of the input's gradient.
    pub reduce: f64,
}

impl Parts {
    pub fn backward(&self) -> f64 {
        self.input_grad + self.weight_grad
    }

    pub fn backward_communication(&self) -> f64 {
        self.gather + self.reduce
    }

    /// The least that a forward pass can take: what its schedule does one after the other.
    pub fn forward_bound(&self, kind: Kind, mode: LinearMode, schedule: Overlap, ranks: usize) -> f64 {
        let (compute, communication) = (self.forward, self.forward_communication);
        let own = compute / ranks as f64;
        match (kind, mode, schedule) {
            _ if communication == 0.0 => compute,
            // The last piece's product comes after the gather; the first piece's before the reduction.
            (_, LinearMode::ReduceScatter, Overlap::Pipelined { chunks }) => {
                compute.max(communication + own / chunks as f64)
            }
            // The own block, computed last, is summed and gathered piece by piece.
            (_, LinearMode::AllReduce, Overlap::Pipelined { chunks }) => {
                let (piece, gather) = (own / chunks as f64, communication / 2.0);
                (piece + communication).max(compute - own + piece + gather).max(compute + gather / chunks as f64)
            }
            (_, LinearMode::ReduceScatter, Overlap::Async) => communication.max(own) + compute - own,
            // Two halves of the rows: the first is reduced while the second is multiplied.
            (_, LinearMode::AllReduce, Overlap::Async) => {
                compute / 2.0 + (communication / 2.0).max(compute / 2.0) + communication / 2.0
            }
            _ => compute + communication,
        }
    }

    /// The same of a backward pass.
    pub fn backward_bound(&self, kind: Kind, mode: LinearMode, schedule: Overlap, ranks: usize) -> f64 {
        let Parts { input_grad, weight_grad, gather, reduce, .. } = *self;
        let (compute, own) = (input_grad + weight_grad, (input_grad + weight_grad) / ranks as f64);
        match (kind, mode, schedule) {
            (Kind::Row, LinearMode::AllReduce, _) => compute,
            (Kind::Row, _, Overlap::Pipelined { chunks }) => compute.max(gather + own / chunks as f64),
            (Kind::Row, _, Overlap::Async) => gather.max(own) + compute - own,
            // The gather, if there is one, keeps the link busy until the first piece of the gradient can leave.
            (Kind::Column, _, Overlap::Pipelined { chunks }) => {
                let first = input_grad / (ranks * chunks) as f64;
                compute.max(gather.max(first) + reduce)
            }
            (Kind::Column, _, Overlap::Async) => gather.max(input_grad) + reduce.max(weight_grad),
            _ => compute + gather + reduce,
        }
    }
}

/// Measures the parts of `bench`'s layer and mode alone.
pub fn parts<T: Float>(group: &Group, bench: &Bench<T>) -> Result<Parts> {
    let n = group.world_size();
    let (rows, weight) = (bench.problem.rows, bench.weight());
    let (out, inner) = (weight.shape()[0], weight.shape()[1]);
    let device = group.device();
    let memory = |elements: usize, dtype: DType| device.allocate(elements * dtype.size());
    let zeros = |elements: usize| -> Result<Buffer> {
        let mut buffer = memory(elements, T::DTYPE)?;
        device.zero(&mut buffer)?;
        Ok(buffer.freeze())
    };
    let (x, dy) = (zeros(rows * inner)?, zeros(rows * out)?);
    let product = |a, b, out: &mut _, out_dtype, accumulate| {
        device.matmul(Matmul {
            name: "alone",
            dtype: T::DTYPE,
            a,
            b,
            out,
            out_offset: 0,
            out_dtype,
            accumulate,
            bias: None,
        })
    };
    let (x, dy) = (Matrix::new(&x, rows, inner), Matrix::new(&dy, rows, out));
    let w = Matrix::new(weight.buffer(), out, inner);
    let accumulator = T::Accumulator::DTYPE;
    let (mut y, mut dx, mut dw) =
        (memory(rows * out, T::DTYPE)?, memory(rows * inner, T::DTYPE)?, memory(out * inner, accumulator)?);
    device.zero(&mut dw)?;
    let mut parts = Parts {
        forward: timed(group, || product(x, w.t(), &mut y, T::DTYPE, false))?,
        input_grad: timed(group, || product(dy, w, &mut dx, T::DTYPE, false))?,
        weight_grad: timed(group, || product(dy.t(), x, &mut dw, accumulator, true))?,
        ..Parts::default()
    };
    if n == 1 {
        return Ok(parts);
    }

    // What travels is the layer's outer activation: a column layer's input, a row layer's output.
    let width = match bench.problem.kind {
        Kind::Column => bench.problem.in_features,
        Kind::Row => bench.problem.out_features,
    };
    let shard = group.tensor(&vec![T::from_f64(1.0); rows / n * width], &[rows / n, width], Placement::Rows)?;
    let whole = group.tensor(&vec![T::from_f64(1.0); rows * width], &[rows, width], Placement::Partial)?;
    let gather = || timed(group, || group.all_gather(&shard)?.wait().map(drop));
    let scatter = || timed(group, || group.reduce_scatter(&whole)?.wait().map(drop));
    let reduce = || timed(group, || group.all_reduce(&whole)?.wait().map(drop));
    match (bench.problem.kind, bench.mode) {
        (Kind::Column, LinearMode::ReduceScatter) => {
            (parts.forward_communication, parts.reduce) = (gather()?, scatter()?);
            if bench.problem.recompute {
                parts.gather = gather()?;
            }
        }
        (Kind::Column, LinearMode::AllReduce) => parts.reduce = reduce()?,
        (Kind::Row, LinearMode::ReduceScatter) => {
            (parts.forward_communication, parts.gather) = (scatter()?, gather()?);
        }
        (Kind::Row, LinearMode::AllReduce) => parts.forward_communication = reduce()?,
    }
    Ok(parts)
}
