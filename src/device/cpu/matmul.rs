//! Matrix products on the CPU, through `gemmkit` (or a BLAS, with the feature `blas`).
//!
//! f32 and f64 go to the crate as they stand: no copy and no transpose is ever made. 16-bit operands are widened to f32 a block at a time and multiplied as f32, which is both faster on
//! CPUs without matrix units than their 16-bit instructions and exact in the products; the result is rounded once.

#[cfg(feature = "blas")]
#[path = "blas.rs"]
mod gemm;
#[cfg(not(feature = "blas"))]
#[path = "gemmkit.rs"]
mod gemm;

use gemm::{Gemm, Workspace, gemm};

use super::kernels::{Accumulate, Convert};
use super::memory::{elements, elements_mut};
use crate::Result;
use crate::device::{Matmul, Matrix};
use crate::dtype::{DType, Float};

/// What a device keeps between products, so that the steady state allocates nothing.
#[derive(Default)]
pub(crate) struct Scratch {
    workspace: Workspace,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

/// Block sizes for 16-bit operands: a block of `b` and one of `a` and `out` fit the second-level cache's neighbourhood,
/// and widening costs less than 2 % of the multiplications it serves.
const BLOCK_M: usize = 256;
const BLOCK_N: usize = 512;
const BLOCK_K: usize = 4096;

/// A row-major matrix, used as it stands or as its transpose.
#[derive(Clone, Copy)]
struct Operand<'a, T> {
    data: &'a [T],
    /// Rows and columns as stored.
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<T> Operand<'_, T> {
    /// Rows and columns as the product sees them.
    fn size(&self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }
}

/// Runs a checked product with `threads` threads.
pub(crate) fn matmul(matmul: &mut Matmul<'_>, threads: usize, scratch: &mut Scratch) -> Result<()> {
    let (m, k, n) = matmul.check()?;
    if m.max(k).max(n) > gemm::LARGEST {
        return Err(crate::Error::Argument {
            what: "matmul",
            got: format!("{m} × {k} × {n}"),
            wanted: format!("at most {} each way", gemm::LARGEST),
        });
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        // gemmkit would leave `out` alone; an empty sum is zero (plus bias).
        return super::kernels::for_float!(matmul.dtype, empty_sum(matmul, m, n));
    }
    match (matmul.dtype, matmul.out_dtype) {
        (DType::F32, _) => whole::<f32>(matmul, threads, scratch),
        (DType::F64, _) => whole::<f64>(matmul, threads, scratch),
        (DType::BF16, DType::BF16) => blocked::<half::bf16, half::bf16>(matmul, threads, scratch),
        (DType::BF16, _) => blocked::<half::bf16, f32>(matmul, threads, scratch),
        (DType::F16, DType::F16) => blocked::<half::f16, half::f16>(matmul, threads, scratch),
        (DType::F16, _) => blocked::<half::f16, f32>(matmul, threads, scratch),
        (other, _) => Err(crate::Error::DType { what: "matmul operand", got: other, wanted: DType::F32 }),
    }
}

fn empty_sum<T: Convert<Accumulator: Accumulate>>(matmul: &mut Matmul<'_>, m: usize, n: usize) -> Result<()> {
    if matmul.accumulate {
        return Ok(());
    }
    let start = matmul.out_offset;
    super::memory::bytes_mut(matmul.out)?[start..start + m * n * matmul.out_dtype.size()].fill(0);
    if let Some(bias) = matmul.bias {
        super::kernels::add_bias::<T>(elements(bias)?, result(matmul, m, n)?);
    }
    Ok(())
}

/// The part of `out` that the result takes.
fn result<'a, T: bytemuck::Pod>(matmul: &'a mut Matmul<'_>, m: usize, n: usize) -> Result<&'a mut [T]> {
    let start = matmul.out_offset / std::mem::size_of::<T>();
    Ok(&mut elements_mut(matmul.out)?[start..start + m * n])
}

fn operand<'a, T: bytemuck::Pod>(matrix: Matrix<'a>) -> Result<Operand<'a, T>> {
    let Matrix { buffer, rows, columns, transposed } = matrix;
    Ok(Operand { data: elements(buffer)?, rows, columns, transposed })
}

