"""Tests of loss scaling: scale traces, skipped steps, the minimum scale, and resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fp16_reference import LossScaleSettings, closed_form_scale
from support.trainer import make_config, same_bits
from torch import Tensor, nn

import infinity
from infinity.config.schema import load_config
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, TrainingError
from infinity.training.loss_scale import ScaleRules

DISK = ("disk", "disk", "disk")
INF, NAN = math.inf, math.nan


def rules_of(options: LossScaleSettings) -> ScaleRules:
    return ScaleRules.of(load_config(config_of(options)).loss_scale)


def config_of(options: LossScaleSettings) -> dict[str, Any]:
    """Return the engine configuration of these settings."""
    if options.static:
        return {"precision": "fp16", "loss_scale": {"value": options.static}}
    section = {
        "initial_power": int(math.log2(options.initial)),
        "window": options.window,
        "hysteresis": options.hysteresis,
        "consecutive_hysteresis": options.consecutive,
        "min": options.minimum,
    }
    return {"precision": "fp16", "loss_scale": section}


# --- rules ---------------------------------------------------------------------------------------

scale_options = st.builds(
    LossScaleSettings,
    initial=st.integers(0, 20).map(lambda power: 2.0**power),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.25, 0.3, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(scale_options, st.lists(st.sampled_from([False, False, False, True]), max_size=60))
def test_scale_rules_match_closed_form(options: LossScaleSettings, overflows: list[bool]) -> None:
    rules = rules_of(options)
    state = rules.start()
    for number, overflow in enumerate(overflows):
        state = rules.after(state, overflow)
        assert state.scale == closed_form_scale(options, overflows[: number + 1])


def trace(options: LossScaleSettings, overflows: str) -> list[float]:
    """Return the scale of each step; "x" overflows, "." does not."""
    rules = rules_of(options)
    state, scales = rules.start(), []
    for step in overflows:
        scales.append(state.scale)
        state = rules.after(state, step == "x")
    return scales


def test_scale_traces_by_hand() -> None:
    three = LossScaleSettings(initial=16.0, window=3, hysteresis=1)
    # At the start and after an overflow, the first finite step does not count.
    assert trace(three, "........") == [16, 16, 16, 16, 32, 32, 32, 64]
    assert trace(three, "..x.....x.") == [16, 16, 16, 8, 8, 8, 8, 16, 16, 8]
    patient = LossScaleSettings(initial=16.0, window=3, hysteresis=3)
    # Two overflows are tolerated; then each one halves the scale, until it doubles again.
    assert trace(patient, "xx.x.x....x.") == [16, 16, 16, 16, 8, 8, 4, 4, 4, 4, 8, 8]
    every = LossScaleSettings(initial=16.0, window=3, hysteresis=2, consecutive=True)
    assert trace(every, "x.x.xx.xx") == [16, 16, 16, 16, 16, 16, 8, 8, 8]
    low = LossScaleSettings(initial=2.0, hysteresis=1, minimum=0.75)
    assert trace(low, "xxxx") == [2, 1, 0.75, 0.75]


def test_static_scale_rules_never_change() -> None:
    assert set(trace(LossScaleSettings(static=100.0), "." * 2000 + "x" * 50)) == {100.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_scale": {"window": 5}}, "loss_scale: is for precision: fp16; nothing is scaled"),
        ({"precision": "fp32", "loss_scale": {"value": 8}}, "nothing is scaled in fp32"),
        ({"precision": "fp16", "loss_scale": {"value": -1}}, "loss_scale.value"),
        ({"precision": "fp16", "loss_scale": {"value": 8, "window": 5}},
         "loss_scale.window: a loss_scale.value of 8 never changes"),
        ({"precision": "fp16", "loss_scale": {"initial_power": 2, "min": 5}},
         "loss_scale.min: 5 is above the first scale, 2 ** 2 = 4"),
        ({"precision": "fp16", "loss_scale": {"hysteresis": 0}}, "loss_scale.hysteresis"),
        ({"precision": "fp16", "loss_scale": {"initial_scale_power": 8}}, "did you mean"),
        ({"precision": "half"}, "precision"),
    ],
)  # fmt: skip
def test_invalid_loss_scale_config_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert message in str(caught.value)


# --- engine --------------------------------------------------------------------------------------


class Exploding(nn.Module):
    """Two layers whose output is multiplied by a buffer; inf makes the gradients inf."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("blow", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).tanh()
        return (self.second(hidden).float() * self.blow).square().mean()


