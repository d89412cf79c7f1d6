//! Collectives driven by the host: one progress thread a rank, over point-to-point messages.
//!
//! The algorithms stand here once; a [`Transport`] moves the messages (between threads, or over MPI), and [`Work`] does
//! what a rank does to its own memory. Where memory belongs to a device with queues, messages and work are queued rather
//! than done when a call returns: a [`Mark`] says after what, and every buffer is held until compute is ordered after
//! the queues that use it. Every reduction is ordered: an all-to-all in the wire dtype, then one sum over ranks 0, 1, … in the accumulator and one rounding, so that
//! results depend neither on timing nor on who was first. An all-reduce is that, and a gather of the sums.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::comm::{Blocks, Communicator, DEFAULT_DEADLINE, GAVE_UP, Operation, ReduceOp};
use crate::device::cpu::kernels::{self, Accumulate, Convert, for_float};
use crate::device::cpu::memory::{bytes, bytes_mut, elements, elements_mut};
use crate::device::{Device, same_length};
use crate::dtype::DType;
use crate::layout::ShardLayout;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::{Lane, Recorder};
use crate::{Error, Result};

/// Which collective an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AllGather,
    ReduceScatter,
    AllReduce(ReduceOp),
    Broadcast { root: usize },
    Send { to: usize },
    Receive { from: usize },
    Barrier,
    Split,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllReduce(ReduceOp::Sum) => "all_reduce",
            Kind::AllReduce(ReduceOp::Max) => "all_reduce_max",
            Kind::Broadcast { .. } => "broadcast",
            Kind::Send { .. } => "send",
            Kind::Receive { .. } => "receive",
            Kind::Barrier => "barrier",
            Kind::Split => "split",
        }
    }
}

/// What all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    pub(crate) bytes: usize,
    pub(crate) chunks: usize,
    pub(crate) sequence: u64,
}

impl Header {
    /// Point-to-point messages are numbered for each pair, apart from the collectives.
    pub(crate) fn is_pairwise(&self) -> bool {
        matches!(self.kind, Kind::Send { .. } | Kind::Receive { .. })
    }

    /// The error of this operation, begun before `cause` ended the group: that of another one is the reason why it cannot be
    /// done.
    fn ended_by(&self, rank: usize, cause: &Error) -> Error {
        match cause {
            Error::Timeout { sequence, .. } | Error::Mismatch { sequence, .. } if *sequence != self.sequence => {
                closed(rank, cause)
            }
            _ => cause.clone(),
        }
    }
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} {:?} elements", self.kind.name(), self.bytes / self.dtype.size(), self.dtype)?;
        match self.kind {
            Kind::Broadcast { root } => write!(f, " from rank {root}"),
            Kind::Send { to } => write!(f, " to rank {to}"),
            Kind::Receive { from } => write!(f, " from rank {from}"),
            _ if self.chunks > 1 => write!(f, " in {} chunks", self.chunks),
            _ => Ok(()),
        }
    }
}

/// One message of an operation: `part` tells those of one operation between two ranks apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) part: usize,
}

/// A point in a device's queue that other queues can be ordered after. There is none where everything has happened when
/// a call returns.
pub(crate) type Mark = Arc<dyn Any + Send + Sync>;

/// A buffer that is held until compute is ordered after its mark.
pub(crate) type Held = (Buffer, Mark);

/// What a transport has got done.
#[derive(Debug)]
pub(crate) enum Completion {
    /// The message's bytes are no longer needed, or not after the mark.
    Sent(Header, Message, Option<Held>),
    /// The message has arrived, or has at the mark, and kept this rank's port busy for so long.
    Received(Header, Message, BufferMut, Duration, Option<Mark>),
}

/// What a rank does to its own memory, in the queue that its communication runs in.
pub(crate) trait Work: Send + Sync + std::fmt::Debug {
    /// Marks what has been queued on compute so far.
    fn computed(&self) -> Result<Option<Mark>>;
    /// Orders what is queued on compute from now on after the mark.
    fn join(&self, mark: &Mark) -> Result<()>;
    /// Orders what is queued on communication from now on after the mark.
    fn follow(&self, mark: &Mark) -> Result<()>;
    /// Copies another buffer, of this rank or a peer.
    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<Option<Mark>>;
    /// Combines the ranks' summands in rank order into `out`.
    fn combine<'a>(
        &self,
        header: &Header,
        world_size: usize,
        summand: &dyn Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<Option<Mark>>;
    /// Waits until the communication's own queue is empty.
    fn drain(&self) -> Result<()>;
}

/// Host memory: everything has happened when a call returns.
#[derive(Debug)]
pub(crate) struct HostWork;

