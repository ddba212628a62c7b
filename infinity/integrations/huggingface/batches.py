"""The batches of one optimizer step of a Trainer: joined, and cut as the plan has it.

[Note: a step's batches]
A Trainer hands over a step as `gradient_accumulation_steps` batches, and divides each loss by the
labels of all of them (`num_items_in_batch`). So the step is a sum over samples, and how these are
cut changes no more than the order of that sum: the plan may choose micro-batches and slices (see
[Note: batch schedule]). Where the loss is no such sum, every batch stays a micro-batch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from infinity.checkpoint.reader import CheckpointReader
from infinity.config.schema import Config
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import InfinityWarning
from infinity.integrations.huggingface.experts import declare_experts
from infinity.model.checks import recomputes_itself
from infinity.model.partition import other_ranges
from infinity.plan.activations import num_blocks
from infinity.plan.batch_schedule import KEYS, BatchSchedule, ScheduleResult, choose_schedule
from infinity.plan.planner import gradient_itemsize
from infinity.storage.devices import find_device
from infinity.training.run_plan import case_here

Batch: TypeAlias = Mapping[str, Any]

# What may be in a batch that is joined with others, and what a shorter one is filled up with: text,
# one row for each sample. Other inputs (images by the patch, sequences packed into one row) need
# not have their rows in the order of samples.
_PADS = {
    "input_ids": None,  # the pad token
    "decoder_input_ids": None,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "position_ids": 0,
    "token_type_ids": 0,
    "labels": -100,
    "shift_labels": -100,
}


# --- which steps are sums over samples -----------------------------------------------------------


def sums_over_samples(trainer: Any, methods: Iterable[tuple[str, type]]) -> bool:
    """Whether a Trainer's loss of a batch is a sum over samples, over `num_items_in_batch`.

    So where the loss is the model's, and the model is one of transformers' that leaves it to a
    `loss_function` that takes the number. `methods` are methods and the class that is to have them:
    a subclass with others may compute anything. A label smoother needs logits, which are whole.
    """
    for name, kind in methods:
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(kind, name):
            return False
    others = (trainer.compute_loss_func, trainer.label_smoother)
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # newer than transformers 5.18
    if any(other is not None for other in others) or scaled is False:
        return False
    model = trainer.model
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    settings: Any = getattr(base, "config", None)
    parts = [settings, settings.get_text_config()] if hasattr(settings, "get_text_config") else []
    if any(getattr(part, "output_router_logits", False) for part in parts):
        return False  # a loss of the router's, a mean over whatever passes together
    code = getattr(inspect.unwrap(base.forward), "__code__", None)
    loss = getattr(base, "loss_function", None)
    if code is None or "loss_function" not in code.co_names or not callable(loss):
        return False
    takes = "num_items_in_batch" in inspect.signature(loss).parameters
    return takes and bool(trainer.model_accepts_loss_kwargs)


def pad_token_of(trainer: Any) -> int:
    """Return the padding token of the tokenizer, or the model's config; 0 without one."""
    holders = (trainer.processing_class, getattr(trainer.model, "config", None))
    tokens = (getattr(holder, "pad_token_id", None) for holder in holders)
    return next((token for token in tokens if isinstance(token, int)), 0)


def _samples(batch: Any) -> int | None:
    """How many samples a batch has; None where that is not one row of known tensors for each."""
    if not isinstance(batch, Mapping) or not batch or batch.keys() - _PADS.keys():
        return None
    if "position_ids" in batch and "attention_mask" not in batch:
        return None  # they may begin anew in a row, where texts are packed
    values = list(batch.values())
    plain = all(
        isinstance(v, Tensor) and v.layout is torch.strided and v.dim() in (1, 2) for v in values
    )
    rows = {value.shape[0] for value in values} if plain else set()
    return rows.pop() if len(rows) == 1 else None


def can_join(batches: Sequence[Any]) -> bool:
    """Return True if batches can be joined without changing the model's results of samples."""
    if not batches or any(_samples(batch) is None for batch in batches):
        return False
    first = batches[0]
    for batch in batches:
        if batch.keys() != first.keys():
            return False
        for name, value in batch.items():
            other = first[name]
            if (value.dim(), value.dtype, value.device) != (other.dim(), other.dtype, other.device):
                return False
            if value.shape[1:] != other.shape[1:] and "attention_mask" not in first:
                return False  # nothing would say what is padding
    return True


# --- joining and cutting -------------------------------------------------------------------------


def joined(parts: Sequence[Batch], pad_token: int = 0, *, slices: int = 1) -> dict[str, Tensor]:
    """Batches that can be joined as one, each filled up to the longest, on the right.

    Rows and positions must not be equally many where blocks run in `slices`, which tell the two
    apart by their number: then a position of padding comes on top, where a mask says what it is.
    """
    found = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if values[0].dim() > 1:
            longest = max(value.shape[1] for value in values)
            rows = sum(len(value) for value in values)
            longest += slices > 1 and longest == rows and "attention_mask" in parts[0]
            fill = pad_token if _PADS[name] is None else _PADS[name]
            values = [
                nn.functional.pad(value, (0, longest - value.shape[1]), value=fill)
                for value in values
            ]
        found[name] = values[0] if len(values) == 1 else torch.cat(values)
    return found


