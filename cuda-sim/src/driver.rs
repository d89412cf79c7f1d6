use crate::core::*;
use crate::races::{reads, writes};
use cu::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream};
use cudarc::driver::sys as cu;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void, CStr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use CUresult::*;

unsafe fn put<T>(p: *mut T, v: T) -> CUresult {
    if p.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    p.write(v);
    CUDA_SUCCESS
}
fn dev_ok(d: c_int) -> Res<usize> {
    if d >= 0 && (d as usize) < n_devices() {
        Ok(d as usize)
    } else {
        Err(CUDA_ERROR_INVALID_DEVICE)
    }
}
macro_rules! tri {
    ($e:expr) => {
        match $e {
            Ok(v) => v,
            Err(e) => return e,
        }
    };
}
/// Raw address that may cross into a worker thread.
fn copy(dst: usize, src: usize, n: usize) {
    unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, n) }
}

export! {
    cu::cuInit(_f: c_uint) -> CUresult { if n_devices() == 0 { CUDA_ERROR_NO_DEVICE } else { CUDA_SUCCESS } }
    cu::cuDriverGetVersion(v: *mut c_int) -> CUresult { put(v, 13000) }
    cu::cuDeviceGetCount(n: *mut c_int) -> CUresult { put(n, n_devices() as c_int) }
    cu::cuDeviceGet(d: *mut CUdevice, ord: c_int) -> CUresult { tri!(dev_ok(ord)); put(d, ord) }
    cu::cuDeviceGetName(name: *mut c_char, len: c_int, d: CUdevice) -> CUresult {
        let s = format!("Simulated GPU {}", tri!(dev_ok(d)));
        let n = s.len().min(len as usize - 1);
        std::ptr::copy_nonoverlapping(s.as_ptr(), name as *mut u8, n);
        *name.add(n) = 0;
        CUDA_SUCCESS
    }
    cu::cuDeviceTotalMem_v2(b: *mut usize, d: CUdevice) -> CUresult { tri!(dev_ok(d)); put(b, mem_bytes()) }
    cu::cuDeviceGetAttribute(p: *mut c_int, a: cu::CUdevice_attribute, d: CUdevice) -> CUresult {
        use cu::CUdevice_attribute_enum::*;
        tri!(dev_ok(d));
        let cc = env("CUDA_SIM_CC", 90) as c_int;
        put(p, match a {
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => env("CUDA_SIM_POOLS", 1) as c_int,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => cc / 10,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => cc % 10,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 4,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            _ => 0,
        })
    }
    cu::cuDeviceCanAccessPeer(p: *mut c_int, _a: CUdevice, _b: CUdevice) -> CUresult { put(p, 1) }
    cu::cuDevicePrimaryCtxRetain(c: *mut CUcontext, d: CUdevice) -> CUresult { put(c, ctx_of(tri!(dev_ok(d)))) }
    cu::cuDevicePrimaryCtxRelease_v2(d: CUdevice) -> CUresult { tri!(dev_ok(d)); CUDA_SUCCESS }
    cu::cuCtxGetCurrent(c: *mut CUcontext) -> CUresult { put(c, CURRENT.get() as _) }
    cu::cuCtxSetCurrent(c: CUcontext) -> CUresult {
        if !c.is_null() && dev_of(c).is_none() { return CUDA_ERROR_INVALID_CONTEXT }
        CURRENT.set(c as usize);
        CUDA_SUCCESS
    }
    cu::cuCtxSetFlags(_f: c_uint) -> CUresult { CUDA_SUCCESS }
    cu::cuCtxGetStreamPriorityRange(a: *mut c_int, b: *mut c_int) -> CUresult { put(a, 0); put(b, -5) }
    cu::cuCtxEnablePeerAccess(_c: CUcontext, _f: c_uint) -> CUresult { CUDA_SUCCESS }
    cu::cuCtxSynchronize() -> CUresult {
        let d = tri!(cur_dev());
        let all: Vec<_> = { let s = state(); s.streams.values().chain(s.defaults.values()).filter(|s| s.dev == d).cloned().collect() };
        all.iter().for_each(|s| s.sync());
        CUDA_SUCCESS
    }

    cu::cuStreamCreate(p: *mut CUstream, _f: c_uint) -> CUresult {
        let h = new_handle();
        let s = Stream::new(tri!(cur_dev()), h & 0xffffff);
        state().streams.insert(h, s);
        put(p, h as CUstream)
    }
    cu::cuStreamCreateWithPriority(p: *mut CUstream, f: c_uint, _prio: c_int) -> CUresult { cuStreamCreate(p, f) }
    cu::cuStreamDestroy_v2(h: CUstream) -> CUresult {
        match state().streams.remove(&(h as usize)) { Some(_) => CUDA_SUCCESS, None => CUDA_ERROR_INVALID_HANDLE }
    }
    cu::cuStreamSynchronize(h: CUstream) -> CUresult { tri!(stream(h as usize)).sync(); CUDA_SUCCESS }
    cu::cuStreamQuery(h: CUstream) -> CUresult {
        let t = tri!(stream(h as usize)).mark("query");
        std::thread::sleep(std::time::Duration::from_micros(20));
        if t.passed() { CUDA_SUCCESS } else { CUDA_ERROR_NOT_READY }
    }
    cu::cuStreamIsCapturing(_h: CUstream, s: *mut cu::CUstreamCaptureStatus) -> CUresult { put(s, cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) }
    cu::cuStreamWaitEvent(h: CUstream, e: CUevent, _f: c_uint) -> CUresult {
        let s = tri!(stream(h as usize));
        let e = tri!(event(e as usize));
        let last = lock(&e.last).clone();
        let Some(t) = last else { return CUDA_SUCCESS }; // never recorded: no-op, as in CUDA
        static WAITS: AtomicU64 = AtomicU64::new(1);
        // A planted bug: the n-th wait is left out.
        if WAITS.fetch_add(1, Ordering::Relaxed) != env("CUDA_SIM_FORGET_WAIT", 0) {
            s.push("wait_event", move |worker| worker.learn(&t.wait()))
        }
        CUDA_SUCCESS
    }
    cu::cuLaunchHostFunc(h: CUstream, f: cu::CUhostFn, data: *mut c_void) -> CUresult {
        let s = tri!(stream(h as usize));
        let Some(f) = f else { return CUDA_ERROR_INVALID_VALUE };
        let d = data as usize;
        s.push("host_fn", move |_| unsafe { f(d as *mut c_void) });
        CUDA_SUCCESS
    }

    cu::cuEventCreate(p: *mut CUevent, flags: c_uint) -> CUresult {
        let h = new_handle();
        let timing = flags & cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint == 0;
        let e = Arc::new(Event { dev: tri!(cur_dev()), timing, last: Mutex::new(None) });
        state().events.insert(h, e);
        put(p, h as CUevent)
    }
    cu::cuEventDestroy_v2(h: CUevent) -> CUresult {
        match state().events.remove(&(h as usize)) { Some(_) => CUDA_SUCCESS, None => CUDA_ERROR_INVALID_HANDLE }
    }
    cu::cuEventRecord(e: CUevent, h: CUstream) -> CUresult {
        let (e, s) = (tri!(event(e as usize)), tri!(stream(h as usize)));
        if e.dev != s.dev { return CUDA_ERROR_INVALID_HANDLE } // real rule: same context
        *lock(&e.last) = Some(s.mark("record"));
        CUDA_SUCCESS
    }
    cu::cuEventQuery(e: CUevent) -> CUresult {
        let e = tri!(event(e as usize));
        let l = lock(&e.last).clone();
        match l { Some(t) if !t.passed() => CUDA_ERROR_NOT_READY, _ => CUDA_SUCCESS }
    }
    cu::cuEventSynchronize(e: CUevent) -> CUresult {
        let e = tri!(event(e as usize));
        let l = lock(&e.last).clone();
        if let Some(t) = l { t.wait_on_host() }
        CUDA_SUCCESS
    }
    cu::cuEventElapsedTime_v2(ms: *mut f32, a: CUevent, b: CUevent) -> CUresult {
        let (a, b) = (tri!(event(a as usize)), tri!(event(b as usize)));
        if !a.timing || !b.timing { return CUDA_ERROR_INVALID_HANDLE }
        let (ta, tb) = (lock(&a.last).clone(), lock(&b.last).clone());
        let (Some(ta), Some(tb)) = (ta, tb) else { return CUDA_ERROR_INVALID_HANDLE };
        let (Some(ta), Some(tb)) = (ta.at(), tb.at()) else { return CUDA_ERROR_NOT_READY };
        put(ms, if tb >= ta { (tb - ta).as_secs_f32() * 1e3 } else { -((ta - tb).as_secs_f32() * 1e3) })
    }


    cu::cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
        let used = cuda_sim_used_bytes(tri!(cur_dev()));
        put(free, mem_bytes() - used);
        put(total, mem_bytes())
    }
    cu::cuMemAlloc_v2(p: *mut CUdeviceptr, n: usize) -> CUresult {
        if n == 0 { return CUDA_ERROR_INVALID_VALUE } // real rule
        put(p, tri!(mem_alloc(tri!(cur_dev()), n, false, false)) as CUdeviceptr)
    }
    cu::cuMemFree_v2(p: CUdeviceptr) -> CUresult {
        tri!(begin_free(p as usize));
        // real rule: memory of the stream-ordered pool is freed without waiting for anything
        let ordered = state().allocs.get(&(p as usize)).is_some_and(|a| a.ordered);
        if !ordered { cuCtxSynchronize(); }
        crate::races::host_frees(p as usize);
        release(p as usize);
        CUDA_SUCCESS
    }
    cu::cuMemAllocAsync(p: *mut CUdeviceptr, n: usize, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        if env("CUDA_SIM_POOLS", 1) == 0 { return CUDA_ERROR_NOT_SUPPORTED }
        let at = tri!(mem_alloc(s.dev, n, false, true));
        s.push_over("alloc", vec![writes(at, n)], || {}); // before that, it is not there for other streams
        put(p, at as CUdeviceptr)
    }
    cu::cuMemFreeAsync(p: CUdeviceptr, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        tri!(begin_free(p as usize));
        let size = state().allocs.get(&(p as usize)).map_or(0, |a| a.size);
        s.push_over("free", vec![writes(p as usize, size)], move || release(p as usize));
        CUDA_SUCCESS
    }
    cu::cuMemHostAlloc(pp: *mut *mut c_void, n: usize, _f: c_uint) -> CUresult {
        put(pp, tri!(mem_alloc(tri!(cur_dev()), n, true, false)) as *mut c_void)
    }
    cu::cuMemFreeHost(p: *mut c_void) -> CUresult { tri!(begin_free(p as usize)); crate::races::host_frees(p as usize); release(p as usize); CUDA_SUCCESS }

    cu::cuMemcpyHtoDAsync_v2(d: CUdeviceptr, src: *const c_void, n: usize, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        if n == 0 { return CUDA_SUCCESS }
        tri!(check_dev(d as usize, n));
        if let Some((_, true)) = find(src as usize, n) {
            let src = src as usize; // pinned: read later, when the stream gets there
            s.push_over("htod_pinned", vec![reads(src, n), writes(d as usize, n)], move || copy(d as usize, src, n));
        } else {
            let v = std::slice::from_raw_parts(src as *const u8, n).to_vec(); // pageable: staged at the call
            s.push_over("htod", vec![writes(d as usize, n)], move || copy(d as usize, v.as_ptr() as usize, n));
        }
        CUDA_SUCCESS
    }
    cu::cuMemcpyDtoHAsync_v2(dst: *mut c_void, d: CUdeviceptr, n: usize, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        if n == 0 { return CUDA_SUCCESS }
        tri!(check_dev(d as usize, n));
        let pinned = matches!(find(dst as usize, n), Some((_, true)));
        let dst = dst as usize;
        let mut touched = vec![reads(d as usize, n)];
        if pinned { touched.push(writes(dst, n)) }
        s.push_over("dtoh", touched, move || copy(dst, d as usize, n));
        if !pinned { s.sync() } // pageable: returns when the copy is done
        CUDA_SUCCESS
    }
    cu::cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, n: usize, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        tri!(check_dev(dst as usize, n));
        tri!(check_dev(src as usize, n));
        s.push_over("dtod", vec![reads(src as usize, n), writes(dst as usize, n)], move || copy(dst as usize, src as usize, n));
        CUDA_SUCCESS
    }
    cu::cuMemcpyPeerAsync(dst: CUdeviceptr, _dc: CUcontext, src: CUdeviceptr, _sc: CUcontext, n: usize, h: CUstream) -> CUresult { cuMemcpyDtoDAsync_v2(dst, src, n, h) }
    cu::cuMemcpyHtoD_v2(d: CUdeviceptr, src: *const c_void, n: usize) -> CUresult { let r = cuMemcpyHtoDAsync_v2(d, src, n, std::ptr::null_mut()); cuStreamSynchronize(std::ptr::null_mut()); r }
    cu::cuMemcpyDtoH_v2(dst: *mut c_void, d: CUdeviceptr, n: usize) -> CUresult { let r = cuMemcpyDtoHAsync_v2(dst, d, n, std::ptr::null_mut()); cuStreamSynchronize(std::ptr::null_mut()); r }
    cu::cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, n: usize) -> CUresult { cuMemcpyDtoDAsync_v2(dst, src, n, std::ptr::null_mut()) }
    cu::cuMemsetD8Async(d: CUdeviceptr, v: c_uchar, n: usize, h: CUstream) -> CUresult {
        let s = tri!(stream(h as usize));
        if n == 0 { return CUDA_SUCCESS }
        tri!(check_dev(d as usize, n));
        s.push_over("memset", vec![writes(d as usize, n)], move || unsafe { std::ptr::write_bytes(d as usize as *mut u8, v, n) });
        CUDA_SUCCESS
    }
    cu::cuMemsetD8_v2(d: CUdeviceptr, v: c_uchar, n: usize) -> CUresult { cuMemsetD8Async(d, v, n, std::ptr::null_mut()) }

    cu::cuGetErrorName(e: CUresult, p: *mut *const c_char) -> CUresult { put(p, name_of(e)) }
    cu::cuGetErrorString(e: CUresult, p: *mut *const c_char) -> CUresult { put(p, name_of(e)) }

    cu::cuModuleLoadData(m: *mut CUmodule, image: *const c_void) -> CUresult {
        // PTX text only: entry names and parameter sizes are read from it (a cubin/fatbin would need an ELF reader)
        if std::slice::from_raw_parts(image as *const u8, 4) == b"\x7fELF" { return CUDA_ERROR_INVALID_IMAGE }
        let ptx = CStr::from_ptr(image as *const c_char).to_string_lossy();
        let f = parse_ptx(&ptx);
        if f.is_empty() { return CUDA_ERROR_INVALID_PTX }
        let h = new_handle();
        lock(modules()).insert(h, f);
        put(m, h as CUmodule)
    }
    cu::cuModuleUnload(m: CUmodule) -> CUresult { lock(modules()).remove(&(m as usize)); CUDA_SUCCESS }
    cu::cuModuleGetFunction(f: *mut CUfunction, m: CUmodule, name: *const c_char) -> CUresult {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        let Some(sizes) = lock(modules()).get(&(m as usize)).and_then(|m| m.get(&name).cloned()) else { return CUDA_ERROR_NOT_FOUND };
        let h = new_handle();
        lock(functions()).insert(h, (name, sizes));
        put(f, h as CUfunction)
    }
    cu::cuFuncSetAttribute(_f: CUfunction, _a: cu::CUfunction_attribute, _v: c_int) -> CUresult { CUDA_SUCCESS }
    cu::cuFuncGetAttribute(p: *mut c_int, _a: cu::CUfunction_attribute, _f: CUfunction) -> CUresult { put(p, 0) }
    cu::cuLaunchKernel(f: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shm: c_uint, h: CUstream, params: *mut *mut c_void, _extra: *mut *mut c_void) -> CUresult {
        let s = tri!(stream(h as usize));
        let Some((name, sizes)) = lock(functions()).get(&(f as usize)).cloned() else { return CUDA_ERROR_INVALID_HANDLE };
        if gx == 0 || bx == 0 || bx * by * bz > 1024 { return CUDA_ERROR_INVALID_VALUE }
        let Some(k) = crate::kernels::find(&name) else {
            eprintln!("cuda-sim: no body for kernel {name}");
            return CUDA_ERROR_NOT_SUPPORTED;
        };
        // arguments are copied at launch, as the real driver does
        let args: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, &n)| std::slice::from_raw_parts(*params.add(i) as *const u8, n).to_vec()).collect();
        s.push_over(format!("kernel:{name}"), k.touches(&args), move || k.run(&args, gx * gy * gz, bx * by * bz));
        CUDA_SUCCESS
    }
}

