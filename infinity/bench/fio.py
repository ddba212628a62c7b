"""fio as a contender, where it is installed: the same files, spans and bytes, its own clock."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from infinity.bench.contender import Sample, UnavailableError
from infinity.bench.load import Load, Span
from infinity.bench.testbed import Testbed
from infinity.sizes import format_size

_PATIENCE_S = 600.0


class Fio:
    """One ioengine with its depth; for "psync" the depth is the number of jobs per direction.

    Its buffers are depth x block, not chunks, so they stay in the processor's cache; they hold
    random data. Only the time inside the jobs counts, not the start of the program.
    """

    family = "fio"

    def __init__(self, testbed: Testbed, engine: str, block_size: int, depth: int) -> None:
        self._testbed = testbed
        self._program = shutil.which("fio")
        if self._program is None:
            raise UnavailableError("fio is not installed", remedy="apt-get install fio")
        self._engine, self._block_size, self._depth = engine, block_size, depth

    @property
    def name(self) -> str:
        """The settings."""
        return f"fio {self._engine} {format_size(self._block_size)} x {self._depth}"

    def run(self, load: Load) -> Sample:
        """Run all jobs at once; the last one to end counts. Raises `UnavailableError`."""
        output = self._output([*self._common(), *self._jobs(load)])
        jobs = parse_jobs(output)
        moved = sum(job[way]["io_bytes"] for job in jobs for way in ("read", "write"))
        if moved != load.total_bytes:
            what = f"{self.name} moved {moved} bytes instead of {load.total_bytes}"
            raise UnavailableError(what, because=str({job["error"] for job in jobs}))
        busy_s = max(job[way]["runtime"] for job in jobs for way in ("read", "write")) / 1e3
        cpu_s = sum((j["usr_cpu"] + j["sys_cpu"]) / 100 * j["job_runtime"] / 1e3 for j in jobs)
        # Its clock counts milliseconds; a run that is too short to be timed is not a measurement.
        return Sample(max(busy_s, 1e-3), moved, cpu_s)

    def _common(self) -> list[str]:
        direct = all(self._testbed.direct)
        return [
            f"--direct={int(direct)}",
            "--thread",
            "--output-format=json",
            f"--ioengine={self._engine}",
            f"--bs={self._block_size}",
            "--overwrite=1",
            "--fallocate=none",
            # The buffers are random already; stirring them again would only cost it time.
            "--scramble_buffers=0",
        ]

    def _jobs(self, load: Load) -> list[str]:
        jobs = []
        for index, path in enumerate(self._testbed.file_paths):
            for way, span in (("read", load.reads[index]), ("write", load.writes[index])):
                if span is not None:
                    place = [f"--name={way}-{index}", f"--filename={path}", f"--rw={way}"]
                    jobs += [*place, *self._span(span)]
        return jobs

    def _span(self, span: Span) -> list[str]:
        if self._engine != "psync":
            range_ = [f"--offset={span.offset}", f"--size={span.nbytes}"]
            return [*range_, f"--io_size={span.total_bytes}", f"--iodepth={self._depth}"]
        part = span.nbytes // self._depth
        if part * self._depth != span.nbytes or part % self._block_size:
            raise UnavailableError(f"{self.name} cannot divide {format_size(span.nbytes)}")
        return [
            f"--numjobs={self._depth}",
            f"--offset={span.offset}",
            f"--offset_increment={part}",
            f"--size={part}",
            f"--io_size={part * span.num_passes}",
        ]

    def _output(self, arguments: list[str]) -> str:
        """Run the program; on any way out it is dead before we go on."""
        assert self._program is not None
        # A session of its own: Ctrl-C reaches us, and we end it.
        with subprocess.Popen(
            [self._program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=_PATIENCE_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            text = (errors.strip() or output.strip())[-300:]
            raise UnavailableError(f"{self.name} ended with {process.returncode}", because=text)
        return output

    def close(self) -> None:
        """Nothing is kept open."""


def parse_jobs(output: str) -> list[dict[str, Any]]:
    """Return the jobs of fio's JSON output, which warnings may precede.

    Raises `UnavailableError` when there is none.
    """
    start = output.find("{")
    try:
        return list(json.loads(output[max(start, 0) :])["jobs"])
    except (ValueError, KeyError, TypeError) as error:
        because = output.strip()[:200] or "it printed nothing"
        raise UnavailableError("fio's output cannot be read", because=because) from error
