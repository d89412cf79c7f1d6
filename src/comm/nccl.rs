//! Ranks are CUDA devices, communication is NCCL's.
//!
//! Every call queues its work on the communicator's own stream at once, from the calling thread, and returns: events
//! order it after compute, and compute after it. Nothing blocks the host but a first connection (until the peer comes),
//! [`Communicator::barrier`] and [`Communicator::split`]. What goes wrong on the device is seen by a watcher, which ends
//! the group, so that what waits on the device goes on, and marks the device as failed, so that nobody reads what was
//! never written.

mod api;
mod library;
mod operation;
pub(crate) mod world;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use api::{CtaPolicy, NcclConfig, NcclId, Reduction};
use api::{Handle, Transfer, nap};
use operation::{Health, Op};

use crate::comm::host::{Header, Kind, closed};
use crate::comm::local::{Board, Failure};
use crate::comm::queue::Queue;
use crate::comm::{Blocks, Communicator, Operation, ReduceOp};
use crate::device::cuda::CudaDevice;
use crate::device::cuda::events::Event;
use crate::device::{Device, same_length};
use crate::dtype::DType;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::Recorder;
use crate::{Error, Result};

/// A rank of a group of CUDA devices that communicate through NCCL.
///
/// Reductions are [`Reduction::Ordered`] unless the configuration says otherwise: the same bits in every run, and equal
/// to those of the other engines. Blocks of a reduction must be handed in in the order of
/// [`Operation::contribute`](crate::Operation::contribute): NCCL matches them by it.
///
/// Sends and receives that are started one after another travel together, once one of them is waited for, something else
/// is started, or a millisecond has passed: two ranks may both send first. They take their turn among the collectives of
/// their group, as NCCL demands, so that their place among those must be the same on both ranks.
///
/// The collectives of all communicators of one [`CudaDevice`] are submitted, and run on it, in one order. That order must be
/// the same on all ranks.
pub struct NcclCommunicator {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.shared.rank, self.shared.world_size)
    }
}

/// What the calling threads, the operations and the watcher share.
#[derive(Debug)]
struct Shared {
    rank: usize,
    world_size: usize,
    handle: Handle,
    queue: Queue,
    order: Arc<Order>,
    config: NcclConfig,
    deadline: AtomicU64,
    calls: Mutex<Calls>,
    pairs: Mutex<Pairs>,
    /// Tells the watcher to stop.
    stopped: Condvar,
    /// Where ranks of one process meet.
    room: Option<Arc<Room>>,
}

/// Where ranks that are threads of one process see what the others call, and end each other's waits.
#[derive(Debug)]
struct Room {
    board: Arc<Board>,
    members: Mutex<Vec<Weak<Shared>>>,
    /// Those of groups split off, by the split's sequence number and their color.
    children: Mutex<HashMap<(u64, usize), Arc<Room>>>,
}

impl Room {
    fn new(board: Arc<Board>) -> Arc<Self> {
        Arc::new(Self { board, members: Mutex::default(), children: Mutex::default() })
    }

    fn members(&self) -> Vec<Arc<Shared>> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.iter().filter_map(Weak::upgrade).collect()
    }

    /// The room of a group that has been split off.
    fn child(&self, sequence: u64, color: usize, members: &[usize]) -> Arc<Self> {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        let child = children.entry((sequence, color));
        Arc::clone(child.or_insert_with(|| Self::new(self.board.child(sequence, color, members))))
    }
}

/// What has been called so far.
#[derive(Debug, Default)]
struct Calls {
    /// Numbers of the next collective, and of the next send to and receive from each rank.
    sequence: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// Operations in flight, oldest first from `next` on, to be used again once the device has passed them.
    ops: Vec<Arc<Op>>,
    next: usize,
    closed: Option<Error>,
    stopping: bool,
}

/// Sends and receives that are to travel together: of two ranks that both send first, neither could go on alone.
#[derive(Debug, Default)]
struct Pairs {
    waiting: Vec<Arc<Op>>,
    since: Option<Instant>,
    /// Reused from group to group.
    transfers: Vec<Transfer>,
}

/// The one order in which the communicators of a device submit and run: who was last, and the end of what it queued.
#[derive(Debug, Default)]
struct Order {
    last: Mutex<Option<(usize, Arc<Event>)>>,
}

