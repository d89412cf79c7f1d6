//! The CUDA engine: device memory, cuBLASLt, and kernels compiled by NVRTC, all on one compute stream (feature `cuda`).
//!
//! Buffers are this crate's own and are ordered by its own rules: cudarc's event tracking takes no part, neither here nor for the
//! slices of a program that shares the device.

pub(crate) mod events;
pub(crate) mod kernels;
pub(crate) mod library;
mod matmul;
pub(crate) mod memory;
mod slices;
mod tokens;

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};

use crate::comm::ReduceOp;
use crate::device::{CrossEntropyLoss, Device, Matmul, Matrix, SoftmaxPart, same_length};
use crate::dtype::DType;
use crate::memory::{Buffer, BufferMut, Pool};
use crate::timeline::{Lane, Recorder};
use crate::{Error, Result};
use events::Stopwatch;
use kernels::{Kernels, Name, Work};
use matmul::{Blas, Shape};
use memory::{CudaMemory, pointer, pointer_mut};

/// Turns what a driver call returned into a result.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    code.result().map_err(|error| foreign(call, &error))
}

fn foreign(call: &'static str, error: &DriverError) -> Error {
    Error::Foreign { library: "CUDA", call: call.into(), message: format!("{error:?}") }
}

/// A GPU. Each rank has its own, or several share one.
pub struct CudaDevice {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    pool: Pool,
    blas: OnceLock<Result<Blas>>,
    kernels: OnceLock<Result<Kernels>>,
    tf32: bool,
    /// Whether the device has a stream-ordered memory pool.
    pooled: bool,
    workspace: Mutex<Option<BufferMut>>,
    failed: Mutex<Option<Error>>,
    stopwatch: Stopwatch,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({})", self.context.ordinal())
    }
}

impl CudaDevice {
    /// The number of CUDA devices.
    ///
    /// # Errors
    /// [`Error::Library`] where there is no driver.
    pub fn count() -> Result<usize> {
        library::driver()?;
        CudaContext::device_count()
            .map(|count| count.max(0) as usize)
            .map_err(|error| foreign("cuDeviceGetCount", &error))
    }

    /// The device of that number, with a compute stream of its own.
    ///
    /// # Errors
    /// [`Error::Library`] where there is no driver; [`Error::Foreign`] where there is no such device.
    pub fn new(ordinal: usize) -> Result<Arc<Self>> {
        Self::with_recorder(ordinal, Recorder::disabled())
    }

    /// The same, which notes its work in `recorder`, with the device's own times. What the device has not been waited for yet
    /// ([`Device::synchronize`], or a look at results) is noted then.
    ///
    /// # Errors
    /// As [`CudaDevice::new`].
    pub fn with_recorder(ordinal: usize, recorder: Recorder) -> Result<Arc<Self>> {
        library::driver()?;
        let context = CudaContext::new(ordinal).map_err(|error| foreign("cuDevicePrimaryCtxRetain", &error))?;
        let stream = context.new_stream().map_err(|error| foreign("cuStreamCreate", &error))?;
        Ok(Arc::new(Self::over(stream, recorder, false)))
    }

    /// A device that computes on the caller's stream, so that what it queues is in order with the caller's own work.
    /// `tf32` lets f32 products use TF32 tensor cores (about 3 digits); by default they are true f32.
    ///
    /// # Errors
    /// As [`CudaDevice::new`].
    pub fn with_stream(stream: &Arc<CudaStream>, tf32: bool) -> Result<Arc<Self>> {
        library::driver()?;
        Ok(Arc::new(Self::over(Arc::clone(stream), Recorder::disabled(), tf32)))
    }

    fn over(stream: Arc<CudaStream>, recorder: Recorder, tf32: bool) -> Self {
        let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let pooled = stream.context().attribute(pools).is_ok_and(|supported| supported != 0);
        Self {
            stopwatch: Stopwatch::new(stream.context(), recorder, Lane::Compute),
            context: Arc::clone(stream.context()),
            stream,
            pool: Pool::default(),
            blas: OnceLock::new(),
            kernels: OnceLock::new(),
            tf32,
            pooled,
            workspace: Mutex::default(),
            failed: Mutex::default(),
        }
    }

