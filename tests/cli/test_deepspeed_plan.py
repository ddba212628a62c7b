"""Tests of `infinity plan ds_config.json`: key table, and equality with a native plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.test_plan_command import DESKTOP, GIB, TINY, answer, run

HF = {  # as in the Hugging Face documentation: values that a Trainer fills in are auto
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if rates are measured: plans for an absent GPU use nominal rates."""

    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("this machine was measured")

    monkeypatch.setattr("infinity.profiling.calibration.cached_rates", never)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Return the paths of a DeepSpeed configuration and of a model."""
    (tmp_path / "ds_config.json").write_text(json.dumps(HF))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "ds_config.json"), str(tmp_path / "config.json")


def test_key_table_precedes_plan(files: tuple[str, str]) -> None:
    code, out, error = run(files[0], "--model", files[1], *DESKTOP)
    assert (code, error) == (0, "")
    table, _, plan = out.partition("\n\n")
    assert table.startswith("the DeepSpeed configuration, key by key:")
    assert len(table.splitlines()) == 1 + 24
    for text in (
        '  zero_optimization.offload_optimizer.device     "nvme"',
        "done      optimizer state: on disk",
        "auto: a plan does not depend on it",
        "left out of the plan: total_num_steps, warmup_num_steps is auto",
        "auto was not resolved: bf16",
    ):
        assert text in table, text
    assert "memory      device" in plan


def test_plan_equals_plan_of_equivalent_configuration(
    files: tuple[str, str], tmp_path: Path
) -> None:
    imported = answer(files[0], "--model", files[1], *DESKTOP)
    native = {
        "placement": {"weights": "host", "optimizer_state": "disk"},
        "nvme_path": "/local_nvme",
        "gradient_accumulation_steps": 1,
    }
    (tmp_path / "ours.json").write_text(json.dumps(native))
    expected = answer(str(tmp_path / "ours.json"), "--model", files[1], *DESKTOP)
    rows = imported.pop("deepspeed")
    assert "deepspeed" not in expected
    assert imported == expected
    assert imported["machine"]["device_bytes"] == 24 * GIB
    assert set(imported["plan"]["placement"]["moments and residual"]) == {"disk"}
    assert {row["key"]: row["verdict"] for row in rows}["zero_optimization.stage"] == "done"
    assert all(set(row) == {"key", "given", "verdict", "note"} for row in rows)


def test_options_override_configuration(files: tuple[str, str]) -> None:
    report = answer(
        files[0], "--model", files[1], *DESKTOP, "--precision", "fp32", "--moments", "8bit"
    )
    assert report["work"]["precision"] == "fp32"
    assert report["plan"]["lossy"]


def test_batch_sizes_are_global(files: tuple[str, str], tmp_path: Path) -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({**HF, **sizes, "gradient_accumulation_steps": 2}))
    report = answer(str(path), "--model", files[1], *DESKTOP, "--gpus", "2")
    assert "2 micro-batches" in report["schedule"]["line"]
    code, _, error = run(str(path), "--model", files[1], *DESKTOP)
    assert code == 2
    assert "x 1 process; " in error
    assert "they are right for 2 processes" in error


def test_configuration_with_comments(files: tuple[str, str]) -> None:
    path = Path(files[0])
    path.write_text("// mine\n" + path.read_text())
    assert answer(files[0], "--model", files[1], *DESKTOP)["fits"]


def test_configuration_without_model_is_refused(files: tuple[str, str]) -> None:
    code, out, error = run(files[0], *DESKTOP)
    assert (code, out) == (2, "")
    assert "is a configuration, which names no model" in error
    assert "--model 7b" in error


def test_configuration_errors_are_one_message(files: tuple[str, str]) -> None:
    Path(files[0]).write_text(json.dumps({**HF, "amp": {"enabled": True}, "zero_optimisation": 1}))
    code, out, error = run(files[0], "--model", files[1], *DESKTOP)
    assert (code, out) == (2, "")
    assert f"2 mistakes in {files[0]}:" in error
    assert "did you mean 'zero_optimization'?" in error
    assert "apex is not used" in error
