"""Texts of a run: discovery of files, reading them, and the tokenizer."""

from __future__ import annotations

import copy
import glob
import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.errors import ConfigError, first_lines, listed
from infinity.integrations.huggingface.hub import find_directory
from infinity.integrations.huggingface.packages import transformers
from infinity.train.directory import RUN_RECORD
from infinity.train.settings import BYTES

T = TypeVar("T")
HUB = "hub:"
_FORMATS = {  # by file extension
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".npy": "tokens", ".bin": "tokens", ".parquet": "parquet",
}  # fmt: skip
_PIECE_CHARACTERS = 1 << 20  # characters of a text that are read at once


@dataclass(frozen=True)
class TextSource:
    """A file with its size and time when it was found, or a dataset of the Hub (0 and 0).

    `format` is "text", "jsonl", "tokens", "parquet" or "hub"; `modified` is in nanoseconds.
    """

    path: str
    format: str
    size: int = 0
    modified: int = 0


def find_sources(key: str, patterns: Sequence[str], form: str) -> list[TextSource]:
    """Return the files that paths, directories and patterns match, in order, without duplicates.

    A directory stands for all files with a known extension in it and below, except those in run
    directories; "hub:NAME" is a dataset of the Hub. `key` is the configuration key, for messages.

    Raises one `ConfigError` that lists every pattern without a match.
    """
    sources: dict[str, TextSource] = {}
    problems = []
    for pattern in patterns:
        if pattern.startswith(HUB):
            sources.setdefault(pattern, TextSource(pattern, "hub"))
            continue
        try:
            files, why_none = _matching_files(pattern, form)
            for file in files:
                # A .json given by name has rows; directories are not searched for .json.
                fallback = "jsonl" if _extension(file) == ".json" else "text"
                kind = _FORMATS.get(_extension(file), fallback) if form == "auto" else form
                facts = file.stat()
                source = TextSource(str(file), kind, facts.st_size, facts.st_mtime_ns)
                sources.setdefault(source.path, source)
            problems += [] if files else [f"{pattern}: {why_none}"]
        except OSError as error:
            problems.append(f"{error.filename or pattern}: {error.strerror}")
    if problems:
        raise ConfigError(
            f"{key}: {listed(problems, 4, '; ')}",
            remedy="give files, directories, or patterns such as 'texts/**/*.jsonl'",
        )
    return list(sources.values())


def _matching_files(pattern: str, form: str) -> tuple[list[Path], str]:
    """Return the files that a pattern matches, and the message if there is none."""
    path = Path(pattern)
    if path.is_dir():
        known = [ending for ending, kind in _FORMATS.items() if form in ("auto", kind)]
        runs = [record.parent for record in path.rglob(RUN_RECORD)]
        paths = [
            p
            for p in sorted(path.rglob("*"))
            if _extension(p) in known and not any(map(p.is_relative_to, runs))
        ]
        why_none = f"no file in this directory ends in {', '.join(known)}"
    elif path.exists():
        paths, why_none = [path], "is neither a file nor a directory"
    else:
        paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        why_none = "no file has such a name" if glob.has_magic(pattern) else "does not exist"
    return [p.absolute() for p in paths if p.is_file()], why_none


def _extension(path: Path) -> str:
    """Return the extension in lower case; for "a.jsonl.gz" that is ".jsonl"."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


# --- reading -------------------------------------------------------------------------------------


def read_texts(
    source: TextSource, field: str, errors: str, advance: Callable[[int], None]
) -> Iterator[str | None]:
    """Yield the texts of a source in pieces, cut at ends of lines; None ends a document.

    A text file is one document; so is the `field` of each line of JSONL or row of a dataset. Empty
    documents are omitted. `errors` is "strict" or "replace"; `advance` is called with the bytes of
    the file that have been read since its last call.

    Raises `ConfigError` with file and line for text that is not UTF-8 or JSON, or without `field`.
    """
    if source.format == "text":
        yield from _with_progress(
            source,
            advance,
            lambda data: _pieces([io.TextIOWrapper(data, "utf-8-sig", errors, newline="")]),
        )
    else:
        rows = read_rows(source, errors, advance)
        yield from _pieces(io.StringIO(_field(*row, field, errors), newline="") for row in rows)


def read_rows(
    source: TextSource, errors: str, advance: Callable[[int], None]
) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of lines of JSONL, or rows of Parquet or of a Hub dataset.

    Arguments and errors are those of `read_texts`.
    """
    if source.format in ("parquet", "hub"):
        yield from _dataset_rows(source)
        advance(source.size)
    else:
        yield from _with_progress(
            source, advance, lambda data: _json_rows(source.path, data, errors)
        )


def _with_progress(
    source: TextSource, advance: Callable[[int], None], read: Callable[[Any], Iterator[T]]
) -> Iterator[T]:
    """Yield from `read` of the file, decompressed if it is .gz, and call `advance`."""
    with open(source.path, "rb") as file:
        is_gzip = source.path.lower().endswith(".gz")
        data: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
        reported = 0
        try:
            for value in read(data):
                yield value
                advance(file.tell() - reported)
                reported = file.tell()
        except UnicodeDecodeError as error:
            position = data.tell() - len(error.object) + error.start
            raise _not_text(f"{source.path} is not UTF-8 near byte {position}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{source.path} is no complete gzip file: {error}") from error
        advance(source.size - reported)


def _pieces(documents: Iterable[IO[str]]) -> Iterator[str | None]:
    for document in documents:
        empty = True
        while piece := document.read(_PIECE_CHARACTERS) + document.readline(_PIECE_CHARACTERS):
            empty = False
            yield piece
        if not empty:
            yield None