/// f32 and f64: one call over the operands as they stand.
fn whole<T: Float + Gemm>(matmul: &mut Matmul<'_>, threads: usize, scratch: &mut Scratch) -> Result<()> {
    let (a, b) = (operand::<T>(matmul.a)?, operand::<T>(matmul.b)?);
    let beta = T::from_f64(if matmul.accumulate { 1.0 } else { 0.0 });
    let bias = matmul.bias.map(elements::<T>).transpose()?;
    let (rows, columns) = (a.size().0, b.size().1);
    gemm(&mut scratch.workspace, a, b, beta, result(matmul, rows, columns)?, bias, threads);
    Ok(())
}

/// 16-bit operands: blocks widened to f32, the result rounded (or added, for an f32 `out`) at the end of each.
fn blocked<T, O>(matmul: &mut Matmul<'_>, threads: usize, scratch: &mut Scratch) -> Result<()>
where
    T: Convert<Accumulator = f32>,
    O: Convert<Accumulator = f32>,
{
    let (m, k, n) = matmul.check()?;
    let (a, b) = (elements::<T>(matmul.a.buffer)?, elements::<T>(matmul.b.buffer)?);
    let bias = matmul.bias.map(elements::<T>).transpose()?;
    let (matrix_a, matrix_b, accumulate) = (matmul.a, matmul.b, matmul.accumulate);
    let out = result::<O>(matmul, m, n)?;
    let Scratch { workspace, a: wide_a, b: wide_b, c: wide_c } = scratch;
    grow(wide_a, BLOCK_M.min(m) * BLOCK_K.min(k));
    grow(wide_b, BLOCK_N.min(n) * BLOCK_K.min(k));
    // A whole stripe of `out`, so that `b`'s block is widened once for all rows.
    grow(wide_c, m * BLOCK_N.min(n) + BLOCK_N);
    for n0 in (0..n).step_by(BLOCK_N) {
        let width = BLOCK_N.min(n - n0);
        let (stripe, row) = wide_c.split_at_mut(m * width);
        for k0 in (0..k).step_by(BLOCK_K) {
            let depth = BLOCK_K.min(k - k0);
            let wide_b = widen(b, matrix_b, (k0, depth), (n0, width), wide_b);
            for m0 in (0..m).step_by(BLOCK_M) {
                let height = BLOCK_M.min(m - m0);
                let wide_a = widen(a, matrix_a, (m0, height), (k0, depth), wide_a);
                let c = &mut stripe[m0 * width..(m0 + height) * width];
                gemm(workspace, wide_a, wide_b, if k0 == 0 { 0.0 } else { 1.0 }, c, None, threads);
            }
        }
        for (r, sum) in stripe.chunks_exact_mut(width).enumerate() {
            let out = &mut out[r * n + n0..r * n + n0 + width];
            let row = &mut row[..width];
            if let Some(bias) = bias {
                T::widen(&bias[n0..n0 + width], row);
                sum.iter_mut().zip(&*row).for_each(|(sum, bias)| *sum += *bias);
            }
            if accumulate {
                O::widen(out, row);
                sum.iter_mut().zip(&*row).for_each(|(sum, out)| *sum += *out);
            }
            O::narrow(sum, out);
        }
    }
    Ok(())
}

fn grow(scratch: &mut Vec<f32>, len: usize) {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
}

/// Widens a block of `matrix` (its rows and columns as the product sees them, each as start and length).
fn widen<'a, T: Convert<Accumulator = f32>>(
    source: &[T],
    matrix: Matrix<'_>,
    rows: (usize, usize),
    columns: (usize, usize),
    target: &'a mut [f32],
) -> Operand<'a, f32> {
    let (stored_rows, stored_columns) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
    let (height, width) = (stored_rows.1, stored_columns.1);
    let target = &mut target[..height * width];
    for (r, target) in target.chunks_exact_mut(width).enumerate() {
        let start = (stored_rows.0 + r) * matrix.columns + stored_columns.0;
        T::widen(&source[start..start + width], target);
    }
    Operand { data: target, rows: height, columns: width, transposed: matrix.transposed }
}
