"""The optimizer pass: read, update, publish, write, pipelined by chunk, behind the next forward.

[Note: deferred and exact]
A sweep starts when the norm and the clip factor are known, and updates units in the order in
which the forward will need them. `step()` does not wait for it; a fetch of a unit waits for that
unit's update. Nothing is stale and nothing is speculative.

[Note: pacing]
The sweep publishes a unit's new weights into a free slot, and waits for one when there is none:
it stays at most the slot count ahead of the forward, so that weights are not written, dropped
and read again. A demand for anything else lifts the pacing (see the mover).
"""

from __future__ import annotations

import threading
from contextlib import suppress

from infinity.errors import EngineClosedError
from infinity.memory.durability import Durability
from infinity.memory.gradients import GradientStore
from infinity.memory.lanes import Lanes
from infinity.memory.mover import Mover
from infinity.memory.state import StateStore
from infinity.optim.tiles import Updater
from infinity.plan.plan import Plan
from infinity.training.jobs import SweepJob
from infinity.training.updates import AbortedError, Updates


class Sweep:
    """One worker thread that runs one job at a time."""

    def __init__(
        self,
        plan: Plan,
        lanes: Lanes,
        store: StateStore,
        gradients: GradientStore,
        mover: Mover,
        updater: Updater,
        durability: Durability | None = None,
    ) -> None:
        self.durability = durability
        self.lanes = lanes
        self.mover = mover
        self.updates = Updates(plan, lanes, store, gradients, mover, updater)
        self._job: SweepJob | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="infinity-sweep", daemon=True)

    # --- the training thread ---------------------------------------------------------------

    def open(self) -> None:
        """Start the thread; before training, where an exception ends in `close`."""
        self._thread.start()

    def submit(self, job: SweepJob) -> None:
        """Run a job behind the caller; the previous one must be finished."""
        with self.mover.changed:
            assert self._job is None
            self._job = job
            self.mover.changed.notify_all()

    def finish(self) -> None:
        """Lift the pacing and wait until no update is owed; raises what makes that impossible."""
        with self.lanes.stall("update"), self.mover.changed:
            self.mover.paced = False
            self.mover.changed.notify_all()
            while not self._closing and self._job is not None and self.mover.failure is None:
                self.mover.changed.wait()
        if self._closing:
            raise EngineClosedError(
                "the engine is closed", remedy="read values before close(), or make a new engine"
            )
        self.mover.check()

    def close(self) -> None:
        """Abandon what is left and end the thread."""
        with self.mover.changed:
            self._closing = True
            self.mover.paced = False
            self.mover.changed.notify_all()
        with suppress(RuntimeError):  # a second Ctrl-C may have come between the lock and its block
            while True:
                self.mover.changed.release()
        # The garbage collector may close a dropped engine on any thread, this one's too.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def can_finish(self) -> bool:
        """Whether there is a thread to wait for: not in a forked child, nor on that thread."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def forget(self) -> None:
        """Drop the reserved ranges."""
        self.updates.forget()

    # --- the sweep thread --------------------------------------------------------------------

    def _loop(self) -> None:
        self.lanes.device.follow_compute()
        while True:
            with self.mover.changed:
                while self._job is None and not self._closing:
                    self.mover.changed.wait()
                if self._closing:
                    return
                job = self._job
            assert job is not None
            try:
                self._run(job)
            except AbortedError:
                return
            except BaseException as error:
                self.mover.fail(error)
                return
            del job
            with self.mover.changed:
                self._job = None
                self.mover.changed.notify_all()

    def _run(self, job: SweepJob) -> None:
        self.updates.run(job, lambda: self._closing)
        if self.durability is not None:
            self.durability.finish_step(job.document, lambda: self._closing)