def _json_rows(path: str, lines: Iterable[bytes], errors: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            yield where, json.loads(line.decode("utf-8-sig", errors))
        except UnicodeDecodeError:
            raise _not_text(f"{where} is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} is not JSON: {error}",
                remedy="one JSON object a line; data.format: text takes the file as plain text",
            ) from None


def _dataset_rows(source: TextSource) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) of a Parquet file or of a dataset of the Hub."""
    try:
        load = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{source.path} needs the package datasets: {error}",
            remedy="pip install 'torch-infinity[data]'; text, JSONL and tokens need no package",
        ) from error
    name, config, split = [*source.path.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        if source.format == "hub":
            rows = load(name, config or None, split=split or "train", streaming=True)
        else:
            rows = load("parquet", data_files=source.path, split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{source.path}, row {number}", row
    except Exception as error:  # readers of datasets raise any exception
        raise ConfigError(
            f"{source.path} cannot be read by the package datasets",
            because=first_lines(error),
            remedy="hub:NAME:CONFIG:SPLIT names a dataset of the Hub; the last two may be left out",
        ) from error


def _field(where: str, row: Any, field: str, errors: str) -> str:
    if not isinstance(row, dict) or field not in row:
        keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
        if isinstance(row, list):
            raise ConfigError(
                f"{where} is a list",
                because="each line is to be one object",
                remedy="jq -c '.[]' FILE > FILE.jsonl",
            )
        raise ConfigError(
            f"{where} has no field {field!r}: it has {keys or 'no fields'}",
            remedy="data.text_field names the field with the text; conversations have 'messages', "
            "'prompt' and 'completion', 'instruction' and 'output', or 'conversations'",
        )
    text = row[field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: the field {field!r} is {text!r:.60}, no text")
    return as_utf8(where, text, errors)


def as_utf8(where: str, text: str, errors: str) -> str:
    """Return the text encodable as UTF-8: refuse or replace unpaired surrogates."""
    try:
        return text.encode("utf-8", errors).decode()
    except UnicodeEncodeError:
        raise _not_text(f"{where} is not UTF-8") from None


def _not_text(what: str) -> ConfigError:
    return ConfigError(
        what,
        because="it is another encoding, or no text",
        remedy="convert it, or data.undecodable: replace",
    )


# --- tokenizers ----------------------------------------------------------------------------------


class Tokenizer:
    """Wrapper of a transformers tokenizer, for corpora and exports.

    `size` is the largest token plus one, `end` the token that ends a document, or None. `identity`
    is equal for tokenizers that give equal tokens. `wrapped` is the transformers tokenizer; `fast`
    its backend of the package tokenizers, without truncation and padding, or None.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        end = tokenizer.eos_token_id
        self.end: int | None = end if isinstance(end, int) else None
        self.wrapped = tokenizer
        # A copy: `wrapped` is exported unchanged.
        self.fast = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self.fast is not None:
            self.fast.no_truncation()
            self.fast.no_padding()
            text = self.fast.to_str()
        else:
            text = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
        self.identity = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, without special tokens and truncation."""
        if self.fast is not None:
            encodings = self.fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
        lists = [self.wrapped.encode(text, add_special_tokens=False) for text in texts]
        return [np.asarray(ids, dtype=np.uint32) for ids in lists]

    def encode_prompt(self, text: str, *, is_chat: bool) -> Tensor:
        """Return the tokens of a prompt, int64, shape (1, number of tokens).

        Args:
            text: The prompt.
            is_chat: Render it with the chat template, as a user message.
        """
        if is_chat:
            messages = [{"role": "user", "content": text}]
            text = self.wrapped.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        return torch.from_numpy(self.encode([text])[0].astype("int64"))[None]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> Any:
        """Write the files that `transformers.AutoTokenizer` reads."""
        return self.wrapped.save_pretrained(os.fspath(directory))


class ByteTokenizer(Tokenizer):
    """Byte-level BPE without merges: a token is a byte of UTF-8; 256 ends a document."""

    def __init__(self) -> None:
        tokenizer_class = transformers().PreTrainedTokenizerFast
        tokenizers = importlib.import_module("tokenizers")  # comes with transformers
        converter = importlib.import_module("transformers.convert_slow_tokenizer")
        vocabulary = {char: byte for byte, char in converter.bytes_to_unicode().items()}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer, backend.decoder = byte_level, tokenizers.decoders.ByteLevel()
        end = "<|endoftext|>"
        backend.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        super().__init__(
            BYTES,
            tokenizer_class(tokenizer_object=backend, eos_token=end, bos_token=end, pad_token=end),
        )

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


# Files that transformers loads a tokenizer from; config.json may determine its class.
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "config.json",
)  # fmt: skip


def find_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer of a directory or Hub id, or the byte tokenizer for "bytes".

    Raises `ConfigError` if there is none, `MachineError` if it cannot be fetched from the Hub.
    """
    if source == BYTES:
        return ByteTokenizer()
    path = Path(source).expanduser()
    because = "there is no such directory"
    if path.is_dir() or not (path.is_absolute() or source.startswith((".", "~"))):
        try:
            directory = path if path.is_dir() else find_directory(source, wanted=TOKENIZER_FILES)
            tokenizer = transformers().AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False
            )
            if len(tokenizer):
                return Tokenizer(source, tokenizer)
            because = "it has no tokens"
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            because = first_lines(error)
    raise ConfigError(
        f"{source} has no tokenizer that transformers can load",
        because=because,
        remedy=f"tokenizer: DIR names another directory with a tokenizer.json; tokenizer: {BYTES} "
        "needs no files",
    )
