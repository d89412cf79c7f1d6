//! What ranks tell each other beyond their messages: that they are lost, why the group ended, what they are about to call.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::raw::{Comm, Request};
use super::{Settings, join};
use crate::comm::host::{Control, Header, Kind};
use crate::comm::{Communicator, ReduceOp};
use crate::device::Device;
use crate::dtype::DType;
use crate::{Error, Result};

/// Bytes of a control message.
const SIZE: usize = 512;
const LOST: u8 = 1;
/// Where the text of such a message begins: after its length, and who is at fault.
const TEXT: usize = 7;
const CALLED: u8 = 2;

/// What the progress thread and those that compute share.
#[derive(Debug)]
pub(super) struct Shared {
    comm: Arc<Comm>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    woken: bool,
    /// Why a rank will not call again, and whose fault it is.
    lost: Vec<Option<(usize, String)>>,
    /// Messages that are still to come from each rank.
    expected: Vec<isize>,
    /// Messages that each rank has not taken yet.
    untaken: Vec<isize>,
    /// What each rank was last heard to call; of this one, the latest operations.
    called: Vec<Option<Header>>,
    own: std::collections::VecDeque<Header>,
    failure: Option<Error>,
    said: bool,
}

impl Shared {
    /// Operations of this rank that are remembered for comparison.
    const REMEMBERED: usize = 64;

    pub(super) fn new(comm: Arc<Comm>) -> Self {
        let size = comm.size();
        let state = State {
            woken: false,
            lost: vec![None; size],
            expected: vec![0; size],
            untaken: vec![0; size],
            called: vec![None; size],
            own: std::collections::VecDeque::with_capacity(Self::REMEMBERED + 1),
            failure: None,
            said: false,
        };
        Self { comm, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_one();
    }

    /// Sleeps, unless woken; says whether it was.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        let mut state = self.lock();
        if !state.woken {
            state = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut state.woken)
    }

    pub(super) fn expect(&self, peer: usize, more: isize) {
        self.lock().expected[peer] += more;
    }

    pub(super) fn sending(&self, peer: usize, more: isize) {
        self.lock().untaken[peer] += more;
    }

    /// Whether a rank will not call again: which one is at fault, and what it did.
    pub(super) fn lost(&self, rank: usize) -> Option<(usize, String)> {
        self.lock().lost[rank].clone()
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Remembers what this rank calls.
    pub(super) fn note(&self, header: &Header) {
        let mut state = self.lock();
        if state.own.len() == Self::REMEMBERED {
            state.own.pop_front();
        }
        state.own.push_back(*header);
    }

    /// Tells the others what this rank is about to call.
    pub(super) fn announce(&self, header: &Header) -> Result<()> {
        self.note(header);
        let mut message = [0; SIZE];
        message[0] = CALLED;
        encode(header, &mut message[1..]);
        self.tell_all(message);
        // What others have called already.
        let known = self.lock().called.clone();
        known
            .into_iter()
            .enumerate()
            .filter_map(|(peer, theirs)| Some((peer, theirs?)))
            .try_for_each(|(peer, theirs)| self.compare(peer, &theirs))
    }

    /// Fails where a peer's call is not this rank's of the same number.
    fn compare(&self, peer: usize, theirs: &Header) -> Result<()> {
        if theirs.is_pairwise() {
            return Ok(());
        }
        let differs = |ours: &&Header| !ours.is_pairwise() && ours.sequence == theirs.sequence && *ours != theirs;
        match self.lock().own.iter().find(differs) {
            None => Ok(()),
            Some(ours) => Err(Error::Mismatch {
                rank: self.comm.rank(),
                peer,
                sequence: ours.sequence,
                ours: ours.to_string(),
                theirs: theirs.to_string(),
            }),
        }
    }

    /// Tells the others, once, that an error has ended this rank's part: its own, or that of the rank that is lost.
    pub(super) fn say_ended(&self, how: &str, error: &Error) {
        match error {
            Error::PeerLost { rank, reason, .. } => self.say_lost(*rank, reason),
            _ => self.say_lost(self.comm.rank(), &format!("{how}: {error}")),
        }
    }

    /// Tells the others, once, that this rank returned.
    pub(super) fn say_returned(&self) {
        self.say_lost(self.comm.rank(), "returned");
    }

    fn say_lost(&self, culprit: usize, reason: &str) {
        if std::mem::replace(&mut self.lock().said, true) {
            return;
        }
        let mut message = [0; SIZE];
        message[0] = LOST;
        let mut length = reason.len().min(SIZE - TEXT);
        while !reason.is_char_boundary(length) {
            length -= 1;
        }
        message[1..3].copy_from_slice(&(length as u16).to_le_bytes());
        message[3..TEXT].copy_from_slice(&(culprit as u32).to_le_bytes());
        message[TEXT..TEXT + length].copy_from_slice(&reason.as_bytes()[..length]);
        self.tell_all(message);
    }

    /// Sends a control message to every other rank. It is small enough to be taken at once; where a rank does not take it
    /// within a moment, its memory is given up.
    fn tell_all(&self, message: [u8; SIZE]) {
        let message = Arc::new(message);
        let tag = self.comm.tags().control();
        let mut requests: Vec<Request> = Vec::new();
        for peer in (0..self.comm.size()).filter(|peer| *peer != self.comm.rank()) {
            // SAFETY: the message is kept, or forgotten, until the requests are done.
            if let Ok(request) = unsafe { self.comm.isend(&message[..], peer, tag) } {
                requests.push(request);
            }
        }
        let until = Instant::now() + Duration::from_millis(200);
        while !requests.is_empty() && Instant::now() < until {
            requests.retain_mut(|request| matches!(self.comm.test(request), Ok(None)));
            std::thread::yield_now();
        }
        if !requests.is_empty() {
            std::mem::forget((requests, message));
        }
    }
}

/// Receives control messages.
pub(super) struct Inbox {
    buffer: Box<[u8; SIZE]>,
    request: Option<Request>,
}

impl Inbox {
    pub(super) fn new(comm: &Comm) -> Result<Self> {
        let mut inbox = Self { buffer: Box::new([0; SIZE]), request: None };
        inbox.post(comm)?;
        Ok(inbox)
    }

