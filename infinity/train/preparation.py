"""Preparation of a run before memory is allocated: model, data, and all checks."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from infinity.checkpoint.manifest import MANIFEST_NAME
from infinity.checkpoint.plain import decode
from infinity.checkpoint.reader import CheckpointReader
from infinity.config.optimizer import SCHEDULES
from infinity.config.schema import Config
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import ConfigError, MachineError, did_you_mean, explained, mistakes
from infinity.integrations.huggingface.build import build_model, load_model, read_config
from infinity.integrations.huggingface.hub import CONFIG_NAME, find_directory
from infinity.integrations.huggingface.meta import build_meta_model
from infinity.integrations.huggingface.packages import transformers
from infinity.model.partition import Partition, range_size_variants
from infinity.model.targets import Target, target_of
from infinity.plan.batch_schedule import BatchSchedule, ScheduleResult, choose_schedule
from infinity.plan.inputs import PlanInput
from infinity.storage.device import Device
from infinity.train.adapters import adapted
from infinity.train.conversations import Conversations, holds_conversations, use_template
from infinity.train.data import Corpus, CorpusSpec, Progress, prepare
from infinity.train.directory import RunDirectory
from infinity.train.settings import AUTO, BYTES, AdapterSection, RunConfig
from infinity.train.texts import TextSource, Tokenizer, find_sources, find_tokenizer
from infinity.train.windows import Packed, Windows, split
from infinity.training.run_plan import plan_input_for

CAUSAL = "AutoModelForCausalLM"
_INVALID_CONFIG = "{} is no config that transformers takes"
_IRRELEVANT_KEYS = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")
_SCHEDULE = "engine.scheduler.params"
T = TypeVar("T")
_RESULT_KEYS = (  # prefixes of engine keys that results depend on
    "precision", "gradient_clipping", "optimizer.", "scheduler", "loss_scale.", "activations.slices"
)  # fmt: skip


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the config of a model; `name` is for messages.

    `vocabulary` is the number of tokens, `context` the longest context (None: no known limit),
    `end` the token that ends a text.
    """

    name: str
    config: Any
    vocabulary: int
    context: int | None
    end: int | None
    adapter: AdapterSection | None = None

    @cached_property
    def on_meta(self) -> nn.Module:
        """The model on the meta device, with its adapters; see `build_meta_model`."""
        model = build_meta_model(self.config, CAUSAL)
        with torch.device("meta"):
            return model if self.adapter is None else adapted(model, self.adapter)

    def identity(self) -> dict[str, Any]:
        """Return the entries of the config that determine the computation, JSON-serializable."""
        entries: dict[str, Any] = self.config.to_dict()
        return {key: value for key, value in entries.items() if key not in _IRRELEVANT_KEYS}


def read_facts(run: RunConfig, tokenizer: Tokenizer | None) -> ModelFacts:
    """Read the config of a run's model.

    For a new model, the tokenizer provides missing `vocab_size` and special tokens. Raises
    `ConfigError` for a config that transformers rejects or that has no causal language model.
    """
    source = run.model.config if run.model.config is not None else run.model.path
    assert source is not None
    if isinstance(source, dict):
        config, name = _from_keys(source, tokenizer), str(source.get("model_type"))
    else:
        path = Path(source).expanduser()
        directory = path.parent if path.name == CONFIG_NAME else source
        config, name = read_config(find_directory(directory, wanted=[CONFIG_NAME])), source
    if type(config) not in transformers().MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{name} is a {config.model_type} model, which transformers has no causal language "
            "model for",
            remedy="model_type: llama, gpt2, mistral, qwen2, ... is one",
        )
    with explained(_INVALID_CONFIG.format(name)):
        text = config.get_text_config()
        end = getattr(text, "eos_token_id", None)
        return ModelFacts(
            name=name,
            config=config,
            vocabulary=int(text.vocab_size),
            context=context_of(config),
            end=end if isinstance(end, int) else None,
            adapter=run.adapter,
        )


