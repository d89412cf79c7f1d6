//! Ranks are processes, over MPI (feature `mpi`).
//!
//! Messages are immediate sends and receives of bytes, in both directions at once, and a progress thread of our own moves
//! them: without one, an MPI library makes no progress while the caller computes. The collectives on top are those of
//! `host.rs`, so that reductions are ordered here, too, and gathers can be taken piece by piece.
//!
//! Each group has an MPI communicator of its own. What a rank has to say beyond its messages (that it is lost, what it is
//! about to call) goes through small control messages.

mod control;
mod raw;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::comm::host::{Completion, Header, HostCommunicator, Kind, Mark, Message, Transport, backlog};
use crate::comm::{Communicator, DEFAULT_DEADLINE};
use crate::device::cpu::memory::{bytes, bytes_mut};
use crate::device::{Cpu, Device};
use crate::group::Group;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::{Lane, Recorder};
use crate::{Error, Result};
use control::{MpiControl, Shared};
use raw::{Comm, Request, Tags};

/// The world of an MPI job: this process is one of its ranks.
///
/// ```no_run
/// use async_tensor_parallel::{MpiWorld, Placement};
///
/// // mpirun -n 4 …
/// let sum = MpiWorld::init()?.run(|group| {
///     let x = group.tensor(&[group.rank() as f32 + 1.0], &[1], Placement::Partial)?;
///     group.all_reduce(&x)?.wait()?.to_vec()
/// })?;
/// assert_eq!(sum, [10.0]);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug)]
pub struct MpiWorld {
    comm: Arc<Comm>,
    threads: usize,
    deadline: Duration,
    check: bool,
    recorder: Recorder,
}

impl MpiWorld {
    /// Starts MPI in this process, once; with the thread level `MPI_THREAD_MULTIPLE`.
    ///
    /// Each rank's matmuls use its share of the cores that the ranks of its machine have together.
    ///
    /// # Errors
    /// [`Error::Foreign`] where MPI does not start, was started already, or has no such thread level.
    pub fn init() -> Result<Self> {
        let comm = raw::init()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / comm.local_size()?.max(1)).max(1);
        let recorder = Recorder::disabled().for_rank(comm.rank());
        Ok(Self { comm: Arc::new(comm), threads, deadline: DEFAULT_DEADLINE, check: false, recorder })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks of the job.
    pub fn world_size(&self) -> usize {
        self.comm.size()
    }

    /// Sets the number of threads that this rank's matmuls use.
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets how long a wait lasts before it gives up (default 10 minutes).
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets whether every rank tells the others of each collective before it starts it, so that ranks that call different
    /// ones get [`Error::Mismatch`] at once. Otherwise they find out where messages differ in size, or by the deadline. Costs a
    /// small message to every rank for each collective; off by default.
    pub fn with_check(mut self, check: bool) -> Self {
        self.check = check;
        self
    }

    /// What this rank's spans are recorded in.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Runs `f` as this rank; all ranks call it together.
    ///
    /// When it returns an error or panics, the other ranks' waits end in [`Error::PeerLost`]. MPI is ended when the world is
    /// dropped after a run that went well on this rank; after one that did not, the process should exit: MPI offers no way
    /// back, and most launchers then end the whole job.
    ///
    /// # Errors
    /// Its error; [`Error::Panicked`] where it panics.
    pub fn run<R>(&self, f: impl FnOnce(&Group) -> Result<R>) -> Result<R> {
        let device: Arc<dyn Device> = Arc::new(Cpu::with_recorder(self.threads, self.recorder.clone()));
        let settings = Settings { deadline: self.deadline, check: self.check, recorder: self.recorder.clone() };
        // Of its own, so that what one run leaves behind does not reach the next.
        let comm = Arc::new(self.comm.duplicate()?);
        let (communicator, shared) = join(comm, &device, &settings)?;
        let group = Group::new(communicator, device, self.recorder.clone());
        let outcome = catch_unwind(AssertUnwindSafe(|| f(&group))).unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<&str>().map(ToString::to_string);
            let message = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or("no message".into());
            Err(Error::Panicked { rank: self.rank(), message })
        });
        if let Err(error) = &outcome {
            FAILED.store(true, Ordering::SeqCst);
            shared.say_ended("failed", error);
        }
        drop(group);
        if outcome.is_ok() {
            shared.say_returned();
        }
        outcome
    }
}

/// Whether this process's MPI can no longer be ended in order.
static FAILED: AtomicBool = AtomicBool::new(false);

impl Drop for MpiWorld {
    fn drop(&mut self) {
        if !FAILED.load(Ordering::SeqCst) && !std::thread::panicking() {
            raw::finalize();
        }
    }
}

