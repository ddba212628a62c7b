"""From a configuration to what a run needs, before any memory is taken: every check is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.runs.corpus import Corpus, Progress, Recipe, prepare
from infinity.runs.directory import RunDirectory
from infinity.runs.model import ModelFacts, read_facts
from infinity.runs.schedule import AUTO, with_schedule
from infinity.runs.settings import RunConfig, micro_batches
from infinity.runs.sources import Source, find_sources
from infinity.runs.tokenizers import Tokenizer, find_tokenizer
from infinity.runs.windows import Windows, split

DEFAULT_LENGTH = 2048  # tokens of a window, where the model can see more

T = TypeVar("T")


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
        names = (
            "precision",
            "gradient_clipping",
            "optimizer.",
            "scheduler",
            "loss_scale.",
            "activations.slices",
        )
        found = {
            f"engine.{name}": entry["value"]
            for name, entry in engine.items()
            if name.startswith(names)
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

    def close(self) -> None:
        """Close the corpora; idempotent."""
        self.train.corpus.close()
        if self.evaluate is not None:
            self.evaluate.corpus.close()


def prepare_run(
    config: RunConfig, directory: RunDirectory, progress: Progress | None = None
) -> Prepared:
    """Look at the model, make the corpus, and settle what the configuration left open.

    Raises `ConfigError` for all that does not fit together, and what `corpus.prepare` raises.
    """
    data, problems = config.data, _Problems()
    sources = problems.of(lambda: find_sources("data.train", data.train, data.format)) or []
    held = problems.of(lambda: find_sources("data.evaluate", data.evaluate, data.format)) or []
    needs_text = any(source.format != "tokens" for source in (*sources, *held))
    tokenizer = problems.of(lambda: _tokenizer(config, required=needs_text))
    size = None if tokenizer is None else tokenizer.size
    ending = None if tokenizer is None else tokenizer.end
    facts = problems.of(lambda: read_facts(config.model, size, ending))
    length = 0
    if facts is not None:
        known = facts
        length = problems.of(lambda: _length(config, known)) or 0
    problems.tell()
    assert facts is not None
    end = _end(config, tokenizer, facts) if needs_text else None
    engine = _with_micro_batches(config, length)

    def corpus(files: Sequence[Source]) -> Corpus:
        recipe = Recipe(
            sources=files,
            tokenizer=tokenizer,
            size=facts.vocabulary,
            end=end,
            text_field=data.text_field,
            undecodable=data.undecodable,
            token_dtype=data.token_dtype,
        )
        return prepare(recipe, data.cache or directory.data, progress)

    whole = corpus(sources)
    try:
        train, evaluate = split(whole, length, data.held_out)
        _require("data.train", train)
        steps = _steps(config, len(train), engine)
        if held:
            evaluate, _ = split(corpus(held), length, 0.0)
            _require("data.evaluate", evaluate)
        return Prepared(
            config=config,
            engine=with_schedule(engine, steps),
            facts=facts,
            tokenizer=tokenizer,
            train=train,
            evaluate=evaluate if len(evaluate) else None,
            length=length,
            micro_batch=config.training.micro_batch,
            steps=steps,
        )
    except BaseException:
        whole.close()
        raise


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
            listed = "".join(f"\n  - {text}" for text in texts)
            raise ConfigError(f"{len(texts)} mistakes in the configuration:{listed}")


def _tokenizer(config: RunConfig, *, required: bool) -> Tokenizer | None:
    """The one that is asked for; None where all files hold tokens and the model has none."""
    if config.tokenizer != AUTO:
        return find_tokenizer(config.tokenizer)
    source = config.model.path if config.model.path is not None else config.model.config
    if isinstance(source, str):
        path = Path(source).expanduser()
        source = str(path.parent if path.is_file() else path) if path.exists() else source
        if path.exists() or config.model.path is not None:
            if required:
                return find_tokenizer(source)
            with suppress(ConfigError):
                return find_tokenizer(source)
            return None
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


def _with_micro_batches(config: RunConfig, length: int) -> Config:
    training, update = config.training, dict[str, Any]()
    if training.tokens_per_step is not None:
        try:
            count = micro_batches(training.tokens_per_step, training.micro_batch, length)
        except ValueError as error:
            raise ConfigError(f"training.{error}") from None
        update["gradient_accumulation_steps"] = count
    if config.engine.seed is None:
        update["seed"] = training.seed
    return config.engine.model_copy(update=update)


def _steps(config: RunConfig, windows: int, engine: Config) -> int:
    if config.training.steps is not None:
        return config.training.steps
    per_step = config.training.micro_batch * engine.gradient_accumulation_steps
    return max(round((config.training.epochs or 1.0) * windows / per_step), 1)


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
