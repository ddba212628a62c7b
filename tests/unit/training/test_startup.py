"""Tests of a failing `initialize`: cleanup of its resources and of those passed to it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    assert_nothing_left,
    settings,
    small_model,
)
from torch import nn, optim
from torch.utils.data import TensorDataset

import infinity
from infinity import _initialize
from infinity._initialize import make_current
from infinity.config.schema import load_config
from infinity.errors import (
    ConfigError,
    DoesNotFitError,
    InfinityError,
    InfinityWarning,
    MachineError,
)
from infinity.model.parameter_map import LostParameters
from infinity.storage.device import CpuDevice, Device
from infinity.storage.reservations import PROCESS
from infinity.training import run_plan
from infinity.training.run_plan import limits_for
from infinity.types import Tier

PLACEMENTS = {"disk": ON_DISK, "device": ON_DEVICE, "mixed": MIXED}


class CountingDevice(FakeAccelerator):
    """Accelerator that counts calls of `close`."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1
        super().close()


class CountingCpu(CpuDevice):
    """CPU device that counts calls of `close`."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def interrupt(done: int, total: int, what: str) -> None:
    raise KeyboardInterrupt


def failing_scheduler(optimizer: Any) -> Any:
    raise ValueError("a schedule that fails")


# Causes of a failing `initialize`, from early to late.
FAILURES: dict[str, tuple[type[BaseException], dict[str, Any], dict[str, Any]]] = {
    "optimizer": (ConfigError, {}, {"optimizer": optim.LBFGS}),
    "plan": (DoesNotFitError, {"budget": {"host": "1MiB"}}, {}),
    "scheduler": (ValueError, {}, {"lr_scheduler": failing_scheduler}),
    "initial_write": (KeyboardInterrupt, {}, {"progress": interrupt}),
    "loader": (ValueError, {}, {"training_data": TensorDataset(torch.ones(2)), "batch_size": -1}),
}


def fail_initialize(name: str, path: Path, device: Any, placement: dict[str, str]) -> None:
    kind, more, arguments = FAILURES[name]
    config = {**settings(path, placement), **more}
    if "optimizer" in arguments:
        del config["optimizer"]
    before = PROCESS.total("host")
    with pytest.raises(kind):
        infinity.initialize(small_model(), config, device=device, **arguments)
    assert PROCESS.total("host") == before


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", FAILURES)
def test_passed_device_closed_on_initialize_failure(
    tmp_path: Path, name: str, placement: str
) -> None:
    threads = set(threading.enumerate())
    device = CountingDevice(1)
    fail_initialize(name, tmp_path, device, PLACEMENTS[placement])
    assert device.num_closed >= 1
    assert_nothing_left(tmp_path, threads)


@pytest.mark.parametrize("name", FAILURES)
def test_found_device_closed_on_initialize_failure(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CountingCpu] = []

    def find(device: Any) -> Device:
        found.append(CountingCpu())
        return found[-1]

    monkeypatch.setattr(_initialize, "resolve_device", find)
    fail_initialize(name, tmp_path, "cpu", MIXED)
    assert found[0].num_closed >= 1


@pytest.mark.parametrize("passed", [False, True])
def test_warning_as_error_leaves_nothing_behind(
    tmp_path: Path, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step that can fail, after the memory of the parameters has been freed."""
    monkeypatch.setattr(infinity.Engine, "warnings", property(lambda engine: ("slow",)))
    model, threads = small_model(), set(threading.enumerate())
    device, before = CountingCpu(), PROCESS.total("host")
    with warnings.catch_warnings():
        warnings.simplefilter("error", InfinityWarning)
        with pytest.raises(InfinityWarning, match="slow"):
            infinity.initialize(model, settings(tmp_path), device=device if passed else "cpu")
    assert device.num_closed >= passed
    assert_nothing_left(tmp_path, threads)
    assert PROCESS.total("host") == before
    assert all(type(m._parameters) is LostParameters for m in model.modules())


# --- standalone optimizers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [infinity.CPUAdam, infinity.FusedAdam])
def test_standalone_optimizer_factory_rejected_with_remedy(
    tmp_path: Path, kind: type[optim.Optimizer]
) -> None:
    """Classes and instances are mapped to the built-in rule: see test_deepspeed_modules.py."""
    model = nn.Linear(3, 3)
    config = settings(tmp_path)
    del config["optimizer"]
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(
            model, config, optimizer=lambda groups: kind(groups, lr=1e-3, moments="bf16")
        )
    text = str(caught.value)
    assert "standalone" in text
    assert kind.__name__ in text
    assert '{"type": "AdamW"' in text
    assert "torch.optim.AdamW" in text
    assert "for CUDA parameters" not in text
    assert not list(tmp_path.iterdir())


