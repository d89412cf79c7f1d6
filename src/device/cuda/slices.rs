//! Tensors over cudarc's own slices, for programs that have their buffers from there.
//!
//! Nobody's event tracking is relied on, and nobody's is switched: where a slice crosses the border, this device's compute stream
//! and the slice's own stream are ordered by events, in the direction that the data goes. Users of cudarc's tracking see what
//! was read and written there, too.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, sys};

use super::events::Event;
use super::memory::{CudaMemory, Owner, pointer};
use super::{CudaDevice, check, foreign};
use crate::device::Device;
use crate::dtype::Element;
use crate::memory::Buffer;
use crate::tensor::{Placement, Shape, Tensor};
use crate::{Error, Result};

fn cuda(device: &Arc<dyn Device>) -> Result<&CudaDevice> {
    let any: &dyn Any = &**device;
    any.downcast_ref().ok_or_else(|| Error::Device {
        what: "tensor of a cudarc slice",
        got: device.describe(),
        wanted: "a CUDA device".into(),
    })
}

fn ordering(error: DriverError) -> Error {
    foreign("cuStreamWaitEvent", &error)
}

impl CudaDevice {
    fn same_context(&self, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.context.cu_ctx() {
            return Ok(());
        }
        Err(Error::Device {
            what: "cudarc slice",
            got: format!("CUDA device {}", stream.context().ordinal()),
            wanted: self.describe(),
        })
    }
}

fn shaped(len: usize, dims: &[usize]) -> Result<Shape> {
    let shape = Shape::new(dims)?;
    if shape.elements() == len {
        return Ok(shape);
    }
    Err(Error::Shape { what: "tensor", got: shape, wanted: format!("{len} elements, as the slice has") })
}

/// A slice that a tensor has taken over.
struct Taken<T>(CudaSlice<T>);

impl<T: DeviceRepr + Send + Sync + 'static> Owner for Taken<T> {
    fn release_after(&self, compute: &CudaStream) {
        // By the driver itself: cudarc's calls return errors that others have left. A stream that fails has nothing under way.
        let recorded = Event::new(compute.context(), false).and_then(|event| {
            event.record(compute.cu_stream())?;
            Ok(event)
        });
        if let Ok(event) = recorded {
            // SAFETY: the event and the slice's stream are alive, and of one context, which is bound.
            unsafe { sys::cuStreamWaitEvent(self.0.stream().cu_stream(), event.raw(), 0) };
        }
    }
}

impl<T: Element + DeviceRepr> Tensor<T> {
    /// A tensor that takes over `slice` (row-major), without a copy; feature `cuda`. The slice is dropped when the last tensor
    /// over it is: its memory goes back where it came from, after all that used it here.
    ///
    /// What was queued on the slice's stream, or by cudarc's tracking on others, comes before what is computed from the tensor.
    ///
    /// # Errors
    /// [`Error::Shape`] where the slice has not the shape's number of elements; [`Error::Device`] where `device` is none of CUDA or
    /// another one; [`Error::Foreign`] with what the driver says.
    pub fn from_cuda(
        device: &Arc<dyn Device>,
        slice: CudaSlice<T>,
        dims: &[usize],
        placement: Placement,
    ) -> Result<Self> {
        let shape = shaped(slice.len(), dims)?;
        let cuda = cuda(device)?;
        cuda.same_context(slice.stream())?;
        cuda.stream.join(slice.stream()).map_err(ordering)?;
        let pointer = slice.device_ptr(&cuda.stream).0;
        let bytes = slice.len() * T::DTYPE.size();
        let memory = CudaMemory::taken(&cuda.stream, pointer, bytes, Box::new(Taken(slice)));
        Ok(Self::from_buffer(device, Buffer::of(Box::new(memory)), shape, placement))
    }

    /// A tensor with a copy of a cudarc slice or view (row-major), made on the device; feature `cuda`.
    ///
    /// # Errors
    /// As [`Tensor::from_cuda`].
    pub fn from_cuda_view(
        device: &Arc<dyn Device>,
        view: &impl DevicePtr<T>,
        dims: &[usize],
        placement: Placement,
    ) -> Result<Self> {
        let shape = shaped(view.len(), dims)?;
        let cuda = cuda(device)?;
        cuda.same_context(view.stream())?;
        let bytes = view.len() * T::DTYPE.size();
        let buffer = device.allocate(bytes)?.freeze();
        if bytes > 0 {
            cuda.stream.join(view.stream()).map_err(ordering)?;
            let (source, _read) = view.device_ptr(&cuda.stream);
            let target = pointer(&buffer)?.0;
            // SAFETY: both ranges are `bytes` long, and alive until the stream has passed: the view's stream waits below, before
            // its owner can queue anything else there.
            check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, cuda.stream()) })?;
        }
        view.stream().join(&cuda.stream).map_err(ordering)?;
        Ok(Self::from_buffer(device, buffer, shape, placement))
    }

    /// Copies the values into a cudarc slice or view of as many elements, on the device; feature `cuda`. What is queued on the
    /// slice's stream from now on finds them there.
    ///
    /// # Errors
    /// As [`Tensor::from_cuda`].
    pub fn copy_to_cuda(&self, target: &mut impl DevicePtrMut<T>) -> Result<()> {
        let bytes = shaped(target.len(), self.shape())?.elements() * T::DTYPE.size();
        let cuda = cuda(self.device())?;
        cuda.same_context(target.stream())?;
        let stream = Arc::clone(target.stream());
        if bytes > 0 {
            cuda.stream.join(&stream).map_err(ordering)?;
            let source = pointer(self.buffer())?.0;
            let (target, _written) = target.device_ptr_mut(&cuda.stream);
            // SAFETY: as above; nobody else may write the target while it is borrowed, and its stream waits below.
            check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, cuda.stream()) })?;
        }
        stream.join(&cuda.stream).map_err(ordering)
    }

    /// Lends the values as a cudarc slice, without a copy; feature `cuda`. The slice's stream is the device's compute stream: what
    /// `read` queues there is in order; another stream has to wait for that one first, and that one for it before `read`
    /// returns. It is to be read only.
    ///
    /// # Errors
    /// [`Error::Device`] where the tensor is not on a CUDA device.
    pub fn with_cuda<R>(&self, read: impl FnOnce(&CudaSlice<T>) -> R) -> Result<R> {
        /// Gives the memory back to its owner, after a panic as well.
        struct Lent<T>(Option<CudaSlice<T>>);
        impl<T> Drop for Lent<T> {
            fn drop(&mut self) {
                self.0.take().map(CudaSlice::leak);
            }
        }
        let cuda = cuda(self.device())?;
        // What cudarc would panic on below is found here: an error that somebody has left, a device that fails.
        cuda.bind()?;
        Event::new(&cuda.context, false)?;
        let pointer = pointer(self.buffer())?.0;
        // SAFETY: the range is alive and initialised as T in the stream's order while `self` is borrowed, and it is not freed by
        // the slice.
        let slice = unsafe { cuda.stream.upgrade_device_ptr(pointer, self.shape().elements()) };
        let lent = Lent(Some(slice));
        lent.0.as_ref().map(read).ok_or_else(|| Error::Argument {
            what: "slice",
            got: "none".into(),
            wanted: "the tensor's".into(),
        })
    }
}
