"""Merging of TrainingArguments and a configuration for `InfinityTrainer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.common.accelerators import num_accelerators
from infinity.config.optimizer import SchedulerConfig
from infinity.config.schema import Config, load_config
from infinity.config.source import read_source
from infinity.distributed.environment import num_launched
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.config import (
    INFINITY_SECTION,
    Translation,
    translate_deepspeed,
)
from infinity.integrations.deepspeed.source import Source, find_source
from infinity.integrations.huggingface.packages import transformers
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.rules import RULES

_QUANTIZED_OPTIMIZERS = ("8bit", "4bit", "bnb", "paged")


class ParameterGroupsOptimizer(torch.optim.Optimizer):
    """Placeholder optimizer that receives the parameter groups from a Trainer; cannot step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise `AssertionError`: the optimizer of the engine does the steps."""
        raise AssertionError("placeholder for parameter groups: cannot step")


def check_name(name: str) -> None:
    """Raise `ConfigError` for a `TrainingArguments.optim` with its own format of state."""
    name = str(getattr(name, "value", name))
    if any(word in name for word in _QUANTIZED_OPTIMIZERS):
        raise ConfigError(
            f"optim={name!r} stores its state on the GPU, in its own format",
            because="the engine stores optimizer state, on a tier with free memory",
            remedy='optim="adamw_torch" with infinity_config={"optimizer": {"moments": "8bit"}}, '
            "or moments in fp32 on disk",
        )


_TrainingArguments: Any = transformers().TrainingArguments


@dataclass
class TrainingArguments(_TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` whose `deepspeed` does not need the package deepspeed.

    `InfinityTrainer` translates the configuration given as `deepspeed`, like `infinity_config`. In
    several processes without an accelerator `use_cpu` is True.
    """

    def __post_init__(self) -> None:
        if num_launched() > 1 and not num_accelerators():
            self.use_cpu = True  # else accelerate counts one process
        deepspeed, self.deepspeed = self.deepspeed, None  # type: ignore[has-type]
        super().__post_init__()
        self.deepspeed = deepspeed


_PARAMS = "optimizer.params"
_PRECISION_OF = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
_PRECISION_KEYS = ("bf16", "bfloat16", "fp16")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the engine and the LR schedule.

    `config` has no `scheduler` section because the Trainer steps the schedule; `scheduler` is that
    section, or None for the schedule of the TrainingArguments. `sets_optimizer` is True if the
    configuration sets the update rule, `sets_micro_batches` if it sets
    `gradient_accumulation_steps` in infinity's format. The batch keys of DeepSpeed do not count:
    they only define the size of a step. `translation` is None unless the configuration is
    DeepSpeed's.
    """

    config: Config
    scheduler: SchedulerConfig | None
    sets_optimizer: bool
    sets_micro_batches: bool
    translation: Translation | None


def find_settings(
    args: Any, infinity_config: Any, model: nn.Module, num_training_steps: int = 1
) -> TrainerSettings:
    """Return the settings of a run; `num_training_steps` completes an "auto" schedule.

    Keys that are missing or "auto" in the configuration are taken from `args`; all others must
    equal `args`, as transformers requires of a DeepSpeed configuration. Raises `ConfigError` that
    lists all differences; also for two configurations, or one that sets `resume`.
    """
    refuse_arguments(args)
    deepspeed_config = getattr(args, "deepspeed", None)
    if infinity_config is not None and deepspeed_config:
        raise ConfigError(
            "two configurations: infinity_config=... and TrainingArguments(deepspeed=...)",
            remedy="keep one of them",
        )
    source = infinity_config if infinity_config is not None else deepspeed_config or {}
    precision = _precision(args, model)
    deepspeed_source = find_source(source)
    if deepspeed_source is not None:
        settings = _from_deepspeed(deepspeed_source, source, args, precision, num_training_steps)
    elif deepspeed_config and infinity_config is None:
        raise ConfigError(
            f"TrainingArguments(deepspeed={str(deepspeed_config)[:60]!r}) is no DeepSpeed "
            "configuration",
            because="none of its keys is DeepSpeed's alone, or it cannot be read",
            remedy="InfinityTrainer(infinity_config=...) takes a configuration of infinity",
        )
    else:
        settings = _from_infinity(source, args, precision)
    for flag in ("bf16", "fp16"):
        if getattr(args, f"{flag}_full_eval") and settings.config.precision != flag:
            raise ConfigError(
                f"{flag}_full_eval=True, but the engine computes in {settings.config.precision}",
                because="weights are not converted for an evaluation and back",
                remedy=f"leave {flag}_full_eval out, or train with {flag}=True",
            )
    if settings.config.resume != "never":
        raise ConfigError(
            f"resume: {settings.config.resume} is not for InfinityTrainer",
            because="the engine would resume from its last commit, but the Trainer from step 0: "
            "only its checkpoint-N contain the position of data and steps",
            remedy="leave resume out, and trainer.train(resume_from_checkpoint=True)",
        )
    return settings


def refuse_arguments(args: Any) -> None:
    """Raise one `ConfigError` that lists all unsupported TrainingArguments."""
    kwargs = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    reasons = {
        "torch_compile": args.torch_compile and "compiled graphs store addresses, and weights move",
        "fsdp": args.fsdp and "the engine owns the weights",
        "parallelism_config": args.parallelism_config is not None
        and "every process has its own data, and the full model is sharded over all of them",
        "auto_find_batch_size": args.auto_find_batch_size
        and "the plan is made for one batch size; choose per_device_train_batch_size",
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": kwargs.get(
            "sync_each_batch"
        )
        and "gradients are summed by the engine",
        "sync_ref_model": getattr(args, "sync_ref_model", False)
        and "the weights of a reference model are offloaded to an engine without updates",
    }
    problems = [f"\n  - {name}: {reason}" for name, reason in reasons.items() if reason]
    if problems:
        raise ConfigError(
            f"InfinityTrainer does not support these TrainingArguments:{''.join(problems)}",
            remedy="leave them out",
        )


def _precision(args: Any, model: nn.Module) -> str:
    """Return the precision set by a flag, else the most frequent parameter dtype, as `Trainer`."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    return _PRECISION_OF.get(max(sizes, key=sizes.__getitem__, default=torch.float32), "fp32")


