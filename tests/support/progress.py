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
_MIN_TESTS = 500  # tests; shorter runs need no report
_STEP = 0.05  # share between two lines
_UNKNOWN_S = 0.2  # per test of a file without a record


class Progress:
    """Plugin for the process that reports: the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._write_record = config.getoption("--keep-seconds")
        self._recorded: dict[str, float] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        self._durations: Counter[str] = Counter()  # seconds by file
        self._seconds_per_test: dict[str, float] = {}  # seconds of one test of a file
        self._total = self._done = 0.0
        self._steps = 0
        self._start = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Take the tests from the first worker that is ready; all collect the same ones."""
        if self._seconds_per_test or len(ids) < _MIN_TESTS:
            return
        counts = Counter(map(_file_of, ids))
        self._seconds_per_test = {
            f: self._recorded.get(f, _UNKNOWN_S * n) / n for f, n in counts.items()
        }
        self._total = sum(self._seconds_per_test[file] * count for file, count in counts.items())
        self._start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file_of(report.nodeid)
        self._durations[file] += report.duration
        if report.when != "teardown" or not self._seconds_per_test:
            return
        self._done += self._seconds_per_test[file]
        share = self._done / self._total
        steps = int(share / _STEP + 1e-6)
        if steps > self._steps:
            self._steps = steps
            self._line(share)

    def _line(self, share: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        elapsed_s = time.monotonic() - self._start
        remaining = _minutes(elapsed_s * (1 - share) / share)
        reporter.write_line(f"{share:4.0%} after {_minutes(elapsed_s)}, about {remaining} left")

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        """Print no letter for tests that pass or are skipped if lines report the progress."""
        quiet = self._seconds_per_test and self._config.get_verbosity() <= 0
        if not quiet or report.failed or hasattr(report, "wasxfail"):
            return None
        if report.skipped or report.when == "call":
            return report.outcome, "", ""
        return None

    def pytest_sessionfinish(self) -> None:
        if self._write_record:
            rounded = {file: round(seconds, 1) for file, seconds in sorted(self._durations.items())}
            KEPT.write_text(json.dumps(rounded, indent=0) + "\n")


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _minutes(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_left:02} s" if minutes else f"{seconds_left} s"
