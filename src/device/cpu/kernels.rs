//! The few element-wise operations of the CPU engine, over slices.
//!
//! All of them compute in the accumulator's type (f32, or f64 for f64) and round once.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{DType, Float};

/// Elements converted at a time, so that they stay in the first-level cache.
pub(crate) const BLOCK: usize = 512;

/// Conversion of blocks between an element type and its accumulator.
pub(crate) trait Convert: Float {
    /// Widens `source` into `target`, of the same length.
    fn widen(source: &[Self], target: &mut [Self::Accumulator]);
    /// Rounds `source` into `target`, of the same length.
    fn narrow(source: &[Self::Accumulator], target: &mut [Self]);
}

macro_rules! same {
    ($($type:ty),*) => {$(
        impl Convert for $type {
            fn widen(source: &[Self], target: &mut [Self]) {
                target.copy_from_slice(source);
            }
            fn narrow(source: &[Self], target: &mut [Self]) {
                target.copy_from_slice(source);
            }
        }
    )*};
}
same!(f32, f64);

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Convert for $type {
            fn widen(source: &[Self], target: &mut [f32]) {
                source.convert_to_f32_slice(target);
            }
            fn narrow(source: &[f32], target: &mut [Self]) {
                target.convert_from_f32_slice(source);
            }
        }
    )*};
}
halves!(bf16, f16);

/// Arithmetic on accumulators, so that one kernel serves f32 and f64.
pub(crate) trait Accumulate: Float + std::ops::AddAssign + std::ops::Mul<Output = Self> {}
impl Accumulate for f32 {}
impl Accumulate for f64 {}

/// Calls `$function::<T>($arguments)` for the float type of `$dtype`; integers are an error.
macro_rules! for_float {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            $crate::DType::F32 => $function::<f32>($($argument),*),
            $crate::DType::F64 => $function::<f64>($($argument),*),
            $crate::DType::BF16 => $function::<half::bf16>($($argument),*),
            $crate::DType::F16 => $function::<half::f16>($($argument),*),
            other => Err($crate::Error::DType { what: "operand", got: other, wanted: $crate::DType::F32 }),
        }
    };
}
pub(crate) use for_float;

/// `out = parts[0] + parts[1] + …` in that order, each element summed in the accumulator and rounded once.
///
/// `part(rank)` gives a rank's summand, as long as `out`.
pub(crate) fn sum_in_order<'a, T>(ranks: usize, part: impl Fn(usize) -> &'a [T], out: &mut [T])
where
    T: Convert<Accumulator: Accumulate>,
{
    let mut sum = [T::Accumulator::from_f64(0.0); BLOCK];
    let mut next = [T::Accumulator::from_f64(0.0); BLOCK];
    for start in (0..out.len()).step_by(BLOCK) {
        let end = (start + BLOCK).min(out.len());
        let (sum, next) = (&mut sum[..end - start], &mut next[..end - start]);
        T::widen(&part(0)[start..end], sum);
        for rank in 1..ranks {
            T::widen(&part(rank)[start..end], next);
            sum.iter_mut().zip(&*next).for_each(|(sum, next)| *sum += *next);
        }
        T::narrow(sum, &mut out[start..end]);
    }
}

/// The largest of `parts[0]`, `parts[1]`, …; a NaN in any of them stays.
pub(crate) fn max_in_order<'a, T: Float>(ranks: usize, part: impl Fn(usize) -> &'a [T], out: &mut [T]) {
    out.copy_from_slice(part(0));
    for rank in 1..ranks {
        for (out, next) in out.iter_mut().zip(part(rank)) {
            let (have, got) = (out.to_f64(), next.to_f64());
            if got > have || got.is_nan() {
                *out = *next;
            }
        }
    }
}

/// `rows[r][c] += bias[c]`.
pub(crate) fn add_bias<T>(bias: &[T], rows: &mut [T])
where
    T: Convert<Accumulator: Accumulate>,
{
    let mut sum = [T::Accumulator::from_f64(0.0); BLOCK];
    let mut wide = [T::Accumulator::from_f64(0.0); BLOCK];
    for row in rows.chunks_exact_mut(bias.len().max(1)) {
        for (row, bias) in row.chunks_mut(BLOCK).zip(bias.chunks(BLOCK)) {
            let (sum, wide) = (&mut sum[..row.len()], &mut wide[..row.len()]);
            T::widen(row, sum);
            T::widen(bias, wide);
            sum.iter_mut().zip(&*wide).for_each(|(sum, bias)| *sum += *bias);
            T::narrow(sum, row);
        }
    }
}

