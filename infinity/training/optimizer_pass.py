"""Optimizer pass: read, update, publish and write, pipelined by chunk, during the next forward.

[Note: deferred and exact]
An optimizer pass starts when the norm and the clip factor are known, and updates units in the
order in which the forward will need them. `step()` does not wait for it; a fetch of a unit waits
for that unit's update. No weight is stale, and no update is speculative.

[Note: pacing]
The optimizer pass publishes a unit's new weights into a free slot, and waits for one if there is
none: it is at most the number of slots ahead of the forward, so that weights are not written,
evicted and read again. A demand for another unit lifts the pacing (see `offload/handover.py`).
"""

from __future__ import annotations

import threading
from contextlib import suppress

from infinity.checkpoint.commits import with_optimizer_state
from infinity.checkpoint.durability import Durability
from infinity.errors import EngineClosedError, MachineError
from infinity.offload.failure import FailureLatch
from infinity.offload.gradients import GradientStore
from infinity.offload.handover import UpdateHandover, UpdateJob
from infinity.offload.state import StateStore
from infinity.offload.transfers import Transfers
from infinity.optim.update import Updater
from infinity.plan.plan import Plan
from infinity.training.unit_updater import AbortedError, BeforeChange, UnitUpdater


class OptimizerPass:
    """Worker thread that runs one update job at a time."""

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        store: StateStore,
        gradients: GradientStore,
        handover: UpdateHandover,
        failure: FailureLatch,
        updater: Updater,
        durability: Durability | None,
        before_change: BeforeChange,
    ) -> None:
        self.durability = durability
        self.transfers = transfers
        self._handover = handover
        self._changed = handover.changed
        self._failure = failure
        self.updates = UnitUpdater(
            plan, transfers, store, gradients, handover, updater, before_change
        )
        self._names = {s.parameter: s.name for unit in plan.units for s in unit.segments}
        self._job: UpdateJob | None = None
        self._closing = False
        # The thread waits on this between jobs: `changed` would wake it at every transition, which
        # delays the training thread.
        self._submitted = threading.Condition(handover.lock)
        self._thread = threading.Thread(
            target=self._loop, name="infinity-optimizer-pass", daemon=True
        )

    # --- the training thread ---------------------------------------------------------------

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: UpdateJob) -> None:
        """Run a job in the background; the previous one must be finished."""
        with self._submitted:
            assert self._job is None
            self._job = job
            self._submitted.notify_all()

    def finish(self, *, closing: bool = False) -> None:
        """Lift the pacing and block until no update is pending; raise the error that prevents it.

        In a durable run the last step is then committed on all ranks, which all call this, unless
        `closing`.
        """
        with self.transfers.stall("update"), self._changed:
            self._handover.lift_pacing()
            while not self._closing and self._job is not None and self._failure.error is None:
                self._changed.wait()
        if self._closing:
            raise EngineClosedError(
                "the engine is closed", remedy="read values before close(), or make a new engine"
            )
        self._failure.check()
        if self.durability is not None and not closing:
            try:
                self.durability.agree()
            except MachineError as error:  # unknown which of two commits is the last
                self._failure.fail(error)
                raise

    def close(self) -> None:
        """Abandon unfinished updates and join the thread."""
        with self._changed:
            self._closing = True
            self._submitted.notify_all()
            self._handover.lift_pacing()
        with suppress(RuntimeError):  # a second Ctrl-C in `with` may have left the lock held
            while True:
                self._changed.release()
        # The garbage collector may close a dropped engine on any thread, also on this one.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def can_finish(self) -> bool:
        """Whether this thread can wait for the pass: not the worker thread, nor a forked child."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def free(self) -> None:
        """Free the staging buffers."""
        self.updates.free()

    # --- the optimizer thread --------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self.transfers.device.attach_worker_thread()
            while (job := self._next_job()) is not None:
                self._run(job)
                del job
                with self._changed:
                    self._job = None
                    self._changed.notify_all()
        except AbortedError:
            return
        except BaseException as error:
            self._failure.fail(error)

    def _next_job(self) -> UpdateJob | None:
        """Block until there is a job, and return it; None when the engine closes."""
        with self._submitted:
            while self._job is None and not self._closing:
                self._submitted.wait()
            return None if self._closing else self._job

    def _run(self, job: UpdateJob) -> None:
        self.updates.run(job, lambda: self._closing)
        if self.durability is not None:
            document = job.document
            if document is not None:  # the update has changed non-moment state
                states = self.updates.updater.extra_state()
                document = with_optimizer_state(
                    document, {self._names[i]: v for i, v in states.items()}
                )
            self.durability.finish_step(document, lambda: self._closing)
