//! A rank's view of its group: a device, a communicator, and typed collectives over tensors.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::comm::{Blocks, Communicator, Gather, InFlight, Reduce, ReduceOp};
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};
use crate::plan::Plan;
use crate::tensor::{Placement, Shape, Tensor};
use crate::timeline::Recorder;
use crate::{Error, Result};

/// A rank's handle to its group. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Group {
    communicator: Arc<dyn Communicator>,
    device: Arc<dyn Device>,
    recorder: Recorder,
    /// What has been measured of it, by dtype. Shared by its clones.
    plans: Arc<Mutex<Vec<Plan>>>,
}

impl Group {
    /// A group over an engine's communicator and device.
    pub fn new(communicator: Arc<dyn Communicator>, device: Arc<dyn Device>, recorder: Recorder) -> Self {
        Self { communicator, device, recorder, plans: Arc::default() }
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Where this rank computes.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// How this rank communicates.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// What this rank's spans are recorded in.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Sets the longest that a wait lasts before it fails with [`Error::Timeout`].
    pub fn set_deadline(&self, deadline: Duration) {
        self.communicator.set_deadline(deadline);
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::PeerLost`], [`Error::Mismatch`], [`Error::Closed`].
    pub fn barrier(&self) -> Result<()> {
        self.device.synchronize()?;
        self.communicator.barrier()
    }

    /// Divides the group: see [`Communicator::split`].
    ///
    /// # Errors
    /// As [`Group::barrier`].
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Group>> {
        let communicator = self.communicator.split(color, key)?;
        Ok(communicator.map(|communicator| Group::new(communicator, Arc::clone(&self.device), self.recorder.clone())))
    }

    /// The plan by which layers of `dtype` choose their overlap: the one that was set, or else one that is measured now, by all
    /// ranks together.
    ///
    /// # Errors
    /// As [`Plan::measure`].
    pub fn plan(&self, dtype: DType) -> Result<Plan> {
        if let Some(plan) = self.known_plan(dtype) {
            return Ok(plan);
        }
        let plan = Plan::measure(self, dtype)?;
        tracing::info!(target: "async_tensor_parallel", rank = self.rank(), ?dtype, "measured the group");
        self.set_plan(plan)?;
        Ok(plan)
    }

    /// The plan for `dtype`, if there is one.
    pub(crate) fn known_plan(&self, dtype: DType) -> Option<Plan> {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.iter().find(|plan| plan.dtype == dtype).copied()
    }

    /// Sets the plan for its dtype, as measured earlier. All ranks must set the same.
    ///
    /// # Errors
    /// [`Error::Argument`] where it was made for another number of ranks.
    pub fn set_plan(&self, plan: Plan) -> Result<()> {
        if plan.world_size != self.world_size() {
            return Err(Error::Argument {
                what: "plan",
                got: format!("one for {} ranks", plan.world_size),
                wanted: format!("one for {}", self.world_size()),
            });
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.retain(|known| known.dtype != plan.dtype);
        plans.push(plan);
        Ok(())
    }

    /// A tensor on this rank's device, from `data` in row-major order.
    ///
    /// # Errors
    /// As [`Tensor::from_slice`].
    pub fn tensor<T: Element>(&self, data: &[T], dims: &[usize], placement: Placement) -> Result<Tensor<T>> {
        Tensor::from_slice(&self.device, data, dims, placement)
    }

    /// Gathers row shards: [`Placement::Rows`] to [`Placement::Replicated`].
    ///
    /// # Errors
    /// [`Error::Placement`]; [`Error::Mismatch`] (from the wait) where the ranks' shapes differ.
    pub fn all_gather<T: Element>(&self, tensor: &Tensor<T>) -> Result<Pending<T>> {
        wanted("all_gather's tensor", tensor, Placement::Rows)?;
        let shape = tensor.shape().with_leading(tensor.shape().leading() * self.world_size());
        let layout = ShardLayout::even("rows", tensor.shape().leading() * self.world_size(), self.world_size())?;
        let unit = tensor.shape().elements() * T::DTYPE.size() / tensor.shape().leading().max(1);
        let gather = self.start_gather(T::DTYPE, Blocks::new(layout, unit), tensor.buffer())?;
        Ok(self.pending(Source::Gather(gather), shape, Placement::Replicated))
    }

    /// Sums summands and gives each rank its rows: [`Placement::Partial`] to [`Placement::Rows`].
    ///
    /// # Errors
    /// [`Error::Placement`]; [`Error::NotDivisible`]; [`Error::Mismatch`] (from the wait) where the ranks' shapes differ.
    pub fn reduce_scatter<T: Float>(&self, tensor: &Tensor<T>) -> Result<Pending<T>> {
        wanted("reduce_scatter's tensor", tensor, Placement::Partial)?;
        let layout = ShardLayout::even("rows", tensor.shape().leading(), self.world_size())?;
        let unit = tensor.shape().elements() * T::DTYPE.size() / tensor.shape().leading().max(1);
        let blocks = Blocks::new(layout, unit);
        let mut reduce = self.start_reduce_scatter(T::DTYPE, blocks)?;
        reduce.contribute_all(blocks, self.rank(), tensor.buffer())?;
        let shape = tensor.shape().with_leading(layout.len(self.rank()));
        Ok(self.pending(Source::Reduce(reduce), shape, Placement::Rows))
    }

    /// Sums summands on every rank: [`Placement::Partial`] to [`Placement::Replicated`].
    ///
    /// # Errors
    /// [`Error::Placement`]; [`Error::Mismatch`] (from the wait) where the ranks' shapes differ.
    pub fn all_reduce<T: Float>(&self, tensor: &Tensor<T>) -> Result<Pending<T>> {
        wanted("all_reduce's tensor", tensor, Placement::Partial)?;
        let reduce = self.start_all_reduce(T::DTYPE, ReduceOp::Sum, tensor.buffer())?;
        Ok(self.pending(Source::Reduce(reduce), *tensor.shape(), Placement::Replicated))
    }

    /// The largest of the ranks' elements, on every rank: [`Placement::Partial`] to [`Placement::Replicated`].
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_reduce_max<T: Float>(&self, tensor: &Tensor<T>) -> Result<Pending<T>> {
        wanted("all_reduce_max's tensor", tensor, Placement::Partial)?;
        let reduce = self.start_all_reduce(T::DTYPE, ReduceOp::Max, tensor.buffer())?;
        Ok(self.pending(Source::Reduce(reduce), *tensor.shape(), Placement::Replicated))
    }

    /// Copies `root`'s tensor to every rank. All give one of the same shape; only the root's values matter.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such root; [`Error::Mismatch`] (from the wait) where the shapes differ.
    pub fn broadcast<T: Element>(&self, root: usize, tensor: &Tensor<T>) -> Result<Pending<T>> {
        let source = if self.world_size() == 1 && root == 0 {
            Source::Gather(Gather::Ready(tensor.buffer().clone()))
        } else {
            let out = self.device.allocate(tensor.buffer().len())?;
            let input = (root == self.rank()).then(|| tensor.buffer().clone());
            Source::Gather(Gather::Running(self.in_flight(self.communicator.broadcast(T::DTYPE, root, input, out)?)))
        };
        Ok(self.pending(source, *tensor.shape(), Placement::Replicated))
    }

    /// Sends a tensor to another rank, which must call [`Group::receive`]. The wait returns the tensor.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such other rank.
    pub fn send<T: Element>(&self, to: usize, tensor: &Tensor<T>) -> Result<Pending<T>> {
        let operation = self.in_flight(self.communicator.send(T::DTYPE, to, tensor.buffer().clone())?);
        Ok(self.pending(Source::Gather(Gather::Running(operation)), *tensor.shape(), tensor.placement()))
    }

    /// Receives a tensor of the given shape from another rank.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such other rank; [`Error::Mismatch`] (from the wait) where it sends
    /// something else.
    pub fn receive<T: Element>(&self, from: usize, dims: &[usize], placement: Placement) -> Result<Pending<T>> {
        let shape = Shape::new(dims)?;
        let out = self.device.allocate(shape.elements() * T::DTYPE.size())?;
        let operation = self.in_flight(self.communicator.receive(T::DTYPE, from, out)?);
        Ok(self.pending(Source::Gather(Gather::Running(operation)), shape, placement))
    }

    fn pending<T: Element>(&self, source: Source, shape: Shape, placement: Placement) -> Pending<T> {
        Pending { source, shape, placement, device: Arc::clone(&self.device), _element: PhantomData }
    }

    fn in_flight(&self, operation: Arc<dyn crate::comm::Operation>) -> InFlight {
        InFlight::new(operation, &self.communicator, 0)
    }

    /// The same for a reduction, all of whose blocks are still to be handed in.
    fn reducing(&self, operation: Arc<dyn crate::comm::Operation>, blocks: Blocks) -> Reduce {
        Reduce::Running(InFlight::new(operation, &self.communicator, blocks.pieces()))
    }

    /// Starts to gather `shard`; with one rank it is the whole already.
    pub(crate) fn start_gather(&self, dtype: DType, blocks: Blocks, shard: &Buffer) -> Result<Gather> {
        if self.world_size() == 1 {
            return Ok(Gather::Ready(shard.clone()));
        }
        let out = self.device.allocate(blocks.total_bytes())?;
        let operation = self.communicator.all_gather(dtype, blocks, shard.clone(), out)?;
        Ok(Gather::Running(self.in_flight(operation)))
    }

    /// Starts a reduce-scatter whose blocks are still to be handed in; with one rank its own block is the sum.
    pub(crate) fn start_reduce_scatter(&self, dtype: DType, blocks: Blocks) -> Result<Reduce> {
        if self.world_size() == 1 {
            return Ok(Reduce::Ready(None));
        }
        let out = self.device.allocate(blocks.own_bytes(self.rank()).len())?;
        Ok(self.reducing(self.communicator.reduce_scatter(dtype, blocks, out)?, blocks))
    }

    /// Starts an all-reduce whose blocks are still to be handed in; with one rank its own block is the sum.
    pub(crate) fn start_all_reduce_of(&self, dtype: DType, op: ReduceOp, blocks: Blocks) -> Result<Reduce> {
        if self.world_size() == 1 {
            return Ok(Reduce::Ready(None));
        }
        let out = self.device.allocate(blocks.total_bytes())?;
        self.start_all_reduce_into(dtype, op, blocks, out)
    }

    /// The same into a given buffer; not for one rank.
    pub(crate) fn start_all_reduce_into(
        &self,
        dtype: DType,
        op: ReduceOp,
        blocks: Blocks,
        out: BufferMut,
    ) -> Result<Reduce> {
        Ok(self.reducing(self.communicator.all_reduce(dtype, op, blocks, out)?, blocks))
    }

    /// Starts an all-reduce of `summand`.
    pub(crate) fn start_all_reduce(&self, dtype: DType, op: ReduceOp, summand: &Buffer) -> Result<Reduce> {
        let layout = ShardLayout::uneven(summand.len() / dtype.size(), self.world_size())?;
        let blocks = Blocks::new(layout, dtype.size());
        let mut reduce = self.start_all_reduce_of(dtype, op, blocks)?;
        reduce.contribute_all(blocks, self.rank(), summand)?;
        Ok(reduce)
    }
}

fn wanted<T: Element>(what: &'static str, tensor: &Tensor<T>, wanted: Placement) -> Result<()> {
    if tensor.placement() == wanted {
        return Ok(());
    }
    Err(Error::Placement { what, got: tensor.placement(), wanted, hint: "" })
}

#[derive(Debug)]
enum Source {
    Gather(Gather),
    Reduce(Reduce),
}

/// A tensor that a collective is bringing.
///
/// It owns every buffer that the communication reads or writes. [`Pending::wait`] orders all later compute after it;
/// dropping it without waiting is safe, and waits.
#[derive(Debug)]
#[must_use = "a collective is waited for when its Pending is dropped"]
pub struct Pending<T: Element> {
    source: Source,
    shape: Shape,
    placement: Placement,
    device: Arc<dyn Device>,
    _element: PhantomData<T>,
}

impl<T: Element> Pending<T> {
    /// The tensor, with all later compute ordered after its arrival.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::PeerLost`], [`Error::Mismatch`], [`Error::Closed`].
    pub fn wait(self) -> Result<Tensor<T>> {
        let buffer = match self.source {
            Source::Gather(gather) => gather.wait()?,
            Source::Reduce(reduce) => reduce.wait()?,
        };
        Ok(Tensor::from_buffer(&self.device, buffer, self.shape, self.placement))
    }
}
