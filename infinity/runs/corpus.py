"""A corpus: tokenised once, kept in a directory, read in place, and larger than RAM if need be.

The directory is named after what it was made from (files by name, size and time, tokenizer,
settings), so what has not changed is used again, and what has is made anew beside it. It appears
whole, by a rename.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinity.errors import CheckpointError, ConfigError, DoesNotFitError, MachineError
from infinity.runs.documents import Advance, read_pieces
from infinity.runs.segments import SegmentFacts, SegmentReader, ShardWriter
from infinity.runs.sources import Source
from infinity.runs.token_files import adopt
from infinity.runs.tokenizers import Tokenizer
from infinity.sizes import format_size
from infinity.stable import FOLDER_MODE, sync_directory, write_new

FORMAT = 2
_INDEX = "index.json"
_PARTIAL = ".partial-"
_BATCH_CHARACTERS = 1 << 22
_BATCH_PIECES = 512
_FULL = (errno.ENOSPC, errno.EDQUOT)

Progress = Callable[[int, int, str], None]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """What a corpus is made from; `size` is the number of tokens that the model knows."""

    sources: Sequence[Source]
    tokenizer: Tokenizer | None
    size: int
    end: int | None
    text_field: str
    undecodable: str
    token_dtype: str | None

    @property
    def key(self) -> str:
        """Equal for recipes that give the same corpus."""
        facts = {
            "format": FORMAT,
            "sources": [source.as_dict() for source in self.sources],
            "tokenizer": None if self.tokenizer is None else self.tokenizer.identity,
            "size": self.size,
            "end": self.end,
            "text_field": self.text_field,
            "undecodable": self.undecodable,
            "token_dtype": self.token_dtype,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Corpus:
    """All tokens of a directory as one row. Close it.

    `identity` is equal for corpora with the same tokens in the same order.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = _read_index(directory)
        self.identity: str = index["identity"]
        self.num_documents: int = index["documents"]
        self._readers: list[SegmentReader] = []
        try:
            for facts in index["segments"]:
                self._readers.append(SegmentReader(directory, SegmentFacts(**facts)))
        except BaseException:
            self.close()
            raise
        counts = [reader.facts.count for reader in self._readers]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_tokens = int(self._starts[-1])

    def close(self) -> None:
        """Close all files; idempotent."""
        for reader in self._readers:
            reader.close()

    def read(self, start: int, count: int) -> Tokens:
        """Tokens `start` to `start + count`. Raises `CheckpointError` where they are damaged."""
        assert 0 <= start <= start + count <= self.num_tokens
        parts = []
        segment = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count:
            reader, within = self._readers[segment], start - int(self._starts[segment])
            take = min(count, reader.facts.count - within)
            if take:
                parts.append(reader.read(within, take).astype(np.int64))
            start, count, segment = start + take, count - take, segment + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def prepare(recipe: Recipe, cache: Path, progress: Progress | None = None) -> Corpus:
    """The corpus of a recipe: the one in `cache` if there is one, else it is made.

    `progress(done_bytes, total_bytes, what)` is called while it is made. Raises `ConfigError` for
    sources that are not what they should be, `CheckpointError` for a damaged corpus,
    `DoesNotFitError` where the disk is full, `MachineError`.
    """
    directory = cache / recipe.key
    if not directory.is_dir():
        with _explained(cache):
            cache.mkdir(parents=True, exist_ok=True)
            _clear(cache)
            _make(recipe, directory, progress)
    return Corpus(directory)


