#!/usr/bin/env python3
"""Time the optimizer kernels against the memory bandwidth, torch's AdamW and DeepSpeed's.

See benchmarks/adam, and `--help`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from adam.main import main

if __name__ == "__main__":
    main()
