"""From a configuration to what a run needs, before any memory is taken: every check is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from infinity.blueprint import limits_for
from infinity.calibration import kept_rates
from infinity.checkpoint.manifest import MANIFEST_NAME
from infinity.checkpoint.plain import decode
from infinity.checkpoint.reader import CheckpointReader
from infinity.config.schema import Config
from infinity.cutting import Cut, case_for, cut_model, groups_of
from infinity.errors import ConfigError, mistakes
from infinity.model.shapes import Target, target_of
from infinity.plan.machine import PlanMachine
from infinity.plan.planner import Case
from infinity.runs.data import Corpus, Progress, Recipe, Windows, prepare, split
from infinity.runs.directory import RunDirectory
from infinity.runs.model import ModelFacts, read_facts
from infinity.runs.settings import AUTO, DEFAULT_LENGTH, RunConfig
from infinity.runs.texts import Source, Tokenizer, find_sources, find_tokenizer
from infinity.storage.device import Device

T = TypeVar("T")
_DECIDE = (  # keys of the engine that its numbers depend on
    "precision", "gradient_clipping", "optimizer.", "scheduler", "loss_scale.", "activations.slices"
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """All that was asked for, with everything derived.

    `engine` is the configuration of the engine. `length` is in tokens, `micro_batch` in windows.
    """

    config: RunConfig
    engine: Config
    facts: ModelFacts
    tokenizer: Tokenizer | None
    train: Windows
    evaluate: Windows | None
    length: int
    micro_batch: int
    steps: int

    @property
    def windows_per_step(self) -> int:
        """All micro-batches of a step together."""
        return self.micro_batch * self.engine.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """All micro-batches of a step together."""
        return self.windows_per_step * self.length

    def derived(self) -> dict[str, Any]:
        """What was worked out, by dotted name."""
        found = {
            "tokenizer": None if self.tokenizer is None else self.tokenizer.name,
            "data.sequence_length": self.length,
            "training.steps": self.steps,
            "training.tokens_per_step": self.tokens_per_step,
            "engine.seed": self.engine.seed,
            "engine.gradient_accumulation_steps": self.engine.gradient_accumulation_steps,
        }
        return {name: value for name, value in found.items() if value is not None}

    def decides(self) -> dict[str, Any]:
        """What the numbers of the run depend on, by name."""
        engine = self.config.engine.resolved()
        found = {
            f"engine.{name}": entry["value"]
            for name, entry in engine.items()
            if name.startswith(_DECIDE)
        }
        if self.engine.scheduler is not None:  # with the steps in the place of auto
            found["engine.scheduler.params"] = self.engine.scheduler.params
        found |= {f"model.{name}": value for name, value in self.facts.identity().items()}
        return found | {
            "model.attention": self.config.model.attention,
            "engine.seed": self.engine.seed,
            "engine.gradient_accumulation_steps": self.engine.gradient_accumulation_steps,
            "data.tokens": self.train.corpus.identity,
            "data.sequence_length": self.length,
            "data.shuffle": self.config.data.shuffle,
            "data: windows to train on": len(self.train),
            "training.micro_batch": self.micro_batch,
            "training.seed": self.config.training.seed,
        }


def prepare_run(config: RunConfig, kept: Path, progress: Progress | None = None) -> Prepared:
    """Look at the model, make the corpus, and settle what the configuration left open.

    Tokens are kept in `kept` unless the configuration says where.

    Raises `ConfigError` for all that does not fit together, and what `data.prepare` raises.
    """
    data, problems = config.data, _Problems()
    sources = problems.of(lambda: find_sources("data.train", data.train, data.format)) or []
    held = problems.of(lambda: find_sources("data.evaluate", data.evaluate, data.format)) or []
    needs_text = any(source.format != "tokens" for source in (*sources, *held))
    tokenizer = problems.of(lambda: _tokenizer(config, required=needs_text))
    size, end = (None, None) if tokenizer is None else (tokenizer.size, tokenizer.end)
    facts = problems.of(lambda: read_facts(config.model, size, end))
    length = 0 if facts is None else problems.of(lambda: _length(config, facts)) or 0
    problems.tell()
    assert facts is not None
    ending = _end(config, tokenizer, facts) if needs_text else None
    engine = config.engine_for(length)
    if engine.seed is None:
        engine = engine.model_copy(update={"seed": config.training.seed})

    def corpus(files: Sequence[Source]) -> Corpus:
        recipe = Recipe(
            sources=files,
            tokenizer=tokenizer if any(s.format != "tokens" for s in files) else None,
            size=facts.vocabulary,
            end=ending,
            text_field=data.text_field,
            undecodable=data.undecodable,
            token_dtype=data.token_dtype,
        )
        return prepare(recipe, data.cache or kept, progress)

    train, evaluate = split(corpus(sources), length, data.held_out)
    _require("data.train", train)
    if held:
        evaluate, _ = split(corpus(held), length, 0.0)
        _require("data.evaluate", evaluate)
    training, steps = config.training, config.training.steps
    if steps is None:
        per_step = training.micro_batch * engine.gradient_accumulation_steps
        steps = max(round((training.epochs or 1.0) * len(train) / per_step), 1)
    return Prepared(
        config=config,
        engine=_with_schedule(engine, steps),
        facts=facts,
        tokenizer=tokenizer,
        train=train,
        evaluate=evaluate if len(evaluate) else None,
        length=length,
        micro_batch=training.micro_batch,
        steps=steps,
    )


class _Problems:
    """Mistakes that are told together."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    def of(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except ConfigError as error:
            self._found.append(error)
            return None

    def tell(self) -> None:
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            texts = [str(error).replace("\n", "\n  ") for error in self._found]
            raise ConfigError(mistakes("the configuration", texts))


