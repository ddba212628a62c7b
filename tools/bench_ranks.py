#!/usr/bin/env python3
"""Time training steps of several ranks: infinity, DDP, FSDP2, DeepSpeed's ZeRO.

See benchmarks/ranks, and `--help`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from ranks.main import main

if __name__ == "__main__":
    sys.exit(main())