def make_engine(path: Path, placement: tuple[str, str, str] = DISK, **changes: Any) -> Engine:
    torch.manual_seed(0)
    path.mkdir(exist_ok=True)
    config = make_config(placement, nvme_path=str(path), **{"precision": "fp16", **changes})
    return infinity.initialize(Exploding(), config)[0]


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def one_step(engine: Engine, number: int, blow: float = 1.0) -> None:
    engine.module.blow.fill_(blow)
    engine.backward(engine(batch(number)))
    engine.step()


def masters(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict(master=True).items()}


def unchanged(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(same_bits(one[name], other[name]) for name in one if name != "blow")


@pytest.mark.parametrize("bad", [INF, NAN])
def test_engine_scale_matches_closed_form(tmp_path: Path, bad: float) -> None:
    """Scale, counters, learning rate, weights, report and step log, at every step."""
    options = LossScaleSettings(initial=64.0, window=3, hysteresis=2)
    overflows = [step == "x" for step in ".x.xx....x.....x...."]
    step_log = tmp_path / "journal.jsonl"
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}}
    engine = make_engine(
        tmp_path / "run", step_log=str(step_log), scheduler=schedule, **config_of(options)
    )
    with engine:
        assert engine.loss_scale == 64.0
        for number, overflow in enumerate(overflows):
            before, used = masters(engine), engine.loss_scale
            one_step(engine, number, bad if overflow else 1.0)
            report = engine.last_report
            assert report is not None
            assert engine.loss_scale == closed_form_scale(options, overflows[: number + 1])
            assert report.loss_scale == used
            assert report.skipped == overflow
            assert report.non_finite == ("first.weight" if overflow else "")
            assert engine.skipped_steps == sum(overflows[: number + 1])
            assert engine.global_steps == report.step == number + 1
            lr = engine.optimizer.param_groups[0]["lr"]
            assert lr == pytest.approx(1e-2 * 0.9 ** (number + 1 - engine.skipped_steps), rel=1e-12)
            assert unchanged(before, masters(engine)) == overflow
    entries = [json.loads(line) for line in step_log.read_text().splitlines()]
    logged_scales = [entry["loss_scale"] for entry in entries if entry["event"] == "step"]
    assert logged_scales == [
        closed_form_scale(options, overflows[:n]) for n in range(len(overflows))
    ]


