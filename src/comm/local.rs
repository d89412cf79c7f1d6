//! Ranks are threads of one process: messages are copies, optionally over a modelled link.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::comm::host::{
    Completion, Control, Header, Held, HostCommunicator, HostWork, Kind, Mark, Message, Transport, Work, backlog,
};
use crate::comm::{Communicator, DEFAULT_DEADLINE};
use crate::device::{Cpu, Device};
use crate::group::Group;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::{Lane, Recorder};
use crate::{Error, Result};

/// A modelled interconnect: every rank has one port, which sends and receives `bandwidth` bytes a second each way, and
/// every message arrives `latency` after its last byte has left.
///
/// It is a model, for seeing and measuring overlap on one machine: a message takes its time while no core works on it,
/// as over a network card or a copy engine. The bytes themselves are copied in memory, at the start of that time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second, each way, of each rank's port.
    pub bandwidth: f64,
    /// From the last byte's departure to its arrival.
    pub latency: Duration,
}

impl Link {
    /// A link of `gbit` Gbit/s and `latency_us` microseconds.
    pub fn gbit(gbit: f64, latency_us: f64) -> Self {
        Self { bandwidth: gbit * 1e9 / 8.0, latency: Duration::from_secs_f64(latency_us.max(0.0) / 1e6) }
    }

    /// How long `bytes` occupy a port.
    pub fn transfer(&self, bytes: usize) -> Duration {
        Duration::try_from_secs_f64(bytes as f64 / self.bandwidth).unwrap_or(Duration::MAX)
    }
}

/// Ranks as threads of this process, each with its own [`Group`].
///
/// ```
/// use async_tensor_parallel::{LocalWorld, Placement};
///
/// let sums = LocalWorld::new(4)?.run(|group| {
///     let x = group.tensor(&[group.rank() as f32 + 1.0], &[1], Placement::Partial)?;
///     group.all_reduce(&x)?.wait()?.to_vec()
/// })?;
/// assert_eq!(sums, vec![vec![10.0]; 4]);
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LocalWorld {
    world_size: usize,
    link: Option<Link>,
    threads: usize,
    deadline: Duration,
    recorder: Recorder,
}

impl LocalWorld {
    /// A world of `world_size` ranks, each of which multiplies with its share of the machine's cores.
    ///
    /// # Errors
    /// [`Error::Argument`] for no ranks or more than 1024.
    pub fn new(world_size: usize) -> Result<Self> {
        if !(1..=1024).contains(&world_size) {
            return Err(Error::Argument {
                what: "world_size",
                got: world_size.to_string(),
                wanted: "1 to 1024 threads".into(),
            });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / world_size).max(1);
        let recorder = Recorder::disabled();
        Ok(Self { world_size, link: None, threads, deadline: DEFAULT_DEADLINE, recorder })
    }

    /// Sends all messages over a modelled link instead of copying them at once.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bandwidth that is not a positive, finite number.
    pub fn with_link(mut self, link: Link) -> Result<Self> {
        // Times must stay such that clocks can hold their sums.
        if !(link.bandwidth.is_finite() && link.bandwidth >= 1.0) {
            return Err(Error::Argument {
                what: "link bandwidth",
                got: format!("{} bytes/s", link.bandwidth),
                wanted: "a finite number, 1 or more".into(),
            });
        }
        if link.latency > Duration::from_secs(86_400) {
            return Err(Error::Argument {
                what: "link latency",
                got: format!("{:?}", link.latency),
                wanted: "a day at most".into(),
            });
        }
        self.link = Some(link);
        Ok(self)
    }

    /// Sets the number of threads that each rank's matmuls use (default: cores / ranks, at least 1).
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets how long a wait lasts before it gives up (default 10 minutes).
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The modelled link, if there is one.
    pub fn link(&self) -> Option<Link> {
        self.link
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What the ranks of this world record their spans in.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Runs `f` on every rank, each in its own thread, and returns what they returned, in rank order.
    ///
    /// # Errors
    /// The error of the rank that failed first. A panic of a rank becomes [`Error::Panicked`]. The other ranks do not
    /// hang: what they wait for from a rank that is gone ends in [`Error::PeerLost`].
    pub fn run<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        first_failure(self.run_each(f))
    }