def context_of(config: Any) -> int | None:
    """Return the longest context of a transformers model, if its configuration has one."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


def _from_keys(keys: Mapping[str, Any], tokenizer: Tokenizer | None) -> Any:
    library, model_type = transformers(), keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in library.CONFIG_MAPPING:
        hint = _suggestion(str(model_type), library.CONFIG_MAPPING)
        problem = (
            "must be given"
            if model_type is None
            else f"transformers has no model type {model_type!r}{hint}"
        )
        raise ConfigError(
            f"model.config.model_type: {problem}", remedy="model_type: gpt2, llama, ..."
        )
    with explained(_INVALID_CONFIG.format("model.config")):
        defaults = library.CONFIG_MAPPING[model_type]()
        known = sorted({*defaults.to_dict(), *defaults.attribute_map, *dir(defaults)})
        unknown = [
            f"model.config.{key}: {model_type} has no such key{_suggestion(key, known)}"
            for key, value in keys.items()
            if key not in known and not _is_model_key(library, defaults, key, value)
        ]
        if unknown:
            raise ConfigError("; ".join(unknown))
        completed = dict(keys)
        if tokenizer is not None:
            size, end = completed.setdefault("vocab_size", tokenizer.size), tokenizer.end
            if end is not None and isinstance(size, int) and end < size:
                completed.setdefault("eos_token_id", end)
                completed.setdefault("bos_token_id", end)
        return library.AutoConfig.for_model(**completed)


def _is_model_key(library: Any, defaults: Any, key: str, value: Any) -> bool:
    """Return True if a key without a default in the config class is used by the model.

    Published configs have such keys: `head_dim` of Qwen3-MoE is read by the model's code, and
    `rope_theta` becomes part of another entry.
    """
    if key not in type(defaults)(**{key: value}).to_dict():
        return True  # merged into another entry; unknown keys stay unchanged
    model = library.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(defaults), None)
    if model is None:
        return False
    source = inspect.getsource(sys.modules[model.__module__])
    return re.search(rf'\bconfig(\.|, "){re.escape(key)}\b', source) is not None


def _suggestion(name: str, known: Any) -> str:
    names = [candidate for candidate in known if not candidate.startswith("_")]
    return f"; {did_you_mean(name, names)}".rstrip("; ")


def build(run: RunConfig, facts: ModelFacts, engine: Config) -> nn.Module:
    """Return the lazy model for `initialize`, with its adapters, in train mode."""
    section = run.model
    model_kwargs = {} if section.attention is None else {"attn_implementation": section.attention}
    options: dict[str, Any] = {"model_class": CAUSAL, "model_kwargs": model_kwargs}
    if (source := source_of(run)) is not None:
        model = load_model(source, engine, model_config=facts.config, **options)
    else:
        model = build_model(facts.config, engine, **options)
    model.train()
    if section.gradient_checkpointing:
        # transformers 5.23 renamed the method.
        enable = getattr(model, "activation_checkpointing_enable", None)
        untyped_model: Any = model
        try:
            (enable or untyped_model.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(
                f"model.gradient_checkpointing: {facts.name} cannot do that",
                because=str(error),
                remedy="model.gradient_checkpointing=false, and a smaller training.micro_batch",
            ) from error
    if engine.seed is not None:
        torch.manual_seed(engine.seed)
    return model if run.adapter is None else adapted(model, run.adapter)


def source_of(run: RunConfig) -> str | None:
    """Return the absolute directory, or the Hub id, of the model that a run fine-tunes."""
    if run.model.path is None:
        return None
    path = os.path.expanduser(run.model.path)
    return os.path.abspath(path) if os.path.isdir(path) else run.model.path


def target_on_meta(run: RunConfig) -> Target:
    """Return the model of a configuration as input of the planner."""
    facts = read_facts(run, find_tokenizer(BYTES) if run.tokenizer == BYTES else None)
    target = target_of(facts.name, facts.on_meta, facts.config.to_dict())
    return replace(target, from_files=run.model.path is not None)


def loss_of(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that computes the loss of a batch of windows with an engine or `model`.

    The loss is the mean over the tokens with a loss. The model shifts labels: a window of n tokens
    that are all trained on has n - 1 of them.
    """
    base_model: Any = model
    base_model = base_model.get_base_model() if hasattr(base_model, "peft_config") else base_model
    parameters = inspect.signature(base_model.forward).parameters
    options = {"use_cache": False} if "use_cache" in parameters else {}

    def loss(engine: Any, batch: Tensor) -> Tensor:
        rows = [batch, batch] if batch.dim() == 2 else [r.contiguous() for r in batch.unbind(1)]
        names = ("input_ids", "labels", "position_ids")
        value: Tensor = engine(**dict(zip(names, rows, strict=False)), **options).loss
        return value

    return loss


