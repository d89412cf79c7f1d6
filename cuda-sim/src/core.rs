//! Devices, streams (worker threads), events, memory registry, trace.
use crate::races::{self, Access, Actor, Clock, Past, Site};
use cudarc::driver::sys as cu;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

pub type Res<T> = Result<T, cu::CUresult>;
pub fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// One-shot completion token: what an event record / a stream sync waits for, and what its stream knew.
#[derive(Default)]
pub struct Token(Mutex<Option<(Instant, Arc<Clock>)>>, Condvar);
impl Token {
    fn set(&self, clock: Clock) {
        *lock(&self.0) = Some((Instant::now(), Arc::new(clock)));
        self.1.notify_all();
    }
    pub fn at(&self) -> Option<Instant> {
        lock(&self.0).as_ref().map(|done| done.0)
    }
    pub fn wait(&self) -> Arc<Clock> {
        let mut g = lock(&self.0);
        loop {
            if let Some(done) = &*g {
                return done.1.clone();
            }
            g = self.1.wait(g).unwrap_or_else(|e| e.into_inner());
        }
    }
    /// The host waits.
    pub fn wait_on_host(&self) {
        races::host_learns(&self.wait())
    }
    /// The host looks.
    pub fn passed(&self) -> bool {
        let clock = lock(&self.0).as_ref().map(|done| done.1.clone());
        clock.is_some_and(|clock| {
            races::host_learns(&clock);
            true
        })
    }
}

