//! The kernels of kernels/: compiled by NVRTC at first use for the card found, launched on any stream.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{Ptx, result, sys as nvrtc};

use super::{check, foreign, library};
use crate::dtype::DType;
use crate::{Error, Result};

/// Compiled as one, in this order. They include nothing.
const SOURCE: &str = concat!(
    include_str!("../../../kernels/number.cuh"),
    include_str!("../../../kernels/elementwise.cu"),
    include_str!("../../../kernels/tokens.cu"),
);

/// The kernels of one context.
pub(crate) struct Kernels {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<Name, CudaFunction>>,
}

/// A kernel by what it does and for which dtypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    base: &'static str,
    from: DType,
    to: Option<DType>,
}

impl Name {
    /// The one for a dtype.
    pub(crate) fn of(base: &'static str, dtype: DType) -> Result<Self> {
        suffix(dtype)?;
        Ok(Self { base, from: dtype, to: None })
    }

    /// The one for ids.
    pub(crate) fn of_ids(base: &'static str) -> Self {
        Self { base, from: DType::I64, to: None }
    }

    /// The one from a dtype to another.
    pub(crate) fn between(base: &'static str, from: DType, to: DType) -> Result<Self> {
        suffix(from)?;
        suffix(to)?;
        Ok(Self { base, from, to: Some(to) })
    }

    /// As the source spells it.
    fn spelled(self) -> Result<String> {
        let from = if self.from == DType::I64 { "i64" } else { suffix(self.from)? };
        let mut name = format!("{}_{from}", self.base);
        if let Some(to) = self.to {
            name = name + "_" + suffix(to)?;
        }
        Ok(name)
    }
}

/// How kernels name a dtype.
fn suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F64 => Ok("f64"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        got => Err(Error::DType { what: "operand of a kernel", got, wanted: DType::F32 }),
    }
}

/// How a launch divides its work. Every kernel strides over what is more than its grid.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Work {
    /// A thread an element (or 16 bytes of them).
    Elements(usize),
    /// A block a row.
    Rows(usize),
}

impl Work {
    /// Threads a block: `BLOCK` of kernels/number.cuh.
    const BLOCK: usize = 256;
    /// Blocks of a grid, at most: some waves of every card there is.
    const BLOCKS: usize = 4096;

    fn blocks(self) -> u32 {
        let blocks = match self {
            Work::Elements(count) => count.div_ceil(Self::BLOCK),
            Work::Rows(rows) => rows,
        };
        blocks.min(Self::BLOCKS) as u32
    }
}

impl Kernels {
    /// Those for the context's card.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let attribute = |which| context.attribute(which).map_err(|error| foreign("cuDeviceGetAttribute", &error));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let code = compiled(10 * major + minor)?;
        let module =
            context.load_module(Ptx::from_binary(code)).map_err(|error| foreign("cuModuleLoadData", &error))?;
        Ok(Self { module, functions: Mutex::default() })
    }

    fn function(&self, name: Name) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&name) {
            return Ok(function.cu_function());
        }
        let function =
            self.module.load_function(&name.spelled()?).map_err(|error| foreign("cuModuleGetFunction", &error))?;
        let raw = function.cu_function();
        functions.insert(name, function);
        Ok(raw)
    }

    /// Launches a kernel, unless there is nothing to do.
    ///
    /// # Safety
    /// `arguments` are of the kernel's types, and what they point to on the device stays until the stream has passed.
    pub(crate) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        name: Name,
        work: Work,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let (blocks, threads) = (work.blocks(), Work::BLOCK as u32);
        if blocks == 0 {
            return Ok(());
        }
        let function = self.function(name)?;
        let none = std::ptr::null_mut();
        // SAFETY: as the caller promises; the arguments are read during the call.
        let code = unsafe {
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.as_mut_ptr(), none)
        };
        check("cuLaunchKernel", code)
    }
}

/// Machine code for an architecture, compiled once a process.
fn compiled(architecture: i32) -> Result<Vec<u8>> {
    static KNOWN: Mutex<Vec<(i32, Vec<u8>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, code)) = known.iter().find(|(of, _)| *of == architecture) {
        return Ok(code.clone());
    }
    let code = compile(architecture)?;
    known.push((architecture, code.clone()));
    Ok(code)
}

/// A program that NVRTC holds.
struct Program(nvrtc::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, and used no more. A failure can be told nobody.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn compile(architecture: i32) -> Result<Vec<u8>> {
    library::nvrtc()?;
    let failed = |call: &'static str| {
        move |error: NvrtcError| Error::Foreign { library: "NVRTC", call: call.into(), message: format!("{error:?}") }
    };
    let source = CString::new(SOURCE).map_err(|error| Error::Argument {
        what: "kernels",
        got: error.to_string(),
        wanted: "a text without zero bytes".into(),
    })?;
    let program = Program(result::create_program(&source, Some(c"kernels.cu")).map_err(failed("nvrtcCreateProgram"))?);
    let options = [format!("--gpu-architecture=sm_{architecture}"), "--std=c++17".into()];
    // SAFETY: the program is alive, here and below.
    if let Err(error) = unsafe { result::compile_program(program.0, &options) } {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        return Err(Error::Foreign {
            library: "NVRTC",
            call: format!("compiling kernels/ for sm_{architecture}"),
            message: format!("{error:?}: {log}"),
        });
    }
    let mut len = 0;
    // SAFETY: as above.
    unsafe { nvrtc::nvrtcGetCUBINSize(program.0, &mut len) }.result().map_err(failed("nvrtcGetCUBINSize"))?;
    let mut code = vec![0u8; len];
    // SAFETY: as above; the code has the length that was asked for.
    unsafe { nvrtc::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }.result().map_err(failed("nvrtcGetCUBIN"))?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_named_as_the_source_names_them() {
        let spelled = |name: Result<Name>| name.unwrap().spelled().unwrap();
        assert_eq!(spelled(Name::of("combine", DType::BF16)), "combine_bf16");
        assert_eq!(spelled(Name::between("cast", DType::F32, DType::F16)), "cast_f32_f16");
        assert_eq!(Name::of_ids("find_outside").spelled().unwrap(), "find_outside_i64");
        assert!(matches!(Name::of("combine", DType::I64), Err(Error::DType { got: DType::I64, .. })));
    }

    #[test]
    fn a_grid_is_never_larger_than_it_may_be() {
        let blocks = [Work::Elements(0), Work::Elements(1), Work::Elements(257), Work::Rows(3), Work::Rows(1 << 40)];
        assert_eq!(blocks.map(Work::blocks), [0, 1, 2, 3, 4096]);
    }
}
