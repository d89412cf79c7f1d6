//! Rows by number, and the softmax over a sharded vocabulary.

use super::kernels::{Accumulate, BLOCK, Convert};
use crate::device::CrossEntropyLoss;
use crate::dtype::Float;

/// Exponentials and logarithms of an accumulator.
pub(crate) trait Real: Accumulate {
    fn exp(self) -> Self;
}
impl Real for f32 {
    fn exp(self) -> Self {
        self.exp()
    }
}
impl Real for f64 {
    fn exp(self) -> Self {
        self.exp()
    }
}

/// The row that an id means, of `rows` that begin with number `first`.
fn row(id: i64, first: i64, rows: usize) -> Option<usize> {
    id.checked_sub(first).and_then(|row| usize::try_from(row).ok()).filter(|row| *row < rows)
}

/// See [`Device::gather_rows`](crate::Device::gather_rows).
pub(crate) fn gather_rows<T: Float>(table: &[T], width: usize, ids: &[i64], first: i64, out: &mut [T]) {
    let rows = table.len() / width.max(1);
    for (out, id) in out.chunks_exact_mut(width.max(1)).zip(ids) {
        match row(*id, first, rows) {
            Some(row) => out.copy_from_slice(&table[row * width..(row + 1) * width]),
            None => out.fill(T::from_f64(0.0)),
        }
    }
}

/// See [`Device::scatter_add_rows`](crate::Device::scatter_add_rows).
pub(crate) fn scatter_add_rows<T>(
    rows: &[T],
    width: usize,
    ids: &[i64],
    first: i64,
    skip: Option<i64>,
    out: &mut [T::Accumulator],
) where
    T: Convert<Accumulator: Accumulate>,
{
    let held = out.len() / width.max(1);
    let mut wide = [T::Accumulator::from_f64(0.0); BLOCK];
    for (source, id) in rows.chunks_exact(width.max(1)).zip(ids) {
        let Some(target) = row(*id, first, held).filter(|_| Some(*id) != skip) else { continue };
        let target = &mut out[target * width..(target + 1) * width];
        for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
            let wide = &mut wide[..source.len()];
            T::widen(source, wide);
            target.iter_mut().zip(&*wide).for_each(|(target, source)| *target += *source);
        }
    }
}

/// See [`Device::row_max`](crate::Device::row_max). A NaN stays.
pub(crate) fn row_max<T: Float>(logits: &[T], width: usize, valid: usize, out: &mut [T::Accumulator]) {
    for (row, out) in logits.chunks_exact(width.max(1)).zip(out) {
        let larger = |max: f64, logit: &T| {
            let logit = logit.to_f64();
            if logit > max || logit.is_nan() { logit } else { max }
        };
        *out = T::Accumulator::from_f64(row[..valid].iter().fold(f64::NEG_INFINITY, larger));
    }
}

/// See [`Device::softmax_sums`](crate::Device::softmax_sums). Exponentials in the accumulator, sums in double precision.
pub(crate) fn softmax_sums<T>(
    logits: &[T],
    width: usize,
    valid: usize,
    first: i64,
    targets: &[i64],
    max: &[T::Accumulator],
    out: &mut [T::Accumulator],
) where
    T: Convert<Accumulator: Real>,
{
    let mut wide = [T::Accumulator::from_f64(0.0); BLOCK];
    for (index, row) in logits.chunks_exact(width.max(1)).enumerate() {
        let max = max[index].to_f64();
        let (mut exponentials, mut shifted) = (0.0, 0.0);
        for part in row[..valid].chunks(BLOCK) {
            let wide = &mut wide[..part.len()];
            T::widen(part, wide);
            for logit in &*wide {
                let difference = logit.to_f64() - max;
                exponentials += T::Accumulator::from_f64(difference).exp().to_f64();
                shifted += difference;
            }
        }
        let target = self::row(targets[index], first, valid).map_or(0.0, |class| row[class].to_f64() - max);
        let sums = [exponentials, target, shifted].map(T::Accumulator::from_f64);
        out[3 * index..3 * index + 3].copy_from_slice(&sums);
    }
}

/// See [`Device::cross_entropy_loss`](crate::Device::cross_entropy_loss).
pub(crate) fn loss<A: Float>(options: &CrossEntropyLoss, targets: &[i64], max: &[A], sums: &[A], out: &mut [A]) {
    for (index, out) in out.iter_mut().enumerate() {
        let [exponentials, target, shifted] = [0, 1, 2].map(|which| sums[3 * index + which].to_f64());
        let log_sum = exponentials.ln();
        let log_z = max[index].to_f64() + log_sum;
        // A class that cannot be (−∞) must not meet a weight of 0.
        let weighted = |weight: f64, value: f64| if weight == 0.0 { 0.0 } else { weight * value };
        let smoothing = options.label_smoothing;
        let loss = log_sum - (1.0 - smoothing) * target - weighted(smoothing / options.classes as f64, shifted)
            + weighted(options.z_loss, log_z * log_z);
        *out = A::from_f64(if Some(targets[index]) == options.ignore_index { 0.0 } else { loss });
    }
}

/// See [`Device::cross_entropy_grad`](crate::Device::cross_entropy_grad).
#[allow(clippy::too_many_arguments)]
pub(crate) fn gradient<T>(
    options: &CrossEntropyLoss,
    logits: &[T],
    width: usize,
    valid: usize,
    first: i64,
    targets: &[i64],
    max: &[T::Accumulator],
    sums: &[T::Accumulator],
    grad: &[T::Accumulator],
    out: &mut [T],
) where
    T: Convert<Accumulator: Real>,
{
    let zero = T::Accumulator::from_f64(0.0);
    let mut wide = [zero; BLOCK];
    let shared = options.label_smoothing / options.classes as f64;
    for (index, (row, out)) in logits.chunks_exact(width.max(1)).zip(out.chunks_exact_mut(width.max(1))).enumerate() {
        out[valid..].fill(T::from_f64(0.0));
        if Some(targets[index]) == options.ignore_index {
            out.fill(T::from_f64(0.0));
            continue;
        }
        let (max, sum, grad) = (max[index].to_f64(), sums[3 * index].to_f64(), grad[index].to_f64());
        // d/dl of log Z is p, of (log Z)² is 2 log Z · p.
        let of_p = grad * (1.0 + 2.0 * options.z_loss * (max + sum.ln())) / sum;
        let target = self::row(targets[index], first, valid);
        for (block, (source, out)) in row[..valid].chunks(BLOCK).zip(out[..valid].chunks_mut(BLOCK)).enumerate() {
            let wide = &mut wide[..source.len()];
            T::widen(source, wide);
            for (column, value) in wide.iter_mut().enumerate() {
                let exponential = T::Accumulator::from_f64(value.to_f64() - max).exp().to_f64();
                let hit = target == Some(block * BLOCK + column);
                let wanted = shared + if hit { 1.0 - options.label_smoothing } else { 0.0 };
                *value = T::Accumulator::from_f64(of_p * exponential - grad * wanted);
            }
            T::narrow(wide, out);
        }
    }
}
