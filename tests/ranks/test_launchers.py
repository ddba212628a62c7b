"""Tests of launched programs: two agents as two nodes, `infinity doctor`, and bench_ranks."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks.test_processes import HANG_S, TESTS, Processes, has_loopback
from support.models import CASES
from support.trainer import make_config, train_reference

from infinity.cli.main import main
from infinity.plan.plan import LINKS
from infinity.profiling.link_rates import read_cached_links
from infinity.storage.device import CpuDevice

pytestmark = [
    pytest.mark.timeout(2 * HANG_S),
    pytest.mark.skipif(not has_loopback(), reason="127.0.0.1 cannot be reached from itself"),
]
EXAMPLE = TESTS.parent / "examples" / "two_gpus.py"


def run_commands(*commands: list[str], environments: Sequence[dict[str, str]] = ({},)) -> list[str]:
    """Run the commands concurrently; return the stdout of each, which must succeed."""
    base_environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=base_environment | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, extra in zip(commands, itertools.cycle(environments), strict=False)
    ]
    try:
        found = [process.communicate(timeout=HANG_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(running, found, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in found]


def agent_command(*script: str, ranks: int = 1) -> list[str]:
    """Return the command of one of two agents, each of which is a node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--local-addr", "127.0.0.1", *script),
    ]


@pytest.mark.big
def test_two_agents_match_single_process() -> None:
    """A node's budget is divided among its ranks only: here it has one."""
    single = run_commands([str(EXAMPLE)])[0]
    printed = run_commands(*[agent_command(str(EXAMPLE))] * 2)
    nodes = "".join(printed)
    steps = [re.findall(r"^step .*$", text, re.MULTILINE) for text in (single, nodes)]
    assert len(steps[0]) == 10
    assert steps[0] == steps[1]
    assert "rank 0 of 2" in nodes
    budgets = [float(re.findall(r"RAM +\S+ \w+ of ([\d.]+) GiB", t)[0]) for t in (single, nodes)]
    assert budgets[1] > 0.7 * budgets[0], "the machine's RAM, less what other processes hold"


@pytest.mark.big
def test_each_node_stores_state_on_local_drive(tmp_path: Path) -> None:
    case, config = CASES["gpt"], make_config(("disk", "disk", "disk"))
    job = {
        "case": case.name,
        "config": config | {"durable": True},
        "batches": 6,
        "out": str(tmp_path / "out"),
    }
    nodes = [tmp_path / name for name in ("one", "two")]
    for node in nodes:
        node.mkdir()
    environments = [{"JOB": json.dumps(job), "NVME": str(node)} for node in nodes]
    run_commands(
        *[agent_command(str(TESTS / "support" / "node_alone.py"))] * 2, environments=environments
    )
    ranks = sorted(path.name for node in nodes for path in node.iterdir())
    assert ranks == ["rank-0", "rank-1"]  # one on each node
    assert all(len(list(node.glob("rank-*/infinity-run-*"))) == 1 for node in nodes)
    single_config = config | {"gradient_accumulation_steps": 2}
    expected = train_reference(case.build(), case.batches(6), single_config, groups=case.groups)
    for rank in range(2):
        masters = torch.load(tmp_path / f"out-{rank}")["masters"]
        assert all(torch.equal(masters[n], value) for n, value in expected.masters.items())


def test_doctor_measures_links_between_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "machine.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["doctor", "--json", "--machine-file", str(file)]
    with Processes(2, tmp_path, main, arguments) as processes:
        processes.assert_success()
    outputs = [re.findall(r"^{.*$", log.read_text(), re.MULTILINE) for log in processes.logs]
    assert list(map(len, outputs)) == [1, 0]
    facts = json.loads(outputs[0][0])
    links = facts["links"]
    assert (links["gpus"], links["nodes"]) == (2, 1)
    assert set(links["rates"]) == set(LINKS)
    cached = read_cached_links(CpuDevice(), 2, 1)
    if not facts["torch"]["accelerators"]:
        assert cached == (links["rates"], links["measured"])
    machine = json.loads(file.read_text())
    assert machine["gpus"] == 2
    assert machine["rates"]["all_gather"] == pytest.approx(links["rates"]["all_gather"], rel=1e-3)


@pytest.mark.big
def test_doctor_measures_links_within_and_between_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = agent_command(
        str(Path(sys.executable).with_name("infinity")), "doctor", "--json", ranks=2
    )
    outputs = "".join(run_commands(command, command))
    links = json.loads(re.findall(r"^{.*$", outputs, re.MULTILINE)[0])["links"]
    assert (links["gpus"], links["nodes"]) == (2, 2)
    assert set(links["rates"]) == {*LINKS, "between_nodes", "between_hosts"}
    cached, _ = read_cached_links(CpuDevice(), 2, 5) or ({}, "")
    assert set(cached) == set(links["rates"])
    assert cached["between_nodes"] == links["rates"]["between_nodes"]


@pytest.mark.big
def test_bench_ranks_contenders_compute_equal_losses(tmp_path: Path) -> None:
    """All start from one model and see the same batches; bytes equal the prediction."""
    command = [str(TESTS.parent / "tools" / "bench_ranks.py"), "--model", "gpt-tiny"]
    command += ["--rounds", "1", "--warmup", "1", "--tokens", "128", "--path", str(tmp_path)]
    names = ["infinity_ram", "ddp", "deepspeed_2", "deepspeed_3"]
    command += ["--only", ",".join(names), "--json"]
    report = json.loads(run_commands(command)[0])
    found = report["contenders"]
    assert {"infinity_ram", "ddp"} <= set(found)
    assert found.keys() | report["skipped"].keys() == set(names)
    infinity_result, ddp = found["infinity_ram"], found["ddp"]
    for name, other in found.items():
        assert other["loss"] == pytest.approx(infinity_result["loss"], rel=1e-6), name
    for link in LINKS:
        assert infinity_result["moved_bytes"][link] == infinity_result["predicted_bytes"][link] > 0
    sent = 2 * sum(infinity_result["moved_bytes"][link] for link in LINKS)
    assert 0.9 * sent < infinity_result["loopback_bytes"], "counted bytes must cross the interface"
    assert ddp["loopback_bytes"] > 1.5 * 4 * report["num_parameters"]
    assert report["bound"]["infinity_ram"] > 0
    assert {"ddp/infinity_ram", "infinity_ram/schedule"} <= set(report["ratio"])
    assert list(tmp_path.iterdir()) == []
