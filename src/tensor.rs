//! Tensors: a device buffer with a shape and a placement, cheap to clone and immutable once shared.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::{DType, Element};
use crate::memory::{Buffer, BufferMut};
use crate::{Error, Result};

/// A tensor's dimensions, one to eight of them, held inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; Shape::MAX_DIMS],
    count: usize,
}

impl Shape {
    /// The most dimensions that a tensor can have.
    pub const MAX_DIMS: usize = 8;

    /// A shape of the given dimensions.
    ///
    /// # Errors
    /// [`Error::Argument`] for no or more than eight dimensions, or more elements than `isize::MAX`.
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.is_empty() || dims.len() > Self::MAX_DIMS {
            return Err(Error::Argument {
                what: "number of dimensions",
                got: format!("{} ({dims:?})", dims.len()),
                wanted: "1 to 8".into(),
            });
        }
        let largest = dims.iter().try_fold(1usize, |product, dim| product.checked_mul((*dim).max(1)));
        if largest.is_none_or(|product| product > isize::MAX as usize / 8) {
            return Err(Error::Argument {
                what: "shape",
                got: format!("{dims:?}"),
                wanted: "a tensor that fits the address space".into(),
            });
        }
        let mut shape = Self { dims: [1; Self::MAX_DIMS], count: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.iter().product()
    }

    /// The last dimension: features.
    pub fn features(&self) -> usize {
        self.dims[self.count - 1]
    }

    /// The product of all dimensions but the last: rows, when the tensor is seen as a matrix.
    pub fn rows(&self) -> usize {
        self[..self.count - 1].iter().product()
    }

    /// The same shape with another last dimension.
    pub fn with_features(mut self, features: usize) -> Self {
        self.dims[self.count - 1] = features;
        self
    }

    /// The first dimension where there are at least two, else 1: what ReduceScatter divides over the ranks.
    pub fn leading(&self) -> usize {
        if self.count > 1 { self.dims[0] } else { 1 }
    }

    /// The same shape with another first dimension; a vector becomes a matrix unless `leading` is 1.
    pub fn with_leading(mut self, leading: usize) -> Self {
        if self.count > 1 {
            self.dims[0] = leading;
        } else if leading != 1 {
            self.dims[1] = self.dims[0];
            self.dims[0] = leading;
            self.count = 2;
        }
        self
    }

    /// Rows that one unit of the first dimension holds.
    pub fn rows_per_leading(&self) -> usize {
        if self.count > 1 { self[1..self.count - 1].iter().product() } else { 1 }
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.count]
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// How a tensor is spread over the ranks of a group. Layers check it, so that a sum that was never reduced, or was
/// reduced twice, is an error and not a wrong gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank holds the same whole tensor.
    Replicated,
    /// Each rank holds its own rows (a part of the first dimension), in rank order.
    Rows,
    /// Each rank holds its own features (a part of the last dimension), in rank order.
    Features,
    /// Each rank holds a summand of the whole shape: a sum over ranks that has not been formed yet.
    Partial,
}

/// A tensor of `T` on a device: row-major, contiguous, immutable.
///
/// Cloning shares the buffer. Values are ordered on the device's compute queue: on a GPU a tensor may still be in the
/// making when it is handed out, and all that reads it through this crate comes after.
#[derive(Clone)]
pub struct Tensor<T: Element> {
    buffer: Buffer,
    shape: Shape,
    placement: Placement,
    device: Arc<dyn Device>,
    _element: PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// A tensor with a copy of `data` (row-major) on `device`.
    ///
    /// # Errors
    /// [`Error::Shape`] where `data` has not the shape's number of elements; what the device reports.
    pub fn from_slice(device: &Arc<dyn Device>, data: &[T], dims: &[usize], placement: Placement) -> Result<Self> {
        let shape = Shape::new(dims)?;
        if shape.elements() != data.len() {
            return Err(Error::Shape { what: "tensor", got: shape, wanted: format!("{} elements", data.len()) });
        }
        let mut buffer = device.allocate(data.len() * T::DTYPE.size())?;
        device.upload(bytemuck::cast_slice(data), &mut buffer)?;
        Ok(Self::from_buffer(device, buffer.freeze(), shape, placement))
    }

    /// A tensor over `buffer`, which must hold exactly the shape's elements.
    pub(crate) fn from_buffer(device: &Arc<dyn Device>, buffer: Buffer, shape: Shape, placement: Placement) -> Self {
        debug_assert_eq!(buffer.len(), shape.elements() * T::DTYPE.size());
        Self { buffer, shape, placement, device: Arc::clone(device), _element: PhantomData }
    }

    /// Its dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How it is spread over the ranks.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Its memory.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Where it lives.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        T::DTYPE
    }

    /// The same values under another placement. This moves no data: it is the caller's word for how the ranks' tensors
    /// belong together, for tensors that were computed outside this crate.
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// The same values under another shape of as many elements.
    ///
    /// # Errors
    /// [`Error::Shape`] where the number of elements differs.
    pub fn reshape(mut self, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        if shape.elements() != self.shape.elements() {
            return Err(Error::Shape {
                what: "reshaped tensor",
                got: shape,
                wanted: format!("{} elements, as in {}", self.shape.elements(), self.shape),
            });
        }
        self.shape = shape;
        Ok(self)
    }

    /// A copy of the values, row-major. Waits until they have been computed.
    ///
    /// # Errors
    /// What the device reports.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.shape.elements()];
        self.copy_to_slice(&mut values)?;
        Ok(values)
    }

    /// Copies the values, row-major, into `values`. Waits until they have been computed.
    ///
    /// # Errors
    /// [`Error::Shape`] where the length differs; what the device reports.
    pub fn copy_to_slice(&self, values: &mut [T]) -> Result<()> {
        if values.len() != self.shape.elements() {
            return Err(Error::Shape { what: "tensor", got: self.shape, wanted: format!("{} elements", values.len()) });
        }
        self.device.download(&self.buffer, bytemuck::cast_slice_mut(values))
    }

    /// The right to write, for a tensor that nobody else holds; a copy of it otherwise.
    pub(crate) fn into_buffer_mut(self) -> Result<BufferMut> {
        let Self { buffer, device, .. } = self;
        match buffer.try_into_mut() {
            Ok(unique) => Ok(unique),
            Err(shared) => {
                let mut copy = device.allocate(shared.len())?;
                device.copy(&shared, &mut copy)?;
                Ok(copy)
            }
        }
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}{:?}, {:?}, {})", T::DTYPE, self.shape, self.placement, self.device.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_features_of_any_number_of_dimensions() {
        let shape = |dims: &[usize]| Shape::new(dims).unwrap();
        assert_eq!((shape(&[5]).rows(), shape(&[5]).features(), shape(&[5]).leading()), (1, 5, 1));
        assert_eq!((shape(&[2, 3, 4]).rows(), shape(&[2, 3, 4]).rows_per_leading()), (6, 3));
        assert_eq!(&*shape(&[5]).with_leading(3), [3, 5]);
        assert_eq!(&*shape(&[5]).with_leading(1), [5]);
        assert_eq!(&*shape(&[2, 3, 4, 5, 6]).with_leading(8).with_features(1), [8, 3, 4, 5, 1]);
        assert_eq!(shape(&[0, 3]).elements(), 0);
    }

    #[test]
    fn absurd_shapes_are_refused() {
        assert!(Shape::new(&[]).is_err());
        assert!(Shape::new(&[1; 9]).is_err());
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(Shape::new(&[0, usize::MAX, 2]).is_err());
    }
}
