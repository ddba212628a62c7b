"""Tests of expert stacks split into ranges: partitioning, initial values, training, hooks."""

from __future__ import annotations

import copy
import errno
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.models import CASES, Stacked, Stacks
from torch import nn

import infinity
from infinity.checkpoint.streams import frozen_segment_offset
from infinity.config.schema import load_config
from infinity.errors import ConfigError, ResidencyError, TrainingError
from infinity.model.meta_init import InitialValues
from infinity.model.outline import Outline, Shape
from infinity.model.partition import groups_of, partition_model
from infinity.model.quantized import quantize
from infinity.plan.forecast import forecast_bytes
from infinity.plan.layout import Segment, StackRows
from infinity.training import initial_write
from infinity.types import FrozenFormat


def partition(model: Any, experts: Any, **overrides: Any) -> Any:
    config = load_config({"experts_per_unit": experts, "precision": "bf16", **overrides})
    return partition_model(model, config, groups_of(model, config), None)


def test_ranges_cover_each_expert_once_in_layer_order() -> None:
    found = partition(Stacked(), 3)
    names = [unit.name for unit in found.units]
    ranges = [f"blocks.{b}.experts[{r}]" for b in (0, 1) for r in ("0:3", "3:6", "6:7")]
    assert [name for name in names if "[" in name] == ranges
    assert names.index("blocks.0") < names.index(ranges[0]) < names.index("blocks.1")
    segments = [s for unit in found.layouts for s in unit.segments]
    parameters = dict(Stacked().named_parameters())
    assert sum(s.numel for s in segments) == sum(p.numel() for p in parameters.values())
    assert all(s.full_shape == tuple(parameters[s.name].shape) for s in segments)


def test_auto_splits_only_large_expert_stacks() -> None:
    assert not any(unit.is_range for unit in partition(Stacked(), "auto").layouts)
    large = Outline()
    for index in range(4):
        layer = large.at(f"layers.{index}")
        layer.at("norm").direct["weight"] = Shape((7168, 64))
        experts = layer.at("mlp.experts")
        experts.infinity_stacks = ("gate_up_proj", "down_proj")
        experts.direct |= {
            "gate_up_proj": Shape((256, 4096, 7168)),
            "down_proj": Shape((256, 7168, 2048)),
        }
    layouts = partition(large, "auto").layouts
    ranges = [unit for unit in layouts if unit.is_range]
    assert len(ranges) == 4 * 43  # 6 experts of 84 MiB
    assert max(unit.slot_bytes for unit in ranges) <= 512 << 20


class UnalignedExperts(nn.Module):
    """Experts whose size is not a multiple of the blocks of the gradient norm's reduction tree."""

    infinity_stacks = ("up",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 3, 5))


def test_unsplittable_experts_reported_with_reason() -> None:
    model = nn.Sequential(UnalignedExperts(), nn.Linear(4, 4))
    assert partition(model, 1).notes == (
        "experts are stored with their layer, not in ranges: 0: an expert has 15 elements, no "
        "multiple of 4096",
    )
    partitioned = partition_model(
        Stacked(), load_config({"experts_per_unit": 1}), [{"params": []}], None
    )
    assert any(unit.is_range for unit in partitioned.layouts)  # frozen experts need no optimizer
    unnamed = nn.ModuleDict({"experts": nn.Module()})
    unnamed["experts"].register_parameter("w", nn.Parameter(torch.zeros(2, 4, 4)))
    assert "does not name its stacks" in partition(nn.ModuleDict({"mlp": unnamed}), "auto").notes[0]
    assert "no stacks of experts" in partition(nn.Linear(4, 4), 2).notes[0]


def test_invalid_infinity_stacks_rejected() -> None:
    model = Stacks()
    model.infinity_stacks = ("up", "sideways")
    with pytest.raises(ConfigError, match="'sideways' is none of its parameters"):
        partition(model, 1)
    model.infinity_stacks = "up"
    with pytest.raises(ConfigError, match="the string 'up'"):
        partition(model, 1)
    model = Stacks()
    model.up = nn.Parameter(torch.zeros(3, 256, 16))
    with pytest.raises(ConfigError, match="3 in up, 7 in down"):
        partition(model, 1)


