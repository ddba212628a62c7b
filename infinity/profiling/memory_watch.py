"""Watches unreserved memory: activations, autograd's gradients, and other growth.

[Note: measured memory]
Resident memory is read at unit boundaries, at most every 50 ms, and compared with the kernel's
high-water mark, which sees what lies between. What a step needs beside all that rests is the peak
less what is there when it is over, freed heap given back. In the first step ranges of gradients
are touched for the first time, so that a peak in its forward can hide behind them: the first
number is a lower bound, from the second step on it is exact. On a GPU torch's allocator counts,
exactly and from the first step.

[Note: stop before the kernel does]
Where memory comes near a limit, freed heap is given back first; and where peaks fill nine tenths of
a budget, before each backward and after each step, so that it is in no peak (142 MiB of 3 GiB, for
gpt-350m). What still is too much is told once as a warning, and where it passes the limit as an
error, with names and numbers, while there is memory left to say it. Limits are the host budget if
one was given, and the memory that the machine or a control group lets this process have.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from infinity.common.accelerators import is_accelerator, module_of
from infinity.common.malloc import return_freed_memory
from infinity.common.sizes import format_size
from infinity.errors import DoesNotFitError, InfinityWarning
from infinity.model.targets import target_of
from infinity.plan.activations import ActivationModel, Activations
from infinity.plan.machine import high_water_bytes, memory_room, shared_rss_bytes
from infinity.plan.plan import Plan
from infinity.storage.device import Device
from infinity.storage.reservations import PROCESS
from infinity.types import Tier

SAMPLE_S = 0.05
ROOM_S = 0.5  # the control group's own numbers take a few files
LOOKS_AGAIN, LOOK_AGAIN_S = 5, 0.1  # before a run ends for want of room
TRIM_S = 1.0  # giving freed heap back takes some ms, and it is asked for again
TRIM_SHARE = 0.9  # of a budget: where a peak was higher, freed heap shall not be in the next one
NEAR_SHARE = 0.98  # of a budget: a warning; above it all: an error
SPARE_SHARE = 0.02  # of what the machine lets us have: below it an error, below twice a warning
MEASURED_STEPS = 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Samples memory at unit boundaries; used by the training thread only.

    `budget` is a host budget that was asked for, in bytes, else None. `model` is looked at now,
    and not kept. `logits_at_once` are the tokens of a chunk of logits, None if they are whole.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        device: Device,
        budget: int | None,
        logits_at_once: int | None,
    ) -> None:
        self._plan = plan
        self._logits_at_once = logits_at_once
        target = target_of("", model, {})
        self._model = ActivationModel(plan.units, lookups=target.lookups, heads=target.heads)
        self._accelerator = device.torch_device if is_accelerator(device.torch_device) else None
        self._module = module_of(device.torch_device.type)
        self._budget = budget
        self._others = (plan.ranks // plan.nodes - 1) * plan.shared_bytes
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._reserved_before = PROCESS.ram()
        self._next_s = 0.0
        self._next_room_s = 0.0
        self._next_trim_s = 0.0
        self._peak = 0
        self._mark = self._high_water()
        self._highest = 0  # of all peaks, in steps that are over
        self._steps = 0
        self._tokens = 0
        self._warned = False

    def close(self) -> None:
        """Close the file of statistics; idempotent."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    # --- at unit boundaries ----------------------------------------------------------------------

    def at(self, unit: int, phase: str) -> None:
        """A unit begins to compute, or a gradient of it has arrived.

        Raises `DoesNotFitError` where memory has passed a limit.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (SAMPLE_S if self._steps >= MEASURED_STEPS else SAMPLE_S / 10)
        self._sample(unit, phase, now_s)

    def saw(self, inputs: Iterable[object]) -> None:
        """Inputs of a unit: the most tokens that one was given."""
        if self._steps >= MEASURED_STEPS:
            return
        for tensor in inputs:
            if isinstance(tensor, Tensor) and not tensor.is_nested and tensor.numel():
                width = tensor.shape[-1] if tensor.is_floating_point() and tensor.dim() else 1
                self._tokens = max(self._tokens, tensor.numel() // width)

    def _sample(self, unit: int, phase: str, now_s: float) -> None:
        if self._statm < 0:
            return
        held = self._resident()
        self._peak = max(self._peak, self._on_device() if self._accelerator else held)
        near = self._nearest(held, now_s)
        if near is None:
            return
        if near[1] or now_s >= self._next_trim_s:
            self._next_trim_s = now_s + TRIM_S
            return_freed_memory()
            self._next_room_s = 0.0
            held = self._resident()
            near = self._nearest(held, now_s)
            if near is None:
                return
        what, passed = near
        if passed:
            raise self._error(unit, phase, held, what)
        if not self._warned:
            self._warned = True
            text = str(self._error(unit, phase, held, what))
            warnings.warn(text, InfinityWarning, stacklevel=2)

    def _nearest(self, held: int, now_s: float) -> tuple[str, bool] | None:
        """Describe the limit that is near, and whether it was passed; None if none is."""
        budget = self._budget
        if budget is not None and held > NEAR_SHARE * budget:
            more = self._more()
            if held > NEAR_SHARE * (budget + more):
                return f"budget.host is {format_size(budget)}", held > budget + more
        if now_s < self._next_room_s:
            return None
        self._next_room_s = now_s + ROOM_S
        limit, room = memory_room()
        for _ in range(LOOKS_AGAIN):  # a page cache that is written, or RAM that grows, lags behind
            if room >= SPARE_SHARE * limit:
                break
            time.sleep(LOOK_AGAIN_S)
            limit, room = memory_room()
        if room > 2 * SPARE_SHARE * limit:
            return None
        where = f"of the {format_size(limit)} this process may have {format_size(room)} are left"
        return where, room < SPARE_SHARE * limit

    def _error(self, unit: int, phase: str, held: int, what: str) -> DoesNotFitError:
        planned = self._plan.tier_bytes
        ours = planned[Tier.HOST] + (planned[Tier.DEVICE] if self._plan.unified else 0)
        because = f"{format_size(ours)} were planned; activations and gradients come on top"
        guess = self._estimated()
        if guess is not None and self._plan.unified:
            because += f", estimated at {format_size(guess.total)} for {self._tokens:,} tokens"
        return DoesNotFitError(
            f"in the {phase} of unit {self._plan.units[unit].name!r} the process holds "
            f"{format_size(held)} of RAM (host tier): {what}",
            because=because + ", and so does whatever else the program keeps in RAM",
            remedy="smaller micro-batches (and more gradient_accumulation_steps), "
            "torch.utils.checkpoint around blocks, moments or gradients on disk "
            "(placement.gradients=disk), or a larger budget.host",
        )

    def turn(self) -> None:
        """A backward begins, or a step is over: freed heap goes back where it may be missed."""
        if self._budget is not None and self._highest > TRIM_SHARE * (self._budget + self._more()):
            return_freed_memory()

    # --- a step is over --------------------------------------------------------------------------

    def step(self) -> dict[str, int]:
        """Return the peak bytes of the step that has just ended; the next one begins.

        "peak" is the most that was held. Of the first two steps also: "rests", what was held when
        the step was over, "activations", the difference, "estimated", what `plan.activations`
        says of them, and the "tokens" of a micro-batch that it says it for.
        """
        peak = self._peak
        mark = self._high_water()
        if mark > self._mark:  # the kernel saw more than the samples did
            peak = max(peak, mark)
        report = {"peak": peak}
        if self._steps < MEASURED_STEPS and self._statm >= 0:
            if self._accelerator is None:
                return_freed_memory()
            held = self._on_device() if self._accelerator else self._resident()
            guess = self._estimated()
            report |= {"rests": held, "activations": max(peak - held, 0), "tokens": self._tokens}
            if guess is not None:
                report["estimated"] = guess.total
        self._highest = max(self._highest, peak)
        self.turn()
        self._steps += 1
        self._peak = 0
        self._mark = mark
        return report

    def _more(self) -> int:
        """Bytes of RAM that engines reserved which were made since."""
        return max(PROCESS.ram() - self._reserved_before, 0)

    def _estimated(self) -> Activations | None:
        if not self._tokens:
            return None
        return self._model.of(
            self._tokens,
            recompute=self._plan.saved.recompute,
            slices=self._plan.saved.slices,
            logits_at_once=self._logits_at_once,
        )

    # --- readings --------------------------------------------------------------------------------

    def _resident(self) -> int:
        """Return resident bytes of this process, without shared RAM of other ranks."""
        held = int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE_BYTES
        return held - self._of_others()

    def _of_others(self) -> int:
        """Return shared bytes of other ranks that the kernel counts for this process."""
        if not self._others:
            return 0
        return min(max(shared_rss_bytes() - self._plan.shared_bytes, 0), self._others)

    def _on_device(self) -> int:
        return int(self._module.memory_allocated(self._accelerator))

    def _high_water(self) -> int:
        if self._accelerator is not None:
            return int(self._module.max_memory_allocated(self._accelerator))
        return high_water_bytes() - self._of_others()
