"""Where things live never changes a bit of the result, and moves exactly the bytes forecast."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import CASES, Case
from support.trainer import (
    PLACEMENTS,
    TIERS,
    Result,
    make_config,
    make_device,
    train,
    train_exactly,
)

STEPS = 10
# Every model has one of these; the other axes are in test_axes.py.
COMPUTATIONS: dict[str, dict[str, Any]] = {
    "gpt": {"precision": "bf16"},
    "encoder_decoder": {"precision": "fp32"},
    "reused": {"precision": "fp32"},
    "frozen": {"precision": "bf16"},
    "routed": {"precision": "bf16"},
    "buffered": {"precision": "bf16"},
}


def simplest(case: Case) -> Result:
    """Everything in device memory, on a plain CPU."""
    computation = COMPUTATIONS[case.name]
    batches = case.batches(STEPS * computation.get("gradient_accumulation_steps", 1))
    config = make_config(**computation)
    return train(case.build(), batches, config, device="cpu", groups=case.groups)


@pytest.mark.parametrize("name", CASES)
def test_all_on_the_device_equals_plain_torch_with_the_rule_written_out(name: str) -> None:
    case, computation = CASES[name], COMPUTATIONS[name]
    batches = case.batches(STEPS * computation.get("gradient_accumulation_steps", 1))
    config = make_config(**computation)
    expected = train_exactly(case.build(), batches, config, groups=case.groups)
    assert simplest(case).differences(expected) == []


@pytest.mark.parametrize("weights", TIERS)
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("name", CASES)
def test_placements(name: str, device: str, weights: str) -> None:
    """Nine placements of moments and gradients an item."""
    case, computation = CASES[name], COMPUTATIONS[name]
    batches = case.batches(STEPS * computation.get("gradient_accumulation_steps", 1))
    expected = simplest(case)
    problems = {}
    for number, placement in enumerate(p for p in PLACEMENTS if p[0] == weights):
        run = train(
            case.build(),
            batches,
            make_config(placement, **computation),
            device=make_device(device, seed=number),
            groups=case.groups,
        )
        found = run.differences(expected)
        assert run.report is not None
        if case.regular:
            if run.report.surprises:
                found.append(f"{run.report.surprises} surprises in the last step")
            if run.report.moved != run.forecast:
                found.append(f"moved {run.report.moved}, forecast {run.forecast}")
        if found:
            problems[placement] = found
    assert problems == {}
