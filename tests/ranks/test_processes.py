"""Tests of ranks as processes over gloo, started as a launcher does.

Bitwise equality of all features is tested with ranks as threads (`test_ranks.py`, `test_axes.py`).
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import forked, rank_alone
from support.forked import HANG_S
from support.models import CASES
from support.process_memory import SMALL_BYTES, needs_peak
from support.trainer import make_config, train_reference
from support.waiting import wait_until
from torch.distributed import HashStore, TCPStore

from infinity.distributed.context import LostRankError
from infinity.distributed.environment import local_rank_and_count
from infinity.distributed.torch_context import TorchDistContext
from infinity.errors import ConfigError

TESTS = Path(forked.TESTS)


def has_loopback() -> bool:
    """Return True if there is a loopback interface, which gloo needs between processes."""
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
    pytest.mark.skipif(not has_loopback(), reason="127.0.0.1 cannot be reached from itself"),
]


class Processes:
    """Ranks that run `target(*args)`, and are killed when the context exits.

    If there are several, the environment is that of torchrun. They fork from a server that has
    imported torch, which takes seconds.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        target: Callable[..., Any],
        *args: Any,
        agent: bool = True,
        nodes: int = 1,
    ) -> None:
        self.logs = [folder / f"log-{rank}" for rank in range(count)]
        self._running: list[ForkServerProcess] = []
        self._store: TCPStore | None = None
        environment = {"GLOO_SOCKET_IFNAME": "lo"}
        if agent:  # a store on a free port
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        for rank, log in enumerate(self.logs):
            local = count // nodes
            rank_values = {"RANK": rank, "LOCAL_RANK": rank % local}
            rank_values |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": local}
            rank_environment = environment | {
                name: str(value) for name, value in rank_values.items() if count > 1
            }
            self._running.append(forked.start(target, *args, environment=rank_environment, out=log))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            process.kill()
            process.join()
        self._store = None

    def exit_codes(self) -> list[int | None]:
        for process in self._running:
            process.join(HANG_S)
        return [process.exitcode for process in self._running]

    def log_text(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()}" for log in self.logs)

    def assert_success(self) -> None:
        exit_codes = self.exit_codes()
        assert exit_codes == [0] * len(exit_codes), self.log_text()


def run_ranks(
    count: int, folder: Path, main: Callable[..., Any], *, nodes: int = 1, **job: Any
) -> list[Any]:
    """Run the ranks of `main(job)`; return what each saves in `job["out"]`-RANK."""
    folder.mkdir(exist_ok=True)
    job["out"] = str(folder / "out")
    with Processes(count, folder, main, job, nodes=nodes) as processes:
        processes.assert_success()
    return [torch.load(folder / f"out-{rank}") for rank in range(count)]


@pytest.mark.parametrize(
    ("count", "nodes", "shared"),
    [(2, 1, True), (2, 2, True), (2, 1, False), pytest.param(4, 2, False, marks=pytest.mark.big)],
)
def test_launched_processes_match_single_process_bitwise(
    count: int, nodes: int, shared: bool, tmp_path: Path
) -> None:
    config = make_config(("host", "host", "disk"), precision="bf16", gradient_accumulation_steps=2)
    config["placement"]["shared"] = shared
    if not shared:  # fetch units repeatedly, over gloo
        config["placement"]["reshard_after_forward"], config["prefetch_units"] = True, 0
    case, num_batches = CASES["gpt"], 6 * count
    batches = case.batches(num_batches)
    combined = {**config, "gradient_accumulation_steps": 2 * count}
    expected = train_reference(case.build(), batches, combined, groups=case.groups)
    (nvme := tmp_path / "nvme").mkdir()
    job = {"case": "gpt", "config": {**config, "nvme_path": str(nvme)}, "batches": num_batches}
    found = run_ranks(count, tmp_path, rank_alone.main, nodes=nodes, **job)
    losses = [loss for each in zip(*(r["losses"] for r in found), strict=True) for loss in each]
    assert losses == expected.losses
    for rank in found:
        assert rank["norms"][1::2] == expected.norms
        assert rank["masters"].keys() == expected.masters.keys()
        assert all(torch.equal(rank["masters"][n], v) for n, v in expected.masters.items())
        assert rank["stage"] == (2 if shared else 3)
    assert list(nvme.iterdir()) == []


