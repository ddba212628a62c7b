"""Every error a user can meet, in one shape: what happened, because of what, what to try next.

The command line prints `str(error)` and exits with `error.exit_code`; the library only raises.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


def listed(items: Sequence[str], limit: int = 8, separator: str = ", ") -> str:
    """Join the first `limit` items, and the number of others."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def mistakes(where: str, problems: Sequence[str]) -> str:
    """All that is wrong in one place, each in a line of its own."""
    heading = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    return f"{heading} in {where}:" + "".join(f"\n  - {problem}" for problem in problems)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return a question with the nearest known name, preceded by a blank; or ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {prefix + near[0]!r}? " if near else ""


def first_lines(error: BaseException, limit: int = 1) -> str:
    """Return the first lines of another library's error joined, or its type if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:limit])


class InfinityError(Exception):
    """Base class of the library's errors.

    Attributes:
        what: The problem, with numbers.
        because: The likely cause, or None.
        remedy: The next thing to type, or None.
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
    """Warning of something that works, but costs more than needed or is less safe."""


class ConfigError(InfinityError):
    """Invalid or contradictory configuration or arguments; exit code 2."""

    exit_code = 2


class DoesNotFitError(InfinityError):
    """A budget or a drive is too small; exit code 3."""

    exit_code = 3


class MachineError(InfinityError):
    """A path, a permission, a limit or a device cannot be used; exit code 4."""

    exit_code = 4


class RemovedError(MachineError):
    """A file was removed while it was in use, and its contents are lost."""


class TransferError(MachineError):
    """A read or a write failed permanently.

    Args:
        what: Description of the failure.
        path: The file.
        offset: First byte of the request.
        length: Bytes of the request.
        errno: Error number of the system.
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
        """Return a copy without a traceback, whose frames would keep graphs alive."""
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
    """A checkpoint is damaged, incomplete, or of another model; exit code 5."""

    exit_code = 5


class ResidencyError(InfinityError):
    """A parameter was used in a way that an offloaded parameter does not support."""


class TrainingError(InfinityError):
    """The training loop made an invalid call, or the numbers are not finite."""


class EngineClosedError(InfinityError):
    """The engine was closed; only `close()` may be called."""


class EngineFailedError(InfinityError):
    """An earlier failure left the state incomplete; `__cause__` is the first error."""


_MOST_TEXT = 400  # of somebody else's error: it may name all there is


@contextmanager
def explained(what: str, remedy: str | None = None) -> Iterator[None]:
    """Errors of a library about a user's config or files as ours, with their first lines.

    It divides by numbers and calls methods of values that it never looked at, so that any kind of
    error may come. A lack of memory, and errors of ours, pass through.
    """
    try:
        yield
    except (InfinityError, MemoryError):
        raise
    except Exception as error:
        because = first_lines(error, 12)[:_MOST_TEXT]
        if isinstance(error, ArithmeticError | LookupError):  # "division by zero", "'rope_type'"
            because = f"{type(error).__name__}: {because}"
        raise ConfigError(what, because=because, remedy=remedy) from error
