//! NCCL: every rank's part runs on its stream's worker and meets the others' under the clique's lock. Ranks of other processes have
//! a proxy each (`processes`).
//!
//! As strict as the real one where its callers err: a communicator that does not block is used only once it says so, its launches
//! happen on a thread of its own, a first transfer between two ranks waits until both have come, a send ends only when it has been
//! received, and a rank that aborts tells nobody: the others wait until they abort too.
mod processes;

use crate::core::{check_dev, cur_dev, env, lock, new_handle, stream, Caller, Jitter, Stream, Worker};
use crate::races::{reads, writes, Clock};
use cudarc::nccl::sys as nc;
use half::{bf16, f16};
use nc::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use ncclResult_t::*;
use processes::Remote;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast(i32),
    Reduce(i32),
}
#[derive(Clone, Copy, Debug)]
struct Desc {
    kind: Kind,
    count: usize,
    ty: ncclDataType_t,
    op: ncclRedOp_t,
    send: usize,
    recv: usize,
}
impl Desc {
    fn same(&self, other: &Desc) -> bool {
        let of = |d: &Desc| (d.count, d.ty as u32, d.op as u32);
        self.kind == other.kind && of(self) == of(other)
    }
    /// Bytes that `rank` of `n` reads and writes.
    fn bytes(&self, rank: usize, n: usize) -> (usize, usize) {
        let bytes = self.count * size(self.ty);
        match self.kind {
            Kind::AllGather => (bytes, bytes * n),
            Kind::ReduceScatter => (bytes * n, bytes),
            Kind::AllReduce => (bytes, bytes),
            Kind::Broadcast(root) => (if root as usize == rank { bytes } else { 0 }, bytes),
            Kind::Reduce(root) => (bytes, if root as usize == rank { bytes } else { 0 }),
        }
    }
}

/// A collective that ranks arrive at.
#[derive(Default)]
struct Slot {
    got: Vec<Option<(Desc, Clock)>>,
    issued: Vec<(usize, ThreadId)>,
    /// What each rank learns by it.
    done: Option<Vec<Clock>>,
    left: usize,
}
/// A send that has not been received.
struct Message {
    at: usize,
    len: usize,
    clock: Clock,
    taken: Arc<AtomicBool>,
}
/// Color and key of each rank that has called a split.
type Choices = Vec<Option<(c_int, c_int)>>;

#[derive(Default)]
struct Inner {
    joined: Vec<bool>,
    slots: BTreeMap<u64, Slot>,
    mail: HashMap<(usize, usize), VecDeque<Message>>, // by sender and receiver
    met: HashSet<(usize, usize)>,
    splits: BTreeMap<u64, Choices>,
    split_made: HashMap<(u64, c_int), Arc<Clique>>,
}
struct Clique {
    n: usize,
    m: Mutex<Inner>,
    cv: Condvar,
}
impl Clique {
    fn new(n: usize) -> Arc<Self> {
        let inner = Inner { joined: vec![false; n], ..Default::default() };
        Arc::new(Clique { n, m: Mutex::new(inner), cv: Condvar::new() })
    }
    /// One whose ranks are all there.
    fn whole(n: usize) -> Arc<Self> {
        let clique = Self::new(n);
        lock(&clique.m).joined.fill(true);
        clique
    }
}

/// What a rank says to nobody but whoever reads stderr, and in its last error.
fn complain(text: String) {
    eprintln!("cuda-sim: NCCL: {text}");
    *lock(&LAST) = format!("{text}\0");
}

