//! Finds accesses to the same bytes, one of them a write, that nothing orders.
//!
//! Every stream has a vector clock. What a stream has passed is known to another stream that waits for an event recorded there, to
//! a rank that receives from it, and to a host thread that synchronises with it; a job knows what the thread that queued it knew.
//! Two accesses race where the later one's clock does not hold the earlier one: whatever happened to run first this time.
//!
//! Host threads order each other in ways that the simulator cannot see (locks, channels, counted references): what one has
//! synchronised a stream for is known to all from then on, as before memory is freed; an event that it waited for, to itself alone.
//! A thread starts with what all others knew when it first calls.

use crate::core::{lock, state};
use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, OnceLock};

/// A stream's number, and how many jobs it has begun.
pub type Actor = usize;

/// What is known to have happened: for each stream, the last of its jobs. Sorted by stream.
#[derive(Clone, Debug, Default)]
pub struct Clock(Vec<(Actor, u64)>);

impl Clock {
    fn get(&self, actor: Actor) -> u64 {
        self.0.binary_search_by_key(&actor, |entry| entry.0).map_or(0, |at| self.0[at].1)
    }
    pub fn tick(&mut self, actor: Actor) -> u64 {
        match self.0.binary_search_by_key(&actor, |entry| entry.0) {
            Ok(at) => {
                self.0[at].1 += 1;
                self.0[at].1
            }
            Err(at) => {
                self.0.insert(at, (actor, 1));
                1
            }
        }
    }
    pub fn join(&mut self, other: &Clock) {
        let (mut mine, mut merged) = (self.0.iter().copied().peekable(), Vec::with_capacity(self.0.len()));
        for &(actor, time) in &other.0 {
            while let Some(entry) = mine.next_if(|entry| entry.0 < actor) {
                merged.push(entry)
            }
            let own = mine.next_if(|entry| entry.0 == actor).map_or(0, |entry| entry.1);
            merged.push((actor, own.max(time)));
        }
        merged.extend(mine);
        self.0 = merged;
    }
}

// What a host thread knows, and how much of `DRAINED` is in it.
thread_local!(static HOST: RefCell<Option<(Arc<Clock>, u64)>> = const { RefCell::new(None) });
/// All that any host thread knows.
static HOSTS: Mutex<Clock> = Mutex::new(Clock(Vec::new()));
/// What streams have been synchronised for, and how often.
static DRAINED: Mutex<(Clock, u64)> = Mutex::new((Clock(Vec::new()), 0));

/// What this host thread knows.
pub fn host() -> Arc<Clock> {
    HOST.with_borrow_mut(|own| {
        let (clock, seen) = own.get_or_insert_with(|| (Arc::new(lock(&HOSTS).clone()), 0));
        let drained = lock(&DRAINED);
        if drained.1 > *seen {
            *seen = drained.1;
            Arc::make_mut(clock).join(&drained.0)
        }
        clock.clone()
    })
}
/// This host thread has synchronised with whoever knew `clock`.
pub fn host_learns(clock: &Clock) {
    host();
    lock(&HOSTS).join(clock);
    HOST.with_borrow_mut(|own| own.iter_mut().for_each(|(known, _)| Arc::make_mut(known).join(clock)));
}
/// A host thread has synchronised a stream that knew `clock`.
pub fn drained(clock: &Clock) {
    let mut drained = lock(&DRAINED);
    drained.0.join(clock);
    drained.1 += 1;
}

