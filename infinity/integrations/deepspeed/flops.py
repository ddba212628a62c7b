"""DeepSpeed's flops profiler, based on `torch.utils.flop_counter`.

Counted are multiplications and additions of matrix products, attention and convolutions, in forward
and backward; two of them are one multiply-accumulate. Elementwise operations are not counted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.errors import ConfigError

_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))


class FlopsProfiler:
    """Counter of the operations that run between `start_profile()` and `stop_profile()`.

    Between the calls run the model or its engine, forward and optionally backward. Recomputed
    operations are counted as they run; `ds_engine` and `recompute_fwd_factor` are not used.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.started = False
        self._counter: Any = FlopCounterMode(display=False)
        self._start_s = self._duration_s = 0.0

    def start_profile(self, ignore_list: Any = None) -> None:
        """Start counting from zero; `ignore_list` is not used."""
        self.stop_profile()  # the mode of an earlier start would stay active
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self.started, self._start_s = True, time.perf_counter()

    def stop_profile(self) -> None:
        """Stop counting; the counts stay available."""
        if self.started:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._duration_s = time.perf_counter() - self._start_s
            self._counter.__exit__(None, None, None)
            self.started = False

    def reset_profile(self) -> None:
        """Reset the counts; a profile in progress goes on from zero."""
        was_started = self.started
        self.stop_profile()
        self._counter, self._duration_s = FlopCounterMode(display=False), 0.0
        if was_started:
            self.start_profile()

    def end_profile(self) -> None:
        """Stop counting and reset the counts."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the operations counted so far; as text with a unit if `as_string`."""
        flops = self._counter.get_total_flops()
        return _format_number(flops, "FLOPS") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates counted so far: half the operations."""
        macs = self.get_total_flops() / 2
        return _format_number(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds between start and stop, including waits."""
        return _format_number(self._duration_s, "s") if as_string else self._duration_s

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of elements of all parameters, on any tier."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return _format_number(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Write a table of modules, the largest first, to stdout or into a file.

        `module_depth` is the deepest level shown, -1 for all. Unless `detailed`, only the
        `top_modules` largest modules of each depth are shown.
        """
        lines = [
            f"step {profile_step}: {self.get_total_params(True)} parameters, "
            f"{self.get_total_flops(True)}, {self.get_total_duration(True)}"
        ]
        shown: dict[int, int] = {}
        by_module = {n: c for n, c in self._counter.get_flop_counts().items() if n != "Global"}
        for name, flops in sorted(by_module.items(), key=lambda item: -sum(item[1].values())):
            depth = name.count(".")
            shown[depth] = shown.get(depth, 0) + 1
            if (module_depth < 0 or depth <= module_depth) and (
                detailed or shown[depth] <= top_modules
            ):
                lines.append(
                    f"{'  ' * depth}{name}: {_format_number(sum(flops.values()), 'FLOPS')}"
                )
        text = "\n".join(lines) + "\n"
        if output_file is None:
            sys.stdout.write(text)
        else:
            Path(output_file).write_text(text, encoding="utf-8")


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: Any = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return `(flops, macs, params)` of one call: operations, multiply-accumulates, parameters.

    The model is called with `args` and `kwargs`, or with a tensor of ones of `input_shape`, after
    `warm_up` calls that are not counted. `mode` is "forward" or "generate". Raises `ConfigError` if
    there is no input.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    if not args and input_shape is not None:
        parameter = next(model.parameters(), torch.empty(()))
        args = (torch.ones(input_shape, dtype=parameter.dtype, device=parameter.device),)
    if not args and not kwargs:
        remedy = "input_shape=, args= or kwargs="
        raise ConfigError("get_model_profile() got no input", remedy=remedy)
    if mode not in ("forward", "generate"):
        raise ConfigError(f"mode is {mode!r}", remedy='"forward" or "generate"')
    call = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **kwargs)  # type: ignore[operator]
    profiler.start_profile(ignore_modules)
    call(*args, **kwargs)  # type: ignore[operator]
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _format_number(number: float, unit: str = "") -> str:
    """Format a number with the largest prefix that fits, as in "1.5 GFLOPS"."""
    prefix, factor = next((entry for entry in _PREFIXES if abs(number) >= entry[1]), ("", 1.0))
    return f"{round(number / factor, 2):g} {prefix}{unit}".rstrip()
