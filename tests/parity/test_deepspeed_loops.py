"""Tests of loops written for DeepSpeed, with only the import changed, against plain torch."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.models import CASES
from support.small import masters
from support.trainer import same_bits, train_reference, train_torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from infinity.config.schema import load_config
from infinity.integrations import deepspeed

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tutorial() -> ModuleType:
    """Import examples/deepspeed_style.py."""
    path = REPOSITORY / "examples" / "deepspeed_style.py"
    spec = importlib.util.spec_from_file_location("deepspeed_style", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train_plain_torch(tutorial: ModuleType, config: dict[str, Any]) -> tuple[list[float], Any]:
    """Run the same loop without an engine, with the configuration written out in torch."""
    torch.manual_seed(0)
    model = tutorial.Mlp()
    optimizer_params = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, weight_decay=optimizer_params["weight_decay"]
    )
    warmup = config["scheduler"]["params"]
    losses: list[float] = []
    steps, window = 0, config["gradient_accumulation_steps"]
    data = tutorial.make_data()
    order = DistributedSampler(data, num_replicas=1, rank=0)  # DeepSpeed's order of samples
    size = config["train_micro_batch_size_per_gpu"]
    for inputs, labels in DataLoader(data, size, sampler=order):
        loss = nn.CrossEntropyLoss()(model(inputs), labels)
        (loss / window).backward()
        losses.append(loss.item())
        if len(losses) % window == 0:
            nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
            # DeepSpeed runs its first two steps at the lowest rate
            done = max(steps - 1, 0) / warmup["warmup_num_steps"]
            optimizer.param_groups[0]["lr"] = warmup["warmup_max_lr"] * min(1.0, done)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return losses, model.state_dict()


@pytest.mark.parametrize("loop", ["none", "stage1", "stage3"])
def test_deepspeed_loop_matches_plain_torch(
    tutorial: ModuleType, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, weights = tutorial.train(None, tutorial.CONFIGS[loop])
    expected, values = train_plain_torch(tutorial, tutorial.CONFIGS[loop])
    assert len(losses) == 64
    assert losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx(expected, rel=2e-5)
    for name, value in values.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    assert "step  32" in capsys.readouterr().out


# --- accumulation x offload x precision ----------------------------------------------------------

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {"stage": 0},
    "stage2_cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage3_nvme": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme"},
    },
}


def engine_loop(engine: deepspeed.Engine, loss: Tensor, steps: int) -> None:
    engine.backward(loss)
    engine.step()


def tensor_backward_loop(engine: deepspeed.Engine, loss: Tensor, steps: int) -> None:
    loss.backward()
    engine.step()


def accelerate_loop(engine: deepspeed.Engine, loss: Tensor, steps: int) -> None:
    """Step as accelerate's wrapper: set the boundary every time, step in the last micro-batch."""
    count = vars(engine).setdefault("_test_count", 0) + 1
    vars(engine)["_test_count"] = count
    engine.set_gradient_accumulation_boundary(is_boundary=count % steps == 0)
    engine.backward(loss / steps, scale_wrt_gas=False)
    if count % steps == 0:
        engine.step()


def unmanaged_window_loop(engine: deepspeed.Engine, loss: Tensor, steps: int) -> None:
    """Let the calls of `step` define the accumulation window."""
    count = vars(engine).setdefault("_test_count", 0) + 1
    vars(engine)["_test_count"] = count
    engine.backward(loss)
    if count % steps == 0:
        engine.step()


def offload_section(name: str, path: Path) -> dict[str, Any]:
    """Return a section of `OFFLOADS` with `nvme_path` set."""
    zero = copy.deepcopy(OFFLOADS[name])
    for section in zero.values():
        if isinstance(section, dict) and section["device"] == "nvme":
            section["nvme_path"] = str(path)
    return zero


@pytest.mark.parametrize(
    ("loop", "steps", "precision", "offload"),
    [
        *diagonal(
            [engine_loop, tensor_backward_loop, accelerate_loop],
            [2, 4, 1],
            ["fp32", "bf16"],
            [*OFFLOADS],
        ),
        (accelerate_loop, 4, "bf16", "stage3_nvme"),
        (unmanaged_window_loop, 4, "bf16", "stage3_nvme"),
    ],
)
def test_loop_style_by_accumulation_and_offload_is_bitwise_equal(
    tmp_path: Path, offload: str, precision: str, steps: int, loop: Callable[..., None]
) -> None:
    """The reference is the explicit update rule on plain torch's gradients, bit for bit."""
    case = CASES["gpt"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "managed_gradient_accumulation": loop is not unmanaged_window_loop,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": offload_section(offload, tmp_path),
        "infinity": {"cpu": {"num_threads": 1}, "chunk_size": 2048},
    }
    batches = case.batches(3 * steps)
    expected = train_reference(
        case.build(),
        batches,
        load_config(deepspeed.translate_deepspeed(config).config).model_dump(exclude_unset=True),
    )
    engine, *_ = deepspeed.initialize(
        model=case.build(), config=config, device=FakeAccelerator(1, max_delay_s=0.001)
    )
    losses = []
    with engine:
        for batch in batches:
            loss = batch.call(engine)
            loop(engine, loss, steps)
            losses.append(loss.item())
        assert engine.global_steps == 3
        assert losses == expected.losses
        found = masters(engine)
    for name, value in expected.masters.items():
        assert same_bits(found[name], value), name


@pytest.mark.parametrize(("offload", "steps"), diagonal([*OFFLOADS], [1, 2, 4]))
def test_fp16_is_close_to_fp32(tmp_path: Path, offload: str, steps: int) -> None:
    case = CASES["gpt"]
    config = {
        "train_batch_size": 2 * steps,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": offload_section(offload, tmp_path),
        "infinity": {"cpu": {"num_threads": 1}, "chunk_size": 2048},
    }
    batches = case.batches(3 * steps)
    plain = {
        "precision": "fp32",
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0},
    }
    expected = train_torch(case.build(), batches, plain)
    engine, *_ = deepspeed.initialize(model=case.build(), config=config)
    losses = []
    with engine:
        for batch in batches:
            loss = batch.call(engine)
            engine.scale(loss).backward()
            engine.step()
            losses.append(loss.item())
        assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    assert losses == pytest.approx(expected.losses, rel=5e-3)