    /// Runs `f` on every rank and returns each rank's own outcome, in rank order.
    pub fn run_all<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Vec<Result<R>> {
        self.run_each(f).into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn run_each<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Outcomes<R> {
        let board = Board::new(
            (0..self.world_size).collect(),
            self.link.map(|link| Arc::new(Ports::new(link, self.world_size))),
        );
        run_ranks(&board, |rank| self.place(rank, &board), f)
    }

    /// A rank's group.
    fn place(&self, rank: usize, board: &Arc<Board>) -> Result<Group> {
        let recorder = self.recorder.for_rank(rank);
        let device: Arc<dyn Device> = Arc::new(Cpu::with_recorder(self.threads, recorder.clone()));
        let seat = Seat { device: Arc::clone(&device), work: Arc::new(HostWork), recorder: recorder.clone() };
        Ok(Group::new(board.join(rank, seat, self.deadline)?, device, recorder))
    }
}

/// What each rank returned and when, in rank order.
pub(crate) type Outcomes<R> = Vec<(Instant, Result<R>)>;

/// What all returned, or the error of the rank that failed first.
pub(crate) fn first_failure<R>(outcomes: Outcomes<R>) -> Result<Vec<R>> {
    let mut first: Option<(Instant, Error)> = None;
    let mut values = Vec::with_capacity(outcomes.len());
    for (at, outcome) in outcomes {
        match outcome {
            Ok(value) => values.push(value),
            Err(error) if first.as_ref().is_none_or(|(earliest, _)| at < *earliest) => first = Some((at, error)),
            Err(_) => {}
        }
    }
    first.map_or(Ok(values), |(_, error)| Err(error))
}

/// Runs `f` on every rank of the board, each in its own thread, with the group that `place` makes there.
pub(crate) fn run_ranks<R: Send>(
    board: &Arc<Board>,
    place: impl Fn(usize) -> Result<Group> + Sync,
    f: impl Fn(&Group) -> Result<R> + Sync,
) -> Outcomes<R> {
    let (place, f) = (&place, &f);
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..board.members.len()).map(|rank| scope.spawn(move || run_rank(rank, board, place, f))).collect();
        let join = |(rank, thread): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
            thread.join().unwrap_or_else(|payload| {
                (Instant::now(), Err(Error::Panicked { rank, message: panic_message(&*payload) }))
            })
        };
        ranks.into_iter().enumerate().map(join).collect()
    })
}

fn run_rank<R>(
    rank: usize,
    board: &Arc<Board>,
    place: &(impl Fn(usize) -> Result<Group> + Sync),
    f: &(impl Fn(&Group) -> Result<R> + Sync),
) -> (Instant, Result<R>) {
    let group = place(rank);
    let outcome = group.and_then(|group| {
        let run = || {
            let value = f(&group)?;
            // What is still queued may fail, and is needed by nobody else then.
            group.device().synchronize()?;
            Ok(value)
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
            let message = panic_message(&*payload);
            board.lose(rank, &format!("panicked: {message}"));
            Err(Error::Panicked { rank, message })
        })
    });
    let at = Instant::now();
    match &outcome {
        Ok(_) => board.lose(rank, Board::RETURNED),
        Err(error) => board.lose(rank, &format!("failed: {error}")),
    }
    (at, outcome)
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// What a rank brings to a board.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) work: Arc<dyn Work>,
    pub(crate) recorder: Recorder,
}

/// What the ranks of one group share.
#[derive(Debug)]
pub(crate) struct Board {
    /// The ranks' numbers within the world.
    members: Vec<usize>,
    state: Mutex<Posted>,
    /// One for each rank's progress thread.
    changed: Vec<Condvar>,
    ports: Option<Arc<Ports>>,
}

#[derive(Debug)]
struct Posted {
    /// Messages for each rank that it has not taken yet.
    mail: Vec<Vec<Letter>>,
    /// Messages that each rank wants and has not taken yet.
    expected: Vec<Vec<Address>>,
    /// Letters posted so far.
    posted: u64,
    /// Messages of each rank that have been taken.
    taken: Vec<Vec<(Header, Message, Option<Held>)>>,
    /// The latest operations of each rank.
    announced: Vec<VecDeque<Header>>,
    /// Ranks that will never call again, and why.
    lost: Vec<Option<String>>,
    /// Ranks whose engine has ended: nobody reads their receipts.
    left: Vec<bool>,
    woken: Vec<bool>,
    failure: Option<Failure>,
    /// Groups split off this one, by the split's sequence number and their color.
    children: HashMap<(u64, usize), Arc<Board>>,
}

