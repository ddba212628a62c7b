"""Configuration of a run: model, data, training; its `engine` section is `Config`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from infinity.config.explain import explain
from infinity.config.fields import Number, Section, SinglePath, as_path, as_tuple
from infinity.config.renamed import current, migrate_keys
from infinity.config.schema import Config, entries
from infinity.config.source import apply_overrides, read_source
from infinity.errors import ConfigError
from infinity.types import FrozenFormat

NEVER = "never"  # value of `resume`
AUTO = "auto"  # in scheduler.params: the number of steps of the run
ALL_LINEAR = "all-linear"  # value of adapter.targets, as in peft
BYTES = "bytes"  # the tokenizer that needs no files
DEFAULT_LENGTH = 2048  # tokens of a window, unless the model's context is shorter


def _patterns(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else [value]
    paths = tuple(str(as_path(part)) for part in parts)
    if not paths:
        raise ValueError("is an empty list; give files, directories or patterns")
    return paths


def _as_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def _model_source(value: Any) -> Any:
    return value if value is None or isinstance(value, Mapping) else str(as_path(value))


Patterns: TypeAlias = Annotated[
    tuple[str, ...], BeforeValidator(_patterns, json_schema_input_type=str | tuple[str, ...])
]
Tracker: TypeAlias = Literal[
    "tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"
]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


class ModelSection(Section):
    """Model: pretrained weights (`path`), or a new model (`config`)."""

    path: Text | None = None
    """A directory with config.json and safetensors, or the id of a model on the Hub."""
    config: Annotated[dict[str, Any] | str | None, BeforeValidator(_model_source)] = None
    """A directory with a config.json, that file, or its keys: random weights."""
    gradient_checkpointing: bool = False
    """Recompute blocks in backward to save memory."""
    attention: Text | None = None
    """Attention implementation of transformers: sdpa, eager, ..."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            problem = "path and config are both given" if self.path else "neither path nor config"
            fine_tune = f"model.config=null fine-tunes {self.path}; " if self.path else ""
            raise ValueError(
                f"{problem}; {fine_tune}path is a pretrained model to go on with, config a new one"
            )
        return self


class DataSection(Section):
    """Training data, and its division into windows of tokens."""

    train: Patterns
    """Files, directories, patterns, hub:NAME[:CONFIG[:SPLIT]]."""
    evaluate: Patterns = ()
    """The same, for evaluation."""
    held_out: Number = Field(default=0.0, ge=0, lt=1)
    """Fraction of `train`, at its end, held out for evaluation."""
    format: Literal["auto", "text", "jsonl", "tokens", "parquet"] = "auto"
    """auto: by file extension: .jsonl, .ndjson, .json; .npy, .bin (tokens); .parquet; else text."""
    records: Literal["auto", "text", "chat"] = "auto"
    """Content of lines of JSONL, or rows: a text; or "chat", conversations in "messages", in
    "prompt" and "completion", or in Alpaca's or ShareGPT's format. "auto" decides by the first row,
    if all files have rows."""
    text_field: Text = "text"
    """Field of a line of JSONL, or of a row, that holds the text."""
    chat_template: SinglePath | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations with a loss: the assistant's turns and completions, or all."""
    packing: bool = True
    """Pack conversations into windows, without attention between them; else one each, padded."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Dtype of .bin files."""
    sequence_length: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Tokens of a window."""
    end_of_document: Annotated[int, Field(ge=0)] | Literal["auto", "none"] = "auto"
    """Token appended to each document: "auto" is the tokenizer's."""
    undecodable: Literal["refuse", "replace"] = "refuse"
    """Handling of bytes that are not UTF-8."""
    shuffle: bool = True
    """Draw windows in random order, a new one for each epoch."""
    cache: SinglePath | None = None
    """Directory of prepared tokens; by default in the run's directory."""

    @field_validator("held_out")
    @classmethod
    def _one_kind_of_evaluation(cls, value: float, info: Any) -> float:
        if value and info.data.get("evaluate"):
            raise ValueError("evaluate names files already; leave one of them out")
        return value

    @property
    def errors(self) -> str:
        """Value of `errors` for `str.decode`: "strict" or "replace"."""
        return "replace" if self.undecodable == "replace" else "strict"