def test_second_engine_gpu_budget_subtracts_first() -> None:
    """Free memory already excludes the first engine's, which must not be subtracted twice."""

    class Card:
        unified = False
        torch_device = torch.device("cuda", 0)
        free = 80 << 30
        cleared = 0

        def return_freed_memory(self) -> None:
            self.cleared += 1

        def memory_bytes(self) -> int:
            return self.free - (0 if self.cleared else 1 << 30)

    class Owner:
        pass

    card, other, first, promise = Card(), Card(), Owner(), Owner()
    other.torch_device = torch.device("cuda", 1)
    budget_config = {"budget": {"device": "64GiB"}}

    def budgets() -> list[float]:
        return [
            round((limits_for(load_config(config), device, nn.Linear(4, 4)).device or 0) / 2**30)
            for config in ({}, budget_config)
            for device in (card, other)
        ]

    try:
        assert budgets() == [72, 72, 64, 64]
        PROCESS.take(first, {Tier.DEVICE: 45 << 30}, card)
        card.free -= 45 << 30
        assert budgets() == [27, 72, 19, 64]
        PROCESS.take(promise, {Tier.DEVICE: 10 << 30}, card, pending=True)
        assert budgets() == [17, 72, 9, 64]
    finally:
        PROCESS.release(first)
        PROCESS.release(promise)


def test_gpu_parameters_not_subtracted_from_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(4, 4)
    before = limits_for(load_config({}), CpuDevice(), model).base
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr(run_plan, "storage_address", lambda tensor: pytest.fail("accessed"))
    assert limits_for(load_config({}), CpuDevice(), model).base == pytest.approx(before, rel=0.1)


def test_make_current_sets_gpu_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", set_devices.append)
    for count in (1, 2):
        for device in (torch.device("cpu"), torch.device("cuda", 1)):
            make_current(device, SimpleNamespace(count=count))
    assert set_devices == [torch.device("cuda", 1)]


EXPLICIT = {"precision": "fp32", "gradient_clipping": 0.0, "optimizer": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ((), ""),
        (("precision",), "precision is bf16;"),
        (("gradient_clipping", "optimizer"), "gradient_clipping is 1, optimizer.lr is 0.001;"),
    ],
)
def test_defaulted_config_values_warned(missing: tuple[str, ...], message: str) -> None:
    config = {name: value for name, value in EXPLICIT.items() if name not in missing}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        infinity.initialize(nn.Linear(4, 4), config)[0].close()
    texts = [str(one.message) for one in found if issubclass(one.category, InfinityWarning)]
    assert len(texts) == bool(message)
    assert all(message in text for text in texts)
    assert all(
        one.filename == __file__ for one in found if issubclass(one.category, InfinityWarning)
    )


def test_lr_of_groups_and_optimizers_not_warned() -> None:
    config = {name: EXPLICIT[name] for name in ("precision", "gradient_clipping")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", InfinityWarning)
        model = nn.Linear(4, 4)
        groups = [{"params": [p], "lr": 0.1} for p in model.parameters()]
        infinity.initialize(model, config, model_parameters=groups)[0].close()
        model = nn.Linear(4, 4)
        infinity.initialize(model, config, optimizer=optim.SGD(model.parameters(), lr=0.1))[
            0
        ].close()
        model = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        infinity.initialize(model, {})[0].close()


def test_engine_repr() -> None:
    with infinity.initialize(nn.Linear(4, 4), EXPLICIT)[0] as engine:
        assert repr(engine).startswith(
            "Engine(Linear on cpu: 20 trained parameters in fp32 by AdamW; "
        )
        assert "weights in " in repr(engine)


def test_missing_path_error_has_no_cause(tmp_path: Path) -> None:
    for config in ({"nvme_path": str(tmp_path / "no")}, str(tmp_path / "no.yaml")):
        with pytest.raises(InfinityError) as caught:
            infinity.initialize(nn.Linear(4, 4), config)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    with pytest.raises(MachineError, match="/no does not exist\n  try: mkdir -p "):
        infinity.initialize(nn.Linear(4, 4), {"nvme_path": str(tmp_path / "no")})
