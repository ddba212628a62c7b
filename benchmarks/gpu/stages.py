"""Checks of each stage of `gpu_check.sh`, with budgets for a machine with an H200.

[Note: budgets]
The machine has 139 GiB on the GPU and 126 GiB of RAM. A run uses 80 % of the RAM by default; 8B and
14B need more and set a budget. infinity gets 24 GiB of the GPU, and nearly all of it at 14B. The
budget of a plan that chooses the schedule is 5 % lower, the tolerance of its estimates.
On an H100 (79 GiB), plain torch at 8B and infinity at 14B are skipped.
tests/tools/test_gpu_check.py plans every check for these machines.

[Note: plain torch at 8B]
At 8k tokens it takes 127 GiB: 15 of bf16 weights, 30 of fp32 masters, 60 of moments, 15 of
gradients, and activations. They fit an H200. With more tokens, and on an H100, its time is
extrapolated from a few blocks: forward, backward and update of all blocks are equal, and without
offload nothing overlaps. 8 blocks at 32k tokens take 45 GiB, and 15 GiB of activations.

[Note: DeepSpeed at 8B]
ZeRO-3 offload to RAM takes at least 16 bytes per parameter, 120 GiB: it is compared at 1.5B.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

STAGES = (
    "smoke", "tests", "integrations", "8b-32k", "1.5b-fsdp", "1.5b", "8b", "8b-16k", "disk",
    "8b-32k-m4", "14b", "more",
)  # fmt: skip
# Two checks, so that a stop of one does not hide the other.
KERNEL_TESTS = ("tests/gpu/test_fused_adam.py", "tests/gpu/test_standalone_cuda.py")
TRAINING_TESTS = ("tests/gpu/test_cuda.py", "tests/gpu/test_overlap.py")
# Tests of `make test` of user-facing features, whose engines use the GPU if there is one.
INTEGRATION_TESTS = (
    "tests/integrations/huggingface", "tests/integrations/test_doors.py",
    "tests/train/test_saved_model.py", "tests/train/test_runs_training.py",
    "tests/train/test_train_command.py", "tests/integrations/test_lightning.py",
    "tests/unit/model/test_quantized.py", "tests/unit/training/test_engine.py",
    "tests/unit/training/test_engine_calls.py", "tests/unit/model/test_init.py",
    "tests/unit/training/test_values.py", "tests/unit/training/test_weights.py",
    "tests/unit/model/test_losses.py", "tests/unit/training/test_train_batch.py",
    "tests/unit/model/test_deferred.py", "tests/unit/model/test_offloaded_parameters.py",
    "tests/unit/offload/test_passed_parameters.py", "tests/unit/plan/test_activations.py",
    "tests/unit/training/test_loss_scale.py", "tests/tools/test_examples.py",
    "tests/integrations/test_deepspeed_modules.py", "tests/unit/optim/test_standalone.py",
)  # fmt: skip
WHOLE_GIB, PLAIN_8B_GIB, OURS_14B_GIB = 139, 131, 136  # H200; these runs
# Blocks of 8B, and numbers of them that fit any GPU: [Note: plain torch at 8B].
NUM_8B_BLOCKS, DERIVED_FROM = 32, (4, 8)
CAPPED = ("--device-budget", "24GiB")
WHOLE_RAM_GIB, LEFT_RAM_GIB = 126, 10  # of the machine; reserved for other processes
OURS, BOTH = ("--only", "infinity_ram"), ("--only", "torch_ram,infinity_ram", "--alone")
# Activations differ in size: fixed segments would fragment. `step/main.py` sets it for benchmarks.
EXPANDABLE = ("env", "PYTORCH_ALLOC_CONF=expandable_segments:True")
# The plan chooses the batch schedule; the options of `llama` apply to other contenders.
PLANNED = ("--only", "infinity_plan")
BOTH_PLANNED = ("--only", "torch_ram,infinity_plan", "--alone")


@dataclass(frozen=True)
class Check:
    """A command with its time limit in seconds; `json` if its stdout is a JSON report.

    A `plain` check needs no build and no wheels, and runs before them. A check is skipped on a GPU
    with less than `device_gib`.
    """

    name: str
    limit_s: float
    command: Sequence[str]
    json: bool = False
    plain: bool = False
    device_gib: float = 0


def checks_of(
    stages: Sequence[str],
    out: Path,
    work: Path,
    device_gib: float = WHOLE_GIB,
    ram_gib: float = WHOLE_RAM_GIB,
) -> list[Check]:
    """Return the checks of `stages` in order, for a machine with `device_gib` and `ram_gib`.

    Results are written to `out`, traces to `work`. Rates are measured first, once: plans and bounds
    are computed from them.
    """
    # -P: import the installed package; the source tree has no native modules.
    package = [sys.executable, "-P", "-m"]
    # Plugins by name: others on the machine may not fit this pytest. Compiling takes most time.
    plugins = ("no:cacheprovider", "xdist.plugin", "pytest_timeout")
    tests = [*package, "pytest", "-q", "-n", "4", *(w for p in plugins for w in ("-p", p))]
    # A test that hangs prints its stacks and ends its worker; the others continue.
    timeouts = ["--timeout", "60", "--timeout-method", "thread", "-o", "faulthandler_timeout=45"]
    integrations = [*tests, "-n", "14", "--tb", "short", "-m", "not gpu and not big and not clock"]
    integrations += [*timeouts, *INTEGRATION_TESTS]
    tests += ["-m", "gpu", *timeouts]
    doctor = [*package, "infinity.cli", "doctor", "--path", "."]
    rates = Check("rates", 35, [*doctor, "--machine-file", str(out / "machine.json")])

    def traced(check: Check, contender: str = "infinity_ram") -> list[Check]:
        """Return the check with a trace of its last steps, and the analysis of the trace."""
        folder = work / check.name
        command = [*check.command, "--traces", str(folder)]
        trace = str(folder / f"trace-{contender}.json")
        analyze = [*package, "infinity.cli", "trace", trace, "--json"]
        analysis = Check(f"{check.name}-trace", 15, analyze, json=True, device_gib=check.device_gib)
        return [replace(check, command=command), analysis]

    most_ram = ("--host-budget", f"{ram_gib - LEFT_RAM_GIB:.0f}GiB")
    small = llama("1.5b", 8192, 1, 3, *CAPPED)
    disk = ("--only", "infinity_disk", "--steps", "2")
    contenders = BOTH_PLANNED if device_gib >= PLAIN_8B_GIB else PLANNED

    def larger(name: str, tokens: int) -> list[Check]:
        """Return checks of 8B at `tokens`, with plain torch on a few blocks (all do not fit)."""
        plain = [
            step(
                f"step-8b-{name}-plain-{layers}",
                60,
                *llama("8b", tokens, 1, 2, "--only", "torch_ram", "--layers", str(layers)),
            )
            for layers in DERIVED_FROM
        ]
        options = llama("8b", tokens, 1, 2, *CAPPED, *most_ram, *PLANNED)
        return [*plain, *traced(step(f"step-8b-{name}", 220, *options), "infinity_plan")]

    smoke = [sys.executable, "-P", "benchmarks/gpu/smoke.py"]
    stage = {
        "smoke": [
            Check("machine", 20, [*smoke, "--machine"], plain=True),
            Check("smoke", 80, smoke, json=True),
        ],
        "tests": [
            Check("tests-kernels", 100, [*tests, *KERNEL_TESTS]),
            Check("tests-training", 150, [*EXPANDABLE, *tests, *TRAINING_TESTS]),
        ],
        "integrations": [Check("tests-integrations", 170, integrations)],
        "more": [
            Check("adam", 40, [sys.executable, "tools/bench_adam_cuda.py"]),
            step("step-gpt-124m", 90, "--model", "gpt-124m", "--rounds", "3"),
        ],
        "1.5b-fsdp": traced(
            step(
                "step-1.5b-8k-fsdp",
                200,
                *small,
                *("--only", "torch_ram,infinity_ram,infinity_plan", "--alone"),
                *("--state", "host", "--compare", "fsdp2"),
            )
        ),
        "1.5b": [
            *traced(step("step-1.5b-8k", 220, *small, *BOTH, "--compare", "deepspeed-cpu")),
            step("step-1.5b-32k", 60, *llama("1.5b", 32768, 2, 3, *CAPPED, *BOTH)),
            # All state in RAM, even if the GPU has free memory.
            step("step-1.5b-8k-state-in-ram", 60, *small, *BOTH, "--state", "host"),
        ],
        "disk": traced(
            step("step-1.5b-disk", 335, *llama("1.5b", 32768, 2, 1, *CAPPED, *disk)),
            "infinity_disk",
        ),
        "8b": traced(
            step("step-8b-8k", 335, *llama("8b", 8192, 1, 2, *CAPPED, *most_ram, *contenders)),
            "infinity_plan",
        ),
        "8b-16k": larger("16k", 16384),
        "8b-32k": larger("32k", 32768),
        "8b-32k-m4": traced(
            step("step-8b-32k-m4", 335, *llama("8b", 32768, 4, 2, *CAPPED, *most_ram, *OURS))
        ),
        "14b": traced(
            replace(
                step(
                    "step-14b-32k",
                    335,
                    *llama("14b", 32768, 1, 2, "--device-budget", "134GiB", *most_ram, *PLANNED),
                ),
                device_gib=OURS_14B_GIB,
            ),
            "infinity_plan",
        ),
    }
    checks = [check for name in stages for check in stage[name]]
    plain_checks = [check for check in checks if check.plain]
    measured = [rates] if set(stages) - {"smoke", "integrations"} else []
    return [*plain_checks, *measured, *(check for check in checks if not check.plain)]


def step(name: str, limit_s: float, *options: str) -> Check:
    """Return the check that runs `bench_step.py` on the GPU."""
    command = [sys.executable, "tools/bench_step.py", "--device", "cuda", "--json", *options]
    return Check(name, limit_s, command, json=True)


def llama(size: str, tokens: int, micro_batches: int, rounds: int, *options: str) -> list[str]:
    """Return the options of a Llama shape with blocks recomputed in backward."""
    return [
        *("--model", f"llama-{size}", "--tokens", str(tokens), "--context", "4096"),
        *("--micro-batches", str(micro_batches), "--checkpointing"),
        *("--rounds", str(rounds), "--warmup", "1", *options),
    ]