class TrainingSection(Section):
    """Length of the run, its steps, evaluations and checkpoints."""

    steps: int | None = Field(default=None, ge=1)
    """Steps of the run; or give `epochs`."""
    epochs: Number | None = Field(default=None, gt=0)
    """Passes over the data; 1 if neither is given."""
    micro_batch: int = Field(default=1, ge=1)
    """Windows of a micro-batch."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Tokens of a step on all ranks; sets engine.gradient_accumulation_steps."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of windows; also engine.seed if that is null."""
    evaluate_every: int = Field(default=100, ge=0)
    """Steps between evaluations; 0 = at the end only."""
    evaluate_windows: int = Field(default=64, ge=1)
    """Maximum number of held-out windows in an evaluation."""
    keep_best: bool | None = None
    """Save the weights of the smallest held-out loss in best/; default: if `early_stop` is set."""
    early_stop: int | None = Field(default=None, ge=1)
    """End the run after this number of evaluations in a row without a better loss."""
    checkpoint_every: int = Field(default=500, ge=0)
    """Steps between checkpoints; 0 = at the end only."""
    keep_last: int = Field(default=2, ge=1)
    """Number of checkpoints to retain."""
    sample: Text | None = None
    """Prompt that the model continues at the end, for report.html: 100 tokens, a forward each."""
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(_as_names)] = ()
    """Trackers of accelerate: tensorboard, wandb, mlflow, ..."""
    export: Literal["auto", "bf16", "fp16", "fp32", "none"] = "auto"
    """Precision of the model written at the end: "auto" is that of training; "none" writes none."""

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, value: float | None, info: Any) -> float | None:
        if value is not None and info.data.get("steps") is not None:
            raise ValueError("steps are given as well; leave one of them out")
        return value


