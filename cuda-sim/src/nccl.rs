//! NCCL inside one process: every rank's collective runs on its stream's worker and meets the others in a slot.
use crate::core::{check_dev, cur_dev, env, lock, new_handle, stream, Stream};
use cudarc::nccl::sys as nc;
use half::{bf16, f16};
use nc::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use ncclResult_t::*;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
#[derive(Default)]
struct Slot {
    got: Vec<Option<Desc>>,
    issued: Vec<(usize, ThreadId)>,
    done: bool,
    left: usize,
}
#[derive(Default)]
struct Inner {
    joined: Vec<bool>,
    slots: BTreeMap<u64, Slot>,
    mail: HashMap<(usize, usize), VecDeque<Vec<u8>>>, // (from, to) -> messages
    splits: BTreeMap<u64, Vec<Option<(c_int, c_int)>>>,
    split_made: HashMap<(u64, c_int), Arc<Clique>>,
    error: Option<ncclResult_t>,
}
struct Clique {
    n: usize,
    m: Mutex<Inner>,
    cv: Condvar,
}
impl Clique {
    fn new(n: usize) -> Arc<Self> {
        Arc::new(Clique {
            n,
            m: Mutex::new(Inner { joined: vec![false; n], ..Default::default() }),
            cv: Condvar::new(),
        })
    }
    fn fail(&self, g: &mut Inner, e: ncclResult_t, msg: String) {
        eprintln!("fakenccl: {msg}");
        *lock(&LAST) = format!("{msg}\0");
        g.error.get_or_insert(e);
        self.cv.notify_all();
    }
    /// Waits until `f` holds, an error is set, or the time-out passes (then sets an error).
    fn wait_for(&self, what: &str, mut f: impl FnMut(&mut Inner) -> bool) -> bool {
        let end = Instant::now() + Duration::from_millis(env("CUDA_SIM_NCCL_TIMEOUT_MS", 20_000));
        let mut g = lock(&self.m);
        loop {
            if g.error.is_some() {
                return false;
            }
            if f(&mut g) {
                return true;
            }
            let now = Instant::now();
            if now >= end {
                self.fail(&mut g, ncclTimeout, format!("time-out: {what}"));
                return false;
            }
            g = self.cv.wait_timeout(g, end - now).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
    fn collective(&self, rank: usize, seq: u64, d: Desc) {
        {
            let mut g = lock(&self.m);
            let n = self.n;
            let s = g.slots.entry(seq).or_default();
            if s.got.len() < n {
                s.got.resize(n, None)
            }
            s.got[rank] = Some(d);
            if s.got.iter().all(|x| x.is_some()) {
                let all: Vec<Desc> = s.got.iter().map(|x| x.unwrap()).collect();
                let same = all.iter().all(|x| {
                    x.kind == d.kind && x.count == d.count && x.ty as u32 == d.ty as u32 && x.op as u32 == d.op as u32
                });
                if same {
                    compute(&all)
                }
                let s = g.slots.get_mut(&seq).unwrap();
                s.done = true;
                s.left = n;
                if !same {
                    self.fail(&mut g, ncclInvalidUsage, format!("collective #{seq} differs between ranks: {all:?}"))
                }
                self.cv.notify_all();
            }
        }
        self.wait_for(&format!("rank {rank} of {} in collective #{seq} {:?} count {}", self.n, d.kind, d.count), |g| {
            g.slots[&seq].done
        });
        let mut g = lock(&self.m);
        if let Some(s) = g.slots.get_mut(&seq) {
            if s.done {
                s.left -= 1;
                if s.left == 0 {
                    g.slots.remove(&seq);
                }
            }
        }
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
                        ncclRedOp_t::ncclMax => {
                            if b > a {
                                b
                            } else {
                                a
                            }
                        }
                        ncclRedOp_t::ncclMin => {
                            if b < a {
                                b
                            } else {
                                a
                            }
                        }
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

struct Comm {
    clique: Arc<Clique>,
    rank: usize,
    dev: usize,
    seq: AtomicU64,
    splits: AtomicU64,
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
thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static PENDING: RefCell<Vec<Pending>> = const { RefCell::new(Vec::new()) };
    static JOINING: RefCell<Vec<Arc<Clique>>> = const { RefCell::new(Vec::new()) };
}
enum Op {
    Coll(u64, Desc),
    Send { to: usize, p: usize, n: usize },
    Recv { from: usize, p: usize, n: usize },
}
struct Pending {
    comm: Arc<Comm>,
    st: Arc<Stream>,
    op: Op,
}
fn comm(c: ncclComm_t) -> Option<Arc<Comm>> {
    lock(comms()).get(&(c as usize)).cloned()
}
fn add_comm(clique: Arc<Clique>, rank: usize, dev: usize) -> ncclComm_t {
    let h = new_handle();
    lock(comms()).insert(h, Arc::new(Comm { clique, rank, dev, seq: AtomicU64::new(0), splits: AtomicU64::new(0) }));
    h as ncclComm_t
}
fn launch(ps: Vec<Pending>) {
    // group by stream: sends are posted before anything waits, as one fused NCCL launch would make progress
    let mut by: Vec<(Arc<Stream>, Vec<Pending>)> = vec![];
    for p in ps {
        match by.iter_mut().find(|b| Arc::ptr_eq(&b.0, &p.st)) {
            Some(b) => b.1.push(p),
            None => by.push((p.st.clone(), vec![p])),
        }
    }
    for (st, ps) in by {
        let label = ps
            .iter()
            .map(|p| match &p.op {
                Op::Coll(s, d) => format!("{:?}#{s}", d.kind),
                Op::Send { to, .. } => format!("send>{to}"),
                Op::Recv { from, .. } => format!("recv<{from}"),
            })
            .collect::<Vec<_>>()
            .join("+");
        st.push(format!("nccl:{label}"), move || {
            for p in &ps {
                if let Op::Send { to, p: ptr, n } = p.op {
                    let mut g = lock(&p.comm.clique.m);
                    g.mail.entry((p.comm.rank, to)).or_default().push_back(bytes(ptr, n));
                    p.comm.clique.cv.notify_all();
                }
            }
            for p in &ps {
                let c = &p.comm;
                match p.op {
                    Op::Coll(seq, d) => c.clique.collective(c.rank, seq, d),
                    Op::Recv { from, p: ptr, n } => {
                        let mut v = None;
                        c.clique.wait_for(&format!("rank {} recv from {from}", c.rank), |g| {
                            v = g.mail.get_mut(&(from, c.rank)).and_then(|q| q.pop_front());
                            v.is_some()
                        });
                        if let Some(v) = v {
                            if v.len() == n {
                                store(ptr, &v)
                            } else {
                                let mut g = lock(&c.clique.m);
                                c.clique.fail(
                                    &mut g,
                                    ncclInvalidUsage,
                                    format!("send of {} bytes met recv of {n}", v.len()),
                                )
                            }
                        }
                    }
                    Op::Send { .. } => {}
                }
            }
        });
    }
}
fn submit(c: ncclComm_t, st: cudaStream_t, mk: impl FnOnce(&Comm) -> Result<Op, ncclResult_t>) -> ncclResult_t {
    let Some(c) = comm(c) else { return ncclInvalidArgument };
    let Ok(s) = stream(st as usize) else { return ncclUnhandledCudaError };
    if s.dev != c.dev {
        eprintln!("fakenccl: stream of device {} used with communicator of device {}", s.dev, c.dev);
        return ncclInvalidUsage;
    }
    if let Some(e) = lock(&c.clique.m).error {
        return e;
    }
    let op = match mk(&c) {
        Ok(op) => op,
        Err(e) => return e,
    };
    let grouped = DEPTH.get() > 0;
    if let (Op::Coll(seq, _), false) = (&op, grouped) {
        // one host thread driving two ranks of a clique outside a group may hang with the real library
        let me = std::thread::current().id();
        let mut g = lock(&c.clique.m);
        let sl = g.slots.entry(*seq).or_default();
        let twice = sl.issued.iter().any(|&(r, t)| r != c.rank && t == me);
        sl.issued.push((c.rank, me));
        if twice && env("CUDA_SIM_NCCL_STRICT", 1) == 1 {
            c.clique.fail(
                &mut g,
                ncclInvalidUsage,
                format!("one thread issued collective #{seq} for two ranks outside ncclGroupStart/End"),
            );
            return ncclInvalidUsage;
        }
    }
    let p = Pending { comm: c, st: s, op };
    if grouped {
        PENDING.with(|q| q.borrow_mut().push(p))
    } else {
        launch(vec![p])
    }
    ncclSuccess
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
        let (n, sz) = (c.clique.n, size(ty));
        let (sb, rb) = match kind {
            Kind::AllGather => (count * sz, count * sz * n),
            Kind::ReduceScatter => (count * sz * n, count * sz),
            _ => (count * sz, count * sz),
        };
        let need_send = !matches!(kind, Kind::Broadcast(r) if r as usize != c.rank);
        let need_recv = !matches!(kind, Kind::Reduce(r) if r as usize != c.rank);
        let bad = |p: usize, n: usize| n > 0 && !check_dev(p, n).is_ok_and(|d| d == c.dev);
        if (need_send && bad(send as usize, sb)) || (need_recv && bad(recv as usize, rb)) {
            return Err(ncclInvalidArgument);
        }
        Ok(Op::Coll(
            c.seq.fetch_add(1, Ordering::Relaxed),
            Desc { kind, count, ty, op, send: send as usize, recv: recv as usize },
        ))
    })
}
fn join(clique: &Arc<Clique>, rank: usize) -> ncclResult_t {
    {
        let mut g = lock(&clique.m);
        if rank >= clique.n || g.joined[rank] {
            return ncclInvalidArgument;
        }
        g.joined[rank] = true;
        clique.cv.notify_all();
    }
    if DEPTH.get() > 0 {
        JOINING.with(|j| j.borrow_mut().push(clique.clone()));
        return ncclSuccess;
    }
    if clique.wait_for("ncclCommInitRank", |g| g.joined.iter().all(|&j| j)) {
        ncclSuccess
    } else {
        ncclTimeout
    }
}
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

export! {
    nc::ncclGetVersion(v: *mut c_int) -> ncclResult_t { *v = 23000; ncclSuccess }
    nc::ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
        let k = NEXT_ID.fetch_add(1, Ordering::Relaxed) as u64 | ((std::process::id() as u64) << 32);
        let mut b = [0 as c_char; 128];
        for (i, x) in k.to_le_bytes().iter().enumerate() { b[i] = *x as c_char }
        id.write(ncclUniqueId { internal: b });
        ncclSuccess
    }
    nc::ncclCommInitRank(c: *mut ncclComm_t, n: c_int, id: ncclUniqueId, rank: c_int) -> ncclResult_t {
        let mut k = [0u8; 8];
        for (to, from) in k.iter_mut().zip(id.internal) { *to = from as u8 }
        let clique = lock(ids()).entry(u64::from_le_bytes(k)).or_insert_with(|| Clique::new(n as usize)).clone();
        if clique.n != n as usize { return ncclInvalidArgument }
        let Ok(dev) = cur_dev() else { return ncclUnhandledCudaError };
        *c = add_comm(clique.clone(), rank as usize, dev);
        join(&clique, rank as usize)
    }
    nc::ncclCommInitRankConfig(c: *mut ncclComm_t, n: c_int, id: ncclUniqueId, rank: c_int, _cfg: *mut nc::ncclConfig_t) -> ncclResult_t { ncclCommInitRank(c, n, id, rank) }
    nc::ncclCommInitAll(c: *mut ncclComm_t, n: c_int, devs: *const c_int) -> ncclResult_t {
        let clique = Clique::new(n as usize);
        for r in 0..n as usize {
            let dev = if devs.is_null() { r } else { *devs.add(r) as usize };
            if dev >= crate::core::n_devices() { return ncclInvalidArgument }
            *c.add(r) = add_comm(clique.clone(), r, dev);
        }
        ncclSuccess
    }
    nc::ncclCommSplit(c: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t, _cfg: *mut nc::ncclConfig_t) -> ncclResult_t {
        let Some(c) = comm(c) else { return ncclInvalidArgument };
        let seq = c.splits.fetch_add(1, Ordering::Relaxed);
        let n = c.clique.n;
        { let mut g = lock(&c.clique.m); let v = g.splits.entry(seq).or_insert_with(|| vec![None; n]); v[c.rank] = Some((color, key)); c.clique.cv.notify_all(); }
        if !c.clique.wait_for("ncclCommSplit", |g| g.splits[&seq].iter().all(|x| x.is_some())) { return ncclTimeout }
        if color < 0 { *new = std::ptr::null_mut(); return ncclSuccess }
        let mut g = lock(&c.clique.m);
        let mut members: Vec<(c_int, usize)> = g.splits[&seq].iter().enumerate().filter_map(|(r, x)| x.filter(|x| x.0 == color).map(|x| (x.1, r))).collect();
        members.sort();
        let rank = members.iter().position(|m| m.1 == c.rank).unwrap();
        let cl = g.split_made.entry((seq, color)).or_insert_with(|| Clique::new(members.len())).clone();
        *new = add_comm(cl, rank, c.dev);
        ncclSuccess
    }
    nc::ncclCommFinalize(c: ncclComm_t) -> ncclResult_t { if comm(c).is_some() { ncclSuccess } else { ncclInvalidArgument } }
    nc::ncclCommDestroy(c: ncclComm_t) -> ncclResult_t { if lock(comms()).remove(&(c as usize)).is_some() { ncclSuccess } else { ncclInvalidArgument } }
    nc::ncclCommAbort(c: ncclComm_t) -> ncclResult_t { if let Some(c) = comm(c) { let mut g = lock(&c.clique.m); c.clique.fail(&mut g, ncclRemoteError, "aborted".into()); } ncclCommDestroy(c) }
    nc::ncclCommCount(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.clique.n as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommUserRank(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.rank as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommCuDevice(c: ncclComm_t, n: *mut c_int) -> ncclResult_t { match comm(c) { Some(c) => { *n = c.dev as c_int; ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclCommGetAsyncError(c: ncclComm_t, e: *mut ncclResult_t) -> ncclResult_t { match comm(c) { Some(c) => { *e = lock(&c.clique.m).error.unwrap_or(ncclSuccess); ncclSuccess } None => ncclInvalidArgument } }
    nc::ncclGetErrorString(_e: ncclResult_t) -> *const c_char { c"fake nccl error".as_ptr() }
    nc::ncclGetLastError(_c: ncclComm_t) -> *const c_char { let l = lock(&LAST); if l.is_empty() { c"".as_ptr() } else { l.as_ptr() as *const c_char } }
    nc::ncclGroupStart() -> ncclResult_t { DEPTH.set(DEPTH.get() + 1); ncclSuccess }
    nc::ncclGroupEnd() -> ncclResult_t {
        if DEPTH.get() == 0 { return ncclInvalidUsage }
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() > 0 { return ncclSuccess }
        for cl in JOINING.with(|j| std::mem::take(&mut *j.borrow_mut())) { if !cl.wait_for("ncclCommInitRank in group", |g| g.joined.iter().all(|&j| j)) { return ncclTimeout } }
        launch(PENDING.with(|q| std::mem::take(&mut *q.borrow_mut())));
        ncclSuccess
    }
    nc::ncclAllGather(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::AllGather, s, r, n, t, SUM, c, st) }
    nc::ncclReduceScatter(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::ReduceScatter, s, r, n, t, op, c, st) }
    nc::ncclAllReduce(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::AllReduce, s, r, n, t, op, c, st) }
    nc::ncclBroadcast(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, root: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::Broadcast(root), s, r, n, t, SUM, c, st) }
    nc::ncclReduce(s: *const c_void, r: *mut c_void, n: usize, t: ncclDataType_t, op: ncclRedOp_t, root: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { coll(Kind::Reduce(root), s, r, n, t, op, c, st) }
    nc::ncclSend(s: *const c_void, n: usize, t: ncclDataType_t, peer: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { submit(c, st, |_| Ok(Op::Send { to: peer as usize, p: s as usize, n: n * size(t) })) }
    nc::ncclRecv(r: *mut c_void, n: usize, t: ncclDataType_t, peer: c_int, c: ncclComm_t, st: cudaStream_t) -> ncclResult_t { submit(c, st, |_| Ok(Op::Recv { from: peer as usize, p: r as usize, n: n * size(t) })) }
}