impl Work for HostWork {
    fn computed(&self) -> Result<Option<Mark>> {
        Ok(None)
    }
    fn join(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    fn follow(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<Option<Mark>> {
        bytes_mut(target)?.copy_from_slice(bytes(source)?);
        Ok(None)
    }
    fn combine<'a>(
        &self,
        header: &Header,
        world_size: usize,
        summand: &dyn Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<Option<Mark>> {
        combine(*header, world_size, summand, out)?;
        Ok(None)
    }
    fn drain(&self) -> Result<()> {
        Ok(())
    }
}

/// Moves messages between ranks. Lives on the progress thread.
pub(crate) trait Transport: Send {
    /// Says that this rank starts the operation.
    fn announce(&mut self, header: &Header) -> Result<()>;
    /// Starts to send, after the mark.
    fn send(&mut self, header: &Header, message: Message, data: Buffer, after: Option<Mark>) -> Result<()>;
    /// Starts to receive.
    fn receive(&mut self, header: &Header, message: Message, into: BufferMut) -> Result<()>;
    /// Collects what is done. Where nothing is, waits up to `patience` for something, or to be woken.
    fn progress(&mut self, done: &mut Vec<Completion>, patience: Duration) -> Result<()>;
}

/// What a transport shows to the threads that compute.
pub(crate) trait Control: Send + Sync + std::fmt::Debug {
    /// Wakes the progress thread.
    fn wake(&self);
    /// Which ranks have not come to the operation, and what they were last seen doing.
    fn missing(&self, header: &Header) -> String;
    /// Ends the group for all ranks.
    fn close(&self, error: &Error);
    /// A name.
    fn describe(&self) -> String;
    /// Another group of the ranks that gave the same color, given everybody's `(color, key)`.
    fn split(&self, sequence: u64, choices: &[(Option<usize>, usize)]) -> Result<Option<Arc<dyn Communicator>>>;
}

/// One operation, in flight or waiting to be used again.
#[derive(Debug)]
struct Op {
    state: Mutex<State>,
    changed: Condvar,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct State {
    header: Header,
    blocks: Blocks,
    /// One for each piece of the whole.
    pieces: Vec<Piece>,
    /// What the peers' summands of this rank's block are received into, or have been: `peer * chunks + chunk`.
    staging: Vec<Slot>,
    /// What had been queued on compute when the operation was started.
    begun: Option<Mark>,
    /// The last of its own work, and what queues still use: compute is ordered after them by the wait.
    last: Option<Mark>,
    held: Vec<Held>,
    /// Pieces of the result in order of arrival; those before `looked` have been returned.
    arrived: Vec<usize>,
    looked: usize,
    /// Messages that are still under way, and blocks that are still to be handed in.
    outstanding: usize,
    /// How long messages have kept this rank's port busy.
    communication: Duration,
    outcome: Option<Result<()>>,
}

/// A part of the result.
#[derive(Debug, Default)]
struct Piece {
    contribution: Option<Buffer>,
    contributed: bool,
    /// What had been queued on compute when the contribution was handed in.
    computed: Option<Mark>,
    result: Slot,
    /// When the result is there.
    done: Option<Mark>,
    /// Whether it has been returned by `next`.
    taken: bool,
}

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Empty,
    Writable(BufferMut),
    Done(Buffer),
}

impl Slot {
    fn take_mut(&mut self) -> Result<BufferMut> {
        match std::mem::take(self) {
            Slot::Writable(buffer) => Ok(buffer),
            other => {
                *self = other;
                Err(Error::Argument { what: "piece", got: "one that is in use".into(), wanted: "a free one".into() })
            }
        }
    }

    fn done(&self) -> Option<&Buffer> {
        match self {
            Slot::Done(buffer) => Some(buffer),
            _ => None,
        }
    }
}

enum Command {
    Start(Arc<Op>),
    Contribute(Arc<Op>, usize),
    Stop,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
    world_size: usize,
    deadline: AtomicU64,
    queue: Mutex<Queue>,
    control: Arc<dyn Control>,
    work: Arc<dyn Work>,
    recorder: Recorder,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    /// Numbers of the next collective, and of the next send to and receive from each rank.
    sequence: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// Operations to be used again once nobody holds them, and where to look first.
    recycled: Vec<Arc<Op>>,
    next: usize,
    /// The most pieces of any operation so far: each has room for as many.
    most_pieces: usize,
    closed: Option<Error>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} commands, next #{}", self.commands.len(), self.sequence)
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, command: Command) -> Result<()> {
        let mut queue = self.queue();
        if let Some(error) = queue.closed.clone() {
            drop(queue);
            return Err(match &command {
                Command::Contribute(op, _) => op.lock().header.ended_by(self.rank, &error),
                Command::Start(_) | Command::Stop => closed(self.rank, &error),
            });
        }
        queue.commands.push_back(command);
        drop(queue);
        self.control.wake();
        Ok(())
    }
}

/// The error that calls meet after `cause` has ended the group.
pub(crate) fn closed(rank: usize, cause: &Error) -> Error {
    match cause {
        Error::Closed { .. } => cause.clone(),
        _ => Error::Closed { rank, cause: cause.to_string() },
    }
}

/// A [`Communicator`] over a [`Transport`].
#[derive(Debug)]
pub(crate) struct HostCommunicator {
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    progress: Option<JoinHandle<()>>,
}

/// Room for the messages that may have queued up somewhere.
pub(crate) fn backlog(world_size: usize) -> usize {
    64 + 16 * world_size.min(64)
}

impl HostCommunicator {
    /// Operations that are made beforehand.
    const SPARE: usize = 8;

