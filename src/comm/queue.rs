//! A rank's communication stream on its CUDA device, the events that order it with compute, and the work that runs there.
//!
//! Of the device it needs the context, the compute stream, where a buffer lies, and the kernel that combines summands in
//! order on a given stream; and that a failed device says so to whoever reads or synchronises.
//!
//! The compute and the communication stream are ordered by events of this module alone, each recorded once for one
//! purpose: neither the driver's default stream nor cudarc's own tracking takes part.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, sys};

use crate::Result;
use crate::comm::ReduceOp;
use crate::device::Device;
use crate::device::cuda::events::{Event, Stopwatch};
use crate::device::cuda::memory::{pointer, pointer_mut};
use crate::device::cuda::{CudaDevice, check};
use crate::dtype::DType;
use crate::memory::{Buffer, BufferMut};
use crate::timeline::{Lane, Recorder};

/// Where a buffer lies on its device.
pub(crate) fn address(buffer: &Buffer) -> Result<sys::CUdeviceptr> {
    pointer(buffer).map(|(address, _)| address)
}

/// Where a unique buffer lies on its device.
pub(crate) fn address_mut(buffer: &mut BufferMut) -> Result<sys::CUdeviceptr> {
    pointer_mut(buffer).map(|(address, _)| address)
}

/// A stream of its own for a rank's communication, of the highest priority, and a pool of events.
pub(crate) struct Queue {
    stream: sys::CUstream,
    device: Arc<CudaDevice>,
    events: Mutex<Vec<Arc<Event>>>,
    next: AtomicUsize,
    /// The ordinals of devices whose memory has been copied from.
    peers: Mutex<Vec<usize>>,
    stopwatch: Stopwatch,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above; what order calls of several threads come in is the callers' affair.
unsafe impl Sync for Queue {}

impl Queue {
    pub(crate) fn new(device: &Arc<CudaDevice>, recorder: Recorder) -> Result<Self> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is bound; both are plain integers.
        check("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) })?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is bound, and `stream` is written before it is read.
        let code = unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, greatest) };
        check("cuStreamCreateWithPriority", code)?;
        Ok(Self {
            stream,
            device: Arc::clone(device),
            events: Mutex::default(),
            next: AtomicUsize::new(0),
            peers: Mutex::default(),
            stopwatch: Stopwatch::new(device.context(), recorder, Lane::Communication),
        })
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        self.stopwatch.recorder()
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// An event that nobody holds.
    fn event(&self) -> Result<Arc<Event>> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, next) = (events.len(), self.next.load(Ordering::Relaxed));
        for step in 0..count {
            let index = (next + step) % count;
            if Arc::strong_count(&events[index]) == 1 {
                // Pairs with the release in the last handle's drop.
                fence(Ordering::Acquire);
                self.next.store(index + 1, Ordering::Relaxed);
                return Ok(Arc::clone(&events[index]));
            }
        }
        let event = Arc::new(Event::new(self.device.context(), false)?);
        events.push(Arc::clone(&event));
        Ok(event)
    }

    fn record(&self, stream: sys::CUstream) -> Result<Arc<Event>> {
        self.device.bind()?;
        let event = self.event()?;
        event.record(stream)?;
        Ok(event)
    }

    fn order(&self, stream: sys::CUstream, after: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: event and stream are alive; the event may belong to another context.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, after.raw(), 0) })
    }

    /// What is queued on compute so far.
    pub(crate) fn mark_compute(&self) -> Result<Arc<Event>> {
        self.record(self.device.stream())
    }

    /// What is queued on communication so far.
    pub(crate) fn mark(&self) -> Result<Arc<Event>> {
        self.stopwatch.note()?;
        self.record(self.stream)
    }

    /// Queues `work` on the communication stream, as a span of the timeline while that is recorded.
    pub(crate) fn span(&self, name: &'static str, bytes: u64, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.stopwatch.span(self.stream, name, bytes, work)
    }

    /// Orders later communication after the event.
    pub(crate) fn follow(&self, event: &Event) -> Result<()> {
        self.order(self.stream, event)
    }

    /// Orders later compute after the event.
    pub(crate) fn join(&self, event: &Event) -> Result<()> {
        self.order(self.device.stream(), event)
    }

    /// Lets this device reach another's memory directly, where the machine can: copies between them need no detour then.
    fn reach(&self, other: &CudaContext) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.contains(&other.ordinal()) {
            return;
        }
        peers.push(other.ordinal());
        let mut can = 0;
        // SAFETY: both devices exist; the bound context is this device's.
        unsafe {
            let code = sys::cuDeviceCanAccessPeer(&mut can, self.device.context().cu_device(), other.cu_device());
            if code == sys::CUresult::CUDA_SUCCESS && can == 1 {
                // Another rank on this device may have been first. What fails here only makes copies slower.
                sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0);
            }
        }
    }

    /// Copies a buffer of this device or another one, on the communication stream.
    pub(crate) fn copy(&self, source: &Buffer, target: &mut BufferMut) -> Result<()> {
        crate::device::same_length("copy", source.len(), target.len())?;
        let bytes = source.len();
        if bytes == 0 {
            return Ok(());
        }
        let ((from, source), (to, target)) = (pointer(source)?, pointer_mut(target)?);
        self.device.bind()?;
        let (call, code) = if Arc::ptr_eq(source, target) || source.cu_ctx() == target.cu_ctx() {
            // SAFETY: both ranges lie within live allocations of the bound context, which their holders keep until the
            // stream has passed.
            ("cuMemcpyDtoDAsync_v2", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) })
        } else {
            self.reach(source);
            // SAFETY: as above, each in its own context.
            let code =
                unsafe { sys::cuMemcpyPeerAsync(to, target.cu_ctx(), from, source.cu_ctx(), bytes, self.stream) };
            ("cuMemcpyPeerAsync", code)
        };
        check(call, code)
    }

    /// Combines equally long summands in the order given, in the accumulator's dtype, rounding once, on the
    /// communication stream.
    pub(crate) fn combine<'a>(
        &self,
        dtype: DType,
        op: ReduceOp,
        count: usize,
        summand: &dyn Fn(usize) -> Option<&'a Buffer>,
        out: &mut BufferMut,
    ) -> Result<()> {
        self.device.combine_on(self.stream, dtype, op, count, summand, out)
    }

    /// Waits on the host until the communication stream is empty.
    pub(crate) fn drain(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "communication stream {:p} of {}", self.stream, self.device.describe())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once. The driver finishes what is queued.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}
