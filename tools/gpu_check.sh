#!/usr/bin/env bash
# Builds, runs the GPU tests and the GPU benchmarks on a bare machine without network, in less than
# 10 minutes, and writes a report for docs/benchmarks.
#
#   tools/gpu_check.sh [quick] [8b] [14b]   one or several stages; default: quick (the tests, too)
#   tools/gpu_check.sh --dry-run [STAGE..]  say what would run, and what is missing; needs no GPU
#   tools/gpu_check.sh --fetch              where there is a network: wheels into .whl/
#
# What lies in .whl/ is installed first. What a machine with the image `cuda` lacks is pydantic;
# `--fetch` brings it for Python 3.12. On a lent machine the folder travels only if git ignores it
# (echo /.whl/ >> .git/info/exclude) and `carry` names it:
#   run(command="tools/gpu_check.sh", carry=[".whl"])
# Results go to $OUT (default: build/gpu_check): gpu_*.md, log.txt, *.json of the benchmarks, and a
# trace. $PYTHON names the interpreter (default: python3, with torch for CUDA). Exit code: 0, or 1
# where a check failed, 3 where something needed is missing, 4 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

if [ "${1:-}" = --fetch ]; then
  exec "$python" -m pip download -d .whl -c constraints.txt --only-binary=:all: \
    --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 pydantic
fi
exec "$python" tools/_gpu_check.py "$@"
