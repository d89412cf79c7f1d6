//! A collective that has been queued on the communication stream, or is being queued block by block.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::api::{Reduction, Transfer};
use crate::comm::host::{Header, Kind};
use crate::comm::queue::{address, address_mut};
use crate::comm::{Blocks, Operation, ReduceOp};
use crate::device::cuda::events::Event;
use crate::device::same_length;
use crate::memory::{Buffer, BufferMut};
use crate::{Error, Result};

/// One operation, in flight or waiting to be used again.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) state: Mutex<State>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) header: Header,
    pub(super) blocks: Blocks,
    /// One for each piece of the whole.
    pub(super) pieces: Vec<Piece>,
    /// Native reductions: all of the result.
    pub(super) out: Option<BufferMut>,
    /// What the peers' summands of this rank's block are received into, or have been: `peer * chunks + chunk`.
    staging: Vec<Staged>,
    /// What is read until the last event.
    held: Vec<Buffer>,
    /// Pieces that come from other ranks, in order of arrival; those before `looked` have been returned.
    arrivals: Vec<usize>,
    looked: usize,
    /// Blocks that have been handed in.
    handed: usize,
    /// Whether everything has been queued.
    complete: bool,
    /// The start of what was queued last, and its end.
    ready: Option<Arc<Event>>,
    last: Option<Arc<Event>>,
    /// Since when the device has been at what was queued last.
    running_since: Option<Instant>,
    /// Reused from step to step.
    transfers: Vec<Transfer>,
}

/// A part of the result.
#[derive(Debug, Default)]
pub(super) struct Piece {
    contribution: Option<Buffer>,
    pub(super) result: Option<BufferMut>,
    done: Option<(Buffer, Arc<Event>)>,
    taken: bool,
}

#[derive(Debug)]
enum Staged {
    Own,
    Empty(BufferMut),
    Full(Buffer),
}

impl State {
    fn new(header: Header, blocks: Blocks) -> Self {
        Self {
            header,
            blocks,
            pieces: Vec::new(),
            out: None,
            staging: Vec::new(),
            held: Vec::new(),
            arrivals: Vec::new(),
            looked: 0,
            handed: 0,
            complete: false,
            ready: None,
            last: None,
            running_since: None,
            transfers: Vec::new(),
        }
    }

    /// Forgets an earlier operation.
    fn reset(&mut self, header: Header, blocks: Blocks) {
        self.header = header;
        self.blocks = blocks;
        self.pieces.clear();
        self.pieces.resize_with(blocks.pieces(), Piece::default);
        self.out = None;
        self.staging.clear();
        self.held.clear();
        self.arrivals.clear();
        self.looked = 0;
        self.handed = 0;
        self.complete = false;
        self.ready = None;
        self.last = None;
        self.running_since = None;
        self.transfers.clear();
    }

    /// A result is there once the stream has passed `at`.
    fn deliver(&mut self, piece: usize, at: &Arc<Event>) {
        if let Some(result) = self.pieces[piece].result.take() {
            self.pieces[piece].done = Some((result.freeze(), Arc::clone(at)));
        }
    }

    fn result_address(&mut self, piece: usize) -> Result<u64> {
        self.pieces[piece].result.as_mut().map_or_else(|| Err(in_use()), address_mut)
    }
}

fn in_use() -> Error {
    Error::Argument { what: "piece", got: "one that is in use".into(), wanted: "a free one".into() }
}

/// What the watcher finds of an operation.
pub(super) enum Health {
    /// Nothing of it is on the device.
    Idle,
    /// The device has been at its last part for so long.
    Running(Header, Duration),
}