# --- values of TrainingArguments -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NamedArgument:
    """Value of TrainingArguments with its names there, in infinity's config and in DeepSpeed's."""

    argument: str
    value: Any
    key: str
    deepspeed_key: str


def _named_arguments(args: Any, precision: str) -> list[_NamedArgument]:
    """Return the values that a configuration may omit and must equal otherwise."""
    steps = "gradient_accumulation_steps"
    adam = "adam_beta1, adam_beta2"
    params = _PARAMS
    decay = args.weight_decay
    micro = args.per_device_train_batch_size
    ranks = args.world_size
    total = f"per_device_train_batch_size x {steps}" + (f" x {ranks}" if ranks > 1 else "")
    betas = (args.adam_beta1, args.adam_beta2)
    flag = [_NamedArgument(f"{precision}=True", precision, "precision", "precision")]
    return [
        *(flag if args.bf16 or args.fp16 else ()),
        _NamedArgument("per_device_train_batch_size", micro, "", "train_micro_batch_size_per_gpu"),
        _NamedArgument(steps, args.gradient_accumulation_steps, steps, steps),
        _NamedArgument(
            total, micro * args.gradient_accumulation_steps * ranks, "", "train_batch_size"
        ),
        _NamedArgument(
            "max_grad_norm", float(args.max_grad_norm or 0.0), "gradient_clipping",
            "gradient_clipping",
        ),
        _NamedArgument("learning_rate", args.learning_rate, "optimizer.lr", f"{params}.lr"),
        _NamedArgument(adam, betas, "optimizer.betas", f"{params}.betas"),
        _NamedArgument("adam_epsilon", args.adam_epsilon, "optimizer.eps", f"{params}.eps"),
        _NamedArgument("weight_decay", decay, "optimizer.weight_decay", f"{params}.weight_decay"),
        _NamedArgument("learning_rate", args.learning_rate, "", "scheduler.params.warmup_max_lr"),
    ]  # fmt: skip


# --- configuration of infinity -------------------------------------------------------------------


