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
from infinity.plan.machine import peak_ram_bytes
from infinity.train.best import Best
from infinity.train.metrics import LastStep, Metrics, TrainCallback
from infinity.train.preparation import Prepared
from infinity.train.windows import BatchIterator

_TIMED_STEPS = 50  # steps from which the remaining time is estimated
_RETRY_DIVISOR = 10  # a failed save is retried after checkpoint_every / _RETRY_DIVISOR steps
Compute = Callable[[Any, Tensor], Tensor]  # (engine, batch of tokens) -> mean loss


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
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED_STEPS))
    _saved_step: int = -1
    _saving_path: Path | None = None  # checkpoint that is being written
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
        self._note_early_stop()  # a resumed run may have stopped early
        self._evaluate_if_due()
        self.evaluation_before = self.evaluation
        while not self.ended:
            reported = self.engine.ranks.synchronize("begins a step", int(watcher.stopping))
            self.stopped_by = max(signum for signum, *_ in reported)  # of any rank
            if self.stopped_by > 0:
                break
            self._train_step()
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
        self._poll_save(wait=True)
        if self._saved_step == self.step:
            return
        self._saving_path = self.checkpoints / f"step{self.step}"
        self._saved_step = self.step
        with self._handle_save_errors(self.checkpoints, self._on_save_failed):
            with self.engine.ranks.collective_section("discards a checkpoint"):
                # One of this name is from an earlier start; this start resumed before it.
                if not self.engine.ranks.rank:
                    discard(self.checkpoints, self._saving_path.name)
            self.engine.save_checkpoint(
                self.checkpoints,
                self._saving_path.name,
                {"step": self.step},
                keep_last=self.prepared.config.training.keep_last,
            )
        self._poll_save(wait=wait)

    @contextmanager
    def _handle_save_errors(
        self, path: Path, on_error: Callable[[InfinityError], None]
    ) -> Iterator[None]:
        """Context of a save below `path`: pass its error to `on_error`, on all ranks.

        A `TransferError` of a file outside `path`, on any rank, is raised on all ranks.
        """
        ranks = self.engine.ranks
        error: InfinityError | None = None
        try:
            yield
        except (CheckpointError, DoesNotFitError, MachineError) as save_error:
            error = save_error
        except TrainingError as propagated_error:  # of a save that failed on another rank
            if ranks.count == 1:
                raise
            error = propagated_error
        fatal = isinstance(error, TransferError) and not Path(error.path).is_relative_to(path)
        if any(is_fatal for is_fatal, *_ in ranks.synchronize("saves a checkpoint", int(fatal))):
            assert error is not None
            raise error
        if error is not None:
            on_error(error)

    def save_last(self) -> None:
        """Save a checkpoint and wait for it; of a durable run, only wait for a save in progress."""
        if self.prepared.engine.durable:
            self._poll_save(wait=True)
        else:
            self.save(wait=True)

    def _poll_save(self, *, wait: bool) -> None:
        """Handle the result of the save in progress if it has ended, or after waiting for it."""
        if self._saving_path is None or (self.engine.saving and not wait):
            return
        path = self._saving_path
        with self._handle_save_errors(self.checkpoints, self._on_save_failed):
            self.engine.finish_saving()
            self._on_saved(path)

    def _on_saved(self, path: Path) -> None:
        self.saved, self._saving_path, self.unsaved = path, None, None
        self._retry_step = -1
        self.remember_saved()
        self.watcher.note(f"checkpoint: {path}")

    def _on_save_failed(self, error: InfinityError) -> None:
        """Report a failed save and schedule the next attempt."""
        path, checkpoints = self._saving_path, self.checkpoints
        assert path is not None
        if latest(checkpoints) == path:
            self.watcher.note(str(error))  # complete: only removing older ones failed
            self._on_saved(path)
            return
        is_retry = self._saved_step == self._retry_step
        retry_after = max(1, self._checkpoint_every // _RETRY_DIVISOR)
        self._saving_path, self._saved_step = None, -1
        self._retry_step = -1 if is_retry else self.step + retry_after
        self.failed_saves += 1
        is_first = self.unsaved is None
        self.unsaved = error
        self.record({"event": "not saved", "step": self.step, "tag": path.name, "why": str(error)})
        if is_first:
            self.watcher.note(
                f"{path.name} was not saved: {error}\n"
                "  training goes on, and saves again when it can; "
                + last_checkpoint_clause(self.checkpoints)
            )

    def _train_step(self) -> None:
        engine, prepared = self.engine, self.prepared
        count = prepared.engine.gradient_accumulation_steps
        started_s = time.perf_counter()
        lr = float(engine.optimizer.param_groups[0]["lr"])
        losses: list[Tensor] = []
        mean: Tensor | None = None
        windows, rank = prepared.micro_batch, engine.ranks.rank
        mean_weight = self.reel.weight(prepared.windows_per_step) / prepared.micro_batches
        for micro_batch in range(count):
            weight = self.reel.weight(windows, ahead=rank * windows)
            micro_loss = self.loss_of(engine, self.reel.next().to(engine.device))
            if weight != mean_weight:  # weight each token of a step equally
                micro_loss = micro_loss * (weight / mean_weight)
            losses.append(micro_loss.detach().double())
            engine.backward(micro_loss)
            del micro_loss
            if micro_batch == count - 1:  # before engine.step(), which may commit it
                mean = reduce(torch.add, self._gather_losses(losses)) / prepared.micro_batches
                self.last_step.record = {
                    "event": "step",
                    "step": self.step,
                    "epoch": round(self.reel.epoch, 6),
                    "tokens": self.reel.taken * prepared.length,
                    "loss": mean,
                    "lr": lr,
                }
            self._poll_save(wait=False)
            engine.step()
        assert mean is not None
        loss = mean.item()
        step_s = time.perf_counter() - started_s
        self.loss = loss
        self._record_step(step_s)
        if not math.isfinite(loss) and prepared.engine.precision != "fp16":
            raise self._divergence_error(loss, lr)

    def _gather_losses(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the losses of all ranks in the order in which one rank would compute them."""
        ranks = self.engine.ranks
        if ranks.count == 1:
            return losses
        ranks.synchronize("reports its losses")
        local_bits = torch.stack(list(losses)).cpu().view(torch.int64)
        return list(ranks.gather(local_bits).view(torch.float64).T.flatten())

    def _record_step(self, step_s: float) -> None:
        prepared, report, step = self.prepared, self.engine.last_report, self.step
        assert report is not None
        self._step_times_s.append(step_s)
        record: dict[str, Any] = self.last_step.state_dict() | {
            "grad_norm": report.grad_norm,
            "clip_factor": report.clip_factor,
            "skipped": report.skipped,
            "step_s": step_s,
            "tokens_per_s": prepared.tokens_per_step / step_s,
            "stall_s": report.stall_s,
            "moved": report.moved,
            "memory": report.memory | {"process": peak_ram_bytes()},
        }
        if report.expert_load:
            record["expert_load"] = report.expert_load
        if report.router_loss is not None:
            record["router_loss"] = report.router_loss
        if prepared.engine.precision == "fp16":
            record["loss_scale"] = report.loss_scale
        remaining_s = median(self._step_times_s) * (prepared.steps - step)
        self.record(record, num_steps=prepared.steps, left_s=remaining_s)

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

    def _divergence_error(self, loss: float, lr: float) -> TrainingError:
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
            self._save_best(self.keep_best, loss)
        self._note_early_stop()

    def _note_early_stop(self) -> None:
        best = self.best
        if self.stopped_early:
            self.watcher.note(
                f"stopped early: {best.worse} evaluations in a row found nothing better than "
                f"{best.loss:.4f} at step {best.step} (a larger training.early_stop goes on)"
            )

    def _save_best(self, write: Callable[[Engine], Path], loss: float) -> None:
        """Save the weights as the best; if that fails, the previous ones stay."""

        def on_error(error: InfinityError) -> None:
            previous = (
                f"those of step {best.kept_step} stay" if best.kept_step >= 0 else "none are saved"
            )
            self.watcher.note(
                f"the weights of step {self.step}, the best so far, were not saved: {error}\n"
                f"  {previous}, and training goes on"
            )

        best = self.best
        with self._handle_save_errors(self.checkpoints.parent, on_error):
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
                for round_start in range(0, len(batches), ranks.count):
                    # In an incomplete last round, surplus ranks repeat the last batch, unused.
                    local = batches[min(round_start + ranks.rank, len(batches) - 1)]
                    tokens = torch.stack([windows.window(index) for index in local])
                    loss = self.loss_of(self.engine, tokens.to(self.engine.device))
                    losses.append(loss.double())
        finally:
            self.engine.train()
        batch_losses = [loss.item() for loss in self._gather_losses(losses)]
        weights = [sum(map(windows.weight, batch)) for batch in batches]
        total = sum(loss * weight for loss, weight in zip(batch_losses, weights, strict=False))
        return total / sum(weights)


def last_checkpoint_clause(root: Path) -> str:
    """Return a clause that names the checkpoint to resume from."""
    path = latest(root)
    return f"the last checkpoint is {path}" if path else "no checkpoint is complete yet"


def latest(root: Path) -> Path | None:
    """Return the checkpoint that the file `latest` names; None if it is missing or unreadable."""
    try:
        tag = find_tag(root, None)
    except InfinityError:
        return None
    return None if tag is None else root / tag