def test_ranks_detect_shared_machine(tmp_path: Path) -> None:
    found = run_ranks(3, tmp_path, rank_alone.machines)
    assert found == [(0, 2, 2, False, False), (1, 2, 2, False, False), (0, 1, 3, False, False)]


def test_non_contiguous_ranks_of_machine_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set("machine of rank 1", "there")
    store.set("machine of rank 2", "here")
    monkeypatch.setattr("infinity.distributed.environment._machine_id", lambda: b"here")
    with pytest.raises(ConfigError, match="ranks 0, 2 are on one machine, and others between"):
        local_rank_and_count(store, 0, 3)


@needs_peak
def test_rank_peak_ram_is_its_planned_share(tmp_path: Path) -> None:
    """State is in RAM, sharded; the peak of a rank is what its plan reserves."""
    (nvme := tmp_path / "nvme").mkdir()
    single = run_ranks(1, tmp_path / "1", rank_alone.memory, nvme=str(nvme))[0]
    ranks = run_ranks(2, tmp_path / "2", rank_alone.memory, nvme=str(nvme))
    layer = rank_alone.WIDTH**2
    gradients = 2 * 2 * layer  # bf16: as autograd returns it, and a contiguous copy
    packed = 4 * layer  # a weight in fp32: as initialized, or as packed for a matmul
    margin = gradients + packed + SMALL_BYTES
    for found in (single, *ranks):
        assert found["grown"] < found["planned"] + margin
    for found in ranks:
        assert found["planned"] + margin < 0.9 * single["planned"], "the bound must be meaningful"


def test_shared_ram_counts_once_per_rank(tmp_path: Path) -> None:
    (nvme := tmp_path / "nvme").mkdir()
    for found in run_ranks(2, tmp_path, rank_alone.train_with_shared_weights, nvme=str(nvme)):
        assert found["others"] > 64 << 20
        assert found["less"] == pytest.approx(found["others"], rel=0.1)


