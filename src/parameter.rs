//! A layer's weights and their gradients.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::memory::BufferMut;
use crate::tensor::{Placement, Tensor};
use crate::{Error, Result};

/// A parameter of a layer: its value, and a gradient that accumulates in f32 (f64 for f64 parameters) over micro-batches
/// until [`Parameter::zero_grad`] ("main grad").
#[derive(Debug)]
pub struct Parameter<T: Float> {
    name: &'static str,
    device: Arc<dyn Device>,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T: Float> {
    value: Tensor<T>,
    gradient: Option<Tensor<T::Accumulator>>,
    /// Whether the gradient is zero, whatever its memory holds: the next addition overwrites it.
    zero: bool,
}

impl<T: Float> Parameter<T> {
    pub(crate) fn new(name: &'static str, value: Tensor<T>) -> Self {
        let device = Arc::clone(value.device());
        Self { name, device, state: Mutex::new(State { value, gradient: None, zero: true }) }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it is: `"weight"` or `"bias"`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// This rank's values. Shares memory; no copy.
    pub fn value(&self) -> Tensor<T> {
        self.lock().value.clone()
    }

    /// Replaces this rank's values, as an optimizer does.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shape differs.
    pub fn set(&self, value: Tensor<T>) -> Result<()> {
        let mut state = self.lock();
        if value.shape() != state.value.shape() {
            let wanted = state.value.shape().to_string();
            return Err(Error::Shape { what: self.name, got: *value.shape(), wanted });
        }
        state.value = value.with_placement(state.value.placement());
        Ok(())
    }

    /// The gradient accumulated so far. Shares memory; while it is held, the next backward pass works on a copy.
    ///
    /// # Errors
    /// What the device reports.
    pub fn grad(&self) -> Result<Tensor<T::Accumulator>> {
        let mut state = self.lock();
        let zero = std::mem::replace(&mut state.zero, false);
        let mut buffer = Self::take_gradient(&self.device, &mut state)?;
        if zero {
            self.device.zero(&mut buffer)?;
        }
        Ok(Self::put_gradient(&self.device, &mut state, buffer).clone())
    }

    /// Makes the gradient zero.
    pub fn zero_grad(&self) {
        self.lock().zero = true;
    }

    /// `value += factor · gradient`, on the device: with a negative factor, a step of gradient descent.
    ///
    /// # Errors
    /// What the device reports.
    pub fn add_grad(&self, factor: f64) -> Result<()> {
        let gradient = self.grad()?;
        let mut state = self.lock();
        let placement = state.value.placement();
        let shape = *state.value.shape();
        // The lock keeps others away while the value is out; on an error the old one is put back.
        let mut buffer = state.value.clone().into_buffer_mut()?;
        let source = (gradient.buffer(), T::Accumulator::DTYPE);
        self.device.scaled_add(factor, source, (&mut buffer, T::DTYPE))?;
        state.value = Tensor::from_buffer(&self.device, buffer.freeze(), shape, placement);
        Ok(())
    }

    /// Lets `add` write the gradient: it is told whether to add to what is there or to overwrite it.
    pub(crate) fn accumulate(&self, add: impl FnOnce(&mut BufferMut, bool) -> Result<()>) -> Result<()> {
        let mut state = self.lock();
        let mut buffer = Self::take_gradient(&self.device, &mut state)?;
        let outcome = add(&mut buffer, !state.zero);
        Self::put_gradient(&self.device, &mut state, buffer);
        if outcome.is_ok() {
            state.zero = false;
        }
        outcome
    }

    fn take_gradient(device: &Arc<dyn Device>, state: &mut State<T>) -> Result<BufferMut> {
        match state.gradient.take() {
            Some(gradient) => gradient.into_buffer_mut(),
            None => device.allocate(state.value.shape().elements() * T::Accumulator::DTYPE.size()),
        }
    }

    fn put_gradient<'a>(
        device: &Arc<dyn Device>,
        state: &'a mut State<T>,
        buffer: BufferMut,
    ) -> &'a Tensor<T::Accumulator> {
        let (shape, placement) = (*state.value.shape(), state.value.placement());
        state.gradient.insert(Tensor::from_buffer(device, buffer.freeze(), shape, placement))
    }

    /// A tensor of the parameter's part of a larger one is never meant by its placement alone: weights are sharded along
    /// either dimension, and the layer knows which.
    pub(crate) const PLACEMENT: Placement = Placement::Replicated;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;
    use crate::dtype::DType;

    #[test]
    fn gradients_accumulate_and_outlive_their_readers() {
        let device: Arc<dyn Device> = Arc::new(Cpu::new(1));
        let value = Tensor::from_slice(&device, &[1f32, 2.0], &[2], Placement::Replicated).unwrap();
        let parameter = Parameter::new("weight", value);
        assert_eq!(parameter.grad().unwrap().to_vec().unwrap(), [0.0, 0.0]);
        let add = |value: f32| {
            let source = Tensor::from_slice(&device, &[value; 2], &[2], Placement::Replicated).unwrap();
            parameter
                .accumulate(|out, accumulate| {
                    if !accumulate {
                        device.zero(out)?;
                    }
                    device.scaled_add(1.0, (source.buffer(), DType::F32), (out, DType::F32))
                })
                .unwrap();
        };
        add(3.0);
        let early = parameter.grad().unwrap();
        add(4.0);
        assert_eq!(early.to_vec().unwrap(), [3.0, 3.0]);
        assert_eq!(parameter.grad().unwrap().to_vec().unwrap(), [7.0, 7.0]);
        let old = parameter.value();
        parameter.add_grad(-0.5).unwrap();
        assert_eq!(parameter.value().to_vec().unwrap(), [-2.5, -1.5]);
        assert_eq!(old.to_vec().unwrap(), [1.0, 2.0]);
        parameter.zero_grad();
        add(1.0);
        assert_eq!(parameter.grad().unwrap().to_vec().unwrap(), [1.0, 1.0]);
        let wrong = Tensor::from_slice(&device, &[0f32; 3], &[3], Placement::Replicated).unwrap();
        assert!(matches!(parameter.set(wrong), Err(Error::Shape { what: "weight", .. })));
    }
}