impl Op {
    pub(super) fn new(header: Header, blocks: Blocks, shared: &Arc<Shared>) -> Self {
        let mut state = State::new(header, blocks);
        state.reset(header, blocks);
        Self { state: Mutex::new(state), shared: Arc::clone(shared) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes it ready to be filled in again, with compute ordered after what it was used for.
    pub(super) fn reuse(&self, header: Header, blocks: Blocks) -> Result<()> {
        let mut state = self.lock();
        if let Some(last) = state.last.take() {
            self.shared.queue.join(&last)?;
        }
        state.reset(header, blocks);
        Ok(())
    }

    /// Whether the device has passed everything of it. One that is being queued is not over.
    pub(super) fn is_over(&self) -> bool {
        let Ok(state) = self.state.try_lock() else { return false };
        state.last.as_ref().is_none_or(|last| last.has_passed().unwrap_or(false))
    }

    /// Looks whether the device is at it; forgets the clock where it is not. Where another thread is queueing it, that one
    /// keeps the time.
    pub(super) fn health(&self) -> Result<Health> {
        let Ok(mut state) = self.state.try_lock() else { return Ok(Health::Idle) };
        let running = match (&state.ready, &state.last) {
            (Some(ready), Some(last)) => ready.has_passed()? && !last.has_passed()?,
            _ => false,
        };
        if !running {
            state.running_since = None;
            return Ok(Health::Idle);
        }
        let since = *state.running_since.get_or_insert_with(Instant::now);
        Ok(Health::Running(state.header, since.elapsed()))
    }

    /// Hands over the transfers of a send or receive, to travel with others.
    pub(super) fn take_transfers(&self, into: &mut Vec<Transfer>) {
        into.extend(self.lock().transfers.drain(..).filter(|transfer| !transfer.is_empty()));
    }

    /// A send or receive travels until `done`.
    pub(super) fn travels_until(&self, done: &Arc<Event>) {
        let mut state = self.lock();
        state.last = Some(Arc::clone(done));
        state.deliver(0, done);
        state.complete = true;
    }

    /// Starts: everything that needs no block handed in is queued, after what is queued on compute. Sends and receives are
    /// only prepared.
    pub(super) fn begin(&self, shard: Option<Buffer>) -> Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.follow_compute(state)?;
        match state.header.kind {
            Kind::AllGather | Kind::Barrier | Kind::Split => {
                let shard = shard.ok_or_else(nothing_to_send)?;
                self.gather(state, &shard)?;
                state.held.push(shard);
            }
            // Blocks are still to be handed in.
            Kind::ReduceScatter | Kind::AllReduce(_) => return Ok(()),
            Kind::Broadcast { root } => {
                let to = state.result_address(0)?;
                let from = shard.as_ref().map_or(Ok(to), address)?;
                state.transfers.push(Transfer::Broadcast { root, from, to, bytes: state.header.bytes });
                let done = self.submit(state)?;
                state.held.extend(shard);
                state.deliver(0, &done);
            }
            Kind::Send { to } => {
                let data = shard.ok_or_else(nothing_to_send)?;
                state.transfers.push(Transfer::Send { to, from: address(&data)?, bytes: data.len() });
                state.pieces[0].contribution = Some(data);
                return Ok(());
            }
            Kind::Receive { from } => {
                let to = state.result_address(0)?;
                state.transfers.push(Transfer::Receive { from, to, bytes: state.header.bytes });
                return Ok(());
            }
        }
        state.complete = true;
        Ok(())
    }

    /// Orders communication after what is queued on compute.
    fn follow_compute(&self, state: &mut State) -> Result<()> {
        let ready = self.shared.queue.mark_compute()?;
        self.shared.queue.follow(&ready)?;
        state.ready = Some(ready);
        state.running_since = None;
        Ok(())
    }

    /// Queues `state.transfers` as one group. Those of no bytes are left out: the other side leaves them out too.
    fn submit(&self, state: &mut State) -> Result<Arc<Event>> {
        state.transfers.retain(|transfer| !transfer.is_empty());
        let queued = self.shared.submit(&state.header, &state.transfers);
        state.transfers.clear();
        let done = queued?;
        state.last = Some(Arc::clone(&done));
        Ok(done)
    }

    /// Notes an end that is no transfer's.
    fn mark(&self, state: &mut State) -> Result<Arc<Event>> {
        let done = self.shared.queue.mark()?;
        state.last = Some(Arc::clone(&done));
        Ok(done)
    }

    /// In step `s` every rank sends to the `s`-th rank after it and receives from the `s`-th before it.
    fn peers(&self, step: usize) -> (usize, usize) {
        let Shared { rank, world_size, .. } = *self.shared;
        ((rank + step) % world_size, (rank + world_size - step) % world_size)
    }

    /// Queues a gather: one step a peer and chunk, or all at once.
    fn gather(&self, state: &mut State, shard: &Buffer) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        let (blocks, chunks) = (state.blocks, state.blocks.chunks);
        let own = blocks.own_bytes(rank);
        let even = blocks.layout.total() == blocks.layout.largest() * world_size;
        if self.shared.config.whole_gathers && even && own.len() * world_size > 0 {
            let to = state.result_address(0)?;
            state.transfers.push(Transfer::AllGather { from: address(shard)?, to, bytes: own.len() });
            let done = self.submit(state)?;
            for piece in 0..blocks.pieces() {
                state.deliver(piece, &done);
                if piece / chunks != rank {
                    state.arrivals.push(piece);
                }
            }
            return Ok(());
        }
        for chunk in 0..chunks {
            let piece = rank * chunks + chunk;
            let range = blocks.bytes(piece);
            let part = shard.slice(range.start - own.start..range.end - own.start)?;
            let mut into = state.pieces[piece].result.take().ok_or_else(in_use)?;
            self.shared.queue.copy(&part, &mut into)?;
            state.pieces[piece].result = Some(into);
        }
        let copied = self.mark(state)?;
        (0..chunks).for_each(|chunk| state.deliver(rank * chunks + chunk, &copied));
        for step in 1..world_size {
            let (to, from) = self.peers(step);
            for chunk in 0..chunks {
                let range = blocks.bytes(rank * chunks + chunk);
                let part = shard.slice(range.start - own.start..range.end - own.start)?;
                state.transfers.push(Transfer::Send { to, from: address(&part)?, bytes: part.len() });
                let piece = from * chunks + chunk;
                let into = state.result_address(piece)?;
                state.transfers.push(Transfer::Receive { from, to: into, bytes: blocks.bytes(piece).len() });
                let done = self.submit(state)?;
                state.deliver(piece, &done);
                state.arrivals.push(piece);
            }
        }
        Ok(())
    }

