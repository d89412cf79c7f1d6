//! The first seam: where memory lives and matmuls run.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::any::Any;
use std::fmt;
use std::ops::Range;

use crate::dtype::DType;
use crate::memory::{Buffer, BufferMut};
use crate::{Error, Result};

pub use cpu::Cpu;
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;

/// A row-major matrix in a buffer, used as it stands or as its transpose.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// The elements, `rows × columns` of them.
    pub buffer: &'a Buffer,
    /// Rows as stored.
    pub rows: usize,
    /// Columns as stored.
    pub columns: usize,
    /// Whether the product takes the transpose.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// The matrix as it is stored.
    pub fn new(buffer: &'a Buffer, rows: usize, columns: usize) -> Self {
        Self { buffer, rows, columns, transposed: false }
    }

    /// Its transpose, without moving anything.
    pub fn t(mut self) -> Self {
        self.transposed = !self.transposed;
        self
    }

    /// Rows and columns as the product sees them.
    pub fn size(&self) -> (usize, usize) {
        if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }
}

/// One matrix product: `out = a · b (+ bias on every row)`, or `out += a · b`.
///
/// Products of 16-bit elements accumulate in f32 and are rounded once.
#[derive(Debug)]
pub struct Matmul<'a> {
    /// What it is for, as the timeline shows it.
    pub name: &'static str,
    /// The dtype of `a`, `b` and `bias`.
    pub dtype: DType,
    /// The left operand.
    pub a: Matrix<'a>,
    /// The right operand.
    pub b: Matrix<'a>,
    /// Holds the row-major result.
    pub out: &'a mut BufferMut,
    /// Where in `out` the result begins, in bytes.
    pub out_offset: usize,
    /// The dtype of `out`: `dtype` or its accumulator.
    pub out_dtype: DType,
    /// Whether to add to `out` instead of overwriting it.
    pub accumulate: bool,
    /// A row to add to every row of the result (not together with `accumulate`).
    pub bias: Option<&'a Buffer>,
}

impl Matmul<'_> {
    /// The sizes `(m, k, n)` of the product.
    ///
    /// # Errors
    /// [`Error::Argument`] where operands, result, bias and dtypes do not fit together.
    pub fn check(&self) -> Result<(usize, usize, usize)> {
        let ((m, k), (k_b, n)) = (self.a.size(), self.b.size());
        let size = self.dtype.size();
        let fits = k == k_b
            && self.a.buffer.len() == m * k * size
            && self.b.buffer.len() == k * n * size
            && self.out_offset.is_multiple_of(self.out_dtype.size())
            && self.out_offset.checked_add(m * n * self.out_dtype.size()).is_some_and(|end| end <= self.out.len())
            && self.bias.is_none_or(|bias| bias.len() == n * size && !self.accumulate)
            && (self.out_dtype == self.dtype || self.out_dtype == self.dtype.accumulator());
        if fits {
            return Ok((m, k, n));
        }
        Err(Error::Argument {
            what: "matmul",
            got: format!("{self:?}"),
            wanted: "operands, result and bias whose sizes fit".into(),
        })
    }
}

/// One rank's part of a softmax over a sharded vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxPart<'a> {
    /// The dtype of `logits`.
    pub dtype: DType,
    /// One row a token, this rank's classes.
    pub logits: Matrix<'a>,
    /// How many of them are classes; the rest is padding.
    pub valid: usize,
    /// The first one's number.
    pub first: i64,
    /// Each token's class, i64.
    pub targets: &'a Buffer,
}

/// The options of a cross entropy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyLoss {
    /// Classes over all ranks.
    pub classes: usize,
    /// The part of a target's weight that all classes share, from 0 to below 1.
    pub label_smoothing: f64,
    /// The weight of (log Z)², with Z the sum of the exponentials of the logits.
    pub z_loss: f64,
    /// Tokens with this target have loss and gradient 0.
    pub ignore_index: Option<i64>,
}