#[derive(Debug)]
struct Letter {
    from: usize,
    header: Header,
    part: usize,
    data: Buffer,
    /// When the data is there.
    after: Option<Mark>,
    /// Letters are served in the order in which they were posted.
    number: u64,
    /// Since when both sides are ready.
    ready: Option<Instant>,
    /// Bytes that have not departed yet, and when the first did.
    left: usize,
    departure: Option<Instant>,
    /// When it departed and when it has arrived, once all of it is on its way.
    route: Option<(Instant, Instant)>,
}

impl Letter {
    fn address(&self) -> Address {
        Address::new(self.from, self.part, &self.header)
    }
}

/// What sender and receiver know a message by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Address {
    from: usize,
    part: usize,
    sequence: u64,
    pairwise: bool,
}

impl Address {
    fn new(from: usize, part: usize, header: &Header) -> Self {
        Self { from, part, sequence: header.sequence, pairwise: header.is_pairwise() }
    }
}

/// Why the group ended.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    Mismatch((usize, Header), (usize, Header)),
    Other(Error),
}

impl Failure {
    /// The failure as `rank` sees it.
    pub(crate) fn seen_by(&self, rank: usize) -> Error {
        let differ = |(rank, ours): &(usize, Header), (peer, theirs): &(usize, Header)| Error::Mismatch {
            rank: *rank,
            peer: *peer,
            sequence: ours.sequence,
            ours: ours.to_string(),
            theirs: theirs.to_string(),
        };
        match self {
            Failure::Mismatch(a, b) if a.0 == rank => differ(a, b),
            Failure::Mismatch(a, b) if b.0 == rank => differ(b, a),
            Failure::Mismatch(a, b) => Error::Closed { rank, cause: differ(a, b).to_string() },
            Failure::Other(Error::PeerLost { rank: lost, operation, sequence, reason, .. }) => Error::PeerLost {
                rank: *lost,
                seen_by: rank,
                operation: operation.clone(),
                sequence: *sequence,
                reason: reason.clone(),
            },
            Failure::Other(Error::Timeout { operation, sequence, seconds, missing, .. }) => Error::Timeout {
                rank,
                operation: operation.clone(),
                sequence: *sequence,
                seconds: *seconds,
                missing: missing.clone(),
            },
            Failure::Other(error) => Error::Closed { rank, cause: error.to_string() },
        }
    }
}

impl Board {
    /// Operations of each rank that are remembered for comparison.
    const REMEMBERED: usize = 64;

    /// Why a rank is lost that has done its work.
    const RETURNED: &str = "returned";

