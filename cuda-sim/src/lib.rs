//! A CUDA driver, cuBLASLt, NCCL and NVRTC that run on the CPU: one shared library that answers their calls.
//!
//! A test instrument, never timed. Device memory is host memory, a stream is a worker thread, an event is a token that the worker
//! sets. So the CUDA path of the crate runs on machines without a GPU, with orders of execution that a seed shuffles.
//! See README.md for what it proves and what not.
#![allow(non_snake_case, non_upper_case_globals, unused_variables)]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, reason = "a C ABI, whose contracts are NVIDIA's")]

/// Defines an exported C function, and checks at compile time that its signature is cudarc's.
macro_rules! export {
    ($($m:ident :: $name:ident ( $($a:ident : $t:ty),* $(,)? ) -> $r:ty $body:block)*) => {$(
        #[no_mangle]
        pub unsafe extern "C" fn $name($($a: $t),*) -> $r $body
        const _: unsafe fn($($t),*) -> $r = $m::$name;
    )*};
}

mod core;
mod driver;
mod gemm;
mod kernels;
mod nccl;
mod nvrtc;
mod races;
