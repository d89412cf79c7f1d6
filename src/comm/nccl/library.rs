//! The NCCL library, loaded at first use.
//!
//! cudarc's binding has the types. Its loader does not know `libnccl.so.2`, the one name that NCCL's runtime packages install, and
//! panics where a function is missing; this one knows it, and does not.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{
    cudaStream_t as Stream, ncclComm_t as Comm, ncclConfig_t as Config, ncclDataType_t as DataType,
    ncclRedOp_t as RedOp, ncclResult_t as Code, ncclUniqueId as UniqueId,
};

use crate::{Error, Result};

/// What the library is called, with and without its development package.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Declares the table of functions, and how it is filled.
macro_rules! table {
    ($($name:ident($($argument:ty),*) -> $returned:ty;)*) => {
        /// NCCL's functions.
        #[allow(non_snake_case)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $returned,)*
            /// Keeps them loaded.
            _loaded: libloading::Library,
        }

        impl Library {
            fn fill(loaded: libloading::Library) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: NCCL's function of that name has that type.
                        let found = unsafe { loaded.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|error| missing(stringify!($name), &error))?
                    },)*
                    _loaded: loaded,
                })
            }
        }
    };
}

table! {
    ncclGetUniqueId(*mut UniqueId) -> Code;
    ncclGetErrorString(Code) -> *const c_char;
    ncclGetLastError(Comm) -> *const c_char;
    ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
    ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut Config) -> Code;
    ncclCommGetAsyncError(Comm, *mut Code) -> Code;
    ncclCommFinalize(Comm) -> Code;
    ncclCommDestroy(Comm) -> Code;
    ncclCommAbort(Comm) -> Code;
    ncclGroupStart() -> Code;
    ncclGroupEnd() -> Code;
    ncclSend(*const c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    ncclRecv(*mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    ncclAllGather(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> Code;
    ncclBroadcast(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    ncclReduce(*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, Stream) -> Code;
    ncclReduceScatter(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> Code;
    ncclAllReduce(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> Code;
}

fn missing(name: &str, error: &libloading::Error) -> Error {
    Error::Foreign {
        library: "NCCL",
        call: format!("looking for {name}"),
        message: format!("{error} (2.18 is the first version that has all that is needed)"),
    }
}

/// The library.
///
/// # Errors
/// [`Error::Library`] where it is not on this machine; [`Error::Foreign`] where it is too old.
pub(super) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| load(&NAMES)).as_ref().map_err(Clone::clone)
}

fn load(names: &[&str]) -> Result<Library> {
    // SAFETY: NCCL's initialisers ask nothing of whoever loads it.
    let loaded = names.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
    Library::fill(loaded.ok_or_else(|| Error::Library { library: "NCCL", tried: names.join(", ") })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_error_with_the_names_tried() {
        let error = load(&["libno-nccl.so.2", "libno-nccl.so"]).err().unwrap();
        assert!(
            matches!(&error, Error::Library { library: "NCCL", tried } if tried.contains("libno-nccl.so.2")),
            "{error}"
        );
    }

    #[test]
    fn a_library_without_its_functions_is_an_error_with_the_first_that_is_missing() {
        // The C library is on every machine that runs this.
        let error = load(&["libc.so.6"]).err().unwrap();
        assert!(matches!(&error, Error::Foreign { call, .. } if call.contains("ncclGetUniqueId")), "{error}");
    }
}