fn name_of(e: CUresult) -> *const c_char {
    static NAMES: Mutex<Option<HashMap<u32, std::ffi::CString>>> = Mutex::new(None);
    let mut g = lock(&NAMES);
    let m = g.get_or_insert_with(HashMap::new);
    m.entry(e as u32).or_insert_with(|| std::ffi::CString::new(format!("{e:?} (simulated)")).unwrap()).as_ptr()
}

/// The sizes of each kernel's parameters, by its name.
type Signatures = HashMap<String, Vec<usize>>;

fn modules() -> &'static Mutex<HashMap<usize, Signatures>> {
    static M: OnceLock<Mutex<HashMap<usize, Signatures>>> = OnceLock::new();
    M.get_or_init(Default::default)
}
/// A kernel's name and the sizes of its parameters.
type Function = (String, Vec<usize>);

fn functions() -> &'static Mutex<HashMap<usize, Function>> {
    static M: OnceLock<Mutex<HashMap<usize, Function>>> = OnceLock::new();
    M.get_or_init(Default::default)
}
fn parse_ptx(ptx: &str) -> HashMap<String, Vec<usize>> {
    let mut out = HashMap::new();
    for part in ptx.split(".entry").skip(1) {
        let name = part.split('(').next().unwrap_or("").trim().to_string();
        let head = part.split('(').nth(1).unwrap_or("").split(')').next().unwrap_or("");
        let sizes = head
            .lines()
            .filter(|l| l.contains(".param"))
            .map(|l| {
                let ty = l
                    .split_whitespace()
                    .find(|t| {
                        let t = t.trim_start_matches('.');
                        t.len() > 1
                            && matches!(&t[..1], "u" | "s" | "b" | "f")
                            && t[1..].chars().all(|c| c.is_ascii_digit())
                    })
                    .unwrap_or(".b8");
                let bytes = ty[2..].parse::<usize>().unwrap_or(8) / 8;
                match l.split('[').nth(1) {
                    Some(n) => bytes * n.split(']').next().unwrap().parse::<usize>().unwrap(),
                    None => bytes,
                }
            })
            .collect();
        out.insert(name, sizes);
    }
    out
}
