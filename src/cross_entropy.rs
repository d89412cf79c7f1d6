//! The cross entropy over a sharded vocabulary.

use std::borrow::Borrow;

use crate::comm::ReduceOp;
use crate::device::{CrossEntropyLoss, Matrix, SoftmaxPart};
use crate::dtype::{Element, Float};
use crate::group::Group;
use crate::layout::ShardLayout;
use crate::memory::Buffer;
use crate::tensor::{Placement, Tensor};
use crate::{Error, Result};

/// The cross entropy of logits whose classes are sharded over the ranks. The whole logits exist nowhere: the ranks exchange
/// two numbers a token, its largest logit, and then three sums.
///
/// With `l` the logits of a token over all V classes, `t` its target, `m = max l`, `Z = Σ exp(l)` and ε the label smoothing:
///
/// loss = log Z − (1 − ε) l_t − ε/V Σ l + z · (log Z)²
///
/// dloss/dl_j = (1 + 2 z log Z) exp(l_j) / Z − (1 − ε) \[j = t\] − ε/V
///
/// Everything is computed from `l − m` ("log-sum-exp"), so that no exponential overflows; `log Z = m + log Σ exp(l − m)` is the
/// true one, also in the z-loss (PaLM, Chowdhery et al. 2022, section 5). Losses are f32 (f64 for f64 logits), also for 16-bit
/// logits.
///
/// ```
/// use async_tensor_parallel::{LocalWorld, Placement, ShardedCrossEntropy};
///
/// // Four classes, two a rank: zero logits cost ln 4.
/// LocalWorld::new(2)?.run(|group| {
///     let loss = ShardedCrossEntropy::new(4);
///     let logits = group.tensor(&[0f32; 2], &[1, 2], Placement::Features)?;
///     let target = group.tensor(&[3i64], &[1], Placement::Replicated)?;
///     let (value, saved) = loss.forward(group, &logits, &target)?;
///     assert!((value.to_vec()?[0] - 4f32.ln()).abs() < 1e-6);
///     let grad = loss.backward(group, saved, &group.tensor(&[1f32], &[1], Placement::Replicated)?)?;
///     assert_eq!(grad.to_vec()?, [[0.25, 0.25], [0.25, -0.75]][group.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShardedCrossEntropy {
    loss: CrossEntropyLoss,
}

/// What a forward pass leaves for its backward pass: the logits themselves (shared), and four numbers a token.
#[derive(Debug, Clone)]
pub struct SavedLogits<T: Element> {
    logits: Tensor<T>,
    targets: Tensor<i64>,
    max: Buffer,
    sums: Buffer,
    loss: CrossEntropyLoss,
}

impl ShardedCrossEntropy {
    /// A cross entropy over `classes` classes of the whole. Where the world size n does not divide them, each rank's logits
    /// are `⌈classes / n⌉` wide and the last ranks' last columns are padding, which counts for nothing.
    pub fn new(classes: usize) -> Self {
        Self { loss: CrossEntropyLoss { classes, label_smoothing: 0.0, z_loss: 0.0, ignore_index: None } }
    }

    /// Sets the part ε of the target's weight that all classes share.
    pub fn label_smoothing(mut self, epsilon: f64) -> Self {
        self.loss.label_smoothing = epsilon;
        self
    }

    /// Sets the weight of (log Z)².
    pub fn z_loss(mut self, weight: f64) -> Self {
        self.loss.z_loss = weight;
        self
    }

    /// Sets the target whose tokens have loss and gradient 0.
    pub fn ignore_index(mut self, target: i64) -> Self {
        self.loss.ignore_index = Some(target);
        self
    }

    /// Each token's loss, in the shape of `targets` and on every rank.
    ///
    /// `logits` is `[b, …, classes / n]` ([`Placement::Features`]); `targets` is `[b, …]` and the same on every rank.
    ///
    /// # Errors
    /// [`Error::Shape`] where the logits are not this rank's classes, or not as many rows as targets; [`Error::Placement`];
    /// [`Error::Argument`] for a target that is no class, with its position, and for options that make no sense; errors of
    /// communication.
    pub fn forward<T: Float>(
        &self,
        group: &Group,
        logits: &Tensor<T>,
        targets: &Tensor<i64>,
    ) -> Result<(Tensor<T::Accumulator>, SavedLogits<T>)> {
        let layout = self.check(group, logits, targets)?;
        let (device, accumulator) = (group.device(), T::Accumulator::DTYPE);
        let rows = logits.shape().rows();
        let part = part(group, logits, targets, layout);

        let mut max = device.allocate(rows * accumulator.size())?;
        device.row_max(T::DTYPE, part.logits, part.valid, &mut max)?;
        let max = group.start_all_reduce(accumulator, ReduceOp::Max, &max.freeze())?.wait()?;

        let mut sums = device.allocate(3 * rows * accumulator.size())?;
        device.softmax_sums(&part, &max, &mut sums)?;
        let sums = group.start_all_reduce(accumulator, ReduceOp::Sum, &sums.freeze())?.wait()?;

        let mut losses = device.allocate(rows * accumulator.size())?;
        device.cross_entropy_loss(T::DTYPE, &self.loss, targets.buffer(), &max, &sums, &mut losses)?;
        let losses = Tensor::from_buffer(device, losses.freeze(), *targets.shape(), Placement::Replicated);
        let saved = SavedLogits { logits: logits.clone(), targets: targets.clone(), max, sums, loss: self.loss };
        Ok((losses, saved))
    }