    fn post(&mut self, comm: &Comm) -> Result<()> {
        // SAFETY: the buffer is not touched until the request is done; `close` gives it up with the request otherwise.
        self.request = Some(unsafe { comm.irecv_any(&mut self.buffer[..], comm.tags().control()) }?);
        Ok(())
    }

    /// Reads what has come.
    pub(super) fn look(&mut self, comm: &Comm, shared: &Shared) -> Result<()> {
        while let Some(request) = &mut self.request {
            let Some((bytes, from)) = comm.test_from(request)? else { return Ok(()) };
            let message = *self.buffer;
            self.post(comm)?;
            if bytes != SIZE || from >= comm.size() {
                continue;
            }
            match message[0] {
                LOST => {
                    let length = usize::from(u16::from_le_bytes([message[1], message[2]])).min(SIZE - TEXT);
                    let culprit = u32::from_le_bytes([message[3], message[4], message[5], message[6]]) as usize;
                    let culprit = if culprit < comm.size() { culprit } else { from };
                    let reason = String::from_utf8_lossy(&message[TEXT..TEXT + length]).into_owned();
                    shared.lock().lost[from].get_or_insert((culprit, reason));
                }
                CALLED => {
                    if let Some(header) = decode(&message[1..]) {
                        shared.lock().called[from] = Some(header);
                        shared.compare(from, &header)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Stops receiving.
    pub(super) fn close(&mut self, comm: &Comm) {
        if let Some(mut request) = self.request.take()
            && !comm.cancel(&mut request)
        {
            // MPI may still write.
            std::mem::forget(std::mem::replace(&mut self.buffer, Box::new([0; SIZE])));
        }
    }
}

const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64];

fn encode(header: &Header, into: &mut [u8]) {
    let (kind, argument) = match header.kind {
        Kind::AllGather => (0, 0),
        Kind::ReduceScatter => (1, 0),
        Kind::AllReduce(ReduceOp::Sum) => (2, 0),
        Kind::AllReduce(ReduceOp::Max) => (3, 0),
        Kind::Broadcast { root } => (4, root),
        Kind::Send { to } => (5, to),
        Kind::Receive { from } => (6, from),
        Kind::Barrier => (7, 0),
        Kind::Split => (8, 0),
    };
    let dtype = DTYPES.iter().position(|dtype| *dtype == header.dtype).unwrap_or_default();
    let numbers = [kind, argument as u64, dtype as u64, header.bytes as u64, header.chunks as u64, header.sequence];
    for (into, number) in into.chunks_exact_mut(8).zip(numbers) {
        into.copy_from_slice(&number.to_le_bytes());
    }
}

fn decode(from: &[u8]) -> Option<Header> {
    let mut numbers = from.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let mut next = || numbers.next();
    let (kind, argument) = (next()?, next()? as usize);
    let kind = match kind {
        0 => Kind::AllGather,
        1 => Kind::ReduceScatter,
        2 => Kind::AllReduce(ReduceOp::Sum),
        3 => Kind::AllReduce(ReduceOp::Max),
        4 => Kind::Broadcast { root: argument },
        5 => Kind::Send { to: argument },
        6 => Kind::Receive { from: argument },
        7 => Kind::Barrier,
        8 => Kind::Split,
        _ => return None,
    };
    let dtype = *DTYPES.get(usize::try_from(next()?).ok()?)?;
    Some(Header { kind, dtype, bytes: next()? as usize, chunks: next()? as usize, sequence: next()? })
}

/// What the computing threads see of a [`MpiTransport`](super::MpiTransport).
#[derive(Debug)]
pub(super) struct MpiControl {
    pub(super) comm: Arc<Comm>,
    pub(super) shared: Arc<Shared>,
    pub(super) device: Arc<dyn Device>,
    pub(super) settings: Settings,
}

impl Control for MpiControl {
    fn wake(&self) {
        self.shared.wake();
    }

    fn missing(&self, header: &Header) -> String {
        let state = self.shared.lock();
        let describe = |rank: usize| {
            match &state.lost[rank] {
                Some((culprit, reason)) if *culprit == rank => return Some(format!("rank {rank} (lost: {reason})")),
                Some((culprit, reason)) => {
                    return Some(format!("rank {rank} (gave up, as rank {culprit} is lost: {reason})"));
                }
                None => {}
            }
            let last = match &state.called[rank] {
                Some(called) if called.sequence >= header.sequence => return None,
                Some(called) => format!("last called {called} #{}; ", called.sequence),
                None => String::new(),
            };
            let open = match (state.expected[rank], state.untaken[rank]) {
                (0, 0) => return None,
                (expected, 0) => format!("{expected} messages to come"),
                (0, untaken) => format!("has not taken {untaken} messages"),
                (expected, untaken) => format!("{expected} messages to come, has not taken {untaken}"),
            };
            Some(format!("rank {rank} ({last}{open})"))
        };
        let missing: Vec<_> = (0..self.comm.size()).filter_map(describe).collect();
        if missing.is_empty() { "no message of any rank".into() } else { missing.join(", ") }
    }

    fn close(&self, error: &Error) {
        self.shared.lock().failure.get_or_insert_with(|| error.clone());
        self.shared.say_ended("ended the group", error);
    }

    fn describe(&self) -> String {
        format!("{} processes over MPI", self.comm.size())
    }

    fn split(&self, _sequence: u64, choices: &[(Option<usize>, usize)]) -> Result<Option<Arc<dyn Communicator>>> {
        let (color, key) = choices[self.comm.rank()];
        // Keys may be any numbers: their order is what counts.
        let key = choices.iter().filter(|(other, order)| *other == color && *order < key).count();
        let Some(comm) = self.comm.split(color, key)? else { return Ok(None) };
        let settings = Settings { recorder: self.settings.recorder.clone(), ..self.settings.clone() };
        Ok(Some(join(Arc::new(comm), &self.device, &settings)?.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_journey() {
        for kind in [
            Kind::AllGather,
            Kind::ReduceScatter,
            Kind::AllReduce(ReduceOp::Sum),
            Kind::AllReduce(ReduceOp::Max),
            Kind::Broadcast { root: 3 },
            Kind::Send { to: 1 },
            Kind::Receive { from: 2 },
            Kind::Barrier,
            Kind::Split,
        ] {
            for dtype in DTYPES {
                let header = Header { kind, dtype, bytes: 1 << 40, chunks: 7, sequence: u64::MAX };
                let mut message = [0; SIZE];
                encode(&header, &mut message[1..]);
                assert_eq!(decode(&message[1..]), Some(header));
            }
        }
        assert_eq!(decode(&[0xff; 64]), None);
        assert_eq!(decode(&[]), None);
    }
}
