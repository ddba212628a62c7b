#!/usr/bin/env bash
# Builds, runs the GPU tests and the GPU benchmarks on a bare machine without network, in less than
# 10 minutes a call, and writes a report for docs/benchmarks.
#
#   tools/gpu_check.sh [STAGE..]            default: quick. Each of the others is a call of its own:
#     smoke      the first minute: facts, kernels, links, copies beside compute, training, pinning
#     quick      tests, kernels, a small model     8b         8B at 8k tokens a step, beside plain torch
#     1.5b       8k and 32k beside plain torch     8b-16k, 8b-32k  more tokens
#     disk       1.5B, its state on disk           8b-32k-m4  the last in 4 micro-batches, as told
#     14b        14B with the whole card
#   tools/gpu_check.sh --limit SECONDS ..   of this call, where less than 9 minutes are left: what is
#                                           not begun by then is left out, and the report says so
#   tools/gpu_check.sh --dry-run [STAGE..]  say what would run, prove that what is carried is enough,
#                                           and plan every benchmark; so does any stage without a GPU
#   tools/gpu_check.sh --fetch              where there is a network: wheels into .whl/
#   tools/gpu_check.sh --table FILE..       targets found by several calls (their results.json)
#
# The machine must have Python 3.12, pip and torch for CUDA. All else lies in .whl/, which git
# ignores: copy it beside the tree (64 MiB in all). The wheel of ours that --fetch built is used if
# it is of these sources; if not, a compiler. What was built stays in build/gpu_site, and serves the next call
# on the same machine.
# Results go to $OUT (default: build/gpu_check): gpu_*.md, log.txt, machine.json, results.json of the
# benchmarks, traces and their drawings. $PYTHON names the interpreter (default: python3, with torch
# for CUDA). Exit code: 0, or 1 where a check failed or an engine warned, 3 where something needed is
# missing, 4 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" tools/_gpu_check.py "$@"