struct Comm {
    clique: Arc<Clique>,
    rank: usize,
    dev: usize,
    blocking: bool,
    seq: AtomicU64,
    splits: AtomicU64,
    groups: AtomicU64,
    /// Threads of its own that still work.
    busy: AtomicUsize,
    /// Jobs that are queued or run.
    pending: AtomicUsize,
    finalized: AtomicBool,
    aborted: AtomicBool,
    error: Mutex<Option<ncclResult_t>>,
    /// Where this rank's proxy is, if it is of another process than its clique.
    remote: Option<Remote>,
}
impl Comm {
    fn of(clique: Arc<Clique>, rank: usize, dev: usize, blocking: bool, remote: Option<Remote>) -> Self {
        Comm {
            clique,
            rank,
            dev,
            blocking,
            seq: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            groups: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            finalized: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            error: Mutex::new(None),
            remote,
        }
    }
    fn add(clique: Arc<Clique>, rank: usize, dev: usize, blocking: bool) -> ncclComm_t {
        Self::register(Self::of(clique, rank, dev, blocking, None))
    }
    /// A rank whose clique is in another process.
    fn add_remote(key: u64, n: usize, rank: usize, dev: usize, blocking: bool) -> std::io::Result<ncclComm_t> {
        let remote = Remote::join(key, n, rank)?;
        let handle = Self::register(Self::of(Clique::new(n), rank, dev, blocking, Some(remote)));
        if let Some(new) = comm(handle) {
            std::thread::spawn(move || match new.remote.as_ref().map(Remote::joined) {
                Some(Ok(())) => {
                    lock(&new.clique.m).joined.fill(true);
                    new.clique.cv.notify_all();
                }
                _ => new.lost(),
            });
        }
        Ok(handle)
    }
    /// The process that holds the clique is gone.
    fn lost(&self) {
        if !self.aborted.load(Ordering::SeqCst) {
            lock(&self.error).get_or_insert(ncclRemoteError);
        }
    }
    fn register(comm: Comm) -> ncclComm_t {
        let handle = new_handle();
        lock(comms()).insert(handle, Arc::new(comm));
        handle as ncclComm_t
    }

