"""`InfinityTrainer` under torchrun: N ranks train, evaluate, save and go on as one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.test_processes import pytestmark, run_ranks  # noqa: F401

ARGUMENTS = {
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


def trained(count: int, folder: Path, **job: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    arguments = {**ARGUMENTS, "gradient_accumulation_steps": 4 // count}
    arguments["per_device_eval_batch_size"] = 4 // count  # whose labels Trainer counts together
    path = folder / "job.json"
    path.write_text(json.dumps({"out": str(folder / "out"), "arguments": arguments, **job}))
    run_ranks(count, "support.trainer_rank", path)
    return [torch.load(folder / f"out-{rank}") for rank in range(count)]


def assert_same(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Weights and norms bit for bit; what is logged is summed in another order."""
    for one in found:
        assert one["ranks"] == len(found)
        for name, value in alone["masters"].items():
            assert torch.equal(one["masters"][name], value), name
        torch.testing.assert_close(one["predicted"], alone["predicted"])
    logged, expected = (
        [entry for entry in one["history"] if "train_loss" not in entry]  # since a run began again
        for one in (found[0], alone)
    )
    assert [set(entry) for entry in logged] == [set(entry) for entry in expected]
    for mine, theirs in zip(logged, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert mine.get("grad_norm") == theirs.get("grad_norm")


def test_two_ranks_are_as_one_from_the_start_and_from_its_checkpoint(tmp_path: Path) -> None:
    (alone,) = trained(1, tmp_path / "alone")
    found = trained(2, tmp_path / "two")
    assert_same(found, alone)
    evaluated = [entry for entry in alone["history"] if "eval_hits" in entry]
    assert {entry["eval_samples"] for entry in evaluated} == {8.0}
    files = [
        sorted(str(p.relative_to(tmp_path / n / "out")) for p in (tmp_path / n / "out").rglob("*"))
        for n in ("alone", "two")
    ]
    assert files[0] == files[1]
    model = [(tmp_path / n / "out" / "model" / "model.safetensors") for n in ("alone", "two")]
    assert model[0].read_bytes() == model[1].read_bytes()
    checkpoint = str(tmp_path / "alone" / "out" / "checkpoint-2")
    assert_same(trained(2, tmp_path / "on", resume=checkpoint), alone)