    /// Starts the progress thread of a rank with host memory.
    #[allow(dead_code, reason = "not every engine has host memory")]
    pub(crate) fn new(
        rank: usize,
        world_size: usize,
        device: Arc<dyn Device>,
        transport: impl Transport + 'static,
        control: Arc<dyn Control>,
        recorder: Recorder,
    ) -> Result<Self> {
        Self::with_work(rank, world_size, device, transport, control, Arc::new(HostWork), recorder)
    }

    /// Starts the progress thread of a rank whose memory `work` knows.
    pub(crate) fn with_work(
        rank: usize,
        world_size: usize,
        device: Arc<dyn Device>,
        transport: impl Transport + 'static,
        control: Arc<dyn Control>,
        work: Arc<dyn Work>,
        recorder: Recorder,
    ) -> Result<Self> {
        let queue = Queue { sends: vec![0; world_size], receives: vec![0; world_size], ..Queue::default() };
        let shared = Arc::new(Shared {
            rank,
            world_size,
            deadline: AtomicU64::new(millis(DEFAULT_DEADLINE)),
            queue: Mutex::new(queue),
            control,
            work,
            recorder,
        });
        // More than are ever in flight at once in a layer: how many that is depends on timing, and none should be made in
        // the steady state.
        let spare = (0..Self::SPARE).map(|_| Op::new(&shared)).collect::<Result<Vec<_>>>()?;
        let mut queue = shared.queue();
        queue.recycled.extend(spare);
        queue.commands.reserve(backlog(world_size));
        drop(queue);
        let (active, done) = (Vec::with_capacity(Self::SPARE), Vec::with_capacity(backlog(world_size)));
        let engine = Engine { shared: Arc::clone(&shared), transport, active, done };
        let progress = std::thread::Builder::new()
            .name(format!("communication of rank {rank}"))
            .spawn(move || engine.run())
            .map_err(|error| Error::io("starting the progress thread", &error))?;
        Ok(Self { shared, device, progress: Some(progress) })
    }

    /// An operation to be filled in and started: a recycled one if there is one.
    fn prepare(&self, mut header: Header, blocks: Blocks) -> Result<Arc<Op>> {
        let mut queue = self.shared.queue();
        if let Some(error) = &queue.closed {
            return Err(closed(self.shared.rank, error));
        }
        let counter = match header.kind {
            Kind::Send { to } => &mut queue.sends[to],
            Kind::Receive { from } => &mut queue.receives[from],
            _ => &mut queue.sequence,
        };
        header.sequence = *counter;
        *counter += 1;
        // In turn, so that all of them have soon grown to the sizes in use.
        let (count, first) = (queue.recycled.len(), queue.next);
        let free = (0..count).map(|step| (first + step) % count).find(|i| Arc::strong_count(&queue.recycled[*i]) == 1);
        let op = match free {
            Some(free) => {
                // Pairs with the release in the last handle's drop.
                std::sync::atomic::fence(Ordering::Acquire);
                queue.next = (free + 1) % count;
                Arc::clone(&queue.recycled[free])
            }
            None => {
                let op = Op::new(&self.shared)?;
                queue.recycled.push(Arc::clone(&op));
                op
            }
        };
        queue.most_pieces = queue.most_pieces.max(blocks.pieces());
        let room = queue.most_pieces;
        drop(queue);
        let mut state = op.lock();
        // Of one that nobody waited for: its buffers are about to be let go.
        state.order_compute(&*self.shared.work)?;
        state.header = header;
        state.blocks = blocks;
        state.pieces.clear();
        state.pieces.reserve(room);
        state.pieces.resize_with(blocks.pieces(), Piece::default);
        state.staging.clear();
        state.staging.reserve(room);
        state.held.reserve(2 * room);
        state.begun = None;
        state.arrived.clear();
        state.arrived.reserve(room);
        state.looked = 0;
        state.outstanding = 0;
        state.communication = Duration::ZERO;
        state.outcome = None;
        drop(state);
        Ok(op)
    }

    fn start(&self, op: Arc<Op>) -> Result<Arc<dyn Operation>> {
        op.lock().begun = self.shared.work.computed()?;
        self.shared.submit(Command::Start(Arc::clone(&op)))?;
        Ok(op)
    }

    fn header(&self, kind: Kind, dtype: DType, bytes: usize, chunks: usize) -> Header {
        Header { kind, dtype, bytes, chunks, sequence: 0 }
    }

    fn check_rank(&self, what: &'static str, rank: usize) -> Result<()> {
        if rank < self.shared.world_size && rank != self.shared.rank {
            return Ok(());
        }
        Err(Error::Argument {
            what,
            got: rank.to_string(),
            wanted: format!("another rank below {}", self.shared.world_size),
        })
    }

    /// A gather of every rank's `shard` into `out`, ready to start.
    fn gather(&self, kind: Kind, dtype: DType, blocks: Blocks, shard: &Buffer, mut out: BufferMut) -> Result<Arc<Op>> {
        let rank = self.shared.rank;
        let own = blocks.own_bytes(rank);
        same_length("all_gather's shard", shard.len(), own.len())?;
        same_length("all_gather's result", out.len(), blocks.total_bytes())?;
        let op = self.prepare(self.header(kind, dtype, blocks.total_bytes(), blocks.chunks), blocks)?;
        let mut state = op.lock();
        for piece in 0..blocks.pieces() {
            let range = blocks.bytes(piece);
            state.pieces[piece].result = Slot::Writable(out.split_to(range.len())?);
            if piece / blocks.chunks == rank {
                state.pieces[piece].contribution = Some(shard.slice(range.start - own.start..range.end - own.start)?);
            }
        }
        drop(state);
        Ok(op)
    }

