"""Engine with monitors and printed steps, as the configuration enables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infinity.integrations.deepspeed.engine import DeepSpeedEngine


def watch(engine: DeepSpeedEngine) -> None:
    """Attach the monitors and printed steps that an engine's configuration enables.

    If `deepspeed` is an alias of this library, write a summary of the configuration to stderr.
    """
    is_first = not engine.ranks.rank
    print_every = (engine._config_value("steps_per_print") if is_first else None) or math.inf
    if is_first and engine.translation is not None and "deepspeed" in sys.modules:
        sys.stderr.write(f"infinity: {engine.translation.summary()}\ninfinity: {engine!r}\n")
    watched = engine.monitor.enabled or print_every < math.inf
    if watched and type(engine) is DeepSpeedEngine:
        engine.__class__ = _WatchedEngine  # a subclass, so that other engines pay nothing
        assert isinstance(engine, _WatchedEngine)
        engine._print_every = print_every
        engine._last_print = time.perf_counter(), engine.global_samples
        engine._components.add_cleanup(engine.monitor.close)
        engine.optimizer.connect(engine.step, engine._discard_window)


class _WatchedEngine(DeepSpeedEngine):
    """`DeepSpeedEngine` that reports steps to monitors and stdout.

    `_losses` is the sum of the losses of the open accumulation window, as `backward` returns them;
    None if one is unknown because the script called `loss.backward()`.
    """

    _losses: Any = None
    _print_every = math.inf  # steps
    _last_print = (0.0, 0)  # time and number of samples at the last printed line

    def _known_loss(self) -> Any:
        if self._window.has_external_gradients:
            return None
        return self._losses if self._window.is_open else 0.0

    def _finish_external_backward(self) -> None:
        self._losses = self._known_loss()
        super()._finish_external_backward()

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        previous = self._known_loss()
        scaled = super().backward(loss, retain_graph, scale_wrt_gas)
        self._losses = None if previous is None else previous + scaled
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps > before:
            loss = {} if self._losses is None else {"train_loss": float(self._losses)}
            values = {**loss, "lr": self.get_lr()[0]}
            values |= {"loss_scale": float(self.loss_scale)} if self.fp16_enabled() else {}
            events = [(f"Train/Samples/{n}", v, self.global_samples) for n, v in values.items()]
            self.monitor.write_events(events)
            if self.global_steps % self._print_every == 0:
                self._print_step(loss)

    def _print_step(self, loss: Mapping[str, float]) -> None:
        now, samples = time.perf_counter(), self.global_samples
        speed = (samples - self._last_print[1]) / max(now - self._last_print[0], 1e-9)
        self._last_print = now, samples
        columns = [f"step={self.global_steps}", f"skipped={self.skipped_steps}"]
        columns += [f"loss={value:.4f}" for value in loss.values()]
        columns += [f"lr={[float(f'{rate:.6g}') for rate in self.get_lr()]}"]
        columns += [f"{speed:.1f} samples/s"]
        sys.stdout.write(", ".join(columns) + "\n")
