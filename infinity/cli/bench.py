"""`infinity bench`: the rates of this machine, measured now and kept for plans and runs."""

from __future__ import annotations

import json

from infinity.cli import doctor
from infinity.cli.terminal import AsJson, Drives, command, stdout_is_ours
from infinity.sizes import format_count, format_duration, format_rate

_STATE_BYTES = 12  # per parameter, AdamW in bf16; each is read and written once a step
_8B = 8.03e9  # parameters of Llama 3.1 8B
# Bytes per second, reading and writing at once, from which on a drive is called so.
_VERDICTS = (
    (5e9, "a fast drive for this"),
    (2e9, "a usual drive for this"),
    (0.0, "a slow drive for this (those of PCIe 4 reach 5 to 7 GB/s)"),
)


def bench(path: Drives = None, as_json: AsJson = False) -> None:
    """Measure this machine: disk, copies, optimizer updates and matrix products.

    Takes a few seconds, and is kept: `infinity plan` and runs with these paths and the defaults of
    `io` go by it. How near that is to what the drives can do: tools/bench_swap.py of the source.
    """
    with command():
        with stdout_is_ours():
            machine = doctor.describe([part.expanduser() for part in path or []], True)
        rates = machine.as_dict()["rates"]
        if as_json:
            print(json.dumps({"rates": rates, "origin": machine.rates_origin}), flush=True)
            return
        if path:
            print(_verdict(rates["disk_read"], rates["disk_write"], rates["disk_mixed"]))
        print("\n".join(doctor.rate_lines(rates, machine.rates_origin)), flush=True)


def _verdict(read: float, write: float, both: float) -> str:
    """What bytes per second of a drive mean for training."""
    word = next(word for least, word in _VERDICTS if both >= least)
    per_s = both / (2 * _STATE_BYTES)
    return (
        f"{word}: {format_rate(read)} read, {format_rate(write)} written, {format_rate(both)} "
        f"both at once; AdamW state swaps at {format_count(per_s)} parameters/s, that of an 8B "
        f"model in {format_duration(_8B / per_s)}"
    )
