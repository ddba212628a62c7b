"""Ranks as processes, with torch's gloo between them: few, for each starts a torch of its own.

The bits of every feature are held on ranks that are threads (`test_ranks.py`, the axes).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import CASES
from support.trainer import make_config, train_exactly

from infinity.ranks import TorchRanks

HANG_S = 600  # only a hang takes so long
TESTS = Path(__file__).parent.parent


def reaches_itself() -> bool:
    """Whether there is a loopback interface: gloo has no other way from process to process."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.connect(server.getsockname())
        except OSError:
            return False
    return True


pytestmark = [
    pytest.mark.timeout(2 * HANG_S),
    pytest.mark.skipif(not reaches_itself(), reason="127.0.0.1 cannot be reached from itself"),
]


class Processes:
    """Ranks of one job, or of a script, which end with the block that they are in."""

    def __init__(self, count: int, folder: Path, script: Path | None = None, **job: Any) -> None:
        self.out = folder / "result"
        (folder / "nvme").mkdir()
        path = folder / "job.json"
        job |= {"folder": str(folder / "nvme"), "out": str(self.out)}
        path.write_text(json.dumps(job))
        self.logs = [folder / f"log-{rank}" for rank in range(count)]
        self._running = []
        for rank, log in enumerate(self.logs):
            environment = {
                **{k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")},
                **{"RANK": str(rank), "WORLD_SIZE": str(count)},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)},
                **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
                **(job.get("environment") or {}),
            }
            with log.open("wb") as file:
                command = [sys.executable, "-m", "support.rank_alone", str(path)]
                if script is not None:
                    command = [sys.executable, str(script)]
                self._running.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def codes(self) -> list[int]:
        return [process.wait(HANG_S) for process in self._running]

    def words(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()}" for log in self.logs)

    def end_well(self) -> None:
        codes = self.codes()
        assert codes == [0] * len(codes), self.words()

    def results(self) -> list[dict[str, Any]]:
        self.end_well()
        return [torch.load(f"{self.out}-{rank}") for rank in range(len(self.logs))]


def run_ranks(count: int, module: str, job: Path) -> None:
    """`python -m module job`, under torchrun where there are several."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    start = [sys.executable, "-m"]
    if count > 1:
        start += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        start += ["--nproc-per-node", str(count), "-m"]
    done = subprocess.run(
        [*start, module, str(job)], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr


def agent() -> tuple[Any, dict[str, str]]:
    """What torchrun does for its processes: a store on a port that is free, and where it is."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, found | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_processes_that_a_launcher_started_give_the_bits_of_one(tmp_path: Path) -> None:
    config = make_config(("host", "host", "disk"), precision="bf16", gradient_accumulation_steps=2)
    config["placement"]["shared"] = True
    case, count = CASES["gpt"], 2
    together = {**config, "gradient_accumulation_steps": 2 * count}
    expected = train_exactly(case.build(), case.batches(12), together, groups=case.groups)
    store, environment = agent()
    job = {"case": "gpt", "config": config, "batches": 12, "environment": environment}
    with Processes(count, tmp_path, **job) as processes:
        found = processes.results()
    losses = [loss for pair in zip(*(r["losses"] for r in found), strict=True) for loss in pair]
    assert losses == expected.losses
    for rank in found:
        assert rank["norms"][1::2] == expected.norms
        assert rank["masters"].keys() == expected.masters.keys()
        assert all(torch.equal(rank["masters"][n], v) for n, v in expected.masters.items())
    assert list((tmp_path / "nvme").iterdir()) == []
    del store


def test_a_rank_that_is_killed_ends_the_others_with_words(tmp_path: Path) -> None:
    job = {"case": "gpt", "config": make_config(("disk", "disk", "host")), "batches": 30}
    job |= {"store": str(tmp_path / "store"), "killed": [1, 2]}
    with Processes(3, tmp_path, **job) as processes:
        codes = processes.codes()
    assert codes == [1, -signal.SIGKILL, 1], processes.words()
    for rank in (0, 2):
        words = processes.logs[rank].read_text()
        assert f"rank {rank} of 3 lost the others, rank 1 first: " in words
        assert "another rank has ended, was killed, hangs, or cannot be reached" in words


def test_the_example_prints_the_same_alone_and_on_two(tmp_path: Path) -> None:
    printed = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        store, environment = agent()
        script = TESTS.parent / "examples" / "two_gpus.py"
        with Processes(count, folder, script, environment=environment) as processes:
            processes.end_well()
        lines = processes.logs[0].read_text().splitlines()
        printed.append([line for line in lines if line.startswith("step ")])
        assert all("step " not in log.read_text() for log in processes.logs[1:])
        del store
    assert len(printed[0]) == 10
    assert printed[0] == printed[1]


def test_a_group_of_the_users_is_let_go_of_once() -> None:
    """An error in initialize() closes what it may have closed: the error is what is raised."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = TorchRanks(owned=False)
        ranks.close()
        ranks.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
