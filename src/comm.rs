//! The second seam: collectives over a group of ranks.
//!
//! A call means: *start once everything queued so far on compute is done, run beside compute, and return now.* What
//! comes back is an [`Operation`] in flight, which owns every buffer that it reads or writes. Waiting for it orders all
//! later compute after it.

pub(crate) mod host;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
#[cfg(feature = "cuda")]
pub(crate) mod peer;
#[cfg(feature = "cuda")]
pub(crate) mod queue;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dtype::DType;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};
use crate::meter::Meter;
use crate::{Error, Result};

/// How long a wait lasts before it gives up, unless a group says otherwise: 10 minutes, as with PyTorch's process
/// groups.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// A buffer divided over the ranks of a group, each rank's block in `chunks` pieces.
///
/// Pieces are numbered `rank * chunks + chunk`, which is also their order in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Which units each rank owns.
    pub layout: ShardLayout,
    /// Bytes of one unit.
    pub unit_bytes: usize,
    /// Pieces that each rank's block is cut into, at least 1.
    pub chunks: usize,
}

impl Blocks {
    /// One piece a rank.
    pub fn new(layout: ShardLayout, unit_bytes: usize) -> Self {
        Self { layout, unit_bytes, chunks: 1 }
    }

    /// The same, each rank's block in `chunks` pieces.
    pub fn in_chunks(self, chunks: usize) -> Self {
        Self { chunks: chunks.max(1), ..self }
    }

    /// The order in which `rank` hands its blocks to a reduction: for the ranks after it, and its own last.
    pub fn order(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (n, chunks) = (self.layout.world_size(), self.chunks);
        (1..=n).flat_map(move |step| (0..chunks).map(move |chunk| (rank + step) % n * chunks + chunk))
    }

    /// The number of pieces of all ranks.
    pub fn pieces(&self) -> usize {
        self.layout.world_size() * self.chunks
    }

    /// The units of a piece.
    pub fn units(&self, piece: usize) -> Range<usize> {
        self.layout.chunk(piece / self.chunks, piece % self.chunks, self.chunks)
    }

    /// The bytes of a piece, within the whole.
    pub fn bytes(&self, piece: usize) -> Range<usize> {
        let units = self.units(piece);
        units.start * self.unit_bytes..units.end * self.unit_bytes
    }

    /// The bytes of a rank's block, within the whole.
    pub fn own_bytes(&self, rank: usize) -> Range<usize> {
        let own = self.layout.own(rank);
        own.start * self.unit_bytes..own.end * self.unit_bytes
    }

    /// Bytes of the whole.
    pub fn total_bytes(&self) -> usize {
        self.layout.total() * self.unit_bytes
    }
}

/// How the summands of a reduction are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum, formed in rank order in the accumulator's dtype and rounded once.
    Sum,
    /// The largest of them.
    Max,
}

/// A collective in flight.
///
/// It owns its buffers until it is done, so that dropping every handle to it is safe at any moment.
pub trait Operation: Send + Sync + fmt::Debug {
    /// Hands a reduction the block for `piece`, computed by everything queued on compute so far. It starts to travel at
    /// once.
    ///
    /// Rank r hands in its blocks for ranks r+1, r+2, … and its own last (modulo the world size), each chunk by chunk: in
    /// every step each rank then sends to one other and receives from one other.
    ///
    /// # Errors
    /// Where the piece does not belong to this operation or has been handed in before; where the group is closed.
    fn contribute(self: Arc<Self>, piece: usize, block: Buffer) -> Result<()>;

    /// The next run of pieces of a gather that have come from other ranks, in order of arrival, with later compute ordered
    /// after it: their numbers, and their bytes. Waits while there are none; `None` once all have been returned. This rank's
    /// own pieces are never returned: the caller has them.
    ///
    /// Pieces that follow each other in memory and have all arrived come together. An engine that cannot tell arrivals
    /// apart returns all pieces at the end.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::PeerLost`], [`Error::Mismatch`], [`Error::Closed`].
    fn next(&self) -> Result<Option<(Range<usize>, Buffer)>>;

    /// The whole result, with later compute ordered after it.
    ///
    /// # Errors
    /// As [`Operation::next`].
    fn wait(&self) -> Result<Buffer>;

