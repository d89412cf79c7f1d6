//! The MPI calls, each with its return code turned into a result.

use std::os::raw::{c_int, c_void};

use mpi::ffi;

use crate::{Error, Result};

/// An MPI communicator. It lives until MPI ends.
pub(super) struct Comm {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    tags: Tags,
}

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE: its handles may be used from any thread.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Comm(rank {} of {})", self.rank, self.size)
    }
}

/// A send or receive that MPI works on.
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: as for `Comm`.
unsafe impl Send for Request {}

/// How tags are made up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tags {
    bits: u32,
}

impl Tags {
    /// Bits for the part of an operation.
    pub(super) const PART_BITS: u32 = 11;

    /// Bits for an operation's sequence number: two of them are never under way at once with the same.
    pub(super) fn sequence_bits(&self) -> u32 {
        // One more tells sends and receives from collectives, and the largest tag is that of control messages.
        self.bits - Self::PART_BITS - 2
    }

    /// The tag of control messages.
    pub(super) fn control(&self) -> c_int {
        ((1i64 << (self.bits - 1)) - 1 + (1i64 << (self.bits - 2))).min(i64::from(c_int::MAX)) as c_int
    }
}

/// Turns a return code into a result.
fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the buffer is as long as MPI says a text can be.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let message = match usize::try_from(length) {
        Ok(length) if told == ffi::MPI_SUCCESS as c_int && length <= text.len() => {
            String::from_utf8_lossy(&text[..length]).into_owned()
        }
        _ => format!("error {code}"),
    };
    Err(Error::Foreign { library: "MPI", call: call.into(), message })
}

/// Starts MPI and returns a communicator of this crate's own over all ranks.
pub(super) fn init() -> Result<Comm> {
    let wrong =
        |message: &str| Error::Foreign { library: "MPI", call: "MPI_Init_thread".into(), message: message.into() };
    let mut started = 0;
    // SAFETY: may be called at any time.
    check("MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut started) })?;
    if started != 0 {
        return Err(wrong("MPI has been started in this process already"));
    }
    let mut provided = 0;
    // SAFETY: MPI has not been started; it needs no arguments.
    unsafe {
        let wanted = ffi::RSMPI_THREAD_MULTIPLE;
        check(
            "MPI_Init_thread",
            ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted, &mut provided),
        )?;
        if provided < wanted {
            return Err(wrong("this MPI has no MPI_THREAD_MULTIPLE"));
        }
        check(
            "MPI_Comm_set_errhandler",
            ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN),
        )?;
        let mut raw = ffi::RSMPI_COMM_NULL;
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut raw))?;
        Comm::of(raw)
    }
}

/// Ends MPI, if it runs.
pub(super) fn finalize() {
    let mut ended = 0;
    // SAFETY: MPI was started by `init`; nothing uses it any more.
    unsafe {
        if ffi::MPI_Finalized(&mut ended) == ffi::MPI_SUCCESS as c_int && ended == 0 {
            ffi::MPI_Finalize();
        }
    }
}

impl Comm {
    /// # Safety
    /// `raw` is a communicator of this process.
    unsafe fn of(raw: ffi::MPI_Comm) -> Result<Self> {
        let (mut rank, mut size) = (0, 0);
        let mut upper: *mut c_int = std::ptr::null_mut();
        let mut found = 0;
        // SAFETY: as the caller promises; the attribute is a pointer to an integer.
        let largest = unsafe {
            check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(raw, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(raw, &mut size))?;
            let value: *mut c_void = (&raw mut upper).cast();
            check("MPI_Comm_get_attr", ffi::MPI_Comm_get_attr(raw, ffi::MPI_TAG_UB as c_int, value, &mut found))?;
            if found != 0 && !upper.is_null() { *upper } else { 32767 }
        };
        let bits = (i64::from(largest) + 1).ilog2();
        Ok(Self { raw, rank: rank as usize, size: size as usize, tags: Tags { bits } })
    }