    /// Waits until `f` finds something; `None` once this rank has aborted, or when the simulator's own patience is over.
    fn wait<T>(&self, what: &str, mut f: impl FnMut(&mut Inner) -> Option<T>) -> Option<T> {
        let end = Instant::now() + Duration::from_millis(env("CUDA_SIM_NCCL_TIMEOUT_MS", 600_000));
        let mut inner = lock(&self.clique.m);
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(found) = f(&mut inner) {
                return Some(found);
            }
            let now = Instant::now();
            if now >= end {
                drop(inner);
                complain(format!("rank {} of {} waits for ever: {what}", self.rank, self.clique.n));
                lock(&self.error).get_or_insert(ncclSystemError);
                return None;
            }
            inner = self.clique.cv.wait_timeout(inner, end - now).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Waits for the abort alone.
    fn hang(&self, what: &str) {
        self.wait::<()>(what, |_| None);
    }

    /// What `ncclCommGetAsyncError` tells.
    fn state(&self) -> ncclResult_t {
        if let Some(error) = *lock(&self.error) {
            return error;
        }
        let busy = self.busy.load(Ordering::SeqCst) > 0
            || !lock(&self.clique.m).joined.iter().all(|&joined| joined)
            || (self.finalized.load(Ordering::SeqCst) && self.pending.load(Ordering::SeqCst) > 0);
        if busy {
            ncclInProgress
        } else {
            ncclSuccess
        }
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.remote.iter().for_each(Remote::end);
        let mut inner = lock(&self.clique.m);
        for slot in inner.slots.values_mut().filter(|slot| slot.done.is_none()) {
            if let Some(place) = slot.got.get_mut(self.rank) {
                *place = None
            }
        }
        inner.mail.retain(|&(from, _), _| from != self.rank);
        drop(inner);
        self.clique.cv.notify_all();
        // As the real one, which joins its threads: once an abort is over nothing more is put on a stream.
        while self.busy.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(20))
        }
    }

    fn collective(&self, worker: &mut Worker, seq: u64, desc: Desc) {
        let n = self.clique.n;
        let (read, written) = desc.bytes(self.rank, n);
        worker.touch(&[reads(desc.send, read), writes(desc.recv, written)]);
        let mut inner = lock(&self.clique.m);
        if self.aborted.load(Ordering::SeqCst) {
            return;
        }
        let slot = inner.slots.entry(seq).or_default();
        slot.got.resize_with(n, || None);
        slot.got[self.rank] = Some((desc, worker.knows()));
        if slot.got.iter().all(Option::is_some) {
            let all: Vec<Desc> = slot.got.iter().flatten().map(|got| got.0).collect();
            if all.iter().all(|other| other.same(&desc)) {
                compute(&all);
                slot.done = Some(learned(desc.kind, slot.got.iter().flatten().map(|got| &got.1).collect()));
                slot.left = n;
            } else {
                // The real one hangs, or worse.
                complain(format!("collective #{seq} differs between ranks: {all:?}"))
            }
            self.clique.cv.notify_all();
        }
        drop(inner);
        let what = format!("collective #{seq}, {:?} of {} elements", desc.kind, desc.count);
        let knows = self.wait(&what, |inner| {
            let slot = inner.slots.get_mut(&seq)?;
            let knows = slot.done.as_ref()?[self.rank].clone();
            slot.left -= 1;
            if slot.left == 0 {
                inner.slots.remove(&seq);
            }
            Some(knows)
        });
        if let Some(knows) = knows {
            worker.learn(&knows)
        }
    }

    /// Everything of a group that is on one stream.
    fn group(&self, worker: &mut Worker, ops: &[Op]) {
        if self.aborted.load(Ordering::SeqCst) {
            return;
        }
        let which = self.groups.fetch_add(1, Ordering::SeqCst);
        if planted("CUDA_SIM_NCCL_STALL") == Some((self.rank, which)) {
            return self.hang("a stalled transfer");
        }
        if planted("CUDA_SIM_NCCL_FAIL") == Some((self.rank, which)) {
            complain(format!("rank {}: a failure as asked for", self.rank));
            *lock(&self.error) = Some(ncclRemoteError);
            return self.hang("a failed transfer");
        }
        if let Some(remote) = &self.remote {
            for op in ops {
                match *op {
                    Op::Coll(_, desc) => {
                        let (read, written) = desc.bytes(self.rank, self.clique.n);
                        worker.touch(&[reads(desc.send, read), writes(desc.recv, written)])
                    }
                    Op::Send { at, len, .. } => worker.touch(&[reads(at, len)]),
                    Op::Recv { at, len, .. } => worker.touch(&[writes(at, len)]),
                }
            }
            if remote.group(self.rank, self.clique.n, ops).is_err() {
                self.lost();
                self.hang("a process that is gone")
            }
            return;
        }
        // Sends are there before anything waits.
        let mut sent = Vec::new();
        for op in ops {
            match *op {
                Op::Send { to, at, len } => {
                    worker.touch(&[reads(at, len)]);
                    let taken = Arc::new(AtomicBool::new(false));
                    sent.push((to, Arc::clone(&taken)));
                    let mut inner = lock(&self.clique.m);
                    if !self.aborted.load(Ordering::SeqCst) {
                        let message = Message { at, len, clock: worker.knows(), taken };
                        inner.mail.entry((self.rank, to)).or_default().push_back(message);
                        self.clique.cv.notify_all();
                    }
                }
                Op::Recv { at, len, .. } => worker.touch(&[writes(at, len)]),
                Op::Coll(..) => {}
            }
        }
        for op in ops {
            match *op {
                Op::Coll(seq, desc) => self.collective(worker, seq, desc),
                Op::Recv { from, at, len } => {
                    let knows = self.wait(&format!("a receive from rank {from}"), |inner| {
                        let message = inner.mail.get_mut(&(from, self.rank))?.pop_front()?;
                        if message.len != len {
                            complain(format!("a send of {} bytes met a receive of {len}", message.len));
                        }
                        // SAFETY (of what it does): the sender waits until its message has been taken.
                        store(at, &bytes(message.at, message.len.min(len)));
                        message.taken.store(true, Ordering::SeqCst);
                        self.clique.cv.notify_all();
                        Some(message.clock)
                    });
                    if let Some(knows) = knows {
                        worker.learn(&knows)
                    }
                }
                Op::Send { .. } => {}
            }
        }
        for (to, taken) in sent {
            self.wait(&format!("a send to rank {to}"), |_| taken.load(Ordering::SeqCst).then_some(()));
        }
        std::thread::sleep(Duration::from_micros(env("CUDA_SIM_LINK_US", 0)));
    }

    /// A first transfer between two ranks connects them, for which both must come.
    fn connect(&self, ops: &[Op]) {
        let others = ops.iter().flat_map(|op| match *op {
            Op::Coll(..) => 0..self.clique.n,
            Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } => peer..peer + 1,
        });
        let others: Vec<usize> = others.filter(|&other| other != self.rank).collect();
        let mut inner = lock(&self.clique.m);
        let before = inner.met.len();
        inner.met.extend(others.iter().map(|&other| (self.rank, other)));
        if inner.met.len() > before {
            self.clique.cv.notify_all();
        }
        drop(inner);
        self.wait("a connection", |inner| {
            others.iter().all(|&other| inner.met.contains(&(other, self.rank))).then_some(())
        });
    }
}

