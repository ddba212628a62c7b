"""The stages of `gpu_check.sh`: which checks each runs, with budgets that an H200 machine has.

[Note: budgets]
The machine has 139 GiB on the GPU and 126 GiB of RAM, of which a run takes 80 % if it is told
nothing; 8B and 14B need more, and say so. Ours has 24 GiB of the GPU, but for 14B, which has nearly
all of it; a plan that chooses the schedule is told 5 % less, since its estimates may be off by as
much. On an H100 (79 GiB) plain torch at 8B and ours at 14B are left out.
tests/tools/test_gpu_check.py plans every check for such machines.

[Note: plain torch at 8B]
At 8k tokens it takes 127 GiB: 15 of bf16 weights, 30 of fp32 masters, 60 of moments, 15 of
gradients, and activations. An H200 has them. At more tokens, and on an H100, its time is that of
some of its blocks continued to all of them: forward, backward and update of every block are alike,
and without offload nothing overlaps. 8 blocks at 32k tokens take 45 GiB and activations of 15.

[Note: DeepSpeed at 8B]
ZeRO-3 offload to RAM takes 16 bytes a parameter and more, 120 GiB and more: it is compared at 1.5B.
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
# Two checks: one that is stopped does not hide the other.
KERNEL_TESTS = ("tests/gpu/test_fused_adam.py", "tests/gpu/test_standalone_cuda.py")
TRAINING_TESTS = ("tests/gpu/test_cuda.py", "tests/gpu/test_overlap.py")
# Tests of `make test` whose engines compute on the GPU where there is one: what users call.
INTEGRATION_TESTS = (
    "tests/integrations/huggingface", "tests/integrations/test_doors.py",
    "tests/train/test_saved_model.py", "tests/train/test_runs_training.py",
    "tests/train/test_train_command.py", "tests/integrations/test_lightning.py",
    "tests/unit/model/test_quantised.py", "tests/unit/training/test_engine.py",
    "tests/unit/training/test_engine_calls.py", "tests/unit/model/test_init.py",
    "tests/unit/training/test_values.py", "tests/unit/training/test_weights.py",
    "tests/unit/model/test_losses.py", "tests/unit/training/test_train_batch.py",
    "tests/unit/model/test_deferred.py", "tests/unit/model/test_offloaded_parameters.py",
    "tests/unit/offload/test_handed_parameters.py", "tests/unit/plan/test_activations.py",
    "tests/unit/training/test_loss_scale.py", "tests/tools/test_examples.py",
    "tests/integrations/test_deepspeed_modules.py", "tests/unit/optim/test_standalone.py",
)  # fmt: skip
WHOLE_GIB, PLAIN_8B_GIB, OURS_14B_GIB = 139, 131, 136  # of an H200; that these take
# Of the 32 blocks of 8B, for which plain torch has room on any card: see [Note: plain torch at 8B].
NUM_8B_BLOCKS, DERIVED_FROM = 32, (4, 8)
CAPPED = ("--device-budget", "24GiB")
WHOLE_RAM_GIB, LEFT_RAM_GIB = 126, 10  # of the machine; that stay with all but the run
OURS, BOTH = ("--only", "infinity_ram"), ("--only", "torch_ram,infinity_ram", "--alone")
# Activations differ in size: fixed segments would be split into pieces that fit no other block.
# Benchmarks get the same from `step/main.py`.
EXPANDABLE = ("env", "PYTORCH_ALLOC_CONF=expandable_segments:True")
# How tokens pass the model is the plan's choice, whatever `llama` tells the others.
PLANNED = ("--only", "infinity_plan")
BOTH_PLANNED = ("--only", "torch_ram,infinity_plan", "--alone")


@dataclass(frozen=True)
class Check:
    """A command, how long it may take, and whether its stdout is JSON to be kept.

    A `plain` one needs nothing that is built or carried, and comes before that. On a GPU of less
    than `device_gib` it is not run.
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
    """What the stages run, in order; results go to `out`, traces to `work`. For a GPU, and RAM, of
    so much.

    Speeds are measured first, once: plans choose placement by them, and bounds are made of them.
    """
    # -P: the source tree in the working directory has no native modules, the installed package has.
    package = [sys.executable, "-P", "-m"]
    # Plugins by name: those of the machine may be older than our pytest. Most of it is compiling.
    plugins = ("no:cacheprovider", "xdist.plugin", "pytest_timeout")
    tests = [*package, "pytest", "-q", "-n", "4", *(w for p in plugins for w in ("-p", p))]
    # One that hangs shows where, by its worker's end, while the others go on.
    timeouts = ["--timeout", "60", "--timeout-method", "thread", "-o", "faulthandler_timeout=45"]
    integrations = [*tests, "-n", "14", "--tb", "short", "-m", "not gpu and not big and not clock"]
    integrations += [*timeouts, *INTEGRATION_TESTS]
    tests += ["-m", "gpu", *timeouts]
    doctor = [*package, "infinity.cli", "doctor", "--path", "."]
    rates = Check("rates", 35, [*doctor, "--machine-file", str(out / "machine.json")])

    def traced(check: Check, contender: str = "infinity_ram") -> list[Check]:
        """With a trace of its last steps, and what it says."""
        folder = work / check.name
        command = [*check.command, "--traces", str(folder)]
        trace = str(folder / f"trace-{contender}.json")
        told = [*package, "infinity.cli", "trace", trace, "--json"]
        drawn = Check(f"{check.name}-trace", 15, told, json=True, device_gib=check.device_gib)
        return [replace(check, command=command), drawn]

    most_ram = ("--host-budget", f"{ram_gib - LEFT_RAM_GIB:.0f}GiB")
    small = llama("1.5b", 8192, 1, 3, *CAPPED)
    disk = ("--only", "infinity_disk", "--steps", "2")
    beside = BOTH_PLANNED if device_gib >= PLAIN_8B_GIB else PLANNED

    def larger(name: str, tokens: int) -> list[Check]:
        """8B at more tokens than plain torch has room for, beside some blocks of plain torch."""
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

    looks = [sys.executable, "-P", "benchmarks/gpu/smoke.py"]
    stage = {
        "smoke": [
            Check("machine", 20, [*looks, "--machine"], plain=True),
            Check("smoke", 80, looks, json=True),
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
            # The literal reading of "state in RAM": none of it where the GPU has room.
            step("step-1.5b-8k-state-in-ram", 60, *small, *BOTH, "--state", "host"),
        ],
        "disk": traced(
            step("step-1.5b-disk", 335, *llama("1.5b", 32768, 2, 1, *CAPPED, *disk)),
            "infinity_disk",
        ),
        "8b": traced(
            step("step-8b-8k", 335, *llama("8b", 8192, 1, 2, *CAPPED, *most_ram, *beside)),
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
    found = [check for name in stages for check in stage[name]]
    first = [check for check in found if check.plain]
    measured = [rates] if set(stages) - {"smoke", "integrations"} else []
    return [*first, *measured, *(check for check in found if not check.plain)]


def step(name: str, limit_s: float, *options: str) -> Check:
    """A run of `bench_step.py` on the GPU."""
    command = [sys.executable, "tools/bench_step.py", "--device", "cuda", "--json", *options]
    return Check(name, limit_s, command, json=True)


def llama(size: str, tokens: int, micro_batches: int, rounds: int, *options: str) -> list[str]:
    """Options of a Llama shape with blocks recomputed in backward."""
    return [
        *("--model", f"llama-{size}", "--tokens", str(tokens), "--context", "4096"),
        *("--micro-batches", str(micro_batches), "--checkpointing"),
        *("--rounds", str(rounds), "--warmup", "1", *options),
    ]
