"""A byte corpus available on every machine: the source code of Python's standard library.

One byte is one token. Whole files are held out, chosen by their name, so the split never depends
on order or chance. A batch depends only on (seed, position): resuming a run means resuming an int.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import ConfigError

MAX_BYTES = 8 * 2**20
_SKIPPED_FOLDERS = frozenset(["site-packages", "test", "tests", "idle_test", "__pycache__"])
_HELD_OUT_ONE_IN = 16  # files


@dataclass(frozen=True)
class Corpus:
    """Two texts as flat uint8 tensors."""

    name: str
    train: Tensor
    held_out: Tensor

    def require(self, context: int) -> None:
        """Raise `ConfigError` unless both texts hold one sequence of `context` tokens."""
        for split, text in (("training", self.train), ("held-out", self.held_out)):
            if len(text) < context + 1:
                raise ConfigError(
                    f"{self.name}: the {split} text has {len(text)} bytes; one sequence of"
                    f" {context} tokens needs {context + 1}",
                    because="every token needs a next one to predict",
                    remedy=f"use a longer text, or --context {max(len(text) - 1, 1)} or less",
                )

    def describe(self) -> str:
        """Return one line about the two texts."""
        train, held_out = format_size(len(self.train)), format_size(len(self.held_out))
        return f"{self.name}: {train} to train on, {held_out} held out"


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """Endless (tokens, targets) of shape (micro_batch, context); `position` is the next index."""

    def __init__(self, text: Tensor, seed: int, micro_batch: int, context: int) -> None:
        self._text = text
        self._seed = seed
        self._shape = (micro_batch, context)
        self.position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.position)
        self.position += 1
        micro_batch, context = self._shape
        last = len(self._text) - context
        # Stratified sampling, one sequence from each of equal sections: batches differ less.
        places = torch.arange(micro_batch) + torch.rand(micro_batch, generator=generator)
        starts = (places * (last / micro_batch)).long().clamp(max=last - 1)
        return _sequences(self._text, starts.tolist(), context)


def batches(text: Tensor, seed: int, micro_batch: int, context: int) -> Batches:
    """Return the training batches of `text`, the same for the same arguments."""
    return Batches(text, seed, micro_batch, context)


def held_out_batches(
    text: Tensor, num_batches: int, micro_batch: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same sequences every time, spread evenly over `text`."""
    count = num_batches * micro_batch
    last = len(text) - context - 1
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    for first in range(0, count, micro_batch):
        yield _sequences(text, starts[first : first + micro_batch], context)


def _sequences(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def standard_library() -> Corpus:
    """Return the standard library of the running interpreter, at most `MAX_BYTES` of it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    train, held_out, num_bytes = bytearray(), bytearray(), 0
    for path in paths:
        if num_bytes >= MAX_BYTES:
            break
        try:
            source = (root / path).read_bytes()[: MAX_BYTES - num_bytes]
        except OSError:
            continue
        is_held_out = zlib.crc32(path.encode()) % _HELD_OUT_ONE_IN == 0
        (held_out if is_held_out else train).extend(source)
        num_bytes += len(source)
    return _corpus("the standard library's source", train, held_out)


def one_file(path: Path) -> Corpus:
    """Return the bytes of one file; its last sixteenth is held out."""
    try:
        source = path.read_bytes()[:MAX_BYTES]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read", because=error.strerror) from error
    cut = len(source) - len(source) // _HELD_OUT_ONE_IN
    return _corpus(str(path), bytearray(source[:cut]), bytearray(source[cut:]))


def _corpus(name: str, train: bytearray, held_out: bytearray) -> Corpus:
    def tensor(source: bytearray) -> Tensor:
        # frombuffer refuses an empty buffer.
        return torch.frombuffer(source or bytearray(1), dtype=torch.uint8)[: len(source)]

    return Corpus(name, tensor(train), tensor(held_out))
