#!/usr/bin/env bash
# Builds, runs the GPU tests and the benchmarks on a bare machine with a GPU and no network, and
# writes its report to $OUT (default: build/gpu_check).
#
# Needs python3 (3.12) with torch (CUDA), cuda-core, nanobind, scikit-build-core, cmake and ninja.
# Other wheels are taken from .whl/, if that folder is there. To fill it, where there is a network:
#   python3 -m pip download -d .whl --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     pydantic pydantic-core annotated-types typing-inspection
# and, where cuda-core is missing or older than 1.0, also `cuda-core cuda-bindings cuda-pathfinder`
# in the CUDA major version of torch. NVRTC is the one that came with torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-build/gpu_check}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pip install -q --no-build-isolation --no-deps --no-index --target "$site" .

# One failure does not hide what comes after it.
check() {
  echo "== $*"
  "$@" || echo "FAILED: $*"
}

# -P: the source tree in the working directory has no native modules, the installed package has.
facts='
import torch
from infinity.optim import cuda, nvrtc
device = torch.device("cuda", 0)
print("torch", torch.__version__, torch.cuda.get_device_name(device))
print("kernels:", cuda.why_not(device) or f"NVRTC {nvrtc.version()}, source in {nvrtc.folder()}")
'
{
  date -u
  check python3 -P -c "$facts"
  check python3 -P -m pytest -q -m gpu tests/gpu
  check python3 -P -m pytest -q -m "not big" tests/test_nvrtc.py tests/test_cuda_adam.py
  check python3 tools/bench_adam_cuda.py
  check python3 tools/bench_step.py --model gpt-124m --json --rounds 3
} 2>&1 | tee "$out/report.txt"
! grep -q '^FAILED: ' "$out/report.txt"