/// What a group hands on to those split off it.
#[derive(Debug, Clone)]
struct Settings {
    deadline: Duration,
    check: bool,
    recorder: Recorder,
}

/// This rank's communicator over an MPI communicator.
fn join(
    comm: Arc<Comm>,
    device: &Arc<dyn Device>,
    settings: &Settings,
) -> Result<(Arc<dyn Communicator>, Arc<Shared>)> {
    let (rank, size) = (comm.rank(), comm.size());
    let shared = Arc::new(Shared::new(Arc::clone(&comm)));
    let transport = MpiTransport {
        comm: Arc::clone(&comm),
        shared: Arc::clone(&shared),
        check: settings.check,
        posted: Vec::with_capacity(backlog(size)),
        spare: Vec::with_capacity(backlog(size)),
        control: control::Inbox::new(&comm)?,
        last_arrival: Instant::now(),
        recorder: settings.recorder.clone(),
    };
    let control =
        MpiControl { comm, shared: Arc::clone(&shared), device: Arc::clone(device), settings: settings.clone() };
    let recorder = settings.recorder.clone();
    let communicator = HostCommunicator::new(rank, size, Arc::clone(device), transport, Arc::new(control), recorder)?;
    communicator.set_deadline(settings.deadline);
    Ok((Arc::new(communicator), shared))
}

/// Moves messages as immediate sends and receives.
struct MpiTransport {
    comm: Arc<Comm>,
    shared: Arc<Shared>,
    check: bool,
    posted: Vec<Posted>,
    /// Lists of requests, to be used again.
    spare: Vec<Vec<Request>>,
    control: control::Inbox,
    last_arrival: Instant,
    recorder: Recorder,
}

/// A message that MPI is working on, with the memory that it reads or writes.
struct Posted {
    header: Header,
    message: Message,
    /// One for each part.
    request: Option<Request>,
    rest: Vec<Request>,
    what: Memory,
    since: Instant,
}

enum Memory {
    Read(Buffer),
    Written(BufferMut),
}

impl MpiTransport {
    /// How often requests are looked at while there are any.
    const INTERVAL: Duration = Duration::from_micros(50);
    /// How often control messages are looked for while there is nothing else to do.
    const IDLE: Duration = Duration::from_millis(2);
    /// Messages are given to MPI in parts of so many bytes: small enough that it sends them at once. Longer ones are negotiated,
    /// and Open MPI then now and then fills a link in one direction at a time (measured over 1 Gbit/s: 67 ms for what takes
    /// 34 ms both ways at once).
    const PART: usize = 1 << 16;

    fn post(&mut self, header: &Header, message: Message, mut what: Memory) -> Result<()> {
        let tag = self.comm.tags().of(header, message.part)?;
        let mut requests = self.spare.pop().unwrap_or_default();
        let mut first = None;
        match &mut what {
            Memory::Read(data) => {
                for part in bytes(data)?.chunks(Self::PART).chain(empty(data.is_empty())) {
                    // SAFETY: `Posted` keeps the buffer, which nobody can write, until the request is done or given up with
                    // its memory.
                    let request = unsafe { self.comm.isend(part, message.peer, tag) }?;
                    first = add(first, request, &mut requests);
                }
            }
            Memory::Written(into) => {
                let (is_empty, whole) = (into.is_empty(), bytes_mut(into)?);
                if is_empty {
                    // SAFETY: as below.
                    first = Some(unsafe { self.comm.irecv(&mut [], message.peer, tag) }?);
                }
                for part in whole.chunks_mut(Self::PART) {
                    // SAFETY: `Posted` keeps the buffer, which nobody else can reach, until the request is done or given up
                    // with its memory.
                    let request = unsafe { self.comm.irecv(part, message.peer, tag) }?;
                    first = add(first, request, &mut requests);
                }
            }
        }
        match what {
            Memory::Read(_) => self.shared.sending(message.peer, 1),
            Memory::Written(_) => self.shared.expect(message.peer, 1),
        }
        let (header, since) = (*header, Instant::now());
        self.posted.push(Posted { header, message, request: first, rest: requests, what, since });
        Ok(())
    }