@pytest.mark.parametrize("placement", ["disk", "host"])
def test_stack_values_computed_once_if_disk_available(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are buffered on disk; without a disk they are recomputed, with equal results."""
    computed: Counter[tuple[int, ...]] = Counter()
    value = InitialValues.value

    def count(self: InitialValues, tensor: torch.Tensor) -> torch.Tensor:
        computed[tuple(tensor.shape)] += 1
        return value(self, tensor)

    monkeypatch.setattr(InitialValues, "value", count)
    states, counts = [], []
    placements = dict.fromkeys(("weights", "optimizer_state", "gradients"), placement)
    for experts, path in ((7, tmp_path), (2, tmp_path), (2, None)):
        if placement == "disk" and path is None:
            continue
        torch.manual_seed(0)
        with infinity.Init(threshold_bytes=0):
            model = Stacked()
        config = {"nvme_path": path, "experts_per_unit": experts, "placement": placements}
        config |= {"optimizer": {"type": "AdamW", "lr": 1e-2}, "gradient_clipping": 0.5}
        computed.clear()
        with infinity.initialize(model, config, device="cpu")[0] as engine:
            states.append(dict(engine.state_dict(master=True)))
        counts.append(computed[7, Stacks.INNER, 16])
        assert not list(tmp_path.iterdir())
    assert counts == [2, 2, 8][: len(counts)]  # two layers in four ranges
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


@pytest.mark.parametrize("failing", ["readable", "cut short", "failing"])
def test_stack_values_recomputed_if_value_file_fails(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = initial_write._ValuesFile.read

    def fail(self: Any, first: int, count: int) -> torch.Tensor:
        if failing == "cut short":
            self._file.truncate(64)
        elif failing == "failing":
            raise OSError(errno.EIO, "Input/output error")
        return read(self, first, count)

    monkeypatch.setattr(initial_write._ValuesFile, "read", fail)
    torch.manual_seed(0)
    expected = Stacked().state_dict()
    torch.manual_seed(0)
    with infinity.Init(threshold_bytes=0):
        model = Stacked()
    config = {"nvme_path": tmp_path, "experts_per_unit": 2, "precision": "fp32"}
    config |= {"optimizer": {"type": "AdamW", "lr": 1e-2}, "gradient_clipping": 0.5}
    with infinity.initialize(model, config, device="cpu")[0] as engine:
        found = dict(engine.state_dict())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_durable_run_resumes_same_ranges_and_loads_into_others(tmp_path: Path) -> None:
    case, placement = (
        CASES["stacked"],
        {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    )
    config = {"nvme_path": tmp_path, "precision": "bf16", "placement": placement, "seed": 1,
              "optimizer": {"type": "AdamW", "lr": 1e-2}, "gradient_clipping": 0.5}  # fmt: skip
    durable = {"durable": True, "resume": "auto"}

    def train(first: int, end: int, load: Path | None = None, **overrides: Any) -> dict[str, Any]:
        engine, *_ = infinity.initialize(case.build(), {**config, **overrides}, device="cpu")
        if load is not None:
            engine.load_checkpoint(load)
        for batch in case.batches(end)[first:]:
            engine.backward(batch.call(engine))
            engine.step()
        found = dict(engine.state_dict(master=True))
        engine.close()
        return found

    expected = train(0, 4, experts_per_unit=7)
    train(0, 2, experts_per_unit=3, **durable)
    with pytest.raises(ConfigError, match="experts_per_unit"):
        train(2, 4, experts_per_unit=2, **durable)
    (run,) = tmp_path.iterdir()
    for found in (
        train(2, 4, load=run, experts_per_unit=2),
        train(2, 4, experts_per_unit=3, **durable),
    ):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", FrozenFormat)
def test_quantized_stack_rows_are_contiguous_bytes(form: FrozenFormat) -> None:
    shape = (6, 128, 128)
    value = torch.randn(shape)
    stack = torch.zeros(form.nbytes(shape), dtype=torch.uint8)
    quantize(value, form, stack)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        range_shape = (count, *shape[1:])
        rows = torch.zeros(form.nbytes(range_shape), dtype=torch.uint8)
        quantize(value[first : first + count], form, rows)
        segment = Segment(
            "w", 9, range_shape, "bfloat16", count * 128 * 128, rows.numel(), 0, False, -1, form,
            stack=StackRows(1, first, shape[0]),
        )  # fmt: skip
        start = frozen_segment_offset(segment)
        assert torch.equal(stack[start : start + rows.numel()], rows)


@pytest.mark.parametrize(
    ("slices", "checkpoint"), [(1, "units"), (2, "none"), (4, "units"), (8, "units")]
)
def test_slices_share_range_reads_as_forecast(slices: int, checkpoint: str, tmp_path: Path) -> None:
    """Each range is read once per forward, recomputation and backward, as forecast by the plan."""
    config = {
        "nvme_path": tmp_path,
        "placement": {"weights": "disk", "optimizer_state": "host", "gradients": "host"},
        "experts_per_unit": 1,
        "prefetch_units": 0,
        "activations": {"slices": slices, "checkpoint": checkpoint},
        "optimizer": {"lr": 1e-5},
    }
    engine, *_ = infinity.initialize(CASES["stacked"].build(), config, device=FakeAccelerator(0))
    expected = forecast_bytes(engine.plan)
    for step in range(3):  # enough tokens to route some to every expert
        ids = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(ids))
        engine.step()
    assert engine.last_report is not None
    assert engine.last_report.moved == expected
    ranges = sum(unit.slot_bytes for unit in engine.plan.units if unit.is_range)
    assert 3 * 0.6 * ranges < expected["disk_read"] < 3 * 1.2 * ranges
    engine.close()


class Variant(nn.Module):
    """Block of experts in a variant given by `kind`.

    It calls the experts twice ("twice"), applies dropout to their output ("draws"), uses another
    tensor that needs a gradient inside them ("past"), or leaves out padding ("padded").
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.experts = nn.Linear(16, Stacks.NUM_EXPERTS), Stacks()

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, -2)
        weight, expert = self.gate(flat).softmax(-1).max(-1)
        if self.kind == "past":
            scale = self.gate.weight.sum()
            self.experts.compute = lambda *args: Stacks.compute(self.experts, *args) * scale
        if self.kind == "padded":
            sent = flat.any(-1)
            found = torch.zeros_like(flat)
            found[sent] = self.experts(flat[sent], expert[sent])
        else:
            found = self.experts(flat, expert)
        if self.kind == "twice":
            found = found.tanh() + self.experts(found.tanh(), (expert + 1) % Stacks.NUM_EXPERTS)
        if self.kind == "draws":
            found = nn.functional.dropout(found, 0.5)
        return x + (weight.unsqueeze(-1) * found).view_as(x)


