//! Ranks as threads of one process, each with a device of its own.

use std::sync::Arc;
use std::time::Duration;

use super::{NcclCommunicator, NcclConfig, NcclId, Room};
use crate::comm::local::{Board, Outcomes, first_failure, run_ranks};
use crate::device::cuda::CudaDevice;
use crate::group::Group;
use crate::timeline::Recorder;
use crate::{Error, Result};

/// Ranks as threads of this process, each on a CUDA device of its own (rank r on device r), communicating through NCCL.
///
/// As the ranks share a process, they tell each other what they call: a rank that calls something else becomes
/// [`Error::Mismatch`], and one that returns or panics [`Error::PeerLost`], where NCCL alone would wait until the
/// deadline.
///
/// ```no_run
/// use async_tensor_parallel::{NcclWorld, Placement};
///
/// let sums = NcclWorld::new(4)?.run(|group| {
///     let x = group.tensor(&[group.rank() as f32 + 1.0], &[1], Placement::Partial)?;
///     group.all_reduce(&x)?.wait()?.to_vec()
/// })?;
/// assert_eq!(sums, vec![vec![10.0]; 4]);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct NcclWorld {
    ordinals: Vec<usize>,
    config: NcclConfig,
    recorder: Recorder,
}

impl NcclWorld {
    /// A world of `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] for no ranks, or more than there are CUDA devices; [`Error::Library`] where CUDA or NCCL are
    /// not on this machine.
    pub fn new(world_size: usize) -> Result<Self> {
        super::api::load()?;
        let devices = CudaDevice::count()?;
        if !(1..=devices).contains(&world_size) {
            return Err(Error::Argument {
                what: "world_size",
                got: world_size.to_string(),
                wanted: format!("1 to {devices}, the number of CUDA devices: NCCL needs one a rank"),
            });
        }
        let ordinals = (0..world_size).collect();
        Ok(Self { ordinals, config: NcclConfig::default(), recorder: Recorder::disabled() })
    }

    /// Sets each rank's device, by ordinal.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is not one for each rank.
    pub fn devices(mut self, ordinals: &[usize]) -> Result<Self> {
        if ordinals.len() != self.ordinals.len() {
            return Err(Error::Argument {
                what: "devices",
                got: format!("{ordinals:?}"),
                wanted: format!("{} ordinals, one a rank", self.ordinals.len()),
            });
        }
        self.ordinals = ordinals.to_vec();
        Ok(self)
    }

    /// Sets the options of the communicators.
    pub fn with_config(mut self, config: NcclConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets how long a wait lasts before it gives up (default 10 minutes).
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.config.deadline = deadline;
        self
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.ordinals.len()
    }

    /// What the ranks of this world record their spans in.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Runs `f` on every rank, each in its own thread, and returns what they returned, in rank order.
    ///
    /// # Errors
    /// The error of the rank that failed first, as [`LocalWorld::run`](crate::LocalWorld::run).
    pub fn run<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        first_failure(self.run_each(f)?)
    }

    /// Runs `f` on every rank and returns each rank's own outcome, in rank order.
    ///
    /// # Errors
    /// [`Error::Foreign`] where NCCL gives no id for the group.
    pub fn run_all<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<Result<R>>> {
        Ok(self.run_each(f)?.into_iter().map(|(_, outcome)| outcome).collect())
    }

    fn run_each<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Outcomes<R>> {
        let id = NcclId::new()?;
        let room = Room::new(Board::of(self.ordinals.len()));
        Ok(run_ranks(&room.board, |rank| self.place(id, rank, &room), f))
    }

    /// A rank's group.
    fn place(&self, id: NcclId, rank: usize, room: &Arc<Room>) -> Result<Group> {
        let recorder = self.recorder.for_rank(rank);
        let device = CudaDevice::with_recorder(self.ordinals[rank], recorder.clone())?;
        let (config, room) = (self.config.clone(), Arc::clone(room));
        let communicator =
            NcclCommunicator::join(id, rank, self.ordinals.len(), &device, config, (Some(room), recorder.clone()))?;
        Ok(Group::new(Arc::new(communicator), device, recorder))
    }
}
