#!/usr/bin/env bash
# gpu_check.sh build [DIR]    where Rust is: the programs, for a machine with GPUs, in DIR [target/gpu-check]
# gpu_check.sh run [DIR]      where the GPUs are: one card or many; no Rust and no network needed; under 8 minutes
#
# `PARITY_CASES=…` at `build` takes a folder of parity cases along. The run ends with one table; the programs' own words are in
# DIR/log.
set -uo pipefail
command=${1:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

build() {
  set -e
  cd "$here/.."
  dir=${1:-target/gpu-check}
  mkdir -p "$dir/cases"
  cargo build --release --quiet --features cuda --examples
  cp target/release/examples/{overlap_modes,mlp_block,parity} "$dir"
  # The names of test programs and benches carry a hash.
  cargo test --release --quiet --features cuda --no-run --message-format json \
    --test device --test cuda_collectives --test cuda_layers --test cuda_slices --test tokens --bench gpu 2>/dev/null |
    python3 -c '
import json, shutil, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable") and made["target"]["kind"][0] in ("test", "bench"):
        shutil.copy(made["executable"], sys.argv[1] + "/" + made["target"]["name"])' "$dir"
  cp "$here/gpu_check.sh" "$dir"
  [ -z "${PARITY_CASES:-}" ] || cp -r "$PARITY_CASES"/. "$dir/cases"
  echo "$dir: copy it to the machine, and there run ./gpu_check.sh run"
}

# check NAME SECONDS COMMAND…: a row of the table, with the last line that the command printed.
check() {
  local name=$1 limit=$2 begun=$SECONDS code
  shift 2
  timeout "$limit" "$@" >"log/$name.txt" 2>&1
  code=$?
  [ $code = 0 ] || failed=1
  local said
  said=$(grep -v '^$' "log/$name.txt" | tail -1 | cut -c1-90)
  rows+=("$(printf '%-22s %-9s %4d s  %s' "$name" "$([ $code = 0 ] && echo ok || echo "FAILED $code")" $((SECONDS - begun)) "$said")")
  echo "${rows[-1]}"
}

run() {
  cd "${1:-$here}" || exit 2
  [ -x parity ] || { echo "no programs in $PWD: build first"; exit 2; }
  mkdir -p log
  rows=() failed=0
  # Skipping for want of a GPU would be no check.
  export CUDA_REQUIRED=1
  local cards
  cards=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "nvidia-smi is not there")
  echo "$cards"
  check kernels 60 ./device
  check cudarc-slices 60 ./cuda_slices
  check embedding-and-loss 60 ./tokens on_cuda
  check collectives 90 ./cuda_collectives
  check layers 120 ./cuda_layers
  if [ -n "$(ls cases 2>/dev/null)" ]; then
    check parity-nccl 60 ./parity --backend cuda --communicator nccl cases
    check parity-peer 60 ./parity --backend cuda --communicator peer cases
  fi
  # GPU_CHECK_SIZES is for trying this script itself out.
  local sizes=(${GPU_CHECK_SIZES:---dtype bf16 --rows 4096 --in-features 4096 --out-features 8192 --repeat 3})
  check overlap-peer 150 ./overlap_modes --backend cuda --communicator peer --ranks 4 --timeline log/peer "${sizes[@]}"
  if [ "$(echo "$cards" | wc -l)" -gt 1 ]; then
    check overlap-nccl 150 ./overlap_modes --backend cuda --communicator nccl --timeline log/nccl "${sizes[@]}"
  fi
  check layer-and-bandwidth 90 ./gpu
  local sanitizer
  if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
    check memcheck 60 "$sanitizer" --error-exitcode 1 ./device
  fi
  {
    echo
    echo "$cards"
    printf '%s\n' "${rows[@]}"
    [ ! -f log/layer-and-bandwidth.txt ] || cat log/layer-and-bandwidth.txt
    cat log/overlap-*.txt 2>/dev/null | tr '\r' '\n' | grep -E '^(Column|Row|whole|layer) ' | grep -v ': round '
  } | tee log/table.txt
  exit $failed
}

case $command in
  build) build "${2:-}" ;;
  run) run "${2:-}" ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
