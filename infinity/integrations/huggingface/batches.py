"""Re-batching of an optimizer step of a Trainer into the micro-batches of the plan.

[Note: a step's batches]
A Trainer passes a step as `gradient_accumulation_steps` batches and divides each loss by the
number of labels in all of them (`num_items_in_batch`). The loss of the step is thus a sum over
samples, and another split into micro-batches changes only the order of summation: the plan may
choose micro-batches and slices (see [Note: batch schedule]). If the loss is not such a sum, every
batch remains a micro-batch.
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
from infinity.model.partition import range_size_variants
from infinity.plan.activations import num_blocks
from infinity.plan.batch_schedule import KEYS, BatchSchedule, ScheduleResult, choose_schedule
from infinity.plan.planner import gradient_itemsize
from infinity.storage.devices import resolve_device
from infinity.training.run_plan import plan_input_for

Batch: TypeAlias = Mapping[str, Any]

# Inputs that can be joined, with the padding values for shorter rows: text inputs with one row per
# sample. Rows of other inputs (image patches, packed sequences) may not correspond to samples.
_PADS = {
    "input_ids": None,  # None: the pad token
    "decoder_input_ids": None,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "position_ids": 0,
    "token_type_ids": 0,
    "labels": -100,
    "shift_labels": -100,
}


# --- eligibility ---------------------------------------------------------------------------------


def is_sum_over_samples(trainer: Any, methods: Iterable[tuple[str, type]]) -> bool:
    """Return True if a Trainer's loss of a batch is a sum over samples / `num_items_in_batch`.

    This holds if the loss is computed by a transformers model that calls a `loss_function` with a
    `num_items_in_batch` parameter. `methods` are pairs of method name and class: the Trainer must
    use the implementations of these classes, because an override may compute anything. A label
    smoother is excluded: it needs the full logits.
    """
    for name, owner in methods:
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(owner, name):
            return False
    custom_losses = (trainer.compute_loss_func, trainer.label_smoother)
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # added after transformers 5.18
    if any(custom_loss is not None for custom_loss in custom_losses) or is_scaled is False:
        return False
    model = trainer.model
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    model_config: Any = getattr(base, "config", None)
    configs = (
        [model_config, model_config.get_text_config()]
        if hasattr(model_config, "get_text_config")
        else []
    )
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return False  # the router loss is a mean over the micro-batch
    code = getattr(inspect.unwrap(base.forward), "__code__", None)
    loss_function = getattr(base, "loss_function", None)
    if code is None or "loss_function" not in code.co_names or not callable(loss_function):
        return False
    takes_num_items = "num_items_in_batch" in inspect.signature(loss_function).parameters
    return takes_num_items and bool(trainer.model_accepts_loss_kwargs)


def find_pad_token(trainer: Any) -> int:
    """Return the padding token of the tokenizer, or the model's config; 0 without one."""
    holders = (trainer.processing_class, getattr(trainer.model, "config", None))
    tokens = (getattr(holder, "pad_token_id", None) for holder in holders)
    return next((token for token in tokens if isinstance(token, int)), 0)


def _num_samples(batch: Any) -> int | None:
    """Return the number of samples; None unless all values are known tensors with a row each."""
    if not isinstance(batch, Mapping) or not batch or batch.keys() - _PADS.keys():
        return None
    if "position_ids" in batch and "attention_mask" not in batch:
        return None  # positions may restart within a row of packed sequences
    values = list(batch.values())
    plain = all(
        isinstance(v, Tensor) and v.layout is torch.strided and v.dim() in (1, 2) for v in values
    )
    rows = {value.shape[0] for value in values} if plain else set()
    return rows.pop() if len(rows) == 1 else None


def can_concatenate(batches: Sequence[Any]) -> bool:
    """Return True if joining the batches does not change the model's results for any sample."""
    if not batches or any(_num_samples(batch) is None for batch in batches):
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
                return False  # padding could not be masked
    return True


# --- joining and cutting -------------------------------------------------------------------------


def joined(parts: Sequence[Batch], pad_token: int = 0, *, slices: int = 1) -> dict[str, Tensor]:
    """Concatenate batches along samples, padded on the right to the longest.

    If blocks run in slices (`slices` > 1), the numbers of rows and positions must differ, because
    slicing identifies these dimensions by size: one more position of padding is added then, if
    there is an attention mask.
    """
    inputs = {}
    for name in parts[0]:
        values = [batch[name] for batch in parts]
        if values[0].dim() > 1:
            length = max(value.shape[1] for value in values)
            rows = sum(len(value) for value in values)
            length += slices > 1 and length == rows and "attention_mask" in parts[0]
            fill = pad_token if _PADS[name] is None else _PADS[name]
            values = [
                nn.functional.pad(value, (0, length - value.shape[1]), value=fill)
                for value in values
            ]
        inputs[name] = values[0] if len(values) == 1 else torch.cat(values)
    return inputs