/// What a job is and who queued it.
pub struct Site {
    pub label: String,
    pub dev: usize,
    pub stream: usize,
    from: Option<Backtrace>,
}
impl Site {
    pub fn here(label: String, dev: usize, stream: usize) -> Arc<Self> {
        Arc::new(Site { label, dev, stream, from: on().then(Backtrace::force_capture) })
    }
    fn show(&self) -> String {
        let all = self.from.as_ref().map(|from| from.to_string()).unwrap_or_default();
        // The frames below the simulator's own and above the language's.
        let mut frames: Vec<&str> = Vec::new();
        let mut lines = all.lines().peekable();
        while let Some(line) = lines.next() {
            let place = lines.next_if(|next| next.trim_start().starts_with("at ")).unwrap_or("").trim();
            let rest = ["cuda_sim", "std::", "core::", "alloc::", "__rust", "cudarc", "backtrace"];
            if !rest.iter().any(|word| line.contains(word)) {
                frames.push(line.trim());
                if !place.is_empty() {
                    frames.push(place)
                }
            }
        }
        format!(
            "{} on device {}, stream {:x}, queued at\n      {}",
            self.label,
            self.dev,
            self.stream,
            frames.iter().take(16).copied().collect::<Vec<_>>().join("\n      ")
        )
    }
}

/// Bytes that a job touches.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub at: usize,
    pub len: usize,
    pub write: bool,
}
pub fn reads(at: usize, len: usize) -> Access {
    Access { at, len, write: false }
}
pub fn writes(at: usize, len: usize) -> Access {
    Access { at, len, write: true }
}

/// An access in the past, kept with its allocation.
pub struct Past {
    start: usize,
    end: usize,
    write: bool,
    actor: Actor,
    time: u64,
    site: Arc<Site>,
}

fn setting() -> &'static str {
    static SETTING: OnceLock<String> = OnceLock::new();
    SETTING.get_or_init(|| std::env::var("CUDA_SIM_RACES").unwrap_or_default())
}
/// Whether races are looked for.
pub fn on() -> bool {
    !setting().is_empty()
}

fn found(text: String) {
    eprintln!("cuda-sim: {text}");
    if setting() == "abort" {
        std::process::abort()
    }
}

/// A job of `actor`, that knows `clock` and itself is `time`, touches memory.
pub fn touch(actor: Actor, time: u64, clock: &Clock, site: &Arc<Site>, accesses: &[Access]) {
    if !on() {
        return;
    }
    for access in accesses.iter().filter(|access| access.len > 0) {
        let (start, end) = (access.at, access.at + access.len);
        let mut state = state();
        let Some((_, alloc)) =
            state.allocs.range_mut(..=start).next_back().filter(|(base, alloc)| end <= **base + alloc.size)
        else {
            drop(state);
            found(format!("MEMORY THAT IS NOT THERE: {start:#x}+{} by {}", access.len, site.show()));
            continue;
        };
        let meets = |past: &Past| past.start < end && start < past.end;
        let race = alloc
            .history
            .iter()
            .find(|past| meets(past) && (past.write || access.write) && past.time > clock.get(past.actor));
        let report = race.map(|past| {
            format!(
                "RACE over bytes {:#x}..{:#x}:\n  {} by {}\n  {} by {}",
                start.max(past.start),
                end.min(past.end),
                if access.write { "write" } else { "read" },
                site.show(),
                if past.write { "write" } else { "read" },
                past.site.show()
            )
        });
        // Whoever is ordered after this is ordered after what this covers.
        alloc.history.retain(|past| {
            let covered = start <= past.start && past.end <= end && (access.write || !past.write);
            !covered || past.time > clock.get(past.actor)
        });
        alloc.history.push(Past { start, end, write: access.write, actor, time, site: site.clone() });
        drop(state);
        if let Some(report) = report {
            found(report)
        }
    }
}

/// The host frees memory: everything that touched it must be known to be over.
pub fn host_frees(ptr: usize) {
    if !on() {
        return;
    }
    let clock = host();
    let site = Site::here("free from the host".into(), 0, 0);
    let report = state().allocs.get(&ptr).and_then(|alloc| {
        let past = alloc.history.iter().find(|past| past.time > clock.get(past.actor))?;
        let how = if past.write { "write" } else { "read" };
        Some(format!("RACE: {}\n  {how} by {}", site.show(), past.site.show()))
    });
    if let Some(report) = report {
        found(report)
    }
}
