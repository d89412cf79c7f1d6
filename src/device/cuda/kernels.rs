//! The kernels of kernels/*.cu: compiled by NVRTC at first use, launched on any stream.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};

use super::{check, foreign, library};
use crate::dtype::DType;
use crate::{Error, Result};

const SOURCE: &str = include_str!("../../../kernels/elementwise.cu");

/// The compiled kernels of one context.
pub(crate) struct Kernels {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<String, CudaFunction>>,
}

/// How kernels name a dtype.
pub(crate) fn suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F64 => Ok("f64"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        got => Err(Error::DType { what: "operand of a kernel", got, wanted: DType::F32 }),
    }
}

impl Kernels {
    /// Threads a block.
    const BLOCK: u32 = 256;
    /// Blocks of a grid, at most: each thread strides.
    const BLOCKS: u64 = 4096;

    /// Compiles them for the context's card.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        library::nvrtc()?;
        let options = CompileOptions {
            // The card's own architecture would be a &'static str: this one is understood by all that have bf16.
            arch: Some("compute_80"),
            include_paths: include_paths(),
            name: Some("elementwise.cu".into()),
            ..CompileOptions::default()
        };
        let ptx = compile_ptx_with_opts(SOURCE, options).map_err(|error| Error::Foreign {
            library: "NVRTC",
            call: "compiling kernels/elementwise.cu".into(),
            message: format!("{error:?}"),
        })?;
        let module = context.load_module(ptx).map_err(|error| foreign("cuModuleLoadData", &error))?;
        Ok(Self { module, functions: Mutex::default() })
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.cu_function());
        }
        let function = self.module.load_function(name).map_err(|error| foreign("cuModuleGetFunction", &error))?;
        let raw = function.cu_function();
        functions.insert(name.to_string(), function);
        Ok(raw)
    }

    /// Launches a kernel over `count` elements.
    ///
    /// # Safety
    /// `arguments` are of the kernel's types, and what they point to on the device stays until the stream has passed.
    pub(crate) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        name: &str,
        count: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let function = self.function(name)?;
        let blocks = count.div_ceil(Self::BLOCK.into()).min(Self::BLOCKS) as u32;
        let none = std::ptr::null_mut();
        // SAFETY: as the caller promises; the arguments are read during the call.
        let code = unsafe {
            sys::cuLaunchKernel(function, blocks, 1, 1, Self::BLOCK, 1, 1, 0, stream, arguments.as_mut_ptr(), none)
        };
        check("cuLaunchKernel", code)
    }
}

/// Where cuda_bf16.h may be: `CUDA_PATH`, `CUDA_HOME`, and the usual place.
fn include_paths() -> Vec<String> {
    let roots = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(|name| std::env::var(name).ok());
    roots.chain(["/usr/local/cuda".into(), "/usr".into()]).map(|root| root + "/include").collect()
}