    /// The CUDA context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the context this thread's.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| foreign("cuCtxSetCurrent", &error))
    }

    /// The compute stream.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// From now on whoever reads or synchronises gets this error.
    pub(crate) fn fail(&self, error: &Error) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
    }

    fn failure(&self) -> Result<()> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    fn kernels(&self) -> Result<&Kernels> {
        self.kernels.get_or_init(|| Kernels::new(&self.context)).as_ref().map_err(Clone::clone)
    }

    /// Queues the sum (or the largest) of `count` summands of `out`'s length, in their order, on a stream.
    pub(crate) fn combine_on<'a>(
        &self,
        stream: sys::CUstream,
        dtype: DType,
        op: ReduceOp,
        count: usize,
        summand: &dyn Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<()> {
        self.bind()?;
        let mut parts = Parts([0; Parts::MOST]);
        if count > Parts::MOST {
            return Err(Error::Unsupported {
                what: format!("an ordered reduction over {count} ranks on a CUDA device"),
                reason: format!("its kernel takes up to {} addresses: Reduction::Native has no limit", Parts::MOST),
            });
        }
        for (index, part) in parts.0[..count].iter_mut().enumerate() {
            let buffer = summand(index).ok_or_else(|| Error::Argument {
                what: "summand",
                got: "none".into(),
                wanted: format!("{count} of them"),
            })?;
            same_length("summand", buffer.len(), out.len())?;
            *part = pointer(buffer)?.0;
        }
        let elements = (out.len() / dtype.size()) as u64;
        let mut target = pointer_mut(out)?.0;
        let (mut ranks, mut length, mut largest) = (count as u64, elements, i32::from(op == ReduceOp::Max));
        let mut arguments = [arg(&mut parts), arg(&mut ranks), arg(&mut length), arg(&mut largest), arg(&mut target)];
        let work = Work::Elements(out.len() / dtype.size());
        // SAFETY: the arguments are the kernel's; the buffers are held by the operation until compute is ordered after it.
        unsafe { self.kernels()?.launch(stream, Name::of("combine", dtype)?, work, &mut arguments) }
    }

    fn launch(&self, name: Name, work: Work, arguments: &mut [*mut c_void]) -> Result<()> {
        self.bind()?;
        // SAFETY: each caller gives the kernel's own arguments, of buffers whose reuse is ordered on this very stream.
        unsafe { self.kernels()?.launch(self.stream(), name, work, arguments) }
    }
}

/// The summands' addresses, by value, as `Parts` of kernels/elementwise.cu.
#[repr(C)]
struct Parts([u64; Parts::MOST]);

impl Parts {
    const MOST: usize = 256;
}

/// A kernel's argument.
fn arg<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

impl CudaDevice {
    /// Queues `work` on the compute stream, as a span of the timeline.
    fn timed(&self, name: &'static str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.stopwatch.span(self.stream(), name, 0, work)
    }