def _make(recipe: Recipe, directory: Path, progress: Progress | None) -> None:
    partial = directory.with_name(f"{directory.name}{_PARTIAL}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(FOLDER_MODE)
    try:
        total = sum(source.size for source in recipe.sources)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(min(done, total), total, "preparing tokens")

        index = _fill(recipe, partial, advance)
        write_new(partial / _INDEX, _sealed(index).encode(), 0o644)
        sync_directory(partial)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.is_dir():  # else somebody else was faster
                raise
            shutil.rmtree(partial)
        sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fill(recipe: Recipe, directory: Path, advance: Advance) -> dict[str, Any]:
    segments: list[SegmentFacts] = []
    documents = 0
    if any(source.format != "tokens" for source in recipe.sources):
        assert recipe.tokenizer is not None
        size = max(recipe.tokenizer.size, (recipe.end or 0) + 1)
        writer = ShardWriter(directory, "uint16" if size <= 1 << 16 else "uint32")
        try:
            documents = _tokenise(recipe, writer, advance)
            segments += writer.finish()
        finally:
            writer.abandon()
        if writer.largest >= recipe.size:
            raise vocabulary_error(recipe.tokenizer.name, writer.largest + 1, recipe.size)
    for source in recipe.sources:
        if source.format == "tokens":
            index = len(segments)
            segments.append(
                adopt(source, directory, index, recipe.token_dtype, recipe.size, advance)
            )
    digest = hashlib.sha256()
    for facts in segments:
        digest.update(f"{facts.dtype} {facts.count} ".encode())
        digest.update((directory / facts.checksums).read_bytes())
    return {
        "format": FORMAT,
        "identity": digest.hexdigest()[:32],
        "documents": documents,
        "tokens": sum(facts.count for facts in segments),
        "sources": [source.as_dict() for source in recipe.sources],
        "tokenizer": None if recipe.tokenizer is None else recipe.tokenizer.name,
        "segments": [asdict(facts) for facts in segments],
    }


def _tokenise(recipe: Recipe, writer: ShardWriter, advance: Advance) -> int:
    """Write the tokens of all texts; returns how many documents there were."""
    assert recipe.tokenizer is not None
    documents = 0
    end = None if recipe.end is None else np.asarray([recipe.end])
    for batch in _batches(recipe, advance):
        for tokens, ends in zip(
            recipe.tokenizer.encode([text for text, _ in batch]),
            [ends for _, ends in batch],
            strict=True,
        ):
            writer.append(tokens)
            if ends:
                documents += 1
                if end is not None:
                    writer.append(end)
    return documents


def _batches(recipe: Recipe, advance: Advance) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in lists that are worth a call of the tokenizer, and fit memory."""
    held: list[tuple[str, bool]] = []
    characters = 0
    for source in recipe.sources:
        if source.format == "tokens":
            continue
        for text, ends in read_pieces(source, recipe.text_field, recipe.undecodable, advance):
            held.append((text, ends))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(held) >= _BATCH_PIECES:
                yield held
                held, characters = [], 0
    if held:
        yield held


def vocabulary_error(name: str, needed: int, size: int) -> ConfigError:
    """Tokens that the model does not know."""
    return ConfigError(
        f"the tokenizer {name} has {needed} tokens, and the model knows {size}",
        because="they do not belong together, or the model's vocab_size is too small",
        remedy="tokenizer: auto takes the model's own; a new model: "
        f"model.config.vocab_size={needed}",
    )


def _sealed(index: dict[str, Any]) -> str:
    text = json.dumps(index, sort_keys=True)
    return json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), **index}, indent=1)


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / _INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        checksum = index.pop("checksum")
        text = json.dumps(index, sort_keys=True)
        if checksum != hashlib.sha256(text.encode()).hexdigest() or index["format"] != FORMAT:
            raise ValueError("its checksum does not fit")
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged",
            because=str(error),
            remedy=f"rm -r {directory}, and start again: the tokens are made anew",
        ) from error
    return index


def _clear(cache: Path) -> None:
    """Remove what processes that are gone were making."""
    for path in cache.glob(f"*{_PARTIAL}*"):
        pid = path.name.partition(_PARTIAL)[2].partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _explained(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or cache
        if error.errno in _FULL:
            raise DoesNotFitError(
                f"the tokens do not fit {cache}: {error.strerror}, "
                f"{format_size(shutil.disk_usage(cache).free)} are free",
                remedy="make room there, or data.cache: DIR on a larger drive",
            ) from error
        raise MachineError(
            f"{where}: {error.strerror} (errno {error.errno})",
            because="tokens are kept there, or read from there",
            remedy="data.cache: DIR names another place for them",
        ) from error