/// Pauses of random lengths: most of none, some long, so that orders differ more than if all were a little late.
pub struct Jitter {
    state: u64,
    longest: u64,
}
impl Jitter {
    pub fn new(which: usize) -> Self {
        let state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(which as u64 + 1) ^ env("CUDA_SIM_SEED", 1);
        Jitter { state, longest: env("CUDA_SIM_JITTER_US", 0) }
    }
    pub fn pause(&mut self) {
        if self.longest == 0 {
            return;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        if self.state.is_multiple_of(4) {
            std::thread::sleep(Duration::from_micros((self.state >> 8) % self.longest));
        }
    }
}

/// A stream at work on a job.
pub struct Worker {
    actor: Actor,
    clock: Clock,
    time: u64,
    site: Arc<Site>,
    /// Whether it works on this process's devices.
    here: bool,
}
impl Worker {
    /// Stands for one of another process.
    pub fn elsewhere() -> Self {
        let site = Site::here("another process".into(), 0, 0);
        Worker { actor: usize::MAX, clock: Clock::default(), time: 0, site, here: false }
    }
    /// Notes what the job touches.
    pub fn touch(&self, accesses: &[Access]) {
        if self.here {
            races::touch(self.actor, self.time, &self.clock, &self.site, accesses)
        }
    }
    /// The job comes after what `clock` knows.
    pub fn learn(&mut self, clock: &Clock) {
        self.clock.join(clock)
    }
    /// What the job knows.
    pub fn knows(&self) -> Clock {
        self.clock.clone()
    }
}

/// Who queued a job, and what that thread knew.
pub struct Caller {
    site: Arc<Site>,
    host: Arc<Clock>,
}
struct Job {
    site: Arc<Site>,
    host: Arc<Clock>,
    run: Box<dyn FnOnce(&mut Worker) + Send>,
}
pub struct Stream {
    pub dev: usize,
    id: usize,
    tx: Mutex<Sender<Job>>,
}
impl Stream {
    pub fn new(dev: usize, id: usize) -> Arc<Self> {
        static STREAMS: AtomicUsize = AtomicUsize::new(1);
        let actor = STREAMS.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = channel::<Job>();
        std::thread::Builder::new()
            .name(format!("cuda-sim-d{dev}-s{id:x}"))
            .spawn(move || {
                let mut jitter = Jitter::new(actor);
                let mut clock = Clock::default();
                while let Ok(job) = rx.recv() {
                    jitter.pause();
                    let t0 = Instant::now();
                    clock.join(&job.host);
                    let time = clock.tick(actor);
                    let mut worker = Worker { actor, clock, time, site: job.site, here: true };
                    (job.run)(&mut worker);
                    clock = worker.clock;
                    trace(dev, id, &worker.site.label, t0, Instant::now());
                }
            })
            .unwrap();
        Arc::new(Stream { dev, id, tx: Mutex::new(tx) })
    }
    pub fn push(&self, label: impl Into<String>, f: impl FnOnce(&mut Worker) + Send + 'static) {
        self.push_from(self.caller(label), f)
    }
    /// Who calls, for a job that another thread queues on the caller's behalf.
    pub fn caller(&self, label: impl Into<String>) -> Caller {
        Caller { site: Site::here(label.into(), self.dev, self.id), host: races::host() }
    }
    pub fn push_from(&self, caller: Caller, f: impl FnOnce(&mut Worker) + Send + 'static) {
        let job = Job { site: caller.site, host: caller.host, run: Box::new(f) };
        lock(&self.tx).send(job).unwrap();
    }
    /// A job whose accesses are known when it is queued.
    pub fn push_over(&self, label: impl Into<String>, accesses: Vec<Access>, f: impl FnOnce() + Send + 'static) {
        self.push(label, move |worker| {
            worker.touch(&accesses);
            f()
        })
    }
    pub fn mark(&self, label: &str) -> Arc<Token> {
        let t = Arc::new(Token::default());
        let t2 = t.clone();
        self.push(label, move |worker| t2.set(worker.knows()));
        t
    }
    pub fn sync(&self) {
        races::drained(&self.mark("sync").wait());
    }
}

pub struct Event {
    pub dev: usize,
    pub timing: bool,
    pub last: Mutex<Option<Arc<Token>>>,
}

pub struct Alloc {
    pub size: usize,
    pub dev: usize,
    pub pinned_host: bool,
    pub freeing: bool,
    /// From the stream-ordered pool: freeing it from the host waits for nothing.
    pub ordered: bool,
    pub history: Vec<Past>,
}

#[derive(Default)]
pub struct State {
    pub streams: HashMap<usize, Arc<Stream>>,           // handle -> stream
    pub defaults: HashMap<(usize, usize), Arc<Stream>>, // (dev, 0|1|2) -> null / legacy / per-thread stream
    pub events: HashMap<usize, Arc<Event>>,
    pub allocs: BTreeMap<usize, Alloc>,
    pub used: HashMap<usize, usize>,
}
pub fn state() -> MutexGuard<'static, State> {
    static S: OnceLock<Mutex<State>> = OnceLock::new();
    lock(S.get_or_init(Default::default))
}
static NEXT: AtomicUsize = AtomicUsize::new(1);
pub fn new_handle() -> usize {
    0x7000_0000_0000 + NEXT.fetch_add(1, Ordering::Relaxed) * 64
}
pub fn n_devices() -> usize {
    env("CUDA_SIM_DEVICES", 2) as usize
}
pub fn mem_bytes() -> usize {
    (env("CUDA_SIM_MEM_MB", 256) as usize) << 20
}

