//! An output head and its cross entropy, some rows at a time: the logits exist nowhere whole, not even one rank's.

use std::ops::Range;

use crate::cross_entropy::ShardedCrossEntropy;
use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::linear::column::TensorParallelColumnLinear;
use crate::memory::Buffer;
use crate::mode::LinearMode;
use crate::tensor::{Placement, Tensor};
use crate::{Error, Result};

impl ShardedCrossEntropy {
    /// The losses of `head(x)`, and the gradient of `x`; those of the head's weight and bias add up in the head. Of the
    /// `[tokens, classes / n]` logits and their gradient, `rows_at_a_time` rows a rank exist at a time, where `head.forward`,
    /// [`forward`](Self::forward) and [`backward`](Self::backward) need both whole; the arithmetic is the same. The gradient is formed
    /// with the loss (as in Liger-Kernel, Hsu et al. 2024): `grad` says how much each token's loss counts, say 1 / tokens for
    /// the mean.
    ///
    /// `x` is `[b, …, in_features]`, placed as the head's mode has it; `targets` and `grad` have one element a token of the whole and
    /// are the same on every rank. The losses have the shape of `targets`.
    ///
    /// In ReduceScatter mode a piece is `rows_at_a_time` rows of every rank: the head gathers as many, and its overlap hides each
    /// piece's communication by itself. Backward gathers again, as `recompute_all_gather` does.
    ///
    /// # Errors
    /// [`Error::Argument`] where `rows_at_a_time` is 0, or for a target that is no class, with its position; [`Error::Shape`] and
    /// [`Error::Placement`] for what does not fit; errors of communication.
    pub fn of_linear<T: Float>(
        &self,
        head: &TensorParallelColumnLinear<T>,
        x: &Tensor<T>,
        targets: &Tensor<i64>,
        grad: &Tensor<T::Accumulator>,
        rows_at_a_time: usize,
    ) -> Result<(Tensor<T::Accumulator>, Tensor<T>)> {
        let group = head.group();
        let (device, n) = (&**group.device(), group.world_size());
        if rows_at_a_time == 0 {
            return Err(Error::Argument { what: "rows_at_a_time", got: "0".into(), wanted: "at least 1".into() });
        }
        // Ranks' rows lie one after the other.
        let ranks = if head.config().mode == LinearMode::ReduceScatter { n } else { 1 };
        let (own, width) = (x.shape().rows(), x.shape().features());
        let tokens = own * ranks;
        for (what, shape) in [("targets", targets.shape()), ("grad", grad.shape())] {
            if shape.elements() != tokens {
                let wanted = format!("{tokens} elements, one for each token of {} on {ranks} ranks", x.shape());
                return Err(Error::Shape { what, got: *shape, wanted });
            }
        }
        self.check_targets(group, targets)?;
        let accumulator = T::Accumulator::DTYPE.size();
        let mut losses = device.allocate(tokens * accumulator)?;
        let mut dx = device.allocate(x.buffer().len())?;
        let mut start = 0;
        while start < own {
            let piece = start..own.min(start + rows_at_a_time);
            let rows = |rank: usize| rank * own + piece.start..rank * own + piece.end;
            let bytes = scaled(&piece, width * T::DTYPE.size());
            let own_x = x.buffer().slice(bytes.clone())?;
            let place = |buffer, dims: &[usize], placement| -> Result<Tensor<T>> {
                Ok(Tensor::from_buffer(group.device(), buffer, crate::Shape::new(dims)?, placement))
            };
            let own_x = place(own_x, &[piece.len(), width], x.placement())?;
            let (logits, saved_x) = head.forward(&own_x)?;
            let some = crate::Shape::new(&[piece.len() * ranks])?;
            let some_targets = collect(device, targets.buffer(), size_of::<i64>(), (0..ranks).map(rows))?;
            let some_targets = Tensor::from_buffer(group.device(), some_targets, some, targets.placement());
            let (loss, saved) = self.forward(group, &logits, &some_targets)?;
            drop(logits);
            for rank in 0..ranks {
                let from = scaled(&(rank * piece.len()..(rank + 1) * piece.len()), accumulator);
                let from = loss.buffer().slice(from)?;
                losses.within(scaled(&rows(rank), accumulator), |to| device.copy(&from, to))?;
            }
            let some_grad = collect(device, grad.buffer(), accumulator, (0..ranks).map(rows))?;
            let some_grad = Tensor::from_buffer(group.device(), some_grad, some, grad.placement());
            let dlogits = self.backward(group, saved, &some_grad)?;
            let some_dx = head.backward(saved_x, &dlogits)?;
            dx.within(bytes, |to| device.copy(some_dx.buffer(), to))?;
            start = piece.end;
        }
        let losses = Tensor::from_buffer(group.device(), losses.freeze(), *targets.shape(), Placement::Replicated);
        Ok((losses, Tensor::from_buffer(group.device(), dx.freeze(), *x.shape(), x.placement())))
    }
}

fn scaled(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start * by..range.end * by
}

/// The ranges, of elements of `size` bytes, together.
fn collect(
    device: &dyn Device,
    from: &Buffer,
    size: usize,
    mut ranges: impl ExactSizeIterator<Item = Range<usize>> + Clone,
) -> Result<Buffer> {
    if ranges.len() == 1 {
        return from.slice(scaled(&ranges.next().unwrap_or_default(), size));
    }
    let mut out = device.allocate(ranges.clone().map(|range| range.len() * size).sum())?;
    let mut at = 0;
    for range in ranges {
        let source = from.slice(scaled(&range, size))?;
        out.within(at..at + source.len(), |out| device.copy(&source, out))?;
        at += source.len();
    }
    Ok(out.freeze())
}