    /// Queues a product of m × k and k × n elements that has been checked and is not empty.
    fn multiply(&self, matmul: Matmul<'_>, (m, k, n): (usize, usize, usize)) -> Result<()> {
        let (dtype, out_dtype) = (matmul.dtype, matmul.out_dtype);
        let bytes = matmul.out_offset..matmul.out_offset + m * n * out_dtype.size();
        if k == 0 {
            // An empty sum is zero, plus bias.
            return matmul.out.within(bytes, |out| {
                if !matmul.accumulate {
                    self.zero(out)?;
                }
                matmul.bias.map_or(Ok(()), |bias| self.add_bias(dtype, bias, out))
            });
        }
        self.bind()?;
        let blas = self.blas.get_or_init(|| Blas::new(self.tf32)).as_ref().map_err(Clone::clone)?;
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let workspace = match &mut *workspace {
            Some(workspace) => workspace,
            none => none.insert(self.allocate(Blas::WORKSPACE)?),
        };
        let addresses = [
            pointer(matmul.a.buffer)?.0,
            pointer(matmul.b.buffer)?.0,
            pointer_mut(matmul.out)?.0 + matmul.out_offset as u64,
        ];
        // The epilogue adds a bias of the output's own dtype.
        let fused = matmul.bias.filter(|_| out_dtype == dtype);
        let bias = fused.map(pointer).transpose()?.map(|(address, _)| address);
        let lowest = addresses.iter().chain(&bias).map(|address| address.trailing_zeros()).min().unwrap_or(8);
        let shape = Shape {
            dtype,
            out_dtype,
            m,
            k,
            n,
            a_transposed: matmul.a.transposed,
            b_transposed: matmul.b.transposed,
            accumulate: matmul.accumulate,
            bias: bias.is_some(),
            alignment: 1 << lowest.min(8),
        };
        let workspace = pointer_mut(workspace)?.0;
        // SAFETY: the product was checked; buffers and workspace are used on this stream alone until they are ordered elsewhere.
        unsafe { blas.matmul(shape, addresses, bias, workspace, self.stream()) }?;
        match matmul.bias.filter(|_| fused.is_none()) {
            None => Ok(()),
            Some(_) => Err(Error::Unsupported {
                what: "a bias on an output of another dtype".into(),
                reason: "no layer asks for it".into(),
            }),
        }
    }
}

impl Device for CudaDevice {
    fn describe(&self) -> String {
        format!("CUDA device {}", self.context.ordinal())
    }

    fn allocate(&self, bytes: usize) -> Result<BufferMut> {
        self.pool.take(bytes, |size| {
            self.bind()?;
            Ok(Box::new(CudaMemory::new(&self.stream, self.pooled, size)?))
        })
    }

    fn trim(&self) -> usize {
        self.pool.trim()
    }

    fn memory_bytes(&self) -> usize {
        self.pool.bytes()
    }