    /// The same ranks, with messages of their own.
    pub(super) fn duplicate(&self) -> Result<Comm> {
        let mut raw = ffi_null();
        // SAFETY: all ranks call it together.
        unsafe {
            check("MPI_Comm_dup", ffi::MPI_Comm_dup(self.raw, &mut raw))?;
            Comm::of(raw)
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn tags(&self) -> Tags {
        self.tags
    }

    /// The number of ranks on this machine.
    pub(super) fn local_size(&self) -> Result<usize> {
        let (mut local, mut size) = (ffi_null(), 0);
        // SAFETY: all ranks call it together.
        unsafe {
            let kind = ffi::RSMPI_COMM_TYPE_SHARED;
            let split = ffi::MPI_Comm_split_type(self.raw, kind, self.rank as c_int, ffi::RSMPI_INFO_NULL, &mut local);
            check("MPI_Comm_split_type", split)?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(local, &mut size))?;
            check("MPI_Comm_free", ffi::MPI_Comm_free(&mut local))?;
        }
        Ok(size as usize)
    }

    /// The communicator of those that gave the same color, in order of their keys; none for `None`.
    pub(super) fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Comm>> {
        let color = match color {
            None => c_int::MIN,
            Some(color) => c_int::try_from(color).map_err(|_| Error::Argument {
                what: "color",
                got: color.to_string(),
                wanted: format!("at most {}", c_int::MAX),
            })?,
        };
        let mut raw = ffi_null();
        // SAFETY: all ranks call it together.
        unsafe {
            let color = if color == c_int::MIN { ffi::RSMPI_UNDEFINED } else { color };
            check("MPI_Comm_split", ffi::MPI_Comm_split(self.raw, color, key as c_int, &mut raw))?;
            if raw == ffi::RSMPI_COMM_NULL { Ok(None) } else { Comm::of(raw).map(Some) }
        }
    }

    /// Starts to send.
    ///
    /// # Safety
    /// `data` stays as it is until the request is done.
    pub(super) unsafe fn isend(&self, data: &[u8], to: usize, tag: c_int) -> Result<Request> {
        // SAFETY: null is replaced by the call.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (pointer, count) = (data.as_ptr().cast::<c_void>(), data.len() as c_int);
        // SAFETY: as the caller promises.
        let code =
            unsafe { ffi::MPI_Isend(pointer, count, ffi::RSMPI_UINT8_T, to as c_int, tag, self.raw, &mut request) };
        check("MPI_Isend", code).map(|()| Request(request))
    }

    /// Starts to receive from `from`.
    ///
    /// # Safety
    /// `into` is not touched until the request is done.
    pub(super) unsafe fn irecv(&self, into: &mut [u8], from: usize, tag: c_int) -> Result<Request> {
        // SAFETY: as the caller promises.
        unsafe { self.receive(into, from as c_int, tag) }
    }

    /// Starts to receive from any rank.
    ///
    /// # Safety
    /// `into` is not touched until the request is done.
    pub(super) unsafe fn irecv_any(&self, into: &mut [u8], tag: c_int) -> Result<Request> {
        // SAFETY: as the caller promises.
        unsafe { self.receive(into, ffi::RSMPI_ANY_SOURCE, tag) }
    }

    /// # Safety
    /// `into` is not touched until the request is done.
    unsafe fn receive(&self, into: &mut [u8], from: c_int, tag: c_int) -> Result<Request> {
        // SAFETY: null is replaced by the call.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (pointer, count) = (into.as_mut_ptr().cast::<c_void>(), into.len() as c_int);
        // SAFETY: as the caller promises.
        let code = unsafe { ffi::MPI_Irecv(pointer, count, ffi::RSMPI_UINT8_T, from, tag, self.raw, &mut request) };
        check("MPI_Irecv", code).map(|()| Request(request))
    }

    /// The number of bytes, once the request is done (for a send it means nothing).
    pub(super) fn test(&self, request: &mut Request) -> Result<Option<usize>> {
        self.test_from(request).map(|done| done.map(|(bytes, _)| bytes))
    }

    /// The same, and whose message it was.
    pub(super) fn test_from(&self, request: &mut Request) -> Result<Option<(usize, usize)>> {
        let mut flag = 0;
        // SAFETY: the status is filled in where the request is done, and not read otherwise.
        unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            check("MPI_Test", ffi::MPI_Test(&mut request.0, &mut flag, &mut status))?;
            if flag == 0 {
                return Ok(None);
            }
            let mut count = 0;
            check("MPI_Get_count", ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count))?;
            Ok(Some((count.max(0) as usize, status.MPI_SOURCE.max(0) as usize)))
        }
    }

    /// Gives up a receive; its memory is free afterwards.
    pub(super) fn cancel(&self, request: &mut Request) -> bool {
        // SAFETY: a receive that was not matched can be cancelled locally.
        unsafe {
            ffi::MPI_Cancel(&mut request.0) == ffi::MPI_SUCCESS as c_int
                && ffi::MPI_Wait(&mut request.0, ffi::RSMPI_STATUS_IGNORE) == ffi::MPI_SUCCESS as c_int
        }
    }
}

/// A communicator handle that stands for none.
fn ffi_null() -> ffi::MPI_Comm {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_COMM_NULL }
}
