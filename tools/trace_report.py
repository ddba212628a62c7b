#!/usr/bin/env python3
"""Say what binds in a trace (`trace: path.json`), and draw it; the same as `infinity trace`.

python tools/trace_report.py trace.json [--html out.html] [--svg out.svg] [--step N] [--json]
"""

from __future__ import annotations

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    main(["trace", *sys.argv[1:]])
