//! What happened when: spans of compute, communication and waiting, per rank.
//!
//! A [`Recorder`] is shared by all ranks of a world. While it is off, noting a span costs one relaxed load.

mod chrome;
mod metrics;
mod svg;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use chrome::chrome_json;
pub use metrics::{Totals, hidden_fraction};
pub use svg::{stacked, svg};

/// What kind of activity a span is: the timeline draws one lane for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The compute queue: matmuls and other kernels.
    Compute,
    /// The communication queue: bytes on their way to this rank.
    Communication,
    /// The compute queue standing still until a communication is done.
    Wait,
}

/// One activity of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The rank, within the world.
    pub rank: usize,
    /// Its lane.
    pub lane: Lane,
    /// What it was.
    pub name: &'static str,
    /// When it began, since the recorder was made.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// Bytes received, for communication.
    pub bytes: u64,
}

#[derive(Debug)]
struct Shared {
    on: AtomicBool,
    /// How often recording has begun.
    recordings: AtomicU64,
    origin: Instant,
    spans: Mutex<Vec<Span>>,
}

/// Collects the spans of one rank, together with those of the other ranks that share it.
#[derive(Debug, Clone)]
pub struct Recorder {
    shared: Arc<Shared>,
    rank: usize,
}

impl Recorder {
    /// A recorder that is off until [`Recorder::start`].
    pub fn disabled() -> Self {
        let shared = Shared {
            on: AtomicBool::new(false),
            recordings: AtomicU64::new(0),
            origin: Instant::now(),
            spans: Mutex::new(Vec::new()),
        };
        Self { shared: Arc::new(shared), rank: 0 }
    }

    /// The same recorder, noting spans as `rank`'s.
    pub fn for_rank(&self, rank: usize) -> Self {
        Self { shared: Arc::clone(&self.shared), rank }
    }

    /// Forgets what was recorded and records from now on.
    pub fn start(&self) {
        self.shared.spans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.shared.recordings.fetch_add(1, Ordering::Relaxed);
        self.shared.on.store(true, Ordering::Relaxed);
    }

    /// The number of the recording, for what is noted later than it began.
    #[cfg(feature = "cuda")]
    pub(crate) fn recording(&self) -> u64 {
        self.shared.recordings.load(Ordering::Relaxed)
    }

    /// Stops recording and returns the spans of all ranks, in order of their start.
    pub fn stop(&self) -> Vec<Span> {
        self.shared.on.store(false, Ordering::Relaxed);
        let mut spans = std::mem::take(&mut *self.shared.spans.lock().unwrap_or_else(PoisonError::into_inner));
        spans.sort_by_key(|span| (span.start, span.rank));
        spans
    }

    /// Whether spans are being recorded.
    pub fn is_on(&self) -> bool {
        self.shared.on.load(Ordering::Relaxed)
    }

    /// The moment that spans are counted from.
    pub fn origin(&self) -> Instant {
        self.shared.origin
    }

    /// A span that ends when the guard is dropped. It is also a `tracing` span.
    pub(crate) fn span(&self, lane: Lane, name: &'static str) -> SpanGuard<'_> {
        let open = self.is_on().then(|| (self, lane, name, Instant::now()));
        SpanGuard { open, _traced: self.trace(lane, name) }
    }

    /// The `tracing` span alone, of what is timed elsewhere.
    pub(crate) fn trace(&self, lane: Lane, name: &'static str) -> Traced {
        let span = tracing::trace_span!(target: "async_tensor_parallel", "span", rank = self.rank, ?lane, name);
        Traced {
            _entered: span.entered(),
            #[cfg(feature = "nvtx")]
            _range: crate::nvtx::Range::new(name),
        }
    }

    /// A span with known ends.
    pub(crate) fn note(&self, lane: Lane, name: &'static str, start: Instant, end: Instant, bytes: u64) {
        if !self.is_on() {
            return;
        }
        let since = |at: Instant| at.saturating_duration_since(self.shared.origin);
        let span = Span { rank: self.rank, lane, name, start: since(start), end: since(end), bytes };
        self.shared.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }
}

/// Notes its span when dropped.
pub(crate) struct SpanGuard<'a> {
    open: Option<(&'a Recorder, Lane, &'static str, Instant)>,
    _traced: Traced,
}

/// A span that others show.
pub(crate) struct Traced {
    _entered: tracing::span::EnteredSpan,
    #[cfg(feature = "nvtx")]
    _range: crate::nvtx::Range,
}

impl Drop for SpanGuard<'_> {
    fn drop(&mut self) {
        if let Some((recorder, lane, name, start)) = self.open.take() {
            recorder.note(lane, name, start, Instant::now(), 0);
        }
    }
}
