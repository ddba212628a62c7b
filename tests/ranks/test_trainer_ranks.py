"""Tests of `InfinityTrainer` on ranks started as by torchrun, against a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.test_processes import Processes, pytestmark  # noqa: F401
from support import trainer_rank

ARGUMENTS = {
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "use_cpu": False,  # set by `TrainingArguments` where it is needed
}


def job(count: int, out: Path, **extra: Any) -> dict[str, Any]:
    arguments = {**ARGUMENTS, "gradient_accumulation_steps": 4 // count}
    arguments["per_device_eval_batch_size"] = 4 // count  # Trainer counts their labels together
    return {"out": str(out), "arguments": arguments, **extra}


def assert_same(found: list[dict[str, Any]], single: dict[str, Any]) -> None:
    """Check that weights and norms are bitwise equal, and logs close: sums have another order."""
    for one in found:
        assert one["ranks"] == len(found)
        for name, value in single["masters"].items():
            assert torch.equal(one["masters"][name], value), name
        torch.testing.assert_close(one["predicted"], single["predicted"])
    logged, expected = (
        [entry for entry in one["history"] if "train_loss" not in entry]  # since the last resume
        for one in (found[0], single)
    )
    assert [set(entry) for entry in logged] == [set(entry) for entry in expected]
    for actual, expected_entry in zip(logged, expected, strict=True):
        assert actual == pytest.approx(expected_entry, rel=1e-5)
        assert actual.get("grad_norm") == expected_entry.get("grad_norm")


def test_trainer_on_two_ranks_matches_single_rank(tmp_path: Path) -> None:
    single, two, resumed = (tmp_path / name for name in ("alone", "two", "on"))
    trainer_rank.main([job(1, single)])
    jobs = [job(2, two), job(2, resumed, resume=str(single / "checkpoint-2"))]
    with Processes(2, tmp_path, trainer_rank.main, jobs) as processes:
        processes.assert_success()
    expected = torch.load(f"{single}-0")
    for out in (two, resumed):
        assert_same([torch.load(f"{out}-{rank}") for rank in range(2)], expected)
    evaluated = [entry for entry in expected["history"] if "eval_hits" in entry]
    assert {entry["eval_samples"] for entry in evaluated} == {8.0}
    files = [sorted(str(path.relative_to(out)) for path in out.rglob("*")) for out in (single, two)]
    assert files[0] == files[1]
    model = [(out / "model" / "model.safetensors").read_bytes() for out in (single, two)]
    assert model[0] == model[1]