/// Where memory lives and matmuls run. Implemented by the engines of this crate.
///
/// Every operation is *ordered on the device's compute queue*: on the CPU it has happened when the call returns, on
/// CUDA it is queued on the compute stream. All buffers of one call must be the device's own.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// A short name, for error messages.
    fn describe(&self) -> String;

    /// A buffer of `bytes` bytes with undefined contents, reused from an earlier one if possible.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate(&self, bytes: usize) -> Result<BufferMut>;

    /// Rows that a product should have at least, so that its fixed costs (packing the weight, filling the device) stay
    /// below a tenth of it: what [`Overlap::Pipelined`](crate::Overlap::Pipelined) goes by when it cuts a product up.
    fn rows_worth_a_product(&self) -> usize {
        256
    }

    /// Frees the memory that is kept for reuse; returns how many bytes.
    fn trim(&self) -> usize;

    /// Bytes of device memory held, in use or kept for reuse.
    fn memory_bytes(&self) -> usize;

    /// Copies host bytes to the device. `source` may be changed as soon as the call returns.
    ///
    /// # Errors
    /// Where the lengths differ, or the device fails.
    fn upload(&self, source: &[u8], target: &mut BufferMut) -> Result<()>;

    /// Copies device bytes to the host, and waits until they are there.
    ///
    /// # Errors
    /// Where the lengths differ, or the device fails.
    fn download(&self, source: &Buffer, target: &mut [u8]) -> Result<()>;

    /// Copies within the device.
    ///
    /// # Errors
    /// Where the lengths differ, or the device fails.
    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<()>;

    /// Fills a buffer with zero bytes.
    ///
    /// # Errors
    /// Where the device fails.
    fn zero(&self, target: &mut BufferMut) -> Result<()>;

    /// A matrix product.
    ///
    /// # Errors
    /// [`Error::Argument`] where sizes do not fit; where the device fails.
    fn matmul(&self, matmul: Matmul<'_>) -> Result<()>;

    /// Adds `bias` (one row of `dtype`) to every row of `rows`.
    ///
    /// # Errors
    /// Where sizes do not fit, or the device fails.
    fn add_bias(&self, dtype: DType, bias: &Buffer, rows: &mut BufferMut) -> Result<()>;

    /// Adds the sum of all rows of `rows` (each as wide as `out`) to `out`, which has the accumulator's dtype: the
    /// gradient of a bias.
    ///
    /// # Errors
    /// Where sizes do not fit, or the device fails.
    fn add_column_sums(&self, dtype: DType, rows: &Buffer, out: &mut BufferMut) -> Result<()>;

    /// `target += factor · source`, computed in the wider of the two dtypes' accumulators.
    ///
    /// # Errors
    /// Where sizes do not fit, or the device fails.
    fn scaled_add(&self, factor: f64, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()>;

    /// Converts `source` to `target`'s dtype, rounding to nearest even.
    ///
    /// # Errors
    /// Where sizes do not fit, or the device fails.
    fn cast(&self, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()>;

    /// The first of `ids` (i64) that is not in `range` and is not `except`: its position and value. Waits for them.
    ///
    /// # Errors
    /// Where the device fails, or cannot do it.
    fn find_outside(&self, ids: &Buffer, range: Range<i64>, except: Option<i64>) -> Result<Option<(usize, i64)>> {
        let _ = (ids, range, except);
        Err(unsupported(self.describe(), "find_outside"))
    }

    /// Row `i` of `out` becomes row `ids[i] − first` of `table`, or zeros where `table` has no such row.
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn gather_rows(
        &self,
        dtype: DType,
        table: Matrix<'_>,
        ids: &Buffer,
        first: i64,
        out: &mut BufferMut,
    ) -> Result<()> {
        let _ = (dtype, table, ids, first, out);
        Err(unsupported(self.describe(), "gather_rows"))
    }

    /// Row `ids[i] − first` of `out` (of `dtype`'s accumulator) grows by row `i` of `rows`, in the order of `i`, where `out` has
    /// such a row and `ids[i]` is not `skip`.
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn scatter_add_rows(
        &self,
        dtype: DType,
        rows: Matrix<'_>,
        ids: &Buffer,
        first: i64,
        skip: Option<i64>,
        out: &mut BufferMut,
    ) -> Result<()> {
        let _ = (dtype, rows, ids, first, skip, out);
        Err(unsupported(self.describe(), "scatter_add_rows"))
    }

    /// The largest of the first `valid` elements of each row of `logits`, into `out` (one a row, of `dtype`'s accumulator);
    /// −∞ where `valid` is 0.
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn row_max(&self, dtype: DType, logits: Matrix<'_>, valid: usize, out: &mut BufferMut) -> Result<()> {
        let _ = (dtype, logits, valid, out);
        Err(unsupported(self.describe(), "row_max"))
    }

    /// Three sums over the first `valid` elements `l` of each row of `logits`, with `m` the row's element of `max`: of
    /// `exp(l − m)`; the target's `l − m`, if this part holds it; and of `l − m`. They go into `out`, three a row, of `dtype`'s
    /// accumulator.
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn softmax_sums(&self, part: &SoftmaxPart<'_>, max: &Buffer, out: &mut BufferMut) -> Result<()> {
        let _ = (part, max, out);
        Err(unsupported(self.describe(), "softmax_sums"))
    }

    /// The loss of each row, from its max and its sums over the whole vocabulary: see
    /// [`ShardedCrossEntropy`](crate::ShardedCrossEntropy).
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn cross_entropy_loss(
        &self,
        dtype: DType,
        loss: &CrossEntropyLoss,
        targets: &Buffer,
        max: &Buffer,
        sums: &Buffer,
        out: &mut BufferMut,
    ) -> Result<()> {
        let _ = (dtype, loss, targets, max, sums, out);
        Err(unsupported(self.describe(), "cross_entropy_loss"))
    }

    /// The gradient of the logits, from that of each row's loss.
    ///
    /// # Errors
    /// Where sizes do not fit; where the device fails, or cannot do it.
    fn cross_entropy_grad(
        &self,
        part: &SoftmaxPart<'_>,
        loss: &CrossEntropyLoss,
        max: &Buffer,
        sums: &Buffer,
        grad: &Buffer,
        out: &mut BufferMut,
    ) -> Result<()> {
        let _ = (part, loss, max, sums, grad, out);
        Err(unsupported(self.describe(), "cross_entropy_grad"))
    }

    /// Waits until everything queued on compute is done.
    ///
    /// # Errors
    /// What the device's queue reports.
    fn synchronize(&self) -> Result<()>;
}

fn unsupported(device: String, what: &str) -> Error {
    Error::Unsupported { what: what.into(), reason: format!("the device ({device}) has no kernel for it") }
}

/// Checks that two lengths in bytes agree.
pub(crate) fn same_length(what: &'static str, got: usize, wanted: usize) -> Result<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::Argument { what, got: format!("{got} bytes"), wanted: format!("{wanted} bytes") })
}