    /// Buffers that the peers' summands for `bytes(piece)` of this rank's own pieces are received into.
    fn fill_staging(&self, state: &mut State) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        for peer in 0..world_size {
            for chunk in 0..state.blocks.chunks {
                let len = state.blocks.bytes(rank * state.blocks.chunks + chunk).len();
                state.staging.push(if peer == rank { Slot::Empty } else { Slot::Writable(self.device.allocate(len)?) });
            }
        }
        Ok(())
    }
}

impl Drop for HostCommunicator {
    fn drop(&mut self) {
        self.shared.queue().commands.push_back(Command::Stop);
        self.shared.control.wake();
        if let Some(progress) = self.progress.take() {
            // The thread ends by itself: after what is in flight, or at its error. It does not panic.
            let _ = progress.join();
        }
        // They hold what holds them.
        self.shared.queue().recycled.clear();
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().min(u64::MAX.into()) as u64
}

impl Communicator for HostCommunicator {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size
    }

    fn describe(&self) -> String {
        self.shared.control.describe()
    }

    fn all_gather(&self, dtype: DType, blocks: Blocks, shard: Buffer, out: BufferMut) -> Result<Arc<dyn Operation>> {
        let op = self.gather(Kind::AllGather, dtype, blocks, &shard, out)?;
        self.start(op)
    }

    fn reduce_scatter(&self, dtype: DType, blocks: Blocks, mut out: BufferMut) -> Result<Arc<dyn Operation>> {
        let rank = self.shared.rank;
        same_length("reduce_scatter's result", out.len(), blocks.own_bytes(rank).len())?;
        let op = self.prepare(self.header(Kind::ReduceScatter, dtype, blocks.total_bytes(), blocks.chunks), blocks)?;
        let mut state = op.lock();
        for chunk in 0..blocks.chunks {
            let piece = rank * blocks.chunks + chunk;
            state.pieces[piece].result = Slot::Writable(out.split_to(blocks.bytes(piece).len())?);
        }
        self.fill_staging(&mut state)?;
        drop(state);
        self.start(op)
    }

    fn all_reduce(&self, dtype: DType, op: ReduceOp, blocks: Blocks, mut out: BufferMut) -> Result<Arc<dyn Operation>> {
        same_length("all_reduce's result", out.len(), blocks.total_bytes())?;
        let op = self.prepare(self.header(Kind::AllReduce(op), dtype, blocks.total_bytes(), blocks.chunks), blocks)?;
        let mut state = op.lock();
        for piece in 0..blocks.pieces() {
            state.pieces[piece].result = Slot::Writable(out.split_to(blocks.bytes(piece).len())?);
        }
        self.fill_staging(&mut state)?;
        drop(state);
        self.start(op)
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
        let op = self.prepare(self.header(Kind::Broadcast { root }, dtype, out.len(), 1), blocks)?;
        let mut state = op.lock();
        state.pieces[0].result = Slot::Writable(out);
        state.pieces[0].contribution = input;
        drop(state);
        self.start(op)
    }

    fn send(&self, dtype: DType, to: usize, data: Buffer) -> Result<Arc<dyn Operation>> {
        self.check_rank("receiver", to)?;
        let blocks = Blocks::new(ShardLayout::uneven(1, 1)?, data.len());
        let op = self.prepare(self.header(Kind::Send { to }, dtype, data.len(), 1), blocks)?;
        op.lock().pieces[0].contribution = Some(data);
        self.start(op)
    }

    fn receive(&self, dtype: DType, from: usize, out: BufferMut) -> Result<Arc<dyn Operation>> {
        self.check_rank("sender", from)?;
        let blocks = Blocks::new(ShardLayout::uneven(1, 1)?, out.len());
        let op = self.prepare(self.header(Kind::Receive { from }, dtype, out.len(), 1), blocks)?;
        op.lock().pieces[0].result = Slot::Writable(out);
        self.start(op)
    }

    fn barrier(&self) -> Result<()> {
        let blocks = Blocks::new(ShardLayout::uneven(0, self.shared.world_size)?, 0);
        let (shard, out) = (self.device.allocate(0)?.freeze(), self.device.allocate(0)?);
        let op = self.gather(Kind::Barrier, DType::F32, blocks, &shard, out)?;
        self.start(op)?.wait().map(drop)
    }

    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn Communicator>>> {
        let Shared { world_size, .. } = *self.shared;
        let blocks = Blocks::new(ShardLayout::even("ranks", world_size, world_size)?, 16);
        let choice = [color.map_or(-1, |color| color as i64), key as i64];
        let (mut shard, out) = (self.device.allocate(16)?, self.device.allocate(blocks.total_bytes())?);
        self.device.upload(bytemuck::cast_slice(&choice), &mut shard)?;
        let op = self.gather(Kind::Split, DType::I64, blocks, &shard.freeze(), out)?;
        let sequence = op.lock().header.sequence;
        let all = self.start(op)?.wait()?;
        let mut choices = vec![0i64; 2 * world_size];
        self.device.download(&all, bytemuck::cast_slice_mut(&mut choices))?;
        let choices: Vec<_> = choices.chunks(2).map(|pair| (usize::try_from(pair[0]).ok(), pair[1] as usize)).collect();
        self.shared.control.split(sequence, &choices)
    }