    /// The gradient of this rank's logits, from that of each token's loss (`[b, …]`, the same on every rank). No
    /// communication.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Placement`] where it does not fit; [`Error::Saved`] where it was saved under other options.
    pub fn backward<T: Float>(
        &self,
        group: &Group,
        saved: impl Borrow<SavedLogits<T>>,
        grad_output: &Tensor<T::Accumulator>,
    ) -> Result<Tensor<T>> {
        let SavedLogits { logits, targets, max, sums, loss } = saved.borrow();
        if *loss != self.loss {
            return Err(Error::Saved { got: format!("{loss:?}"), wanted: format!("{:?}", self.loss) });
        }
        replicated("grad_output", grad_output)?;
        if grad_output.shape() != targets.shape() {
            let wanted = format!("{}, as the targets have", targets.shape());
            return Err(Error::Shape { what: "grad_output", got: *grad_output.shape(), wanted });
        }
        let device = group.device();
        let layout = ShardLayout::uneven(self.loss.classes, group.world_size())?;
        let mut out = device.allocate(logits.buffer().len())?;
        let part = part(group, logits, targets, layout);
        device.cross_entropy_grad(&part, &self.loss, max, sums, grad_output.buffer(), &mut out)?;
        Ok(Tensor::from_buffer(device, out.freeze(), *logits.shape(), Placement::Features))
    }

    fn check<T: Float>(&self, group: &Group, logits: &Tensor<T>, targets: &Tensor<i64>) -> Result<ShardLayout> {
        let CrossEntropyLoss { classes, label_smoothing, z_loss, .. } = self.loss;
        let number = |what, got: f64, fits: bool, wanted: &str| {
            if fits { Ok(()) } else { Err(Error::Argument { what, got: got.to_string(), wanted: wanted.into() }) }
        };
        number("classes", classes as f64, classes > 0, "at least 1")?;
        number("label_smoothing", label_smoothing, (0.0..1.0).contains(&label_smoothing), "0 to below 1")?;
        number("z_loss", z_loss, z_loss >= 0.0 && z_loss.is_finite(), "a finite number, not negative")?;
        if logits.placement() != Placement::Features {
            let hint = "; each rank has the logits of its own classes";
            let (got, wanted) = (logits.placement(), Placement::Features);
            return Err(Error::Placement { what: "logits", got, wanted, hint });
        }
        replicated("targets", targets)?;
        let layout = ShardLayout::uneven(classes, group.world_size())?;
        let (features, rows) = (logits.shape().features(), logits.shape().rows());
        if features != layout.largest() || rows != targets.shape().elements() {
            let wanted = format!(
                "[…, {}], this rank's part of {classes} classes, for the {} tokens of targets {}",
                layout.largest(),
                targets.shape().elements(),
                targets.shape()
            );
            return Err(Error::Shape { what: "logits", got: *logits.shape(), wanted });
        }
        self.check_targets(group, targets)?;
        Ok(layout)
    }

    /// Refuses targets that are no class.
    pub(crate) fn check_targets(&self, group: &Group, targets: &Tensor<i64>) -> Result<()> {
        let CrossEntropyLoss { classes, ignore_index, .. } = self.loss;
        match group.device().find_outside(targets.buffer(), 0..classes as i64, ignore_index)? {
            None => Ok(()),
            Some((position, target)) => Err(Error::Argument {
                what: "target",
                got: format!("{target} at position {position}"),
                wanted: match ignore_index {
                    Some(ignored) => format!("a class from 0 to {}, or {ignored} to ignore it", classes - 1),
                    None => format!("a class from 0 to {}", classes - 1),
                },
            }),
        }
    }
}

fn replicated<T: Element>(what: &'static str, tensor: &Tensor<T>) -> Result<()> {
    match tensor.placement() {
        Placement::Replicated => Ok(()),
        got => Err(Error::Placement { what, got, wanted: Placement::Replicated, hint: "" }),
    }
}

/// This rank's part of the softmax.
fn part<'a, T: Float>(
    group: &Group,
    logits: &'a Tensor<T>,
    targets: &'a Tensor<i64>,
    layout: ShardLayout,
) -> SoftmaxPart<'a> {
    let (rows, own) = (logits.shape().rows(), layout.own(group.rank()));
    SoftmaxPart {
        dtype: T::DTYPE,
        logits: Matrix::new(logits.buffer(), rows, logits.shape().features()),
        valid: own.len(),
        first: own.start as i64,
        targets: targets.buffer(),
    }
}
