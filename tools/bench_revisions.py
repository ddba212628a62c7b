#!/usr/bin/env python3
"""Compare the training step of this checkout with that of another one, for example of a release.

    git worktree add /tmp/before v0.1.0 && make -C /tmp/before setup
    python tools/bench_revisions.py /tmp/before --placement disk --path /mnt/nvme

Both checkouts train the same GPT in processes of their own, which take turns, so that other load of
the machine meets both. Losses must be equal bit for bit. Prints the median step and the median of
the ratios of turns, with a 90 % interval: wall time, and CPU time of all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 4  # steps
VOCABULARY, CONTEXT = 2048, 256


class Revision:
    """A process that trains with the package of one checkout."""

    def __init__(self, root: Path, python: Path, job: dict[str, Any]) -> None:
        arguments = [python, __file__, "--child", json.dumps({**job, "root": str(root)})]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )
        self._read()

    def turn(self, steps: int) -> tuple[float, float, float]:
        """Train; return wall seconds and CPU seconds of a step, and the last loss."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        wall, cpu, loss = self._read()
        return wall / steps, cpu / steps, loss

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process ended; its message is above")
        return [float(word) for word in line.split()]


def child(job: dict[str, Any]) -> None:
    """Train with the package of this interpreter: a line of input is a number of steps."""
    sys.path.insert(0, str(Path(job["root"]) / "examples"))
    import gpt
    import torch

    import infinity

    assert Path(infinity.__file__).is_relative_to(job["root"]), infinity.__file__
    model = gpt.GPT(
        gpt.GPTConfig(VOCABULARY, CONTEXT, job["layers"], job["width"] // 64 or 1, job["width"])
    )
    model.init_weights(1)
    config = {
        "nvme_path": job["path"],
        "precision": "fp32",
        "placement": job["placement"],
        "optimizer": {"type": "AdamW", "lr": 1e-3},
        "gradient_clipping": 1.0,
    }
    engine = infinity.initialize(model, config)[0]
    generator = torch.Generator().manual_seed(0)
    rows = (2, max(1, job["tokens"] // CONTEXT), min(CONTEXT, job["tokens"]))

    def train(steps: int) -> float:
        for _ in range(steps):
            tokens, targets = torch.randint(0, VOCABULARY, rows, generator=generator)
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    print(train(WARMUP), flush=True)
    for line in sys.stdin:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = train(int(line))
        print(time.perf_counter() - begin, time.process_time() - begin_cpu, loss, flush=True)
    engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, help="of the other revision, set up")
    parser.add_argument("--placement", choices=("host", "disk"), default="host")
    parser.add_argument("--path", type=Path, help="on the drive to use (default: temporary)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(json.loads(options.child))
        return
    if options.checkout is None:
        parser.error("name the checkout of the other revision")
    other = options.checkout.resolve()
    python = {other: other / ".venv/bin/python", ROOT: Path(sys.executable)}
    if not python[other].exists():
        parser.error(f"{python[other]} does not exist; run `make -C {other} setup`")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from ratios import ratio_of

    job = {name: vars(options)[name] for name in ("placement", "layers", "width", "tokens")}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        revisions = {}
        for index, root in enumerate((other, ROOT)):
            path = Path(folder, str(index))
            path.mkdir()
            revisions[root] = Revision(root, python[root], {**job, "path": str(path)})
        results: dict[Path, list[tuple[float, float, float]]] = {other: [], ROOT: []}
        for turn in range(options.turns):
            order = (other, ROOT) if turn % 2 else (ROOT, other)
            for root in order:
                results[root].append(revisions[root].turn(options.steps))
        for revision in revisions.values():
            revision.close()
    before, after = (list(zip(*results[root], strict=True)) for root in (other, ROOT))
    if before[2] != after[2]:
        sys.exit(f"losses differ: {before[2][-1]} and {after[2][-1]}")
    print("| ms per step | other | this | this relative to other |\n| --- | ---: | ---: | --- |")
    for index, name in enumerate(("wall", "CPU")):
        ratio = ratio_of(after[index], before[index])
        medians = (1e3 * statistics.median(times[index]) for times in (before, after))
        cells = " | ".join(f"{median:.1f}" for median in medians)
        print(f"| {name} | {cells} | {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) |")


if __name__ == "__main__":
    main()
