//! Device memory from the driver's stream-ordered pool.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::check;
use crate::memory::{Buffer, BufferMut, Memory};
use crate::{Error, Result};

/// One allocation.
pub(crate) struct CudaMemory {
    pointer: sys::CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on CUDA device {}", self.len, self.context.ordinal())
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
    /// Allocates on the stream, and waits until it has happened: it is rare, and other streams may use the memory at once.
    pub(crate) fn new(context: &Arc<CudaContext>, stream: sys::CUstream, len: usize) -> Result<Self> {
        let failed = |error: Error| Error::OutOfMemory {
            device: format!("CUDA device {}", context.ordinal()),
            bytes: len,
            reason: error.to_string(),
        };
        let mut pointer = 0;
        // SAFETY: the context is current on this thread; the pointer is written by the call.
        unsafe {
            check("cuMemAllocAsync", sys::cuMemAllocAsync(&mut pointer, len.max(1), stream)).map_err(failed)?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream)).map_err(failed)?;
        }
        Ok(Self { pointer, len, context: Arc::clone(context) })
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: every handle is gone, and compute is ordered after all that used it; the driver waits for the device.
            unsafe {
                sys::cuMemFree_v2(self.pointer);
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
    Ok((memory.pointer + buffer.offset() as u64, &memory.context))
}

/// The same of a buffer that may be written.
pub(crate) fn pointer_mut(buffer: &mut BufferMut) -> Result<(u64, &Arc<CudaContext>)> {
    let offset = buffer.offset() as u64;
    let memory = memory(buffer.memory())?;
    Ok((memory.pointer + offset, &memory.context))
}
