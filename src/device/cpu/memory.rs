//! Host memory: the one place where buffers become slices.
//!
//! This is a foreign edge: matmul kernels and MPI read and write this memory through addresses, from several threads.
//! What keeps it sound is the ownership of [`Buffer`] and [`BufferMut`]: no two handles to overlapping bytes exist of
//! which one may write.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ptr::NonNull;

use crate::memory::{Buffer, BufferMut, Memory};
use crate::{Error, Result};

/// Alignment of every allocation: a cache line, and the widest vector.
const ALIGNMENT: usize = 64;

/// One allocation of host memory, zeroed when made.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is owned by this value and is reached only through the buffers' ownership (see the module).
unsafe impl Send for HostMemory {}
// SAFETY: as above; `&HostMemory` alone gives no access to the bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let refused = |reason: &str| Error::OutOfMemory { device: "cpu".into(), bytes: len, reason: reason.into() };
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT).map_err(|_| refused("larger than memory"))?;
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        Ok(Self { start: NonNull::new(start).ok_or_else(|| refused("the allocator refused"))?, len })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.len.max(1), ALIGNMENT).expect("the layout of `new`");
        // SAFETY: allocated in `new` with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), layout) }
    }
}

impl Memory for HostMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of host memory", self.len)
    }
}

fn host(memory: &dyn Memory) -> Result<&HostMemory> {
    memory.as_any().downcast_ref().ok_or_else(|| Error::Device {
        what: "buffer",
        got: format!("{memory:?}"),
        wanted: "host memory".into(),
    })
}

/// The bytes of a buffer in host memory.
///
/// # Errors
/// [`Error::Device`] where it lives elsewhere.
pub(crate) fn bytes(buffer: &Buffer) -> Result<&[u8]> {
    let memory = host(buffer.memory())?;
    // SAFETY: a buffer's range lies within its allocation, which lives as long as the buffer, is initialised, and has
    // no writer while a `Buffer` to it exists.
    Ok(unsafe { std::slice::from_raw_parts(memory.start.as_ptr().add(buffer.offset()), buffer.len()) })
}

/// The bytes of a unique buffer in host memory.
///
/// # Errors
/// [`Error::Device`] where it lives elsewhere.
pub(crate) fn bytes_mut(buffer: &mut BufferMut) -> Result<&mut [u8]> {
    let memory = host(buffer.memory())?;
    let start = memory.start;
    let (offset, len) = (buffer.offset(), buffer.len());
    // SAFETY: as in `bytes`; a `BufferMut` is the only handle to its range, and it is borrowed uniquely.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(offset), len) })
}

/// The elements of a buffer in host memory.
///
/// # Errors
/// [`Error::Device`] where it lives elsewhere; [`Error::Argument`] where it does not hold whole elements of `T`.
pub(crate) fn elements<T: bytemuck::Pod>(buffer: &Buffer) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes(buffer)?).map_err(|error| misfit(error, buffer.len()))
}

/// The elements of a unique buffer in host memory.
///
/// # Errors
/// As [`elements`].
pub(crate) fn elements_mut<T: bytemuck::Pod>(buffer: &mut BufferMut) -> Result<&mut [T]> {
    let len = buffer.len();
    bytemuck::try_cast_slice_mut(bytes_mut(buffer)?).map_err(|error| misfit(error, len))
}

fn misfit(error: bytemuck::PodCastError, len: usize) -> Error {
    Error::Argument { what: "buffer", got: format!("{len} bytes ({error})"), wanted: "whole, aligned elements".into() }
}