def cut(batches: Sequence[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of batches or views of batches with `size` samples in total, in order.

    The last list may have fewer samples. Batches that are not divided are yielded without a copy.
    """
    micro_batch: list[Batch] = []
    num_missing = size
    for batch in batches:
        rows, start = _num_samples(batch) or 0, 0
        while start < rows:
            count = min(rows - start, num_missing)
            is_complete = count == rows
            micro_batch.append(
                batch if is_complete else {k: v.narrow(0, start, count) for k, v in batch.items()}
            )
            start, num_missing = start + count, num_missing - count
            if not num_missing:
                yield micro_batch
                micro_batch, num_missing = [], size
    if micro_batch:
        yield micro_batch


class StepBatches:
    """Batches of one optimizer step, re-batched into the micro-batches of the plan.

    `samples` is the number of samples of a full step on each rank; the last step of an epoch may
    have fewer.
    """

    def __init__(
        self, config: Config, samples: int, pad_token: int = 0, ranks: DistContext = SINGLE_PROCESS
    ) -> None:
        self.schedule = (config.gradient_accumulation_steps, config.activations.slices)
        self._samples = samples
        self._pad_token = pad_token
        self._ranks = ranks
        self._batches: Sequence[Any] = ()
        self._num_taken = 0

    def compare(self, decided: Decided) -> None:
        """Warn if the resumed checkpoint was saved with another batch schedule."""
        if decided not in (self.schedule, (None, None)):
            schedule = "{} micro-batches, blocks in {} slices"
            warnings.warn(
                f"the checkpoint is of a run with {schedule.format(*decided)}, this one has "
                f"{schedule.format(*self.schedule)}: results differ by rounding",
                InfinityWarning,
                stacklevel=5,
            )

    def hold(self, batches: Sequence[Any], num_items: Any) -> None:
        """Store the batches of the next step if they can be joined on all ranks.

        Otherwise store none: every batch is then a micro-batch, on all ranks.
        """
        is_joinable = num_items is not None and can_concatenate(batches)
        by_rank = self._ranks.synchronize("begins a step of a Trainer", int(is_joinable))
        self._batches = batches if all(joinable for joinable, *_ in by_rank) else ()
        self._num_taken = 0

    def take(self, batch: Any) -> bool:
        """Return True and advance if `batch` is the next of the stored batches."""
        index = self._num_taken
        is_next = index < len(self._batches) and batch is self._batches[index]
        self._num_taken += is_next
        return is_next

    @property
    def complete(self) -> bool:
        """True if all stored batches were passed to `take`."""
        return self._num_taken == len(self._batches)

    def micro_batches_of_plan(self) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Yield the micro-batches of the step lazily, each with True if it is the last."""
        rows = sum(_num_samples(batch) or 0 for batch in self._batches)
        count, slices = self.schedule
        size = -(-max(self._samples, rows) // count)
        for number, batches in enumerate(cut(self._batches, size), start=1):
            micro_batch = joined(batches, self._pad_token, slices=slices)
            yield micro_batch, number * size >= rows


# --- the plan ------------------------------------------------------------------------------------


Decided: TypeAlias = tuple[int | None, int | None]  # micro-batches, slices; None: by the plan


def schedule_of_checkpoint(folder: str, tag: str) -> Decided:
    """Return the batch schedule of the run that saved a checkpoint."""
    with CheckpointReader(Path(folder), tag) as reader:
        config = reader.manifest.config
    keys = config if isinstance(config, Mapping) else {}
    return keys.get("gradient_accumulation_steps"), keys.get("activations.slices")


def with_schedule(
    model: nn.Module,
    config: Config,
    device: torch.device,
    samples: int,
    decided: Decided,
    ranks: DistContext = SINGLE_PROCESS,
) -> Config:
    """Return a configuration with the fastest batch schedule that fits a step of `samples`.

    In `config` a step is `gradient_accumulation_steps` batches of `activations.tokens` each. Keys
    set in `activations` and the values of `decided` are not changed. If the model has gradient
    checkpointing enabled, all blocks are recomputed, and not sliced by default.

    `samples` counts the samples of each rank. All ranks get the choice of the first rank.

    With more than one batch, gradient sums are stored in fp32, as without a schedule: a step whose
    batches cannot be joined is run batch by batch.
    """
    batches, settings = config.gradient_accumulation_steps, config.activations
    assert settings.tokens is not None
    micro_batches, slices = decided
    if micro_batches is not None and samples % micro_batches:
        micro_batches = None  # the checkpoint was saved with another batch size
    if "slices" in settings.model_fields_set:
        slices = None
    requested = BatchSchedule.explicit_in(settings, micro_batches, slices)
    recompute = recomputes_itself(model)
    if recompute:
        requested = replace(requested, slices=requested.slices or 1, recompute="all")
    model_config = cast(Any, model).config.to_dict()
    tokens = settings.tokens * batches
    declare_experts(model)
    with closing(resolve_device(device)) as storage_device:
        case, target, _ = plan_input_for(
            type(model).__name__, model, model_config, config, storage_device, settings.tokens,
            tokens // samples, recompute=recompute, ranks=ranks,
        )  # fmt: skip
    step = case.with_step(tokens, 1)

    def choose(requested: BatchSchedule) -> ScheduleResult:
        # A durable run finds its state by unit, so units must not depend on the machine.
        other_cases = () if config.durable else range_size_variants(step, target)
        return choose_schedule(step, requested, samples, other_cases)

    chosen = choose(requested)
    if batches > 1 and gradient_itemsize(chosen.applied_to(config)) < 4:
        can_slice = requested.slices is None and num_blocks(case.units)
        requested = (
            replace(requested, slices=2) if can_slice else replace(requested, micro_batches=2)
        )
        chosen = choose(requested)
    return shared(chosen.applied_to(config), ranks)


def shared(config: Config, ranks: DistContext) -> Config:
    """Return the configuration with the batch schedule of the first rank."""
    if ranks.count == 1:
        return config
    ranks.synchronize("chooses micro-batches")
    local = config.model_dump(mode="json", exclude_unset=True, include=set(KEYS))
    raw = config.model_dump(exclude_unset=True) | ranks.all_gather_object(local)[0]
    return Config.model_validate(raw)