    /// Buffers that the peers' summands of this rank's block are received into.
    pub(super) fn fill_staging(&self) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        let mut guard = self.lock();
        let state = &mut *guard;
        for peer in 0..world_size {
            for chunk in 0..state.blocks.chunks {
                let len = state.blocks.bytes(rank * state.blocks.chunks + chunk).len();
                let device = self.shared.queue.device();
                state.staging.push(match peer == rank {
                    true => Staged::Own,
                    false => Staged::Empty(crate::device::Device::allocate(&**device, len)?),
                });
            }
        }
        Ok(())
    }

    /// A block of an ordered reduction: sent to its owner, while the summand of the rank as far on the other side comes
    /// in. After the last ones this rank's block is summed.
    fn contribute_in_order(&self, state: &mut State, piece: usize, block: Buffer) -> Result<()> {
        let rank = self.shared.rank;
        let chunks = state.blocks.chunks;
        let (step, chunk) = (state.handed / chunks + 1, state.handed % chunks);
        let (to, from) = self.peers(step);
        if to != rank {
            let staged = &mut state.staging[from * chunks + chunk];
            let Staged::Empty(mut into) = std::mem::replace(staged, Staged::Own) else { return Err(in_use()) };
            state.transfers.push(Transfer::Send { to, from: address(&block)?, bytes: block.len() });
            state.transfers.push(Transfer::Receive { from, to: address_mut(&mut into)?, bytes: into.len() });
            state.staging[from * chunks + chunk] = Staged::Full(into.freeze());
            self.submit(state)?;
            state.held.push(block);
            return Ok(());
        }
        self.sum(state, piece, chunk, block)?;
        if let Kind::AllReduce(_) = state.header.kind {
            self.spread(state, chunk)?;
        }
        Ok(())
    }

    /// Sums a chunk of this rank's block in rank order.
    fn sum(&self, state: &mut State, piece: usize, chunk: usize, block: Buffer) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        let chunks = state.blocks.chunks;
        let mut out = state.pieces[piece].result.take().ok_or_else(in_use)?;
        let op = if let Kind::AllReduce(op) = state.header.kind { op } else { ReduceOp::Sum };
        let summand = |peer: usize| match state.staging.get(peer * chunks + chunk) {
            _ if peer == rank => Some(&block),
            Some(Staged::Full(staged)) => Some(staged),
            _ => None,
        };
        let (queue, dtype) = (&self.shared.queue, state.header.dtype);
        queue.span("sum", 0, || queue.combine(dtype, op, world_size, &summand, &mut out))?;
        state.pieces[piece].result = Some(out);
        let done = self.mark(state)?;
        state.deliver(piece, &done);
        state.held.push(block);
        Ok(())
    }

    /// Sends the sum of a chunk of this rank's block to all, and receives theirs.
    fn spread(&self, state: &mut State, chunk: usize) -> Result<()> {
        let Shared { rank, world_size, .. } = *self.shared;
        let chunks = state.blocks.chunks;
        let Some((sum, _)) = state.pieces[rank * chunks + chunk].done.clone() else { return Err(in_use()) };
        for step in 1..world_size {
            let (to, from) = self.peers(step);
            let piece = from * chunks + chunk;
            let into = state.result_address(piece)?;
            state.transfers.push(Transfer::Send { to, from: address(&sum)?, bytes: sum.len() });
            state.transfers.push(Transfer::Receive { from, to: into, bytes: state.blocks.bytes(piece).len() });
        }
        let done = self.submit(state)?;
        for step in 1..world_size {
            let piece = self.peers(step).1 * chunks + chunk;
            state.deliver(piece, &done);
            state.arrivals.push(piece);
        }
        Ok(())
    }

    /// Queues a reduction of NCCL's own, all blocks of which have been handed in.
    fn reduce_natively(&self, state: &mut State) -> Result<()> {
        let rank = self.shared.rank;
        let (dtype, blocks) = (state.header.dtype, state.blocks);
        let mut out = state.out.take().ok_or_else(in_use)?;
        let to = address_mut(&mut out)?;
        let mut whole: Option<Buffer> = None;
        let mut contiguous = true;
        for piece in &state.pieces {
            let block = piece.contribution.as_ref().ok_or_else(nothing_to_send)?;
            whole = match whole {
                Some(front) if front.precedes(block) => Some(front.join(block)?),
                Some(front) => {
                    contiguous = false;
                    Some(front)
                }
                None => Some(block.clone()),
            };
        }
        let even = blocks.layout.total() == blocks.layout.largest() * self.shared.world_size;
        let whole = whole.filter(|_| contiguous).map(|whole| Ok((address(&whole)?, whole.len()))).transpose()?;
        match (state.header.kind, whole) {
            (Kind::AllReduce(op), Some((from, bytes))) => {
                let elements = bytes / dtype.size();
                state.transfers.push(Transfer::AllReduce { from, to, elements, dtype, op });
            }
            (Kind::ReduceScatter, Some((from, _))) if even => {
                let elements = blocks.own_bytes(rank).len() / dtype.size();
                state.transfers.push(Transfer::ReduceScatter { from, to, elements, dtype, op: ReduceOp::Sum });
            }
            (kind, _) => {
                for piece in 0..blocks.pieces() {
                    let block = state.pieces[piece].contribution.as_ref().ok_or_else(nothing_to_send)?;
                    let (from, elements) = (address(block)?, block.len() / dtype.size());
                    let (root, at) = (piece / blocks.chunks, blocks.bytes(piece).start as u64);
                    state.transfers.push(match kind {
                        Kind::AllReduce(op) => Transfer::AllReduce { from, to: to + at, elements, dtype, op },
                        _ => {
                            let own = blocks.own_bytes(rank).start as u64;
                            let to = if root == rank { to + at - own } else { from };
                            Transfer::Reduce { root, from, to, elements, dtype, op: ReduceOp::Sum }
                        }
                    });
                }
            }
        }
        let done = self.submit(state)?;
        for piece in &mut state.pieces {
            state.held.extend(piece.contribution.take());
        }
        state.pieces.truncate(1);
        state.pieces[0].done = Some((out.freeze(), done));
        Ok(())
    }

    fn accept(&self, piece: usize, block: Buffer) -> Result<()> {
        let refused = |got: String, wanted: String| Err(Error::Argument { what: "block", got, wanted });
        let rank = self.shared.rank;
        let mut guard = self.lock();
        let state = &mut *guard;
        let pieces = state.blocks.pieces();
        if !matches!(state.header.kind, Kind::ReduceScatter | Kind::AllReduce(_)) || piece >= pieces {
            return refused(format!("piece {piece}"), "a piece of a reduction".into());
        }
        let Some(expected) = state.blocks.order(rank).nth(state.handed) else {
            return refused(format!("piece {piece} again"), "each piece once".into());
        };
        if expected != piece {
            return refused(format!("piece {piece}"), format!("piece {expected}: the order is the same on all ranks"));
        }
        same_length("block of a reduction", block.len(), state.blocks.bytes(piece).len())?;
        self.shared.open()?;
        self.follow_compute(state)?;
        if self.shared.config.reduction == Reduction::Native {
            state.pieces[piece].contribution = Some(block);
            if state.handed + 1 == pieces {
                self.reduce_natively(state)?;
            }
        } else {
            self.contribute_in_order(state, piece, block)?;
        }
        state.handed += 1;
        state.complete = state.handed == pieces;
        Ok(())
    }

    /// Waits on the host until the device has passed everything of it.
    pub(super) fn finish(&self) -> Result<()> {
        let (last, header) = {
            let state = self.lock();
            (state.last.clone(), state.header)
        };
        last.map_or(Ok(()), |last| self.shared.wait_on_host(&last, &header))
    }
}