    /// A board of an engine that does not model links.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(world_size: usize) -> Arc<Self> {
        Self::new((0..world_size).collect(), None)
    }

    fn new(members: Vec<usize>, ports: Option<Arc<Ports>>) -> Arc<Self> {
        let count = members.len();
        Arc::new(Self {
            members,
            changed: (0..count).map(|_| Condvar::new()).collect(),
            ports,
            state: Mutex::new(Posted {
                mail: (0..count).map(|_| Vec::with_capacity(backlog(count))).collect(),
                expected: (0..count).map(|_| Vec::with_capacity(backlog(count))).collect(),
                posted: 0,
                taken: (0..count).map(|_| Vec::with_capacity(backlog(count))).collect(),
                announced: (0..count).map(|_| VecDeque::with_capacity(Self::REMEMBERED + 1)).collect(),
                lost: vec![None; count],
                left: vec![false; count],
                woken: vec![false; count],
                failure: None,
                children: HashMap::new(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This rank's communicator.
    pub(crate) fn join(self: &Arc<Self>, rank: usize, seat: Seat, deadline: Duration) -> Result<Arc<dyn Communicator>> {
        let transport = LocalTransport {
            board: Arc::clone(self),
            rank,
            wanted: Vec::with_capacity(backlog(self.members.len())),
            transit: Vec::with_capacity(backlog(self.members.len())),
            work: Arc::clone(&seat.work),
            recorder: seat.recorder.clone(),
        };
        let control = LocalControl { board: Arc::clone(self), rank, seat: seat.clone(), deadline };
        let communicator = HostCommunicator::with_work(
            rank,
            self.members.len(),
            seat.device,
            transport,
            Arc::new(control),
            seat.work,
            seat.recorder,
        )?;
        communicator.set_deadline(deadline);
        Ok(Arc::new(communicator))
    }

    /// The board of the group that `members` have split off with their `color` in operation `sequence`.
    pub(crate) fn child(self: &Arc<Self>, sequence: u64, color: usize, members: &[usize]) -> Arc<Self> {
        let world_ranks = || members.iter().map(|member| self.members[*member]).collect();
        let mut state = self.lock();
        let child =
            state.children.entry((sequence, color)).or_insert_with(|| Self::new(world_ranks(), self.ports.clone()));
        Arc::clone(child)
    }

    /// What has ended the group, as `rank` sees it.
    #[cfg(feature = "cuda")]
    pub(crate) fn failure(&self, rank: usize) -> Option<Error> {
        self.lock().failure.as_ref().map(|failure| failure.seen_by(rank))
    }

    /// Fails where the group has ended, or where `rank` needs one that is lost: one that has failed, or that has returned
    /// without calling the operation.
    #[cfg(feature = "cuda")]
    pub(crate) fn check(&self, rank: usize, operation: Option<&Header>) -> Result<()> {
        let state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.seen_by(rank));
        }
        let needed = |peer: &usize| match operation.map(|header| header.kind) {
            Some(Kind::Send { to: needed } | Kind::Receive { from: needed }) => *peer == needed,
            _ => *peer != rank,
        };
        let lost = |peer: usize| {
            let reason = state.lost[peer].as_ref()?;
            let came = operation.is_none_or(|header| {
                let alike = |seen: &&Header| seen.is_pairwise() == header.is_pairwise();
                let last = state.announced[peer].iter().rev().find(alike);
                last.is_some_and(|seen| seen.sequence >= header.sequence)
            });
            (reason != Self::RETURNED || !came).then(|| Error::PeerLost {
                rank: peer,
                seen_by: rank,
                operation: operation.map_or_else(|| "joining or leaving".into(), Header::to_string),
                sequence: operation.map_or(0, |header| header.sequence),
                reason: reason.clone(),
            })
        };
        (0..self.members.len()).filter(needed).find_map(lost).map_or(Ok(()), Err)
    }

    fn wake(&self, state: &mut Posted, rank: usize) {
        state.woken[rank] = true;
        self.changed[rank].notify_one();
    }

    /// Sends off what is ready. Over a link, whenever a port is free it sends the next part of a ready letter of the earliest
    /// operation: of that whose receiver is free first, or else was posted first, as ports that share a switch do. Which progress thread calls this,
    /// and how late, makes no difference: what happened since the last call is made up for in its own order. Returns when it
    /// is worth asking again.
    fn dispatch(&self, state: &mut Posted) -> Option<Instant> {
        let now = Instant::now();
        let Some(ports) = &self.ports else {
            for to in 0..self.members.len() {
                let ready = state.mail[to].iter_mut().filter(|letter| letter.ready.is_some() && letter.route.is_none());
                if ready.map(|letter| letter.route = Some((now, now))).count() > 0 {
                    self.wake(state, to);
                }
            }
            return None;
        };
        let mut ports = ports.lock();
        loop {
            let mut next = None;
            for (to, mail) in state.mail.iter().enumerate() {
                let waiting = mail.iter().enumerate().filter(|(_, letter)| letter.left > 0 || letter.route.is_none());
                for (index, letter) in waiting {
                    let Some(ready) = letter.ready else { continue };
                    let departure = ports.of(self.members[letter.from]).sending.max(ready);
                    let received = ports.of(self.members[to]).receiving.max(departure);
                    let key = (departure, letter.header.sequence, received, letter.number, to, index);
                    if next.is_none_or(|least| key < least) {
                        next = Some(key);
                    }
                }
            }
            let (departure, .., to, index) = next?;
            if departure > now {
                return Some(departure);
            }
            let letter = &mut state.mail[to][index];
            let part = letter.data.len().div_ceil(Ports::PARTS).max(Ports::SMALLEST_PART).min(letter.left);
            letter.left -= part;
            letter.departure.get_or_insert(departure);
            let arrival = ports.book(self.members[letter.from], self.members[to], part, departure);
            if letter.left == 0 {
                letter.route = letter.departure.map(|departure| (departure, arrival));
                self.wake(state, to);
            }
        }
    }

    /// `rank` starts an operation: fails where another rank's operation of the same number differs.
    pub(crate) fn announce(&self, rank: usize, header: &Header) -> Result<()> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.seen_by(rank));
        }
        let ring = &mut state.announced[rank];
        if ring.len() == Board::REMEMBERED {
            ring.pop_front();
        }
        ring.push_back(*header);
        if header.is_pairwise() {
            return Ok(());
        }
        let differs =
            |theirs: &&Header| !theirs.is_pairwise() && theirs.sequence == header.sequence && *theirs != header;
        let other = state
            .announced
            .iter()
            .enumerate()
            .find_map(|(peer, ring)| ring.iter().find(differs).map(|theirs| (peer, *theirs)));
        drop(state);
        if let Some(other) = other {
            let failure = Failure::Mismatch((rank, *header), other);
            let error = failure.seen_by(rank);
            self.fail(failure);
            return Err(error);
        }
        Ok(())
    }

    /// Which ranks have not come to the operation of `from`, and what they were last seen doing.
    pub(crate) fn missing(&self, from: usize, header: &Header) -> String {
        let state = self.lock();
        let describe = |rank: usize| {
            let collective = |seen: &&Header| seen.is_pairwise() == header.is_pairwise();
            match state.announced[rank].iter().rev().find(collective) {
                _ if state.lost[rank].is_some() => {
                    Some(format!("rank {rank} (lost: {})", state.lost[rank].as_deref().unwrap_or_default()))
                }
                None => Some(format!("rank {rank} (has called nothing yet)")),
                Some(seen) if seen.sequence < header.sequence => {
                    Some(format!("rank {rank} (last called {seen} #{})", seen.sequence))
                }
                Some(_) => None,
            }
        };
        let concerned = |rank: &usize| match header.kind {
            Kind::Send { to: peer } | Kind::Receive { from: peer } => *rank == peer,
            _ => *rank != from,
        };
        let missing: Vec<_> = (0..self.members.len()).filter(concerned).filter_map(describe).collect();
        if missing.is_empty() { "data under way, all ranks have called it".into() } else { missing.join(", ") }
    }

    /// Ends the group, and those split off it, for everybody. The first failure stays.
    pub(crate) fn fail(&self, failure: Failure) {
        let mut state = self.lock();
        let failure = state.failure.get_or_insert(failure).clone();
        (0..self.members.len()).for_each(|rank| self.wake(&mut state, rank));
        let children: Vec<_> = state.children.values().cloned().collect();
        drop(state);
        children.iter().for_each(|child| child.fail(failure.clone()));
    }

    /// `rank` will not call again.
    pub(crate) fn lose(&self, rank: usize, reason: &str) {
        let mut state = self.lock();
        state.lost[rank].get_or_insert_with(|| reason.to_string());
        (0..self.members.len()).for_each(|rank| self.wake(&mut state, rank));
        let children: Vec<_> = state.children.values().cloned().collect();
        drop(state);
        let world_rank = self.members[rank];
        for child in children {
            if let Some(rank) = child.members.iter().position(|member| *member == world_rank) {
                child.lose(rank, reason);
            }
        }
    }
}

