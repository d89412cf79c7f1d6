//! Any CBLAS: whichever library the build script links.

use std::ffi::c_int;

use cblas_sys::{CBLAS_LAYOUT, CBLAS_TRANSPOSE, cblas_dgemm, cblas_sgemm};

use super::Operand;
use crate::dtype::Float;

/// A BLAS keeps its own.
#[derive(Default)]
pub(super) struct Workspace;

/// The largest size of an operand, which the interface's integers give.
pub(super) const LARGEST: usize = c_int::MAX as usize;

/// What can be multiplied.
pub(super) trait Gemm: Float {
    /// The routine: `c = a · b + beta · c`, all row-major, operands stored with `lda` and `ldb` columns.
    ///
    /// # Safety
    /// The pointers reach as many elements as the sizes say.
    #[allow(clippy::too_many_arguments)]
    unsafe fn routine(
        transpose: [CBLAS_TRANSPOSE; 2],
        size: [c_int; 3],
        a: *const Self,
        lda: c_int,
        b: *const Self,
        ldb: c_int,
        beta: Self,
        c: *mut Self,
    );
}

macro_rules! gemm {
    ($type:ty, $routine:ident) => {
        impl Gemm for $type {
            unsafe fn routine(
                [transpose_a, transpose_b]: [CBLAS_TRANSPOSE; 2],
                [m, n, k]: [c_int; 3],
                a: *const Self,
                lda: c_int,
                b: *const Self,
                ldb: c_int,
                beta: Self,
                c: *mut Self,
            ) {
                // SAFETY: passed on to the caller.
                unsafe {
                    let layout = CBLAS_LAYOUT::CblasRowMajor;
                    $routine(layout, transpose_a, transpose_b, m, n, k, 1.0, a, lda, b, ldb, beta, c, n);
                }
            }
        }
    };
}
gemm!(f32, cblas_sgemm);
gemm!(f64, cblas_dgemm);

/// `out = a · b + beta · out (+ bias on every row)`. How many threads it uses is the library's own setting.
pub(super) fn gemm<T: Gemm>(
    _: &mut Workspace,
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    beta: T,
    out: &mut [T],
    bias: Option<&[T]>,
    _threads: usize,
) {
    let ((m, k), (k_b, n)) = (a.size(), b.size());
    assert!(k == k_b && out.len() == m * n, "operands of a checked product");
    assert!(a.data.len() == m * k && b.data.len() == k * n, "operands of a checked product");
    assert!(m.max(n).max(k) <= LARGEST, "operands of a checked product");
    let int = |size: usize| size as c_int;
    let transpose = |transposed| if transposed { CBLAS_TRANSPOSE::CblasTrans } else { CBLAS_TRANSPOSE::CblasNoTrans };
    let (lda, ldb) = (int(a.columns.max(1)), int(b.columns.max(1)));
    // SAFETY: the lengths were checked above, and `out` is borrowed alone.
    unsafe {
        T::routine(
            [transpose(a.transposed), transpose(b.transposed)],
            [int(m), int(n), int(k)],
            a.data.as_ptr(),
            lda,
            b.data.as_ptr(),
            ldb,
            beta,
            out.as_mut_ptr(),
        );
    }
    if let Some(bias) = bias {
        for row in out.chunks_exact_mut(n.max(1)) {
            row.iter_mut().zip(bias).for_each(|(out, bias)| *out = T::from_f64(out.to_f64() + bias.to_f64()));
        }
    }
}