/// A rank and the number of its group, from the environment.
fn planted(name: &str) -> Option<(usize, u64)> {
    let text = std::env::var(name).ok()?;
    let (rank, which) = text.split_once(':')?;
    Some((rank.parse().ok()?, which.parse().ok()?))
}

/// What each rank knows after a collective: that those whose data it has got had begun.
fn learned(kind: Kind, begun: Vec<&Clock>) -> Vec<Clock> {
    let mut all = Clock::default();
    begun.iter().for_each(|clock| all.join(clock));
    let ranks = 0..begun.len();
    match kind {
        Kind::AllGather | Kind::ReduceScatter | Kind::AllReduce => vec![all; begun.len()],
        Kind::Broadcast(root) => vec![begun[root as usize].clone(); begun.len()],
        Kind::Reduce(root) => ranks.map(|r| if r == root as usize { all.clone() } else { Clock::default() }).collect(),
    }
}

fn size(t: ncclDataType_t) -> usize {
    use ncclDataType_t::*;
    match t {
        ncclInt8 | ncclUint8 => 1,
        ncclFloat16 | ncclBfloat16 => 2,
        ncclInt32 | ncclUint32 | ncclFloat32 => 4,
        ncclInt64 | ncclUint64 | ncclFloat64 => 8,
        _ => 1,
    }
}
fn reduce(all: &[Desc], off: usize, n: usize) -> Vec<u8> {
    use ncclDataType_t::*;
    let op = all[0].op;
    macro_rules! go {
        ($t:ty, $acc:ty, $to:expr, $from:expr) => {{
            let mut out: Vec<u8> = Vec::with_capacity(n * std::mem::size_of::<$t>());
            for i in 0..n {
                let at = |d: &Desc| -> $acc {
                    let v: $t = unsafe { *(d.send as *const $t).add(off + i) };
                    $to(v)
                };
                let mut a: $acc = at(&all[0]);
                for d in &all[1..] {
                    let b = at(d);
                    a = match op {
                        ncclRedOp_t::ncclProd => a * b,
                        ncclRedOp_t::ncclMax if b > a => b,
                        ncclRedOp_t::ncclMin if b < a => b,
                        ncclRedOp_t::ncclMax | ncclRedOp_t::ncclMin => a,
                        _ => a + b,
                    }
                }
                if let ncclRedOp_t::ncclAvg = op {
                    a /= all.len() as u32 as $acc
                }
                let v: $t = $from(a);
                out.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(&v as *const $t as *const u8, std::mem::size_of::<$t>())
                });
            }
            out
        }};
    }
    match all[0].ty {
        ncclFloat32 => go!(f32, f32, |v| v, |v| v),
        ncclFloat64 => go!(f64, f64, |v| v, |v| v),
        ncclFloat16 => go!(f16, f32, |v: f16| v.to_f32(), f16::from_f32),
        ncclBfloat16 => go!(bf16, f32, |v: bf16| v.to_f32(), bf16::from_f32),
        ncclInt32 => go!(i32, i32, |v| v, |v| v),
        ncclUint32 => go!(u32, u32, |v| v, |v| v),
        ncclInt64 => go!(i64, i64, |v| v, |v| v),
        ncclUint64 => go!(u64, u64, |v| v, |v| v),
        ncclInt8 => go!(i8, i32, |v: i8| v as i32, |v: i32| v as i8),
        _ => go!(u8, u32, |v: u8| v as u32, |v: u32| v as u8),
    }
}
fn bytes(p: usize, n: usize) -> Vec<u8> {
    unsafe { std::slice::from_raw_parts(p as *const u8, n).to_vec() }
}
fn store(p: usize, v: &[u8]) {
    unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), p as *mut u8, v.len()) }
}
/// All ranks have arrived and are stopped: everything is read before anything is written (in-place is safe).
fn compute(all: &[Desc]) {
    let (c, sz) = (all[0].count, size(all[0].ty));
    match all[0].kind {
        Kind::AllGather => {
            let v: Vec<u8> = all.iter().flat_map(|d| bytes(d.send, c * sz)).collect();
            all.iter().for_each(|d| store(d.recv, &v))
        }
        Kind::AllReduce => {
            let v = reduce(all, 0, c);
            all.iter().for_each(|d| store(d.recv, &v))
        }
        Kind::ReduceScatter => {
            let v: Vec<_> = (0..all.len()).map(|r| reduce(all, r * c, c)).collect();
            all.iter().zip(&v).for_each(|(d, v)| store(d.recv, v))
        }
        Kind::Broadcast(r) => {
            let v = bytes(all[r as usize].send, c * sz);
            all.iter().for_each(|d| store(d.recv, &v))
        }
        Kind::Reduce(r) => {
            let v = reduce(all, 0, c);
            store(all[r as usize].recv, &v)
        }
    }
}