fn nothing_to_send() -> Error {
    Error::Argument { what: "operation", got: "no data".into(), wanted: "this rank's data".into() }
}

impl Operation for Op {
    fn contribute(self: Arc<Self>, piece: usize, block: Buffer) -> Result<()> {
        self.accept(piece, block).inspect_err(|error| {
            // The peers wait for the block that did not leave.
            if !matches!(error, Error::Argument { .. }) {
                self.shared.fail(error);
            }
        })
    }

    fn next(&self) -> Result<Option<(Range<usize>, Buffer)>> {
        self.shared.open()?;
        self.shared.flush(Duration::ZERO)?;
        let mut guard = self.lock();
        let state = &mut *guard;
        while let Some(&piece) = state.arrivals.get(state.looked) {
            state.looked += 1;
            if std::mem::replace(&mut state.pieces[piece].taken, true) {
                continue;
            }
            let Some((mut run, at)) = state.pieces[piece].done.clone() else { continue };
            let mut range = piece..piece + 1;
            // Those that have come with the same group of transfers.
            while let Some(next) = state.pieces.get_mut(range.end) {
                let together = next.done.as_ref().filter(|(_, done)| Arc::ptr_eq(done, &at)).map(|(buffer, _)| buffer);
                let Some(buffer) =
                    together.filter(|_| !next.taken && range.end / state.blocks.chunks != self.shared.rank)
                else {
                    break;
                };
                run = run.join(buffer)?;
                next.taken = true;
                range.end += 1;
            }
            self.shared.queue.join(&at)?;
            return Ok(Some((range, run)));
        }
        if state.complete { Ok(None) } else { Err(self.shared.unfinished(&state.header)) }
    }

    fn wait(&self) -> Result<Buffer> {
        self.shared.open()?;
        self.shared.flush(Duration::ZERO)?;
        let mut guard = self.lock();
        let state = &mut *guard;
        if !state.complete {
            let error = self.shared.unfinished(&state.header);
            self.shared.fail(&error);
            return Err(error);
        }
        if let Some(last) = &state.last {
            self.shared.queue.join(last)?;
        }
        state.held.clear();
        state.staging.clear();
        let mut whole: Option<Buffer> = None;
        for piece in &mut state.pieces {
            if let Some((buffer, _)) = piece.done.take() {
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
