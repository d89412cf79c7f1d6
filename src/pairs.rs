//! Communication between layers as differentiable operations: each with its adjoint.
//!
//! | operation | forward | backward | in Megatron-LM |
//! | --- | --- | --- | --- |
//! | [`CopyToRegion`] | identity | all_reduce | f |
//! | [`ReduceFromRegion`] | all_reduce | identity | g |
//! | [`GatherRows`] | all_gather | reduce_scatter | g (sequence parallel) |
//! | [`ScatterSum`] | reduce_scatter | all_gather | ḡ |
//!
//! They are what the column and row layers do inside, for code that computes with matrices of its own. An operation A and its
//! backward Aᵀ satisfy ⟨A x, y⟩ = ⟨x, Aᵀ y⟩, summed over the ranks, where a tensor that is the same on every rank counts once.
//! (Shoeybi et al., Megatron-LM, 2019, section 3; Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.2.)

use crate::Result;
use crate::dtype::Float;
use crate::group::{Group, Pending};
use crate::tensor::{Placement, Tensor};

/// What is the same on every rank enters a region in which each computes its part: identity forward; backward sums the ranks'
/// gradients.
#[derive(Debug, Clone)]
pub struct CopyToRegion(Group);

/// The ranks' summands leave such a region: all_reduce forward, identity backward.
#[derive(Debug, Clone)]
pub struct ReduceFromRegion(Group);

/// Rows are brought together: all_gather forward; backward sums the ranks' gradients and scatters the rows.
#[derive(Debug, Clone)]
pub struct GatherRows(Group);

/// The ranks' summands are summed and their rows scattered: reduce_scatter forward, all_gather backward.
#[derive(Debug, Clone)]
pub struct ScatterSum(Group);

impl CopyToRegion {
    /// Over a group.
    pub fn new(group: &Group) -> Self {
        Self(group.clone())
    }

    /// The tensor itself, [`Placement::Replicated`]. No communication.
    pub fn forward<T: Float>(&self, x: &Tensor<T>) -> Tensor<T> {
        x.clone()
    }

    /// The sum of the ranks' gradients ([`Placement::Partial`]), on every rank.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn backward<T: Float>(&self, grad: &Tensor<T>) -> Result<Pending<T>> {
        self.0.all_reduce(grad)
    }
}

impl ReduceFromRegion {
    /// Over a group.
    pub fn new(group: &Group) -> Self {
        Self(group.clone())
    }

    /// The sum of the ranks' tensors ([`Placement::Partial`]), on every rank.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn forward<T: Float>(&self, x: &Tensor<T>) -> Result<Pending<T>> {
        self.0.all_reduce(x)
    }

    /// The gradient itself, as each rank's summand has it. No communication.
    pub fn backward<T: Float>(&self, grad: &Tensor<T>) -> Tensor<T> {
        grad.clone()
    }
}

impl GatherRows {
    /// Over a group.
    pub fn new(group: &Group) -> Self {
        Self(group.clone())
    }

    /// All ranks' rows ([`Placement::Rows`] to [`Placement::Replicated`]).
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn forward<T: Float>(&self, x: &Tensor<T>) -> Result<Pending<T>> {
        self.0.all_gather(x)
    }

    /// This rank's rows of the sum of the ranks' gradients ([`Placement::Partial`] to [`Placement::Rows`]).
    ///
    /// # Errors
    /// As [`Group::reduce_scatter`].
    pub fn backward<T: Float>(&self, grad: &Tensor<T>) -> Result<Pending<T>> {
        self.0.reduce_scatter(grad)
    }
}

impl ScatterSum {
    /// Over a group.
    pub fn new(group: &Group) -> Self {
        Self(group.clone())
    }

    /// This rank's rows of the sum of the ranks' tensors ([`Placement::Partial`] to [`Placement::Rows`]).
    ///
    /// # Errors
    /// As [`Group::reduce_scatter`].
    pub fn forward<T: Float>(&self, x: &Tensor<T>) -> Result<Pending<T>> {
        self.0.reduce_scatter(x)
    }

    /// All ranks' rows of the gradient, each rank's summand having the same ([`Placement::Rows`] to
    /// [`Placement::Replicated`]).
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn backward<T: Float>(&self, grad: &Tensor<T>) -> Result<Pending<T>> {
        self.0.all_gather(&grad.clone().with_placement(Placement::Rows))
    }
}
