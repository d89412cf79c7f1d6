//! Events: points in a stream, and the times of what lies between them.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, sys};

use super::{check, foreign};
use crate::Result;
use crate::timeline::{Lane, Recorder};

/// Makes the context this thread's.
pub(crate) fn bind(context: &CudaContext) -> Result<()> {
    // SAFETY: the context is alive.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context.cu_ctx()) })
}

/// A point in a stream.
pub(crate) struct Event {
    raw: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; recording is left to whoever knows that nobody else holds the event.
unsafe impl Sync for Event {}

impl Event {
    /// An event of the context, which is bound.
    pub(crate) fn new(context: &Arc<CudaContext>, timed: bool) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        } as u32;
        // SAFETY: the context is bound, and `raw` is written before it is read.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(crate) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Not cudarc's own: that returns errors that others have left there, and not only its own.
    fn bind(&self) -> Result<()> {
        bind(&self.context)
    }

    /// Records it in a stream of the bound context. Nobody else holds the event.
    pub(crate) fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream belong to the bound context and are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream) })
    }

    /// Records it in a stream of its own, which is empty, and waits for it.
    fn record_apart(&self) -> Result<()> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is bound, and `stream` is written before it is read.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        let recorded = self.record(stream).and_then(|()| self.wait());
        // SAFETY: created above, destroyed once.
        unsafe { sys::cuStreamDestroy_v2(stream) };
        recorded
    }

    /// How long after `earlier` the device passed it. Both have been passed and keep the time.
    fn since(&self, earlier: &Event) -> Result<Duration> {
        // SAFETY: both events are alive.
        let elapsed = unsafe { cudarc::driver::result::event::elapsed(earlier.raw, self.raw) };
        let milliseconds = elapsed.map_err(|error| foreign("cuEventElapsedTime", &error))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }

    /// Whether the stream has passed it.
    pub(crate) fn has_passed(&self) -> Result<bool> {
        self.bind()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits on the host until the stream has passed it.
    pub(crate) fn wait(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the event lives as long as `self`.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {:p} of CUDA device {}", self.raw, self.context.ordinal())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once. The driver keeps what streams still wait for.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// Times on the device of what is queued on a stream, for the timeline.
pub(crate) struct Stopwatch {
    context: Arc<CudaContext>,
    recorder: Recorder,
    lane: Lane,
    clock: Mutex<Clock>,
}

#[derive(Default)]
struct Clock {
    /// A recording's number, an event of it, and when the device passed that.
    zero: Option<(u64, Event, Instant)>,
    /// Spans that the device may not have passed yet.
    open: Vec<Timed>,
}

struct Timed {
    recording: u64,
    name: &'static str,
    bytes: u64,
    start: Event,
    end: Event,
}

impl Stopwatch {
    pub(crate) fn new(context: &Arc<CudaContext>, recorder: Recorder, lane: Lane) -> Self {
        Self { context: Arc::clone(context), recorder, lane, clock: Mutex::default() }
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Does `work`, which queues on `stream`, as a span of the timeline while that is recorded.
    pub(crate) fn span<R>(
        &self,
        stream: sys::CUstream,
        name: &'static str,
        bytes: u64,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let _traced = self.recorder.trace(self.lane, name);
        if !self.recorder.is_on() {
            return work();
        }
        self.context.bind_to_thread().map_err(|error| foreign("cuCtxSetCurrent", &error))?;
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let recording = self.recorder.recording();
        // The device's clock counts in single precision: each recording starts anew.
        if clock.zero.as_ref().is_none_or(|(of, ..)| *of != recording) {
            let zero = Event::new(&self.context, true)?;
            zero.record_apart()?;
            clock.zero = Some((recording, zero, Instant::now()));
        }
        drop(clock);
        let (start, end) = (Event::new(&self.context, true)?, Event::new(&self.context, true)?);
        start.record(stream)?;
        let done = work()?;
        end.record(stream)?;
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        clock.open.push(Timed { recording, name, bytes, start, end });
        Ok(done)
    }

    /// Notes the spans that the device has passed.
    pub(crate) fn note(&self) -> Result<()> {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let Clock { zero, open } = &mut *clock;
        let Some((recording, event, at)) = zero else { return Ok(()) };
        let mut passed = 0;
        for span in open.iter() {
            if !span.end.has_passed()? {
                break;
            }
            // What an earlier recording did not wait for is in none.
            if span.recording == *recording && *recording == self.recorder.recording() {
                let (start, end) = (*at + span.start.since(event)?, *at + span.end.since(event)?);
                self.recorder.note(self.lane, span.name, start, end, span.bytes);
            }
            passed += 1;
        }
        open.drain(..passed);
        Ok(())
    }
}
