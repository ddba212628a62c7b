"""Windows of a corpus in the order they are trained in: shuffled anew each epoch, at no memory."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from infinity.errors import CheckpointError
from infinity.runs.corpus import Corpus

_ROUNDS = 8


class Windows:
    """Windows `first` to `end` of a corpus, which do not overlap: int64 tensors of `length`."""

    def __init__(self, corpus: Corpus, length: int, first: int, end: int) -> None:
        self.corpus = corpus
        self.length = length
        self._first, self._end = first, end

    def __len__(self) -> int:
        return self._end - self._first

    def window(self, index: int) -> Tensor:
        """Shape (length,)."""
        assert 0 <= index < len(self)
        start = (self._first + index) * self.length
        return torch.from_numpy(self.corpus.read(start, self.length))


def split(corpus: Corpus, length: int, held_out: float) -> tuple[Windows, Windows]:
    """All whole windows of a corpus: those to train on, and the last `held_out` part of them."""
    count = corpus.num_tokens // length
    kept = int(count * held_out + 0.5)
    if held_out and count > 1:
        kept = min(max(kept, 1), count - 1)
    return Windows(corpus, length, 0, count - kept), Windows(corpus, length, count - kept, count)


def shuffled(index: int, count: int, key: int) -> int:
    """Where `index` goes in a random order of `count` things that `key` decides.

    A Feistel network over the next even power of two, walked until it lands within: an order of
    any number of things, looked up at any place, in no memory.
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right + (key ^ (number << 56))) & mask)
        index = (left << half) | right
        if index < count:
            return index


def _mixed(value: int) -> int:
    """splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


class Reel:
    """Endless micro-batches of windows, epoch after epoch; knows how far it is.

    Register it with the engine: then a run goes on exactly where it stopped.
    """

    def __init__(self, windows: Windows, micro_batch: int, seed: int, shuffle: bool) -> None:
        self._windows = windows
        self._micro_batch = micro_batch
        self._seed = seed
        self._shuffle = shuffle
        self.taken = 0
        """Windows that were handed out, all epochs together."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.taken / len(self._windows)

    def next(self) -> Tensor:
        """Tokens of shape (micro_batch, length), int64."""
        picked = [self.place(self.taken + i) for i in range(self._micro_batch)]
        batch = torch.stack([self._windows.window(index) for index in picked])
        self.taken += self._micro_batch
        return batch

    def place(self, number: int) -> int:
        """Which window comes at `number`, counted over all epochs."""
        epoch, index = divmod(number, len(self._windows))
        if not self._shuffle:
            return index
        return shuffled(index, len(self._windows), order_key(self._seed, epoch))

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self._windows.corpus.identity,
            "windows": len(self._windows),
            "length": self._windows.length,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"taken": self.taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; raises `CheckpointError` if that was in other data."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"the checkpoint was saved in training on other data: {name} was "
                    f"{state.get(name)}, and is {here}",
                    because="its position would mean nothing here",
                    remedy="go on with the files and settings of that run, or start a new one with "
                    "model.path=... its model/ directory",
                )
        self.taken = int(state["taken"])


def order_key(seed: int, epoch: int) -> int:
    """What decides the order of one epoch: 63 bits."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