def test_dynamic_scale_halves_until_finite(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Losses are finite, but the fp16 gradients overflow until the scale is low enough."""
    with make_engine(tmp_path, loss_scale={"initial_power": 30, "hysteresis": 1}) as engine:
        seen = []
        for number in range(24):
            one_step(engine, number)
            assert engine.last_report is not None
            seen.append(engine.last_report.skipped)
        first_good = seen.index(False)
        assert 3 <= first_good <= 20
        assert len([w for w in recwarn if "skipped" in str(w.message)]) == (first_good >= 10)
        assert all(seen[:first_good])
        assert engine.global_steps >= 3
        norm = engine.grad_norm
        assert norm is not None
        assert 1e-4 < norm < 10  # the norm is unscaled


def test_warning_after_ten_consecutive_skipped_steps(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Overflows are normal while a dynamic scale is searched; ten in a row are not."""
    options = {"initial_power": 16, "hysteresis": 1, "min": 1e-6}
    with make_engine(tmp_path, loss_scale=options) as engine:
        for number, count in ((0, 9), (10, 12)):
            for _ in range(count):
                one_step(engine, number, INF)
            one_step(engine, number + 1)
    found = [str(w.message) for w in recwarn if "skipped" in str(w.message)]
    assert len(found) == 1
    assert "10 steps in a row were skipped" in found[0]
    assert "first that of 'first.weight', at a loss scale of 0.25;" in found[0]


def test_static_scale_skips_without_changing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with make_engine(tmp_path, loss_scale={"value": 100}) as engine:
        for number, blow in enumerate((1.0, INF, 1.0)):
            one_step(engine, number, blow)
            assert engine.loss_scale == 100.0
        (warned,) = (str(w.message) for w in recwarn if "skipped" in str(w.message))
        assert "step 2 was skipped" in warned
        assert "at a loss scale of 100" in warned
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        for number in range(19):
            one_step(engine, number, INF)
        with pytest.raises(TrainingError, match="or the loss scale 100 is too large") as caught:
            one_step(engine, 19, INF)
        assert "leave loss_scale.value out" in str(caught.value)


def test_fp32_loss_not_scaled(tmp_path: Path) -> None:
    with make_engine(tmp_path, precision="fp32") as engine:
        loss = engine(batch(0))
        assert engine.loss_scale == 1.0
        assert engine.scale(loss) is loss
        engine.backward(loss)
        engine.step()
        assert engine.last_report is not None
        assert engine.last_report.loss_scale == 1.0


def test_minimum_scale_error_names_parameter_and_history(tmp_path: Path) -> None:
    options = {"initial_power": 2, "hysteresis": 2}
    with make_engine(tmp_path, loss_scale=options) as engine:
        for number in range(3):
            one_step(engine, number, INF)
        assert engine.loss_scale == 1.0
        with pytest.raises(TrainingError) as caught:
            one_step(engine, 3, INF)
        text = str(caught.value)
        for phrase in (
            "not finite at the smallest loss scale, 1: first in 'first.weight' of the module "
            "'first', and in 3 more up to 'second.bias'",
            "4, 2 after step 2, 1 after step 3",
            "precision: bf16",
            "loss_scale.min below 1",
        ):
            assert phrase in text
        assert engine.skipped_steps == 4
        one_step(engine, 5)  # the engine stays usable
        assert (engine.global_steps, engine.loss_scale) == (5, 1.0)


def test_non_finite_input_gradient_does_not_skip_step(tmp_path: Path) -> None:
    with make_engine(tmp_path, loss_scale={"initial_power": 0, "hysteresis": 1}) as engine:
        handle = engine.module.first.register_full_backward_hook(
            lambda module, grads_in, grads_out: tuple(
                g * INF if g is not None else g for g in grads_in
            )
        )
        engine.backward(engine(batch(0).requires_grad_()))
        handle.remove()
        engine.step()  # only the gradient of the input is infinite
        assert engine.skipped_steps == 0


@pytest.mark.parametrize("placement", [("device",) * 3, DISK])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_overflow_in_one_micro_batch_skips_window(
    tmp_path: Path, placement: tuple[str, str, str], where: int
) -> None:
    changes = {"gradient_accumulation_steps": 3, "loss_scale": {"hysteresis": 1}}
    with make_engine(tmp_path, placement, **changes) as engine:
        before = masters(engine)
        for number in range(3):
            one_step(engine, number, INF if number == where else 1.0)
            scale = 2.0**16 if number < 2 else 2.0**15  # not before the end of the window
            assert engine.loss_scale == scale
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert unchanged(before, masters(engine))
        for number in range(3):
            one_step(engine, number)
        assert engine.global_steps == 2
        assert not unchanged(before, masters(engine))


@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_unscale_and_clip_match_torch(tmp_path: Path, clipping: float, micro_batches: int) -> None:
    """torch unscales, clips and steps separately; the engine applies one factor in the update."""
    torch.manual_seed(0)
    plain = Exploding()
    halves = Exploding().half()
    halves.blow = halves.blow.float()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    changes = {
        "gradient_accumulation_steps": micro_batches, "gradient_clipping": clipping,
        "optimizer": {"type": "SGD", "lr": 0.5, "weight_decay": 0.0},
        "loss_scale": {"initial_power": 12},
    }  # fmt: skip
    with make_engine(tmp_path, **changes) as engine:
        for step in range(3):
            for half, master in zip(halves.parameters(), plain.parameters(), strict=True):
                half.data = master.detach().half()
                master.grad = torch.zeros_like(master)
            for number in range(micro_batches * step, micro_batches * (step + 1)):
                halves.zero_grad()
                (halves(batch(number)) / micro_batches * 4096).backward()
                for half, master in zip(halves.parameters(), plain.parameters(), strict=True):
                    assert half.grad is not None
                    assert master.grad is not None
                    master.grad += half.grad.float() / 4096
                one_step(engine, number)
            bound = clipping or INF
            norm = nn.utils.clip_grad_norm_(plain.parameters(), bound, foreach=False)
            assert engine.grad_norm == pytest.approx(norm.item(), rel=1e-6)
            assert norm > clipping
            optimizer.step()
        found = masters(engine)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6)