def cut(batches: Sequence[Batch], size: int) -> Iterator[list[Batch]]:
    """Parts of batches, in order, in lists of `size` samples together; the last may have fewer.

    A batch that is not divided is itself; parts are views.
    """
    parts: list[Batch] = []
    room = size
    for batch in batches:
        rows, start = _samples(batch) or 0, 0
        while start < rows:
            taken = min(rows - start, room)
            whole = taken == rows
            parts.append(
                batch if whole else {k: v.narrow(0, start, taken) for k, v in batch.items()}
            )
            start, room = start + taken, room - taken
            if not room:
                yield parts
                parts, room = [], size
    if parts:
        yield parts


class StepBatches:
    """The batches of one optimizer step, which go through the model in micro-batches of the plan's.

    `samples` are those of a whole step on each rank; a step may have fewer, at the end of an epoch.
    """

    def __init__(
        self, config: Config, samples: int, pad_token: int = 0, ranks: DistContext = SINGLE_PROCESS
    ) -> None:
        self.schedule = (config.gradient_accumulation_steps, config.activations.slices)
        self._samples = samples
        self._pad_token = pad_token
        self._ranks = ranks
        self._held: Sequence[Any] = ()
        self._handed_over = 0

    def compare(self, decided: Decided) -> None:
        """Warn where a run goes on from one with another schedule."""
        if decided not in (self.schedule, (None, None)):
            schedule = "{} micro-batches, blocks in {} slices"
            warnings.warn(
                f"the checkpoint is of a run with {schedule.format(*decided)}, this one has "
                f"{schedule.format(*self.schedule)}: the numbers round differently",
                InfinityWarning,
                stacklevel=5,
            )

    def hold(self, batches: Sequence[Any], num_items: Any) -> None:
        """The batches of the step that begins; none where each has to be a micro-batch.

        So it is on all ranks where it is on one.
        """
        joins = num_items is not None and can_join(batches)
        joining = self._ranks.synchronize("begins a step of a Trainer", int(joins))
        self._held = batches if all(others for others, *_ in joining) else ()
        self._handed_over = 0

    def take(self, batch: Any) -> bool:
        """Whether it is the next of them."""
        at = self._handed_over
        taken = at < len(self._held) and batch is self._held[at]
        self._handed_over += taken
        return taken

    @property
    def complete(self) -> bool:
        """Whether all of them were handed over."""
        return self._handed_over == len(self._held)

    def cut_anew(self) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """The micro-batches of the step, one made after the other, and whether it is the last."""
        rows = sum(_samples(batch) or 0 for batch in self._held)
        count, slices = self.schedule
        size = -(-max(self._samples, rows) // count)
        for number, parts in enumerate(cut(self._held, size), start=1):
            whole = joined(parts, self._pad_token, slices=slices)
            yield whole, number * size >= rows


# --- the plan ------------------------------------------------------------------------------------


Decided: TypeAlias = tuple[int | None, int | None]  # micro-batches and slices; None: open


def decided_by(folder: str, tag: str) -> Decided:
    """What decides the numbers of the run that saved a checkpoint."""
    with CheckpointReader(Path(folder), tag) as reader:
        config = reader.manifest.config
    found = config if isinstance(config, Mapping) else {}
    return found.get("gradient_accumulation_steps"), found.get("activations.slices")


def with_schedule(
    model: nn.Module,
    config: Config,
    device: torch.device,
    samples: int,
    decided: Decided,
    ranks: DistContext = SINGLE_PROCESS,
) -> Config:
    """Return a configuration with the fastest schedule that fits a step of `samples`.

    In `config` a step is `gradient_accumulation_steps` batches of `activations.tokens` each. What
    `activations` names stays, as does what was `decided`. Blocks that the model recomputes by
    itself stay whole.

    Of several ranks `samples` are those of each, and what the first chooses is all ranks'.

    Sums rest in fp32 where there is more than one batch, as without a schedule: so a step whose
    batches cannot be joined may be taken batch by batch after all.
    """
    batches, settings = config.gradient_accumulation_steps, config.activations
    assert settings.tokens is not None
    micro_batches, slices = decided
    if micro_batches is not None and samples % micro_batches:
        micro_batches = None  # of another batch
    if "slices" in settings.model_fields_set:
        slices = None
    wish = BatchSchedule.named_by(settings, micro_batches, slices)
    recompute = recomputes_itself(model)
    if recompute:
        wish = replace(wish, slices=wish.slices or 1, recompute="all")
    facts = cast(Any, model).config.to_dict()
    tokens = settings.tokens * batches
    declare_experts(model)
    with closing(find_device(device)) as opened:
        case, target, _ = case_here(
            type(model).__name__, model, facts, config, opened, settings.tokens, tokens // samples,
            recompute=recompute, ranks=ranks,
        )  # fmt: skip
    step = case.with_step(tokens, 1)

    def choose(wish: BatchSchedule) -> ScheduleResult:
        # A durable run finds its state by its units, which may not change with the machine.
        others = () if config.durable else other_ranges(step, target)
        return choose_schedule(step, wish, samples, others)

    chosen = choose(wish)
    if batches > 1 and gradient_itemsize(chosen.applied_to(config)) < 4:
        sliced = wish.slices is None and num_blocks(case.units)
        wish = replace(wish, slices=2) if sliced else replace(wish, micro_batches=2)
        chosen = choose(wish)
    return shared(chosen.applied_to(config), ranks)


def shared(config: Config, ranks: DistContext) -> Config:
    """A configuration with the batch schedule that it has on the first rank."""
    if ranks.count == 1:
        return config
    ranks.synchronize("chooses micro-batches")
    local = config.model_dump(mode="json", exclude_unset=True, include=set(KEYS))
    raw = config.model_dump(exclude_unset=True) | ranks.all_gather_object(local)[0]
    return Config.model_validate(raw)