def check_packing(facts: ModelFacts, attention: str | None) -> None:
    """Raise `ConfigError` for a model whose packed conversations would attend to each other.

    The model must accept `position_ids` and `use_cache=False`, and create masks with transformers'
    functions, which start a new block where positions restart if there is no cache. No layer may
    pass state from token to token.
    """
    model_class = transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(facts.config)]
    layers = getattr(facts.config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(layers) - {"full_attention", "sliding_attention", "chunked_attention"})
    parameters = inspect.signature(model_class.forward).parameters
    source = inspect.getsource(inspect.getmodule(model_class) or model_class)
    if getattr(model_class, "_is_stateful", False) or others:
        because = f"{', '.join(others) or 'some'} layers pass state from token to token"
    elif not {"position_ids", "use_cache"} <= parameters.keys():
        because = "its forward has no argument position_ids, or no use_cache"
    elif "create_causal_mask" not in source and "create_masks_for_generate" not in source:
        because = "it makes its own attention masks"
    elif attention is not None and "flash" in attention:
        because = f"with {attention} losses have not been compared with those of separate windows"
    else:
        return
    raise ConfigError(
        f"{facts.name}: conversations packed into one window would attend to each other",
        because=because,
        remedy="data.packing=false: each has a window of its own",
    )


# --- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A checked configuration with all derived values, the model's facts and the windows.

    `engine` is the configuration of the engine on each rank. `length` is in tokens, `micro_batch`
    in windows.
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
    ranks: int = 1

    @property
    def num_evaluated(self) -> int:
        """Number of held-out windows of an evaluation: the first ones."""
        assert self.evaluate is not None
        return min(len(self.evaluate), self.config.training.evaluate_windows)

    @property
    def held_out(self) -> str:
        """Identity of the evaluated windows; losses are comparable only if it is equal."""
        if self.evaluate is None:
            return ""
        windows = self.evaluate
        return f"{self.num_evaluated} of {len(windows)} windows of {windows.corpus.identity}"

    @property
    def notes(self) -> list[str]:
        """Messages about padded, cut and omitted conversations."""
        notes = []
        for name, windows in (("train", self.train), ("evaluate", self.evaluate)):
            # Conversations held out of `data.train` are counted there.
            if isinstance(windows, Packed) and getattr(self.config.data, name):
                if name == "train":
                    notes.append(
                        f"{windows.filled:.0%} of a window are tokens, the rest is padding"
                    )
                cut, untrained = windows.documents.cut, windows.documents.untrained
                if cut:
                    notes.append(
                        f"data.{name}: {cut:,} conversations are longer than the "
                        f"{self.length:,} tokens of a window: cut at their end "
                        "(data.sequence_length)"
                    )
                if untrained:
                    notes.append(
                        f"data.{name}: {untrained:,} conversations have nothing to train on within "
                        "a window (it has no assistant turn): left out"
                    )
        return notes

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step, on all ranks."""
        return self.engine.gradient_accumulation_steps * self.ranks

    @property
    def windows_per_step(self) -> int:
        """Number of windows in a step, on all ranks."""
        return self.micro_batch * self.micro_batches

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in a step, on all ranks."""
        return self.windows_per_step * self.length

    def derived(self) -> dict[str, Any]:
        """Return derived settings, by dotted name."""
        settings: dict[str, Any] = {
            "tokenizer": None if self.tokenizer is None else self.tokenizer.name,
            "data.sequence_length": self.length,
            "training.steps": self.steps,
            "training.tokens_per_step": self.tokens_per_step,
            "engine.seed": self.engine.seed,
            "engine.gradient_accumulation_steps": self.micro_batches,
            "engine.frozen.format": self.engine.frozen.format,
            "engine.activations.logits": self.engine.activations.logits,
            "engine.activations.slices": self.engine.activations.slices,
            "engine.activations.checkpoint": self.engine.activations.checkpoint,
            "engine.activations.offload": self.engine.activations.offload,
        }
        if self.engine.scheduler is not None:
            settings[_SCHEDULE] = self.engine.scheduler.params
        return {name: value for name, value in settings.items() if value is not None}

    def decides(self) -> dict[str, Any]:
        """Return the settings that determine the results of the run, by name."""
        engine = self.config.engine.resolved()
        settings = {
            f"engine.{name}": entry["value"]
            for name, entry in engine.items()
            if name.startswith(_RESULT_KEYS)
        }
        if self.engine.scheduler is not None:  # with the number of steps instead of auto
            settings[_SCHEDULE] = self.engine.scheduler.params
        if self.engine.activations.logits == "chunked":  # absent in older runs: full
            settings["engine.activations.logits"] = "chunked"
        if self.engine.frozen.format != "as_is":
            settings["engine.frozen.format"] = self.engine.frozen.format
        settings |= {f"model.{name}": value for name, value in self.facts.identity().items()}
        if self.config.adapter is not None:
            settings["adapter"] = self.config.adapter.model_dump(mode="json")
            if not self.config.adapter.target_parameters:  # older records do not have it
                del settings["adapter"]["target_parameters"]
        if isinstance(self.train, Packed):
            settings["data.packing"] = self.config.data.packing
        return settings | {
            "model.attention": self.config.model.attention,
            "engine.seed": self.engine.seed,
            "engine.gradient_accumulation_steps": self.micro_batches,
            "engine.activations.slices": self.engine.activations.slices,
            "data.tokens": self.train.corpus.identity,
            "data.sequence_length": self.length,
            "data.shuffle": self.config.data.shuffle,
            "data: windows to train on": len(self.train),
            "training.micro_batch": self.micro_batch,
            "training.seed": self.config.training.seed,
        }

    @property
    def state_facts(self) -> dict[str, int]:
        """Members of `run.json` that are required to find a durable state again.

        `experts_per_unit` determines the units; 0 stands for "auto".
        """
        experts = self.engine.experts_per_unit
        return {"experts_per_unit": 0 if experts == "auto" else experts}