    fn deadline(&self) -> Duration {
        Duration::from_millis(self.shared.deadline.load(Ordering::Relaxed))
    }

    fn set_deadline(&self, deadline: Duration) {
        self.shared.deadline.store(millis(deadline), Ordering::Relaxed);
    }

    fn abort(&self, reason: &str) {
        let Shared { rank, .. } = *self.shared;
        self.shared.control.close(&Error::PeerLost {
            rank,
            seen_by: rank,
            operation: "its own work".into(),
            sequence: self.shared.queue().sequence,
            reason: reason.into(),
        });
        self.shared.control.wake();
    }
}

impl State {
    /// A piece of the result is there, or will be at the mark.
    fn deliver(&mut self, piece: usize, result: Buffer, done: Option<Mark>) {
        self.last.clone_from(&done);
        self.pieces[piece].result = Slot::Done(result);
        self.pieces[piece].done = done;
        self.arrived.push(piece);
    }

    /// Orders later compute after everything that uses the operation's buffers, and lets go of those that were read.
    fn order_compute(&mut self, work: &dyn Work) -> Result<()> {
        let mut marks = self.last.iter().chain(self.held.iter().map(|(_, mark)| mark));
        marks.try_for_each(|mark| work.join(mark))?;
        self.last = None;
        self.held.clear();
        Ok(())
    }

    /// Keeps a buffer that is read until the mark.
    fn hold(&mut self, buffer: Buffer, until: Option<&Mark>) {
        self.held.extend(until.map(|mark| (buffer, Arc::clone(mark))));
    }
}

