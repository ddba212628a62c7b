"""`infinity plan`: prediction of memory and speed of a run, before anything is allocated."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from infinity.cli.plan_machine import SearchOptions, assumed_disk, machine_of
from infinity.cli.terminal import AsJson, Drives, command, library_stdout_to_stderr
from infinity.common.sizes import format_size, parse_size
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.model.named_models import NAMED

if TYPE_CHECKING:
    from infinity.config.schema import Config
    from infinity.integrations.deepspeed.config import Translation
    from infinity.model.partition import Partition
    from infinity.model.targets import Target
    from infinity.plan.advice import Change
    from infinity.plan.batch_schedule import BatchSchedule, ScheduleResult
    from infinity.plan.inputs import PlanEstimate, PlanInput
    from infinity.plan.plan_machine import PlanMachine
    from infinity.train.settings import RunConfig

DEFAULT_STEP = 65_536  # tokens of all ranks, as in the presets of `infinity init`
DEFAULT_SAMPLE = 2048  # tokens
_RECOMPUTE_PARAMETERS = frozenset(("recompute", "recompute_blocks"))
_LEAST_BARE_SIZE = 1 << 20  # bytes; a smaller number without a unit is probably meant in GiB
DEFAULT_ENDURANCE = "600TB"  # rated writes of common 1 TB drives in data sheets


_Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values of the configuration, which win over a file's: budget.host=48GiB; of a run's "
        "file model.path=DIR, engine.budget.host=48GiB",
        show_default=False,
    ),
]
_Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help=f"{', '.join(NAMED)}; a Hugging Face config.json, a directory with one, or an id "
        "on the Hub; or a configuration of infinity or DeepSpeed, together with --model; or that "
        "of a run, see init.",
        show_default=False,
    ),
]
_Model = Annotated[
    str | None,
    typer.Option("--model", metavar="TARGET", help="The model, where TARGET is a config."),
]
_Class = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="NAME",
        help="A class of transformers, as AutoModelForSequenceClassification. Default: the "
        "class that the model's config names.",
    ),
]
_Device = Annotated[
    str | None,
    typer.Option("--device", "--vram", metavar="SIZE", help="Plan for a GPU of this size."),
]
_Host = Annotated[
    str | None, typer.Option("--host", "--ram", metavar="SIZE", help="Plan for this much RAM.")
]
_Disk = Annotated[
    str | None, typer.Option("--disk", metavar="SIZE", help="Plan for this much disk space.")
]
_MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="From `infinity doctor --machine-file`."),
]
_Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", help="Ranks on a node: GPUs, or processes.", min=1, max=1024
    ),
]
_Nodes = Annotated[
    int | None,
    typer.Option("--nodes", metavar="K", help="Number of such machines.", min=1, max=4096),
]
_Link = Annotated[
    str | None,
    typer.Option("--link", metavar="RATE", help="Rate between ranks of a node, as 25GB/s."),
]
_Between = Annotated[
    str | None,
    typer.Option("--between", metavar="RATE", help="Rate between nodes, as 12.5GB/s."),
]
_Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        help="Tokens of a step, all micro-batches and ranks together. Default: "
        f"{DEFAULT_STEP:,}; where micro-batches are given, a sample in each.",
        min=1,
        max=2**40,
    ),
]
_MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        help="Micro-batches of a step. Default: chosen by the plan.",
        min=1,
        max=1024,
    ),
]
_Precision = Annotated[
    str | None, typer.Option("--precision", metavar="NAME", help="bf16, fp16 or fp32.")
]
_Moments = Annotated[
    str | None,
    typer.Option(
        "--moments", metavar="NAME", help="fp32; bf16, bf16_stochastic and 8bit are lossy."
    ),
]
_Lora = Annotated[
    int | None,
    typer.Option(
        "--lora", metavar="RANK", help="Train adapters of this rank; freeze the model.", min=1
    ),
]
_FrozenFormat = Annotated[
    str | None,
    typer.Option(
        "--rest",
        metavar="FORMAT",
        help="Format of frozen matrices: nf4, nf4_double, int8, mxfp4 or fp8.",
    ),
]
_Sequence = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        help="Tokens of a sample: the smallest slice, and the reach of attention. "
        f"Default: about {DEFAULT_SAMPLE}.",
        min=1,
    ),
]
_Slices = Annotated[
    int | None, typer.Option("--slices", help="Slices in which a block runs a micro-batch.", min=1)
]
_Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        "--checkpointing/--no-checkpointing",
        help="Recompute blocks in backward. Default: chosen by the plan.",
        show_default=False,
    ),
]
_RecomputeBlocks = Annotated[
    int | None,
    typer.Option(
        "--recompute-blocks", metavar="N", help="Recompute the first N blocks only.", min=0
    ),
]
_Activations = Annotated[
    str | None,
    typer.Option(
        "--activations",
        metavar="TIER",
        help="Offload the inputs of recomputed blocks: none, host or disk.",
    ),
]
_Drives = Annotated[
    int | None,
    typer.Option("--drives", metavar="N", help="Number of equal drives.", min=1, max=64),
]
_FinerUnits = Annotated[
    bool, typer.Option("--finer-units", help="Cut blocks into smaller units: smaller buffers.")
]
_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Also placement, memory, bytes and phases.")
]
_Endurance = Annotated[
    str, typer.Option("--endurance", metavar="SIZE", help="Rated writes of the drives.")
]


def plan(
    ctx: typer.Context,
    target: _Target,
    overrides: _Overrides = None,
    model: _Model = None,
    model_class: _Class = None,
    device: _Device = None,
    host: _Host = None,
    disk: _Disk = None,
    machine: _MachineFile = None,
    path: Drives = None,
    drives: _Drives = None,
    gpus: _Gpus = None,
    nodes: _Nodes = None,
    link: _Link = None,
    between: _Between = None,
    tokens: _Tokens = None,
    micro_batches: _MicroBatches = None,
    sequence: _Sequence = None,
    slices: _Slices = None,
    activations: _Activations = None,
    precision: _Precision = None,
    moments: _Moments = None,
    lora: _Lora = None,
    frozen_format: _FrozenFormat = None,
    recompute: _Recompute = None,
    recompute_blocks: _RecomputeBlocks = None,
    finer_units: _FinerUnits = False,
    endurance: _Endurance = DEFAULT_ENDURANCE,
    verbose: _Verbose = False,
    as_json: AsJson = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure this machine again.")] = False,
) -> None:
    """Predict whether a run fits, its memory and its speed, and suggest changes.

    Nothing is allocated. Sizes are those of the hardware: a run takes 90 % of a GPU's memory and
    80 % of the RAM that is free when it starts, unless its configuration sets budgets. This
    machine is measured once, unless --machine describes another, or --device is given for a GPU
    that is not installed, without --path. Rates that were not measured are nominal, and marked.

    With --gpus that number of ranks share the model: --host and --disk are sizes of their node;
    memory, bytes and times are those of one rank, tokens/s those of all.

    Exits with 0 if the run fits, 3 if it does not, 2 if the options make no sense.
    """
    with command():
        options = _search_options(ctx.params)  # all parameters of the signature
        rated_bytes = _size("--endurance", endurance) or 0

        def with_text(text: str) -> SearchOptions:
            return _search_options(_appended_params(ctx, text))

        collects = gc.isenabled()
        gc.disable()  # during the import of torch it takes a tenth of the total time
        try:
            with library_stdout_to_stderr():
                report = report_of(options, rated_bytes, with_text)
        finally:
            if collects:
                gc.enable()
        if as_json:
            print(json.dumps(report), flush=True)
        else:
            from infinity.cli.plan_page import show_plan

            show_plan(report, verbose=verbose)
        if not report["fits"]:
            raise typer.Exit(DoesNotFitError.exit_code)


def _search_options(params: Mapping[str, Any]) -> SearchOptions:
    """Return the options of the search from the parsed parameters of the command."""
    from infinity.config.schema import Offload

    keys = params["overrides"] or []
    run = _find_run(params["target"], keys)
    names = ("target", "model", "model_class", "gpus", "nodes", "tokens", "micro_batches",
             "sequence", "slices", "precision", "moments", "lora", "frozen_format", "refresh",
             "drives", "finer_units")  # fmt: skip
    machine, recompute = params["machine"], params["recompute_blocks"]
    if recompute is None and params["recompute"] is not None:
        recompute = "all" if params["recompute"] else 0
    options = SearchOptions(
        **{name: params[name] for name in names},
        machine_file=None if machine is None else Path(machine),
        device=_size("--device", params["device"]),
        host=_size("--host", params["host"]),
        disk=_size("--disk", params["disk"], minimum=0),
        paths=tuple(Path(part).expanduser() for part in params["path"] or ()),
        link=_rate("--link", params["link"]),
        between=_rate("--between", params["between"]),
        offload=params["activations"],
        recompute=recompute,
        keys=() if run is not None else tuple(keys),
        run=run,
    )
    if options.offload not in (None, *get_args(Offload)):
        raise ConfigError(f"--activations is {options.offload}", remedy="none, host or disk")
    return options


def _appended_params(ctx: typer.Context, text: str) -> dict[str, Any]:
    """Return the parameters of the command with options and keys of `text` appended to it."""
    appended = ctx.command.make_context("plan", [ctx.params["target"], *shlex.split(text)])
    sources = {name: appended.get_parameter_source(name) for name in appended.params}
    typed = {n for n, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"}
    if not typed.isdisjoint(_RECOMPUTE_PARAMETERS):  # they exclude each other: the last one counts
        typed |= _RECOMPUTE_PARAMETERS
    keys = [*(ctx.params["overrides"] or ()), *(appended.params["overrides"] or ())]
    values = {name: appended.params[name] for name in typed}
    return {**ctx.params, **values, "overrides": keys, "refresh": False}


@dataclass(frozen=True)
class FoundSchedule:
    """Result of a search, with its model and machine."""

    target: Target
    partition: Partition
    machine: PlanMachine
    chosen: ScheduleResult
    translation: Translation | None


def report_of(
    options: SearchOptions,
    rated_bytes: int,
    with_text: Callable[[str], SearchOptions] | None = None,
) -> dict[str, Any]:
    """Return the report of the plan, JSON-able; keys as in `infinity.cli.plan_report`.

    `with_text` returns the options of the command with a text of options and keys appended. If
    given, every suggestion has the numbers of the command with its text appended.
    """
    from infinity.cli.plan_report import report
    from infinity.cli.remedies import plan_command_text
    from infinity.plan.inputs import price

    search = find_schedule(options)
    case, machine = search.chosen.case, search.machine
    command_text = plan_command_text(of_run=options.run is not None)

    def replan(changes: Sequence[Change]) -> PlanEstimate | None:
        text = command_text(changes)
        assert with_text is not None
        assert text is not None, "every change has a text for this command"
        with suppress(InfinityError):  # the changed run does not fit, or is refused
            chosen = find_schedule(with_text(text), like=case).chosen
            estimate = chosen.best or price(chosen.case)
            return None if estimate.missing else estimate
        return None

    result = report(
        case,
        search.target,
        search.partition,
        rated_bytes,
        search.chosen,
        command_text=command_text,
        assumed_tokens=options.tokens is None,
        replan=None if with_text is None else replan,
    )
    if machine.measured and options.machine_file is None:
        result["machine"]["rates_origin"] += " (again: --refresh)"
    result["machine"]["assumed_disk"] = next(map(str, assumed_disk(options)), None)
    translation = search.translation
    return result if translation is None else result | {"deepspeed": translation.table()}


def find_schedule(options: SearchOptions, like: PlanInput | None = None) -> FoundSchedule:
    """Find the model, the machine and the fastest schedule.

    Facts derived from the units are reused from the case `like`, if its units are equal.
    """
    from infinity.model.partition import (
        case_for,
        finer_units,
        groups_of,
        partition_model,
        range_size_variants,
    )
    from infinity.plan.batch_schedule import choose_schedule

    source, target, translation = _find_config_and_model(options)
    machine = machine_of(options, source)
    if options.drives is not None:
        num_drives = max(len(options.paths or source.nvme_path), 1)
        machine = machine.with_scaled_disk_rates(options.drives / num_drives)
    run = options.run
    if run is not None:  # tokens of a step do not depend on the ranks
        from infinity.train.preparation import context_of

        model_config = getattr(target.module, "config", None)  # transformers' models have one
        length = run.length_for(context_of(model_config) if model_config is not None else None)
        source = _with_overrides(run.engine_for(length, machine.ranks), options)
        options = replace(
            options, sequence=length, tokens=options.tokens or run.tokens_per_step_with(length)
        )
    config = _for_machine(_with_trainer_logits(source, options, target), options, machine)
    groups = groups_of(target.module, config)
    partition = partition_model(target.module, config, groups, None, machine.ranks)
    names = finer_units(partition) if options.finer_units else []
    if names:
        partition = partition_model(target.module, config, groups, names, machine.ranks)
    requested = _requested_schedule(options, config)
    tokens, length = _step_of(options, requested, machine.ranks)
    samples = max(tokens // length, 1)
    case = case_for(
        target,
        partition,
        groups,
        config,
        machine,
        tokens,
        recompute=options.run is not None and options.run.model.gradient_checkpointing,
        made=target.max_initial_bytes(quantizes=config.frozen.format != "as_is"),
        length=length,
    )
    _check_divisible(requested, samples)
    if like is not None and like.units == case.units:
        case = replace(case, units=like.units, model=like.model, facts=like.facts)
    other_cases = () if options.finer_units else range_size_variants(case, target)
    chosen = choose_schedule(case, requested, samples, other_cases)
    return FoundSchedule(target, partition, machine, chosen, translation)


def _step_of(options: SearchOptions, requested: BatchSchedule, ranks: int) -> tuple[int, int]:
    """Return the tokens of one rank's step and of a sample."""
    num_pieces = (requested.micro_batches or 1) * (requested.slices or 1)
    if options.tokens is None:
        length = options.sequence or DEFAULT_SAMPLE
        samples = max(DEFAULT_STEP // ranks // length, 1) if requested.micro_batches is None else 1
        return -(-samples // num_pieces) * num_pieces * length, length
    tokens = -(-options.tokens // ranks)
    if options.sequence is not None:
        return tokens, options.sequence
    num_samples = max(round(tokens / DEFAULT_SAMPLE), 1)  # samples of the default length
    return tokens, tokens // min(-(-num_samples // num_pieces) * num_pieces, tokens)


def _check_divisible(requested: BatchSchedule, samples: int) -> None:
    """Raise `ConfigError` if samples cannot be split evenly into micro-batches and slices."""
    count, slices = requested.micro_batches or 1, requested.slices or 1
    if samples % (count * slices):
        raise ConfigError(
            f"{count} micro-batches in {slices} slices cannot be made of the {samples:,} samples "
            "of a rank's step",
            because="each slice has the same number of samples, at least one",
            remedy="other --micro-batches and --slices, more --tokens, or shorter samples "
            "(--sequence)",
        )


def _with_trainer_logits(config: Config, options: SearchOptions, target: Target) -> Config:
    """Return the configuration with chunked logits if `infinity train` and trainers set them."""
    from infinity.model.outline import Outline

    if options.run is None and options.model is not None:
        return config
    if isinstance(target.module, Outline):
        return config.with_chunked_logits()
    from infinity.integrations.huggingface.models import choose_logits

    return choose_logits(target.module, config)


def _requested_schedule(options: SearchOptions, config: Config) -> BatchSchedule:
    """Return the batch schedule set by options and configuration; other fields are None."""
    from infinity.plan.batch_schedule import BatchSchedule

    schedule, run = BatchSchedule.explicit_in(config.activations), options.run
    sets_micro_batches = "gradient_accumulation_steps" in config.model_fields_set
    if run is not None:
        sets_micro_batches = not run.plans_batch_schedule
        if run.model.gradient_checkpointing:  # recomputed by the model itself
            schedule = replace(schedule, slices=config.activations.slices, recompute="all")
    if sets_micro_batches:
        schedule = replace(schedule, micro_batches=config.gradient_accumulation_steps)
    from_options: dict[str, Any] = {
        "micro_batches": options.micro_batches,
        "slices": options.slices,
        "recompute": options.recompute,
        "offload": options.offload,
    }
    return replace(
        schedule, **{key: value for key, value in from_options.items() if value is not None}
    )


def _find_run(text: str, overrides: list[str]) -> RunConfig | None:
    """Return the configuration of a run in the file `text`; None if it is not one."""
    path = Path(text).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml", ".json") or not path.is_file():
        return None
    from infinity.config.source import read_config_file
    from infinity.train.settings import is_run_config, load_run_config

    try:
        raw = read_config_file(path)
    except ConfigError:
        return None  # raised again when it is read as an engine configuration
    return load_run_config(path, overrides) if is_run_config(raw) else None


def _find_config_and_model(options: SearchOptions) -> tuple[Config, Target, Translation | None]:
    """Return the configuration, the model, and the translation of a DeepSpeed configuration."""
    from infinity.config.schema import load_config
    from infinity.integrations.deepspeed.config import find_translation
    from infinity.integrations.deepspeed.source import find_source
    from infinity.model.targets import is_model_name

    run = options.run
    is_deepspeed = run is None and find_source(options.target) is not None
    is_model = run is None and not is_deepspeed and is_model_name(options.target)
    if is_model and options.model is not None:
        raise ConfigError(
            f"two models: {options.target} and --model {options.model}",
            remedy="leave one out; TARGET may be a configuration, then --model is the model",
        )
    if not is_model and options.model is None and run is None:
        raise ConfigError(
            f"{options.target} is a configuration, which names no model",
            remedy="add --model 7b, or --model with a config.json",
        )
    overrides = _config_overrides(options)
    if run is not None:
        _reject_class(options, options.target, options.model is None)
        if options.lora is not None and options.model is None:
            raise ConfigError(
                f"--lora {options.lora} does not apply to the model of a run's configuration",
                remedy="add --model 70b, or a config.json, to plan for adapters over it",
            )
        if run.adapter is not None and options.lora is None:
            options = replace(options, lora=run.adapter.r)
        target = (
            _find_model(options.model, options) if options.model is not None else _model_of_run(run)
        )
        return _with_overrides(run.engine, options), target, None
    translation = None
    if is_deepspeed:
        ranks = (options.gpus or 1) * (options.nodes or 1)
        translation = find_translation(options.target, overrides, lenient=True, ranks=ranks)
    if translation is not None:
        config = translation.config
    else:
        config = load_config({} if is_model else options.target, overrides)
    return (
        config,
        _find_model(options.target if is_model else str(options.model), options),
        translation,
    )


def _config_overrides(options: SearchOptions) -> list[str]:
    """Return configuration overrides: the typed KEY=VALUE, then those of options."""
    from_options: dict[str, Any] = {
        "precision": options.precision,
        "optimizer.moments": options.moments,
        "frozen.format": options.frozen_format,
        "gradient_accumulation_steps": options.micro_batches,
    }
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in from_options.items() if value is not None
    ]
    return [*options.keys, *overrides]


def _with_overrides(config: Config, options: SearchOptions) -> Config:
    from infinity.config.schema import load_config

    return load_config(config, _config_overrides(options))


def _find_model(text: str, options: SearchOptions) -> Target:
    """Return the model that `text` names, without values."""
    from infinity.model.named_models import SIZES
    from infinity.model.targets import is_model_name, named_target

    _reject_class(options, text, text.lower() in NAMED)
    if text.lower() in SIZES:
        return named_target(text, options.lora)
    if not is_model_name(text):
        raise ConfigError(
            f"{text} is not the config.json of a model",
            remedy=f"--model {', '.join(NAMED)}, or a model's",
        )
    from infinity.integrations.huggingface.meta import (  # imports torch
        find_target,
        published_target,
    )

    if text.lower() in NAMED:
        return published_target(text, options.lora)
    return find_target(text, options.model_class, options.lora)


def _reject_class(options: SearchOptions, name: str, is_fixed: bool) -> None:
    if options.model_class is not None and is_fixed:
        raise ConfigError(
            f"--class {options.model_class}: {name} is a causal language model",
            remedy="leave it out, or plan for a config.json",
        )


def _model_of_run(run: RunConfig) -> Target:
    from infinity.train.preparation import target_on_meta

    try:
        return target_on_meta(run)
    except MachineError as error:
        remedy = f"{error.remedy}; --model 7b, 13b or 70b plans for one like it"
        raise MachineError(error.what, because=error.because, remedy=remedy) from None


def _for_machine(config: Config, options: SearchOptions, machine: PlanMachine) -> Config:
    """Return the configuration with `nvme_path` set if and only if the machine has a disk."""
    from infinity.plan.advice import PLACEHOLDER_DISK

    budget = config.budget.host
    if budget is not None and budget > machine.host_bytes:
        raise ConfigError(
            f"budget.host is {format_size(budget)}, but the machine has "
            f"{format_size(machine.host_bytes)} of RAM",
            remedy="lower budget.host, or leave it out",
        )
    tiers = (*vars(config.placement).values(), options.offload or config.activations.offload)
    if options.disk == 0 and "disk" in tiers:
        raise ConfigError(
            "--disk 0, but placement or activations.offload is disk",
            remedy="leave --disk out, or give its size; or change placement and activations",
        )
    paths = options.paths or config.nvme_path or PLACEHOLDER_DISK
    return config.model_copy(update={"nvme_path": paths if machine.disk_bytes else ()})


def _rate(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else _size(option, text.strip().removesuffix("/s"))
    except ConfigError as error:
        raise ConfigError(
            f"{option} is {text!r}, not a rate",
            because=error.because,
            remedy=f'bytes per second, like {option} 25GB/s or "25 GB/s"',
        ) from None


def _size(option: str, text: str | None, minimum: int = 1) -> int | None:
    """Parse bytes; reject a small number without a unit, which is probably meant in GiB."""
    size = None if text is None else parse_size(text)
    if size is not None and size < minimum:
        raise ConfigError(f"{option} is {text}", remedy="leave it out, or give a size above 0")
    if text is not None and text.strip().isdigit() and 0 < int(text) < _LEAST_BARE_SIZE:
        unit = "TB" if option == "--endurance" else "GiB"
        raise ConfigError(
            f"{option} {text} is {text} bytes",
            remedy=f"did you mean {option} {text.strip()}{unit}?",
        )
    return size
