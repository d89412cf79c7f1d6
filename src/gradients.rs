//! Sums of gradients over a group, in buckets: data parallelism beside tensor parallelism.

use std::sync::Arc;

use crate::comm::{Reduce, ReduceOp};
use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::group::Group;
use crate::memory::BufferMut;
use crate::parameter::Parameter;
use crate::{Error, Result};

/// What becomes of the gradients of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Their sum.
    Sum,
    /// Their mean: the sum over the ranks, divided by their number.
    Mean,
}

/// Sums the gradients of parameters over a group while the rest of the backward pass still runs.
///
/// Parameters are told in the order in which their gradients become ready, last layer first. Their gradients fill buckets; a
/// full bucket is reduced at once, beside whatever is computed next. [`finish`](Self::finish) waits and writes the results into
/// the parameters' gradients. With gradient accumulation, only the last micro-batch's backward pass calls
/// [`ready`](Self::ready). All ranks do the same in the same order. (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.)
///
/// ```
/// use async_tensor_parallel::{Combine, GradientBuckets, LinearMode, LocalWorld, Placement, TensorParallelColumnLinear};
///
/// LocalWorld::new(2)?.run(|dp| {
///     let alone = dp.split(Some(dp.rank()), 0)?.expect("a group of one");
///     let layer = TensorParallelColumnLinear::<f32>::builder(1, 1).mode(LinearMode::AllReduce).build(&alone)?;
///     let x = alone.tensor(&[1.0 + dp.rank() as f32], &[1, 1], Placement::Replicated)?;
///     let (_, saved) = layer.forward(&x)?;
///     layer.backward(saved, &alone.tensor(&[1.0], &[1, 1], Placement::Features)?)?;
///     let mut buckets = GradientBuckets::new(dp, &[layer.weight()], 1 << 20)?;
///     buckets.ready(0, layer.weight())?;
///     buckets.finish(&[layer.weight()], Combine::Mean)?;
///     assert_eq!(layer.weight_grad()?.to_vec()?, [1.5]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientBuckets {
    group: Group,
    dtype: crate::DType,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
}

/// Where a parameter's gradient lies.
#[derive(Debug)]
struct Slot {
    bucket: usize,
    /// Bytes from the bucket's start.
    start: usize,
    len: usize,
    ready: bool,
}

#[derive(Debug)]
struct Bucket {
    len: usize,
    parameters: usize,
    missing: usize,
    filling: Option<BufferMut>,
    reducing: Option<Reduce>,
}

impl GradientBuckets {
    /// Buckets of at most `bucket_bytes` bytes (or one parameter, if that is larger) for `parameters`, in the order in which
    /// their gradients become ready.
    ///
    /// # Errors
    /// None today; what the device reports, if buckets are ever made beforehand.
    pub fn new<T: Float>(group: &Group, parameters: &[&Parameter<T>], bucket_bytes: usize) -> Result<Self> {
        let dtype = T::Accumulator::DTYPE;
        let (mut slots, mut buckets) = (Vec::with_capacity(parameters.len()), Vec::<Bucket>::new());
        for parameter in parameters {
            let len = parameter.value().shape().elements() * dtype.size();
            match buckets.last_mut() {
                Some(last) if last.len + len <= bucket_bytes => {}
                _ => buckets.push(Bucket { len: 0, parameters: 0, missing: 0, filling: None, reducing: None }),
            }
            let bucket = buckets.len() - 1;
            let last = &mut buckets[bucket];
            slots.push(Slot { bucket, start: last.len, len, ready: false });
            last.len += len;
            last.parameters += 1;
            last.missing += 1;
        }
        Ok(Self { group: group.clone(), dtype, slots, buckets })
    }