def test_scale_and_gradient_match_torch(tmp_path: Path) -> None:
    """`engine.scale` and `engine.gradient` serve users who call backward or read gradients."""
    with make_engine(tmp_path, loss_scale={"value": 1024}) as engine:
        loss = engine(batch(0))
        scaled = engine.scale(loss)
        assert scaled.dtype is torch.float32
        assert scaled.item() == loss.item() * 1024
        scaled.backward()
        weight = engine.module.first.weight
        gradient = engine.gradient(weight)
        engine.zero_grad()
        assert engine.backward(engine(batch(0))).item() == loss.item()
        assert same_bits(engine.gradient(weight), gradient)
        torch.manual_seed(0)
        plain = Exploding().half()
        plain.blow = plain.blow.float()
        (plain(batch(0)) * 1024).backward()
        assert plain.first.weight.grad is not None
        assert same_bits(gradient, plain.first.weight.grad.float() / 1024)
        with pytest.raises(TrainingError, match="scalar loss"):
            engine.scale(torch.zeros(3))


def test_torch_backward_of_scaled_loss_matches_engine(tmp_path: Path) -> None:
    """Two windows of two micro-batches, by `engine.backward` and by `Tensor.backward`."""
    changes = {"gradient_accumulation_steps": 2, "loss_scale": {"initial_power": 12}}
    results = []
    for by_user in (False, True):
        with make_engine(tmp_path / str(by_user), **changes) as engine:
            for number in range(4):
                loss = engine(batch(number))
                if by_user:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            assert engine.global_steps == 2
            results.append((engine.grad_norm, masters(engine)))
            engine(batch(5)).backward()
            with pytest.raises(TrainingError, match="the loss was not scaled"):
                engine.step()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=1e-4)


def test_fp16_loss_scaled_in_fp32(tmp_path: Path) -> None:
    """100 x 1024 overflows fp16; the scaled loss is finite."""
    with make_engine(tmp_path, loss_scale={"initial_power": 10}) as engine:
        loss = engine(batch(0)).half() + 100
        assert 65504 < engine.scale(loss).item() < INF
        result = engine.backward(loss)
        engine.step()
        assert result.dtype is torch.float16
        assert (engine.global_steps, engine.skipped_steps) == (1, 0)


# --- checkpoints ---------------------------------------------------------------------------------

HYSTERESIS = {"initial_power": 10, "window": 3, "hysteresis": 3}
OVERFLOWS = ".xx.x.....x....xx..."  # one character per step


def finish(engine: Engine, first: int) -> tuple[list[float], dict[str, Tensor]]:
    scales = []
    for number in range(first, len(OVERFLOWS)):
        one_step(engine, number, INF if OVERFLOWS[number] == "x" else 1.0)
        scales.append(engine.loss_scale)
    return scales, masters(engine)


