"""Windows of a corpus, cut from texts or packed with full conversations, and their order.

[Note: packed windows]
Conversations packed into one window do not attend to each other: the positions of each start at 0,
from which transformers builds a block-diagonal attention mask, and the first token of each has no
loss. So the losses equal those of separate windows. Packing is best fit decreasing: the longest
conversation first, each into the window in which it leaves the fewest free tokens. A conversation
longer than a window is cut at its end; one without a token to train on is left out.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import CheckpointError
from infinity.train.conversations import FIRST, TOKEN, TRAINED
from infinity.train.data import Corpus

_CHUNK = 1 << 20  # tokens of a corpus that are read at once
IGNORED = -100  # label of a token without a loss
Ints = NDArray[np.int64]


class Windows:
    """Non-overlapping windows `first` to `end` of a corpus: int64 tensors of `length`."""

    def __init__(self, corpus: Corpus, length: int, first: int, end: int) -> None:
        self.corpus = corpus
        self.length = length
        self._first, self._end = first, end

    def __len__(self) -> int:
        return self._end - self._first

    def window(self, index: int) -> Tensor:
        """Return tokens, all trained on, int64, shape (length,)."""
        assert 0 <= index < len(self)
        start = (self._first + index) * self.length
        return torch.from_numpy(self.corpus.read(start, self.length))

    def weight(self, index: int) -> int:
        """Return the number of tokens of a window that have a loss."""
        return self.length - 1


class Documents(NamedTuple):
    """Conversations of a corpus: first token, number of tokens, number of tokens with a loss.

    `cut` counts those longer than a window, `untrained` those left out because no token has a loss.
    """

    starts: Ints
    lengths: Ints
    trained: Ints
    cut: int
    untrained: int


class Packed(Windows):
    """Windows of full conversations, several per window if `packing`; see [Note: packed windows].

    A window is int64 of shape (3, length): tokens, labels, positions; without `packing` (2,
    length): tokens, labels. Padding is token 0 without a loss.
    """

    def __init__(self, corpus: Corpus, length: int, documents: Documents, packing: bool) -> None:
        super().__init__(corpus, length, 0, 0)
        self.documents = documents
        lengths = documents.lengths
        self._packing = packing
        self._packs = pack(lengths, length) if packing else [[i] for i in range(len(lengths))]
        self._end = len(self._packs)
        self._weights = [int(documents.trained[pack].sum()) for pack in self._packs]

    @property
    def filled(self) -> float:
        """Fraction of all windows that is not padding."""
        return float(self.documents.lengths.sum() / max(len(self) * self.length, 1))

    def weight(self, index: int) -> int:
        """Return the number of tokens of a window that have a loss."""
        return self._weights[index]

    def window(self, index: int) -> Tensor:
        """Return the window, int64, shape (3 or 2, length)."""
        tokens = np.zeros(self.length, np.int64)
        labels, positions = np.full_like(tokens, IGNORED), np.arange(self.length)
        offset = 0
        for document in self._packs[index]:
            count = int(self.documents.lengths[document])
            marked = self.corpus.read(int(self.documents.starts[document]), count)
            tokens[offset : offset + count] = marked & TOKEN
            labels[offset : offset + count] = np.where(marked & TRAINED, marked & TOKEN, IGNORED)
            positions[offset : offset + count] = np.arange(count)
            offset += count
        positions[offset:] = np.arange(self.length - offset)
        rows = [tokens, labels, positions] if self._packing else [tokens, labels]
        return torch.from_numpy(np.stack(rows))


def pack(lengths: Ints, size: int) -> list[list[int]]:
    """Return the documents of each window of `size` tokens, ordered by the first of each.

    Best fit decreasing: at most 11/9 of the minimal number of windows, plus one (Johnson, 1974).
    """
    windows: list[list[int]] = []
    windows_by_free: dict[int, list[int]] = {}
    free_counts: list[int] = []  # keys of `windows_by_free`, sorted
    for document in np.argsort(-lengths, kind="stable"):
        count = int(lengths[document])
        index = bisect_left(free_counts, count)
        if index == len(free_counts):
            window, free = len(windows), size
            windows.append([])
        else:
            free = free_counts[index]
            window = windows_by_free[free].pop()
            if not windows_by_free[free]:
                del windows_by_free[free], free_counts[index]
        windows[window].append(int(document))
        free -= count
        if free:
            if free not in windows_by_free:
                insort(free_counts, free)
            windows_by_free.setdefault(free, []).append(window)
    return sorted(sorted(window) for window in windows)


def find_documents(corpus: Corpus, length: int) -> Documents:
    """Return the conversations of a corpus of marked tokens, each cut to `length` tokens."""
    chunks = range(0, corpus.num_tokens, _CHUNK)

    def read(start: int) -> Ints:
        return corpus.read(start, min(_CHUNK, corpus.num_tokens - start))

    starts = np.concatenate(
        [np.empty(0, np.int64), *(start + np.flatnonzero(read(start) & FIRST) for start in chunks)]
    )
    full_lengths = np.diff(np.append(starts, corpus.num_tokens))
    lengths = np.minimum(full_lengths, length)
    # Number of tokens with a loss before each start and each end, in the order of offsets.
    offsets = np.stack([starts, starts + lengths], axis=1).ravel()
    trained_before, done, num_trained = np.zeros_like(offsets), 0, 0
    for start in chunks:
        sums = np.concatenate([[0], np.cumsum((read(start) & TRAINED) != 0)])
        last = int(np.searchsorted(offsets, start + len(sums) - 1, side="right"))
        trained_before[done:last] = num_trained + sums[offsets[done:last] - start]
        done, num_trained = last, num_trained + int(sums[-1])
    trained = trained_before[1::2] - trained_before[::2]
    has_loss = trained > 0
    return Documents(
        starts[has_loss], lengths[has_loss], trained[has_loss],
        cut=int((full_lengths > length).sum()), untrained=int((~has_loss).sum()),
    )  # fmt: skip


def split(
    corpus: Corpus, length: int, held_out: float, packing: bool = True
) -> tuple[Windows, Windows]:
    """Return the windows to train on, and those of the last fraction `held_out` of the corpus.

    Conversations are split first; both sides are packed separately.
    """
    documents = find_documents(corpus, length) if corpus.marked else None
    count = corpus.num_tokens // length if documents is None else len(documents.starts)
    num_held_out = int(count * held_out + 0.5)
    if held_out and count > 1:
        num_held_out = min(max(num_held_out, 1), count - 1)
    if documents is None:
        windows = Windows(corpus, length, 0, count - num_held_out)
        return windows, Windows(corpus, length, count - num_held_out, count)

    def packed(part: slice, documents: Documents = documents) -> Packed:
        arrays = documents.starts[part], documents.lengths[part], documents.trained[part]
        selected = Documents(*arrays, documents.cut, documents.untrained)
        return Packed(corpus, length, selected, packing)

    return packed(slice(0, count - num_held_out)), packed(slice(count - num_held_out, count))


class BatchIterator:
    """Endless iterator over micro-batches of windows, with a position that can be resumed.

    Successive micro-batches go to successive ranks; the position counts those of all ranks.

    Registered with the engine, its position is saved and loaded with checkpoints. Each epoch has a
    separate order, from numpy's `RandomState`, whose stream is the same in all numpy releases.
    """

    def __init__(
        self,
        windows: Windows,
        micro_batch: int,
        seed: int,
        shuffle: bool,
        ranks: DistContext = SINGLE_PROCESS,
    ) -> None:
        self._windows = windows
        self._micro_batch = micro_batch
        self._seed = seed
        self._shuffle = shuffle
        self._ranks = ranks
        self._order: tuple[int, NDArray[np.int64]] | None = None  # (epoch, permutation)
        self.taken = 0
        """Number of windows returned, on all ranks, over all epochs."""

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far."""
        return self.taken / len(self._windows)

    def next(self) -> Tensor:
        """Return the next `micro_batch` windows of this rank, stacked."""
        first = self.taken + self._ranks.rank * self._micro_batch
        indices = [self.window_at(first + i) for i in range(self._micro_batch)]
        batch = torch.stack([self._windows.window(index) for index in indices])
        self.taken += self._micro_batch * self._ranks.count
        return batch

    def weight(self, count: int, ahead: int = 0) -> int:
        """Return the number of tokens with a loss in `count` windows, `ahead` windows from now."""
        first = self.taken + ahead
        return sum(self._windows.weight(self.window_at(first + i)) for i in range(count))

    def window_at(self, number: int) -> int:
        """Return the index of the window at position `number`, counted over all epochs."""
        epoch, index = divmod(number, len(self._windows))
        if not self._shuffle:
            return index
        if self._order is None or self._order[0] != epoch:
            key = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            random = np.random.RandomState(np.frombuffer(key, "<u4"))
            self._order = epoch, random.permutation(len(self._windows))
        return int(self._order[1][index])

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self._windows.corpus.identity,
            "windows": len(self._windows),
            "length": self._windows.length,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the facts that identify its data and order."""
        return {"taken": self.taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position.

        Raises `CheckpointError` if it belongs to other data, `ValueError` if it is invalid.
        """
        for name, current in self._identity().items():
            if state.get(name) != current:
                raise CheckpointError(
                    f"the checkpoint was saved in training on other data: {name} was "
                    f"{state.get(name)}, and is {current}",
                    because="its position is meaningless for this data",
                    remedy="go on with the files and settings of that run, or start a new one with "
                    "model.path=... its model/ directory",
                )
        if type(state["taken"]) is not int or state["taken"] < 0:
            raise ValueError(f"taken is {state['taken']!r}")
        self.taken = state["taken"]
