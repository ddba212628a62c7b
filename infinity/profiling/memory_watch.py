"""Monitoring of unreserved memory: activations, gradients of autograd, and other growth.

[Note: measured memory]
Resident memory is sampled at unit boundaries, at most every 50 ms, and compared with the kernel's
high-water mark, which covers the time between samples. The temporary memory of a step is its peak
less the memory held after it, with freed heap returned. In the first step ranges of gradients are
touched for the first time, which can hide a peak in its forward: the first number is a lower
bound, later ones are exact. On a GPU the counters of torch's allocator are exact from the first
step.

[Note: stop before the kernel does]
When memory comes near a limit, freed heap is returned first. When peaks exceed nine tenths of a
budget, it is also returned before each backward and after each step, so that no peak includes it
(142 MiB of 3 GiB, for gpt-350m). If memory is still near the limit, a warning is issued once; above
the limit an error with names and numbers is raised, while there is memory left to report it. Limits
are the host budget, if given, and the memory available to this process on the machine or in its
control group.
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
from infinity.plan.machine import memory_headroom, peak_ram_bytes, shared_rss_bytes
from infinity.plan.plan import Plan
from infinity.storage.device import Device
from infinity.storage.reservations import PROCESS
from infinity.types import Tier

SAMPLE_S = 0.05
LIMIT_CHECK_S = 0.5  # interval; reading control group limits takes several files
RECHECKS, LOOK_AGAIN_S = 5, 0.1  # retries before a run ends for lack of memory
TRIM_S = 1.0  # interval; returning freed heap takes some ms, and it is allocated again
TRIM_SHARE = 0.9  # of a budget: above it, freed heap is returned before the next peak
NEAR_SHARE = 0.98  # of a budget: warning; error above the budget
SPARE_SHARE = 0.02  # of the limit: error below it, warning below twice
MEASURED_STEPS = 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Monitor of memory at unit boundaries; used by the training thread only.

    `budget` is the requested host budget in bytes, or None. No reference to `model` is stored.
    `logits_at_once` is the number of tokens in a chunk of logits; None if logits are not chunked.
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
        self._other_ranks_bytes = (plan.ranks // plan.nodes - 1) * plan.shared_bytes
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._reserved_before = PROCESS.ram()
        self._next_s = 0.0
        self._next_limit_check_s = 0.0
        self._next_trim_s = 0.0
        self._peak = 0
        self._last_high_water = self._high_water()
        self._max_peak = 0  # peak of all completed steps
        self._steps = 0
        self._tokens = 0
        self._warned = False

    def close(self) -> None:
        """Close `/proc/self/statm`; idempotent."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    # --- at unit boundaries ----------------------------------------------------------------------

    def at(self, unit: int, phase: str) -> None:
        """Sample memory when a unit begins to compute, or a gradient of it has arrived.

        Raises `DoesNotFitError` if memory exceeds a limit.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (SAMPLE_S if self._steps >= MEASURED_STEPS else SAMPLE_S / 10)
        self._sample(unit, phase, now_s)

    def saw(self, inputs: Iterable[object]) -> None:
        """Record the maximum number of tokens in the inputs of a unit."""
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
            self._next_limit_check_s = 0.0
            held = self._resident()
            near = self._nearest(held, now_s)
            if near is None:
                return
        limit, is_exceeded = near
        if is_exceeded:
            raise self._error(unit, phase, held, limit)
        if not self._warned:
            self._warned = True
            text = str(self._error(unit, phase, held, limit))
            warnings.warn(text, InfinityWarning, stacklevel=2)

    def _nearest(self, held: int, now_s: float) -> tuple[str, bool] | None:
        """Return a text about a limit that is near, and True if it is exceeded; None if none is."""
        budget = self._budget
        if budget is not None and held > NEAR_SHARE * budget:
            added = self._later_reservations()
            if held > NEAR_SHARE * (budget + added):
                return f"budget.host is {format_size(budget)}", held > budget + added
        if now_s < self._next_limit_check_s:
            return None
        self._next_limit_check_s = now_s + LIMIT_CHECK_S
        limit, left_bytes = memory_headroom()
        for _ in range(RECHECKS):  # page cache write-back and growing RAM are delayed
            if left_bytes >= SPARE_SHARE * limit:
                break
            time.sleep(LOOK_AGAIN_S)
            limit, left_bytes = memory_headroom()
        if left_bytes > 2 * SPARE_SHARE * limit:
            return None
        text = (
            f"{format_size(left_bytes)} are left of {format_size(limit)} available to this process"
        )
        return text, left_bytes < SPARE_SHARE * limit

    def _error(self, unit: int, phase: str, held: int, limit: str) -> DoesNotFitError:
        planned = self._plan.tier_bytes
        planned_bytes = planned[Tier.HOST] + (planned[Tier.DEVICE] if self._plan.unified else 0)
        planned_text = format_size(planned_bytes)
        because = f"{planned_text} were planned; activations and gradients come on top"
        estimate = self._estimated()
        if estimate is not None and self._plan.unified:
            because += f", estimated at {format_size(estimate.total)} for {self._tokens:,} tokens"
        return DoesNotFitError(
            f"in the {phase} of unit {self._plan.units[unit].name!r} the process holds "
            f"{format_size(held)} of RAM (host tier): {limit}",
            because=because + ", and so does other data of the program",
            remedy="smaller micro-batches (and more gradient_accumulation_steps), "
            "torch.utils.checkpoint around blocks, moments or gradients on disk "
            "(placement.gradients=disk), or a larger budget.host",
        )

    def turn(self) -> None:
        """Return freed heap at a backward or after a step if peaks are near the budget."""
        if self._budget is None:
            return
        if self._max_peak > TRIM_SHARE * (self._budget + self._later_reservations()):
            return_freed_memory()

    # --- at the end of a step --------------------------------------------------------------------

    def step(self) -> dict[str, int]:
        """Return memory statistics of the step that has just ended, and begin the next one.

        "peak" is the maximum, in bytes. The first two steps also have "held", the bytes held after
        the step, "activations", the difference, "tokens" of a micro-batch, and "estimated", the
        estimate of activations for these tokens by `plan.activations`.
        """
        peak = self._peak
        high_water = self._high_water()
        if high_water > self._last_high_water:  # the peak was between two samples
            peak = max(peak, high_water)
        report = {"peak": peak}
        if self._steps < MEASURED_STEPS and self._statm >= 0:
            if self._accelerator is None:
                return_freed_memory()
            held = self._on_device() if self._accelerator else self._resident()
            estimate = self._estimated()
            report |= {"held": held, "activations": max(peak - held, 0), "tokens": self._tokens}
            if estimate is not None:
                report["estimated"] = estimate.total
        self._max_peak = max(self._max_peak, peak)
        self.turn()
        self._steps += 1
        self._peak = 0
        self._last_high_water = high_water
        return report

    def _later_reservations(self) -> int:
        """Return the bytes of RAM reserved by engines created after this one."""
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
        return held - self._other_ranks_resident()

    def _other_ranks_resident(self) -> int:
        """Return shared bytes of other ranks that the kernel counts for this process."""
        if not self._other_ranks_bytes:
            return 0
        return min(max(shared_rss_bytes() - self._plan.shared_bytes, 0), self._other_ranks_bytes)

    def _on_device(self) -> int:
        return int(self._module.memory_allocated(self._accelerator))

    def _high_water(self) -> int:
        if self._accelerator is not None:
            return int(self._module.max_memory_allocated(self._accelerator))
        return peak_ram_bytes() - self._other_ranks_resident()