def _from_infinity(source: Any, args: Any, precision: str) -> TrainerSettings:
    if isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    auto_keys = ("gradient_accumulation_steps", "gradient_clipping", "precision")  # from args
    raw = {k: v for k, v in read_source(source)[1].items() if k not in auto_keys or v != "auto"}
    if isinstance(raw.get("optimizer"), Mapping):
        raw["optimizer"] = {k: v for k, v in raw["optimizer"].items() if v != "auto"}
    config = load_config(raw)
    rule = config.optimizer.type
    adam_keys = ("optimizer.betas", "optimizer.eps")
    from_args = {
        argument.key: argument for argument in _named_arguments(args, precision) if argument.key
    }
    by_name = {
        name: argument
        for name, argument in from_args.items()
        if RULES[rule].decoupled is not None or name not in adam_keys
    }
    given_values = {n: e["value"] for n, e in config.resolved().items() if e["origin"] == "given"}
    _check_same(given_values, by_name, "leave it out")
    merged = {
        "precision": precision,
        **config.model_dump(exclude_unset=True, exclude={"scheduler"}),
    }
    merged["optimizer"] = {**merged.get("optimizer", {}), "type": rule}
    for name, argument in by_name.items():
        section, _, key = name.rpartition(".")
        (merged["optimizer"] if section else merged)[key] = argument.value
    for key, entries in RULES[rule].deepspeed_keys.items():  # rules that are AdamW in part
        for entry in entries if f"optimizer.{key}" in from_args else ():
            merged["optimizer"].setdefault(entry, from_args[f"optimizer.{key}"].value)
    return TrainerSettings(
        load_config(merged),
        config.scheduler,
        sets_optimizer="optimizer.type" in given_values,
        sets_micro_batches="gradient_accumulation_steps" in given_values,
        translation=None,
    )


# --- configuration of DeepSpeed ------------------------------------------------------------------


def _from_deepspeed(
    deepspeed_source: Source, source: Any, args: Any, precision: str, num_training_steps: int
) -> TrainerSettings:
    raw: dict[str, Any] = dict(deepspeed_source.raw)
    sets_optimizer = raw.get("optimizer") is not None
    by_name = {argument.deepspeed_key: argument for argument in _named_arguments(args, precision)}
    fill = {name: argument.value for name, argument in by_name.items()} | {
        f"{_PARAMS}.betas": list(by_name[f"{_PARAMS}.betas"].value),
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(num_training_steps)),
        "scheduler.params.total_num_steps": num_training_steps,
    }
    if not any(name in raw for name in _BATCH_KEYS):
        raw[_BATCH_KEYS[1]] = "auto"
    raw.setdefault("gradient_accumulation_steps", "auto")
    raw.setdefault("gradient_clipping", "auto")
    if not any(name in raw for name in _PRECISION_KEYS):
        raw["bf16" if precision == "bf16" else "fp16"] = {"enabled": "auto"}
    translation = translate_deepspeed(
        source if deepspeed_source.repeated else raw,
        fill=fill,
        client_optimizer=not sets_optimizer,
        ranks=args.world_size,
    )
    config = translation.config
    given_values = {row.key: row.given for row in translation.rows} | {
        "precision": config.precision
    }
    _check_same(given_values, by_name, 'write "auto" there')
    merged = config.model_dump(exclude_unset=True, exclude={"scheduler"})
    if not sets_optimizer:
        moments = {key: v for key, v in merged.get("optimizer", {}).items() if key == "moments"}
        values = {argument.key: argument.value for argument in by_name.values()}
        hyper_parameters = {
            key: values[f"optimizer.{key}"] for key in ("lr", "betas", "eps", "weight_decay")
        }
        merged["optimizer"] = {**moments, "type": "AdamW", **hyper_parameters}
    micro_batches = "gradient_accumulation_steps" in raw.get(INFINITY_SECTION, {})
    return TrainerSettings(
        load_config(merged), config.scheduler, sets_optimizer, micro_batches, translation
    )


# --- comparison ----------------------------------------------------------------------------------


def _check_same(
    given: Mapping[str, Any], by_name: Mapping[str, _NamedArgument], remedy: str
) -> None:
    problems = [
        f"\n  - {name}: {value!r} in the configuration, {by_name[name].value!r} by "
        f"TrainingArguments ({by_name[name].argument})"
        for name, value in given.items()
        if name in by_name and value not in (None, "auto") and not _same(value, by_name[name].value)
    ]
    if problems:
        raise ConfigError(
            f"the configuration and TrainingArguments differ:{''.join(problems)}",
            remedy=f"{remedy}, and the value of TrainingArguments is used; or make them the same",
        )


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    return bool(given == wanted) if isinstance(wanted, str) else float(given) == float(wanted)
