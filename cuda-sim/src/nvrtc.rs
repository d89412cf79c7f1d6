//! NVRTC: keeps the source, and declares the kernels in it that there are bodies for.

use crate::core::{lock, new_handle};
use cudarc::nvrtc::sys as rtc;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, CStr};
use std::sync::{Mutex, OnceLock};

struct Program {
    source: String,
    ptx: Vec<u8>,
}

fn programs() -> &'static Mutex<HashMap<usize, Program>> {
    static P: OnceLock<Mutex<HashMap<usize, Program>>> = OnceLock::new();
    P.get_or_init(Default::default)
}

const OK: rtc::nvrtcResult = rtc::nvrtcResult::NVRTC_SUCCESS;
const BAD: rtc::nvrtcResult = rtc::nvrtcResult::NVRTC_ERROR_INVALID_PROGRAM;

export! {
    rtc::nvrtcCreateProgram(p: *mut rtc::nvrtcProgram, source: *const c_char, _name: *const c_char, _n: c_int, _headers: *const *const c_char, _names: *const *const c_char) -> rtc::nvrtcResult {
        let handle = new_handle();
        let source = CStr::from_ptr(source).to_string_lossy().into_owned();
        lock(programs()).insert(handle, Program { source, ptx: Vec::new() });
        *p = handle as rtc::nvrtcProgram;
        OK
    }
    rtc::nvrtcCompileProgram(p: rtc::nvrtcProgram, _n: c_int, _options: *const *const c_char) -> rtc::nvrtcResult {
        let mut programs = lock(programs());
        let Some(program) = programs.get_mut(&(p as usize)) else { return BAD };
        program.ptx = crate::kernels::declare(&program.source).into_bytes();
        program.ptx.push(0);
        OK
    }
    rtc::nvrtcGetPTXSize(p: rtc::nvrtcProgram, size: *mut usize) -> rtc::nvrtcResult {
        let programs = lock(programs());
        let Some(program) = programs.get(&(p as usize)) else { return BAD };
        *size = program.ptx.len();
        OK
    }
    rtc::nvrtcGetPTX(p: rtc::nvrtcProgram, out: *mut c_char) -> rtc::nvrtcResult {
        let programs = lock(programs());
        let Some(program) = programs.get(&(p as usize)) else { return BAD };
        std::ptr::copy_nonoverlapping(program.ptx.as_ptr(), out.cast(), program.ptx.len());
        OK
    }
    // Machine code is what PTX is here: a text that the simulated driver understands.
    rtc::nvrtcGetCUBINSize(p: rtc::nvrtcProgram, size: *mut usize) -> rtc::nvrtcResult { nvrtcGetPTXSize(p, size) }
    rtc::nvrtcGetCUBIN(p: rtc::nvrtcProgram, out: *mut c_char) -> rtc::nvrtcResult { nvrtcGetPTX(p, out) }
    rtc::nvrtcGetProgramLogSize(_p: rtc::nvrtcProgram, size: *mut usize) -> rtc::nvrtcResult { *size = 1; OK }
    rtc::nvrtcGetProgramLog(_p: rtc::nvrtcProgram, out: *mut c_char) -> rtc::nvrtcResult { *out = 0; OK }
    rtc::nvrtcDestroyProgram(p: *mut rtc::nvrtcProgram) -> rtc::nvrtcResult {
        if lock(programs()).remove(&(*p as usize)).is_some() { OK } else { BAD }
    }
    rtc::nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> rtc::nvrtcResult { *major = 13; *minor = 0; OK }
}