@pytest.mark.parametrize("stop", [2, 3, 5, 9])
def test_resume_continues_overflow_count(tmp_path: Path, stop: int) -> None:
    with make_engine(tmp_path / "one", loss_scale=HYSTERESIS) as engine:
        for number in range(stop):
            one_step(engine, number, INF if OVERFLOWS[number] == "x" else 1.0)
        engine.save_checkpoint(tmp_path / "saved", wait=True)
        counted = engine.global_steps, engine.skipped_steps
        assert counted == (stop, OVERFLOWS[:stop].count("x"))
        assert (tmp_path / "saved" / f"global_step{stop}").is_dir()
        expected = finish(engine, stop)
    placement = ("host", "device", "host")
    with make_engine(tmp_path / "two", placement, loss_scale=HYSTERESIS) as engine:
        for number in range(30, 33):
            one_step(engine, number)  # different state, replaced by the checkpoint
        engine.load_checkpoint(tmp_path / "saved")
        assert (engine.global_steps, engine.skipped_steps) == counted
        scales, found = finish(engine, stop)
    assert scales == expected[0]
    assert unchanged(found, expected[1])
    options = LossScaleSettings(initial=1024.0, window=3, hysteresis=3)
    assert scales[-1] == closed_form_scale(options, [step == "x" for step in OVERFLOWS])


def test_durable_resume_continues_overflow_count(tmp_path: Path) -> None:
    changes = {"loss_scale": HYSTERESIS, "durable": True}
    with make_engine(tmp_path, **changes) as engine:
        for number in range(3):  # one more overflow halves the scale
            one_step(engine, number, INF if OVERFLOWS[number] == "x" else 1.0)
        one_step(engine, 3)
        engine.settle()
        patience = engine._step_runner.counters.loss_scale
    with make_engine(tmp_path, **changes, resume="auto") as engine:
        assert engine.resumed
        assert engine._step_runner.counters.loss_scale == patience
        one_step(engine, 4, INF)
        assert engine.loss_scale == 512.0


def test_loaded_scale_dynamic_and_static(tmp_path: Path) -> None:
    """A dynamic scale continues from any checkpoint; a static one is that of the configuration."""
    dynamic, static = {"initial_power": 10, "hysteresis": 1}, {"value": 64}
    with make_engine(tmp_path / "a", loss_scale=dynamic) as engine:
        one_step(engine, 0, INF)
        engine.save_checkpoint(tmp_path / "dynamic", wait=True)
    with make_engine(tmp_path / "b", loss_scale=static) as engine:
        one_step(engine, 0)
        engine.save_checkpoint(tmp_path / "static", wait=True)
        engine.load_checkpoint(tmp_path / "dynamic")
        assert engine.loss_scale == 64.0
    with make_engine(tmp_path / "c", loss_scale=dynamic) as engine:
        engine.load_checkpoint(tmp_path / "dynamic", load_optimizer_states=False)
        assert engine.loss_scale == 1024.0
        engine.load_checkpoint(tmp_path / "dynamic")
        assert engine.loss_scale == 512.0
        engine.load_checkpoint(tmp_path / "static")
        assert engine.loss_scale == 64.0


def test_open_window_checkpoint_keeps_its_scale(tmp_path: Path) -> None:
    window = {"gradient_accumulation_steps": 2}
    with make_engine(tmp_path / "a", loss_scale={"value": 64}, **window) as engine:
        one_step(engine, 0)
        engine.save_checkpoint(tmp_path / "within", wait=True)
        one_step(engine, 1)
        expected = masters(engine)
    with make_engine(tmp_path / "b", loss_scale={"value": 128}, **window) as engine:
        with pytest.raises(CheckpointError, match="have the loss scale 64; this engine has 128"):
            engine.load_checkpoint(tmp_path / "within")
        one_step(engine, 0)
        assert engine.micro_step == 1
    with make_engine(tmp_path / "c", loss_scale={"initial_power": 3}, **window) as engine:
        engine.load_checkpoint(tmp_path / "within")
        assert engine.loss_scale == 64.0
        one_step(engine, 1)
        assert unchanged(expected, masters(engine))
