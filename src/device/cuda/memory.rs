//! Device memory from the driver's stream-ordered pool.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};

use super::check;
use super::events::bind;
use crate::memory::{Buffer, BufferMut, Memory};
use crate::{Error, Result};

/// Somebody else's memory that a tensor has taken over; freed by its own drop.
pub(crate) trait Owner: Send + Sync {
    /// Orders the owner's own stream after what has been queued on `compute`.
    fn release_after(&self, compute: &CudaStream);
}

/// How an allocation is freed.
enum Origin {
    /// Of the stream-ordered pool of the compute stream.
    Pool,
    Plain,
    Taken(Box<dyn Owner>),
}

/// One allocation.
pub(crate) struct CudaMemory {
    pointer: sys::CUdeviceptr,
    len: usize,
    /// The compute stream.
    stream: Arc<CudaStream>,
    origin: Origin,
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on CUDA device {}", self.len, self.stream.context().ordinal())
    }
}

impl Memory for CudaMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl CudaMemory {
    /// Allocates, and waits until it has happened: it is rare, and other streams may use the memory at once. Without `pooled` the
    /// memory is not of the stream-ordered pool, which some virtual devices lack.
    pub(crate) fn new(stream: &Arc<CudaStream>, pooled: bool, len: usize) -> Result<Self> {
        let failed = |error: Error| Error::OutOfMemory {
            device: format!("CUDA device {}", stream.context().ordinal()),
            bytes: len,
            reason: error.to_string(),
        };
        let (mut pointer, raw) = (0, stream.cu_stream());
        if pooled {
            // SAFETY: the context is current on this thread; the pointer is written by the call; the stream is alive.
            unsafe {
                check("cuMemAllocAsync", sys::cuMemAllocAsync(&mut pointer, len.max(1), raw)).map_err(failed)?;
                check("cuStreamSynchronize", sys::cuStreamSynchronize(raw)).map_err(failed)?;
            }
        } else {
            // SAFETY: as above.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut pointer, len.max(1)) }).map_err(failed)?;
        }
        let origin = if pooled { Origin::Pool } else { Origin::Plain };
        Ok(Self { pointer, len, stream: Arc::clone(stream), origin })
    }

    /// Memory of another owner, that the compute stream is ordered after.
    pub(crate) fn taken(
        stream: &Arc<CudaStream>,
        pointer: sys::CUdeviceptr,
        len: usize,
        owner: Box<dyn Owner>,
    ) -> Self {
        Self { pointer, len, stream: Arc::clone(stream), origin: Origin::Taken(owner) }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if bind(self.stream.context()).is_err() {
            return;
        }
        // SAFETY: every handle is gone, and compute is ordered after all that used the memory: it is freed in compute's order.
        // Memory of the pool would be freed at once by cuMemFree; of other memory, that waits for the device.
        unsafe {
            match &self.origin {
                Origin::Pool => _ = sys::cuMemFreeAsync(self.pointer, self.stream.cu_stream()),
                Origin::Plain => _ = sys::cuMemFree_v2(self.pointer),
                Origin::Taken(owner) => owner.release_after(&self.stream),
            }
        }
    }
}

fn memory(memory: &dyn Memory) -> Result<&CudaMemory> {
    memory.as_any().downcast_ref().ok_or_else(|| Error::Device {
        what: "buffer",
        got: format!("{memory:?}"),
        wanted: "memory of a CUDA device".into(),
    })
}

/// Where a buffer lies, and whose memory it is.
pub(crate) fn pointer(buffer: &Buffer) -> Result<(u64, &Arc<CudaContext>)> {
    let memory = memory(buffer.memory())?;
    Ok((memory.pointer + buffer.offset() as u64, memory.stream.context()))
}

/// The same of a buffer that may be written.
pub(crate) fn pointer_mut(buffer: &mut BufferMut) -> Result<(u64, &Arc<CudaContext>)> {
    let offset = buffer.offset() as u64;
    let memory = memory(buffer.memory())?;
    Ok((memory.pointer + offset, memory.stream.context()))
}
