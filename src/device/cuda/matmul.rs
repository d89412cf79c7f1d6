//! Matrix products through cuBLASLt, with descriptors of our own.
//!
//! cuBLASLt thinks in columns: a row-major product out = a · b is the column-major outᵀ = bᵀ · aᵀ, so the operands change places
//! and nothing is moved.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};

use super::library;
use crate::dtype::DType;
use crate::{Error, Result};

/// A product as cuBLASLt sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) dtype: DType,
    pub(crate) out_dtype: DType,
    /// Rows, depth and columns of the row-major product.
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) a_transposed: bool,
    pub(crate) b_transposed: bool,
    pub(crate) accumulate: bool,
    pub(crate) bias: bool,
    /// The largest power of two, up to 256, that divides every address.
    pub(crate) alignment: u32,
}

/// A product's descriptors and algorithm.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// A cuBLASLt handle with the plans made so far.
pub(crate) struct Blas {
    handle: sys::cublasLtHandle_t,
    tf32: bool,
    plans: Mutex<HashMap<Shape, Plan>>,
}

// SAFETY: cuBLASLt's handles and descriptors may be used from any thread; the plans are behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

fn failed(call: &'static str) -> impl Fn(cudarc::cublaslt::result::CublasError) -> Error {
    move |error| Error::Foreign { library: "cuBLASLt", call: call.into(), message: format!("{error:?}") }
}

fn kind(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::F64 => Ok(sys::cudaDataType_t::CUDA_R_64F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        got => Err(Error::DType { what: "matmul operand", got, wanted: DType::F32 }),
    }
}

impl Blas {
    /// Bytes of the workspace that a product may use.
    pub(crate) const WORKSPACE: usize = 32 << 20;

    pub(crate) fn new(tf32: bool) -> Result<Self> {
        library::cublaslt()?;
        let handle = result::create_handle().map_err(failed("cublasLtCreate"))?;
        Ok(Self { handle, tf32, plans: Mutex::default() })
    }

    fn plan(&self, shape: &Shape) -> Result<Plan> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = match shape.dtype {
            DType::F64 => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            DType::F32 if self.tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = if shape.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let operation =
            result::create_matmul_desc(compute, kind(scale)?).map_err(failed("cublasLtMatmulDescCreate"))?;
        let set = |attribute, value: *const c_void, size: usize| {
            // SAFETY: the descriptor was made above; the value has the attribute's size.
            unsafe { result::set_matmul_desc_attribute(operation, attribute, value, size) }
                .map_err(failed("cublasLtMatmulDescSetAttribute"))
        };
        // The first operand is b, the second a. Row-major as stored is column-major transposed.
        let flag = |transposed: bool| i32::from(transposed);
        let (first, second) = (flag(shape.b_transposed), flag(shape.a_transposed));
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, (&raw const first).cast(), size_of::<i32>())?;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, (&raw const second).cast(), size_of::<i32>())?;
        if shape.bias {
            // A value for every row of outᵀ: a column of out.
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const epilogue).cast(), size_of_val(&epilogue))?;
        }
        let layout = |dtype, rows: usize, columns: usize, leading: usize| {
            result::create_matrix_layout(kind(dtype)?, rows as u64, columns as u64, leading as i64)
                .map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        let Shape { m, k, n, .. } = *shape;
        let of_b = if shape.b_transposed { (k, n) } else { (n, k) };
        let of_a = if shape.a_transposed { (m, k) } else { (k, m) };
        let first = layout(shape.dtype, of_b.0, of_b.1, of_b.0)?;
        let second = layout(shape.dtype, of_a.0, of_a.1, of_a.0)?;
        let out = layout(shape.out_dtype, n, m, n)?;
        let preference = result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let prefer = |attribute, value: *const c_void, size: usize| {
            // SAFETY: the preference was made above; the value has the attribute's size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, size) }
                .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
        };
        let workspace = Self::WORKSPACE;
        prefer(
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            size_of::<usize>(),
        )?;
        for attribute in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            prefer(attribute, (&raw const shape.alignment).cast(), size_of::<u32>())?;
        }
        // SAFETY: handle and descriptors are as made above; all are destroyed with the plan, the preference here.
        let found = unsafe {
            let found = result::get_matmul_algo_heuristic(self.handle, operation, first, second, out, out, preference)
                .map_err(failed("cublasLtMatmulAlgoGetHeuristic"));
            let _ = result::destroy_matmul_pref(preference);
            found?
        };
        Ok(Plan { operation, first, second, out, algorithm: found.algo })
    }

    /// Queues a product. Addresses are those of a, b, out and the bias.
    ///
    /// # Safety
    /// The context is current; the addresses reach as far as the shape says, and stay until the stream has passed; the
    /// workspace is [`Blas::WORKSPACE`] bytes that nothing else on another stream uses.
    pub(crate) unsafe fn matmul(
        &self,
        shape: Shape,
        [a, b, out]: [u64; 3],
        bias: Option<u64>,
        workspace: u64,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<()> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(shape) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(self.plan(&shape)?),
        };
        if let Some(bias) = bias {
            use sys::cublasLtMatmulDescAttributes_t as Attribute;
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            // SAFETY: the descriptor is the plan's own, which is locked.
            unsafe {
                result::set_matmul_desc_attribute(plan.operation, attribute, (&raw const bias).cast(), size_of::<u64>())
            }
            .map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        }
        let narrow = (1f32, if shape.accumulate { 1f32 } else { 0f32 });
        let wide = (1f64, if shape.accumulate { 1f64 } else { 0f64 });
        let (alpha, beta): (*const c_void, *const c_void) = if shape.dtype == DType::F64 {
            ((&raw const wide.0).cast(), (&raw const wide.1).cast())
        } else {
            ((&raw const narrow.0).cast(), (&raw const narrow.1).cast())
        };
        // SAFETY: as the caller promises.
        unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                alpha,
                beta,
                b as *const c_void,
                plan.first,
                a as *const c_void,
                plan.second,
                out as *const c_void,
                plan.out,
                out as *mut c_void,
                plan.out,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                Self::WORKSPACE,
                stream as sys::cudaStream_t,
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        for (_, plan) in self.plans.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            // SAFETY: made by `plan`, and used no more. What fails here can be told nobody.
            unsafe {
                let _ = result::destroy_matmul_desc(plan.operation);
                let _ = result::destroy_matrix_layout(plan.first);
                let _ = result::destroy_matrix_layout(plan.second);
                let _ = result::destroy_matrix_layout(plan.out);
            }
        }
        // SAFETY: as above.
        unsafe {
            let _ = result::destroy_handle(self.handle);
        }
    }
}
