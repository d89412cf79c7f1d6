//! Ranges that NVIDIA's profilers show (feature `nvtx`).

use std::marker::PhantomData;
use std::sync::OnceLock;

use cudarc::nvtx;

/// A range of this thread, from its making to its drop. Nothing where the library is not there.
pub(crate) struct Range {
    open: bool,
    /// Ranges are a stack of the thread that they were made on.
    _here: PhantomData<*const ()>,
}

impl Range {
    pub(crate) fn new(name: &'static str) -> Self {
        static PRESENT: OnceLock<bool> = OnceLock::new();
        // SAFETY: looks for the library and closes it again.
        let open = *PRESENT.get_or_init(|| unsafe { nvtx::sys::is_culib_present() });
        if open {
            nvtx::result::range_push(name);
        }
        Self { open, _here: PhantomData }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.open {
            nvtx::result::range_pop();
        }
    }
}