/// Until when each rank's port is busy.
#[derive(Debug)]
struct Ports {
    link: Link,
    busy: Mutex<Vec<Port>>,
}

/// The ends of what a port has still to send and to receive.
#[derive(Debug, Clone, Copy)]
struct Port {
    sending: Instant,
    receiving: Instant,
}

impl Ports {
    /// A letter goes in this many parts, so that letters to several ranks, or from several, share a port.
    const PARTS: usize = 16;
    /// The least bytes of a part that is not the last.
    const SMALLEST_PART: usize = 16 << 10;

    fn new(link: Link, count: usize) -> Self {
        let now = Instant::now();
        Self { link, busy: Mutex::new(vec![Port { sending: now, receiving: now }; count]) }
    }

    fn lock(&self) -> Busy<'_> {
        Busy { link: self.link, ports: self.busy.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

struct Busy<'a> {
    link: Link,
    ports: MutexGuard<'a, Vec<Port>>,
}

impl Busy<'_> {
    fn of(&self, rank: usize) -> Port {
        self.ports[rank]
    }

    /// When `bytes` that depart at `departure`, when the sender's port is free, have arrived: when both ports have had the
    /// time for them. The switch between them holds what the receiver's is not ready for.
    fn book(&mut self, from: usize, to: usize, bytes: usize, departure: Instant) -> Instant {
        let duration = self.link.transfer(bytes);
        let sent = departure + duration;
        self.ports[from].sending = sent;
        let received = self.ports[to].receiving.max(departure) + duration;
        self.ports[to].receiving = received;
        sent.max(received) + self.link.latency
    }
}

