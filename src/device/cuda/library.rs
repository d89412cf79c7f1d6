//! Whether CUDA's libraries are on this machine: an error instead of the panic that cudarc's first call would be.

use crate::{Error, Result};

/// The names that cudarc tries, and ours.
fn names(library: &str) -> String {
    cudarc::get_lib_name_candidates(library).join(", ")
}

fn present(library: &'static str, short: &str, found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(Error::Library { library, tried: names(short) }) }
}

/// The driver, libcuda.
pub(crate) fn driver() -> Result<()> {
    // SAFETY: looks for the library and closes it again.
    present("CUDA driver (libcuda)", "cuda", unsafe { cudarc::driver::sys::is_culib_present() })
}

/// cuBLASLt.
pub(crate) fn cublaslt() -> Result<()> {
    // SAFETY: as above.
    present("cuBLASLt", "cublasLt", unsafe { cudarc::cublaslt::sys::is_culib_present() })
}

/// NVRTC, the run-time compiler.
pub(crate) fn nvrtc() -> Result<()> {
    // SAFETY: as above.
    present("NVRTC", "nvrtc", unsafe { cudarc::nvrtc::sys::is_culib_present() })
}