    fn upload(&self, source: &[u8], target: &mut BufferMut) -> Result<()> {
        same_length("upload", source.len(), target.len())?;
        if source.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let target = pointer_mut(target)?.0;
        // SAFETY: the lengths agree; from pageable memory the call returns when the source has been read.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(target, source.as_ptr().cast(), source.len(), self.stream())
        })
    }

    fn download(&self, source: &Buffer, target: &mut [u8]) -> Result<()> {
        same_length("download", source.len(), target.len())?;
        if !target.is_empty() {
            self.bind()?;
            let source = pointer(source)?.0;
            // SAFETY: the lengths agree; the target is waited for below.
            check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), source, target.len(), self.stream())
            })?;
        }
        self.synchronize()
    }

    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<()> {
        same_length("copy", source.len(), target.len())?;
        if source.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let (from, to) = (pointer(source)?.0, pointer_mut(target)?.0);
        // SAFETY: the lengths agree; the buffers' reuse is ordered on this stream.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, source.len(), self.stream()) })
    }

    fn zero(&self, target: &mut BufferMut) -> Result<()> {
        if target.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let (address, len) = (pointer_mut(target)?.0, target.len());
        // SAFETY: the length is the buffer's.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, len, self.stream()) })
    }

    fn matmul(&self, matmul: Matmul<'_>) -> Result<()> {
        let (m, k, n) = matmul.check()?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        self.timed(matmul.name, || self.multiply(matmul, (m, k, n)))
    }
    fn add_bias(&self, dtype: DType, bias: &Buffer, rows: &mut BufferMut) -> Result<()> {
        if bias.is_empty() || !rows.len().is_multiple_of(bias.len()) {
            return Err(not_whole_rows(rows.len(), bias.len()));
        }
        let count = rows.len() / dtype.size();
        let (mut bias_at, mut rows_at) = (pointer(bias)?.0, pointer_mut(rows)?.0);
        let (mut width, mut length) = ((bias.len() / dtype.size()) as u64, count as u64);
        let mut arguments = [arg(&mut bias_at), arg(&mut width), arg(&mut rows_at), arg(&mut length)];
        self.launch(Name::of("add_bias", dtype)?, Work::Elements(count), &mut arguments)
    }

    fn add_column_sums(&self, dtype: DType, rows: &Buffer, out: &mut BufferMut) -> Result<()> {
        let width = out.len() / dtype.accumulator().size();
        let elements = rows.len() / dtype.size();
        if width == 0 || !elements.is_multiple_of(width) {
            return Err(not_whole_rows(elements, width));
        }
        let (mut rows_at, mut out_at) = (pointer(rows)?.0, pointer_mut(out)?.0);
        let (mut height, mut columns) = ((elements / width) as u64, width as u64);
        let mut arguments = [arg(&mut rows_at), arg(&mut height), arg(&mut columns), arg(&mut out_at)];
        // A block has 32 columns.
        self.launch(Name::of("add_column_sums", dtype)?, Work::Rows(width.div_ceil(32)), &mut arguments)
    }

    fn scaled_add(&self, factor: f64, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()> {
        let count = source.0.len() / source.1.size();
        same_length("scaled_add (elements)", count, target.0.len() / target.1.size())?;
        let (mut factor, mut from, mut to) = (factor, pointer(source.0)?.0, pointer_mut(target.0)?.0);
        let mut length = count as u64;
        let mut arguments = [arg(&mut factor), arg(&mut from), arg(&mut to), arg(&mut length)];
        self.launch(Name::between("scaled_add", source.1, target.1)?, Work::Elements(count), &mut arguments)
    }

    fn cast(&self, source: (&Buffer, DType), target: (&mut BufferMut, DType)) -> Result<()> {
        let count = source.0.len() / source.1.size();
        same_length("cast (elements)", count, target.0.len() / target.1.size())?;
        let (mut from, mut to, mut length) = (pointer(source.0)?.0, pointer_mut(target.0)?.0, count as u64);
        let mut arguments = [arg(&mut from), arg(&mut to), arg(&mut length)];
        self.launch(Name::between("cast", source.1, target.1)?, Work::Elements(count), &mut arguments)
    }

    fn find_outside(&self, ids: &Buffer, range: Range<i64>, except: Option<i64>) -> Result<Option<(usize, i64)>> {
        tokens::find_outside(self, ids, range, except)
    }

    fn gather_rows(
        &self,
        dtype: DType,
        table: Matrix<'_>,
        ids: &Buffer,
        first: i64,
        out: &mut BufferMut,
    ) -> Result<()> {
        self.timed("gather rows", || tokens::gather_rows(self, dtype, table, ids, first, out))
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
        self.timed("scatter rows", || tokens::scatter_add_rows(self, dtype, rows, ids, first, skip, out))
    }

    fn row_max(&self, dtype: DType, logits: Matrix<'_>, valid: usize, out: &mut BufferMut) -> Result<()> {
        self.timed("row max", || tokens::row_max(self, dtype, logits, valid, out))
    }

    fn softmax_sums(&self, part: &SoftmaxPart<'_>, max: &Buffer, out: &mut BufferMut) -> Result<()> {
        self.timed("softmax sums", || tokens::softmax_sums(self, part, max, out))
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
        tokens::cross_entropy_loss(self, dtype, loss, targets, [max, sums], out)
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
        self.timed("softmax gradient", || tokens::cross_entropy_grad(self, part, loss, [max, sums, grad], out))
    }

    fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream()) })?;
        self.stopwatch.note()?;
        self.failure()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // The memory is freed next: nothing may still use it.
            // SAFETY: the stream is alive.
            unsafe {
                sys::cuStreamSynchronize(self.stream());
            }
        }
    }
}

fn not_whole_rows(len: usize, width: usize) -> Error {
    Error::Argument { what: "rows", got: format!("{len}"), wanted: format!("a multiple of the width {width}") }
}