/// Moves messages by copying them out of the sender's buffer into the receiver's.
struct LocalTransport {
    board: Arc<Board>,
    rank: usize,
    wanted: Vec<Wanted>,
    transit: Vec<Transit>,
    work: Arc<dyn Work>,
    recorder: Recorder,
}

/// A message that has not been posted yet.
struct Wanted {
    header: Header,
    message: Message,
    into: BufferMut,
}

/// A message under way to this rank.
struct Transit {
    header: Header,
    message: Message,
    /// The sender's own header and message, to tell it by.
    letter: Letter,
    into: BufferMut,
    departure: Instant,
    arrival: Instant,
    copied: bool,
    /// How long it keeps this rank's port busy.
    busy: Duration,
    done: Option<Mark>,
}

impl LocalTransport {
    /// Takes the letters that are wanted out of this rank's mail.
    fn match_mail(&mut self, state: &mut Posted) -> Result<()> {
        let mut index = 0;
        while index < self.wanted.len() {
            let Wanted { header, message, .. } = &self.wanted[index];
            let address = Address::new(message.peer, message.part, header);
            let arriving = state.mail[self.rank].iter().enumerate();
            let found = arriving
                .filter(|(_, letter)| letter.address() == address)
                .find_map(|(index, letter)| letter.route.map(|route| (index, route)));
            let Some((found, (departure, arrival))) = found else {
                index += 1;
                continue;
            };
            state.expected[self.rank].retain(|expected| *expected != address);
            let letter = state.mail[self.rank].remove(found);
            let Wanted { header, message, into } = self.wanted.remove(index);
            if letter.data.len() != into.len() || letter.header.dtype != header.dtype {
                let failure = Failure::Mismatch((self.rank, header), (letter.from, letter.header));
                state.failure.get_or_insert(failure);
                return Ok(());
            }
            self.transit.push(Transit {
                header,
                message,
                letter,
                into,
                departure,
                arrival,
                copied: false,
                busy: Duration::ZERO,
                done: None,
            });
        }
        Ok(())
    }

    /// Whether somebody that is needed is gone.
    fn check_lost(&self, state: &Posted) -> Result<()> {
        let lost = |peer: usize, header: &Header| {
            state.lost[peer].as_ref().map(|reason| Error::PeerLost {
                rank: peer,
                seen_by: self.rank,
                operation: header.to_string(),
                sequence: header.sequence,
                reason: reason.clone(),
            })
        };
        let waiting = self.wanted.iter().find_map(|wanted| lost(wanted.message.peer, &wanted.header));
        let unread = || {
            let letters =
                state.mail.iter().enumerate().flat_map(|(to, mail)| mail.iter().map(move |letter| (to, letter)));
            letters.filter(|(_, letter)| letter.from == self.rank).find_map(|(to, letter)| lost(to, &letter.header))
        };
        waiting.or_else(unread).map_or(Ok(()), Err)
    }