def prepare_run(
    config: RunConfig, cache: Path, progress: Progress | None = None, ranks: int = 1
) -> Prepared:
    """Read the model's config, prepare the corpus, and complete the configuration.

    Tokens are stored in `cache` unless the configuration has `data.cache`.

    Raises `ConfigError` for inconsistent settings, and the errors of `data.prepare`.
    """
    data, problems = config.data, _Problems()
    train_sources = problems.of(lambda: find_sources("data.train", data.train, data.format)) or []
    eval_sources = problems.of(lambda: find_sources("data.evaluate", data.evaluate, data.format))
    eval_sources = eval_sources or []
    needs_text = any(source.format != "tokens" for source in (*train_sources, *eval_sources))
    required = needs_text or config.training.sample is not None
    tokenizer = problems.of(lambda: tokenizer_of(config, required=required))
    is_chat = problems.of(lambda: _holds_conversations(config, [*train_sources, *eval_sources]))
    facts = problems.of(lambda: read_facts(config, tokenizer))
    length = 0 if facts is None else problems.of(lambda: _window_length(config, facts)) or 0
    problems.raise_all()
    assert facts is not None
    end = _end_token(config, tokenizer, facts) if needs_text else None
    conversations = None
    if is_chat:
        assert tokenizer is not None
        if data.packing:
            check_packing(facts, config.model.attention)
        conversations = Conversations(tokenizer, end, data.loss_on == "all", data.errors)
    engine = config.engine_for(length, ranks)
    if engine.seed is None:
        engine = engine.model_copy(update={"seed": config.training.seed})
    if engine.activations.offload != "none" and engine.activations.tokens is None:
        tokens = {"tokens": config.training.micro_batch * length}
        activations = engine.activations.model_copy(update=tokens)
        engine = engine.model_copy(update={"activations": activations})

    def corpus(files: Sequence[TextSource]) -> Corpus:
        spec = CorpusSpec(
            sources=files,
            tokenizer=tokenizer if any(s.format != "tokens" for s in files) else None,
            size=facts.vocabulary,
            end=end,
            text_field=data.text_field,
            errors=data.errors,
            token_dtype=data.token_dtype,
            conversations=conversations,
        )
        return prepare(spec, data.cache or cache, progress)

    train, evaluate = split(corpus(train_sources), length, data.held_out, data.packing)
    if data.held_out and len(train) + len(evaluate) == 1:
        raise ConfigError(
            f"data.held_out is {data.held_out:g}, and nothing can be held out",
            because=f"the files make one window of {length} tokens, or one conversation",
            remedy="more data, data.evaluate: FILES, or data.held_out=0: no evaluation",
        )
    _require_windows("data.train", train)
    if eval_sources:
        evaluate, _ = split(corpus(eval_sources), length, 0.0, data.packing)
        _require_windows("data.evaluate", evaluate)
    training, steps = config.training, config.training.steps
    if steps is None:
        per_step = training.micro_batch * engine.gradient_accumulation_steps * ranks
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
        ranks=ranks,
    )


