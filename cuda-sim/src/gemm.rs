//! cuBLASLt: column-major products, computed on the stream's worker in double precision and rounded once.
use crate::core::{check_dev, lock, new_handle, stream};
use crate::races::{reads, writes};
use cudarc::cublaslt::sys as lt;
use half::{bf16, f16};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, OnceLock};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ty {
    F32,
    F64,
    F16,
    Bf16,
}
impl Ty {
    fn of(v: u32) -> Option<Ty> {
        Some(match v {
            0 => Ty::F32,
            1 => Ty::F64,
            2 => Ty::F16,
            14 => Ty::Bf16,
            _ => return None,
        })
    }
    fn size(self) -> usize {
        match self {
            Ty::F32 => 4,
            Ty::F64 => 8,
            _ => 2,
        }
    }
    unsafe fn get(self, p: usize, i: usize) -> f64 {
        match self {
            Ty::F32 => f64::from(*(p as *const f32).add(i)),
            Ty::F64 => *(p as *const f64).add(i),
            Ty::F16 => (*(p as *const f16).add(i)).to_f64(),
            Ty::Bf16 => (*(p as *const bf16).add(i)).to_f64(),
        }
    }
    unsafe fn put(self, p: usize, i: usize, v: f64) {
        match self {
            Ty::F32 => *(p as *mut f32).add(i) = v as f32,
            Ty::F64 => *(p as *mut f64).add(i) = v,
            Ty::F16 => *(p as *mut f16).add(i) = f16::from_f64(v),
            Ty::Bf16 => *(p as *mut bf16).add(i) = bf16::from_f64(v),
        }
    }
}
#[derive(Clone, Copy, Debug)]
struct Mat {
    p: usize,
    ty: Ty,
    rows: usize,
    cols: usize,
    ld: usize,
    batch: usize,
    stride: usize,
}
impl Mat {
    fn bytes(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        ((self.batch - 1) * self.stride + (self.cols - 1) * self.ld + self.rows) * self.ty.size()
    }
    fn ok(&self) -> bool {
        self.ld >= self.rows.max(1) && check_dev(self.p, self.bytes()).is_ok()
    }
}
#[derive(Clone, Copy)]
struct Gemm {
    ta: bool,
    tb: bool,
    alpha: f64,
    beta: f64,
    a: Mat,
    b: Mat,
    c: Mat,
    d: Mat,
    relu: bool,
    bias: Option<usize>,
}
impl Gemm {
    fn valid(&self) -> bool {
        let (m, k) = if self.ta { (self.a.cols, self.a.rows) } else { (self.a.rows, self.a.cols) };
        let (k2, n) = if self.tb { (self.b.cols, self.b.rows) } else { (self.b.rows, self.b.cols) };
        k == k2
            && (m, n) == (self.d.rows, self.d.cols)
            && (m, n) == (self.c.rows, self.c.cols)
            && [self.a.batch, self.b.batch, self.c.batch].iter().all(|&x| x == self.d.batch)
    }
    fn run(self) {
        let (m, n, k) = (self.d.rows, self.d.cols, if self.ta { self.a.rows } else { self.a.cols });
        for bt in 0..self.d.batch {
            // unpack once: A as rows, B as columns
            let (ao, bo) = (bt * self.a.stride, bt * self.b.stride);
            let mut ar = vec![0f64; m * k];
            let mut bc = vec![0f64; n * k];
            unsafe {
                for i in 0..m {
                    for l in 0..k {
                        ar[i * k + l] =
                            self.a.ty.get(self.a.p, ao + if self.ta { i * self.a.ld + l } else { l * self.a.ld + i })
                    }
                }
                for j in 0..n {
                    for l in 0..k {
                        bc[j * k + l] =
                            self.b.ty.get(self.b.p, bo + if self.tb { l * self.b.ld + j } else { j * self.b.ld + l })
                    }
                }
                for j in 0..n {
                    for i in 0..m {
                        let mut s = 0f64;
                        for l in 0..k {
                            s += ar[i * k + l] * bc[j * k + l]
                        }
                        let mut v = self.alpha * s;
                        if self.beta != 0.0 {
                            v += self.beta * self.c.ty.get(self.c.p, bt * self.c.stride + j * self.c.ld + i)
                        }
                        if let Some(bias) = self.bias {
                            v += self.d.ty.get(bias, i)
                        }
                        if self.relu {
                            v = v.max(0.0)
                        }
                        self.d.ty.put(self.d.p, bt * self.d.stride + j * self.d.ld + i, v);
                    }
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Obj {
    Handle,
    Layout(Mat),
    Desc { ta: bool, tb: bool, epilogue: u32, bias: usize, scale: u32 },
    Pref(usize),
}
fn objs() -> &'static Mutex<HashMap<usize, Obj>> {
    static O: OnceLock<Mutex<HashMap<usize, Obj>>> = OnceLock::new();
    O.get_or_init(Default::default)
}
fn make(o: Obj) -> usize {
    let h = new_handle();
    lock(objs()).insert(h, o);
    h
}
fn drop_obj(h: usize) -> lt::cublasStatus_t {
    match lock(objs()).remove(&h) {
        Some(_) => OK,
        None => BAD,
    }
}
const OK: lt::cublasStatus_t = lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
const BAD: lt::cublasStatus_t = lt::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE;
fn layout(h: lt::cublasLtMatrixLayout_t, p: usize) -> Option<Mat> {
    match lock(objs()).get(&(h as usize))? {
        Obj::Layout(m) => Some(Mat { p, ..*m }),
        _ => None,
    }
}

/// Alpha or beta, in the type that the descriptor names.
unsafe fn number(scale: u32, p: *const c_void) -> f64 {
    if scale == 1 {
        *(p as *const f64)
    } else {
        f64::from(*(p as *const f32))
    }
}

export! {
    lt::cublasLtCreate(h: *mut lt::cublasLtHandle_t) -> lt::cublasStatus_t { *h = make(Obj::Handle) as _; OK }
    lt::cublasLtDestroy(h: lt::cublasLtHandle_t) -> lt::cublasStatus_t { drop_obj(h as usize) }
    lt::cublasLtGetVersion() -> usize { 130000 }
    lt::cublasLtMatrixLayoutCreate(h: *mut lt::cublasLtMatrixLayout_t, ty: lt::cudaDataType, rows: u64, cols: u64, ld: i64) -> lt::cublasStatus_t {
        let Some(ty) = Ty::of(ty as u32) else { return lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED };
        *h = make(Obj::Layout(Mat { p: 0, ty, rows: rows as usize, cols: cols as usize, ld: ld as usize, batch: 1, stride: 0 })) as _;
        OK
    }
    lt::cublasLtMatrixLayoutDestroy(h: lt::cublasLtMatrixLayout_t) -> lt::cublasStatus_t { drop_obj(h as usize) }
    lt::cublasLtMatrixLayoutSetAttribute(h: lt::cublasLtMatrixLayout_t, a: lt::cublasLtMatrixLayoutAttribute_t, buf: *const c_void, _n: usize) -> lt::cublasStatus_t {
        use lt::cublasLtMatrixLayoutAttribute_t::*;
        let mut o = lock(objs());
        let Some(Obj::Layout(m)) = o.get_mut(&(h as usize)) else { return BAD };
        match a {
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT => m.batch = *(buf as *const i32) as usize,
            CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET => m.stride = *(buf as *const i64) as usize,
            CUBLASLT_MATRIX_LAYOUT_LD => m.ld = *(buf as *const i64) as usize,
            _ => return lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        }
        OK
    }
    lt::cublasLtMatmulDescCreate(h: *mut lt::cublasLtMatmulDesc_t, _c: lt::cublasComputeType_t, s: lt::cudaDataType_t) -> lt::cublasStatus_t {
        *h = make(Obj::Desc { ta: false, tb: false, epilogue: 1, bias: 0, scale: s as u32 }) as _;
        OK
    }
    lt::cublasLtMatmulDescDestroy(h: lt::cublasLtMatmulDesc_t) -> lt::cublasStatus_t { drop_obj(h as usize) }
    lt::cublasLtMatmulDescSetAttribute(h: lt::cublasLtMatmulDesc_t, a: lt::cublasLtMatmulDescAttributes_t, buf: *const c_void, _n: usize) -> lt::cublasStatus_t {
        use lt::cublasLtMatmulDescAttributes_t::*;
        let mut o = lock(objs());
        let Some(Obj::Desc { ta, tb, epilogue, bias, .. }) = o.get_mut(&(h as usize)) else { return BAD };
        match a {
            CUBLASLT_MATMUL_DESC_TRANSA => *ta = *(buf as *const i32) != 0,
            CUBLASLT_MATMUL_DESC_TRANSB => *tb = *(buf as *const i32) != 0,
            CUBLASLT_MATMUL_DESC_TRANSC => if *(buf as *const i32) != 0 { return lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED },
            CUBLASLT_MATMUL_DESC_EPILOGUE => *epilogue = *(buf as *const u32),
            CUBLASLT_MATMUL_DESC_BIAS_POINTER => *bias = *(buf as *const usize),
            CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE | CUBLASLT_MATMUL_DESC_FAST_ACCUM => {}
            _ => return lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        }
        OK
    }
    lt::cublasLtMatmulPreferenceCreate(h: *mut lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t { *h = make(Obj::Pref(0)) as _; OK }
    lt::cublasLtMatmulPreferenceDestroy(h: lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t { drop_obj(h as usize) }
    lt::cublasLtMatmulPreferenceSetAttribute(h: lt::cublasLtMatmulPreference_t, _a: lt::cublasLtMatmulPreferenceAttributes_t, buf: *const c_void, n: usize) -> lt::cublasStatus_t {
        match lock(objs()).get_mut(&(h as usize)) { Some(Obj::Pref(w)) => { if n == 8 { *w = *(buf as *const usize) } OK } _ => BAD }
    }
    lt::cublasLtMatmulAlgoGetHeuristic(_h: lt::cublasLtHandle_t, _o: lt::cublasLtMatmulDesc_t, _a: lt::cublasLtMatrixLayout_t, _b: lt::cublasLtMatrixLayout_t, _c: lt::cublasLtMatrixLayout_t, _d: lt::cublasLtMatrixLayout_t, _p: lt::cublasLtMatmulPreference_t, req: c_int, out: *mut lt::cublasLtMatmulHeuristicResult_t, got: *mut c_int) -> lt::cublasStatus_t {
        if req < 1 { return BAD }
        out.write(lt::cublasLtMatmulHeuristicResult_t { algo: lt::cublasLtMatmulAlgo_t { data: [0; 8] }, workspaceSize: 0, state: OK, wavesCount: 1.0, reserved: [0; 4] });
        *got = 1;
        OK
    }
    lt::cublasLtMatmul(_h: lt::cublasLtHandle_t, desc: lt::cublasLtMatmulDesc_t, alpha: *const c_void, A: *const c_void, Ad: lt::cublasLtMatrixLayout_t, B: *const c_void, Bd: lt::cublasLtMatrixLayout_t, beta: *const c_void, C: *const c_void, Cd: lt::cublasLtMatrixLayout_t, D: *mut c_void, Dd: lt::cublasLtMatrixLayout_t, _algo: *const lt::cublasLtMatmulAlgo_t, ws: *mut c_void, ws_n: usize, st: lt::cudaStream_t) -> lt::cublasStatus_t {
        let Ok(s) = stream(st as usize) else { return BAD };
        let Some(Obj::Desc { ta, tb, epilogue, bias, scale }) = lock(objs()).get(&(desc as usize)).cloned() else { return BAD };
        let (Some(a), Some(b), Some(c), Some(d)) = (layout(Ad, A as usize), layout(Bd, B as usize), layout(Cd, C as usize), layout(Dd, D as usize)) else { return BAD };
        if scale > 1 || epilogue & !7 != 0 { return lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED }
        let g = Gemm { ta, tb, alpha: number(scale, alpha), beta: number(scale, beta), a, b, c, d, relu: epilogue & 2 != 0, bias: (epilogue & 4 != 0).then_some(bias) };
        if !g.valid() || ![a, b, c, d].iter().all(Mat::ok) || (ws_n > 0 && check_dev(ws as usize, ws_n).is_err()) { return BAD }
        let mut touched = vec![reads(a.p, a.bytes()), reads(b.p, b.bytes()), writes(d.p, d.bytes()), writes(ws as usize, ws_n)];
        if g.beta != 0.0 { touched.push(reads(c.p, c.bytes())) }
        if let Some(bias) = g.bias { touched.push(reads(bias, d.rows * d.ty.size())) }
        s.push_over("lt_matmul", touched, move || g.run());
        OK
    }

    lt::cublasLtLoggerSetLevel(_l: c_int) -> lt::cublasStatus_t { OK }
    lt::cublasLtLoggerOpenFile(_f: *const std::ffi::c_char) -> lt::cublasStatus_t { OK }
}
