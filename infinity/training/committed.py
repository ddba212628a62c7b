"""What a committed step holds beside the homes: counters, groups, generators, buffers.

The document is opaque to `memory/`, which keeps it with the commit. Within an accumulation window,
where only a load can commit, it also says which checkpoint the window's gradients are read from:
they have no place in a commit, and that checkpoint holds them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from infinity.checkpoint.plain import decode, encode
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, InfinityError
from infinity.training.buffers import find_buffers


@dataclass(frozen=True)
class OpenWindow:
    """The checkpoint that was loaded within an accumulation window, and the CRC of its manifest."""

    root: str
    tag: str
    manifest_crc32c: int

    def open(self) -> CheckpointReader:
        """That very checkpoint; raises `CheckpointError` if it is gone, or another."""
        where = Path(self.root) / self.tag
        try:
            reader = CheckpointReader(Path(self.root), self.tag)
        except InfinityError as error:
            raise self._refusal(where, error.what) from error
        if reader.manifest_crc32c != self.manifest_crc32c:
            reader.close()
            raise self._refusal(where, "another checkpoint has that name now")
        return reader

    def _refusal(self, where: Path, why: str) -> CheckpointError:
        return CheckpointError(
            f"the committed state is that of {where}, which was loaded within an accumulation "
            f"window; the gradients of that window cannot be read from there: {why}",
            because="no step was committed since",
            remedy="bring that checkpoint back; or start with resume: never, and load another",
        )


@dataclass(frozen=True)
class Document:
    """`run` is what `RunState.capture` took; `persistent` names those buffers of the state dict."""

    run: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    persistent: frozenset[str] = frozenset()
    window: OpenWindow | None = None


def write_document(module: nn.Module, run: dict[str, Any], window: OpenWindow | None) -> bytes:
    """The state of a run as a commit keeps it."""
    buffers = find_buffers(module)
    data = {
        "run": run,
        "buffers": {b.names[0]: b.value.detach().cpu() for b in buffers},
        "persistent": [b.names[0] for b in buffers if b.persistent],
        "window": None if window is None else asdict(window),
    }
    return json.dumps(encode(data, "the run's state"), allow_nan=False).encode()


def read_document(document: bytes) -> Document:
    """The inverse; empty where no step was committed. Raises `CheckpointError`."""
    if not document:
        return Document()
    data = decode(json.loads(document))
    buffers, window = data["buffers"], data.get("window")
    return Document(
        run=data["run"],
        buffers=buffers,
        persistent=frozenset(data.get("persistent", buffers)),
        window=None if window is None else OpenWindow(**window),
    )
