"""Tests of `activations.checkpoint: units` against a model with its own checkpoints.

Recomputation changes the computation, so the reference is plain torch with
`torch.utils.checkpoint` around the same blocks. Offloading of saved inputs does not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.grids import diagonal
from support.internals import components
from support.models import (
    CASES,
    CHECKPOINTINGS,
    LENGTH,
    WIDTH,
    Batch,
    Case,
    Checkpointing,
    Gpt,
    block_calls,
)
from support.small import WIDTH as SMALL_WIDTH
from support.small import batch, small_engine
from support.trainer import (
    LiveBytes,
    Result,
    Run,
    make_config,
    make_device,
    same_bits,
    train,
    train_on,
    train_reference,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from infinity.errors import InfinityWarning, TrainingError

MODEL_CHECKPOINTS = Checkpointing("non_reentrant", "block")
UNITS: dict[str, Any] = {"checkpoint": "units"}
BOUNDARY = 2 * LENGTH * WIDTH * 4  # bytes of a block's input
TO_HOST = {**UNITS, "offload": "host", "tokens": 2 * LENGTH, "min_bytes": 1}
TO_DISK = {**UNITS, "offload": "disk", "tokens": 2 * LENGTH, "min_bytes": 1}
# Less memory than the inputs need: some are in the pool, some on disk, others on the device.
TO_ALL = {**UNITS, "offload": "disk", "host": 4 * 4096, "disk": 4096, "min_bytes": 1}
OFFLOADS = {"none": UNITS, "host": TO_HOST, "disk": TO_DISK, "all": TO_ALL}
ON_DISK = ("disk", "disk", "disk")


def run(case: Case, device: str, activations: dict[str, Any], **changes: Any) -> Result:
    """Train four micro-batches with all state on disk."""
    config = make_config(ON_DISK, activations=activations, **changes)
    batches = case.batches(4)
    return train(case.build(), batches, config, device=make_device(device), groups=case.groups)


@pytest.mark.parametrize(
    ("name", "offload", "device", "micro_batches"),
    diagonal([*CASES], [*OFFLOADS][::-1], ["fake", "cpu"], [1, 1, 2]),
)
def test_unit_checkpoints_match_torch_checkpoint_bitwise(
    name: str, offload: str, device: str, micro_batches: int
) -> None:
    case = CASES[name]
    computation = {
        "precision": "bf16" if name == "gpt" else "fp32",
        "gradient_accumulation_steps": micro_batches,
    }
    expected = train_reference(
        case.build(MODEL_CHECKPOINTS),
        case.batches(4),
        make_config(**computation),
        groups=case.groups,
    )
    found = run(case, device, OFFLOADS[offload], **computation)
    assert found.differences(expected) == []
    if case.regular:
        assert found.report is not None
        assert found.report.moved == found.forecast


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_plan_predicts_activation_bytes(device: str) -> None:
    case = CASES["gpt"]
    plain = run(case, device, UNITS)
    for activations, offload in ((TO_HOST, "host"), (TO_DISK, "disk")):
        found = run(case, device, activations)
        assert found.plan is not None
        assert plain.plan is not None
        assert found.report is not None
        assert found.report.moved == found.plan.predicted_bytes == found.forecast
        before = plain.plan.predicted_bytes
        extra = {
            direction: n - before[direction]
            for direction, n in found.forecast.items()
            if n != before[direction]
        }
        blocks, moved = 4, {}
        if device == "fake":
            moved = {"to_device": blocks * BOUNDARY, "from_device": blocks * BOUNDARY}
        if offload == "disk":
            moved |= {"disk_read": blocks * 4096, "disk_write": blocks * 4096}
        assert extra == moved
        reserved = found.plan.memory
        if moved:
            assert reserved["host"]["activations"] >= 4096
            assert reserved["disk"]["activations"] == (16384 if offload == "disk" else 0)
        else:
            assert any("moves nothing" in note for note in found.plan.notes)


def measure(
    case: Case, checkpointing: Checkpointing, activations: dict[str, Any]
) -> tuple[Any, ...]:
    """Run a steady step; return block calls, live bytes, their peak and recomputed units.

    Calls are those in forward and in backward; live bytes are those between the two.
    """
    model = case.build(checkpointing)
    config = make_config(ON_DISK, activations=activations, prefetch_units=1)
    with Run(model, config, device="cpu", groups=case.groups) as run:
        engine = run.engine
        engine.backward(case.batch(1).call(engine))
        engine.step()
        engine.backward(case.batch(2).call(engine))
        components(engine).gradients.reset()
        start, recomputed = block_calls(model), components(engine).forwards.recomputed
        with LiveBytes() as live:
            loss = case.batch(0).call(engine)
            live_bytes, middle = live.now(), block_calls(model)
            engine.backward(loss)
        end, recomputed = block_calls(model), components(engine).forwards.recomputed - recomputed
    return (middle[0] - start[0], end[0] - middle[0]), live_bytes, live.peak, recomputed


@pytest.mark.parametrize("name", CASES)
def test_unit_checkpoints_recompute_like_model_checkpoints(name: str) -> None:
    case = CASES[name]
    calls, live_bytes, peak, _ = measure(case, MODEL_CHECKPOINTS, {})
    found, engine_live, engine_peak, recomputed = measure(case, CHECKPOINTINGS[0], UNITS)
    assert found == calls
    assert calls[1] == recomputed > 0
    assert engine_live <= live_bytes
    assert engine_peak <= peak


def test_checkpoint_count_recomputes_first_blocks() -> None:
    """Each further block is computed once more, and saves less."""
    case, live_bytes, peaks = CASES["gpt"], [], []
    for count in range(5):
        calls, now, peak, recomputed = measure(case, CHECKPOINTINGS[0], {"checkpoint": count})
        assert (calls, recomputed) == ((4, count), count)
        live_bytes.append(now)
        peaks.append(peak)
    assert live_bytes == sorted(set(live_bytes), reverse=True)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("checkpointing", [c for c in CHECKPOINTINGS if c.mode != "none"], ids=str)
def test_model_with_own_checkpoints_is_not_wrapped_twice(checkpointing: Checkpointing) -> None:
    case = CASES["gpt"]
    calls, _, _, recomputed = measure(case, checkpointing, UNITS)
    if checkpointing.place == "block":
        assert (calls, recomputed) == ((4, 4), 0)
    else:
        assert (calls, recomputed) == ((4, 4), 4)
    batches = case.batches(4)
    expected = train_reference(
        case.build(checkpointing), batches, make_config(), groups=case.groups
    )
    for device in ("cpu", "fake"):
        config = make_config(ON_DISK, activations=TO_DISK)
        found = train(
            case.build(checkpointing),
            batches,
            config,
            device=make_device(device),
            groups=case.groups,
        )
        assert found.differences(expected) == []
        assert found.report is not None
        assert found.report.moved == found.forecast
        saved = found.forecast["disk_write"] - run(case, device, UNITS).forecast["disk_write"]
        assert saved == 4 * 4096, "inputs of its own checkpoints are on disk too"


class Deep(nn.Module):
    """Model of many narrow blocks, whose inputs are most of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


