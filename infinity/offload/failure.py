"""First failure of an engine, which is permanent unless its cause is replaced."""

from __future__ import annotations

import threading

from infinity.distributed.context import DistContext
from infinity.errors import EngineFailedError, TransferError
from infinity.offload.transfers import Transfers


class FailureLatch:
    """Latch of the first failure; a failure wakes all threads that wait on `changed`."""

    def __init__(
        self, transfers: Transfers, ranks: DistContext, changed: threading.Condition
    ) -> None:
        self._transfers = transfers
        self._ranks = ranks
        self._changed = changed
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Store a failure from any thread, and wake waiting threads."""
        if isinstance(error, TransferError):
            error = error.untraced()
        self._ranks.mark_failed()
        with self._changed:
            self.note(error)
            self._changed.notify_all()

    def note(self, error: BaseException) -> None:
        """Store a failure of the training thread; takes no lock, as signal handlers call it."""
        self.error = self.error or error

    def clear_failure(self, kind: type[BaseException]) -> None:
        """Clear a failure of this type: the incomplete state is about to be replaced."""
        if isinstance(self.error, kind):
            self.error = None

    def check(self, *, besides: type[BaseException] | None = None) -> None:
        """Raise `EngineFailedError` after a failure, or if a drive does not complete requests.

        A failure of the type `besides` is ignored.
        """
        if self._transfers.stuck is not None:
            self.fail(self._transfers.stuck)
        if self.error is not None and not (besides and isinstance(self.error, besides)):
            raise EngineFailedError(
                f"an earlier failure left the state incomplete: {self.error}",
                remedy="close the engine, and resume from the last commit (`resume: auto`) or "
                "checkpoint",
            ) from self.error