/// `out[c] += Σ_r rows[r][c]`, rows in order.
pub(crate) fn add_column_sums<T>(rows: &[T], out: &mut [T::Accumulator])
where
    T: Convert<Accumulator: Accumulate>,
{
    let width = out.len().max(1);
    let mut sum = [T::Accumulator::from_f64(0.0); BLOCK];
    let mut wide = [T::Accumulator::from_f64(0.0); BLOCK];
    for start in (0..out.len()).step_by(BLOCK) {
        let end = (start + BLOCK).min(out.len());
        let (sum, wide) = (&mut sum[..end - start], &mut wide[..end - start]);
        sum.fill(T::Accumulator::from_f64(0.0));
        for row in rows.chunks_exact(width) {
            T::widen(&row[start..end], wide);
            sum.iter_mut().zip(&*wide).for_each(|(sum, value)| *sum += *value);
        }
        out[start..end].iter_mut().zip(&*sum).for_each(|(out, sum)| *out += *sum);
    }
}

/// `target += factor · source`, in double precision where either side is, in single precision otherwise.
pub(crate) fn scaled_add<S, T>(factor: f64, source: &[S], target: &mut [T])
where
    S: Convert<Accumulator: Accumulate>,
    T: Convert<Accumulator: Accumulate>,
{
    if S::DTYPE == DType::F64 || T::DTYPE == DType::F64 {
        for (target, source) in target.iter_mut().zip(source) {
            *target = T::from_f64(target.to_f64() + factor * source.to_f64());
        }
        return;
    }
    let factor = T::Accumulator::from_f64(factor);
    let mut wide = [S::Accumulator::from_f64(0.0); BLOCK];
    let mut sum = [T::Accumulator::from_f64(0.0); BLOCK];
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        let (wide, sum) = (&mut wide[..source.len()], &mut sum[..source.len()]);
        S::widen(source, wide);
        T::widen(target, sum);
        // Both accumulators are f32 here: the conversion is the identity.
        sum.iter_mut().zip(&*wide).for_each(|(sum, value)| *sum += factor * T::Accumulator::from_f64(value.to_f64()));
        T::narrow(sum, target);
    }
}

/// `target = source`, rounded to nearest even.
pub(crate) fn cast<S: Convert, T: Convert>(source: &[S], target: &mut [T]) {
    target.iter_mut().zip(source).for_each(|(target, source)| *target = T::from_f64(source.to_f64()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_in_rank_order_and_rounded_once() {
        // In bf16, 256 + 1 rounds back to 256: a sum that rounds after every addend would never grow.
        let parts: Vec<Vec<bf16>> = [256.0, 1.0, 1.0, 1.0, 1.0].map(|v| vec![bf16::from_f64(v); 700]).to_vec();
        let mut out = vec![bf16::ZERO; 700];
        sum_in_order(5, |rank| &parts[rank], &mut out);
        assert!(out.iter().all(|v| v.to_f64() == 260.0));
        // (1e8 + 1) - 1e8 in f32 is 0 in this order and 1 in another.
        let parts = [vec![1e8f32], vec![1.0], vec![-1e8]];
        let mut out = [f32::NAN];
        sum_in_order(3, |rank| &parts[rank], &mut out);
        assert_eq!(out, [0.0]);
    }

    #[test]
    fn bias_and_its_gradient_beyond_one_block() {
        let width = BLOCK + 3;
        let bias: Vec<f32> = (0..width).map(|c| c as f32).collect();
        let mut rows = vec![1f32; 3 * width];
        add_bias(&bias, &mut rows);
        assert!(rows.iter().enumerate().all(|(i, v)| *v == 1.0 + (i % width) as f32));
        let mut out = vec![10f32; width];
        add_column_sums(&rows, &mut out);
        assert!(out.iter().enumerate().all(|(c, v)| *v == 10.0 + 3.0 * (1.0 + c as f32)));
    }

    #[test]
    fn scaled_add_mixes_types() {
        let mut target = vec![1f32; BLOCK + 1];
        scaled_add(-0.5, &vec![bf16::from_f32(4.0); BLOCK + 1], &mut target);
        assert!(target.iter().all(|v| *v == -1.0));
        let mut target = [1f64];
        scaled_add(0.1, &[1f32], &mut target);
        assert_eq!(target, [1.1]);
        let mut target = [f16::from_f32(0.0); 2];
        cast(&[1.0f32 / 3.0, f32::INFINITY], &mut target);
        assert_eq!(target, [f16::from_f32(1.0 / 3.0), f16::INFINITY]);
    }
}
