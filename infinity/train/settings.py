"""The configuration of a run: which model, on what data, for how long; `engine` is `Config`."""

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
from infinity.config.fields import Number, OnePath, Section, as_pair, as_path
from infinity.config.renamed import current, with_current_names
from infinity.config.schema import Config, entries
from infinity.config.source import apply_overrides, read_source
from infinity.errors import ConfigError
from infinity.types import FrozenFormat

NEVER = "never"  # of `resume`
AUTO = "auto"  # in scheduler.params: the number of steps of the run
ALL_LINEAR = "all-linear"  # of adapter.targets, as peft calls it
BYTES = "bytes"  # the tokenizer that needs no files
DEFAULT_LENGTH = 2048  # tokens of a window, where the model can see more


def _patterns(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else [value]
    paths = tuple(str(as_path(part)) for part in parts)
    if not paths:
        raise ValueError("is an empty list; give files, directories or patterns")
    return paths


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_pair(value)


def _model_source(value: Any) -> Any:
    return value if isinstance(value, Mapping) else str(as_path(value))


Patterns: TypeAlias = Annotated[
    tuple[str, ...], BeforeValidator(_patterns, json_schema_input_type=str | tuple[str, ...])
]
Tracker: TypeAlias = Literal[
    "tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"
]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


class ModelSection(Section):
    """The model: pretrained weights (`path`), or a new one (`config`)."""

    path: Text | None = None
    """A directory with config.json and safetensors, or the id of a model on the Hub."""
    config: Annotated[dict[str, Any] | str | None, BeforeValidator(_model_source)] = None
    """A directory with a config.json, that file, or its keys: random weights."""
    gradient_checkpointing: bool = False
    """Blocks are computed again in backward: less memory."""
    attention: Text | None = None
    """sdpa, eager, ...: what transformers offers."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            both = "path and config are both given" if self.path else "neither path nor config"
            fine_tune = f"model.config=null fine-tunes {self.path}; " if self.path else ""
            raise ValueError(
                f"{both}; {fine_tune}path is a pretrained model to go on with, config a new one"
            )
        return self


class DataSection(Section):
    """Training data, and how it is cut into windows of tokens."""

    train: Patterns
    """Files, directories, patterns, hub:NAME[:CONFIG[:SPLIT]]."""
    evaluate: Patterns = ()
    """The same, for evaluation."""
    held_out: Number = Field(default=0.0, ge=0, lt=1)
    """The last part of `train`, for evaluation."""
    format: Literal["auto", "text", "jsonl", "tokens", "parquet"] = "auto"
    """auto: a file's ending: .jsonl, .ndjson, .json; .npy, .bin (tokens); .parquet; else text."""
    records: Literal["auto", "text", "chat"] = "auto"
    """What lines of JSONL, or rows, hold: a text; or "chat", conversations in "messages", in
    "prompt" and "completion", or as Alpaca's or ShareGPT's. "auto" looks at the first row, if they
    are all the files."""
    text_field: Text = "text"
    """Where the text is in a line of JSONL, or a row."""
    chat_template: OnePath | None = None
    """A Jinja file in the place of the tokenizer's own chat template."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Of conversations: what assistants say, or completions; or every token."""
    packing: bool = True
    """Of conversations: several in a window, none of which sees another; else one, filled up."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """What .bin files hold."""
    sequence_length: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Tokens of a window."""
    end_of_document: Annotated[int, Field(ge=0)] | Literal["auto", "none"] = "auto"
    """The token put after each document: "auto" is the tokenizer's."""
    undecodable: Literal["refuse", "replace"] = "refuse"
    """What to do with bytes that are not UTF-8."""
    shuffle: bool = True
    """Draw windows in a random order, anew for each epoch."""
    cache: OnePath | None = None
    """Where tokens are kept; the run's directory by default."""

    @field_validator("held_out")
    @classmethod
    def _one_kind_of_evaluation(cls, value: float, info: Any) -> float:
        if value and info.data.get("evaluate"):
            raise ValueError("evaluate names files already; leave one of them out")
        return value

    @property
    def errors(self) -> str:
        """What `str.decode` does with bytes that are not UTF-8."""
        return "replace" if self.undecodable == "replace" else "strict"


class TrainingSection(Section):
    """Length of the run, its steps, evaluations and checkpoints."""

    steps: int | None = Field(default=None, ge=1)
    """Steps of the run; or give `epochs`."""
    epochs: Number | None = Field(default=None, gt=0)
    """1 where neither is given."""
    micro_batch: int = Field(default=1, ge=1)
    """Windows computed at once."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Of all ranks together; sets engine.gradient_accumulation_steps."""
    seed: int = Field(default=0, ge=0)
    """Of the order of windows; engine.seed where that is None."""
    evaluate_every: int = Field(default=100, ge=0)
    """Steps; 0 = at the end only."""
    evaluate_windows: int = Field(default=64, ge=1)
    """Most held-out windows of an evaluation."""
    keep_best: bool | None = None
    """The weights with the smallest held-out loss stay in best/; by default if `early_stop` is."""
    early_stop: int | None = Field(default=None, ge=1)
    """End the run after this number of evaluations in a row without a better loss."""
    checkpoint_every: int = Field(default=500, ge=0)
    """Steps; 0 = at the end only."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints that stay."""
    sample: Text | None = None
    """A text that the model continues at the end, for report.html: 100 tokens, a forward each."""
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(_names)] = ()
    """Trackers of accelerate: tensorboard, wandb, mlflow, ..."""
    export: Literal["auto", "bf16", "fp16", "fp32", "none"] = "auto"
    """Of the model that is written at the end: "auto" is the precision that was trained in."""

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, value: float | None, info: Any) -> float | None:
        if value is not None and info.data.get("steps") is not None:
            raise ValueError("steps are given as well; leave one of them out")
        return value