impl Order {
    /// The order of all communicators of `device`.
    fn of(device: &Arc<CudaDevice>) -> Arc<Self> {
        static ORDERS: Mutex<Vec<(Weak<CudaDevice>, Weak<Order>)>> = Mutex::new(Vec::new());
        let mut orders = ORDERS.lock().unwrap_or_else(PoisonError::into_inner);
        orders.retain(|(device, order)| device.strong_count() > 0 && order.strong_count() > 0);
        let found = orders.iter().find(|(known, _)| known.as_ptr() == Arc::as_ptr(device));
        if let Some(order) = found.and_then(|(_, order)| order.upgrade()) {
            return order;
        }
        let order = Arc::new(Self::default());
        orders.push((Arc::downgrade(device), Arc::downgrade(&order)));
        order
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().min(u64::MAX.into()) as u64
}

impl Shared {
    /// How long a send or receive waits for others to travel with it.
    const GRACE: Duration = Duration::from_millis(1);

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline.load(Ordering::Relaxed))
    }

    /// Fails where the group has ended.
    fn open(&self) -> Result<()> {
        self.calls().closed.as_ref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Ends the group: nothing that waits for it on the device hangs any more, and nobody reads what it has not written.
    /// The first error stays.
    fn fail(&self, error: &Error) {
        let known = self.room.as_ref().and_then(|room| room.board.failure(self.rank));
        let error = known.unwrap_or_else(|| error.clone());
        let mut calls = self.calls();
        if calls.closed.is_some() {
            return;
        }
        calls.closed = Some(error.clone());
        drop(calls);
        self.queue.device().fail(&error);
        if let Some(room) = &self.room {
            room.board.fail(Failure::Other(error.clone()));
            // Before this rank leaves, as the others may see that first.
            room.members().iter().for_each(|member| member.fail(&error));
        }
        self.handle.abort();
    }

    /// Queues transfers as one group, and returns their end.
    fn submit(&self, header: &Header, transfers: &[Transfer]) -> Result<Arc<Event>> {
        self.queue_group(header, transfers).inspect_err(|error| self.fail(error)).map_err(|error| self.cause(error))
    }

    /// The error that ended the group, if that is why another was met.
    fn cause(&self, error: Error) -> Error {
        self.calls().closed.clone().unwrap_or(error)
    }

    fn queue_group(&self, header: &Header, transfers: &[Transfer]) -> Result<Arc<Event>> {
        self.open()?;
        let mut last = self.order.last.lock().unwrap_or_else(PoisonError::into_inner);
        let this = std::ptr::from_ref(self).addr();
        match &*last {
            // A receive may wait for long, and the collectives of other groups do not depend on it.
            Some((other, event)) if *other != this && !header.is_pairwise() => self.queue.follow(event)?,
            _ => {}
        }
        if !transfers.is_empty() {
            self.queue.device().bind()?;
            let bytes = transfers.iter().map(Transfer::received).sum::<usize>() as u64;
            self.queue.span(header.kind.name(), bytes, || {
                // SAFETY: the transfers were made from buffers of this device, which the operation holds until compute is
                // ordered after the stream, or the stream has been drained.
                unsafe { self.handle.group(transfers, self.queue.stream()) }?;
                self.settle(Some(header))
            })?;
        }
        let done = self.queue.mark()?;
        if !header.is_pairwise() {
            *last = Some((this, Arc::clone(&done)));
        }
        Ok(done)
    }

    /// Queues the sends and receives that wait, those alone that have done so for `age`.
    fn flush(&self, age: Duration) -> Result<()> {
        let mut guard = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = &mut *guard;
        if pairs.since.is_none_or(|since| since.elapsed() < age) {
            return Ok(());
        }
        pairs.since = None;
        pairs.transfers.clear();
        for op in &pairs.waiting {
            op.take_transfers(&mut pairs.transfers);
        }
        let Some(header) = pairs.waiting.first().map(|op| op.lock().header) else { return Ok(()) };
        let done = self.submit(&header, &pairs.transfers);
        for op in pairs.waiting.drain(..) {
            if let Ok(done) = &done {
                op.travels_until(done);
            }
        }
        done.map(drop)
    }

    /// Waits until NCCL's own threads have done what was called last.
    fn settle(&self, header: Option<&Header>) -> Result<()> {
        self.wait_until(header, || self.handle.poll())
    }

    /// Waits on the host until the device has passed the event.
    fn wait_on_host(&self, event: &Event, header: &Header) -> Result<()> {
        let waited = self.wait_until(Some(header), || event.has_passed());
        waited.inspect_err(|error| self.fail(error)).map_err(|error| self.cause(error))
    }

    fn wait_until(&self, header: Option<&Header>, ready: impl Fn() -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        loop {
            if ready()? {
                return self.open();
            }
            self.open()?;
            self.check_peers(header)?;
            if begun.elapsed() >= self.deadline() {
                return Err(self.time_out(header, begun.elapsed()));
            }
            nap(begun);
        }
    }

    /// Fails where a rank that the operation needs is known to be lost.
    fn check_peers(&self, header: Option<&Header>) -> Result<()> {
        self.room.as_ref().map_or(Ok(()), |room| room.board.check(self.rank, header))
    }

    fn time_out(&self, operation: Option<&Header>, waited: Duration) -> Error {
        let missing = match (&self.room, operation) {
            (Some(room), Some(header)) => room.board.missing(self.rank, header),
            _ => "unknown, as NCCL does not tell".into(),
        };
        Error::Timeout {
            rank: self.rank,
            operation: operation.map_or_else(|| "joining or leaving the group".into(), Header::to_string),
            sequence: operation.map_or(0, |header| header.sequence),
            seconds: waited.as_secs_f64(),
            missing,
        }
    }

    fn unfinished(&self, header: &Header) -> Error {
        Error::Argument {
            what: "reduction",
            got: format!("a wait for {header} #{} before all its blocks were handed in", header.sequence),
            wanted: "every block first".into(),
        }
    }

    /// Looks after what is in flight: errors of NCCL's, ranks that are lost, deadlines.
    fn look(&self) -> Result<()> {
        self.flush(Self::GRACE)?;
        self.handle.poll()?;
        // One by one, as others call meanwhile, and without a copy of the list.
        let op = |index: usize| self.calls().ops.get(index).cloned();
        for op in (0..).map_while(op) {
            if let Health::Running(header, time) = op.health()? {
                self.check_peers(Some(&header))?;
                if time >= self.deadline() {
                    return Err(self.time_out(Some(&header), time));
                }
            }
        }
        Ok(())
    }

    fn watch(&self) {
        loop {
            let patience = (self.deadline() / 8).clamp(Duration::from_millis(2), Duration::from_millis(100));
            let waiting = self.pairs.lock().unwrap_or_else(PoisonError::into_inner).since.is_some();
            let patience = if waiting { Self::GRACE } else { patience };
            let calls = self.calls();
            if calls.stopping || calls.closed.is_some() {
                return;
            }
            let waited = self.stopped.wait_timeout(calls, patience).unwrap_or_else(PoisonError::into_inner);
            if waited.0.stopping || waited.0.closed.is_some() {
                return;
            }
            drop(waited);
            if let Err(error) = self.look() {
                tracing::warn!(target: "async_tensor_parallel", %error, "a group has ended");
                self.fail(&error);
            }
        }
    }

    fn header(&self, kind: Kind, dtype: DType, bytes: usize, chunks: usize) -> Header {
        Header { kind, dtype, bytes, chunks, sequence: 0 }
    }

    fn check_rank(&self, what: &'static str, rank: usize) -> Result<()> {
        if rank < self.world_size && rank != self.rank {
            return Ok(());
        }
        Err(Error::Argument { what, got: rank.to_string(), wanted: format!("another rank below {}", self.world_size) })
    }

    /// An operation to be filled in and started: the oldest one if the device has passed it, and else a new one.
    fn prepare(self: &Arc<Self>, mut header: Header, blocks: Blocks) -> Result<Arc<Op>> {
        let mut calls = self.calls();
        if let Some(error) = &calls.closed {
            return Err(closed(self.rank, error));
        }
        let counter = match header.kind {
            Kind::Send { to } => &mut calls.sends[to],
            Kind::Receive { from } => &mut calls.receives[from],
            _ => &mut calls.sequence,
        };
        header.sequence = *counter;
        *counter += 1;
        let next = if calls.next < calls.ops.len() { calls.next } else { 0 };
        calls.next = next + 1;
        if let Some(op) = calls.ops.get(next).filter(|op| Arc::strong_count(op) == 1 && op.is_over()) {
            let op = Arc::clone(op);
            drop(calls);
            op.reuse(header, blocks)?;
            return Ok(op);
        }
        let op = Arc::new(Op::new(header, blocks, self));
        calls.ops.insert(next, Arc::clone(&op));
        Ok(op)
    }

    /// Starts an operation whose buffers are filled in.
    fn start(&self, op: Arc<Op>, shard: Option<Buffer>) -> Result<Arc<Op>> {
        let header = op.lock().header;
        let announced = self.room.as_ref().map_or(Ok(()), |room| room.board.announce(self.rank, &header));
        let pairwise = header.is_pairwise();
        // What waits was started before this.
        let flushed = if pairwise { Ok(()) } else { self.flush(Duration::ZERO) };
        let begun = announced.and(flushed).and_then(|()| op.begin(shard));
        if begun.is_ok() && pairwise {
            let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
            pairs.waiting.push(Arc::clone(&op));
            pairs.since.get_or_insert_with(Instant::now);
            drop(pairs);
            self.stopped.notify_all();
        }
        begun.inspect_err(|error| self.fail(error)).map_err(|error| self.cause(error))?;
        Ok(op)
    }

    /// A gather of every rank's `shard` into `out`.
    fn gather(
        self: &Arc<Self>,
        kind: Kind,
        dtype: DType,
        blocks: Blocks,
        shard: Buffer,
        mut out: BufferMut,
    ) -> Result<Arc<Op>> {
        same_length("all_gather's shard", shard.len(), blocks.own_bytes(self.rank).len())?;
        same_length("all_gather's result", out.len(), blocks.total_bytes())?;
        let op = self.prepare(self.header(kind, dtype, blocks.total_bytes(), blocks.chunks), blocks)?;
        let mut state = op.lock();
        for piece in 0..blocks.pieces() {
            state.pieces[piece].result = Some(out.split_to(blocks.bytes(piece).len())?);
        }
        drop(state);
        self.start(op, Some(shard))
    }

    /// A reduction into `out`, which holds the given pieces.
    fn reduce(
        self: &Arc<Self>,
        kind: Kind,
        dtype: DType,
        blocks: Blocks,
        pieces: std::ops::Range<usize>,
        mut out: BufferMut,
    ) -> Result<Arc<dyn Operation>> {
        let op = self.prepare(self.header(kind, dtype, blocks.total_bytes(), blocks.chunks), blocks)?;
        if self.config.reduction == Reduction::Native {
            op.lock().out = Some(out);
        } else {
            let mut state = op.lock();
            for piece in pieces {
                state.pieces[piece].result = Some(out.split_to(blocks.bytes(piece).len())?);
            }
            drop(state);
            op.fill_staging()?;
        }
        Ok(self.start(op, None)?)
    }
}

