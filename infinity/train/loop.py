"""Training loop: steps, evaluations, checkpoints, and stopping between steps.

[Note: failures that a run survives]
A checkpoint that cannot be saved does not end a run: earlier checkpoints stay, training continues,
and saving is retried, once soon and then whenever a checkpoint is due. Nor does a line of metrics
that cannot be written. A failure of the drive that holds the state ends the run, also if a save is
the first operation to detect it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.directory import discard, find_tag
from infinity.engine import Engine
from infinity.errors import (
    CheckpointError,
    DoesNotFitError,
    InfinityError,
    MachineError,
    RemovedError,
    TrainingError,
    TransferError,
)
from infinity.plan.machine import high_water_bytes
from infinity.train.best import Best
from infinity.train.metrics import LastStep, Metrics, TrainCallback
from infinity.train.preparation import Prepared
from infinity.train.windows import BatchIterator

_RECENT = 50  # steps from which the remaining time is estimated
_SOON = 10  # a failed save is retried after checkpoint_every / _SOON steps
Compute = Callable[[Any, Tensor], Tensor]  # (engine, batch of tokens) -> mean loss
_REFUSALS = (CheckpointError, DoesNotFitError, MachineError)  # errors of a save


@dataclass
class Loop:
    """Training loop of one engine, from the position of `reel` on.

    `remember_saved` is called when a checkpoint is complete. `keep_best` writes the current weights
    as the best; None to not save them. `loss` is that of the last step, `saved` the last complete
    checkpoint, `unsaved` the error of the last save if it failed.
    """

    prepared: Prepared
    engine: Engine
    reel: BatchIterator
    loss_of: Compute
    metrics: Metrics
    last_step: LastStep
    checkpoints: Path
    watcher: TrainCallback
    best: Best
    remember_saved: Callable[[], None]
    keep_best: Callable[[Engine], Path] | None = None
    loss: float | None = None
    evaluation_before: float | None = None
    evaluation: float | None = None
    saved: Path | None = None
    stopped_by: int = 0
    failed_saves: int = 0
    unsaved: InfinityError | None = None
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _saved_step: int = -1
    _saving: Path | None = None  # checkpoint that is being written
    _retry_step: int = -1
    _warned_metrics: bool = False

    @property
    def step(self) -> int:
        """Number of steps done, including skipped ones."""
        return self.reel.taken // self.prepared.windows_per_step

    def run(self) -> None:
        """Train until the last step, an early stop, or a stop requested by the watcher."""
        prepared, watcher = self.prepared, self.watcher
        self._saved_step = self.step  # resumed from there, or nothing to save yet
        watcher.begin(self.step, prepared.steps)
        self._report_early_end()  # a resumed run may have stopped early
        self._evaluate_if_due()
        self.evaluation_before = self.evaluation
        while not self.ended and not self._asked_to_stop():
            self._one_step()
            self._evaluate_if_due()
            every = self._checkpoint_every
            due = every and (self.step % every == 0 or self.step == self._retry_step)
            if due and not self.ended:
                self.save(wait=False)

    @property
    def ended(self) -> bool:
        """Whether all steps are done, or the run has stopped early."""
        return self.step >= self.prepared.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Return True if the last `early_stop` evaluations were worse than the best."""
        patience = self.prepared.config.training.early_stop
        return patience is not None and self.best.worse >= patience

    def _asked_to_stop(self) -> bool:
        """Return True if the watcher of any rank requests a stop; set `stopped_by`. Collective."""
        reported = self.engine.ranks.synchronize("begins a step", int(self.watcher.stopping))
        self.stopped_by = max(signum for signum, *_ in reported)
        return self.stopped_by > 0

    @property
    def _checkpoint_every(self) -> int:
        training = self.prepared.config.training
        if self.prepared.engine.durable and "checkpoint_every" not in training.model_fields_set:
            return 0  # the committed state serves as checkpoint
        return training.checkpoint_every

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint of this step unless there is one; with `wait`, block until it ends.

        A failed save is reported, counted, and stored in `unsaved`. Raises `TransferError` if the
        drive of the state fails.
        """
        self._collect(wait=True)
        if self._saved_step == self.step:
            return
        self._saving = self.checkpoints / f"step{self.step}"
        self._saved_step = self.step
        with self._refusals(self.checkpoints, self._failed):
            with self.engine.ranks.collective_section("discards a checkpoint"):
                # One of this name is from an earlier start; this start resumed before it.
                if not self.engine.ranks.rank:
                    discard(self.checkpoints, self._saving.name)
            self.engine.save_checkpoint(
                self.checkpoints,
                self._saving.name,
                {"step": self.step},
                keep_last=self.prepared.config.training.keep_last,
            )
        self._collect(wait=wait)

    @contextmanager
    def _refusals(self, path: Path, failed: Callable[[InfinityError], None]) -> Iterator[None]:
        """Context of a save below `path`: pass its error to `failed`, on all ranks.

        A `TransferError` of a file outside `path`, on any rank, is raised on all ranks.
        """
        ranks = self.engine.ranks
        error: InfinityError | None = None
        try:
            yield
        except _REFUSALS as refused:
            error = refused
        except TrainingError as refusal:  # of a save that failed on another rank
            if ranks.count == 1:
                raise
            error = refusal
        fatal = isinstance(error, TransferError) and not Path(error.path).is_relative_to(path)
        if any(worse for worse, *_ in ranks.synchronize("saves a checkpoint", int(fatal))):
            assert error is not None
            raise error
        if error is not None:
            failed(error)

    def save_last(self) -> None:
        """Save a checkpoint and wait for it; of a durable run, only wait for a save in progress."""
        if self.prepared.engine.durable:
            self._collect(wait=True)
        else:
            self.save(wait=True)

    def _collect(self, *, wait: bool) -> None:
        """Handle the result of the save in progress if it has ended, or after waiting for it."""
        if self._saving is None or (self.engine.saving and not wait):
            return
        saving = self._saving
        with self._refusals(self.checkpoints, self._failed):
            self.engine.finish_saving()
            self._completed(saving)

    def _completed(self, path: Path) -> None:
        self.saved, self._saving, self.unsaved = path, None, None
        self._retry_step = -1
        self.remember_saved()
        self.watcher.note(f"checkpoint: {path}")

    def _failed(self, error: InfinityError) -> None:
        """Report a failed save and schedule the next attempt."""
        path, root = self._saving, self.checkpoints
        assert path is not None
        if latest(root) == path:
            self.watcher.note(str(error))  # complete: only removing older ones failed
            self._completed(path)
            return
        every, soon = self._checkpoint_every, self._saved_step != self._retry_step
        self._saving, self._saved_step = None, -1
        self._retry_step = self.step + max(1, every // _SOON) if soon else -1
        self.failed_saves += 1
        first, self.unsaved = self.unsaved is None, error
        self.record({"event": "not saved", "step": self.step, "tag": path.name, "why": str(error)})
        if first:
            self.watcher.note(
                f"{path.name} was not saved: {error}\n"
                f"  training goes on, and saves again when it can; {last_of(self.checkpoints)}"
            )

    def _one_step(self) -> None:
        engine, prepared = self.engine, self.prepared
        count = prepared.engine.gradient_accumulation_steps
        started_s = time.perf_counter()
        lr = float(engine.optimizer.param_groups[0]["lr"])
        values: list[Tensor] = []
        mean: Tensor | None = None
        windows, rank = prepared.micro_batch, engine.ranks.rank
        fair = self.reel.weight(prepared.windows_per_step) / prepared.micro_batches
        for micro_batch in range(count):
            weight = self.reel.weight(windows, ahead=rank * windows)
            part = self.loss_of(engine, self.reel.next().to(engine.device))
            if weight != fair:  # weight each token of a step equally
                part = part * (weight / fair)
            values.append(part.detach().double())
            engine.backward(part)
            del part
            if micro_batch == count - 1:  # before engine.step(), which may commit it
                mean = reduce(torch.add, self._in_turn(values)) / prepared.micro_batches
                self.last_step.record = {
                    "event": "step",
                    "step": self.step,
                    "epoch": round(self.reel.epoch, 6),
                    "tokens": self.reel.taken * prepared.length,
                    "loss": mean,
                    "lr": lr,
                }
            self._collect(wait=False)
            engine.step()
        assert mean is not None
        loss = mean.item()
        took_s = time.perf_counter() - started_s
        self.loss = loss
        self._report(took_s)
        if not math.isfinite(loss) and prepared.engine.precision != "fp16":
            raise self._diverged(loss, lr)

    def _in_turn(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the losses of all ranks in the order in which one rank would compute them."""
        ranks = self.engine.ranks
        if ranks.count == 1:
            return losses
        ranks.synchronize("reports its losses")
        local = torch.stack(list(losses)).cpu().view(torch.int64)
        return list(ranks.gather(local).view(torch.float64).T.flatten())

    def _report(self, took_s: float) -> None:
        prepared, report, step = self.prepared, self.engine.last_report, self.step
        assert report is not None
        self._times_s.append(took_s)
        record: dict[str, Any] = self.last_step.state_dict() | {
            "grad_norm": report.grad_norm,
            "clip_factor": report.clip_factor,
            "skipped": report.skipped,
            "step_s": took_s,
            "tokens_per_s": prepared.tokens_per_step / took_s,
            "stall_s": report.stall_s,
            "moved": report.moved,
            "memory": report.memory | {"process": high_water_bytes()},
        }
        if report.expert_load:
            record["expert_load"] = report.expert_load
        if report.router_loss is not None:
            record["router_loss"] = report.router_loss
        if prepared.engine.precision == "fp16":
            record["loss_scale"] = report.loss_scale
        left_s = median(self._times_s) * (prepared.steps - step)
        self.record(record, num_steps=prepared.steps, left_s=left_s)

    def record(self, record: dict[str, Any], **more: Any) -> None:
        """Write a line of metrics, and pass it, merged with `more`, to the watcher.

        Raises `RemovedError` if the file was removed; other errors are reported once.
        """
        try:
            self.metrics.write(record)
        except RemovedError:
            raise
        except MachineError as error:
            if not self._warned_metrics:
                self.watcher.note(f"training goes on without metrics: {error.what}")
            self._warned_metrics = True
        self.watcher.on_record(record | more)

    def _diverged(self, loss: float, lr: float) -> TrainingError:
        if self.step == 1:
            return TrainingError(
                f"the loss of the first step is {loss}",
                because="the model or its data is broken: no update has happened yet",
            )
        return TrainingError(
            f"the loss of step {self.step} is {loss}",
            because=f"training diverged at a learning rate of {lr:g}",
            remedy=f"a new run with engine.optimizer.lr={lr / 10:g}, or with a warm-up; "
            "checkpoints before this step stay",
        )

    # --- evaluation ------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        """Evaluate if due and not yet done at this step; record the loss and update the best."""
        every, best = self.prepared.config.training.evaluate_every, self.best
        due = self.step == self.prepared.steps or (every and self.step % every == 0)
        if self.prepared.evaluate is None or not due or best.last >= self.step:
            return
        loss = self.evaluate()
        self.evaluation = loss
        best.on_evaluation(self.step, loss)
        if self.step not in self.metrics.evaluated:
            self.record(
                {
                    "event": "evaluation",
                    "step": self.step,
                    "loss": loss,
                    "perplexity": math.exp(min(loss, 700.0)),
                    "windows": self.prepared.num_evaluated,
                }
            )
        beaten = best.step == 0 and loss > best.loss  # by the initial weights
        if self.keep_best is not None and self.step and loss < best.kept and not beaten:
            self._keep(self.keep_best, loss)
        self._report_early_end()

    def _report_early_end(self) -> None:
        best = self.best
        if self.stopped_early:
            self.watcher.note(
                f"stopped early: {best.worse} evaluations in a row found nothing better than "
                f"{best.loss:.4f} at step {best.step} (a larger training.early_stop goes on)"
            )

    def _keep(self, write: Callable[[Engine], Path], loss: float) -> None:
        """Save the weights as the best; if that fails, the previous ones stay."""

        def failed(error: InfinityError) -> None:
            before = f"those of step {best.kept_step} stay" if best.kept_step >= 0 else "none are"
            self.watcher.note(
                f"the weights of step {self.step}, the best so far, were not kept: {error}\n"
                f"  {before}, and training goes on"
            )

        best = self.best
        with self._refusals(self.checkpoints.parent, failed):
            path = write(self.engine)
            best.kept, best.kept_step = loss, self.step
            self.watcher.note(f"best so far: {path} (step {self.step})")

    def evaluate(self) -> float:
        """Return the mean loss per token of the first held-out windows."""
        prepared, windows, ranks = self.prepared, self.prepared.evaluate, self.engine.ranks
        assert windows is not None
        count = prepared.num_evaluated
        batches = [
            range(first, min(first + prepared.micro_batch, count))
            for first in range(0, count, prepared.micro_batch)
        ]
        losses = []
        self.engine.eval()
        try:
            with torch.no_grad():
                for begin in range(0, len(batches), ranks.count):
                    # In an incomplete last round, surplus ranks repeat the last batch, unused.
                    local = batches[min(begin + ranks.rank, len(batches) - 1)]
                    tokens = torch.stack([windows.window(index) for index in local])
                    loss = self.loss_of(self.engine, tokens.to(self.engine.device))
                    losses.append(loss.double())
        finally:
            self.engine.train()
        every = [loss.item() for loss in self._in_turn(losses)]
        weights = [sum(map(windows.weight, batch)) for batch in batches]
        total = sum(loss * weight for loss, weight in zip(every, weights, strict=False))
        return total / sum(weights)


def last_of(root: Path) -> str:
    """Return a clause that names the checkpoint to resume from."""
    path = latest(root)
    return f"the last checkpoint is {path}" if path else "no checkpoint is whole yet"


def latest(root: Path) -> Path | None:
    """Return the checkpoint that the file `latest` names; None if it is missing or unreadable."""
    try:
        tag = find_tag(root, None)
    except InfinityError:
        return None
    return None if tag is None else root / tag