    /// How long bytes were on their way to this rank so far; zero from an engine that cannot tell without waiting.
    fn communication(&self) -> Duration {
        Duration::ZERO
    }
}

/// Collectives over a group of ranks. Implemented by the engines of this crate.
///
/// All ranks of a group must call the same collectives, with the same sizes, in the same order.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank's number within the group, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks in the group.
    fn world_size(&self) -> usize;

    /// A short name, for error messages.
    fn describe(&self) -> String;

    /// Gathers every rank's `shard` into `out`, in rank order. Pieces can be taken as they arrive.
    ///
    /// # Errors
    /// Where sizes do not fit; where the group is closed.
    fn all_gather(&self, dtype: DType, blocks: Blocks, shard: Buffer, out: BufferMut) -> Result<Arc<dyn Operation>>;

    /// Starts a reduction in which each rank ends up with the sum of all ranks' blocks for it, in `out` (one block). The
    /// blocks, this rank's own included, are handed in through [`Operation::contribute`].
    ///
    /// # Errors
    /// Where sizes do not fit; where the group is closed.
    fn reduce_scatter(&self, dtype: DType, blocks: Blocks, out: BufferMut) -> Result<Arc<dyn Operation>>;

    /// Starts a reduction in which every rank ends up with the whole of what all ranks' blocks combine to, in `out`. The
    /// blocks are handed in through [`Operation::contribute`]: each is combined by the rank that owns it, and the result
    /// goes to all as soon as it is formed.
    ///
    /// # Errors
    /// Where sizes do not fit; where the group is closed.
    fn all_reduce(&self, dtype: DType, op: ReduceOp, blocks: Blocks, out: BufferMut) -> Result<Arc<dyn Operation>>;

    /// Copies `root`'s `input` (`None` elsewhere) to `out` on every rank.
    ///
    /// # Errors
    /// Where sizes do not fit, or root has no input; where the group is closed.
    fn broadcast(&self, dtype: DType, root: usize, input: Option<Buffer>, out: BufferMut)
    -> Result<Arc<dyn Operation>>;

    /// Sends `data` to `to`, which must call [`Communicator::receive`]. Sends and receives between two ranks are matched
    /// in order, apart from all collectives.
    ///
    /// # Errors
    /// Where the rank does not exist; where the group is closed.
    fn send(&self, dtype: DType, to: usize, data: Buffer) -> Result<Arc<dyn Operation>>;

    /// Receives into `out` what `from` sends.
    ///
    /// # Errors
    /// Where the rank does not exist; where the group is closed.
    fn receive(&self, dtype: DType, from: usize, out: BufferMut) -> Result<Arc<dyn Operation>>;

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// As [`Operation::wait`].
    fn barrier(&self) -> Result<()>;

    /// Divides the group: ranks that give the same `color` form a new group, ordered by `key` and then by their rank
    /// here. A rank that gives no color gets none. All ranks must call it.
    ///
    /// # Errors
    /// As [`Operation::wait`].
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn Communicator>>>;

    /// The longest that a wait lasts.
    fn deadline(&self) -> Duration;

    /// Sets the longest that a wait lasts.
    fn set_deadline(&self, deadline: Duration);

    /// Ends every operation in flight, on all ranks that can be told, and refuses new ones: this rank gives up.
    fn abort(&self, reason: &str);
}

/// An all-gather in flight, or its result where there is nobody to gather from. Dropping it waits.
#[derive(Debug)]
pub(crate) enum Gather {
    /// One rank: its own shard is the whole.
    Ready(Buffer),
    /// Under way.
    Running(InFlight),
}

impl Gather {
    /// Notes in `meter` what it spends.
    pub(crate) fn metered(mut self, meter: &Arc<Meter>) -> Self {
        if let Gather::Running(operation) = &mut self {
            operation.meter = Some(Arc::clone(meter));
        }
        self
    }

    /// See [`Operation::next`].
    pub(crate) fn next(&mut self) -> Result<Option<(Range<usize>, Buffer)>> {
        match self {
            Gather::Ready(_) => Ok(None),
            Gather::Running(operation) => operation.next(),
        }
    }