impl Op {
    /// One that has not been used yet.
    fn new(shared: &Arc<Shared>) -> Result<Arc<Self>> {
        let state = State {
            header: Header { kind: Kind::Barrier, dtype: DType::F32, bytes: 0, chunks: 1, sequence: 0 },
            blocks: Blocks::new(ShardLayout::uneven(0, 1)?, 0),
            pieces: Vec::new(),
            staging: Vec::new(),
            begun: None,
            last: None,
            held: Vec::new(),
            arrived: Vec::new(),
            looked: 0,
            outstanding: 0,
            communication: Duration::ZERO,
            outcome: None,
        };
        Ok(Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), shared: Arc::clone(shared) }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` finds something in the state, the operation fails, or the deadline passes.
    fn wait_until<R>(&self, ready: impl Fn(&mut State) -> Option<R>) -> Result<R> {
        let begun = Instant::now();
        let deadline = Duration::from_millis(self.shared.deadline.load(Ordering::Relaxed));
        let mut state = self.lock();
        let mut span = None;
        loop {
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            if let Some(Err(error)) = &state.outcome {
                return Err(error.clone());
            }
            span.get_or_insert_with(|| self.shared.recorder.span(Lane::Wait, state.header.kind.name()));
            let waited = begun.elapsed();
            let Some(left) = deadline.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let header = state.header;
                drop(state);
                return Err(self.time_out(&header, waited));
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn timed_out(&self, header: &Header, waited: Duration) -> Error {
        Error::Timeout {
            rank: self.shared.rank,
            operation: header.to_string(),
            sequence: header.sequence,
            seconds: waited.as_secs_f64(),
            missing: self.shared.control.missing(header),
        }
    }

    fn time_out(&self, header: &Header, waited: Duration) -> Error {
        let error = self.timed_out(header, waited);
        self.shared.control.close(&error);
        self.shared.control.wake();
        error
    }
}

impl Operation for Op {
    fn communication(&self) -> Duration {
        self.lock().communication
    }

    fn contribute(self: Arc<Self>, piece: usize, block: Buffer) -> Result<()> {
        let mut state = self.lock();
        let refused = |got: String, wanted: &str| Error::Argument { what: "block", got, wanted: wanted.into() };
        if !matches!(state.header.kind, Kind::ReduceScatter | Kind::AllReduce(_)) || piece >= state.pieces.len() {
            return Err(refused(format!("piece {piece}"), "a piece of a reduction"));
        }
        if state.pieces[piece].contributed {
            return Err(refused(format!("piece {piece} again"), "each piece once"));
        }
        same_length("block of a reduction", block.len(), state.blocks.bytes(piece).len())?;
        state.pieces[piece].computed = self.shared.work.computed()?;
        state.pieces[piece].contribution = Some(block);
        state.pieces[piece].contributed = true;
        drop(state);
        let shared = Arc::clone(&self.shared);
        shared.submit(Command::Contribute(self, piece))
    }

    fn next(&self) -> Result<Option<(Range<usize>, Buffer)>> {
        let rank = self.shared.rank;
        self.wait_until(|state| {
            let chunks = state.blocks.chunks;
            let untaken = |state: &State, piece: usize| {
                let known = &state.pieces[piece];
                (piece / chunks != rank && !known.taken).then(|| known.result.done()).flatten().cloned()
            };
            let (piece, mut run) = loop {
                match state.arrived.get(state.looked) {
                    Some(piece) => match untaken(state, *piece) {
                        Some(buffer) => break (*piece, buffer),
                        None => state.looked += 1,
                    },
                    None => return matches!(state.outcome, Some(Ok(()))).then_some(Ok(None)),
                }
            };
            let mut range = piece..piece + 1;
            while let Some(buffer) = range.start.checked_sub(1).and_then(|before| untaken(state, before)) {
                range.start -= 1;
                run = match buffer.join(&run) {
                    Ok(run) => run,
                    Err(error) => return Some(Err(error)),
                };
            }
            while let Some(buffer) = (range.end < state.pieces.len()).then(|| untaken(state, range.end)).flatten() {
                range.end += 1;
                run = match run.join(&buffer) {
                    Ok(run) => run,
                    Err(error) => return Some(Err(error)),
                };
            }
            for piece in &mut state.pieces[range.clone()] {
                piece.taken = true;
                if let Some(Err(error)) = piece.done.as_ref().map(|done| self.shared.work.join(done)) {
                    return Some(Err(error));
                }
            }
            Some(Ok(Some((range, run))))
        })?
    }

    fn wait(&self) -> Result<Buffer> {
        self.wait_until(|state| matches!(state.outcome, Some(Ok(()))).then_some(()))?;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.order_compute(&*self.shared.work)?;
        let mut whole: Option<Buffer> = None;
        for piece in &mut state.pieces {
            if let Slot::Done(buffer) = std::mem::take(&mut piece.result) {
                whole = Some(match whole {
                    Some(front) => front.join(&buffer)?,
                    None => buffer,
                });
            } else if let Some(sent) = piece.contribution.take() {
                // A send has no result but what was sent.
                whole.get_or_insert(sent);
            }
        }
        whole.ok_or_else(|| Error::Argument {
            what: "operation",
            got: "one whose result has been taken".into(),
            wanted: "one wait for each".into(),
        })
    }
}

/// The progress thread's own state.
struct Engine<T> {
    shared: Arc<Shared>,
    transport: T,
    active: Vec<Arc<Op>>,
    done: Vec<Completion>,
}

impl<T: Transport> Engine<T> {
    /// How long a transport may sleep when nothing is to be done; it is woken for new commands.
    const PATIENCE: Duration = Duration::from_secs(3600);

    fn run(mut self) {
        let outcome = self.serve();
        if let Err(error) = &outcome {
            self.shared.control.close(error);
        }
        let settled = self.settle_queues();
        if let Err(error) = outcome.and(settled) {
            let mut queue = self.shared.queue();
            queue.closed = Some(error.clone());
            let commands = std::mem::take(&mut queue.commands);
            drop(queue);
            for command in commands {
                if let Command::Start(op) | Command::Contribute(op, _) = command {
                    self.active.push(op);
                }
            }
            for op in self.active.drain(..) {
                let mut state = op.lock();
                if state.outcome.is_none() {
                    state.outcome = Some(Err(state.header.ended_by(self.shared.rank, &error)));
                }
                op.changed.notify_all();
            }
        }
        // The operations hold what holds them.
        let recycled = std::mem::take(&mut self.shared.queue().recycled);
        drop(recycled);
    }

    /// Waits for every queue that uses a buffer of an operation that was not waited for.
    fn settle_queues(&self) -> Result<()> {
        let ops = self.shared.queue().recycled.clone();
        let held = ops.iter().try_for_each(|op| {
            let marks: Vec<Mark> = op.lock().held.iter().map(|(_, mark)| Arc::clone(mark)).collect();
            marks.iter().try_for_each(|mark| self.shared.work.follow(mark))
        });
        held.and(self.shared.work.drain())
    }

    fn serve(&mut self) -> Result<()> {
        let mut stopped: Option<Instant> = None;
        loop {
            let command = self.shared.queue().commands.pop_front();
            match command {
                Some(Command::Start(op)) => self.begin(op)?,
                Some(Command::Contribute(op, piece)) => self.contribute(&op, piece)?,
                Some(Command::Stop) => stopped = Some(Instant::now()),
                None => {
                    let patience = match stopped {
                        None => Self::PATIENCE,
                        Some(_) if self.active.is_empty() => return Ok(()),
                        Some(since) => self.finishing(since)?,
                    };
                    let mut done = std::mem::take(&mut self.done);
                    self.transport.progress(&mut done, patience)?;
                    for completion in done.drain(..) {
                        self.complete(completion)?;
                    }
                    self.done = done;
                }
            }
        }
    }

    /// Whether what is in flight, of a communicator that nobody holds any more, can still end well; and how long to wait for it.
    fn finishing(&self, since: Instant) -> Result<Duration> {
        let rank = self.shared.rank;
        for op in &self.active {
            let state = op.lock();
            let header = state.header;
            let reduction = matches!(header.kind, Kind::ReduceScatter | Kind::AllReduce(_));
            if reduction && state.pieces.iter().any(|piece| !piece.contributed) {
                return Err(Error::PeerLost {
                    rank,
                    seen_by: rank,
                    operation: header.to_string(),
                    sequence: header.sequence,
                    reason: GAVE_UP.into(),
                });
            }
        }
        let deadline = Duration::from_millis(self.shared.deadline.load(Ordering::Relaxed));
        let left = deadline.saturating_sub(since.elapsed());
        match self.active.first() {
            Some(op) if left.is_zero() => {
                let header = op.lock().header;
                Err(op.timed_out(&header, since.elapsed()))
            }
            _ => Ok(left),
        }
    }

    /// Posts all messages of an operation that can be posted at its start. In step `s` every rank sends to the `s`-th
    /// rank after it and receives from the `s`-th before it, so that no two ranks send to the same one.
    fn begin(&mut self, op: Arc<Op>) -> Result<()> {
        // Before anything can fail: who waits for it must be told.
        self.active.push(Arc::clone(&op));
        let Shared { rank, world_size, .. } = *self.shared;
        let mut guard = op.lock();
        let state = &mut *guard;
        let (header, blocks) = (state.header, state.blocks);
        self.transport.announce(&header)?;
        let begun = state.begun.clone();
        begun.as_ref().map_or(Ok(()), |mark| self.shared.work.follow(mark))?;
        let peers = |step: usize| ((rank + step) % world_size, (rank + world_size - step) % world_size);
        match header.kind {
            Kind::AllGather | Kind::Barrier | Kind::Split => {
                for chunk in 0..blocks.chunks {
                    let own = rank * blocks.chunks + chunk;
                    let shard = state.pieces[own].contribution.take().ok_or_else(nothing_to_send)?;
                    let mut copy = state.pieces[own].result.take_mut()?;
                    for step in 1..world_size {
                        let (to, from) = peers(step);
                        let piece = from * blocks.chunks + chunk;
                        let into = state.pieces[piece].result.take_mut()?;
                        self.transport.receive(&header, Message { peer: from, part: piece }, into)?;
                        self.transport.send(&header, Message { peer: to, part: own }, shard.clone(), begun.clone())?;
                        state.outstanding += 2;
                    }
                    let done = self.shared.work.copy(&shard, &mut copy)?;
                    state.hold(shard, done.as_ref());
                    state.deliver(own, copy.freeze(), done);
                }
            }
            Kind::ReduceScatter | Kind::AllReduce(_) => {
                for step in 1..world_size {
                    let (_, from) = peers(step);
                    for chunk in 0..blocks.chunks {
                        self.receive_summand(state, from, chunk)?;
                        if header.kind != Kind::ReduceScatter {
                            let piece = from * blocks.chunks + chunk;
                            let into = state.pieces[piece].result.take_mut()?;
                            let message = Message { peer: from, part: blocks.pieces() + piece };
                            self.transport.receive(&header, message, into)?;
                            state.outstanding += 1;
                        }
                    }
                }
                // Blocks are still to be handed in.
                state.outstanding += blocks.pieces();
            }
            Kind::Broadcast { root } if root == rank => {
                let input = state.pieces[0].contribution.take().ok_or_else(nothing_to_send)?;
                for step in 1..world_size {
                    let message = Message { peer: peers(step).0, part: 0 };
                    self.transport.send(&header, message, input.clone(), begun.clone())?;
                    state.outstanding += 1;
                }
                let mut copy = state.pieces[0].result.take_mut()?;
                let done = self.shared.work.copy(&input, &mut copy)?;
                state.hold(input, done.as_ref());
                state.deliver(0, copy.freeze(), done);
            }
            Kind::Broadcast { root: peer } | Kind::Receive { from: peer } => {
                let into = state.pieces[0].result.take_mut()?;
                self.transport.receive(&header, Message { peer, part: 0 }, into)?;
                state.outstanding += 1;
            }
            Kind::Send { to: peer } => {
                let data = state.pieces[0].contribution.clone().ok_or_else(nothing_to_send)?;
                self.transport.send(&header, Message { peer, part: 0 }, data, begun)?;
                state.outstanding += 1;
            }
        }
        self.settle(guard, &op)
    }

    fn receive_summand(&mut self, state: &mut State, from: usize, chunk: usize) -> Result<()> {
        let chunks = state.blocks.chunks;
        let into = state.staging[from * chunks + chunk].take_mut()?;
        let part = self.shared.rank * chunks + chunk;
        self.transport.receive(&state.header, Message { peer: from, part }, into)?;
        state.outstanding += 1;
        Ok(())
    }

    /// A block of a reduction has been handed in.
    fn contribute(&mut self, op: &Arc<Op>, piece: usize) -> Result<()> {
        let mut guard = op.lock();
        let state = &mut *guard;
        let (owner, chunk) = (piece / state.blocks.chunks, piece % state.blocks.chunks);
        if owner == self.shared.rank {
            self.try_sum(state, chunk)?;
        } else {
            let block = state.pieces[piece].contribution.take().ok_or_else(nothing_to_send)?;
            let computed = state.pieces[piece].computed.take();
            self.transport.send(&state.header, Message { peer: owner, part: piece }, block, computed)?;
        }
        self.settle(guard, op)
    }

    fn complete(&mut self, completion: Completion) -> Result<()> {
        let (Completion::Sent(header, message, _) | Completion::Received(header, message, ..)) = &completion;
        let found = self.active.iter().find(|op| {
            let state = op.lock();
            state.header.sequence == header.sequence && state.header.kind == header.kind
        });
        let Some(op) = found.map(Arc::clone) else {
            return Err(Error::Argument {
                what: "completion",
                got: format!("{header} #{} with rank {}", header.sequence, message.peer),
                wanted: "one of an operation in flight".into(),
            });
        };
        let mut guard = op.lock();
        let state = &mut *guard;
        match completion {
            // A block of a reduction counts once, when it has been sent.
            Completion::Sent(_, _, held) => {
                state.outstanding -= 1;
                state.held.extend(held);
            }
            Completion::Received(header, message, buffer, busy, done) => {
                state.outstanding -= 1;
                state.communication += busy;
                let (rank, chunks, pieces) = (self.shared.rank, state.blocks.chunks, state.pieces.len());
                let reduction = matches!(header.kind, Kind::ReduceScatter | Kind::AllReduce(_));
                if reduction && message.part < pieces {
                    let chunk = message.part - rank * chunks;
                    state.staging[message.peer * chunks + chunk] = Slot::Done(buffer.freeze());
                    self.try_sum(state, chunk)?;
                } else {
                    let piece = if reduction { message.part - pieces } else { message.part };
                    state.deliver(piece, buffer.freeze(), done);
                }
            }
        }
        self.settle(guard, &op)
    }

    /// Forms the sum of this rank's `chunk` once all summands are there.
    fn try_sum(&mut self, state: &mut State, chunk: usize) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        let chunks = state.blocks.chunks;
        let own = rank * chunks + chunk;
        let ready = state.pieces[own].contribution.is_some()
            && (0..world_size).all(|peer| peer == rank || state.staging[peer * chunks + chunk].done().is_some());
        if !ready {
            return Ok(());
        }
        let mut out = state.pieces[own].result.take_mut()?;
        let summand = |peer: usize| {
            let staged = state.staging.get(peer * chunks + chunk).and_then(Slot::done);
            if peer == rank { state.pieces[own].contribution.as_ref() } else { staged }
        };
        state.pieces[own].computed.as_ref().map_or(Ok(()), |mark| self.shared.work.follow(mark))?;
        let begun = Instant::now();
        let done = self.shared.work.combine(&state.header, world_size, &summand, &mut out)?;
        if done.is_none() {
            self.shared.recorder.note(Lane::Communication, "sum", begun, Instant::now(), 0);
        }
        let sum = out.freeze();
        if let Some(block) = state.pieces[own].contribution.take() {
            state.hold(block, done.as_ref());
        }
        for peer in 0..world_size {
            if let Slot::Done(summand) = std::mem::take(&mut state.staging[peer * chunks + chunk]) {
                state.hold(summand, done.as_ref());
            }
        }
        state.outstanding -= 1;
        if let Kind::AllReduce(_) = state.header.kind {
            for step in 1..world_size {
                let to = (rank + step) % world_size;
                self.transport.send(
                    &state.header,
                    Message { peer: to, part: state.pieces.len() + own },
                    sum.clone(),
                    done.clone(),
                )?;
                state.outstanding += 1;
            }
        }
        state.deliver(own, sum, done);
        Ok(())
    }

    /// Wakes who waits, and forgets the operation if it is done.
    fn settle(&mut self, mut state: MutexGuard<'_, State>, op: &Arc<Op>) -> Result<()> {
        let finished = Self::finish(&mut state);
        drop(state);
        if finished {
            self.active.retain(|active| !Arc::ptr_eq(active, op));
        }
        op.changed.notify_all();
        Ok(())
    }

    fn finish(state: &mut State) -> bool {
        if state.outstanding == 0 && state.outcome.is_none() {
            state.outcome = Some(Ok(()));
        }
        state.outcome.is_some()
    }
}

fn nothing_to_send() -> Error {
    Error::Argument { what: "operation", got: "no data".into(), wanted: "this rank's data".into() }
}

/// Combines the ranks' summands in rank order into `out`.
fn combine<'a>(
    header: Header,
    world_size: usize,
    summand: impl Fn(usize) -> Option<&'a Buffer>,
    out: &mut BufferMut,
) -> Result<()> {
    fn run<'a, T: Convert<Accumulator: Accumulate>>(
        kind: Kind,
        world_size: usize,
        summand: impl Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<()> {
        for rank in 0..world_size {
            let buffer = summand(rank).ok_or_else(nothing_to_send)?;
            same_length("summand", buffer.len(), out.len())?;
            elements::<T>(buffer)?;
        }
        // All summands are known to be there: an empty slice never comes up.
        let part = |rank| summand(rank).and_then(|buffer| elements::<T>(buffer).ok()).unwrap_or_default();
        let out = elements_mut::<T>(out)?;
        if kind == Kind::AllReduce(ReduceOp::Max) {
            kernels::max_in_order(world_size, part, out);
        } else {
            kernels::sum_in_order(world_size, part, out);
        }
        Ok(())
    }
    for_float!(header.dtype, run(header.kind, world_size, summand, out))
}
