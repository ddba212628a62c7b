"""The whole table, and the names that keys had before."""

from __future__ import annotations

from infinity.integrations.deepspeed.draft import Key
from infinity.integrations.deepspeed.keys import table
from infinity.integrations.deepspeed.keys_other import OTHERS
from infinity.integrations.deepspeed.keys_training import TRAINING
from infinity.integrations.deepspeed.keys_zero import ZERO_AND_OFFLOAD

KEYS: dict[str, Key] = table(TRAINING, ZERO_AND_OFFLOAD, OTHERS)

_ZERO = "zero_optimization."
_OLD_IN_ZERO = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "cpu_offload_params": "cpu_offload_param",
}
# Other names of keys and sections, all accepted by DeepSpeed now or once.
OLD_NAMES: dict[str, str] = {
    "bfloat16": "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "aio.thread_count": "aio.intra_op_parallelism",
    **{_ZERO + old: _ZERO + new for old, new in _OLD_IN_ZERO.items()},
}

# Sections whose keys depend on `type`: what is not in the table is judged there.
OPEN = ("optimizer.params", "scheduler.params")

SECTIONS = frozenset(
    ".".join(parts[:depth])
    for parts in (name.split(".") for name in KEYS)
    for depth in range(1, len(parts))
)


def names_in(section: str) -> list[str]:
    """The names that may stand in a section ("" is the top), old ones last."""
    prefix = f"{section}." if section else ""
    names = [*KEYS, *OLD_NAMES]
    below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return list(dict.fromkeys(name.split(".")[0] for name in below))


def as_markdown() -> str:
    """The table as it stands in docs/migrating-from-deepspeed.md."""
    lines = ["| key | there | here | note |", "| --- | --- | --- | --- |"]
    olds: dict[str, list[str]] = {}
    for old, new in OLD_NAMES.items():
        olds.setdefault(new, []).append(old.rpartition(".")[2])
    for key in KEYS.values():
        verdict = f"**refused** {key.when}" if key.when else str(key.verdict)
        note = f"{key.note}: {key.remedy}" if key.remedy else key.note
        if key.name in olds:
            note += f" (also: {', '.join(f'`{old}`' for old in olds[key.name])})"
        cells = (f"`{key.name}`", key.default, verdict, note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