ROWS = 1024
INPUT_BYTES = ROWS * 64 * 4


def deep_case() -> Case:
    def batch(index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        return Batch((torch.randn(ROWS, 64, generator=generator),))

    return Case("deep", lambda _: Deep(), batch)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_offloaded_inputs_leave_device_memory(device: str) -> None:
    case = deep_case()
    live_inputs, peaks = {}, {}
    for name, activations in {
        "plain": {},
        "units": UNITS,
        "disk": {**UNITS, "offload": "disk", "host": "1MiB", "disk": "8MiB", "min_bytes": 1},
    }.items():
        config = make_config(ON_DISK, activations=activations)
        with Run(case.build(), config, device=make_device(device)) as run:
            engine = run.engine
            for index in range(2):
                engine.backward(case.batch(index).call(engine))
                engine.step()
            batch = case.batch(3)
            with LiveBytes() as live:
                loss = batch.call(engine)
                store = components(engine).activations
                if store is not None:
                    store._allocate(0)  # let all outgoing copies finish
                    while store._outgoing:
                        store.poll()
                live_inputs[name] = live.now() / INPUT_BYTES
                engine.backward(loss)
            peaks[name] = live.peak / INPUT_BYTES
    assert live_inputs["plain"] > 16
    assert 15 < live_inputs["units"] < 18, "the input of every block"
    assert live_inputs["disk"] < 1.5
    assert peaks["units"] > 17
    assert peaks["disk"] < 8, "the computing block, and inputs in flight"


class WithDropout(Gpt):
    """Dropout in every block: recomputation must draw the same numbers."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.3))


def test_recomputation_replays_random_numbers() -> None:
    case = Case("noisy", WithDropout, CASES["gpt"].batch)
    torch.manual_seed(5)
    expected = train_reference(case.build(MODEL_CHECKPOINTS), case.batches(4), make_config())
    for device, activations in (("cpu", UNITS), ("fake", TO_DISK)):
        torch.manual_seed(5)
        found = run(case, device, activations)
        assert found.differences(expected) == []


class BufferBlock(nn.Module):
    """Block that changes buffers in place, replaces and shares them, and reads some."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.register_buffer("last", None)
        self.inner = nn.Identity()
        self.inner.register_buffer("shared", self.calls)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        before, self.last = self.last, x.detach().clone()
        y = self.spectral(self.norm(self.up(x)) * self.mask) - self.mean / self.inner.shared
        return x + (y if before is None else y - 0.1 * before)


class BufferModel(nn.Module):
    """Model that calls its second block twice."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BufferBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return x.square().mean()


def test_module_added_after_init_updates_buffers_once(tmp_path: Path) -> None:
    with small_engine(tmp_path, activations=UNITS) as engine:
        block = engine.module.blocks[0]
        block.norm.late = nn.BatchNorm1d(SMALL_WIDTH, affine=False)
        block.norm.register_forward_hook(lambda norm, _, x: norm.late(x.flatten(0, 1)).view_as(x))
        engine.backward(engine(batch(0)))
        assert block.norm.late.num_batches_tracked == 1


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_recomputation_writes_buffers_once(micro_batches: int) -> None:
    """Buffers and gradients equal those of plain torch without recomputation, bit for bit."""
    rows = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    case = Case("counts", BufferModel, lambda index: Batch((rows[index],)))
    computation = {"gradient_accumulation_steps": micro_batches}
    plain = case.build()
    expected = train_reference(plain, case.batches(4), make_config(**computation))
    for device, offload in (("cpu", "none"), ("fake", "all")):
        model = case.build()
        config = make_config(ON_DISK, activations=OFFLOADS[offload], **computation)
        found = train(model, case.batches(4), config, device=make_device(device))
        assert found.differences(expected) == []
        for (name, buffer), expected_buffer in zip(
            model.named_buffers(), plain.buffers(), strict=True
        ):
            assert same_bits(buffer.cpu(), expected_buffer), name
        assert model.blocks[0].inner.shared is model.blocks[0].calls
        model = case.build()
        with Run(model, config, device=make_device(device)) as run:
            loss, before = case.batch(4).call(run.engine), dict(model.named_buffers())
            run.engine.backward(loss)
            assert all(value is before[name] for name, value in model.named_buffers())


class TanhLinear(nn.Linear):
    """Block whose weight is computed by its pre-hook, which changes buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class TwoForwards(nn.Module):
    """Model that runs two forwards of each block before the backward."""

    def __init__(self, norm: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(norm(TanhLinear(WIDTH, WIDTH)) for _ in range(3))
        self.head = norm(nn.LSTM(WIDTH, 4, batch_first=True), "weight_hh_l0")

    def forward(self, real: Tensor) -> Tensor:
        fake = real.flip(0)
        for block in self.blocks:
            real, fake = block(real), block(fake)
        found: Tensor = (self.head(real)[0].exp() - self.head(fake)[0]).square().mean()
        return found


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("activations", [{}, UNITS, TO_DISK], ids=["plain", "units", "disk"])
def test_weights_computed_by_pre_hooks_match_torch(norm: Any, activations: dict[str, Any]) -> None:
    rows = [torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    case = Case("adversary", lambda _: TwoForwards(norm), lambda index: Batch((rows[index],)))
    plain = case.build()
    expected = train_reference(plain, case.batches(3), make_config())
    for device in ("cpu", "fake"):
        model, config = case.build(), make_config(ON_DISK, activations=activations)
        with Run(model, config, device=make_device(device)) as run:
            if norm is nn.utils.spectral_norm:  # the older weight_norm leaves an outdated weight
                assert model.blocks[0].weight.isnan().all()
            assert train_on(run.engine, case.batches(3)).differences(expected) == []
            run.engine.close(restore=True)
        for (name, buffer), expected_buffer in zip(
            model.named_buffers(), plain.buffers(), strict=True
        ):
            assert same_bits(buffer.cpu(), expected_buffer), name
        model.eval()
        assert same_bits(model(rows[0]).detach(), plain.eval()(rows[0]).detach())


def test_recomputation_restores_autocast() -> None:
    case = CASES["gpt"]
    results = []
    for checkpointing, activations in ((MODEL_CHECKPOINTS, {}), (CHECKPOINTINGS[0], TO_DISK)):
        config = make_config(ON_DISK, activations=activations)
        with Run(case.build(checkpointing), config, device="cpu", groups=case.groups) as run:
            losses = []
            for index in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = case.batch(index).call(run.engine)
                run.engine.backward(loss)
                run.engine.step()
                losses.append(loss.item())
            results.append(Result(losses, run.masters(), []))
    assert results[1].differences(results[0]) == []


class Attending(nn.Module):
    """Block with torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("activations", [{}, UNITS, TO_DISK], ids=["plain", "units", "disk"])
def test_fused_attention_is_kept_under_saved_tensor_hooks(activations: dict[str, Any]) -> None:
    """What the fused kernels save passes through the engine's hooks unchanged."""

    def batch(index: int) -> Batch:
        return Batch((torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(index)),))

    case = Case("attention", lambda _: Attention(), batch)
    expected = train_reference(case.build(), case.batches(3), make_config())
    calls: list[str] = []
    for device in ("cpu", "fake"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            config = make_config(ON_DISK, activations=activations)
            found = train(case.build(), case.batches(3), config, device=make_device(device))
        assert found.differences(expected) == []
        calls = [event.key for event in profile.key_averages()]
        assert any("flash_attention" in call and "backward" in call for call in calls)


def test_no_grad_forward_saves_and_recomputes_nothing() -> None:
    case = CASES["gpt"]
    with Run(case.build(), make_config(activations=TO_DISK), device="cpu") as run:
        before = block_calls(run.model)[0]
        with torch.no_grad():
            case.batch(0).call(run.engine)
        with torch.inference_mode():
            case.batch(0).call(run.engine)
        assert block_calls(run.model)[0] == before + 8
        assert components(run.engine).forwards.recomputed == 0
        assert components(run.engine).activations is not None
        assert components(run.engine).activations.num_saved == 0


class NestedInputs(nn.Module):
    """Block that takes tensors in nested arguments, and writes to a cache as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden: Tensor,
        pair: tuple[Tensor, list[Tensor]],
        options: dict[str, Any],
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.tanh(self.a(hidden)) * pair[0] + pair[1][0]
        if past_key_values is not None:
            past_key_values.keys.append(x)
        if use_cache:
            options["made"] = True
        return self.b(x) * options["scale"], {"x": x}


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.keys)


class Caching(nn.Module):
    def __init__(self, use_cache: bool = False, by_position: bool = False) -> None:
        super().__init__()
        self.use_cache = use_cache
        self.by_position = by_position
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(NestedInputs() for _ in range(3))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        shared = x.cos()
        for block in self.blocks:
            arguments = {
                "hidden": x,
                "pair": (shared, [shared]),
                "options": {"scale": x.sigmoid(), "name": "block"},
                "past_key_values": cache,
            }
            if self.by_position:  # as GPT-2 of transformers
                x, extra = block(*arguments.values(), use_cache=self.use_cache)
            else:
                x, extra = block(**arguments, use_cache=self.use_cache)
            total = total + extra["x"].square().mean()
        return total + x.square().mean()


@pytest.mark.parametrize("by_position", [False, True])
def test_nested_inputs_are_saved_and_caches_are_dropped(by_position: bool) -> None:
    x = torch.randn(4, WIDTH)
    expected = train_reference(
        Case("keyed", lambda _: Caching(), lambda _: Batch((x,))).build(),
        [Batch((x,))] * 3,
        make_config(),
    )
    for device in ("cpu", "fake"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Caching(use_cache=True, by_position=by_position)
        config = make_config(ON_DISK, activations=TO_ALL)
        with Run(model, config, device=make_device(device)) as run:
            losses = []
            for _ in range(3):
                cache = Cache()
                if not losses:
                    with pytest.warns(InfinityWarning, match="not given a cache"):
                        loss = run.engine(x, cache)
                else:
                    loss = run.engine(x, cache)
                assert not cache.keys
                run.engine.backward(loss)
                run.engine.step()
                losses.append(loss.item())
            store = components(run.engine).activations
            assert store is not None
            # the input and the scale of each block; the shared tensor once
            assert store.num_saved == 3 * (3 * 2 + 1)
            assert Result(losses, run.masters(), expected.norms).differences(expected) == []
            cache.keys.append(x)
            with pytest.raises(TrainingError, match="past_key_values that is not empty"):
                run.engine(x, cache)
            with torch.no_grad():
                run.engine(x, cache)
            assert len(cache.keys) == 4
