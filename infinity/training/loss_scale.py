"""Dynamic loss scaling for fp16, identical to DeepSpeed's in every step.

Values below 6e-8 underflow in fp16, so the loss is multiplied by the scale before backward, and the
update multiplies by the inverse as part of its clip factor. If a gradient is not finite, the step
is skipped and a dynamic scale may be halved:

- the first `hysteresis - 1` overflows only reduce the patience, each later one halves the scale,
  but never below the minimum;
- the scale doubles in the first step that is `window + 1` steps after the last overflow, and every
  `window` steps from then on (before the first overflow: in step `window + 1`);
- the patience is reset when the scale doubles, or with `consecutive` in every step without
  overflow.

[Note: one more step]
DeepSpeed counts the good steps *between* the last overflow and the current step. So after an
overflow, and at the start, a window is one step longer than between two doublings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinity.config.optimizer import LossScaleConfig
from infinity.errors import TrainingError

FACTOR = 2.0
MAX_HISTORY = 32  # changes of the scale to report in messages


@dataclass(frozen=True)
class ScaleState:
    """State of a loss scale; immutable.

    `patience` is the number of overflows until the scale is halved. `steps` counts all steps,
    including skipped ones; `last_overflow` is that count before the last overflow, or -1. `history`
    has (number of steps before, scale) for the latest changes, oldest first.
    """

    scale: float
    patience: int = 1
    steps: int = 0
    last_overflow: int = -1
    history: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ScaleRules:
    """Parameters of a loss scale, which is constant without `dynamic`; `window` is in steps."""

    initial: float
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    @staticmethod
    def of(config: LossScaleConfig) -> ScaleRules:
        return ScaleRules(
            initial=config.value or 2.0**config.initial_power,
            dynamic=not config.value,
            window=config.window,
            hysteresis=config.hysteresis,
            consecutive=config.consecutive_hysteresis,
            minimum=config.min,
        )

    def start(self) -> ScaleState:
        return ScaleState(self.initial, self.hysteresis, history=((0, self.initial),))

    def is_exhausted(self, state: ScaleState) -> bool:
        """Return True if another overflow cannot lower the scale."""
        return self.dynamic and state.patience <= 1 and state.scale <= self.minimum

    def after(self, state: ScaleState, overflow: bool) -> ScaleState:
        """Return the state after a step with or without overflow."""
        scale, patience = state.scale, state.patience
        last_overflow = state.steps if overflow else state.last_overflow
        if self.dynamic and overflow:
            if patience <= 1:
                scale = max(scale / FACTOR, min(self.minimum, scale))
            else:
                patience -= 1
        elif self.dynamic:
            good_steps = state.steps - last_overflow - 1
            doubles = good_steps > 0 and good_steps % self.window == 0
            scale *= FACTOR if doubles else 1.0
            patience = self.hysteresis if doubles or self.consecutive else patience
        history = state.history
        if scale != state.scale:
            history = (*history, (state.steps + 1, scale))[-MAX_HISTORY:]
        return ScaleState(scale, patience, state.steps + 1, last_overflow, history)

    def restored(self, saved: Mapping[str, Any]) -> ScaleState:
        """Return the state saved by `state_to_dict`; a constant scale is the configured one."""
        history = tuple((int(step), float(scale)) for step, scale in saved["history"])
        return ScaleState(
            float(saved["scale"]) if self.dynamic else self.initial,
            max(1, min(int(saved["patience"]), self.hysteresis)),
            int(saved["steps"]),
            int(saved["last_overflow"]),
            history,
        )


def state_to_dict(state: ScaleState) -> dict[str, Any]:
    """Return plain data for a checkpoint."""
    return asdict(state) | {"history": [list(change) for change in state.history]}


def exhausted_scale_error(state: ScaleState, culprits: Sequence[str]) -> TrainingError:
    """Return the error for gradients that overflow at the smallest scale in these parameters."""
    first, last = culprits[0], culprits[-1]
    module = first.rpartition(".")[0]
    history = ", ".join(
        f"{scale:g}" + (f" after step {step}" if step else "") for step, scale in state.history
    )
    where = f"first in {first!r}" + (f" of the module {module!r}" if module else "")
    if len(culprits) > 1:
        where += f", and in {len(culprits) - 1} more up to {last!r}"
    return TrainingError(
        f"gradients are not finite at the smallest loss scale, {state.scale:g}: {where}",
        because=f"the scale went {history}; values above 65504 are infinite in fp16, "
        "and backward carries infinities from later layers to earlier ones",
        remedy='write precision: bf16 (DeepSpeed: "bf16": {"enabled": true}), above all for models '
        "that were trained in bf16; or lower the learning rate, look at the loss and the data, or "
        "set loss_scale.min below 1",
    )