    /// Copies what has departed, and hands over what has arrived.
    fn deliver(&mut self, completed: &mut Vec<Completion>) -> Result<()> {
        for transit in self.transit.iter_mut().filter(|transit| !transit.copied) {
            let begun = Instant::now();
            transit.letter.after.as_ref().map_or(Ok(()), |mark| self.work.follow(mark))?;
            transit.done = self.work.copy(&transit.letter.data, &mut transit.into)?;
            transit.copied = true;
            match &self.board.ports {
                Some(ports) => transit.busy = ports.link.transfer(transit.letter.data.len()),
                None => {
                    transit.arrival = Instant::now();
                    transit.busy = transit.arrival - begun;
                }
            }
        }
        let now = Instant::now();
        let mut index = 0;
        while index < self.transit.len() {
            if self.transit[index].arrival > now {
                index += 1;
                continue;
            }
            let Transit { header, message, letter, into, departure, arrival, busy, done, .. } =
                self.transit.remove(index);
            if done.is_none() {
                self.recorder.note(Lane::Communication, header.kind.name(), departure, arrival, into.len() as u64);
            }
            let Letter { from, header: sent, part, data, .. } = letter;
            // The sender's buffer must be let go before it is told, or given back.
            let held = done.as_ref().map(|mark| (data, Arc::clone(mark)));
            let mut state = self.board.lock();
            if state.left[from] {
                drop(state);
                self.work.drain()?;
                drop(held);
            } else {
                state.taken[from].push((sent, Message { peer: self.rank, part }, held));
                self.board.wake(&mut state, from);
                drop(state);
            }
            completed.push(Completion::Received(header, message, into, busy, done));
        }
        Ok(())
    }
}

impl Drop for LocalTransport {
    /// Lets go of what others hold for this rank, once it is done with: of letters that nobody will read, and of receipts
    /// that came too late.
    fn drop(&mut self) {
        let mut state = self.board.lock();
        state.left[self.rank] = true;
        let receipts = std::mem::take(&mut state.taken[self.rank]);
        let mut unread = Vec::new();
        if state.failure.is_some() {
            for mail in &mut state.mail {
                unread.extend(mail.extract_if(.., |letter| letter.from == self.rank));
            }
        }
        drop(state);
        let mut marks = receipts.iter().filter_map(|(_, _, held)| held.as_ref().map(|(_, mark)| mark));
        // A device that fails here has nothing under way.
        let _ = marks.try_for_each(|mark| self.work.follow(mark)).and_then(|()| self.work.drain());
        drop((unread, receipts));
    }
}

impl Transport for LocalTransport {
    fn announce(&mut self, header: &Header) -> Result<()> {
        self.board.announce(self.rank, header)
    }

    fn send(&mut self, header: &Header, message: Message, data: Buffer, after: Option<Mark>) -> Result<()> {
        let mut state = self.board.lock();
        let address = Address::new(self.rank, message.part, header);
        let ready = state.expected[message.peer].contains(&address).then(Instant::now);
        state.posted += 1;
        let letter = Letter {
            from: self.rank,
            header: *header,
            part: message.part,
            number: state.posted,
            ready,
            left: data.len(),
            departure: None,
            route: None,
            data,
            after,
        };
        state.mail[message.peer].push(letter);
        // A receiver that is not ready yet must see that the letter is not the one it wants.
        self.board.wake(&mut state, message.peer);
        Ok(())
    }

    fn receive(&mut self, header: &Header, message: Message, into: BufferMut) -> Result<()> {
        self.wanted.push(Wanted { header: *header, message, into });
        let address = Address::new(message.peer, message.part, header);
        let mut state = self.board.lock();
        state.expected[self.rank].push(address);
        if let Some(letter) = state.mail[self.rank].iter_mut().find(|letter| letter.address() == address) {
            letter.ready = Some(Instant::now());
            // The sender's thread keeps the time of what follows.
            self.board.wake(&mut state, message.peer);
        }
        Ok(())
    }