def _holds_conversations(config: RunConfig, sources: Sequence[TextSource]) -> bool:
    """Return True if rows are conversations; raise `ConfigError` if other files cannot be."""
    data = config.data
    without_rows = [source for source in sources if source.format in ("text", "tokens")]
    with_rows = [source for source in sources if source not in without_rows]
    is_chat = data.records == "chat"
    if data.records == AUTO and "text_field" not in data.model_fields_set:
        is_chat = holds_conversations(with_rows, data.text_field, data.errors)
    if is_chat and without_rows:
        raise ConfigError(
            f"a run on conversations, and {without_rows[0].path} has no rows",
            because="data.records is chat"
            if not with_rows
            else f"{with_rows[0].path} has conversations",
            remedy="conversations are in .jsonl, .parquet or hub:NAME; data.format names what "
            "files are, whatever they are called",
        )
    return is_chat


class _Problems:
    """Collector of `ConfigError`s that are reported together."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except ConfigError as error:
            self._errors.append(error)
            return None

    def raise_all(self) -> None:
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            texts = [str(error).replace("\n", "\n  ") for error in self._errors]
            raise ConfigError(mistakes("the configuration", texts))


def tokenizer_of(config: RunConfig, *, required: bool) -> Tokenizer | None:
    """Return the configured tokenizer; None if there is none and it is not `required`."""
    tokenizer = _find_tokenizer(config, required)
    if tokenizer is not None and config.data.chat_template is not None:
        use_template(tokenizer, config.data.chat_template)
    return tokenizer


def _find_tokenizer(config: RunConfig, required: bool) -> Tokenizer | None:
    if config.tokenizer != AUTO:
        return find_tokenizer(config.tokenizer)
    source = config.model.path if config.model.path is not None else config.model.config
    if isinstance(source, str):
        path = Path(source).expanduser()
        if path.exists() or config.model.path is not None:
            name = str(path.parent if path.is_file() else path) if path.exists() else source
            with suppress(*() if required else (ConfigError, MachineError)):
                return find_tokenizer(name)
    if not required:
        return None
    raise ConfigError(
        "tokenizer: must be given, because the model is a new one and has none",
        remedy="tokenizer: bytes, or a directory or Hub id with a tokenizer.json",
    )


def _window_length(config: RunConfig, facts: ModelFacts) -> int:
    length = config.length_for(facts.context)
    if facts.context is not None and length > facts.context:
        raise ConfigError(
            f"data.sequence_length is {length}, and {facts.name} has a context of {facts.context} "
            "tokens",
            because="its config has max_position_embeddings, or an entry like it",
            remedy=f"data.sequence_length={facts.context}",
        )
    return length


def _end_token(config: RunConfig, tokenizer: Tokenizer | None, facts: ModelFacts) -> int | None:
    end = config.data.end_of_document
    if end == "none":
        return None
    if end == "auto":
        default = facts.end if tokenizer is None or tokenizer.end is None else tokenizer.end
        if default is None:
            raise ConfigError(
                "neither the tokenizer nor the model has a token that ends a document",
                remedy="data.end_of_document: NUMBER, or none",
            )
        end = default
    if end >= facts.vocabulary:
        raise ConfigError(
            f"the token {end} ends a document, and the model has {facts.vocabulary} tokens",
            remedy="data.end_of_document: none, another token, or a larger vocab_size",
        )
    return end


def _require_windows(key: str, windows: Windows) -> None:
    if len(windows):
        return
    corpus = windows.corpus
    if isinstance(windows, Packed) and windows.documents.untrained:
        raise ConfigError(
            f"{key}: none of {windows.documents.untrained} conversations has a token to train on",
            because="there is no assistant turn within the first tokens, which fit a window"
            if windows.documents.cut
            else "no message in them has the role 'assistant'",
            remedy="a larger data.sequence_length; or data.loss_on: all"
            if windows.documents.cut
            else 'name the role of answers so: {"role": "assistant", "content": "..."}',
        )
    raise ConfigError(
        f"{key}: {corpus.num_tokens} tokens in {corpus.num_documents} documents do not make one "
        f"window of {windows.length}",
        because="the files are empty or very small"
        if corpus.num_tokens < windows.length or not corpus.num_documents
        else "all of it was held out for evaluation",
        remedy="more text, a smaller data.sequence_length or a smaller data.held_out",
    )


# --- schedules -----------------------------------------------------------------------------------


def _with_schedule(engine: Config, steps: int) -> Config:
    """Return the configuration with the number of steps for `auto` in the schedule.

    DeepSpeed's warm-ups start at `last_batch_iteration` -1 with two steps at their lowest rate,
    0 by default. Unless it is configured, they start here at 1, with the first step above that
    rate, and `auto` ends them with the last step.
    """
    schedule = engine.scheduler
    if schedule is None:
        return engine
    params, begin = dict(schedule.params), 0
    if "warmup_num_steps" in SCHEDULES.get(schedule.type, {}):
        begin = max(params.setdefault("last_batch_iteration", 1), 0)
    params = {name: steps + begin if v == AUTO else v for name, v in params.items()}
    return engine.model_copy(update={"scheduler": schedule.model_copy(update={"params": params})})


def check_schedule(prepared: Prepared, directory: RunDirectory, checkpoint: Path | None) -> None:
    """Refuse to resume with a torch schedule that was created for another number of steps.

    The saved schedule is that of the run in `directory` or of `checkpoint`; a checkpoint of another
    format has none. torch schedules compute each rate from the previous one and retain their end,
    so steps beyond it would run at an arbitrary rate. Raises `ConfigError`, and
    `CheckpointError` for a damaged checkpoint.
    """
    scheduler, steps = prepared.config.engine.scheduler, prepared.steps
    if scheduler is None or scheduler.type in SCHEDULES:
        return
    saved = directory.decided.get(_SCHEDULE)
    schedules = [(f"the run in {directory.path}", saved)]
    if checkpoint and (checkpoint / MANIFEST_NAME).is_file():
        with CheckpointReader(checkpoint.parent, checkpoint.name) as reader:
            run = decode(reader.manifest.run)
        schedules.append((str(checkpoint), run.get("scheduler") if isinstance(run, dict) else None))
    for where, params in schedules:
        for name, value in scheduler.params.items():
            end = params.get(name) if isinstance(params, Mapping) else None
            if value != AUTO or not isinstance(end, int) or end == steps:
                continue
            key = f"engine.scheduler.params.{name}"
            raise ConfigError(
                f"the learning rate schedule of {where} is for {end} steps, and this run has "
                f"{steps}",
                because=f"{key}: auto is the number of steps, and {scheduler.type} retains its "
                "end when it is resumed (WarmupCosineLR, WarmupDecayLR and WarmupLR follow)",
                remedy=f"keep training.steps={end}; or {key}={end}, so that the steps after "
                "it are made at the schedule's last rate; to train on later, give a new run the "
                "number of all its steps there",
            )


def resumed_settings(prepared: Prepared, decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return `prepared.decides()`, with the recorded value of `auto` entries of the schedule."""
    settings, scheduler = prepared.decides(), prepared.config.engine.scheduler
    recorded = decided.get(_SCHEDULE)
    if scheduler is not None and isinstance(recorded, Mapping):
        settings[_SCHEDULE] = {
            name: recorded.get(name, value) if scheduler.params.get(name) == AUTO else value
            for name, value in settings[_SCHEDULE].items()
        }
    return settings