class AdapterSection(Section):
    """Adapters of peft that are trained in the place of the model's own weights."""

    type: Literal["lora", "qlora"] = "lora"
    """qlora: the base is stored in the format of `engine.frozen`, nf4 by default."""
    r: int = Field(default=16, ge=1)
    """The rank of the matrices."""
    alpha: Annotated[Number, Field(gt=0)] | None = None
    """Their product counts alpha / r times; 2 r by default."""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout before the matrices."""
    targets: Annotated[
        tuple[Text, ...], BeforeValidator(_names, json_schema_input_type=str | tuple[str, ...])
    ] = (ALL_LINEAR,)
    """Ends of names of the layers that get one; all-linear: all linear ones but the head."""
    target_parameters: Annotated[
        tuple[Text, ...],
        BeforeValidator(_names, json_schema_input_type=str | tuple[str, ...]),
        Field(validate_default=True),
    ] = ()
    """Ends of names of parameters that get one, such as stacks of experts:
    mlp.experts.gate_up_proj, mlp.experts.down_proj. `targets: []` adapts these alone.
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
    """Configuration of `infinity train`; read it with `load_run_config`."""

    run_dir: OnePath
    """The directory of the run: its record, metrics, checkpoints and model."""
    model: ModelSection
    adapter: AdapterSection | None = None
    tokenizer: Text = "auto"
    """auto is the model's own; a directory or Hub id; bytes: a token is a byte."""
    data: DataSection
    training: TrainingSection = TrainingSection()
    engine: Config = Config()

    def engine_for(self, length: int | Literal["auto"], ranks: int = 1) -> Config:
        """Return the engine's configuration for the micro-batches of a step; logits are chunked.

        Here a step is the same on any number of `ranks`, which share out its micro-batches. Raises
        `ConfigError` where windows of `length` tokens, or these, do not come out even.
        """
        wanted, engine = self.training.tokens_per_step, self.engine.with_chunked_logits()
        quantised = self.adapter is not None and self.adapter.type == "qlora"
        if quantised and "format" not in engine.frozen.model_fields_set:
            frozen = engine.frozen.model_copy(update={"format": FrozenFormat.NF4.value})
            engine = engine.model_copy(update={"frozen": frozen})
        count = engine.gradient_accumulation_steps
        if wanted is not None and length != "auto":
            try:
                count = micro_batches(wanted, self.training.micro_batch, length)
            except ValueError as error:
                raise ConfigError(f"training.{error}") from None
        if count % ranks:
            more = -(-count // ranks) * ranks
            tokens = "" if length == "auto" else more * self.training.micro_batch * length
            raise ConfigError(
                f"a step of {count} micro-batches cannot be shared out to {ranks} ranks",
                because="a run has the same steps on any number of ranks",
                remedy=f"training.tokens_per_step={tokens}"
                if wanted is not None and tokens
                else f"engine.gradient_accumulation_steps={more}, those of all ranks together; "
                "with a smaller training.micro_batch a step keeps its size",
            )
        if count == engine.gradient_accumulation_steps * ranks:
            return engine
        return engine.model_copy(update={"gradient_accumulation_steps": count // ranks})

    @property
    def leaves_batches_to_the_plan(self) -> bool:
        """Return True if only the tokens of a step are given, and no micro-batches."""
        training = self.training
        is_explicit = (
            "micro_batch" in training.model_fields_set or self.model.gradient_checkpointing
        )
        return training.tokens_per_step is not None and not is_explicit

    def length_for(self, context: int | None) -> int:
        """Return tokens of a window for a model of this context (None: unknown)."""
        length = self.data.sequence_length
        return min(context or DEFAULT_LENGTH, DEFAULT_LENGTH) if length == "auto" else length

    def tokens_of_a_step(self, length: int) -> int:
        """All micro-batches of windows of `length` tokens together."""
        tokens = self.training.micro_batch * length * self.engine.gradient_accumulation_steps
        return self.training.tokens_per_step or tokens

    @field_validator("training")
    @classmethod
    def _fits_the_data(cls, value: TrainingSection, info: Any) -> TrainingSection:
        data, wanted = info.data.get("data"), value.tokens_per_step
        if data is not None and not (data.evaluate or data.held_out):
            for name in ("early_stop", "keep_best"):
                if getattr(value, name):
                    raise ValueError(f"{name} needs data.evaluate: FILES or data.held_out: 0.05")
        if value.early_stop and not value.evaluate_every:
            raise ValueError("early_stop needs evaluate_every: 50, say; 0 is at the end only")
        if wanted is not None and data is not None and data.sequence_length != "auto":
            micro_batches(wanted, value.micro_batch, data.sequence_length)
        return value

    @field_validator("engine")
    @classmethod
    def _leaves_ours_alone(cls, value: Config, info: Any) -> Config:
        if "resume" in value.model_fields_set:
            raise ValueError("resume is not for a run; type infinity train ... --resume auto")
        training = info.data.get("training")
        wanted = None if training is None else training.tokens_per_step
        if wanted is not None and "gradient_accumulation_steps" in value.model_fields_set:
            raise ValueError(
                "gradient_accumulation_steps is given, and training.tokens_per_step as well; "
                "leave one of them out"
            )
        return value


def micro_batches(tokens_per_step: int, micro_batch: int, sequence_length: int) -> int:
    """How many micro-batches make a step; raises `ValueError` where they do not come out even."""
    count, remainder = divmod(tokens_per_step, micro_batch * sequence_length)
    if remainder or not count:
        raise ValueError(
            f"tokens_per_step is {tokens_per_step}, which is no multiple of micro_batch x "
            f"data.sequence_length = {micro_batch} x {sequence_length} = "
            f"{micro_batch * sequence_length}"
        )
    return count


_OF_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def is_run_config(raw: Mapping[str, Any]) -> bool:
    """Whether a mapping is meant for `infinity train` rather than for an engine."""
    return "model" in raw and ("data" in raw or "run_dir" in raw)


def load_run_config(
    source: Mapping[str, Any] | str | os.PathLike[str], overrides: Iterable[str] = ()
) -> RunConfig:
    """Return the configuration in a dict, or in a YAML or JSON file.

    `overrides` are "section.key=value" texts and win. Raises one `ConfigError` that lists
    everything that is wrong, each with its dotted name.
    """
    if not isinstance(source, Mapping) and not (path := Path(source).expanduser()).exists():
        remedy = "`infinity init` writes one to start from"
        raise ConfigError(f"{path} does not exist", remedy=remedy)
    where, raw = read_source(source)
    raw = with_current_names(raw, "engine.")
    merged = apply_overrides(raw, overrides, partial(current, prefix="engine."))
    is_other = merged and not is_run_config(merged)
    if is_other and any(name in Config.model_fields for name in merged):
        raise ConfigError(
            f"{where} is the configuration of an engine, not of a run",
            because="it has no model and no data",
            remedy="`infinity init` writes one to start from; yours goes into its section engine",
        )
    if is_other and _OF_DEEPSPEED & merged.keys():
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
    """A YAML file that means the same configuration; in comments every value that was not given.

    `derived` are values, by dotted name, that the run has worked out where nothing was given.
    """
    found = dict(entries(config, ""))
    for name, value in derived.items():
        entry = found.get(name, {"origin": "default"})
        if entry["origin"] == "default" or entry["value"] == "auto":
            found[name] = {"value": value, "origin": "derived"}
    given = config.model_dump(mode="json", exclude_unset=True)
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines += ["", yaml.safe_dump(given, sort_keys=False, allow_unicode=True)]
    for name, entry in found.items():
        if entry["origin"] != "given":
            lines.append(f"# {name}: {json.dumps(entry['value'])}  # {entry['origin']}")
    return "\n".join(lines) + "\n"
