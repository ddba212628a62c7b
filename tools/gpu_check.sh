#!/usr/bin/env bash
# Builds the package, runs the GPU tests and benchmarks on a bare machine without network, in less than
# 10 minutes per call, and writes a report for docs/benchmarks.
#
#   tools/gpu_check.sh [STAGE..]            default: smoke tests. Stages, most useful first:
#     smoke      the first minute: facts, kernels, links, copies during compute, training, pinning
#     tests      the tests that need a GPU
#     integrations  tests of trainers, scripts and models that compute on the GPU if there is one
#     8b-32k     8B at 32k tokens a step under a cap of 24 GiB, compared with no offload
#     1.5b-fsdp  1.5B at 8k tokens, compared with FSDP2 with CPU offload
#     1.5b, 8b, 8b-16k, disk, 8b-32k-m4, 14b  other sizes, one call each
#     more       Adam kernels alone, a model of 124M
#   tools/gpu_check.sh --limit SECONDS ..   limit of this call (default: 570); checks that have not
#                                           started by then are skipped and listed in the report
#   tools/gpu_check.sh --ram GIB ..         RAM of a machine whose RAM grows with use
#   tools/gpu_check.sh --only NAMES ..      run only these checks of the stages
#   tools/gpu_check.sh --dry-run [STAGE..]  print the commands, check that the wheels are complete,
#                                           and plan each benchmark; the default without a GPU
#   tools/gpu_check.sh --fetch              download wheels into .whl/; needs a network
#   tools/gpu_check.sh --table FILE..       combine targets of several calls (their results.json)
#
# The machine must have Python 3.12, pip and torch for CUDA. Everything else is in .whl/, which git
# ignores: copy it together with the tree (64 MiB in all). The wheel of infinity that --fetch built is
# used if it matches these sources; otherwise a compiler is needed. The build stays in build/gpu_site
# for the next call on the same machine.
# Results go to $OUT (default: build/gpu_check): gpu_*.md, log.txt, machine.json, results.json of the
# benchmarks, traces and their summaries. $PYTHON is the interpreter (default: python3, with torch for
# CUDA). Exit code: 0; 1 if a check failed or an engine warned; 3 if something needed is missing;
# 4 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -P benchmarks/gpu/check.py "$@"