    /// See [`Operation::wait`].
    pub(crate) fn wait(self) -> Result<Buffer> {
        match self {
            Gather::Ready(whole) => Ok(whole),
            Gather::Running(operation) => operation.wait(),
        }
    }
}

/// A reduction in flight, or its result where there is nobody to reduce with. Dropping it waits.
#[derive(Debug)]
pub(crate) enum Reduce {
    /// One rank: its own block is the sum.
    Ready(Option<Buffer>),
    /// Under way.
    Running(InFlight),
}

impl Reduce {
    /// Notes in `meter` what it spends.
    pub(crate) fn metered(mut self, meter: &Arc<Meter>) -> Self {
        if let Reduce::Running(operation) = &mut self {
            operation.meter = Some(Arc::clone(meter));
        }
        self
    }

    /// See [`Operation::contribute`].
    pub(crate) fn contribute(&mut self, piece: usize, block: Buffer) -> Result<()> {
        match self {
            Reduce::Ready(sum) => {
                *sum = Some(match sum.take() {
                    Some(sum) => sum.join(&block)?,
                    None => block,
                });
                Ok(())
            }
            Reduce::Running(operation) => operation.contribute(piece, block),
        }
    }

    /// Hands in all of `whole`, which has been computed already.
    pub(crate) fn contribute_all(&mut self, blocks: Blocks, rank: usize, whole: &Buffer) -> Result<()> {
        if let Reduce::Ready(sum) = self {
            *sum = Some(whole.clone());
            return Ok(());
        }
        blocks.order(rank).try_for_each(|piece| self.contribute(piece, whole.slice(blocks.bytes(piece))?))
    }

    /// See [`Operation::wait`].
    pub(crate) fn wait(self) -> Result<Buffer> {
        match self {
            Reduce::Ready(sum) => sum.ok_or_else(|| Error::Argument {
                what: "reduction",
                got: "no block".into(),
                wanted: "this rank's own block".into(),
            }),
            Reduce::Running(operation) => operation.wait(),
        }
    }
}

/// Why a rank that drops a reduction too early is lost to the others.
pub(crate) const GAVE_UP: &str = "gave up a reduction before all its blocks were handed in";

/// An operation that is waited for when it is dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    operation: Option<Arc<dyn Operation>>,
    communicator: Arc<dyn Communicator>,
    /// Blocks that are still to be handed in.
    owed: usize,
    meter: Option<Arc<Meter>>,
    /// How long its waiter has stood still.
    exposed: Duration,
}

impl InFlight {
    /// `owed` blocks are to be handed in, if it is a reduction.
    pub(crate) fn new(operation: Arc<dyn Operation>, communicator: &Arc<dyn Communicator>, owed: usize) -> Self {
        let communicator = Arc::clone(communicator);
        Self { operation: Some(operation), communicator, owed, meter: None, exposed: Duration::ZERO }
    }

    fn operation(&self) -> Result<&Arc<dyn Operation>> {
        self.operation.as_ref().ok_or_else(|| Error::Closed {
            rank: self.communicator.rank(),
            cause: "the operation has been waited for".into(),
        })
    }

    pub(crate) fn next(&mut self) -> Result<Option<(Range<usize>, Buffer)>> {
        let begun = Instant::now();
        let run = self.operation()?.next();
        self.exposed += begun.elapsed();
        run
    }

    pub(crate) fn contribute(&mut self, piece: usize, block: Buffer) -> Result<()> {
        Arc::clone(self.operation()?).contribute(piece, block)?;
        self.owed = self.owed.saturating_sub(1);
        Ok(())
    }

    pub(crate) fn wait(mut self) -> Result<Buffer> {
        let begun = Instant::now();
        let operation = self.operation()?;
        let result = operation.wait();
        if let Some(meter) = &self.meter {
            meter.spent(operation.communication(), self.exposed + begun.elapsed());
        }
        self.operation = None;
        result
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(operation) = self.operation.take() else { return };
        if std::thread::panicking() {
            // The peers wait for this rank: tell them, and do not wait for them.
            self.communicator.abort("panicked");
        } else if self.owed > 0 {
            // Nobody can finish it.
            self.communicator.abort(GAVE_UP);
        } else if let Err(error) = operation.wait() {
            tracing::warn!(target: "async_tensor_parallel", %error, "an operation that nobody waited for failed");
        }
    }
}