def extend_schedule(schedule: Any, prepared: Prepared) -> str:
    """Set the end of a resumed schedule to that of this run; return a message if it changes.

    From the next step on, its rates are those of a run that had this number of steps from the
    beginning.
    """
    configured, resolved = prepared.config.engine.scheduler, prepared.engine.scheduler
    if configured is None or resolved is None or configured.type not in SCHEDULES:
        return ""
    ends = {n: resolved.params[n] for n, value in configured.params.items() if value == AUTO}
    changed = {name: end for name, end in ends.items() if getattr(schedule, name) != end}
    if not changed:
        return ""
    vars(schedule).update(changed)
    groups, rates = schedule.optimizer.param_groups, schedule.get_lr()
    old_rate = groups[0]["lr"]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    return (
        f"{configured.type} ends with step {prepared.steps} now: the next learning rate is "
        f"{rates[0]:.3g}, not {old_rate:.3g}"
    )


# --- the plan ------------------------------------------------------------------------------------


def scheduled(
    prepared: Prepared,
    decided: Mapping[str, Any],
    device: Device,
    ranks: DistContext = SINGLE_PROCESS,
    *,
    retain_expert_ranges: bool = False,
) -> tuple[Prepared, ScheduleResult]:
    """Choose the batch schedule of a run that configures only the tokens of a step.

    Micro-batches and slices affect results, so a resumed run retains the `decided` ones. With
    `retain_expert_ranges`, the expert ranges of `prepared` are retained too.
    """
    config, decided_count = prepared.config, decided.get("engine.gradient_accumulation_steps")
    if decided_count is not None and decided_count % ranks.count:
        raise ConfigError(
            f"the run has {decided_count} micro-batches in a step, and {ranks.count} ranks cannot "
            "share them out",
            because="it goes on as if it had never stopped, or not at all",
            remedy=f"a number of ranks that divides {decided_count}",
        )
    requested = BatchSchedule.explicit_in(
        config.engine.activations,
        None if decided_count is None else decided_count // ranks.count,
        decided.get("engine.activations.slices"),
    )
    case, target, _ = case_of(prepared, device, ranks)
    samples = prepared.windows_per_step // ranks.count
    step = case.with_step(samples * prepared.length, 1)
    expert_ranges = () if retain_expert_ranges else range_size_variants(step, target)
    chosen = choose_schedule(step, requested, samples, expert_ranges)
    windows = samples // chosen.case.micro_batches
    return replace(prepared, engine=chosen.applied_to(prepared.engine), micro_batch=windows), chosen


def case_of(
    prepared: Prepared, device: Device, ranks: DistContext = SINGLE_PROCESS
) -> tuple[PlanInput, Target, Partition]:
    """Return the planner's input for a run, as `plan_input_for` does; `device` must stay open."""
    facts = prepared.facts
    return plan_input_for(
        facts.name,
        facts.on_meta,
        facts.config.to_dict(),
        prepared.engine,
        device,
        prepared.micro_batch * prepared.length,
        prepared.length,
        recompute=prepared.config.model.gradient_checkpointing,
        ranks=ranks,
    )
