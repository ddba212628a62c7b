"""Tokens of a run, prepared once and cached on disk.

A corpus is a directory named after a hash of its inputs (name, size and time of files, tokenizer,
settings), so unchanged inputs reuse it; it is published by an atomic rename. Texts become one file
of uint16 or uint32; files of tokens are read in place. Tokens are read, not mapped: a mapping would
count as memory of the process, which the engine limits, and a truncated file would kill the
process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinity.common.checksummed_json import read_sealed, write_sealed
from infinity.common.files import FOLDER_MODE, LockFile, open_new, refused, sync_directory
from infinity.errors import CheckpointError, ConfigError, MachineError
from infinity.train.conversations import TOKEN, Conversations
from infinity.train.texts import TextSource, Tokenizer, read_rows, read_texts

_FORMAT, FORMAT = "torch-infinity-tokens", 3
_INDEX, _TOKENS, _PARTIAL, _LOCK = "index.json", "tokens.bin", ".partial-", ".lock"
_BATCH_CHARACTERS = 1 << 22  # characters of a tokenizer call
_CHUNK = 1 << 20  # tokens of a file that are checked at once

Progress = Callable[[int, int, str], None]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class CorpusSpec:
    """Inputs of a corpus.

    `size` is the size of the model's vocabulary. `end` is the token after each document, None for
    no token. `conversations` encodes rows; None if they hold texts.
    """

    sources: Sequence[TextSource]
    tokenizer: Tokenizer | None
    size: int
    end: int | None
    text_field: str
    errors: str
    token_dtype: str | None
    conversations: Conversations | None = None

    @property
    def key(self) -> str:
        """Hash that names the corpus; equal for specs with equal tokens."""
        facts = {**vars(self), "format": FORMAT, "sources": [asdict(s) for s in self.sources]}
        facts["tokenizer"] = None if self.tokenizer is None else self.tokenizer.identity
        facts["conversations"] = self.conversations and self.conversations.identity
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class _TokenRange(NamedTuple):
    """Range of a token file; `path` may be relative to the corpus directory, `offset` in bytes."""

    path: str
    dtype: str
    offset: int
    length: int

    def end(self) -> int:
        return self.offset + self.length * np.dtype(self.dtype).itemsize

    def read(self, directory: Path, start: int, count: int) -> NDArray[Any]:
        path, offset = directory / self.path, self.offset + start * np.dtype(self.dtype).itemsize
        try:
            tokens = np.fromfile(path, self.dtype, count, offset=offset)
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror or error}") from error
        if len(tokens) != count:
            raise CheckpointError(f"{path} was cut short while it was read")
        return tokens


class Corpus:
    """All tokens in a corpus directory as one sequence.

    `identity` is equal for corpora with equal tokens in equal order; `marked` is True for marked
    tokens ([Note: marked tokens] in `train/conversations.py`). Raises `CheckpointError` if the
    directory is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / _INDEX
        remedy = f"rm -r {directory}, and start again: it is prepared anew"
        try:
            index = read_sealed(path, _FORMAT, FORMAT)
            self._segments = [_TokenRange(*facts) for facts in index["segments"]]
            self.identity: str = index["identity"]
            self.num_documents: int = index["documents"]
            self.marked: bool = index.get("marked", False)
            for segment in self._segments:
                path = directory / segment.path
                if path.stat().st_size < segment.end():
                    raise ValueError(f"it has {path.stat().st_size} bytes, not {segment.end()}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged: it does not hold the tokens that were prepared",
                because=str(error),
                remedy=remedy,
            ) from error
        self._starts = np.cumsum([0, *(segment.length for segment in self._segments)])
        self.num_tokens = int(self._starts[-1])

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return tokens `start` to `start + count`; raise `CheckpointError` or `MachineError`."""
        assert 0 <= start <= start + count <= self.num_tokens
        parts = []
        for segment, first in zip(self._segments, map(int, self._starts), strict=False):
            begin, end = max(start, first), min(start + count, first + segment.length)
            if begin < end:
                parts.append(segment.read(self.directory, begin - first, end - begin))
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64, casting="unsafe")


def prepare(spec: CorpusSpec, cache: Path, progress: Progress | None = None) -> Corpus:
    """Return the corpus of a spec from `cache`; prepare it there if it is missing.

    `progress(done_bytes, total_bytes, what)` is called during preparation. Raises `ConfigError` for
    invalid sources, `CheckpointError` for a damaged corpus, `DoesNotFitError` if the disk is full,
    and `MachineError`.
    """
    directory = cache / spec.key
    if not directory.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            for path in cache.glob(f"*{_PARTIAL}*{_LOCK}"):
                with suppress(OSError), LockFile(path, create=False) as lock:  # of a killed process
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    lock.release()
            partial = directory.with_name(f"{directory.name}{_PARTIAL}{uuid.uuid4().hex[:16]}")
            lock = LockFile(partial.with_suffix(f"{partial.suffix}{_LOCK}"))
            try:
                _make(spec, partial, directory, progress)
            finally:
                lock.release()
        except OSError as error:
            what = f"{error.filename or cache}: tokens cannot be written or read"
            remedy = "data.cache: DIR, another directory for tokens, perhaps on a larger drive"
            raise refused(what, error, cache, remedy=remedy) from error
    return Corpus(directory)


def _make(spec: CorpusSpec, partial: Path, directory: Path, progress: Progress | None) -> None:
    """Prepare the corpus in `partial`, and rename that to `directory`."""
    total, done = sum(source.size for source in spec.sources), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None and nbytes:
            progress(min(done, total), total, "preparing tokens")

    partial.mkdir(FOLDER_MODE)
    try:
        write_sealed(partial / _INDEX, _FORMAT, FORMAT, _write_tokens(spec, partial, advance))
        try:
            partial.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process has published it
                raise
            shutil.rmtree(partial)
        sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tokens(spec: CorpusSpec, directory: Path, advance: Advance) -> dict[str, Any]:
    """Write the tokens and return the index."""
    digest, segments, num_documents = hashlib.sha256(), [], 0
    if spec.tokenizer is not None and any(s.format != "tokens" for s in spec.sources):
        largest = max(spec.tokenizer.size - 1, spec.end or 0)
        dtype = np.dtype("<u2" if largest < 1 << 16 and not spec.conversations else "<u4")
        count = largest = 0
        with open_new(directory / _TOKENS) as file:
            for tokens, ends in _tokenize(spec, advance):
                data = tokens.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                count, num_documents = count + len(tokens), num_documents + ends
                largest = max(largest, int((tokens.astype(np.uint32) & TOKEN).max(initial=0)))
            file.flush()
            os.fsync(file.fileno())
        if largest >= spec.size:
            raise ConfigError(
                f"the tokenizer {spec.tokenizer.name} has {largest + 1} tokens, and the model "
                f"has {spec.size}",
                because="they do not belong together, or the model's vocab_size is too small",
                remedy="tokenizer: auto takes the model's own; a new model: "
                f"model.config.vocab_size={largest + 1}",
            )
        segments.append(_TokenRange(_TOKENS, dtype.str, 0, count))
    for source in spec.sources:
        if source.format == "tokens":
            segments.append(_token_file_range(source, spec, digest.update, advance))
    layout = [(segment.dtype, segment.length) for segment in segments]
    digest.update(json.dumps(layout).encode())
    index = {"identity": digest.hexdigest()[:32], "documents": num_documents, "segments": segments}
    return index | ({"marked": True} if spec.conversations else {})


def _tokenize(spec: CorpusSpec, advance: Advance) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield the tokens of all texts in order, and whether a document ends with them."""
    tokenizer = spec.tokenizer
    assert tokenizer is not None
    end = [] if spec.end is None else [spec.end]
    if spec.conversations is not None:
        rows = (read_rows(source, spec.errors, advance) for source in spec.sources)
        for conversation in spec.conversations.encode(chain.from_iterable(rows)):
            yield conversation, True
        return
    pending: list[str | None] = []
    size = 0

    def encoded() -> Iterator[tuple[NDArray[Any], bool]]:
        encodings = iter(tokenizer.encode([text for text in pending if text is not None]))
        for text in pending:
            yield (np.asarray(end, np.uint32), True) if text is None else (next(encodings), False)

    for source in spec.sources:
        if source.format != "tokens":
            for piece in read_texts(source, spec.text_field, spec.errors, advance):
                pending.append(piece)
                size += len(piece or "")
                if size >= _BATCH_CHARACTERS:
                    yield from encoded()
                    pending, size = [], 0
    yield from encoded()


