#!/usr/bin/env bash
# Builds, runs the GPU tests and the GPU benchmarks on a bare machine without network, in less than
# 10 minutes a call, and writes a report for docs/benchmarks.
#
#   tools/gpu_check.sh [STAGE..]            default: quick. Each of the others is a call of its own:
#     quick      tests, kernels, a small model     8b         8B at 8k tokens a step, beside plain torch
#     1.5b       8k and 32k beside plain torch     8b-32k     8B at 32k, in slices
#     disk       1.5B, its state on disk           8b-32k-m4  the same in 4 micro-batches
#     14b        14B with the whole card
#   tools/gpu_check.sh --dry-run [STAGE..]  say what would run, and what is missing; needs no GPU
#   tools/gpu_check.sh --fetch              where there is a network: wheels into .whl/
#   tools/gpu_check.sh --table FILE..       targets found by several calls (their results.json)
#
# What lies in .whl/ is installed first. What a machine with the image `cuda` lacks is pydantic, and
# maybe what builds and compiles kernels; `--fetch` brings both for Python 3.12. Copy the folder, which
# git ignores, to a machine without a network.
# What was built stays in build/gpu_site, and serves the next call on the same machine.
# Results go to $OUT (default: build/gpu_check): gpu_*.md, log.txt, machine.json, results.json of the
# benchmarks, traces and their drawings. $PYTHON names the interpreter (default: python3, with torch
# for CUDA). Exit code: 0, or 1 where a check failed, 3 where something needed is missing, 4 without
# a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

if [ "${1:-}" = --fetch ]; then
  exec "$python" -m pip download -d .whl -c constraints.txt --only-binary=:all: --no-deps \
    --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux_2_24_x86_64 \
    pydantic pydantic-core annotated-types typing-extensions typing-inspection \
    nanobind scikit-build-core pathspec cuda-core cuda-pathfinder
fi
exec "$python" tools/_gpu_check.py "$@"
