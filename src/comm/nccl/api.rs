//! NCCL's calls as results, its configuration, and a handle that is safe to abort while other threads use it.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t};

use super::library::{Library, library};
use crate::comm::ReduceOp;
use crate::dtype::DType;
use crate::{Error, Result};

/// What an int of NCCL's configuration holds where NCCL should choose.
const UNDEFINED: c_int = c_int::MIN;
/// What NCCL's configuration begins with, so that the library knows that it was filled in.
const MAGIC: u32 = 0xcafe_beef;
/// The NCCL version whose layout of the configuration this is: 2.30.0.
const LAYOUT_VERSION: u32 = 23_000;

/// How sums over ranks are formed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    /// All-to-all in the wire dtype, then one sum in rank order in f32 (f64 for f64), rounded once: the bytes of a ring,
    /// the same bits in every run, and each block leaves as soon as it is handed in.
    #[default]
    Ordered,
    /// NCCL's own reduce-scatter and all-reduce. They start when the last block has been handed in; what order they add
    /// in, and how often they round, is NCCL's choice.
    Native,
}

/// Which of its resources NCCL prefers to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtaPolicy {
    /// The fastest transfer.
    Default,
    /// As few thread blocks as keep the bandwidth near the best: more of the device is left for the matmul.
    Efficiency,
    /// None where it can: copy engines.
    Zero,
}

impl CtaPolicy {
    fn raw(self) -> c_int {
        match self {
            CtaPolicy::Default => 0,
            CtaPolicy::Efficiency => 1,
            CtaPolicy::Zero => 2,
        }
    }
}

/// Options of a [`NcclCommunicator`](crate::NcclCommunicator).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct NcclConfig {
    /// How sums are formed.
    pub reduction: Reduction,
    /// Whether a gather of equal shards is one `ncclAllGather`, whose pieces all arrive at the end, instead of one step
    /// a peer. It is faster as a whole; [`Overlap::Pipelined`](crate::Overlap::Pipelined) hides less under it.
    pub whole_gathers: bool,
    /// The fewest thread blocks (CTAs) of NCCL's kernels; `None` leaves it to NCCL.
    pub min_ctas: Option<u16>,
    /// The most thread blocks (CTAs) of NCCL's kernels: what they may take from the matmul. `None` leaves it to NCCL.
    pub max_ctas: Option<u16>,
    /// Which resources NCCL prefers (NCCL 2.27 and later); `None` leaves it to NCCL.
    pub cta_policy: Option<CtaPolicy>,
    /// How long a wait lasts before it gives up, and how long the ranks may take to come together.
    pub deadline: Duration,
}

impl Default for NcclConfig {
    fn default() -> Self {
        Self {
            reduction: Reduction::Ordered,
            whole_gathers: false,
            min_ctas: None,
            max_ctas: None,
            cta_policy: None,
            deadline: crate::comm::DEFAULT_DEADLINE,
        }
    }
}

impl NcclConfig {
    fn raw(&self) -> sys::ncclConfig_t {
        let ctas = |count: Option<u16>| count.map_or(UNDEFINED, c_int::from);
        sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: MAGIC,
            version: LAYOUT_VERSION,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: ctas(self.min_ctas),
            maxCTAs: ctas(self.max_ctas),
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: std::ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: self.cta_policy.map_or(UNDEFINED, CtaPolicy::raw),
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
            graphUsageMode: UNDEFINED,
            numRmaCtx: UNDEFINED,
            maxP2pPeers: UNDEFINED,
        }
    }
}

/// What the ranks of a group find each other by: made by one of them, and given to all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId(sys::ncclUniqueId);

impl NcclId {
    /// Bytes of an id.
    pub const BYTES: usize = 128;

    /// A new id. The process that makes it must live until all ranks have joined.
    ///
    /// # Errors
    /// [`Error::Library`] where NCCL is not on this machine; [`Error::Foreign`] where it fails.
    pub fn new() -> Result<Self> {
        let nccl = library()?;
        let mut id = sys::ncclUniqueId { internal: [0; Self::BYTES] };
        // SAFETY: the library is there, and `id` may be written.
        check("ncclGetUniqueId", unsafe { (nccl.ncclGetUniqueId)(&mut id) }, std::ptr::null_mut())?;
        Ok(Self(id))
    }

