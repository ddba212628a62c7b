"""Smoke test of a machine with a GPU: its facts, and one run of each basic operation.

    python benchmarks/gpu/smoke.py --machine    facts; needs only the standard library
    python benchmarks/gpu/smoke.py              kernels, links, a training step, pinned memory; JSON

Parts are ordered by importance: one that fails or is stopped does not hide earlier ones. All except
the facts use the engine's `Device`, so that they run on the fake device as well.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from infinity.optim.cpu import Piece
    from infinity.storage.device import Device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

Say = Callable[[str], None]
Make = Callable[[], "Device"]  # the caller may close the device
SECONDS = 40.0  # for all parts; parts that start later are skipped
PINNED_GIB = 112  # in total; pinned memory of an 8B run
PINNED_STEP_GIB = 8
BESIDE_GIB = 6  # RAM that stays free for other processes
NUM_STEPS = 3
STUCK_S = 70.0  # all stacks are dumped to stderr then, before the caller times out


# --- facts: no package is needed ------------------------------------------------------------------


def machine_facts() -> Iterator[str]:
    """Yield facts of the machine as lines; those that cannot hang come first."""
    yield f"Python {sys.version.split()[0]} at {sys.executable}; {os.uname().release}"
    for name in ("cmake", "ninja", "c++", "g++", "clang++", "nvcc"):
        yield f"{name}: {shutil.which(name) or 'not on the PATH'}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield f"{header}: {'there' if header.exists() else 'NOT THERE'}"
    yield from (line for line in _read("/proc/meminfo").splitlines() if line.startswith("Mem"))
    yield f"CPUs: {len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled").strip() or "not known"
    yield f"transparent huge pages: {pages}"
    for path in Path("/sys/devices/system/node").glob("node[0-9]*"):
        yield f"NUMA {path.name}"
    yield from _output_of("df", "-h", ".")
    yield from _output_of(sys.executable, "-m", "pip", "list", "--format=freeze")
    yield from _output_of("nvidia-smi")
    yield from _output_of("nvidia-smi", "topo", "-m")


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


def _output_of(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    return (done.stdout or done.stderr).rstrip().splitlines()


# --- parts: each returns its results or raises ----------------------------------------------------


def kernels(make: Make, say: Say, left_s: float) -> dict[str, Any]:
    """Check that the device kernels are bitwise equal to the CPU kernels."""
    import torch

    from infinity.optim.cpu import CpuKernels
    from infinity.profiling.processor_rates import arena_bytes_for_pieces, make_pieces
    from infinity.storage.host_arena import HostArena
    from infinity.types import MomentFormat

    device, equal = make(), {}
    if (reason := device.why_no_kernels()) is not None:
        raise AssertionError(f"no kernels: {reason}")
    with CpuKernels() as cpu:
        for kind in (MomentFormat.FP32, MomentFormat.INT8):
            nbytes = arena_bytes_for_pieces(1)
            (cpu_piece,) = make_pieces(HostArena(nbytes), 1, kind)
            (device_piece,) = make_pieces(device.reserve(nbytes), 1, kind)
            for _ in range(3):
                cpu.update_all([cpu_piece])
                device.update([device_piece], device.compute_event()).wait()
            sums = device.begin_square_sums([device_piece.gradient]).result()
            pairs = zip(_written(cpu_piece), _written(device_piece), strict=True)
            is_equal = all(torch.equal(expected, actual.cpu()) for expected, actual in pairs)
            equal[kind.value] = is_equal and sums == [cpu.square_sum(cpu_piece.gradient)]
            say(f"kernels, {kind.value} moments: same bits as the CPU's: {equal[kind.value]}")
    assert all(equal.values()), equal
    return equal


def _written(piece: Piece) -> list[Tensor]:
    stored = [tensor for moment in piece.moments for tensor in (moment.values, moment.scales)]
    return [tensor for tensor in (piece.weight, piece.master_state, *stored) if tensor is not None]


def links(make: Make, say: Say, left_s: float) -> dict[str, Any]:
    """Measure copies in each direction and in both at once, bytes per second."""
    from infinity.profiling.processor_rates import measure_copies

    rates = measure_copies(make(), 1.5)
    for name, rate in rates.items():
        say(f"{name}: {rate / 1e9:.1f} GB/s")
    return rates


def overlap(make: Make, say: Say, left_s: float) -> dict[str, Any]:
    """Check that copies in each direction end while earlier compute still runs."""
    import torch

    from infinity.storage.host_arena import HostArena

    device, nbytes = make(), 64 << 20
    large = torch.ones(*(2 * (1 if device.host_clock else 8192,)), device=device.torch_device)
    ram, memory = HostArena(nbytes), device.reserve(nbytes)
    device.pin(ram)
    host_view, device_view = ram.view(0, nbytes), memory.view(0, nbytes)
    large @ large  # the first call loads the kernel
    device.compute_event().wait()
    overlaps: dict[str, Any] = {}
    for name in ("copy_h2d", "copy_h2d_unordered", "copy_d2h_unordered"):
        to_host = name == "copy_d2h_unordered"
        pair = (host_view, device_view) if to_host else (device_view, host_view)
        for _ in range(10):  # fp32: a fifth of a second
            large @ large
        compute = device.compute_event()
        getattr(device, name)(*pair).wait()
        overlaps[name] = not compute.done()
        compute.wait()
    say(f"copies end during compute: {overlaps}")
    warnings = list(device.warnings)
    device.close()  # before its registered memory is freed
    assert device.host_clock or all(overlaps.values()), f"copies wait for compute: {overlaps}"
    return overlaps | {"warnings": warnings}


def training(make: Make, say: Say, left_s: float) -> dict[str, Any]:
    """Check that a small model has equal losses with its state in RAM and on the device."""
    import presets
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import infinity

    losses, warnings, seconds = {}, list[str](), {}
    for tier in ("device", "host"):
        placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), tier)
        config = {"placement": placement, "precision": "bf16", "optimizer": {"lr": 1e-3}}
        model = presets.build(presets.shape_of("gpt-tiny"), torch.bfloat16, seed=1)
        device = make()
        engine, *_ = infinity.initialize(model, config, device=device)
        generator, step_losses = torch.Generator().manual_seed(1), []
        # The default attention on Hopper is not deterministic.
        with engine, sdpa_kernel(SDPBackend.MATH):
            for _ in range(NUM_STEPS):
                started = time.perf_counter()
                tokens = torch.randint(0, 256, (2, 4, 64), generator=generator)
                inputs, targets = tokens.to(device.torch_device)
                loss = engine(inputs, targets)
                engine.backward(loss)
                engine.step()
                step_losses.append(loss.item())
                seconds[tier] = time.perf_counter() - started
            warnings += engine.warnings
        losses[tier] = step_losses
        say(f"trained, all state on {tier}: losses {step_losses}, last step {seconds[tier]:.3f} s")
    assert losses["device"] == losses["host"], losses
    return {"losses": losses["host"], "step_s": seconds, "warnings": warnings}


def pinning(make: Make, say: Say, left_s: float) -> dict[str, Any]:
    """Touch and pin RAM in steps; return times, the reason of the end, and `MemTotal`.

    The RAM of some virtual machines grows during use.
    """
    from infinity.storage.host_arena import HostArena
    from infinity.storage.prefault import prefault

    device, arenas = make(), list[HostArena]()
    start, last_s = time.perf_counter(), 0.0
    touch_s = pinned_s = 0.0
    stopped = ""
    first_gib, available_gib = memory_gib()
    say(f"RAM: {first_gib:.1f} GiB in all, {available_gib:.1f} available")
    while len(arenas) * PINNED_STEP_GIB < PINNED_GIB:
        total_gib, available_gib = memory_gib()
        seconds_left = left_s - (time.perf_counter() - start)
        if available_gib < PINNED_STEP_GIB + BESIDE_GIB:
            stopped = f"{available_gib:.1f} GiB of {total_gib:.1f} are available"
        elif seconds_left < 1.5 * last_s:
            stopped = f"{seconds_left:.0f} s are left"
        if stopped:
            break
        arena = HostArena(int(PINNED_STEP_GIB * 2**30))
        arenas.append(arena)
        times = [time.perf_counter()]
        prefault(arena.view(0, arena.nbytes).data_ptr(), arena.nbytes)
        times.append(time.perf_counter())
        device.pin(arena)
        times.append(time.perf_counter())
        touch_s += times[1] - times[0]
        pinned_s += times[2] - times[1]
        last_s = times[2] - times[0]
        stopped = "".join(device.warnings)
        say(
            f"{len(arenas) * PINNED_STEP_GIB} GiB: made {touch_s:.1f} s, registered"
            f" {pinned_s:.1f} s in all; RAM {memory_gib()[0]:.1f} GiB"
        )
    say(f"stopped: {stopped or 'all are there'}")
    warnings, total_gib = list(device.warnings), memory_gib()[0]
    device.close()  # before its registered memory is freed
    return {
        "pinned_gib": len(arenas) * PINNED_STEP_GIB,
        "made_s": touch_s,
        "pinned_s": pinned_s,
        "stopped": stopped,
        "ram_gib": [first_gib, total_gib],
        "warnings": warnings,
    }


def memory_gib() -> tuple[float, float]:
    """Return the total and available RAM of the machine in GiB."""
    fields = dict(line.split(":") for line in _read("/proc/meminfo").splitlines())
    kib = [int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable")]
    return kib[0] / 2**20, kib[1] / 2**20


PARTS: dict[str, Callable[[Make, Say, float], dict[str, Any]]] = {
    "kernels": kernels, "links": links, "training": training, "overlap": overlap,
    "pinning": pinning,
}  # fmt: skip


def run_parts(make: Make, say: Say, seconds: float = SECONDS) -> dict[str, Any]:
    """Run all parts; `failed` lists those that raised, `warnings` those of engine and devices."""
    until, results = time.perf_counter() + seconds, dict[str, Any]()
    failed, warnings = [], list[str]()
    for name, part in PARTS.items():
        left_s = until - time.perf_counter()
        if left_s <= 0:
            failed.append(f"{name}: no time was left")
            continue
        try:
            results[name] = part(make, say, left_s)
            warnings += results[name].pop("warnings", [])
        except Exception as error:
            failed.append(f"{name}: {error}")
            say(traceback.format_exc())
    return results | {"failed": failed, "warnings": list(dict.fromkeys(warnings))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", action="store_true", help="facts alone")
    if parser.parse_args(arguments).machine:
        for line in machine_facts():
            print(line, flush=True)
        return 0

    import torch

    from infinity.storage.devices import resolve_device

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:

        def make() -> Device:
            return stack.enter_context(contextlib.closing(resolve_device(torch.device("cuda", 0))))

        faulthandler.dump_traceback_later(STUCK_S)
        results = run_parts(make, say)
        print(json.dumps(results), flush=True)  # before freeing memory, which takes seconds
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
