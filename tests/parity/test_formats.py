"""Tests of every update rule in every moment format, bit for bit across placements.

The reference (`train_reference`) holds everything in RAM and updates with the numpy kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import CASES
from support.trainer import (
    PLACEMENTS,
    Result,
    Run,
    make_config,
    make_device,
    same_bits,
    train,
    train_reference,
)

from infinity.errors import ConfigError, EngineClosedError
from infinity.types import MomentFormat

STEPS = 3
CASE = CASES["gpt"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW"},
    "Adagrad": {"type": "Adagrad", "lr_decay": 0.1, "initial_accumulator_value": 0.3},
}
PLAIN = {"type": "SGD", "weight_decay": 0.1}  # keeps no moments, so no format applies
NUM_SAMPLED = 2


def config_of(
    optimizer: dict[str, Any], moments: str, placement: tuple[str, str, str], **overrides: Any
) -> dict[str, Any]:
    settings = {"weight_decay": 0.01, "lr": 1e-2, **optimizer, "moments": moments}
    config = make_config(placement, precision="bf16", seed=5, **overrides)
    return {**config, "optimizer": settings}


def sample_placements(number: int) -> list[tuple[str, str, str]]:
    """Return a few placements that rotate with `number`, and always the one on disk."""
    placements = [PLACEMENTS[(number * NUM_SAMPLED + i * 13) % 27] for i in range(NUM_SAMPLED)]
    return [*placements, ("disk", "disk", "disk")]


def train_and_compare(
    expected: Result, optimizer: dict[str, Any], moments: str, placement: tuple[str, str, str],
    number: int, **overrides: Any
) -> list[str]:  # fmt: skip
    """Train and return the differences from the plain loop and from the forecast."""
    run = train(
        CASE.build(),
        CASE.batches(STEPS),
        config_of(optimizer, moments, placement, **overrides),
        device=make_device("fake" if number % 2 else "cpu", number),
        groups=CASE.groups,
    )
    found = run.differences(expected)
    assert run.report is not None
    if run.report.moved != run.forecast:
        found.append(f"moved {run.report.moved}, forecast {run.forecast}")
    return found


def plain_loop(optimizer: dict[str, Any], moments: str, **overrides: Any) -> Result:
    config = config_of(optimizer, moments, PLACEMENTS[0], **overrides)
    return train_reference(CASE.build(), CASE.batches(STEPS), config, groups=CASE.groups)


def test_rule_without_moments_matches_plain_loop() -> None:
    expected = plain_loop(PLAIN, "fp32")
    for number, placement in enumerate(sample_placements(3)):
        assert train_and_compare(expected, PLAIN, "fp32", placement, number) == []


def test_lossy_formats_differ_from_fp32_and_from_each_other() -> None:
    runs = {f: plain_loop(OPTIMIZERS["AdamW"], f.value) for f in MomentFormat}
    exact = runs[MomentFormat.FP32]
    for moment_format, run in runs.items():
        assert (run.differences(exact) == []) == moment_format.is_exact
        assert run.losses == pytest.approx(exact.losses, rel=2e-2)
    stochastic, nearest = runs[MomentFormat.BF16_STOCHASTIC], runs[MomentFormat.BF16]
    assert stochastic.differences(nearest) != []


def test_seed_determines_stochastic_rounding() -> None:
    config = config_of(OPTIMIZERS["AdamW"], "bf16_stochastic", PLACEMENTS[0])

    def run(seed: int) -> Result:
        return train(CASE.build(), CASE.batches(STEPS), {**config, "seed": seed}, device="cpu")

    one = run(1)
    assert one.differences(run(1)) == []
    assert one.differences(run(2)) != []


@pytest.mark.parametrize("placement", [PLACEMENTS[0], ("disk", "host", "disk"), PLACEMENTS[26]])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_read_state_returns_full_fp32_tensors(
    moments: str, placement: tuple[str, str, str]
) -> None:
    """Tensors are complete in every format and tier, even if parameters span chunks."""
    config = config_of(OPTIMIZERS["AdamW"], moments, placement, gradient_clipping=0.0)
    precision = {"precision": "fp32"}
    model = CASE.build()
    reference = CASE.build()
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
    with Run(model, {**config, **precision}, device=make_device("fake")) as run:
        for batch in CASE.batches(2):
            run.engine.backward(batch.call(run.engine))
            run.engine.step()
            batch.call(reference).backward()
            adam.step()
            adam.zero_grad()
        for parameter, reference_parameter in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            state, expected = (
                run.engine.optimizer.read_state(parameter),
                adam.state[reference_parameter],
            )
            assert state["step"] == expected["step"] == 2
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].dtype is torch.float32
                assert state[name].shape == reference_parameter.shape
                scale = float(expected[name].abs().max())
                atol = {"fp32": 1e-5, "bf16": 1e-2, "8bit": 0.15}[moments] * scale
                torch.testing.assert_close(state[name], expected[name], rtol=0.15, atol=atol)


def test_read_state_of_frozen_or_unknown_parameter_raises() -> None:
    """So does reading after the engine is closed."""
    case = CASES["frozen"]
    config = make_config(PLACEMENTS[0])
    with Run(case.build(), config, device="cpu", groups=case.groups) as run:
        optimizer = run.engine.optimizer
        trained = optimizer.param_groups[0]["params"]
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        frozen = next(p for p in run.model.parameters() if id(p) not in known)
        assert set(optimizer.read_state(trained[0])) == {"step", "exp_avg", "exp_avg_sq"}
        with pytest.raises(ConfigError, match="frozen"):
            optimizer.read_state(frozen)
        with pytest.raises(ConfigError, match="does not belong"):
            optimizer.read_state(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(EngineClosedError):
        optimizer.read_state(trained[0])


def test_initial_accumulator_value_in_every_format() -> None:
    for moment_format in MomentFormat:
        config = config_of(OPTIMIZERS["Adagrad"], moment_format.value, ("disk", "disk", "disk"))
        with Run(CASE.build(), config, device="cpu") as run:
            for parameter in run.model.parameters():
                state = run.engine.optimizer.read_state(parameter)
                wanted = torch.full(parameter.shape, 0.3)
                torch.testing.assert_close(state["sum"], wanted, rtol=5e-3, atol=0)
                assert state["step"] == 0
                if moment_format.is_exact:
                    assert same_bits(state["sum"], wanted)


@pytest.mark.parametrize(
    ("moments", "bytes_per_parameter"),
    [("fp32", 12), ("bf16", 8), ("bf16_stochastic", 8), ("8bit", 6.0625)],
)
def test_plan_describes_moment_format_and_size(moments: str, bytes_per_parameter: float) -> None:
    config = config_of(OPTIMIZERS["AdamW"], moments, ("disk", "disk", "disk"))
    with Run(CASE.build(), config, device="cpu") as run:
        text = run.engine.plan.describe()
        assert f"2 moments in {moments}" in text
        assert ("lossy" in text) == (moments != "fp32")
        assert f"{bytes_per_parameter:g} bytes of state per parameter" in text
