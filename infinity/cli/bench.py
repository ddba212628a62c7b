"""`infinity bench`: the rates of this machine, measured now and kept for plans and runs."""

from __future__ import annotations

import json

from infinity.cli import doctor
from infinity.cli.terminal import AsJson, Drives, command, stdout_is_ours
from infinity.sizes import format_count

_STATE_BYTES = 12  # per parameter, AdamW in bf16; each is read and written once a step


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
        print("\n".join(doctor.rate_lines(rates, machine.rates_origin)))
        if path:
            updated_per_s = rates["disk_mixed"] / (2 * _STATE_BYTES)
            print(
                f"           AdamW state swaps at {format_count(updated_per_s)} parameters/s",
                flush=True,
            )
