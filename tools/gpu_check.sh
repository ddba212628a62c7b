#!/usr/bin/env bash
# Builds, runs the GPU tests and the step benchmark on a bare machine with a GPU and no network.
# Needs python3 with torch (CUDA), nanobind, scikit-build-core, cmake and ninja; other wheels are
# taken from .whl/ if that folder is there. Writes its report to $OUT (default: build/gpu_check).
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
{
  date -u
  python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name(0))'
  python3 -m pytest -q -m gpu tests/gpu
  python3 tools/bench_step.py --model gpt-124m --json --rounds 3
} 2>&1 | tee "$out/report.txt"
