//! The CPU engine: host memory, matmuls through a matmul crate, everything done when the call returns.

pub(crate) mod kernels;
pub(crate) mod matmul;
pub(crate) mod memory;
pub(crate) mod tokens;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kernels::{Accumulate, Convert, for_float};
use memory::{HostMemory, bytes, bytes_mut, elements, elements_mut};

use crate::device::{CrossEntropyLoss, Device, Matmul, Matrix, SoftmaxPart, same_length};
use crate::dtype::{DType, Element, Float};
use crate::memory::{Buffer, BufferMut, Pool};
use crate::timeline::{Lane, Recorder};
use crate::{Error, Result};

/// A CPU as a device. Each rank has its own.
pub struct Cpu {
    pool: Pool,
    threads: usize,
    scratch: Mutex<matmul::Scratch>,
    recorder: Recorder,
}

impl Cpu {
    /// A device whose matmuls use `threads` threads (0 is taken as 1).
    pub fn new(threads: usize) -> Self {
        Self::with_recorder(threads, Recorder::disabled())
    }

    /// The same, which notes its matmuls in `recorder`.
    pub fn with_recorder(threads: usize, recorder: Recorder) -> Self {
        Self { pool: Pool::default(), threads: threads.max(1), scratch: Mutex::default(), recorder }
    }

    /// Threads that a matmul uses.
    pub fn threads(&self) -> usize {
        self.threads
    }
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu({} threads)", self.threads)
    }
}

impl Device for Cpu {
    fn describe(&self) -> String {
        "cpu".into()
    }

    fn allocate(&self, bytes: usize) -> Result<BufferMut> {
        self.pool.take(bytes, |size| Ok(Box::new(HostMemory::new(size)?)))
    }

    fn trim(&self) -> usize {
        self.pool.trim()
    }

    fn memory_bytes(&self) -> usize {
        self.pool.bytes()
    }

    fn upload(&self, source: &[u8], target: &mut BufferMut) -> Result<()> {
        same_length("upload", source.len(), target.len())?;
        bytes_mut(target)?.copy_from_slice(source);
        Ok(())
    }

    fn download(&self, source: &Buffer, target: &mut [u8]) -> Result<()> {
        same_length("download", source.len(), target.len())?;
        target.copy_from_slice(bytes(source)?);
        Ok(())
    }

    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<()> {
        same_length("copy", source.len(), target.len())?;
        bytes_mut(target)?.copy_from_slice(bytes(source)?);
        Ok(())
    }

    fn zero(&self, target: &mut BufferMut) -> Result<()> {
        bytes_mut(target)?.fill(0);
        Ok(())
    }

    fn matmul(&self, mut matmul: Matmul<'_>) -> Result<()> {
        let _span = self.recorder.span(Lane::Compute, matmul.name);
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        matmul::matmul(&mut matmul, self.threads, &mut scratch)
    }

    fn add_bias(&self, dtype: DType, bias: &Buffer, rows: &mut BufferMut) -> Result<()> {
        fn run<T: Convert<Accumulator: Accumulate>>(bias: &Buffer, rows: &mut BufferMut) -> Result<()> {
            kernels::add_bias::<T>(elements(bias)?, whole_rows(rows, bias.len())?);
            Ok(())
        }
        for_float!(dtype, run(bias, rows))
    }

    fn add_column_sums(&self, dtype: DType, rows: &Buffer, out: &mut BufferMut) -> Result<()> {
        fn run<T: Convert<Accumulator: Accumulate>>(rows: &Buffer, out: &mut BufferMut) -> Result<()> {
            let (rows, out) = (elements::<T>(rows)?, elements_mut::<T::Accumulator>(out)?);
            if out.is_empty() || rows.len() % out.len() != 0 {
                return Err(not_whole_rows(rows.len(), out.len()));
            }
            kernels::add_column_sums(rows, out);
            Ok(())
        }
        for_float!(dtype, run(rows, out))
    }

