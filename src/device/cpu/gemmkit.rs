//! `gemmkit`: pure Rust, no allocation per call, and among the fastest on every CPU tried.

use std::sync::Once;

use gemmkit::{Bias, FusedScalar, MatMut, MatRef, Parallelism, gemm_fused_with};

use super::Operand;
use crate::dtype::Float;

pub(super) use gemmkit::Workspace;

/// The largest size of an operand.
pub(super) const LARGEST: usize = isize::MAX as usize;

/// What can be multiplied.
pub(super) trait Gemm: Float + FusedScalar {}
impl<T: Float + FusedScalar> Gemm for T {}

/// Makes `gemmkit` pack operands from 256 rows on. Its own thresholds (2048 and 1024) read the operands in place below
/// that, which on AVX2 machines halves the speed of the gradients' products (35 against 75 GFLOP/s at 512×2048×2048).
/// Environment variables of the crate, where set, win.
fn tune() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("GEMMKIT_RHS_PACK_THRESHOLD").is_none() {
            gemmkit::tuning::set_rhs_pack_threshold(256);
        }
        if std::env::var_os("GEMMKIT_LHS_PACK_THRESHOLD").is_none() {
            gemmkit::tuning::set_lhs_pack_threshold(256);
        }
    });
}

fn view<'a, T>(operand: Operand<'a, T>) -> MatRef<'a, T> {
    let width = operand.columns as isize;
    let ((rows, columns), strides) = (operand.size(), if operand.transposed { (1, width) } else { (width, 1) });
    MatRef::new(operand.data, rows, columns, strides.0, strides.1)
}

/// `out = a · b + beta · out (+ bias on every row)`, with `threads` threads.
pub(super) fn gemm<T: Gemm>(
    workspace: &mut Workspace,
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    beta: T,
    out: &mut [T],
    bias: Option<&[T]>,
    threads: usize,
) {
    tune();
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::Serial };
    let out = MatMut::from_row_major(out, a.size().0, b.size().1);
    let (one, bias) = (T::from_f64(1.0), bias.map(Bias::PerCol));
    gemm_fused_with(workspace, one, view(a), view(b), beta, out, bias, None, parallelism);
}