    /// An id from its bytes, as another rank sent them.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(sys::ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) })
    }

    /// Its bytes, to be sent to the other ranks.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.internal.map(|byte| byte as u8)
    }
}

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever knows an id may join: it does not belong in a log.
        f.write_str("NcclId")
    }
}

/// Makes sure that NCCL is there.
pub(super) fn load() -> Result<()> {
    library().map(drop)
}

/// NCCL's words for a code, and for its last error.
fn message(code: ncclResult_t, comm: ncclComm_t) -> String {
    let text = |text: *const std::ffi::c_char| {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL returns a string that ends and outlives this call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let Ok(nccl) = library() else { return format!("{code:?}") };
    // SAFETY: the code is one of the library's, and the handle alive or null.
    let (short, last) = unsafe { (text((nccl.ncclGetErrorString)(code)), text((nccl.ncclGetLastError)(comm))) };
    if last.is_empty() { format!("{short} ({code:?})") } else { format!("{short} ({code:?}): {last}") }
}

/// Turns what an NCCL call returned into a result. Work still in progress is no error.
pub(super) fn check(call: &'static str, code: ncclResult_t, comm: ncclComm_t) -> Result<()> {
    match code {
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
        code => Err(Error::Foreign { library: "NCCL", call: call.into(), message: message(code, comm) }),
    }
}

/// One transfer of a group.
#[derive(Debug, Clone, Copy)]
pub(super) enum Transfer {
    Send { to: usize, from: u64, bytes: usize },
    Receive { from: usize, to: u64, bytes: usize },
    AllGather { from: u64, to: u64, bytes: usize },
    Broadcast { root: usize, from: u64, to: u64, bytes: usize },
    Reduce { root: usize, from: u64, to: u64, elements: usize, dtype: DType, op: ReduceOp },
    ReduceScatter { from: u64, to: u64, elements: usize, dtype: DType, op: ReduceOp },
    AllReduce { from: u64, to: u64, elements: usize, dtype: DType, op: ReduceOp },
}

fn data_type(dtype: DType) -> sys::ncclDataType_t {
    match dtype {
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
    }
}

impl Transfer {
    /// Whether it moves nothing.
    pub(super) fn is_empty(&self) -> bool {
        match *self {
            Transfer::Send { bytes, .. }
            | Transfer::Receive { bytes, .. }
            | Transfer::AllGather { bytes, .. }
            | Transfer::Broadcast { bytes, .. } => bytes == 0,
            Transfer::Reduce { elements, .. }
            | Transfer::ReduceScatter { elements, .. }
            | Transfer::AllReduce { elements, .. } => elements == 0,
        }
    }

    /// Bytes that come to this rank, or of its result.
    pub(super) fn received(&self) -> usize {
        match *self {
            Transfer::Send { .. } => 0,
            Transfer::Receive { bytes, .. } | Transfer::AllGather { bytes, .. } | Transfer::Broadcast { bytes, .. } => {
                bytes
            }
            Transfer::Reduce { elements, dtype, .. }
            | Transfer::ReduceScatter { elements, dtype, .. }
            | Transfer::AllReduce { elements, dtype, .. } => elements * dtype.size(),
        }
    }

    /// Queues the transfer: within a group, for its end.
    ///
    /// # Safety
    /// Pointers and sizes describe live device memory of the communicator's device, and the stream is its own.
    unsafe fn queue(self, nccl: &Library, comm: ncclComm_t, stream: CUstream) -> Result<()> {
        const BYTE: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;
        let stream = stream.cast();
        let (source, target) = (|pointer: u64| pointer as *const c_void, |pointer: u64| pointer as *mut c_void);
        let rank = |rank: usize| rank as c_int;
        // SAFETY: the caller's.
        let (call, code) = unsafe {
            match self {
                Transfer::Send { to, from, bytes } => {
                    ("ncclSend", (nccl.ncclSend)(source(from), bytes, BYTE, rank(to), comm, stream))
                }
                Transfer::Receive { from, to, bytes } => {
                    ("ncclRecv", (nccl.ncclRecv)(target(to), bytes, BYTE, rank(from), comm, stream))
                }
                Transfer::AllGather { from, to, bytes } => {
                    ("ncclAllGather", (nccl.ncclAllGather)(source(from), target(to), bytes, BYTE, comm, stream))
                }
                Transfer::Broadcast { root, from, to, bytes } => {
                    let code = (nccl.ncclBroadcast)(source(from), target(to), bytes, BYTE, rank(root), comm, stream);
                    ("ncclBroadcast", code)
                }
                Transfer::Reduce { root, from, to, elements, dtype, op } => {
                    let (dtype, op) = (data_type(dtype), reduction(op));
                    let code =
                        (nccl.ncclReduce)(source(from), target(to), elements, dtype, op, rank(root), comm, stream);
                    ("ncclReduce", code)
                }
                Transfer::ReduceScatter { from, to, elements, dtype, op } => {
                    let (dtype, op) = (data_type(dtype), reduction(op));
                    let code = (nccl.ncclReduceScatter)(source(from), target(to), elements, dtype, op, comm, stream);
                    ("ncclReduceScatter", code)
                }
                Transfer::AllReduce { from, to, elements, dtype, op } => {
                    let (dtype, op) = (data_type(dtype), reduction(op));
                    let code = (nccl.ncclAllReduce)(source(from), target(to), elements, dtype, op, comm, stream);
                    ("ncclAllReduce", code)
                }
            }
        };
        check(call, code, comm)
    }
}

/// NCCL's handle of one rank of one group. Every call on it is short, as the communicator does not block, so that one
/// lock serves both the calling threads and the one that aborts.
pub(super) struct Handle {
    /// On the heap: NCCL's own threads may write it after the call that makes it has returned.
    comm: Mutex<Box<AtomicPtr<sys::ncclComm>>>,
}

/// A handle that is used under its lock.
struct Alive<'a> {
    comm: ncclComm_t,
    _lock: MutexGuard<'a, Box<AtomicPtr<sys::ncclComm>>>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NCCL communicator")
    }
}

