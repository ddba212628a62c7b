"""Tests of invalid input: one clear error, no leftovers, and an unchanged model."""

from __future__ import annotations

import math
import os
import threading
import traceback
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import HANG_S
from support.small import (
    ON_DEVICE,
    ON_DISK,
    SmallModel,
    assert_nothing_left,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.errors import (
    ConfigError,
    DoesNotFitError,
    InfinityError,
    MachineError,
    ResidencyError,
    TrainingError,
)
from infinity.storage.reservations import PROCESS
from infinity.storage.run_dir import Scratch

TIERS = ("device", "host", "disk")


def failed_initialize(
    kind: type[InfinityError],
    folder: Path,
    config: dict[str, Any],
    model: nn.Module | None = None,
    **arguments: Any,
) -> str:
    """Return the error message of a failed `initialize`; assert that nothing else changed."""
    model = small_model() if model is None else model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    threads = set(threading.enumerate())
    reserved = [PROCESS.total(t) for t in TIERS]
    with pytest.raises(kind) as caught:
        infinity.initialize(model, config, **arguments)
    assert_nothing_left(folder, threads)
    assert [PROCESS.total(t) for t in TIERS] == reserved
    assert same(dict(model.state_dict()), before)
    assert all(type(m._parameters) is dict for m in model.modules())
    text = str(caught.value)
    assert "try:" in text or "mistake in the configuration" in text
    return text


def test_missing_nvme_path_raises(tmp_path: Path) -> None:
    text = failed_initialize(MachineError, tmp_path, settings(tmp_path / "none"))
    assert f"{tmp_path / 'none'}" in text
    assert "mkdir -p" in text or "does not exist" in text


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE], ids=["disk", "device"])
def test_nvme_path_that_is_a_file_raises(tmp_path: Path, placement: dict[str, str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(MachineError, match="not a directory"):
        infinity.initialize(small_model(), settings(file, placement=placement))
    assert list(tmp_path.iterdir()) == [file]


def test_unwritable_nvme_path_raises(tmp_path: Path) -> None:
    """In /proc not even root can create files."""
    text = failed_initialize(MachineError, tmp_path, settings(Path("/proc/self/task")))
    assert "/proc/self/task" in text


def test_full_disk_raises_with_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs(tmp_path)

    class Full:
        f_bavail = 3
        f_frsize = 4096
        f_favail = facts.f_favail

    monkeypatch.setattr(os, "statvfs", lambda path: Full())
    text = failed_initialize(DoesNotFitError, tmp_path, settings(tmp_path))
    assert "12.00 KiB free" in text or "12.00 KiB" in text


def test_disk_full_during_reservation_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Scratch, required: int) -> None:
        raise DoesNotFitError("disk: full", remedy="free space")

    monkeypatch.setattr(Scratch, "check_space", full)
    assert "disk: full" in failed_initialize(DoesNotFitError, tmp_path, settings(tmp_path))


def test_disk_placement_without_nvme_path_raises(tmp_path: Path) -> None:
    config = settings(tmp_path)
    del config["nvme_path"]
    assert "nvme_path must be given" in failed_initialize(ConfigError, tmp_path, config)


def test_device_budget_below_two_slots_raises(tmp_path: Path) -> None:
    from support.fake_accelerator import FakeAccelerator

    fake = FakeAccelerator()
    config = settings(tmp_path, budget={"device": "16KiB"})
    model = small_model(width=64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(DoesNotFitError) as caught:
        infinity.initialize(model, config, device=fake)
    text = str(caught.value)
    assert "16.00 KiB cannot hold two slots of the largest unit" in text
    assert "raise budget.device to at least" in text
    assert same(dict(model.state_dict()), before)
    assert not list(tmp_path.iterdir())
    fake.close()


def test_host_budget_too_small_raises(tmp_path: Path) -> None:
    text = failed_initialize(
        DoesNotFitError, tmp_path, settings(tmp_path, ON_DISK, budget={"host": "1MiB"})
    )
    assert "1.00 MiB" in text
    assert "too much" in text or "cannot hold" in text


def test_budget_above_machine_memory_raises(tmp_path: Path) -> None:
    text = failed_initialize(ConfigError, tmp_path, settings(tmp_path, budget={"host": "900TiB"}))
    assert "budget.host" in text
    assert "may use at most" in text


def test_unknown_config_keys_suggest_similar(tmp_path: Path) -> None:
    config = settings(tmp_path, gradient_acumulation_steps=2, optimiser={"lr": 1})
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(small_model(), config)
    assert "gradient_accumulation_steps" in str(caught.value)
    assert "optimizer" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_unknown_unit_raises(tmp_path: Path) -> None:
    text = failed_initialize(ConfigError, tmp_path, settings(tmp_path), units=["nothing"])
    assert "'nothing'" in text


def test_meta_batch_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        wrong = batch(0).to("meta")
        for arguments in ((wrong,), ([{"x": wrong}],)):
            with pytest.raises(TrainingError, match=r"is on meta.*computes on cpu"):
                engine(*arguments)
        with pytest.raises(TrainingError, match="is on meta"):
            engine(tokens=wrong)
        assert len(train(engine, 1)) == 1


class Regression(nn.Module):
    """Regression on float inputs by the given layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        found: Tensor = self.layer(x).float().square().mean()
        return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1)], ids=str)
def test_float_input_dtype_mismatch_raises_or_is_cast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layer: nn.Module, precision: str
) -> None:
    x, dtype = torch.randn(2, 4, 4), {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    config = settings(tmp_path, precision=precision)
    with infinity.initialize(Regression(deepcopy(layer)), config, device="cpu")[0] as engine:
        with pytest.raises(TrainingError, match=r"float32, the engine[\s\S]*cast_inputs: true"):
            engine(x)
        expected = engine(x.to(dtype))
    caplog.set_level("INFO", "infinity")
    config["cast_inputs"] = True
    with infinity.initialize(Regression(deepcopy(layer)), config, device="cpu")[0] as engine:
        caplog.clear()
        assert torch.equal(engine(x, more={"ids": [torch.arange(3)]}), expected)
        engine.backward(engine(x=x))
        assert [record.message.split(":")[0] for record in caplog.records] == ["cast_inputs"]


def test_model_exception_propagates(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(IndexError):
            engine(torch.full((2, 4), 10_000))
        with pytest.raises(TypeError):
            engine()
        assert len(train(engine, 1)) == 1


def test_permanent_nan_loss_raises(tmp_path: Path) -> None:
    class Broken(SmallModel):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * math.nan

    with small_engine(tmp_path, model=Broken()) as engine:
        before = masters(engine)
        with pytest.raises(TrainingError, match="not finite") as caught:
            train(engine, 100)
        assert "learning rate" in str(caught.value)
        assert same(masters(engine), before)


# --- child processes -----------------------------------------------------------------------------


class TouchingDataset(Dataset[Tensor]):
    """Dataset whose rows each run a function that uses the engine or model in the worker."""

    def __init__(self, *touches: Callable[[], object]) -> None:
        self.touches = touches

    def __len__(self) -> int:
        return len(self.touches)

    def __getitem__(self, index: int) -> Tensor:
        self.touches[index]()
        return batch(index)[0]


def test_data_loader_worker_using_engine_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DEVICE) as engine:
        losses, expected = train(engine, 4), masters(engine)
    with small_engine(tmp_path) as engine:
        seen = train(engine, 2)
        module = engine.module
        touches = (
            lambda: engine(batch(0)),
            engine.step,
            lambda: module.norm.weight.sum(),
            lambda: module(batch(0)),
            lambda: module.state_dict(),
        )
        loader = DataLoader(
            TouchingDataset(*touches), num_workers=2, multiprocessing_context="fork", timeout=HANG_S
        )
        rows = iter(loader)
        for _ in touches:
            with pytest.raises((ResidencyError, RuntimeError), match="is a fork of it") as caught:
                next(rows)
            # The frames must not become cyclic garbage: finalized in any order, the loader's
            # pipes are closed before it can shut down its workers.
            traceback.clear_frames(caught.value.__traceback__)
        del caught, rows
        seen += train(engine, 2, first=2)
        assert seen == losses
        assert same(masters(engine), expected)


def test_data_loader_workers_do_not_affect_training(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        train(engine, 1)
        loader = DataLoader(
            TouchingDataset(*[lambda: None] * 4),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
        )
        for tokens in loader:
            engine.backward(engine(tokens))
            engine.step()
        assert engine.global_steps == 3


def test_fork_close_keeps_parent_scratch_directory(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        train(engine, 1)
        child = os.fork()
        if child == 0:
            try:
                engine.close()
                del engine
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert list(tmp_path.iterdir())
        assert len(train(engine, 1)) == 1


def test_file_as_checkpoint_directory_raises(tmp_path: Path) -> None:
    file = tmp_path / "afile"
    file.write_text("x")
    (tmp_path / "nvme").mkdir()
    with small_engine(tmp_path / "nvme", ON_DEVICE) as engine:
        for wrong in (
            lambda: engine.load_checkpoint(file),
            lambda: engine.save_checkpoint(file),
            lambda: engine.save_checkpoint(file / "below"),
            lambda: infinity.load_weights(engine, tmp_path / "nosuch"),
        ):
            with pytest.raises(InfinityError, match="try: "):
                wrong()
