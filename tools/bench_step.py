#!/usr/bin/env python3
"""Time training steps: plain PyTorch in RAM, infinity in RAM, infinity on disk.

See benchmarks/step, and `--help`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from step.main import main

if __name__ == "__main__":
    sys.exit(main())
