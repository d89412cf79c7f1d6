#!/usr/bin/env python3
"""Compiles every kernel of kernels/ to machine code for each architecture, with a real NVRTC: no GPU, no driver.

    python3 -m venv target/nvrtc && target/nvrtc/bin/pip install --no-deps nvidia-cuda-nvrtc
    target/nvrtc/bin/python scripts/check_kernels.py [sm_80 sm_90 sm_100 ...]

The library is looked for in the Python environment, then by its name.
"""
import ctypes
import ctypes.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the order of src/device/cuda/kernels.rs.
SOURCES = ["number.cuh", "elementwise.cu", "tokens.cu"]


def nvrtc():
    """The library."""
    found = sorted(p for base in sys.path for p in pathlib.Path(base).glob("nvidia/*/lib/libnvrtc.so.*"))
    names = [str(path) for path in found] + ["libnvrtc.so", ctypes.util.find_library("nvrtc") or "libnvrtc.so.12"]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    sys.exit(f"no NVRTC: tried {', '.join(names)}")


def compile_for(library, source, architecture):
    """Machine code, or the compiler's complaint."""
    program = ctypes.c_void_p()
    check = lambda code, what: code and sys.exit(f"{what} failed: {code}")
    check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None), "nvrtcCreateProgram")
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=" + architecture.encode(), b"--std=c++17")
    failed = library.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        sys.exit(f"{architecture}:\n{log.value.decode()}")
    check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    code = ctypes.create_string_buffer(size.value)
    check(library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def main():
    library = nvrtc()
    text = "".join((ROOT / "kernels" / name).read_text() for name in SOURCES)
    unused = {path.name for path in (ROOT / "kernels").iterdir()} - set(SOURCES)
    if unused:
        sys.exit(f"kernels/ holds files that are not compiled: {sorted(unused)}")
    for architecture in sys.argv[1:] or ["sm_80", "sm_90", "sm_100"]:
        code = compile_for(library, text.encode(), architecture)
        # Every kernel's code lies in a section of its own.
        kernels = {part.split(b"\0")[0] for part in code.split(b".text.")[1:]}
        print(f"{architecture}: {len(kernels)} kernels, {len(code)} bytes")
        if len(kernels) < 60:
            sys.exit(f"{architecture}: kernels are missing: {sorted(kernels)}")


main()
