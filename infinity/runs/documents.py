"""Texts out of files, in pieces that fit memory whatever the size of a document."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from infinity.errors import ConfigError
from infinity.runs.sources import Source

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20  # of JSONL: a line is parsed as a whole
_READ_BYTES = 1 << 20

Advance = Callable[[int], None]


class Piece(NamedTuple):
    """Text, and whether a document ends with it."""

    text: str
    ends: bool


def read_pieces(source: Source, field: str, undecodable: str, advance: Advance) -> Iterator[Piece]:
    """The documents of one file in pieces of about a MiB, cut at ends of lines where there are any.

    A text file is one document; a line of JSONL is one, in its `field`. Empty documents are left
    out. `advance` is told how many bytes of the file have been read since.

    Raises `ConfigError` naming file and place for what is not UTF-8 (unless `undecodable` is
    "replace"), not JSON, or lacks the field.
    """
    errors = "replace" if undecodable == "replace" else "strict"
    with open(source.path, "rb") as file:
        stream: IO[bytes] = file
        if source.path.lower().endswith(".gz"):
            stream = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]
        told = 0

        def tell() -> None:
            nonlocal told
            here = file.tell()
            advance(here - told)
            told = here

        read = _read_lines if source.format == "jsonl" else _read_text
        try:
            for piece in read(source.path, stream, field, errors):
                tell()
                yield piece
        except (EOFError, gzip.BadGzipFile) as error:
            raise ConfigError(f"{source.path} is no whole gzip file: {error}") from error
        tell()


def _read_text(path: str, stream: IO[bytes], field: str, errors: str) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    held, position, seen = "", 0, False
    while True:
        data = stream.read(_READ_BYTES)
        try:
            held += decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _not_text(path, f"near byte {position + error.start}") from None
        position += len(data)
        if not data:
            break
        while len(held) >= PIECE_BYTES:
            cut = _cut(held)
            yield Piece(held[:cut], False)
            held, seen = held[cut:], True
    if held or seen:
        yield Piece(held, True)


def _cut(text: str) -> int:
    """Where to cut: behind the last line that ends in the piece, else before a word, else there."""
    end = text.rfind("\n", 0, PIECE_BYTES) + 1
    return end or max(text.rfind(" ", 0, PIECE_BYTES), 0) or PIECE_BYTES


def _read_lines(path: str, stream: IO[bytes], field: str, errors: str) -> Iterator[Piece]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) >= MAX_LINE_BYTES:
            raise ConfigError(f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes")
        if not line.strip():
            continue
        text = _field(path, number, line, field, errors)
        while len(text) > PIECE_BYTES:
            cut = _cut(text)
            yield Piece(text[:cut], False)
            text = text[cut:]
        if text:
            yield Piece(text, True)


def _field(path: str, number: int, line: bytes, field: str, errors: str) -> str:
    try:
        record: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8", errors))
    except UnicodeDecodeError:
        raise _not_text(path, f"in line {number}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number} is not JSON: {error}",
            remedy="one JSON object a line; data.format: text takes the file as plain text",
        ) from None
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(map(repr, record)) if isinstance(record, dict) else "no object"
        raise ConfigError(
            f"{path}, line {number} has no field {field!r}: it has {keys or 'no fields'}",
            remedy="data.text_field names the field with the text",
        )
    text = record[field]
    if not isinstance(text, str):
        raise ConfigError(f"{path}, line {number}: the field {field!r} is {text!r:.60}, no text")
    try:  # half of a surrogate pair is no character, and nothing can encode it
        return text.encode("utf-8", errors).decode()
    except UnicodeEncodeError:
        raise _not_text(path, f"in line {number}") from None


def _not_text(path: str, place: str) -> ConfigError:
    return ConfigError(
        f"{path} is not UTF-8 {place}",
        because="it is another encoding, or no text",
        remedy="convert it, or data.undecodable: replace",
    )
