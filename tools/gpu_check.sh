#!/usr/bin/env bash
# Builds, runs the GPU tests and the GPU benchmarks on a bare machine without network, in less than
# 10 minutes a call, and writes a report for docs/benchmarks.
#
#   tools/gpu_check.sh [STAGE..]            default: smoke tests. In order of their worth:
#     smoke      the first minute: facts, kernels, links, copies beside compute, training, pinning
#     tests      the tests that need a GPU
#     integrations  tests of trainers, scripts and models that compute on the GPU where there is one
#     8b-32k     8B at 32k tokens a step under a cap of 24 GiB, beside no offload
#     1.5b-fsdp  1.5B at 8k tokens, beside FSDP2 with CPU offload
#     1.5b, 8b, 8b-16k, disk, 8b-32k-m4, 14b  other sizes, each a call of its own
#     more       Adam kernels alone, a model of 124M
#   tools/gpu_check.sh --limit SECONDS ..   of this call, where less than 9 minutes are left: what is
#                                           not begun by then is left out, and the report says so
#   tools/gpu_check.sh --ram GIB ..         of a machine whose RAM grows as it is used
#   tools/gpu_check.sh --only NAMES ..      of the checks of these stages
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
# benchmarks, traces and their summaries. $PYTHON names the interpreter (default: python3, with torch
# for CUDA). Exit code: 0, or 1 where a check failed or an engine warned, 3 where something needed is
# missing, 4 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -P benchmarks/gpu/check.py "$@"
