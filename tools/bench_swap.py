#!/usr/bin/env python3
"""Measure the bandwidth of drives for training state, and how close infinity comes to it.

See benchmarks/swap, and `--help`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from swap.main import app

if __name__ == "__main__":
    app()