def _token_file_range(
    source: TextSource, spec: CorpusSpec, update: Callable[[Any], None], advance: Advance
) -> Any:
    """Return a token file as a segment; read it in full to check tokens and call `update`."""
    if source.path.lower().endswith(".gz"):
        raise ConfigError(
            f"{source.path} is compressed: tokens are read in place, at any position",
            remedy=f"gunzip {source.path}",
        )
    is_npy = source.path.lower().endswith(".npy")
    if not is_npy and spec.token_dtype is None:
        raise ConfigError(
            f"{source.path} has an unknown type of integers",
            remedy="data.token_dtype: uint16, or uint32; an .npy file has it in its header",
        )
    try:
        if is_npy:
            mapped: Any = np.load(source.path, mmap_mode="r", allow_pickle=False)
            segment = _TokenRange(source.path, mapped.dtype.str, mapped.offset, mapped.size)
        else:
            dtype = np.dtype(spec.token_dtype).newbyteorder("<")
            mapped = np.memmap(source.path, dtype, "r")
            segment = _TokenRange(source.path, dtype.str, 0, mapped.size)
    except (ValueError, EOFError, AttributeError) as error:
        problem = "is no .npy file" if is_npy else f"is no file of {spec.token_dtype}"
        because = f"it has {source.size} bytes: it is cut short, empty, or of another kind"
        raise ConfigError(f"{source.path} {problem}: {error}", because=because) from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise ConfigError(
            f"{source.path} holds {mapped.dtype} of shape {mapped.shape}",
            remedy="save a flat array of integers: numpy.save(path, tokens.astype('uint16'))",
        )
    for start in range(0, segment.length, _CHUNK):
        tokens = segment.read(Path(), start, min(_CHUNK, segment.length - start))
        is_invalid = (tokens >= spec.size) | (tokens < 0)
        if is_invalid.any():
            index = int(is_invalid.argmax())
            raise ConfigError(
                f"{source.path} holds the token {int(tokens[index])} at {start + index}, and the "
                f"model has {spec.size} tokens",
                because="it was made with another tokenizer, or is read with another dtype",
                remedy="tokenize it for this model; data.token_dtype is that of .bin files",
            )
        update(tokens.data)
        advance(tokens.nbytes)
    return segment