impl NcclCommunicator {
    /// Joins the group of `id` as `rank` of `world_size`, and waits until all ranks have. Every rank needs a device of
    /// its own.
    ///
    /// # Errors
    /// [`Error::Library`] where NCCL is not on this machine; [`Error::Argument`] for a rank beyond the world;
    /// [`Error::Timeout`] where not all ranks join within the configuration's deadline; [`Error::Foreign`] with NCCL's
    /// own words.
    pub fn new(
        id: NcclId,
        rank: usize,
        world_size: usize,
        device: &Arc<CudaDevice>,
        config: NcclConfig,
    ) -> Result<Self> {
        Self::join(id, rank, world_size, device, config, (None, Recorder::disabled()))
    }

    fn join(
        id: NcclId,
        rank: usize,
        world_size: usize,
        device: &Arc<CudaDevice>,
        config: NcclConfig,
        (room, recorder): (Option<Arc<Room>>, Recorder),
    ) -> Result<Self> {
        if rank >= world_size || world_size > i32::MAX as usize {
            let wanted = format!("below the world size of {world_size}");
            return Err(Error::Argument { what: "rank", got: rank.to_string(), wanted });
        }
        device.bind()?;
        // A rank that has joined and ended the group since knows better than NCCL why this one fails.
        let known = |error| room.as_ref().and_then(|room| room.board.failure(rank)).unwrap_or(error);
        let handle = Handle::join(id, rank, world_size, &config).map_err(known)?;
        Self::start(handle, rank, world_size, device, config, (room, recorder))
    }

