#!/usr/bin/env python3
"""Measure how fast training state streams to and from drives; the same as `infinity bench disk`.

    python tools/bench_swap.py --path DIR [--path DIR2] [--gib 4] [--json] [--compare all]
    python tools/bench_swap.py --path DIR --faults 7

The first line measures, the second injects faults and checks that none becomes wrong bytes.
See docs/benchmarks for results and the commands that made them.
"""

from __future__ import annotations

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    # Options only: `--help` of the command itself, under the name of this file.
    main(["bench", "disk", *sys.argv[1:]])
