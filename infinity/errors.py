"""Exceptions of the package, each with a problem, a likely cause and a remedy.

The command line prints `str(error)` and exits with `error.exit_code`; the library only raises.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


def listed(items: Sequence[str], limit: int = 8, separator: str = ", ") -> str:
    """Join the first `limit` items, followed by the number of further ones."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def mistakes(where: str, problems: Sequence[str]) -> str:
    """List all mistakes in one file or section, one per line."""
    heading = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    return f"{heading} in {where}:" + "".join(f"\n  - {problem}" for problem in problems)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return "did you mean ...? " with the nearest known name, or ""."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {prefix + matches[0]!r}? " if matches else ""


def first_lines(error: BaseException, limit: int = 1) -> str:
    """Return the first lines of an error's message, joined; its type if the message is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:limit])


class InfinityError(Exception):
    """Base class of the library's errors.

    Attributes:
        what: The problem, with numbers.
        because: The likely cause, or None.
        remedy: An action that resolves it, or None.
        exit_code: Exit code of a command that ends with this error.
    """

    exit_code = 1

    def __init__(self, what: str, *, because: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.because = because
        self.remedy = remedy
        lines = [what]
        if because:
            lines.append(f"because: {because}")
        if remedy:
            lines.append(f"try: {remedy}")
        super().__init__("\n  ".join(lines))


class InfinityWarning(UserWarning):
    """Configuration or use that works, but is slower or less safe than possible."""


class ConfigError(InfinityError):
    """Invalid or contradictory configuration or arguments; exit code 2."""

    exit_code = 2


class DoesNotFitError(InfinityError):
    """Insufficient budget, memory or disk space; exit code 3."""

    exit_code = 3


class MachineError(InfinityError):
    """Unusable path, permission, limit or device; exit code 4."""

    exit_code = 4


class RemovedError(MachineError):
    """Removal of a file in use, whose contents are lost."""


class TransferError(MachineError):
    """Permanent failure of a read or write.

    Args:
        what: Description of the failure.
        path: Path of the file.
        offset: First byte of the request.
        length: Length of the request in bytes.
        errno: Error number of the operating system.
        because: Likely cause.
        remedy: Advice to the user.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str,
        offset: int,
        length: int,
        errno: int,
        because: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what, because=because, remedy=remedy)
        self.path = path
        self.offset = offset
        self.length = length
        self.errno = errno

    def untraced(self) -> TransferError:
        """Return a copy without traceback, whose frames would keep autograd graphs alive."""
        return TransferError(
            self.what,
            path=self.path,
            offset=self.offset,
            length=self.length,
            errno=self.errno,
            because=self.because,
            remedy=self.remedy,
        )


class CheckpointError(InfinityError):
    """Damaged, incomplete or mismatching checkpoint; exit code 5."""

    exit_code = 5


class ResidencyError(InfinityError):
    """Unsupported use of an offloaded parameter."""


class TrainingError(InfinityError):
    """Invalid call by the training loop, or non-finite numbers."""


class EngineClosedError(InfinityError):
    """Use of a closed engine; only `close()` may be called."""


class EngineFailedError(InfinityError):
    """Use of an engine whose state is incomplete; `__cause__` is the first error."""


@contextmanager
def explained(what: str, remedy: str | None = None) -> Iterator[None]:
    """Convert exceptions of a library that processes user input to `ConfigError`.

    The library does not validate its input, so any type of exception may occur. `MemoryError` and
    `InfinityError` are not converted.
    """
    try:
        yield
    except (InfinityError, MemoryError):
        raise
    except Exception as error:
        because = first_lines(error, 12)[:400]
        if isinstance(error, ArithmeticError | LookupError):  # "division by zero", "'rope_type'"
            because = f"{type(error).__name__}: {because}"
        raise ConfigError(what, because=because, remedy=remedy) from error