@pytest.mark.parametrize("kind", ["twice", "draws", "past", "padded"])
def test_sliced_ranges_match_unsplit_experts_or_raise(kind: str) -> None:
    runs = []
    for count in (Stacks.NUM_EXPERTS, 2):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Embedding(32, 16, 0), nn.ModuleList([Variant(kind), Variant(kind)]), nn.Linear(16, 4)
        )
        model.forward = lambda ids, m=model: m[2](m[1][1](m[1][0](m[0](ids)))).square().mean()
        config = {
            "precision": "fp32",
            "gradient_clipping": 0.0,
            "placement": dict.fromkeys(("optimizer_state", "gradients"), "host")
            | {"weights": "host"},
            "experts_per_unit": count,
            "prefetch_units": 0,
            "activations": {"slices": 2, "checkpoint": "units"},
            "optimizer": {"lr": 1e-2},
        }
        engine, *_ = infinity.initialize(model, config, device=FakeAccelerator(0))
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            ids = torch.randint(0, 32, (8, 6))
            ids[4:] *= kind != "padded"  # a slice without rows
            loss = engine(ids)
            losses.append(loss.item())
            if kind == "past" and count == 2:
                with pytest.raises(TrainingError, match="uses a tensor that needs a gradient"):
                    engine.backward(loss)
                engine.close()
                return
            engine.backward(loss)
            engine.step()
        runs.append((losses, dict(engine.state_dict())))
        engine.close()
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], value) for name, value in runs[1][1].items())


def in_ranges(model: nn.Module, experts: Any = 2, **overrides: Any) -> Any:
    config = {
        "precision": "fp32",
        "experts_per_unit": experts,
        "optimizer": {"lr": 1e-2},
        **overrides,
    }
    return infinity.initialize(model, config, device="cpu")[0]


BATCH = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
REGISTER = ("register_hook", "register_post_accumulate_grad_hook")


