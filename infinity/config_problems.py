"""What is wrong with a configuration, said for people: names, nearest names, values given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

# Top-level names that only a DeepSpeed configuration has.
DEEPSPEED_NAMES = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "allgather_size",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "random_ltd",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)

# What people call our words; the first that is among the words of a key is meant.
_MEANT = {
    "gpu": ("device",),
    "cuda": ("device",),
    "cpu": ("host",),
    "ram": ("host", "cpu"),
    "nvme": ("disk",),
    "ssd": ("disk",),
}


def explain(
    schema: type[BaseModel], where: str, raw: Mapping[str, Any], error: ValidationError
) -> str:
    """Return one text that lists every mistake in `raw`, read as `schema`, by its dotted name."""
    problems = []
    foreign = [name for name in raw if name in DEEPSPEED_NAMES]
    if foreign:
        names, verb = ", ".join(foreign), "is" if len(foreign) == 1 else "are"
        problems.append(
            f"{names} {verb} from a DeepSpeed configuration; initialize() and `infinity plan` take "
            'such a one as a whole, with keys of ours in its section "infinity"'
        )
    for detail in error.errors(include_url=False):
        # Told above; and a default that waits for another value fails only because that one did.
        told = detail["type"] == "extra_forbidden" and detail["loc"][0] in foreign
        if not told and detail["type"] != "default_factory_not_called":
            problems.append(_problem(schema, detail))
    heading = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    return f"{heading} in {where}:" + "".join(f"\n  - {problem}" for problem in problems)


def _problem(schema: type[BaseModel], detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    given = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(schema, detail["loc"])
        case "value_error":
            return f"{name}: {detail['ctx']['error']}"
        case "missing":
            return f"{name}: must be given"
        case "model_type":
            return f"{name}: is a section of keys and values, got {given!r}"
        case "literal_error":
            words = _words(detail["ctx"]["expected"])
            near = [word for word in _MEANT.get(str(given).lower(), ()) if word in words]
            near = near or difflib.get_close_matches(str(given), words, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{name}: should be {detail['ctx']['expected']}, got {given!r}{hint}"
        case _:
            message = detail["msg"].removeprefix("Input ")
            return f"{name}: {message[:1].lower()}{message[1:]}, got {given!r}"


def _words(expected: str) -> list[str]:
    return [word.strip("',") for word in expected.split() if word.startswith("'")]


def _unknown_key(schema: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    *parents, key = (str(part) for part in loc)
    fields = list(_section_at(schema, parents).model_fields)
    prefix = "".join(f"{parent}." for parent in parents)
    near = [prefix + name for name in difflib.get_close_matches(key, fields, n=1)]
    # A key may also have the right name in the wrong place.
    near = near or [name for name in _leaf_names(schema) if name.rpartition(".")[2] == key]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{prefix}{key}: unknown key; {hint}valid here: {', '.join(fields)}"


def _section_at(schema: type[BaseModel], names: Iterable[str]) -> type[BaseModel]:
    section = schema
    for name in names:
        section = _section_of(section.model_fields[name].annotation) or section
    return section


def _section_of(annotation: object) -> type[BaseModel] | None:
    candidates: tuple[object, ...] = (annotation, *get_args(annotation))
    for candidate in candidates:
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _leaf_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        below = _section_of(field.annotation)
        if below is None:
            yield prefix + name
        else:
            yield from _leaf_names(below, f"{prefix}{name}.")