// contexts: one primary context per device, the handle encodes the ordinal
const CTX: usize = 0x6C00_0000_0000;
pub fn ctx_of(dev: usize) -> cu::CUcontext {
    (CTX + dev * 256) as _
}
pub fn dev_of(ctx: cu::CUcontext) -> Option<usize> {
    let v = (ctx as usize).wrapping_sub(CTX);
    (v.is_multiple_of(256) && v / 256 < n_devices()).then_some(v / 256)
}
thread_local!(pub static CURRENT: Cell<usize> = const { Cell::new(0) });
pub fn cur_dev() -> Res<usize> {
    dev_of(CURRENT.get() as _).ok_or(cu::CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

pub fn stream(h: usize) -> Res<Arc<Stream>> {
    if h <= 2 {
        let dev = cur_dev()?;
        let mut st = state();
        return Ok(st.defaults.entry((dev, h)).or_insert_with(|| Stream::new(dev, h)).clone());
    }
    state().streams.get(&h).cloned().ok_or(cu::CUresult::CUDA_ERROR_INVALID_HANDLE)
}
pub fn event(h: usize) -> Res<Arc<Event>> {
    state().events.get(&h).cloned().ok_or(cu::CUresult::CUDA_ERROR_INVALID_HANDLE)
}

// ---- memory ----
fn layout(size: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(size.max(1), 256).unwrap()
}
pub fn mem_alloc(dev: usize, size: usize, pinned_host: bool, ordered: bool) -> Res<usize> {
    static COUNT: AtomicUsize = AtomicUsize::new(1);
    if !pinned_host && COUNT.fetch_add(1, Ordering::Relaxed) as u64 == env("CUDA_SIM_OOM_AT", 0) {
        return Err(cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mut st = state();
    if !pinned_host {
        let used = st.used.entry(dev).or_default();
        if *used + size > mem_bytes() {
            return Err(cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        *used += size;
    }
    let p = unsafe { std::alloc::alloc(layout(size)) };
    unsafe { std::ptr::write_bytes(p, 0xFF, size) }; // fresh memory reads as NaN
    st.allocs.insert(p as usize, Alloc { size, dev, pinned_host, freeing: false, ordered, history: Vec::new() });
    Ok(p as usize)
}
/// From now on new work may not name `ptr`; the memory itself goes when `release` runs.
pub fn begin_free(ptr: usize) -> Res<()> {
    match state().allocs.get_mut(&ptr) {
        Some(a) if !a.freeing => {
            a.freeing = true;
            Ok(())
        }
        _ => Err(cu::CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}
pub fn release(ptr: usize) {
    let mut st = state();
    if let Some(a) = st.allocs.remove(&ptr) {
        if !a.pinned_host {
            *st.used.entry(a.dev).or_default() -= a.size;
        }
        unsafe {
            std::ptr::write_bytes(ptr as *mut u8, 0xDB, a.size);
            std::alloc::dealloc(ptr as *mut u8, layout(a.size));
        }
    }
}
/// The live allocation that covers [ptr, ptr+len): (device, is pinned host memory)
pub fn find(ptr: usize, len: usize) -> Option<(usize, bool)> {
    let st = state();
    let (b, a) = st.allocs.range(..=ptr).next_back()?;
    (!a.freeing && ptr + len <= b + a.size.max(1)).then_some((a.dev, a.pinned_host))
}
pub fn check_dev(ptr: usize, len: usize) -> Res<usize> {
    match find(ptr, len) {
        Some((d, false)) => Ok(d),
        _ => {
            eprintln!("cuda-sim: bad device range {ptr:#x}+{len}");
            Err(cu::CUresult::CUDA_ERROR_INVALID_VALUE)
        }
    }
}

// ---- trace ----
static T0: OnceLock<Instant> = OnceLock::new();
static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());
fn trace(dev: usize, stream: usize, label: &str, a: Instant, b: Instant) {
    static ON: OnceLock<bool> = OnceLock::new();
    if !*ON.get_or_init(|| env("CUDA_SIM_TRACE", 0) == 1) {
        return;
    }
    let z = *T0.get_or_init(|| a);
    lock(&LOG).push(format!(
        "d{dev} s{stream:x} {label} {:.1}..{:.1}us",
        a.saturating_duration_since(z).as_secs_f64() * 1e6,
        b.saturating_duration_since(z).as_secs_f64() * 1e6
    ));
}
/// Prints what each stream executed, with times (a test can dlsym this).
#[no_mangle]
pub extern "C" fn cuda_sim_dump_trace() {
    for l in lock(&LOG).drain(..) {
        eprintln!("{l}");
    }
}
#[no_mangle]
pub extern "C" fn cuda_sim_used_bytes(dev: usize) -> usize {
    state().used.get(&dev).copied().unwrap_or(0)
}
