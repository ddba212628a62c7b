"""Step log: one JSON object per line; its errors never stop training.

Invariants: `write` blocks only for a lock that is held briefly; records that do not fit in the
queue or cannot be written are counted, and raise no error; a forked child writes nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiofiles

from infinity.errors import MachineError

QUEUE_LENGTH = 10_000


class StepLog:
    """Writer that appends records to the JSON-lines file at `path` from a daemon thread.

    Creates missing directories. Raises `MachineError` if the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str], queue_length: int = QUEUE_LENGTH) -> None:
        self.path = Path(path).expanduser().absolute()  # the process may change its directory
        self.num_dropped = 0
        """Number of records not written: the queue was full, or writing failed."""
        self.failure: OSError | None = None
        """The first write error, if any."""
        self._queue_length = queue_length
        self._queue: deque[str] = deque()
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._closing = False
        self._num_in_flight = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            because = error.strerror
            remedy = "give step log a path that can be written"
            raise MachineError(
                f"the step log {self.path} cannot be opened", because=because, remedy=remedy
            ) from error
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-step-log", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue one record; it is serialized immediately, so the caller may modify it afterwards.

        Values unknown to JSON are written as their `str`, non-finite numbers as "nan", "inf" and
        "-inf". No effect after `close` and in a forked child.
        """
        if self._owner_pid != os.getpid():
            return
        line = to_line(record)
        with self._lock:
            if self._closing:
                return
            if len(self._queue) >= self._queue_length:
                self.num_dropped += 1
                return
            self._queue.append(line)
            # The writer takes all queued records at once, so only the first record wakes it.
            if len(self._queue) == 1:
                self._loop.call_soon_threadsafe(self._wake.set)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queue and stop the thread, waiting at most `timeout_s` seconds.

        Records not written by then are counted in `num_dropped`. If records were dropped, the last
        line has their number. Idempotent; no effect in a forked child.
        """
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._lock:
                self.num_dropped += len(self._queue) + self._num_in_flight
                self._num_in_flight = 0
                self._queue.clear()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._write_until_closed())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except RuntimeError:
            # The interpreter exits without `close`, and accepts no more work for threads.
            with self._lock:
                self._closing = True
        finally:
            self._loop.close()

    async def _write_until_closed(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                lines, closing = list(self._queue), self._closing
                self._queue.clear()
                self._num_in_flight = len(lines)
                if closing and self.num_dropped:
                    lines.append(to_line({"event": "dropped", "count": self.num_dropped}))
            if lines:
                await self._append(lines)
            if closing:
                return

    async def _append(self, lines: list[str]) -> None:
        try:
            async with aiofiles.open(self.path, "a", encoding="utf-8") as file:
                await file.write("".join(lines))
        except OSError as error:
            with self._lock:
                self.failure = self.failure or error
                self.num_dropped += self._num_in_flight
                self._num_in_flight = 0


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON; non-finite numbers and unknown types as strings."""
    try:
        return json.dumps(dict(record), default=str, allow_nan=False) + "\n"
    except (ValueError, TypeError):
        return json.dumps(_plain(dict(record)), default=str) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