fn comms() -> &'static Mutex<HashMap<usize, Arc<Comm>>> {
    static C: OnceLock<Mutex<HashMap<usize, Arc<Comm>>>> = OnceLock::new();
    C.get_or_init(Default::default)
}
fn ids() -> &'static Mutex<HashMap<u64, Arc<Clique>>> {
    static C: OnceLock<Mutex<HashMap<u64, Arc<Clique>>>> = OnceLock::new();
    C.get_or_init(Default::default)
}
static LAST: Mutex<String> = Mutex::new(String::new());
static NEXT_ID: AtomicUsize = AtomicUsize::new(1);
fn new_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed) as u64 | ((std::process::id() as u64) << 32)
}
thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static PENDING: RefCell<Vec<Pending>> = const { RefCell::new(Vec::new()) };
    static JOINING: RefCell<Vec<Arc<Comm>>> = const { RefCell::new(Vec::new()) };
}
enum Op {
    Coll(u64, Desc),
    Send { to: usize, at: usize, len: usize },
    Recv { from: usize, at: usize, len: usize },
}
struct Pending {
    comm: Arc<Comm>,
    st: Arc<Stream>,
    op: Op,
}
fn comm(c: ncclComm_t) -> Option<Arc<Comm>> {
    lock(comms()).get(&(c as usize)).cloned()
}

/// Queues one communicator's part of a group.
fn launch(comm: &Arc<Comm>, st: &Stream, caller: Caller, ops: Vec<Op>) {
    if comm.remote.is_none() {
        comm.connect(&ops);
    }
    if comm.aborted.load(Ordering::SeqCst) {
        comm.pending.fetch_sub(1, Ordering::SeqCst);
        return;
    }
    let comm = Arc::clone(comm);
    st.push_from(caller, move |worker| {
        comm.group(worker, &ops);
        comm.pending.fetch_sub(1, Ordering::SeqCst);
    });
}

