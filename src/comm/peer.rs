//! Ranks are threads of one process, on their own CUDA devices or several on one: messages are copies by copy engines.
//!
//! The ranks meet in host memory, as [`LocalWorld`](crate::LocalWorld)'s do; what one hands another is a buffer and an
//! event. The receiver's communication stream waits for the event and copies. Sums are formed by a kernel there, in rank
//! order.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use crate::comm::host::{Header, Kind, Mark, Work};
use crate::comm::local::{Board, Outcomes, Seat, first_failure, run_ranks};
use crate::comm::queue::Queue;
use crate::comm::{DEFAULT_DEADLINE, ReduceOp};
use crate::device::Device;
use crate::device::cuda::CudaDevice;
use crate::device::cuda::events::Event;
use crate::group::Group;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::Recorder;
use crate::{Error, Result};

/// Ranks as threads of this process, each with its own [`Group`] over a CUDA device.
///
/// Shards travel by the devices' copy engines, which take no multiprocessor from the matmul; sums are formed in rank
/// order in the accumulator's dtype, so that results depend neither on timing nor on the devices' number. Several ranks
/// may share one device: that is how tensor parallelism is tried out on a single one.
///
/// ```no_run
/// use async_tensor_parallel::{PeerWorld, Placement};
///
/// let sums = PeerWorld::new(4)?.devices(&[0, 1, 2, 3])?.run(|group| {
///     let x = group.tensor(&[group.rank() as f32 + 1.0], &[1], Placement::Partial)?;
///     group.all_reduce(&x)?.wait()?.to_vec()
/// })?;
/// assert_eq!(sums, vec![vec![10.0]; 4]);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PeerWorld {
    ordinals: Vec<usize>,
    deadline: Duration,
    recorder: Recorder,
}

impl PeerWorld {
    /// What one sum takes.
    const MOST: usize = 256;

    /// A world of `world_size` ranks, rank r on device r modulo the number of devices.
    ///
    /// # Errors
    /// [`Error::Argument`] for no ranks or more than 256, which one sum takes; where there is no CUDA device.
    pub fn new(world_size: usize) -> Result<Self> {
        if !(1..=Self::MOST).contains(&world_size) {
            return Err(Error::Argument {
                what: "world_size",
                got: world_size.to_string(),
                wanted: format!("1 to {} threads", Self::MOST),
            });
        }
        let devices = CudaDevice::count()?;
        if devices == 0 {
            return Err(Error::Argument { what: "CUDA devices", got: "none".into(), wanted: "at least one".into() });
        }
        let ordinals = (0..world_size).map(|rank| rank % devices).collect();
        Ok(Self { ordinals, deadline: DEFAULT_DEADLINE, recorder: Recorder::disabled() })
    }

    /// Sets each rank's device, by ordinal. A device may be named more than once.
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

    /// Sets how long a wait lasts before it gives up (default 10 minutes).
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
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
        first_failure(self.run_each(f))
    }

    /// Runs `f` on every rank and returns each rank's own outcome, in rank order.
    pub fn run_all<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Vec<Result<R>> {
        self.run_each(f).into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn run_each<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Outcomes<R> {
        let board = Board::of(self.ordinals.len());
        run_ranks(&board, |rank| self.place(rank, &board), f)
    }

    /// A rank's group.
    fn place(&self, rank: usize, board: &Arc<Board>) -> Result<Group> {
        let recorder = self.recorder.for_rank(rank);
        let cuda = CudaDevice::with_recorder(self.ordinals[rank], recorder.clone())?;
        let work = Arc::new(PeerWork { queue: Queue::new(&cuda, recorder.clone())? });
        let device: Arc<dyn Device> = cuda;
        let seat = Seat { device: Arc::clone(&device), work, recorder: recorder.clone() };
        Ok(Group::new(board.join(rank, seat, self.deadline)?, device, recorder))
    }
}

/// What a rank does on its communication stream.
#[derive(Debug)]
struct PeerWork {
    queue: Queue,
}

impl PeerWork {
    fn mark(&self) -> Result<Option<Mark>> {
        let event: Mark = self.queue.mark()?;
        Ok(Some(event))
    }
}

fn event(mark: &Mark) -> Result<&Event> {
    let any: &(dyn Any + Send + Sync) = &**mark;
    any.downcast_ref().ok_or_else(|| Error::Argument {
        what: "mark",
        got: "one of another engine".into(),
        wanted: "a CUDA event".into(),
    })
}

impl Work for PeerWork {
    fn computed(&self) -> Result<Option<Mark>> {
        let event: Mark = self.queue.mark_compute()?;
        Ok(Some(event))
    }

    fn join(&self, mark: &Mark) -> Result<()> {
        self.queue.join(event(mark)?)
    }

    fn follow(&self, mark: &Mark) -> Result<()> {
        self.queue.follow(event(mark)?)
    }

    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<Option<Mark>> {
        if source.is_empty() {
            return self.mark();
        }
        self.queue.span("copy", source.len() as u64, || self.queue.copy(source, target))?;
        self.mark()
    }

    fn combine<'a>(
        &self,
        header: &Header,
        world_size: usize,
        summand: &dyn Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<Option<Mark>> {
        let op = if let Kind::AllReduce(op) = header.kind { op } else { ReduceOp::Sum };
        self.queue.span("sum", 0, || self.queue.combine(header.dtype, op, world_size, summand, out))?;
        self.mark()
    }

    fn drain(&self) -> Result<()> {
        self.queue.drain()
    }
}