    fn scaled_add(&self, factor: f64, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()> {
        fn outer<S: Convert<Accumulator: Accumulate>>(
            factor: f64,
            source: &Buffer,
            target: &mut BufferMut,
            dtype: DType,
        ) -> Result<()> {
            let source = elements::<S>(source)?;
            for_float!(dtype, inner(factor, source, target))
        }
        fn inner<T>(factor: f64, source: &[impl Convert<Accumulator: Accumulate>], target: &mut BufferMut) -> Result<()>
        where
            T: Convert<Accumulator: Accumulate>,
        {
            let target = elements_mut::<T>(target)?;
            same_length("scaled_add (elements)", source.len(), target.len())?;
            kernels::scaled_add(factor, source, target);
            Ok(())
        }
        for_float!(source.1, outer(factor, source.0, target.0, target.1))
    }

    fn cast(&self, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()> {
        fn outer<S: Convert>(source: &Buffer, target: &mut BufferMut, dtype: DType) -> Result<()> {
            let source = elements::<S>(source)?;
            for_float!(dtype, inner(source, target))
        }
        fn inner<T: Convert>(source: &[impl Convert], target: &mut BufferMut) -> Result<()> {
            let target = elements_mut::<T>(target)?;
            same_length("cast (elements)", source.len(), target.len())?;
            kernels::cast(source, target);
            Ok(())
        }
        for_float!(source.1, outer(source.0, target.0, target.1))
    }

    fn find_outside(&self, ids: &Buffer, range: Range<i64>, except: Option<i64>) -> Result<Option<(usize, i64)>> {
        let ids = elements::<i64>(ids)?;
        let outside = |(_, id): &(usize, &i64)| !range.contains(*id) && Some(**id) != except;
        Ok(ids.iter().enumerate().find(outside).map(|(position, id)| (position, *id)))
    }

    fn gather_rows(
        &self,
        dtype: DType,
        table: Matrix<'_>,
        ids: &Buffer,
        first: i64,
        out: &mut BufferMut,
    ) -> Result<()> {
        fn run<T: Convert>(table: Matrix<'_>, ids: &[i64], first: i64, out: &mut BufferMut) -> Result<()> {
            let (width, out) = (table.columns, elements_mut::<T>(out)?);
            same_length("gathered rows (elements)", out.len(), ids.len() * width)?;
            tokens::gather_rows(matrix::<T>(table)?, width, ids, first, out);
            Ok(())
        }
        let _span = self.recorder.span(Lane::Compute, "gather rows");
        for_float!(dtype, run(table, elements(ids)?, first, out))
    }

    fn scatter_add_rows(
        &self,
        dtype: DType,
        rows: Matrix<'_>,
        ids: &Buffer,
        first: i64,
        skip: Option<i64>,
        out: &mut BufferMut,
    ) -> Result<()> {
        fn run<T>(rows: Matrix<'_>, ids: &[i64], first: i64, skip: Option<i64>, out: &mut BufferMut) -> Result<()>
        where
            T: Convert<Accumulator: Accumulate>,
        {
            same_length("ids", ids.len(), rows.rows)?;
            let out = whole_rows::<T::Accumulator>(out, rows.columns * T::Accumulator::DTYPE.size())?;
            tokens::scatter_add_rows(matrix::<T>(rows)?, rows.columns, ids, first, skip, out);
            Ok(())
        }
        let _span = self.recorder.span(Lane::Compute, "scatter rows");
        for_float!(dtype, run(rows, elements(ids)?, first, skip, out))
    }

    fn row_max(&self, dtype: DType, logits: Matrix<'_>, valid: usize, out: &mut BufferMut) -> Result<()> {
        fn run<T: Convert>(logits: Matrix<'_>, valid: usize, out: &mut BufferMut) -> Result<()> {
            let out = elements_mut::<T::Accumulator>(out)?;
            same_length("row_max (rows)", out.len(), logits.rows)?;
            tokens::row_max(matrix::<T>(logits)?, logits.columns, valid.min(logits.columns), out);
            Ok(())
        }
        let _span = self.recorder.span(Lane::Compute, "row max");
        for_float!(dtype, run(logits, valid, out))
    }

    fn softmax_sums(&self, part: &SoftmaxPart<'_>, max: &Buffer, out: &mut BufferMut) -> Result<()> {
        fn run<T>(part: &SoftmaxPart<'_>, max: &Buffer, out: &mut BufferMut) -> Result<()>
        where
            T: Convert<Accumulator: tokens::Real>,
        {
            let (rows, width, valid) = softmax_sizes(part)?;
            let (targets, max) = (elements(part.targets)?, elements::<T::Accumulator>(max)?);
            let out = elements_mut::<T::Accumulator>(out)?;
            same_length("max (rows)", max.len(), rows)?;
            same_length("softmax_sums (elements)", out.len(), 3 * rows)?;
            tokens::softmax_sums(matrix::<T>(part.logits)?, width, valid, part.first, targets, max, out);
            Ok(())
        }
        let _span = self.recorder.span(Lane::Compute, "softmax sums");
        for_float!(part.dtype, run(part, max, out))
    }

    fn cross_entropy_loss(
        &self,
        dtype: DType,
        loss: &CrossEntropyLoss,
        targets: &Buffer,
        max: &Buffer,
        sums: &Buffer,
        out: &mut BufferMut,
    ) -> Result<()> {
        fn run<T: Float>(
            loss: &CrossEntropyLoss,
            targets: &[i64],
            max: &Buffer,
            sums: &Buffer,
            out: &mut BufferMut,
        ) -> Result<()> {
            let (max, sums) = (elements::<T::Accumulator>(max)?, elements::<T::Accumulator>(sums)?);
            let out = elements_mut::<T::Accumulator>(out)?;
            for (got, wanted) in [(max.len(), out.len()), (sums.len(), 3 * out.len()), (targets.len(), out.len())] {
                same_length("cross entropy (elements)", got, wanted)?;
            }
            tokens::loss(loss, targets, max, sums, out);
            Ok(())
        }
        for_float!(dtype, run(loss, elements(targets)?, max, sums, out))
    }

    fn cross_entropy_grad(
        &self,
        part: &SoftmaxPart<'_>,
        loss: &CrossEntropyLoss,
        max: &Buffer,
        sums: &Buffer,
        grad: &Buffer,
        out: &mut BufferMut,
    ) -> Result<()> {
        fn run<T>(
            part: &SoftmaxPart<'_>,
            loss: &CrossEntropyLoss,
            [max, sums, grad]: [&Buffer; 3],
            out: &mut BufferMut,
        ) -> Result<()>
        where
            T: Convert<Accumulator: tokens::Real>,
        {
            let (rows, width, valid) = softmax_sizes(part)?;
            let (targets, out) = (elements(part.targets)?, elements_mut::<T>(out)?);
            let (max, sums) = (elements::<T::Accumulator>(max)?, elements::<T::Accumulator>(sums)?);
            let grad = elements::<T::Accumulator>(grad)?;
            let sizes = [(max.len(), rows), (sums.len(), 3 * rows), (grad.len(), rows), (out.len(), rows * width)];
            for (got, wanted) in sizes {
                same_length("cross entropy gradient (elements)", got, wanted)?;
            }
            let logits = matrix::<T>(part.logits)?;
            tokens::gradient(loss, logits, width, valid, part.first, targets, max, sums, grad, out);
            Ok(())
        }
        let _span = self.recorder.span(Lane::Compute, "softmax gradient");
        for_float!(part.dtype, run(part, loss, [max, sums, grad], out))
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

/// The elements of a matrix that is not transposed.
fn matrix<T: bytemuck::Pod>(matrix: Matrix<'_>) -> Result<&[T]> {
    let elements = elements::<T>(matrix.buffer)?;
    same_length("matrix (elements)", elements.len(), matrix.rows * matrix.columns)?;
    if matrix.transposed {
        return Err(Error::Argument { what: "matrix", got: "a transpose".into(), wanted: "rows as they stand".into() });
    }
    Ok(elements)
}

/// Rows, columns, and those that are classes.
fn softmax_sizes(part: &SoftmaxPart<'_>) -> Result<(usize, usize, usize)> {
    let (rows, width) = (part.logits.rows, part.logits.columns);
    same_length("targets (elements)", elements::<i64>(part.targets)?.len(), rows)?;
    Ok((rows, width, part.valid.min(width)))
}

/// The elements of `rows`, which must be whole rows of `width` bytes.
fn whole_rows<T: bytemuck::Pod>(rows: &mut BufferMut, width: usize) -> Result<&mut [T]> {
    if width == 0 || !rows.len().is_multiple_of(width) {
        return Err(not_whole_rows(rows.len(), width));
    }
    elements_mut(rows)
}

fn not_whole_rows(len: usize, width: usize) -> Error {
    Error::Argument { what: "rows", got: format!("{len}"), wanted: format!("a multiple of the width {width}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Matrix;
    use half::{bf16, f16};

    fn buffer<T: Convert>(device: &Cpu, values: impl Iterator<Item = f64>) -> BufferMut {
        let values: Vec<T> = values.map(T::from_f64).collect();
        let mut buffer = device.allocate(std::mem::size_of_val(&values[..])).unwrap();
        device.upload(bytemuck::cast_slice(&values), &mut buffer).unwrap();
        buffer
    }

    /// Products of integers that every type holds exactly, against sums in f64: all transpositions, with bias or
    /// accumulation, sizes around the block sizes.
    fn products<T, O>(sizes: &[(usize, usize, usize)], threads: usize)
    where
        T: Convert,
        O: Convert,
    {
        let device = Cpu::new(threads);
        let value = |i: usize, seed: usize| ((i * 7 + seed * 3 + i / 5) % 5) as f64 - 2.0;
        for &(m, k, n) in sizes {
            for (ta, tb, accumulate, with_bias) in [
                (false, true, false, true),
                (false, false, false, false),
                (true, false, true, false),
                (true, true, false, false),
            ] {
                let a = buffer::<T>(&device, (0..m * k).map(|i| value(i, 1))).freeze();
                let b = buffer::<T>(&device, (0..k * n).map(|i| value(i, 2))).freeze();
                let bias = buffer::<T>(&device, (0..n).map(|i| value(i, 3))).freeze();
                let mut out = buffer::<O>(&device, (0..m * n).map(|i| if accumulate { value(i, 4) } else { f64::NAN }));
                let matrix = |buffer, rows, columns, transposed: bool| {
                    if transposed { Matrix::new(buffer, columns, rows).t() } else { Matrix::new(buffer, rows, columns) }
                };
                device
                    .matmul(Matmul {
                        name: "test",
                        dtype: T::DTYPE,
                        a: matrix(&a, m, k, ta),
                        b: matrix(&b, k, n, tb),
                        out: &mut out,
                        out_offset: 0,
                        out_dtype: O::DTYPE,
                        accumulate,
                        bias: with_bias.then_some(&bias),
                    })
                    .unwrap();
                let got = elements::<O>(&out.freeze()).unwrap().to_vec();
                let at = |rows: usize, columns: usize, transposed: bool, r: usize, c: usize| {
                    if transposed { c * rows + r } else { r * columns + c }
                };
                for r in (0..m).step_by(m.div_ceil(40)) {
                    for c in (0..n).step_by(n.div_ceil(40)) {
                        let mut want: f64 =
                            (0..k).map(|i| value(at(m, k, ta, r, i), 1) * value(at(k, n, tb, i, c), 2)).sum();
                        want += if with_bias { value(c, 3) } else { 0.0 };
                        want += if accumulate { value(r * n + c, 4) } else { 0.0 };
                        let want = O::from_f64(want);
                        assert_eq!(got[r * n + c], want, "{:?} {m}x{k}x{n} {ta} {tb} at {r},{c}", T::DTYPE);
                    }
                }
            }
        }
    }

    #[test]
    fn products_of_every_dtype_are_exact_on_integers() {
        let small = [(1, 1, 1), (1, 5, 3), (7, 1, 9), (3, 17, 1), (33, 65, 31), (2, 4097, 3)];
        products::<f32, f32>(&small, 1);
        products::<f64, f64>(&small, 1);
        products::<bf16, bf16>(&small[..5], 1);
        products::<f16, f16>(&small[..5], 1);
        products::<bf16, f32>(&small, 1);
        products::<f16, f32>(&small, 1);
        products::<bf16, f32>(&[(300, 40, 600)], 1);
        products::<f32, f32>(&[(300, 520, 600)], 2);
    }

    #[test]
    fn empty_sizes_are_legal() {
        let device = Cpu::new(1);
        for (m, k, n) in [(0, 3, 4), (3, 0, 4), (3, 4, 0)] {
            let (a, b) = (
                buffer::<f32>(&device, (0..m * k).map(|_| 1.0)).freeze(),
                buffer::<f32>(&device, (0..k * n).map(|_| 1.0)).freeze(),
            );
            let mut out = buffer::<f32>(&device, (0..m * n).map(|_| f64::NAN));
            let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
            device
                .matmul(Matmul {
                    name: "empty",
                    dtype: DType::F32,
                    a,
                    b,
                    out: &mut out,
                    out_offset: 0,
                    out_dtype: DType::F32,
                    accumulate: false,
                    bias: None,
                })
                .unwrap();
            assert!(elements::<f32>(&out.freeze()).unwrap().iter().all(|v| *v == 0.0));
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let device = Cpu::new(1);
        let a = buffer::<f32>(&device, (0..6).map(f64::from)).freeze();
        let mut out = buffer::<f32>(&device, (0..4).map(f64::from));
        let product = Matmul {
            name: "wrong",
            dtype: DType::F32,
            a: Matrix::new(&a, 2, 3),
            b: Matrix::new(&a, 2, 3),
            out: &mut out,
            out_offset: 0,
            out_dtype: DType::F32,
            accumulate: false,
            bias: None,
        };
        assert!(matches!(device.matmul(product), Err(Error::Argument { what: "matmul", .. })));
        assert!(device.add_bias(DType::F32, &a, &mut out).is_err());
        assert!(device.add_column_sums(DType::F32, &a, &mut out).is_err());
        assert!(device.upload(&[0; 3], &mut out).is_err());
    }
}