@pytest.mark.parametrize("register", REGISTER)
def test_stack_hook_runs_only_if_registered_before_initialize(register: str) -> None:
    """A layer whose stack has a hook before `initialize` is not split, so the hook runs."""
    calls: list[Any] = []
    model = Stacked()
    getattr(model.blocks[1].experts.up, register)(lambda tensor: calls.append(tensor.shape))
    with in_ranges(model) as engine:
        assert {u.name[:8] for u in engine.plan.units if u.is_range} == {"blocks.0"}
        engine.backward(engine(BATCH))
        assert calls == [model.blocks[1].experts.up.shape]
        experts = model.blocks[0].experts
        with pytest.raises(ResidencyError, match=rf"{register} of 'blocks.0.experts.up'"):
            getattr(experts.up, register)(calls.append)
        loss = engine(BATCH)
        with pytest.raises(ResidencyError, match=r"grad of 'blocks.0.experts.down'"):
            torch.autograd.grad(loss, [model.head.weight, experts.down], allow_unused=True)
        with engine.materialized(experts):
            getattr(experts.up, register)(calls.append)
        with pytest.raises(ResidencyError, match=r"a hook of 'blocks.0.experts.up'"):
            engine(BATCH)


def test_materialized_stack_gets_same_gradient() -> None:
    found = []
    for in_block in (False, True):
        torch.manual_seed(0)
        model = Stacked()
        with in_ranges(model) as engine:
            experts = model.blocks[0].experts
            with engine.materialized(experts) if in_block else nullcontext():
                model(BATCH).backward()
            used = {n: p for n, p in model.named_parameters() if "experts" in n or "embed" in n}
            found.append({name: engine.gradient(p) for name, p in used.items()})
    assert found[0]["blocks.0.experts.up"].any()
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("experts", ["auto", 2])
def test_experts_empty_batch_gives_zero_gradients(experts: Any) -> None:
    model = Stacked()
    stacks = model.blocks[0].experts
    with in_ranges(model, experts) as engine:
        found = stacks(torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))
        assert found.shape == (0, 16)
        assert found.dtype == torch.float32
        assert found.requires_grad
        engine.backward(found.sum())
        assert not engine.gradient(stacks.up).any()
        assert not engine.gradient(stacks.down).any()


def test_penalty_on_split_stack_raises_and_remedy_matches() -> None:
    found = []
    for experts in ("auto", 2):
        torch.manual_seed(0)
        model = Stacked()
        stack = model.blocks[0].experts.down
        with in_ranges(model, experts) as engine:
            loss = engine(BATCH)
            if experts == "auto":
                loss = loss + stack.square().sum() / 2
            else:
                with pytest.raises(ResidencyError, match=r"engine\.set_gradient") as error:
                    stack.square()
                assert "'blocks.0.experts.down' was read where" in str(error.value)
                assert "prefetch_units" not in str(error.value)
                with torch.no_grad():
                    penalty = stack.clone()
            engine.backward(loss)
            if experts == 2:
                engine.set_gradient(stack, engine.gradient(stack) + penalty)
            found.append(engine.gradient(stack))
    torch.testing.assert_close(found[1], found[0])


def test_compile_skips_blocks_in_ranges_and_raises_if_none_left() -> None:
    model = Stacked()
    hook = model.blocks[1].experts.up.register_hook(lambda gradient: None)
    with in_ranges(model, compile=True) as engine:
        assert components(engine).forwards.num_compiled == 1
    hook.remove()
    with pytest.raises(ConfigError, match="no block that can be compiled"):
        in_ranges(Stacked(), compile=True)


def test_module_of_the_page_matches_plain_torch(tmp_path: Path) -> None:
    """The code of docs/moe.md, once with all experts at once, once range by range."""
    page = Path(__file__).parents[3] / "docs/moe.md"
    (code,) = re.findall(r"```python\n(.*?class Experts.*?)```", page.read_text(), re.DOTALL)
    names = {"torch": torch, "nn": nn, "F": torch.nn.functional}
    exec(code, names)
    torch.manual_seed(0)
    plain: Any = names["Experts"](4, 64, 64)
    model = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    x, expert = torch.randn(10, 64), torch.arange(10) * 4 // 10
    expected = plain(x, expert)
    expected.square().sum().backward()
    model.forward = lambda: model["experts"](x, expert).square().sum()
    config = {"precision": "fp32", "experts_per_unit": 1, "nvme_path": str(tmp_path)}
    with infinity.initialize(model, config, device="cpu")[0] as engine:
        assert sum(unit.is_range for unit in engine.plan.units) == 4
        engine.backward(engine())
        for name in ("up", "down"):
            gradient = engine.gradient(getattr(model["experts"], name))
            torch.testing.assert_close(gradient, getattr(plain, name).grad)
