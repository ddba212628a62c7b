"""Script that runs `rank_alone` under a node's launcher, with the drive in the variable NVME."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import rank_alone

if __name__ == "__main__":
    job = json.loads(os.environ["JOB"])
    job["config"]["nvme_path"] = os.environ["NVME"]
    rank_alone.main(job)