def _tokenizer(config: RunConfig, *, required: bool) -> Tokenizer | None:
    """The one that is asked for; None where all files hold tokens and the model has none."""
    if config.tokenizer != AUTO:
        return find_tokenizer(config.tokenizer)
    source = config.model.path if config.model.path is not None else config.model.config
    if isinstance(source, str):
        path = Path(source).expanduser()
        if path.exists() or config.model.path is not None:
            name = str(path.parent if path.is_file() else path) if path.exists() else source
            with suppress(*() if required else (ConfigError,)):
                return find_tokenizer(name)
    if not required:
        return None
    raise ConfigError(
        "tokenizer: must be given, because the model is a new one and has none",
        remedy="tokenizer: bytes, or a directory or Hub id with a tokenizer.json",
    )


def _length(config: RunConfig, facts: ModelFacts) -> int:
    length = config.data.sequence_length
    if length == "auto":
        return min(facts.context or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if facts.context is not None and length > facts.context:
        raise ConfigError(
            f"data.sequence_length is {length}, and {facts.name} sees {facts.context} tokens",
            because="its config has max_position_embeddings, or what it calls that",
            remedy=f"data.sequence_length={facts.context}",
        )
    return length


def _end(config: RunConfig, tokenizer: Tokenizer | None, facts: ModelFacts) -> int | None:
    wanted = config.data.end_of_document
    if wanted == "none":
        return None
    if wanted == "auto":
        found = facts.end if tokenizer is None or tokenizer.end is None else tokenizer.end
        if found is None:
            raise ConfigError(
                "neither the tokenizer nor the model has a token that ends a document",
                remedy="data.end_of_document: NUMBER, or none",
            )
        wanted = found
    if wanted >= facts.vocabulary:
        raise ConfigError(
            f"the token {wanted} ends a document, and the model knows {facts.vocabulary} tokens",
            remedy="data.end_of_document: none, another token, or a larger vocab_size",
        )
    return wanted


def _require(key: str, windows: Windows) -> None:
    if len(windows):
        return
    corpus = windows.corpus
    raise ConfigError(
        f"{key}: {corpus.num_tokens} tokens in {corpus.num_documents} documents do not make one "
        f"window of {windows.length}",
        because="the files are empty or very small"
        if corpus.num_tokens < windows.length
        else "all of it was held out for evaluation",
        remedy="more text, a smaller data.sequence_length or a smaller data.held_out",
    )


# --- schedules -----------------------------------------------------------------------------------


def _with_schedule(engine: Config, steps: int) -> Config:
    """`auto` among the arguments of a schedule is the number of steps."""
    schedule = engine.scheduler
    if schedule is None or AUTO not in schedule.params.values():
        return engine
    params = {name: steps if v == AUTO else v for name, v in schedule.params.items()}
    return engine.model_copy(update={"scheduler": schedule.model_copy(update={"params": params})})


def check_schedule(prepared: Prepared, directory: RunDirectory, checkpoint: Path | None) -> None:
    """Refuse to go on with a schedule that was made for another number of steps.

    It is that of the run in `directory`, or of the `checkpoint` to go on from; one that is not
    ours has none. A schedule that has begun keeps its end, so steps beyond it would all be
    made at its last rate, which may be 0. Raises `ConfigError`, and `CheckpointError` for a
    checkpoint that is damaged.
    """
    scheduler, steps = prepared.config.engine.scheduler, prepared.steps
    saved = directory.decided.get("engine.scheduler.params")
    told = [(f"the run in {directory.path}", saved)]
    if scheduler is not None and checkpoint and (checkpoint / MANIFEST_NAME).is_file():
        with CheckpointReader(checkpoint.parent, checkpoint.name) as reader:
            run = decode(reader.manifest.run)
        told.append((str(checkpoint), run.get("scheduler") if isinstance(run, dict) else None))
    for where, params in told:
        for name, value in scheduler.params.items() if scheduler is not None else ():
            before = params.get(name) if isinstance(params, Mapping) else None
            if value != AUTO or not isinstance(before, int) or before == steps:
                continue
            key = f"engine.scheduler.params.{name}"
            raise ConfigError(
                f"the learning rate schedule of {where} is for {before} steps, and this run has "
                f"{steps}",
                because=f"{key}: auto is the number of steps, and a schedule that has begun keeps "
                "its end",
                remedy=f"keep training.steps={before}; or {key}={before}, so that the steps after "
                "it are made at the schedule's last rate; to train on later, give a new run the "
                "number of all its steps there",
            )


# --- the plan ------------------------------------------------------------------------------------


def case_of(prepared: Prepared, model: nn.Module, device: Device) -> tuple[Case, Target, Cut]:
    """What a run would take: the case to plan, the model as the plan sees it, and its units.

    `device` must stay open. Rates are those that are kept of this machine, else nominal ones:
    nothing is measured here.
    """
    config, section = prepared.engine, prepared.config.model
    groups = groups_of(model, config)
    cut = cut_model(model, config, groups, None)
    target = target_of(prepared.facts.name, model, prepared.facts.config.to_dict())
    paths = tuple(path for path in config.nvme_path if path.is_dir())
    known = kept_rates(paths, device, io=config.io, num_threads=config.cpu.num_threads)
    limits = limits_for(config, device, model)
    machine = PlanMachine.here(paths, device, known.rates)
    case = case_for(
        target,
        cut,
        groups,
        config,
        replace(machine, nominal=known.nominal, measured=known.measured),
        prepared.micro_batch * prepared.length,
        recompute=section.gradient_checkpointing or config.activations.checkpoint == "units",
        base=limits.base,
        made=limits.made,
    )
    return case, target, cut