fn launch_all(pending: Vec<Pending>) -> ncclResult_t {
    let mut groups: Vec<(Arc<Comm>, Arc<Stream>, Vec<Op>)> = Vec::new();
    for Pending { comm, st, op } in pending {
        match groups.iter_mut().find(|group| Arc::ptr_eq(&group.0, &comm) && Arc::ptr_eq(&group.1, &st)) {
            Some(group) => group.2.push(op),
            None => groups.push((comm, st, vec![op])),
        }
    }
    let mut result = ncclSuccess;
    let mut threads = Vec::new();
    for (comm, st, ops) in groups {
        let label = ops.iter().map(|op| match op {
            Op::Coll(seq, desc) => format!("{:?}#{seq}", desc.kind),
            Op::Send { to, .. } => format!("send>{to}"),
            Op::Recv { from, .. } => format!("recv<{from}"),
        });
        let caller = st.caller(format!("nccl:{}", label.collect::<Vec<_>>().join("+")));
        comm.pending.fetch_add(1, Ordering::SeqCst);
        comm.busy.fetch_add(1, Ordering::SeqCst);
        let blocking = comm.blocking;
        // Each on its own: within a group nobody waits for what is to come.
        let thread = std::thread::spawn(move || {
            static LAUNCHES: AtomicUsize = AtomicUsize::new(0);
            if !comm.blocking {
                Jitter::new(1000 + LAUNCHES.fetch_add(1, Ordering::Relaxed)).pause()
            }
            launch(&comm, &st, caller, ops);
            comm.busy.fetch_sub(1, Ordering::SeqCst);
        });
        if blocking {
            threads.push(thread)
        } else {
            result = ncclInProgress
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    result
}

fn submit(c: ncclComm_t, st: cudaStream_t, mk: impl FnOnce(&Comm) -> Result<Op, ncclResult_t>) -> ncclResult_t {
    let Some(c) = comm(c) else { return ncclInvalidArgument };
    let Ok(s) = stream(st as usize) else { return ncclUnhandledCudaError };
    if s.dev != c.dev {
        complain(format!("a stream of device {} was used with a communicator of device {}", s.dev, c.dev));
        return ncclInvalidUsage;
    }
    match c.state() {
        ncclSuccess if !c.finalized.load(Ordering::SeqCst) => {}
        ncclSuccess | ncclInProgress => {
            complain("a communicator was used before it had done what was called last".into());
            return ncclInvalidArgument;
        }
        error => return error,
    }
    let op = match mk(&c) {
        Ok(op) => op,
        Err(e) => return e,
    };
    let grouped = DEPTH.get() > 0;
    if let (Op::Coll(seq, _), false) = (&op, grouped) {
        // one host thread driving two ranks of a clique outside a group may hang with the real library
        let me = std::thread::current().id();
        let mut inner = lock(&c.clique.m);
        let slot = inner.slots.entry(*seq).or_default();
        let twice = slot.issued.iter().any(|&(r, t)| r != c.rank && t == me);
        slot.issued.push((c.rank, me));
        if twice && env("CUDA_SIM_NCCL_STRICT", 1) == 1 {
            complain(format!("one thread issued collective #{seq} for two ranks outside ncclGroupStart/End"));
            return ncclInvalidUsage;
        }
    }
    let pending = Pending { comm: c, st: s, op };
    if grouped {
        PENDING.with(|q| q.borrow_mut().push(pending));
        ncclSuccess
    } else {
        launch_all(vec![pending])
    }
}
fn coll(
    kind: Kind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    ty: ncclDataType_t,
    op: ncclRedOp_t,
    c: ncclComm_t,
    st: cudaStream_t,
) -> ncclResult_t {
    submit(c, st, |c| {
        let desc = Desc { kind, count, ty, op, send: send as usize, recv: recv as usize };
        let (read, written) = desc.bytes(c.rank, c.clique.n);
        let bad = |p: usize, n: usize| n > 0 && !check_dev(p, n).is_ok_and(|d| d == c.dev);
        if bad(desc.send, read) || bad(desc.recv, written) {
            return Err(ncclInvalidArgument);
        }
        Ok(Op::Coll(c.seq.fetch_add(1, Ordering::Relaxed), desc))
    })
}
fn pair(
    at: usize,
    len: usize,
    peer: c_int,
    c: ncclComm_t,
    st: cudaStream_t,
    mk: impl FnOnce(usize) -> Op,
) -> ncclResult_t {
    submit(c, st, |c| {
        let there = len == 0 || check_dev(at, len).is_ok_and(|dev| dev == c.dev);
        if !there || peer < 0 || peer as usize >= c.clique.n {
            return Err(ncclInvalidArgument);
        }
        Ok(mk(peer as usize))
    })
}
fn joined(comm: &Comm) -> ncclResult_t {
    let all = comm.wait("the other ranks' ncclCommInitRank", |inner| inner.joined.iter().all(|&j| j).then_some(()));
    if all.is_some() {
        ncclSuccess
    } else {
        ncclSystemError
    }
}
/// Whether calls on a communicator of that configuration block.
unsafe fn blocks(config: *const ncclConfig_t) -> bool {
    config.is_null() || (*config).blocking != 0
}
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

/// The group that a rank is in after a split: once all have chosen.
fn split(comm: &Comm, seq: u64, color: c_int) -> Option<(Arc<Clique>, usize)> {
    comm.wait("the other ranks' ncclCommSplit", |inner| inner.splits[&seq].iter().all(Option::is_some).then_some(()))?;
    let mut inner = lock(&comm.clique.m);
    let chosen = inner.splits[&seq].iter().enumerate();
    let mut members: Vec<(c_int, usize)> =
        chosen.filter_map(|(rank, choice)| choice.filter(|c| c.0 == color).map(|c| (c.1, rank))).collect();
    members.sort();
    let rank = members.iter().position(|m| m.1 == comm.rank)?;
    let made = inner.split_made.entry((seq, color)).or_insert_with(|| Clique::whole(members.len()));
    Some((Arc::clone(made), rank))
}

fn error_text(e: ncclResult_t) -> &'static std::ffi::CStr {
    match e {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error",
        ncclSystemError => c"unhandled system error",
        ncclInternalError => c"internal error",
        ncclInvalidArgument => c"invalid argument",
        ncclInvalidUsage => c"invalid usage",
        ncclRemoteError => c"remote process exited or there was a network error",
        ncclInProgress => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}

export! {
    nc::ncclGetVersion(v: *mut c_int) -> ncclResult_t { *v = 23000; ncclSuccess }
    nc::ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
        processes::listen();
        let k = new_id();
        let mut b = [0 as c_char; 128];
        for (i, x) in k.to_le_bytes().iter().enumerate() { b[i] = *x as c_char }
        id.write(ncclUniqueId { internal: b });
        ncclSuccess
    }
    nc::ncclCommInitRank(c: *mut ncclComm_t, n: c_int, id: ncclUniqueId, rank: c_int) -> ncclResult_t { ncclCommInitRankConfig(c, n, id, rank, std::ptr::null_mut()) }
    nc::ncclCommInitRankConfig(c: *mut ncclComm_t, n: c_int, id: ncclUniqueId, rank: c_int, cfg: *mut ncclConfig_t) -> ncclResult_t {
        let mut k = [0u8; 8];
        for (to, from) in k.iter_mut().zip(id.internal) { *to = from as u8 }
        if n < 1 || rank < 0 || rank >= n { return ncclInvalidArgument }
        let Ok(dev) = cur_dev() else { return ncclUnhandledCudaError };
        let key = u64::from_le_bytes(k);
        if Remote::is(key) {
            let Ok(new) = Comm::add_remote(key, n as usize, rank as usize, dev, blocks(cfg)) else { return ncclSystemError };
            *c = new
        } else {
            let clique = lock(ids()).entry(key).or_insert_with(|| Clique::new(n as usize)).clone();
            if clique.n != n as usize { return ncclInvalidArgument }
            {
                let mut inner = lock(&clique.m);
                if std::mem::replace(&mut inner.joined[rank as usize], true) { return ncclInvalidArgument }
            }
            *c = Comm::add(clique.clone(), rank as usize, dev, blocks(cfg));
            clique.cv.notify_all();
        }
        let Some(new) = comm(*c) else { return ncclInternalError };
        if !new.blocking { return ncclInProgress }
        if DEPTH.get() > 0 { JOINING.with(|j| j.borrow_mut().push(new)); return ncclSuccess }
        joined(&new)
    }
    nc::ncclCommInitAll(c: *mut ncclComm_t, n: c_int, devs: *const c_int) -> ncclResult_t {
        let clique = Clique::whole(n as usize);
        for r in 0..n as usize {
            let dev = if devs.is_null() { r } else { *devs.add(r) as usize };
            if dev >= crate::core::n_devices() { return ncclInvalidArgument }
            *c.add(r) = Comm::add(clique.clone(), r, dev, true);
        }
        ncclSuccess
    }
    nc::ncclCommSplit(c: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t, cfg: *mut ncclConfig_t) -> ncclResult_t {
        let Some(c) = comm(c) else { return ncclInvalidArgument };
        if c.state() as u32 != ncclSuccess as u32 { return ncclInvalidArgument }
        let seq = c.splits.fetch_add(1, Ordering::Relaxed);
        {
            let mut inner = lock(&c.clique.m);
            let n = c.clique.n;
            inner.splits.entry(seq).or_insert_with(|| vec![None; n])[c.rank] = Some((color, key));
        }
        c.clique.cv.notify_all();
        *new = std::ptr::null_mut();
        let (place, blocking) = (new as usize, if cfg.is_null() { c.blocking } else { blocks(cfg) });
        let work = {
            let c = c.clone();
            move || {
                if let Some(remote) = &c.remote {
                    return match remote.split(seq, color, key) {
                        Ok(_) if color < 0 => ncclSuccess,
                        Ok((id, n, rank)) => match Comm::add_remote(id, n, rank, c.dev, blocking) {
                            Ok(made) => {
                                (place as *mut ncclComm_t).write(made);
                                ncclSuccess
                            }
                            Err(_) => ncclRemoteError,
                        },
                        Err(_) => {
                            c.lost();
                            ncclRemoteError
                        }
                    };
                }
                if color < 0 {
                    return ncclSuccess;
                }
                let Some((clique, rank)) = split(&c, seq, color) else { return ncclSystemError };
                (place as *mut ncclComm_t).write(Comm::add(clique, rank, c.dev, blocking));
                ncclSuccess
            }
        };
        if c.blocking { return work() }
        c.busy.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || { work(); c.busy.fetch_sub(1, Ordering::SeqCst); });
        ncclInProgress
    }
    nc::ncclCommFinalize(c: ncclComm_t) -> ncclResult_t {
        let Some(c) = comm(c) else { return ncclInvalidArgument };
        if c.finalized.swap(true, Ordering::SeqCst) { return ncclInvalidArgument }
        if c.blocking { while c.pending.load(Ordering::SeqCst) > 0 { std::thread::yield_now() } }
        c.state()
    }
    nc::ncclCommDestroy(c: ncclComm_t) -> ncclResult_t {
        let Some(c) = lock(comms()).remove(&(c as usize)) else { return ncclInvalidArgument };
        if c.pending.load(Ordering::SeqCst) > 0 && !c.aborted.load(Ordering::SeqCst) { complain(format!("rank {} destroyed its communicator with work in flight", c.rank)) }
        ncclSuccess
    }
    nc::ncclCommAbort(c: ncclComm_t) -> ncclResult_t {
        match comm(c) { Some(known) => known.abort(), None => return ncclInvalidArgument }
        ncclCommDestroy(c)
    }
    nc::ncclCommCount(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.clique.n as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommUserRank(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.rank as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommCuDevice(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.dev as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommGetAsyncError(c: ncclComm_t, e: *mut ncclResult_t) -> ncclResult_t { match comm(c) { Some(c) => { *e = c.state(); ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclGetErrorString(e: ncclResult_t) -> *const c_char { error_text(e).as_ptr() }
    nc::ncclGetLastError(_c: ncclComm_t) -> *const c_char { let l = lock(&LAST); if l.is_empty() { c"".as_ptr() } else { l.as_ptr() as *const c_char } }
    nc::ncclGroupStart() -> ncclResult_t { DEPTH.set(DEPTH.get() + 1); ncclSuccess }
    nc::ncclGroupEnd() -> ncclResult_t {
        if DEPTH.get() == 0 { return ncclInvalidUsage }
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() > 0 { return ncclSuccess }
        for new in JOINING.with(|j| std::mem::take(&mut *j.borrow_mut())) {
            match joined(&new) { ncclSuccess => {} error => return error }
        }
        launch_all(PENDING.with(|q| std::mem::take(&mut *q.borrow_mut())))
    }
    nc::ncclAllGather(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::AllGather, s, r, n, t, SUM, c, st) }
    nc::ncclReduceScatter(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::ReduceScatter, s, r, n, t, op, c, st) }
    nc::ncclAllReduce(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::AllReduce, s, r, n, t, op, c, st) }
    nc::ncclBroadcast(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, root: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::Broadcast(root), s, r, n, t, SUM, c, st) }
    nc::ncclReduce(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, root: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::Reduce(root), s, r, n, t, op, c, st) }
    nc::ncclSend(s: *const c_void, n: usize, t: ncclDataType_t, peer: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t {
        let (at, len) = (s as usize, n * size(t));
        pair(at, len, peer, c, st, |to| Op::Send { to, at, len })
    }
    nc::ncclRecv(r: *mut c_void, n: usize, t: ncclDataType_t, peer: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t {
        let (at, len) = (r as usize, n * size(t));
        pair(at, len, peer, c, st, |from| Op::Recv { from, at, len })
    }
}