@pytest.mark.parametrize("when", ["start", "step"])
def test_out_of_memory_on_one_rank_ends_others(when: str, tmp_path: Path) -> None:
    (nvme := tmp_path / "nvme").mkdir()
    job = {"nvme": str(nvme), "when": when}
    with Processes(2, tmp_path, rank_alone.out_of_memory, job) as processes:
        assert processes.exit_codes() == [1, 1], processes.log_text()
    first, second = (log.read_text() for log in processes.logs)
    if when == "start":
        assert "the system refused to reserve" in second
        assert "rank 1 failed (" in first
        assert "the system refused to reserve" in first
    else:  # an allocation by user code
        assert "can't allocate memory" in second
        message = (
            "rank 0 of 2 lost the others, for rank 1 closed the engine, or ended by RuntimeError: "
        )
        assert message in first
        assert "can't allocate memory" in first
        assert "look whether rank 1 ended by an error" in first
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("agent", [True, False])
def test_mismatched_world_size_is_reported(
    rank: int, agent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a launcher's store, and with that of rank 0, which does not wait for others."""
    if not agent:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    job = {"nvme": str(tmp_path), "rank": rank}
    with Processes(
        2, tmp_path, rank_alone.start_with_wrong_world_size, job, agent=agent
    ) as processes:
        assert processes.exit_codes() == [1, 1], processes.log_text()
    one, other = (3, 2) if rank == 0 else (2, 3)
    first, second = (log.read_text() for log in processes.logs)
    assert f"WORLD_SIZE is {one} on rank 0, {other} on rank 1" in first
    if agent:  # else the store may have ended with rank 0
        assert f"WORLD_SIZE is {other} on rank 1, {one} on rank 0" in second


def test_ranks_close_to_ddp(tmp_path: Path) -> None:
    """DDP averages gradients in another order: all weights are close after four updates."""
    # Biases of keys have gradients of 0 up to rounding; eps keeps Adam from scaling that noise.
    config = make_config(gradient_accumulation_steps=2, optimizer={"eps": 1e-4})
    job = {"case": "gpt", "config": config, "batches": 24}
    engine_ranks, ddp_ranks = (
        run_ranks(3, tmp_path / main.__name__, main, **job)
        for main in (rank_alone.main, rank_alone.plain)
    )
    for rank, other in zip(engine_ranks, ddp_ranks, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=1e-5)
        for name, value in other["masters"].items():
            torch.testing.assert_close(rank["masters"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rank", "port_in_use"), [(0, False), (1, False), (1, True)])
def test_lone_rank_reports_wait_and_ends_on_sigint(rank: int, port_in_use: bool) -> None:
    """Also if another program accepts connections at that address and does not answer."""
    with contextlib.ExitStack() as stack:
        probe = socket.socket() if not port_in_use else stack.enter_context(socket.socket())
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        if port_in_use:
            probe.listen()
        else:
            probe.close()
        wait_alone(rank, port, "an answer from rank 0" if port_in_use else f"rank {1 - rank}")


def wait_alone(rank: int, port: str, awaited: str) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": port}
    environment |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    with forked.Program(rank_alone.find_missing_ranks, **environment) as program:
        expected_line = f"rank {rank} of 2 waits for {awaited} at 127.0.0.1:{port}"
        assert wait_until(lambda: expected_line in program.err.read_text(), HANG_S)
        program.signal(signal.SIGINT)
        _, _, error = program.end()
    assert "KeyboardInterrupt" in error


def test_killed_rank_ends_others(tmp_path: Path) -> None:
    config = {**make_config(("disk", "disk", "host")), "nvme_path": str(tmp_path)}
    job = {"case": "gpt", "config": config, "batches": 30, "killed": [1, 2]}
    job["store"] = str(tmp_path / "store")
    with Processes(3, tmp_path, rank_alone.main, job, agent=False) as processes:
        exit_codes = processes.exit_codes()
    assert exit_codes == [1, -signal.SIGKILL, 1], processes.log_text()
    for rank in (0, 2):
        log = processes.logs[rank].read_text()
        assert f"rank {rank} of 3 lost the others, rank 1 first: " in log
        assert "another rank has ended, was killed, hangs, or cannot be reached" in log


def test_two_gpus_example_matches_single_process(tmp_path: Path) -> None:
    printed = []
    script = TESTS.parent / "examples" / "two_gpus.py"
    for count in (1, 2):
        (folder := tmp_path / str(count)).mkdir()
        with Processes(count, folder, forked.run_script, script, ()) as processes:
            processes.assert_success()
        lines = processes.logs[0].read_text().splitlines()
        printed.append([line for line in lines if line.startswith("step ")])
        assert all("step " not in log.read_text() for log in processes.logs[1:])
    assert len(printed[0]) == 10
    assert printed[0] == printed[1]


def test_process_group_creator_can_close_first(tmp_path: Path) -> None:
    (nvme := tmp_path / "nvme").mkdir()
    first, second = run_ranks(2, tmp_path, rank_alone.two_engines, nvme=str(nvme))
    assert first["state"].keys() == second["state"].keys()
    assert all(torch.equal(value, second["state"][n]) for n, value in first["state"].items())
    for found in (first, second):
        assert not found["left"]


def test_call_on_one_rank_only_is_reported(
    tmp_path: Path,
) -> None:
    job = {name: str(tmp_path / name) for name in ("nvme", "saves", "store")}
    (tmp_path / "nvme").mkdir()
    (waits, lost), others = run_ranks(2, tmp_path, rank_alone.save_on_one_rank, **job)
    assert "for other ranks to come where it is (compares the checkpoint to save)" in waits
    assert "`if rank == 0:`" in waits
    assert "rank 0 of 2 lost the others, for rank 1 closed the engine, or ended" in lost
    assert "this one compares the checkpoint to save" in lost
    assert others == []


def test_rank_that_closed_after_loss_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infinity.distributed.torch_context._LOSS_REPORT_S", 0.1)
    ranks = object.__new__(TorchDistContext)
    ranks.rank, ranks.count, ranks._closed_key = 1, 4, "closed-{}".format
    ranks._store = HashStore()
    for key in ("lost-0", "closed-0"):
        ranks._store.set(key, "")
    assert ranks._find_lost_ranks() == ({}, [2, 3])
    ranks._store = HashStore()
    ranks._store.set("closed-3", "ValueError: odd")
    assert ranks._find_lost_ranks() == ({3: "ValueError: odd"}, [])


def test_user_process_group_survives_repeated_close() -> None:
    """An error in initialize() may close it twice; that error must not be replaced."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = TorchDistContext(owned=False)
        ranks.close()
        ranks.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_destroyed_process_group_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.distributed.torch_context._LOSS_REPORT_S", 0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = TorchDistContext(owned=False)
    dist.destroy_process_group()
    with pytest.raises(LostRankError, match="this rank destroyed torch's process group"):
        ranks.broadcast(torch.zeros(1), 0)
