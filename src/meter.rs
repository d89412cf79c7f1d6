//! How much of a layer's communication was hidden: counted at each call site.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::mode::Overlap;
use crate::plan::Pass;

/// What one layer's calls in one direction have spent on communication so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverlapReport {
    /// Calls that communicated.
    pub calls: u64,
    /// Time in which bytes were on their way to this rank.
    pub communication: Duration,
    /// Time in which this rank's compute stood still for them.
    pub exposed: Duration,
}

impl OverlapReport {
    /// The part of the communication that ran under compute, in percent; `None` where there was none, or where the engine
    /// does not tell how long it took.
    pub fn hidden_percent(&self) -> Option<f64> {
        let whole = self.communication.as_secs_f64();
        (whole > 0.0).then(|| 100.0 * (1.0 - self.exposed.as_secs_f64() / whole).clamp(0.0, 1.0))
    }
}

/// Counts one layer's calls in one direction.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    calls: AtomicU64,
    communication: AtomicU64,
    exposed: AtomicU64,
    warned: AtomicBool,
}

impl Meter {
    /// Calls after which it is worth telling that nothing was hidden.
    const ENOUGH: u64 = 16;

    pub(crate) fn report(&self) -> OverlapReport {
        OverlapReport {
            calls: self.calls.load(Ordering::Relaxed),
            communication: Duration::from_nanos(self.communication.load(Ordering::Relaxed)),
            exposed: Duration::from_nanos(self.exposed.load(Ordering::Relaxed)),
        }
    }

    /// Notes an operation: how long its bytes were on their way, and how long this rank's compute stood still for them.
    pub(crate) fn spent(&self, communication: Duration, exposed: Duration) {
        let nanos = |time: Duration| time.as_nanos().min(u64::MAX.into()) as u64;
        self.communication.fetch_add(nanos(communication), Ordering::Relaxed);
        self.exposed.fetch_add(nanos(exposed), Ordering::Relaxed);
    }

    /// Notes the end of a call. Warns, once, where an overlap was asked for and has hidden nothing.
    pub(crate) fn called(&self, layer: &'static str, pass: Pass, overlap: Overlap, rows: usize) {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if overlap == Overlap::Blocking || calls < Self::ENOUGH || self.warned.load(Ordering::Relaxed) {
            return;
        }
        let report = self.report();
        if report.hidden_percent().is_some_and(|hidden| hidden < 1.0) && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "async_tensor_parallel",
                layer, ?pass, %overlap, rows, calls,
                communication = ?report.communication,
                exposed = ?report.exposed,
                "the overlap has hidden nothing; Overlap::Auto would choose by measurement"
            );
        }
    }
}