/// How long to sleep between two looks at something that has been waited for since `begun`: first not at all.
pub(super) fn nap(begun: Instant) {
    match begun.elapsed() {
        waited if waited < Duration::from_micros(200) => std::thread::yield_now(),
        waited => std::thread::sleep((waited / 16).clamp(Duration::from_micros(50), Duration::from_millis(5))),
    }
}

impl Handle {
    /// Starts to join the group of `id`, on the device whose context is bound.
    pub(super) fn join(id: NcclId, rank: usize, world_size: usize, config: &NcclConfig) -> Result<Self> {
        let (nccl, new) = (library()?, Self::empty());
        let mut raw = config.raw();
        let (world_size, rank) = (world_size as c_int, rank as c_int);
        // SAFETY: what the handle points to lives until it is aborted; NCCL copies the configuration.
        let code = unsafe { (nccl.ncclCommInitRankConfig)(new.lock().as_ptr(), world_size, id.0, rank, &mut raw) };
        check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
        Ok(new)
    }

    fn empty() -> Self {
        Self { comm: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Box<AtomicPtr<sys::ncclComm>>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle, where there is one that has not been aborted.
    fn alive(&self) -> Result<Alive<'_>> {
        let lock = self.lock();
        let comm = lock.load(Ordering::Acquire);
        if comm.is_null() {
            return Err(Error::Foreign {
                library: "NCCL",
                call: "using the communicator".into(),
                message: "it has been aborted".into(),
            });
        }
        Ok(Alive { comm, _lock: lock })
    }

    /// Takes the handle away from everybody.
    fn take(&self) -> Option<Alive<'_>> {
        let lock = self.lock();
        let comm = lock.swap(std::ptr::null_mut(), Ordering::AcqRel);
        (!comm.is_null()).then_some(Alive { comm, _lock: lock })
    }

    /// Whether what was started last has been done by NCCL's own threads; an error that it has met meanwhile.
    pub(super) fn poll(&self) -> Result<bool> {
        let (nccl, Alive { comm, .. }) = (library()?, &self.alive()?);
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the handle is alive while the lock is held.
        check("ncclCommGetAsyncError", unsafe { (nccl.ncclCommGetAsyncError)(*comm, &mut state) }, *comm)?;
        check("asynchronous work", state, *comm)?;
        Ok(state != ncclResult_t::ncclInProgress)
    }