    /// The number of buckets.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// The gradient of parameter number `index` is complete. Starts to reduce its bucket if it was the last of it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a number that is none, one that was told already, or a parameter of another size or dtype;
    /// errors of the device and of communication.
    pub fn ready<T: Float>(&mut self, index: usize, parameter: &Parameter<T>) -> Result<()> {
        let gradient = parameter.grad()?;
        let count = self.slots.len();
        let wrong = |got: String, wanted: String| Error::Argument { what: "ready gradient", got, wanted };
        let slot = self.slots.get_mut(index);
        let slot = slot.ok_or_else(|| wrong(format!("number {index}"), format!("one of {count} parameters")))?;
        if slot.ready {
            return Err(wrong(format!("number {index} again"), "each gradient once before finish".into()));
        }
        if gradient.buffer().len() != slot.len || T::Accumulator::DTYPE != self.dtype {
            let got = format!("number {index} of {} bytes, {:?}", gradient.buffer().len(), T::Accumulator::DTYPE);
            return Err(wrong(got, format!("{} bytes, {:?}, as at the start", slot.len, self.dtype)));
        }
        let bucket = &mut self.buckets[slot.bucket];
        let device = self.group.device();
        if bucket.filling.is_none() {
            bucket.filling = Some(device.allocate(bucket.len)?);
        }
        if let Some(buffer) = &mut bucket.filling {
            buffer.within(slot.start..slot.start + slot.len, |part| device.copy(gradient.buffer(), part))?;
        }
        slot.ready = true;
        bucket.missing -= 1;
        if bucket.missing == 0
            && let Some(full) = bucket.filling.take()
        {
            bucket.reducing = Some(self.group.start_all_reduce(self.dtype, ReduceOp::Sum, &full.freeze())?);
        }
        Ok(())
    }

    /// Waits for all buckets and writes the combined gradients into `parameters`, the same as at the start. The buckets can be
    /// used again then.
    ///
    /// # Errors
    /// [`Error::Argument`] where a gradient was not told, or the parameters are others; errors of communication.
    pub fn finish<T: Float>(&mut self, parameters: &[&Parameter<T>], combine: Combine) -> Result<()> {
        let wrong = |got: String, wanted: &str| Error::Argument { what: "finish", got, wanted: wanted.into() };
        if parameters.len() != self.slots.len() {
            return Err(wrong(format!("{} parameters", parameters.len()), "as many as at the start"));
        }
        if let Some(index) = self.slots.iter().position(|slot| !slot.ready) {
            return Err(wrong(format!("gradient number {index} not ready"), "all of them"));
        }
        let factor = match combine {
            Combine::Sum => 1.0,
            Combine::Mean => 1.0 / self.group.world_size() as f64,
        };
        let (device, dtype) = (Arc::clone(self.group.device()), self.dtype);
        let mut next = 0;
        for (index, bucket) in self.buckets.iter_mut().enumerate() {
            let Some(reducing) = bucket.reducing.take() else { continue };
            let sum = reducing.wait()?;
            while let Some(slot) = self.slots.get_mut(next).filter(|slot| slot.bucket == index) {
                let part = sum.slice(slot.start..slot.start + slot.len)?;
                parameters[next].accumulate(|out, _| write(&*device, dtype, factor, &part, out))?;
                slot.ready = false;
                next += 1;
            }
            bucket.missing = bucket.parameters;
        }
        Ok(())
    }
}

/// `out = factor · part`.
fn write(
    device: &dyn Device,
    dtype: crate::DType,
    factor: f64,
    part: &crate::Buffer,
    out: &mut BufferMut,
) -> Result<()> {
    if factor == 1.0 {
        return device.copy(part, out);
    }
    device.zero(out)?;
    device.scaled_add(factor, (part, dtype), (out, dtype))
}

/// Sums the gradients of parameters that every rank holds whole while it sees only its own rows: norms, and whatever else is
/// replicated under ReduceScatter mode. One bucket, one reduction. (A row layer's bias needs none: its gradient is whole.)
///
/// # Errors
/// Errors of the device and of communication.
pub fn sum_replicated_gradients<T: Float>(group: &Group, parameters: &[&Parameter<T>]) -> Result<()> {
    let mut buckets = GradientBuckets::new(group, parameters, usize::MAX)?;
    for (index, parameter) in parameters.iter().enumerate() {
        buckets.ready(index, parameter)?;
    }
    buckets.finish(parameters, Combine::Sum)
}