class AdapterSection(Section):
    """peft adapters, trained instead of the model's weights."""

    type: Literal["lora", "qlora"] = "lora"
    """qlora: the base is stored in the format of `engine.frozen`, nf4 by default."""
    r: int = Field(default=16, ge=1)
    """Rank of the matrices."""
    alpha: Annotated[Number, Field(gt=0)] | None = None
    """Their product is scaled by alpha / r; 2 r by default."""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout before the matrices."""
    targets: Annotated[
        tuple[Text, ...], BeforeValidator(_as_names, json_schema_input_type=str | tuple[str, ...])
    ] = (ALL_LINEAR,)
    """Suffixes of names of the layers to adapt; all-linear: all linear layers but the head."""
    target_parameters: Annotated[
        tuple[Text, ...],
        BeforeValidator(_as_names, json_schema_input_type=str | tuple[str, ...]),
        Field(validate_default=True),
    ] = ()
    """Suffixes of names of parameters to adapt, such as stacks of experts:
    mlp.experts.gate_up_proj, mlp.experts.down_proj. `targets: []` adapts only these.
    """

    @field_validator("target_parameters")
    @classmethod
    def _adapts_something(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        if value and info.data.get("dropout"):
            raise ValueError("peft has no dropout for them; set adapter.dropout: 0")
        if not value and info.data.get("targets") == ():
            raise ValueError("are empty, and adapter.targets too: nothing would be adapted")
        return value


class RunConfig(Section):
    """Configuration of `infinity train`; see `load_run_config`."""

    run_dir: SinglePath
    """Directory of the run: its record, metrics, checkpoints and model."""
    model: ModelSection
    adapter: AdapterSection | None = None
    tokenizer: Text = "auto"
    """auto: the model's; a directory or Hub id; bytes: each byte is a token."""
    data: DataSection
    training: TrainingSection = TrainingSection()
    engine: Config = Config()

    def engine_for(self, length: int | Literal["auto"], ranks: int = 1) -> Config:
        """Return the engine's configuration, with the micro-batches of a rank and chunked logits.

        A step is the same on any number of `ranks`, which divide its micro-batches. Raises
        `ConfigError` if the tokens of a step are no multiple of a micro-batch of windows of
        `length` tokens, or its micro-batches no multiple of `ranks`.
        """
        tokens_per_step, engine = self.training.tokens_per_step, self.engine.with_chunked_logits()
        quantized = self.adapter is not None and self.adapter.type == "qlora"
        if quantized and "format" not in engine.frozen.model_fields_set:
            frozen = engine.frozen.model_copy(update={"format": FrozenFormat.NF4.value})
            engine = engine.model_copy(update={"frozen": frozen})
        count = engine.gradient_accumulation_steps
        if tokens_per_step is not None and length != "auto":
            try:
                count = micro_batches(tokens_per_step, self.training.micro_batch, length)
            except ValueError as error:
                raise ConfigError(f"training.{error}") from None
        if count % ranks:
            next_count = -(-count // ranks) * ranks
            tokens = "" if length == "auto" else next_count * self.training.micro_batch * length
            raise ConfigError(
                f"a step of {count} micro-batches cannot be shared out to {ranks} ranks",
                because="a run has the same steps on any number of ranks",
                remedy=f"training.tokens_per_step={tokens}"
                if tokens_per_step is not None and tokens
                else f"engine.gradient_accumulation_steps={next_count}, those of all ranks "
                "together; with a smaller training.micro_batch a step keeps its size",
            )
        if count == engine.gradient_accumulation_steps * ranks:
            return engine
        return engine.model_copy(update={"gradient_accumulation_steps": count // ranks})

    @property
    def plans_batch_schedule(self) -> bool:
        """Return True if the tokens of a step are configured, but not its micro-batches."""
        training = self.training
        is_explicit = (
            "micro_batch" in training.model_fields_set or self.model.gradient_checkpointing
        )
        return training.tokens_per_step is not None and not is_explicit

    def length_for(self, context: int | None) -> int:
        """Return the tokens of a window for a model of this context (None: unknown)."""
        length = self.data.sequence_length
        return min(context or DEFAULT_LENGTH, DEFAULT_LENGTH) if length == "auto" else length

    def tokens_per_step_with(self, length: int) -> int:
        """Return the tokens of a step on all ranks, with windows of `length` tokens."""
        tokens = self.training.micro_batch * length * self.engine.gradient_accumulation_steps
        return self.training.tokens_per_step or tokens

    @field_validator("training")
    @classmethod
    def _is_consistent_with_data(cls, value: TrainingSection, info: Any) -> TrainingSection:
        data, tokens_per_step = info.data.get("data"), value.tokens_per_step
        if data is not None and not (data.evaluate or data.held_out):
            for name in ("early_stop", "keep_best"):
                if getattr(value, name):
                    raise ValueError(f"{name} needs data.evaluate: FILES or data.held_out: 0.05")
        if value.early_stop and not value.evaluate_every:
            raise ValueError("early_stop needs evaluate_every: 50, say; 0 is at the end only")
        if tokens_per_step is not None and data is not None and data.sequence_length != "auto":
            micro_batches(tokens_per_step, value.micro_batch, data.sequence_length)
        return value

    @field_validator("engine")
    @classmethod
    def _has_no_reserved_keys(cls, value: Config, info: Any) -> Config:
        if "resume" in value.model_fields_set:
            raise ValueError("resume is not for a run; type infinity train ... --resume auto")
        training = info.data.get("training")
        tokens_per_step = None if training is None else training.tokens_per_step
        if tokens_per_step is not None and "gradient_accumulation_steps" in value.model_fields_set:
            raise ValueError(
                "gradient_accumulation_steps is given, and training.tokens_per_step as well; "
                "leave one of them out"
            )
        return value


def micro_batches(tokens_per_step: int, micro_batch: int, sequence_length: int) -> int:
    """Return the micro-batches of a step; raise `ValueError` if it is no multiple of them."""
    count, remainder = divmod(tokens_per_step, micro_batch * sequence_length)
    if remainder or not count:
        raise ValueError(
            f"tokens_per_step is {tokens_per_step}, which is no multiple of micro_batch x "
            f"data.sequence_length = {micro_batch} x {sequence_length} = "
            f"{micro_batch * sequence_length}"
        )
    return count


_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def is_run_config(raw: Mapping[str, Any]) -> bool:
    """Return True if a mapping is a configuration of `infinity train`, not of an engine."""
    return "model" in raw and ("data" in raw or "run_dir" in raw)


def load_run_config(
    source: Mapping[str, Any] | str | os.PathLike[str], overrides: Iterable[str] = ()
) -> RunConfig:
    """Return the configuration in a dict, or in a YAML or JSON file.

    `overrides` are "section.key=value" strings that take precedence. Raises one `ConfigError` that
    lists every invalid value by its dotted name.
    """
    if not isinstance(source, Mapping) and not (path := Path(source).expanduser()).exists():
        remedy = "`infinity init` writes one to start from"
        raise ConfigError(f"{path} does not exist", remedy=remedy)
    where, raw = read_source(source)
    raw = migrate_keys(raw, "engine.")
    merged = apply_overrides(raw, overrides, partial(current, prefix="engine."))
    is_other = merged and not is_run_config(merged)
    if is_other and any(name in Config.model_fields for name in merged):
        raise ConfigError(
            f"{where} is the configuration of an engine, not of a run",
            because="it has no model and no data",
            remedy="`infinity init` writes one to start from; yours goes into its section engine",
        )
    if is_other and _DEEPSPEED_KEYS & merged.keys():
        raise ConfigError(
            f"{where} is a configuration of DeepSpeed, not of a run",
            because="it has no model and no data",
            remedy="`infinity run SCRIPT ...` runs the script that uses it; `infinity plan "
            f"{where} --model MODEL` predicts memory and speed",
        )
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(RunConfig, where, error)) from None


def as_yaml(config: RunConfig, derived: Mapping[str, Any], heading: str) -> str:
    """Return the configuration as YAML, with default and derived values in comments.

    `derived` are values, by dotted name, that the run has chosen for those not given.
    """
    settings = dict(entries(config, ""))
    for name, value in derived.items():
        entry = settings.get(name, {"origin": "default"})
        if entry["origin"] == "default" or entry["value"] == "auto":
            settings[name] = {"value": value, "origin": "derived"}
    given = config.model_dump(mode="json", exclude_unset=True)
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines += ["", yaml.safe_dump(given, sort_keys=False, allow_unicode=True)]
    for name, entry in settings.items():
        if entry["origin"] != "given":
            lines.append(f"# {name}: {json.dumps(entry['value'])}  # {entry['origin']}")
    return "\n".join(lines) + "\n"
