//! Rows by number, and the softmax over a sharded vocabulary: launches of the kernels of kernels/tokens.cu.
//!
//! The structures that go by value are those of that file.

use std::ops::Range;

use super::kernels::{Name, Work};
use super::memory::{pointer, pointer_mut};
use super::{CudaDevice, arg, not_whole_rows};
use crate::device::{CrossEntropyLoss, Device, Matrix, SoftmaxPart, same_length};
use crate::dtype::DType;
use crate::memory::{Buffer, BufferMut};
use crate::{Error, Result};

/// A number that may be absent.
#[repr(C)]
struct Maybe {
    value: i64,
    present: i64,
}

impl From<Option<i64>> for Maybe {
    fn from(value: Option<i64>) -> Self {
        Self { value: value.unwrap_or_default(), present: value.is_some().into() }
    }
}

/// One rank's part of a softmax.
#[repr(C)]
struct Part {
    logits: u64,
    height: u64,
    width: u64,
    valid: u64,
    first: i64,
    targets: u64,
    max: u64,
}

impl Part {
    /// Checks the sizes of what it reads.
    fn new(part: &SoftmaxPart<'_>, max: &Buffer) -> Result<Self> {
        let (height, width) = (part.logits.rows, part.logits.columns);
        same_length("targets", part.targets.len(), height * DType::I64.size())?;
        same_length("max", max.len(), height * part.dtype.accumulator().size())?;
        Ok(Self {
            logits: matrix(part.logits, part.dtype)?,
            height: height as u64,
            width: width as u64,
            valid: part.valid.min(width) as u64,
            first: part.first,
            targets: pointer(part.targets)?.0,
            max: pointer(max)?.0,
        })
    }
}

/// The options of a loss.
#[repr(C)]
struct Options {
    classes: f64,
    label_smoothing: f64,
    z_loss: f64,
    ignore: Maybe,
}

impl From<&CrossEntropyLoss> for Options {
    fn from(loss: &CrossEntropyLoss) -> Self {
        Self {
            classes: loss.classes as f64,
            label_smoothing: loss.label_smoothing,
            z_loss: loss.z_loss,
            ignore: loss.ignore_index.into(),
        }
    }
}

/// Where a matrix that is not transposed lies.
fn matrix(matrix: Matrix<'_>, dtype: DType) -> Result<u64> {
    same_length("matrix", matrix.buffer.len(), matrix.rows * matrix.columns * dtype.size())?;
    if matrix.transposed {
        return Err(Error::Argument { what: "matrix", got: "a transpose".into(), wanted: "rows as they stand".into() });
    }
    Ok(pointer(matrix.buffer)?.0)
}

/// How many ids there are.
fn count_of(ids: &Buffer) -> Result<usize> {
    match ids.len().is_multiple_of(DType::I64.size()) {
        true => Ok(ids.len() / DType::I64.size()),
        false => Err(Error::Argument {
            what: "ids",
            got: format!("{} bytes", ids.len()),
            wanted: "whole numbers of 8 bytes".into(),
        }),
    }
}

pub(super) fn find_outside(
    device: &CudaDevice,
    ids: &Buffer,
    range: Range<i64>,
    except: Option<i64>,
) -> Result<Option<(usize, i64)>> {
    const NONE: u64 = u64::MAX;
    let count = count_of(ids)?;
    let mut found = device.allocate(size_of::<u64>())?;
    device.upload(&NONE.to_ne_bytes(), &mut found)?;
    let (mut ids_at, mut found_at, mut length) = (pointer(ids)?.0, pointer_mut(&mut found)?.0, count as u64);
    let (mut low, mut high, mut except) = (range.start, range.end, Maybe::from(except));
    let mut arguments =
        [arg(&mut ids_at), arg(&mut length), arg(&mut low), arg(&mut high), arg(&mut except), arg(&mut found_at)];
    device.launch(Name::of_ids("find_outside"), Work::Elements(count), &mut arguments)?;
    let mut position = [0; size_of::<u64>()];
    device.download(&found.freeze(), &mut position)?;
    let position = u64::from_ne_bytes(position);
    if position == NONE {
        return Ok(None);
    }
    let (position, mut id) = (position as usize, [0; size_of::<i64>()]);
    device.download(&ids.slice(position * size_of::<i64>()..(position + 1) * size_of::<i64>())?, &mut id)?;
    Ok(Some((position, i64::from_ne_bytes(id))))
}

pub(super) fn gather_rows(
    device: &CudaDevice,
    dtype: DType,
    table: Matrix<'_>,
    ids: &Buffer,
    first: i64,
    out: &mut BufferMut,
) -> Result<()> {
    let count = count_of(ids)?;
    same_length("gathered rows", out.len(), count * table.columns * dtype.size())?;
    let (mut table_at, mut ids_at, mut out_at) = (matrix(table, dtype)?, pointer(ids)?.0, pointer_mut(out)?.0);
    let (mut rows, mut width, mut length, mut first) = (table.rows as u64, table.columns as u64, count as u64, first);
    let mut arguments = [
        arg(&mut table_at),
        arg(&mut rows),
        arg(&mut width),
        arg(&mut ids_at),
        arg(&mut length),
        arg(&mut first),
        arg(&mut out_at),
    ];
    device.launch(Name::of("gather_rows", dtype)?, Work::Rows(count), &mut arguments)
}

