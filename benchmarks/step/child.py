"""Child process of a contender of the step benchmark."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from step.bound import Phases

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


class ContenderFailedError(Exception):
    """Raised if a child ended early; the child has printed its error to stderr."""


class Child:
    """A contender in a separate process and session.

    `bench_ranks.py` starts one per rank, with another `module` and `environment`.
    """

    def __init__(
        self,
        name: str,
        module: str = "step.contender",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.first: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        self.ended = False  # all turns are done
        self.phases: list[Phases] = []  # one per turn, for contenders that are timed by phase
        self.shares: dict[str, Any] = {}  # of the traced steps; empty without a trace
        paths = filter(None, [*PATHS, os.environ.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, job: dict[str, Any]) -> None:
        """Build the model and take the warm-up steps."""
        self.first = self.ask(job | {"contender": self.name})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        self.send(request)
        return self.receive()

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except json.JSONDecodeError as error:
            raise self._failed() from error
        return answer

    def _failed(self) -> ContenderFailedError:
        return ContenderFailedError(f"{self.name} ended with code {self._process.wait()}")

    def close(self, kill: bool) -> None:
        """End the process; without `kill` it cleans up first."""
        if not kill and self._process.poll() is None:
            try:
                self._process.communicate(json.dumps({"do": "close"}) + "\n", timeout=120)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                kill = True
        if kill:
            self._process.kill()
        self._process.wait()

    def summary(self) -> dict[str, Any]:
        """Return medians and the last known facts of this contender."""
        times = [step_s for turn in self.turns for step_s in turn["step_s"]]
        facts = {key: value for key, value in self.turns[-1].items() if key != "step_s"}
        threads = {name for turn in self.turns for name in turn["cpu_s"]}
        facts["cpu_s"] = {
            name: statistics.median(turn["cpu_s"].get(name, 0.0) for turn in self.turns)
            for name in sorted(threads)
        }
        return {
            "median_step_s": statistics.median(times),
            "min_step_s": min(times),
            "max_step_s": max(times),
            "num_steps": len(times),
            "init_s": self.first["init_s"],
            **facts,
            **self.shares,
        }