    /// Waits until the handle has joined its group, and starts the watcher.
    fn start(
        handle: Handle,
        rank: usize,
        world_size: usize,
        device: &Arc<CudaDevice>,
        config: NcclConfig,
        (room, recorder): (Option<Arc<Room>>, Recorder),
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            rank,
            world_size,
            handle,
            queue: Queue::new(device, recorder)?,
            order: Order::of(device),
            deadline: AtomicU64::new(millis(config.deadline)),
            config,
            calls: Mutex::new(Calls { sends: vec![0; world_size], receives: vec![0; world_size], ..Calls::default() }),
            pairs: Mutex::default(),
            stopped: Condvar::new(),
            room,
        });
        if let Some(room) = &shared.room {
            room.members.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&shared));
        }
        if let Err(error) = shared.settle(None) {
            shared.fail(&error);
            return Err(shared.cause(error));
        }
        let watched = Arc::clone(&shared);
        let watcher = std::thread::Builder::new()
            .name(format!("watcher of rank {rank}"))
            .spawn(move || watched.watch())
            .map_err(|error| Error::io("starting the watcher", &error))?;
        Ok(Self { shared, watcher: Some(watcher) })
    }

    /// Waits for what is in flight and leaves the group in order.
    fn leave(&self) -> Result<()> {
        self.shared.open()?;
        self.shared.flush(Duration::ZERO)?;
        let last = self.shared.queue.mark()?;
        self.shared.wait_until(None, || last.has_passed())?;
        self.shared.handle.finalize()?;
        self.shared.settle(None)?;
        self.shared.handle.destroy();
        Ok(())
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("panicked");
        } else if let Err(error) = self.leave() {
            self.shared.fail(&error);
            self.shared.handle.abort();
        }
        self.shared.calls().stopping = true;
        self.shared.stopped.notify_all();
        if let Some(watcher) = self.watcher.take() {
            // The watcher ends by itself. It does not panic.
            let _ = watcher.join();
        }
        // What was aborted leaves the stream. Only then may buffers of operations that nobody waited for be let go.
        if let Err(error) = self.shared.queue.drain() {
            tracing::warn!(target: "async_tensor_parallel", %error, "the communication stream failed");
        }
        // The operations hold what holds them.
        let ops = std::mem::take(&mut self.shared.calls().ops);
        let pairs = std::mem::take(&mut *self.shared.pairs.lock().unwrap_or_else(PoisonError::into_inner));
        drop((ops, pairs));
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size
    }

    fn describe(&self) -> String {
        format!("NCCL, {} devices", self.shared.world_size)
    }

    fn all_gather(&self, dtype: DType, blocks: Blocks, shard: Buffer, out: BufferMut) -> Result<Arc<dyn Operation>> {
        Ok(self.shared.gather(Kind::AllGather, dtype, blocks, shard, out)?)
    }

    fn reduce_scatter(&self, dtype: DType, blocks: Blocks, out: BufferMut) -> Result<Arc<dyn Operation>> {
        let rank = self.shared.rank;
        same_length("reduce_scatter's result", out.len(), blocks.own_bytes(rank).len())?;
        let own = rank * blocks.chunks..(rank + 1) * blocks.chunks;
        self.shared.reduce(Kind::ReduceScatter, dtype, blocks, own, out)
    }

    fn all_reduce(&self, dtype: DType, op: ReduceOp, blocks: Blocks, out: BufferMut) -> Result<Arc<dyn Operation>> {
        same_length("all_reduce's result", out.len(), blocks.total_bytes())?;
        self.shared.reduce(Kind::AllReduce(op), dtype, blocks, 0..blocks.pieces(), out)
    }

    fn broadcast(
        &self,
        dtype: DType,
        root: usize,
        input: Option<Buffer>,
        out: BufferMut,
    ) -> Result<Arc<dyn Operation>> {
        let Shared { rank, world_size, .. } = *self.shared;
        if root >= world_size || (root == rank) != input.is_some() {
            return Err(Error::Argument {
                what: "broadcast",
                got: format!("root {root}, {} on rank {rank}", if input.is_some() { "an input" } else { "no input" }),
                wanted: format!("a root below {world_size}, and an input on the root alone"),
            });
        }
        if let Some(input) = &input {
            same_length("broadcast's input", input.len(), out.len())?;
        }
        let blocks = Blocks::new(ShardLayout::uneven(1, 1)?, out.len());
        let op = self.shared.prepare(self.shared.header(Kind::Broadcast { root }, dtype, out.len(), 1), blocks)?;
        op.lock().pieces[0].result = Some(out);
        Ok(self.shared.start(op, input)?)
    }

    fn send(&self, dtype: DType, to: usize, data: Buffer) -> Result<Arc<dyn Operation>> {
        self.shared.check_rank("receiver", to)?;
        let blocks = Blocks::new(ShardLayout::uneven(1, 1)?, data.len());
        let op = self.shared.prepare(self.shared.header(Kind::Send { to }, dtype, data.len(), 1), blocks)?;
        Ok(self.shared.start(op, Some(data))?)
    }

    fn receive(&self, dtype: DType, from: usize, out: BufferMut) -> Result<Arc<dyn Operation>> {
        self.shared.check_rank("sender", from)?;
        let blocks = Blocks::new(ShardLayout::uneven(1, 1)?, out.len());
        let op = self.shared.prepare(self.shared.header(Kind::Receive { from }, dtype, out.len(), 1), blocks)?;
        op.lock().pieces[0].result = Some(out);
        Ok(self.shared.start(op, None)?)
    }

    fn barrier(&self) -> Result<()> {
        let blocks = Blocks::new(ShardLayout::even("ranks", self.shared.world_size, self.shared.world_size)?, 1);
        let device = self.shared.queue.device();
        let (mut shard, out) = (device.allocate(1)?, device.allocate(blocks.total_bytes())?);
        device.zero(&mut shard)?;
        let op = self.shared.gather(Kind::Barrier, DType::F32, blocks, shard.freeze(), out)?;
        op.finish()?;
        op.wait().map(drop)
    }

    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn Communicator>>> {
        let Shared { rank, world_size, .. } = *self.shared;
        let fits = |value: usize| value <= i32::MAX as usize;
        if !fits(key) || !color.is_none_or(fits) {
            return Err(Error::Argument {
                what: "split",
                got: format!("color {color:?}, key {key}"),
                wanted: format!("numbers up to {}", i32::MAX),
            });
        }
        // Everybody's choice: what the new groups are, and that nothing is in flight, as NCCL demands.
        let device = self.shared.queue.device();
        let blocks = Blocks::new(ShardLayout::even("ranks", world_size, world_size)?, 16);
        let choice = [color.map_or(-1, |color| color as i64), key as i64];
        let (mut shard, out) = (device.allocate(16)?, device.allocate(blocks.total_bytes())?);
        device.upload(bytemuck::cast_slice(&choice), &mut shard)?;
        let op = self.shared.gather(Kind::Split, DType::I64, blocks, shard.freeze(), out)?;
        let header = op.lock().header;
        op.finish()?;
        let all = op.wait()?;
        let mut choices = vec![0i64; 2 * world_size];
        device.download(&all, bytemuck::cast_slice_mut(&mut choices))?;
        let choices: Vec<_> = choices.chunks(2).map(|pair| (usize::try_from(pair[0]).ok(), pair[1] as usize)).collect();
        drop(op);

        let order = self.shared.order.last.lock().unwrap_or_else(PoisonError::into_inner);
        device.bind()?;
        let split = self.shared.handle.split(color, key, &self.shared.config);
        let settled = split.as_ref().map_or(Ok(()), |_| self.shared.settle(Some(&header)));
        drop(order);
        // NCCL may write to the new handle until the old communicator has been aborted: it lives until then.
        if let Err(error) = split.as_ref().map(|_| &()).and(settled.as_ref()) {
            self.shared.fail(error);
        }
        let handle = settled.and(split).map_err(|error| self.shared.cause(error))?;
        let (Some(color), Some(handle)) = (color, handle) else { return Ok(None) };
        let mut members: Vec<usize> = (0..world_size).filter(|rank| choices[*rank].0 == Some(color)).collect();
        members.sort_by_key(|rank| (choices[*rank].1, *rank));
        let new_rank = members.iter().position(|member| *member == rank).unwrap_or_default();
        let room = self.shared.room.as_ref().map(|room| room.child(header.sequence, color, &members));
        let config = NcclConfig { deadline: self.shared.deadline(), ..self.shared.config.clone() };
        let recorder = self.shared.queue.recorder().clone();
        let new = Self::start(handle, new_rank, members.len(), device, config, (room, recorder))?;
        Ok(Some(Arc::new(new)))
    }

    fn deadline(&self) -> Duration {
        self.shared.deadline()
    }

    fn set_deadline(&self, deadline: Duration) {
        self.shared.deadline.store(millis(deadline), Ordering::Relaxed);
        self.shared.stopped.notify_all();
    }

    fn abort(&self, reason: &str) {
        let Shared { rank, .. } = *self.shared;
        let sequence = self.shared.calls().sequence;
        self.shared.fail(&Error::PeerLost {
            rank,
            seen_by: rank,
            operation: "its own work".into(),
            sequence,
            reason: reason.into(),
        });
    }
}