pub(super) fn scatter_add_rows(
    device: &CudaDevice,
    dtype: DType,
    rows: Matrix<'_>,
    ids: &Buffer,
    first: i64,
    skip: Option<i64>,
    out: &mut BufferMut,
) -> Result<()> {
    let count = count_of(ids)?;
    same_length("ids", ids.len(), rows.rows * DType::I64.size())?;
    let row = rows.columns * dtype.accumulator().size();
    if row == 0 || !out.len().is_multiple_of(row) {
        return Err(not_whole_rows(out.len(), row));
    }
    let mut held = (out.len() / row) as u64;
    let (mut rows_at, mut ids_at, mut out_at) = (matrix(rows, dtype)?, pointer(ids)?.0, pointer_mut(out)?.0);
    let (mut width, mut length, mut first, mut skip) = (rows.columns as u64, count as u64, first, Maybe::from(skip));
    let mut arguments = [
        arg(&mut rows_at),
        arg(&mut width),
        arg(&mut ids_at),
        arg(&mut length),
        arg(&mut first),
        arg(&mut skip),
        arg(&mut out_at),
        arg(&mut held),
    ];
    device.launch(Name::of("scatter_add_rows", dtype)?, Work::Rows(count), &mut arguments)
}

pub(super) fn row_max(
    device: &CudaDevice,
    dtype: DType,
    logits: Matrix<'_>,
    valid: usize,
    out: &mut BufferMut,
) -> Result<()> {
    same_length("row_max", out.len(), logits.rows * dtype.accumulator().size())?;
    let (mut logits_at, mut out_at) = (matrix(logits, dtype)?, pointer_mut(out)?.0);
    let (mut height, mut width) = (logits.rows as u64, logits.columns as u64);
    let mut valid = valid.min(logits.columns) as u64;
    let mut arguments = [arg(&mut logits_at), arg(&mut height), arg(&mut width), arg(&mut valid), arg(&mut out_at)];
    device.launch(Name::of("row_max", dtype)?, Work::Rows(logits.rows), &mut arguments)
}

pub(super) fn softmax_sums(
    device: &CudaDevice,
    part: &SoftmaxPart<'_>,
    max: &Buffer,
    out: &mut BufferMut,
) -> Result<()> {
    let rows = part.logits.rows;
    same_length("softmax_sums", out.len(), 3 * rows * part.dtype.accumulator().size())?;
    let (mut raw, mut out_at) = (Part::new(part, max)?, pointer_mut(out)?.0);
    let mut arguments = [arg(&mut raw), arg(&mut out_at)];
    device.launch(Name::of("softmax_sums", part.dtype)?, Work::Rows(rows), &mut arguments)
}

pub(super) fn cross_entropy_loss(
    device: &CudaDevice,
    dtype: DType,
    loss: &CrossEntropyLoss,
    targets: &Buffer,
    [max, sums]: [&Buffer; 2],
    out: &mut BufferMut,
) -> Result<()> {
    let count = count_of(targets)?;
    let wide = dtype.accumulator();
    for (got, wanted) in [(out.len(), count), (max.len(), count), (sums.len(), 3 * count)] {
        same_length("cross entropy", got, wanted * wide.size())?;
    }
    let (mut options, mut length) = (Options::from(loss), count as u64);
    let [mut targets_at, mut max_at, mut sums_at] = [pointer(targets)?.0, pointer(max)?.0, pointer(sums)?.0];
    let mut out_at = pointer_mut(out)?.0;
    let mut arguments = [
        arg(&mut options),
        arg(&mut targets_at),
        arg(&mut max_at),
        arg(&mut sums_at),
        arg(&mut length),
        arg(&mut out_at),
    ];
    device.launch(Name::of("cross_entropy_loss", wide)?, Work::Elements(count), &mut arguments)
}

pub(super) fn cross_entropy_grad(
    device: &CudaDevice,
    part: &SoftmaxPart<'_>,
    loss: &CrossEntropyLoss,
    [max, sums, grad]: [&Buffer; 3],
    out: &mut BufferMut,
) -> Result<()> {
    let (rows, width, wide) = (part.logits.rows, part.logits.columns, part.dtype.accumulator().size());
    let sizes =
        [(sums.len(), 3 * rows * wide), (grad.len(), rows * wide), (out.len(), rows * width * part.dtype.size())];
    for (got, wanted) in sizes {
        same_length("cross entropy gradient", got, wanted)?;
    }
    let (mut raw, mut options) = (Part::new(part, max)?, Options::from(loss));
    let (mut sums_at, mut grad_at, mut out_at) = (pointer(sums)?.0, pointer(grad)?.0, pointer_mut(out)?.0);
    let mut arguments = [arg(&mut raw), arg(&mut options), arg(&mut sums_at), arg(&mut grad_at), arg(&mut out_at)];
    device.launch(Name::of("cross_entropy_grad", part.dtype)?, Work::Rows(rows), &mut arguments)
}