    fn progress(&mut self, done: &mut Vec<Completion>, patience: Duration) -> Result<()> {
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        loop {
            let turn = board.dispatch(&mut state);
            self.match_mail(&mut state)?;
            if let Some(failure) = &state.failure {
                return Err(failure.seen_by(self.rank));
            }
            let receipts = state.taken[self.rank].drain(..);
            done.extend(receipts.map(|(header, message, held)| Completion::Sent(header, message, held)));
            let woken = std::mem::take(&mut state.woken[self.rank]);
            let now = Instant::now();
            if self.transit.iter().any(|transit| !transit.copied || transit.arrival <= now) {
                drop(state);
                self.deliver(done)?;
                state = board.lock();
            }
            if !done.is_empty() {
                return Ok(());
            }
            self.check_lost(&state)?;
            if woken {
                return Ok(());
            }
            if state.woken[self.rank] {
                continue;
            }
            let next = self.transit.iter().map(|transit| transit.arrival).chain(turn).min();
            let sleep = next.map_or(patience, |at| at.saturating_duration_since(Instant::now()).min(patience));
            if sleep.is_zero() {
                continue;
            }
            let waited = board.changed[self.rank].wait_timeout(state, sleep);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What the computing threads see of a [`LocalTransport`].
#[derive(Debug)]
struct LocalControl {
    board: Arc<Board>,
    rank: usize,
    seat: Seat,
    deadline: Duration,
}

impl Control for LocalControl {
    fn wake(&self) {
        self.board.wake(&mut self.board.lock(), self.rank);
    }

    fn missing(&self, header: &Header) -> String {
        self.board.missing(self.rank, header)
    }

    fn close(&self, error: &Error) {
        self.board.fail(Failure::Other(error.clone()));
    }

    fn describe(&self) -> String {
        match &self.board.ports {
            Some(ports) => format!("{} threads over a modelled link {:?}", self.board.members.len(), ports.link),
            None => format!("{} threads", self.board.members.len()),
        }
    }

    fn split(&self, sequence: u64, choices: &[(Option<usize>, usize)]) -> Result<Option<Arc<dyn Communicator>>> {
        let Some(color) = choices[self.rank].0 else { return Ok(None) };
        let mut members: Vec<usize> = (0..choices.len()).filter(|rank| choices[*rank].0 == Some(color)).collect();
        members.sort_by_key(|rank| (choices[*rank].1, *rank));
        let rank = members.iter().position(|member| *member == self.rank).unwrap_or_default();
        let child = self.board.child(sequence, color, &members);
        child.join(rank, self.seat.clone(), self.deadline).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One exchange of `bytes` among all ranks, whose letters become ready when `ready(from, to)` says.
    fn exchange(n: usize, bytes: usize, ready: impl Fn(usize, usize) -> Duration) -> (Duration, Duration) {
        let link = Link { bandwidth: 1e7, latency: Duration::from_millis(5) };
        let ports = Arc::new(Ports::new(link, n));
        let begin = ports.lock().of(0).sending;
        let board = Board::new((0..n).collect(), Some(ports));
        let device = Cpu::new(1);
        let header = Header { kind: Kind::AllGather, dtype: crate::DType::F32, bytes, chunks: 1, sequence: 0 };
        let mut state = board.lock();
        for step in 1..n {
            for from in 0..n {
                let to = (from + step) % n;
                state.posted += 1;
                let letter = Letter {
                    from,
                    header,
                    part: from,
                    data: device.allocate(bytes).unwrap().freeze(),
                    number: state.posted,
                    ready: Some(begin + ready(from, to)),
                    left: bytes,
                    departure: None,
                    route: None,
                    after: None,
                };
                state.mail[to].push(letter);
            }
        }
        while let Some(turn) = board.dispatch(&mut state) {
            std::thread::sleep(turn.saturating_duration_since(Instant::now()));
        }
        let routes = state.mail.iter().flatten().map(|letter| letter.route.unwrap());
        let (first, last) = routes.fold((None, begin), |(first, last), (departure, arrival)| {
            assert!(arrival >= departure + link.transfer(bytes) + link.latency, "faster than the link");
            (Some(first.map_or(departure, |first: Instant| first.min(departure))), last.max(arrival))
        });
        (first.unwrap() - begin, last - begin)
    }

    #[test]
    fn an_exchange_takes_as_long_as_its_busiest_port() {
        // 3 × 20 ms through each port.
        let (first, last) = exchange(4, 200_000, |_, _| Duration::ZERO);
        assert_eq!((first, last), (Duration::ZERO, Duration::from_millis(65)));
        // Two ranks: both directions at once.
        assert_eq!(exchange(2, 200_000, |_, _| Duration::ZERO).1, Duration::from_millis(25));
    }

    #[test]
    fn a_late_rank_delays_the_others_by_no_more_than_its_delay_and_a_part() {
        for late in 0..4 {
            let delay = Duration::from_millis(7);
            let ready = |from, to| if from == late || to == late { delay } else { Duration::ZERO };
            let (_, last) = exchange(4, 1_000_000, ready);
            let least = Duration::from_millis(305);
            assert!(last >= least, "{last:?}");
            assert!(last <= least + delay + Duration::from_millis(2 * 100 / 16), "{last:?}");
        }
    }
}
