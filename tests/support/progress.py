"""Progress report of long test runs: the completed share, and an estimate of the remaining time.

Durations of tests differ by a factor of a thousand, so the share is one of time, not of tests: of
the seconds that each file took in the run recorded in `tests/seconds.json`. The estimate scales
these by the time elapsed on this machine. A line replaces the dots of tests that pass.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

KEPT = Path(__file__).resolve().parent.parent / "seconds.json"
_FEWEST = 500  # tests; shorter runs need no report
_STEP = 0.05  # share between two lines
_UNKNOWN_S = 0.2  # per test of a file without a record


class Progress:
    """Plugin for the process that reports: the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._keep = config.getoption("--keep-seconds")
        self._kept: dict[str, float] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        self._took: Counter[str] = Counter()  # seconds by file
        self._each: dict[str, float] = {}  # seconds of one test of a file
        self._total = self._done = 0.0
        self._steps = 0
        self._began = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Take the tests from the first worker that is ready; all collect the same ones."""
        if self._each or len(ids) < _FEWEST:
            return
        counts = Counter(map(_file_of, ids))
        self._each = {f: self._kept.get(f, _UNKNOWN_S * n) / n for f, n in counts.items()}
        self._total = sum(self._each[file] * count for file, count in counts.items())
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file_of(report.nodeid)
        self._took[file] += report.duration
        if report.when != "teardown" or not self._each:
            return
        self._done += self._each[file]
        share = self._done / self._total
        steps = int(share / _STEP + 1e-6)
        if steps > self._steps:
            self._steps = steps
            self._line(share)

    def _line(self, share: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        passed_s = time.monotonic() - self._began
        left = _minutes(passed_s * (1 - share) / share)
        reporter.write_line(f"{share:4.0%} after {_minutes(passed_s)}, about {left} left")

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        """Print no letter for tests that pass or are skipped if lines report the progress."""
        quiet = self._each and self._config.get_verbosity() <= 0
        if not quiet or report.failed or hasattr(report, "wasxfail"):
            return None
        if report.skipped or report.when == "call":
            return report.outcome, "", ""
        return None

    def pytest_sessionfinish(self) -> None:
        if self._keep:
            kept = {file: round(seconds, 1) for file, seconds in sorted(self._took.items())}
            KEPT.write_text(json.dumps(kept, indent=0) + "\n")


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