    /// Queues transfers as one group.
    ///
    /// # Safety
    /// As [`Transfer::queue`], until the stream has passed them.
    pub(super) unsafe fn group(&self, transfers: &[Transfer], stream: CUstream) -> Result<()> {
        let (nccl, Alive { comm, .. }) = (library()?, &self.alive()?);
        // SAFETY: no arguments; the group is ended below in every case.
        check("ncclGroupStart", unsafe { (nccl.ncclGroupStart)() }, *comm)?;
        // SAFETY: the caller's.
        let queued = transfers.iter().try_for_each(|transfer| unsafe { transfer.queue(nccl, *comm, stream) });
        // SAFETY: ends the group that was started above.
        let ended = check("ncclGroupEnd", unsafe { (nccl.ncclGroupEnd)() }, *comm);
        queued.and(ended)
    }

    /// Starts to divide the group; `None` as color takes no part. The new handle is there once this one has been polled to
    /// the end.
    pub(super) fn split(&self, color: Option<usize>, key: usize, config: &NcclConfig) -> Result<Option<Self>> {
        /// What a rank that joins no group gives as its color.
        const NO_COLOR: c_int = -1;
        let (nccl, Alive { comm, .. }) = (library()?, &self.alive()?);
        let new = Self::empty();
        let mut raw = config.raw();
        let color = color.map_or(NO_COLOR, |color| color as c_int);
        // SAFETY: the handle is alive while the lock is held; what the new one points to lives until it is aborted.
        let code = unsafe { (nccl.ncclCommSplit)(*comm, color, key as c_int, new.lock().as_ptr(), &mut raw) };
        check("ncclCommSplit", code, *comm)?;
        Ok((color != NO_COLOR).then_some(new))
    }

    /// Starts to finish what is in flight.
    pub(super) fn finalize(&self) -> Result<()> {
        let (nccl, Alive { comm, .. }) = (library()?, &self.alive()?);
        // SAFETY: the handle is alive while the lock is held.
        check("ncclCommFinalize", unsafe { (nccl.ncclCommFinalize)(*comm) }, *comm)
    }

    /// Frees a finalized handle.
    pub(super) fn destroy(&self) {
        if let (Ok(nccl), Some(Alive { comm, .. })) = (library(), &self.take()) {
            // SAFETY: the handle was alive, and nobody finds it any more.
            unsafe { (nccl.ncclCommDestroy)(*comm) };
        }
    }

    /// Ends what is in flight at once, and frees the handle.
    pub(super) fn abort(&self) {
        if let (Ok(nccl), Some(Alive { comm, .. })) = (library(), &self.take()) {
            // SAFETY: the handle was alive, and nobody finds it any more.
            unsafe { (nccl.ncclCommAbort)(*comm) };
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_bytes() {
        let bytes = std::array::from_fn(|index| index as u8 * 3);
        assert_eq!(NcclId::from_bytes(bytes).to_bytes(), bytes);
        assert_eq!(format!("{:?}", NcclId::from_bytes(bytes)), "NcclId");
    }

    #[test]
    fn nccl_chooses_what_is_not_set() {
        let raw = NcclConfig::default().raw();
        assert_eq!((raw.size, raw.magic, raw.blocking), (size_of_val(&raw), MAGIC, 0));
        assert_eq!([raw.minCTAs, raw.maxCTAs, raw.CTAPolicy, raw.splitShare], [UNDEFINED; 4]);
        let config = NcclConfig {
            min_ctas: Some(1),
            max_ctas: Some(8),
            cta_policy: Some(CtaPolicy::Zero),
            ..NcclConfig::default()
        };
        let raw = config.raw();
        assert_eq!([raw.minCTAs, raw.maxCTAs, raw.CTAPolicy], [1, 8, 2]);
    }

    #[test]
    fn transfers_of_nothing_are_left_out() {
        assert!(Transfer::Send { to: 1, from: 0, bytes: 0 }.is_empty());
        assert!(!Transfer::Receive { from: 1, to: 0, bytes: 1 }.is_empty());
        let (dtype, op) = (DType::F32, ReduceOp::Sum);
        assert!(Transfer::AllReduce { from: 0, to: 0, elements: 0, dtype, op }.is_empty());
    }
}
