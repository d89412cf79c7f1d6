#!/usr/bin/env bash
# with_cuda_sim.sh COMMAND…
#
# Runs COMMAND with the simulated CUDA libraries (cuda-sim) in the place of the driver's. A data race ends it, unless
# CUDA_SIM_RACES says otherwise: see cuda-sim/README.md for this and other settings.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
target=$here/target/cuda-sim
cargo build --quiet --release --manifest-path "$here/cuda-sim/Cargo.toml" --target-dir "$target"
mkdir -p "$target/lib"
for library in cuda cublasLt nccl nvrtc; do
  ln -sf ../release/libcuda_sim.so "$target/lib/lib$library.so"
done
export LD_LIBRARY_PATH=$target/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export CUDA_REQUIRED=1 CUDA_SIM_DEVICES=${CUDA_SIM_DEVICES:-6} CUDA_SIM_RACES=${CUDA_SIM_RACES-abort}
exec "$@"