    /// Hands over what is done.
    fn collect(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        let mut index = 0;
        while index < self.posted.len() {
            if !self.posted[index].test(&self.comm)? {
                index += 1;
                continue;
            }
            let Posted { header, message, what, since, rest, .. } = self.posted.swap_remove(index);
            self.spare.push(rest);
            done.push(match what {
                Memory::Read(_) => {
                    self.shared.sending(message.peer, -1);
                    Completion::Sent(header, message, None)
                }
                Memory::Written(into) => {
                    self.shared.expect(message.peer, -1);
                    let now = Instant::now();
                    // When it began to arrive is not known: not before it was wanted, nor before the last one had arrived.
                    let begun = since.max(self.last_arrival);
                    self.last_arrival = now;
                    self.recorder.note(Lane::Communication, header.kind.name(), begun, now, into.len() as u64);
                    Completion::Received(header, message, into, now - begun, None)
                }
            });
        }
        Ok(())
    }

    /// Fails where a rank that is needed is lost.
    fn check_lost(&self) -> Result<()> {
        let lost = |posted: &Posted| {
            self.shared.lost(posted.message.peer).map(|(rank, reason)| Error::PeerLost {
                rank,
                seen_by: self.comm.rank(),
                operation: posted.header.to_string(),
                sequence: posted.header.sequence,
                reason,
            })
        };
        self.posted.iter().find_map(lost).map_or(Ok(()), Err)
    }
}

/// One empty slice where there would be none: a message without bytes is still a message.
fn empty<'a>(is_empty: bool) -> Option<&'a [u8]> {
    is_empty.then_some(&[])
}

fn add(first: Option<Request>, request: Request, rest: &mut Vec<Request>) -> Option<Request> {
    match first {
        None => Some(request),
        Some(first) => {
            rest.push(request);
            Some(first)
        }
    }
}

impl Posted {
    /// Whether all of its requests are done.
    fn test(&mut self, comm: &Comm) -> Result<bool> {
        let expected = match &self.what {
            Memory::Read(_) => None,
            Memory::Written(into) => Some(into.len().min(MpiTransport::PART)),
        };
        if let Some(request) = &mut self.request {
            match comm.test(request)? {
                None => return Ok(false),
                Some(arrived) => {
                    self.request = None;
                    if expected.is_some_and(|expected| arrived != expected) {
                        return Err(Error::Mismatch {
                            rank: comm.rank(),
                            peer: self.message.peer,
                            sequence: self.header.sequence,
                            ours: self.header.to_string(),
                            theirs: format!("something of another size: a message of {arrived} bytes came"),
                        });
                    }
                }
            }
        }
        while let Some(request) = self.rest.last_mut() {
            if comm.test(request)?.is_none() {
                return Ok(false);
            }
            self.rest.pop();
        }
        Ok(true)
    }
}

impl Transport for MpiTransport {
    fn announce(&mut self, header: &Header) -> Result<()> {
        if self.check {
            self.shared.announce(header)?;
        } else {
            self.shared.note(header);
        }
        Ok(())
    }

    fn send(&mut self, header: &Header, message: Message, data: Buffer, _after: Option<Mark>) -> Result<()> {
        self.post(header, message, Memory::Read(data))
    }

    fn receive(&mut self, header: &Header, message: Message, into: BufferMut) -> Result<()> {
        self.post(header, message, Memory::Written(into))
    }

    fn progress(&mut self, done: &mut Vec<Completion>, patience: Duration) -> Result<()> {
        let until = Instant::now().checked_add(patience);
        loop {
            // Control messages first: what a rank sent before it was lost has arrived by then.
            self.control.look(&self.comm, &self.shared)?;
            self.collect(done)?;
            if !done.is_empty() {
                return Ok(());
            }
            if let Some(error) = self.shared.failure() {
                return Err(error);
            }
            self.check_lost()?;
            let interval = if self.posted.is_empty() { Self::IDLE } else { Self::INTERVAL };
            if self.shared.sleep(interval) || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(());
            }
        }
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        for posted in self.posted.drain(..) {
            // MPI may still write: the memory is given up with the request.
            let pending = posted.request.is_some() || !posted.rest.is_empty();
            if pending {
                std::mem::forget(posted);
            }
        }
        self.control.close(&self.comm);
    }
}

impl Tags {
    /// The tag of a message: what tells it from the others that may be under way between two ranks.
    fn of(&self, header: &Header, part: usize) -> Result<i32> {
        if part >= 1 << Tags::PART_BITS {
            return Err(Error::Unsupported {
                what: format!("a collective of {part} pieces or more"),
                reason: format!("MPI's tags leave room for {}", 1 << Tags::PART_BITS),
            });
        }
        let pairwise = matches!(header.kind, Kind::Send { .. } | Kind::Receive { .. });
        let sequence = header.sequence & ((1 << self.sequence_bits()) - 1);
        Ok(((sequence as i32) << (Tags::PART_BITS + 1)) | (i32::from(pairwise) << Tags::PART_BITS) | part as i32)
    }
}
