"""Blocks that run their batch in slices, with weights fetched once for all slices.

[Note: effects of slices]
The batch is split along the first dimension, each slice runs separately, and the results are
concatenated. If samples are independent, results are bit for bit those of plain torch with the same
slices. They differ from those of the full batch, since matrix products of other shapes round
differently. Gradients of slices are summed in fp32 (`slice_sums.py`). Blocks that cannot be sliced
are rejected by name. The first call of each block, and the first with other sliced arguments, is
tested on two slices, together and separately, with and without dropout, without the hooks of other
packages, and without a change to its buffers. Each slice is a separate call of the block: a counter
in a buffer is incremented once per slice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinity.common.accelerators import fork_rng, is_accelerator, module_of
from infinity.errors import InfinityError, TrainingError
from infinity.model.buffers import RecomputeBuffers
from infinity.model.partitioner import UnitModules
from infinity.model.stacks import RangeCall
from infinity.model.torch_private import restore_flat_weights
from infinity.offload.call_tensors import call_checked, flatten_tensors, leaves, unflatten_tensors
from infinity.offload.expert_ranges import Experts
from infinity.offload.hooks import Hooks, is_infinity_hook
from infinity.offload.recorded_outputs import SlicedRecords
from infinity.offload.shared_ranges import SharedSlices, has_output_hooks
from infinity.offload.slice_sums import SlicedCall
from infinity.plan.plan import Plan

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Allowed difference of rows between two batch sizes, relative to the largest value.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 5e-2
# Allowed share of differing integers, such as experts chosen by scores that are nearly equal.
_MAX_DIFFERING = 0.1

Forward = Callable[..., Any]


class Owner(Protocol):
    """State that the slicers of a model share."""

    inside: int  # block forwards in progress, sliced or recomputable

    def count_recomputed(self) -> None:
        """Count a recomputed slice."""

    def warn_once(self, of: str, text: str) -> None:
        """Warn with `text`, once per key `of`."""


class Slicer:
    """Forward of one block in slices."""

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        unit: int,
        cut: UnitModules,
        plan: Plan,
        owner: Owner,
        hooks: Hooks,
    ) -> None:
        self._module = module
        self._unit_parameters = frozenset(cut.parameters)
        self._unit = unit
        self._owner = owner
        self._hooks = hooks
        self._expert_calls = hooks.expert_calls
        self._sums = hooks.sums
        self._forward = forward
        self._name = cut.name
        self._shares_ranges = any(
            f"{path}.".startswith(f"{cut.name}.") for path in plan.shared_stacks
        )
        self._num_slices = plan.saved.slices
        # By kind of call: why slices cannot share ranges of experts, or "" if they can.
        self._not_shared_because: dict[object, str] = {}
        for path, part in module.named_modules():
            if getattr(part, "batch_first", True) is False:
                raise self._refusal(
                    f"{path or 'it'} has batch_first=False", "its first dimension is not the batch"
                )

    def __call__(self, run: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return `run(*args, **kwargs)`, run in slices; `TrainingError` if this is unsupported."""
        for path, part in self._module.named_modules():
            uses_batch_stats = part.training or getattr(part, "running_mean", None) is None
            if isinstance(part, _BATCH_NORMS) and uses_batch_stats:
                raise self._refusal(
                    f"{path or 'it'} is a {type(part).__name__} in training",
                    "it normalizes over the batch",
                )
        tensors: list[Tensor] = []
        structure = flatten_tensors((args, dict(kwargs)), tensors)
        for leaf in leaves(structure):
            if _holds_tensors(leaf):
                raise self._refusal(
                    f"it is given a {type(leaf).__name__} that holds tensors",
                    "only tensors, and tuples, lists and dicts of them can be sliced",
                )
        num_samples, sliced = self._find_batch(tensors)
        size = -(-num_samples // self._num_slices)
        if size == num_samples:
            return run(*args, **kwargs)
        chunks = [torch.split(t, size) if s else (t,) for t, s in zip(tensors, sliced, strict=True)]
        slices = []
        for index in range(-(-num_samples // size)):
            slices.append([c[index] if s else c[0] for c, s in zip(chunks, sliced, strict=True)])
        attributes_before: dict[tuple[int, str], Tensor] | None = None
        kind = (self._module.training, *sliced)
        if kind not in self._not_shared_because:
            attributes_before = self._tensor_attributes()
            why_not_shared = ""
            for training in sorted({False, self._module.training}):  # in the current mode last
                why_not_shared = self._test(training, structure, tensors, sliced, size)
            self._not_shared_because[kind] = why_not_shared
        results: list[list[Tensor]] = [[] for _ in slices]
        structures: list[Any] = [None] * len(slices)
        if self._shares_ranges and self._may_share(self._not_shared_because[kind]):
            structures, results = self._run_shared(structure, slices)
            return self._join(structures, results, num_samples, size)
        call = SlicedCall(self._sums, self._unit_parameters)
        records = SlicedRecords(
            [min(size, num_samples - first) for first in range(0, num_samples, size)], self._refusal
        )
        for number in reversed(range(len(slices))):  # backward reaches them in order
            with call.slice(number), records.slice(number), restore_flat_weights(self._module):
                result = call_checked(run, self._name, structure, slices[number])
            structures[number] = flatten_tensors(result, results[number])
        records.join()
        if attributes_before is not None:
            self._check_attributes(attributes_before)
        return self._join(structures, results, num_samples, size)

    def _may_share(self, why_not: str) -> bool:
        """Return True if slices can share ranges of experts; warn otherwise."""
        if has_output_hooks(self._module):
            why_not = "hooks take tensors out of it (output_router_logits=True does that)"
        if why_not:
            self._owner.warn_once(
                "ranges",
                f"each slice of block {self._name!r} reads all ranges of experts, more than "
                f"planned, since slices cannot share them: {why_not}",
            )
        return not why_not

    def _run_shared(
        self, structure: Any, slices: list[list[Tensor]]
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Run slices that share ranges of experts; see `shared_ranges.py`."""

        def run(tensors: Sequence[Tensor]) -> Any:
            self._owner.inside += 1
            try:
                with restore_flat_weights(self._module):
                    return call_checked(self._forward, self._name, structure, tensors)
            finally:
                self._owner.inside -= 1

        call = SlicedCall(self._sums, self._unit_parameters, detached=True)
        shared = SharedSlices(
            self._hooks, self._unit, self._module, structure, run, flatten_tensors, call, slices,
            self._refusal, self._owner.count_recomputed,
        )  # fmt: skip
        results = shared.compute()
        return shared.structures, results

    def _check_attributes(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        for key, tensor in self._tensor_attributes().items():
            # Each call replaces an attribute that had a graph before, as a parametrized weight.
            had = key in before and before[key].grad_fn is not None
            if tensor.grad_fn is not None and not had:
                raise self._refusal(
                    f"it leaves a tensor in its attribute {key[1]!r}",
                    "that tensor belongs to one slice only",
                    "let it return the tensor, or set activations.slices=1",
                )

    def _tensor_attributes(self) -> dict[tuple[int, str], Tensor]:
        """Return tensors in attributes of the block's modules, or in lists and dicts there."""
        tensors: dict[tuple[int, str], Tensor] = {}
        for part in self._module.modules():
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    tensors[id(part), name] = value
                elif type(value) in (list, tuple):
                    inside = ((f"{name}[{i}]", item) for i, item in enumerate(value))
                    tensors |= {(id(part), key): x for key, x in inside if isinstance(x, Tensor)}
                elif type(value) in (dict, OrderedDict):
                    for key, item in value.items():
                        if isinstance(item, Tensor):
                            tensors[id(part), str(key)] = item
        return tensors

    def _find_batch(self, tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
        """Return the number of samples, and for each tensor whether it has one row per sample."""
        main = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if main is None:
            raise self._refusal(
                "it is given no tensor of (batch, ...)", "there is nothing to slice"
            )
        rows = main.shape[0]
        if rows > 1 and main.shape[1] == rows:
            for tensor in tensors:
                if tensor is not main and 0 < tensor.dim() < 3 and tensor.shape[0] == rows:
                    raise self._refusal(
                        f"a tensor of shape {tuple(tensor.shape)} may have a row for each sample "
                        "or for each position",
                        f"batch and sequence are both {rows} long",
                        "use another micro-batch size, or activations.slices=1",
                    )
        return rows, [t.dim() > 0 and t.shape[0] == rows for t in tensors]

    def _test(
        self, training: bool, structure: Any, tensors: Sequence[Tensor], sliced: Sequence[bool],
        size: int,
    ) -> str:  # fmt: skip
        """Compare two slices run together and separately; raise `TrainingError` if they differ.

        Without `training` there is no dropout. Returns why slices cannot share ranges of experts,
        or "".
        """

        def copies(rows: slice) -> list[Tensor]:  # the block may modify them in place
            pairs = zip(tensors, sliced, strict=True)
            return [t[rows].clone() if s else t.clone() for t, s in pairs]

        num_range_calls = self._expert_calls.num_range_calls
        rerun = RecomputeBuffers([*self._module.modules()])
        isolated, paused = self._isolated(training), self._expert_calls.paused()
        with torch.no_grad(), fork_rng(t.device for t in tensors), rerun.again(), isolated, paused:
            random_state = _random_state(tensors)
            runs = []
            for rows in (slice(0, size), slice(size, 2 * size), slice(0, 2 * size)):
                results: list[Tensor] = []
                try:
                    returned = call_checked(self._forward, self._name, structure, copies(rows))
                except InfinityError:
                    raise
                except Exception as error:
                    # Raises too if the samples are not the reason.
                    call_checked(self._forward, self._name, structure, copies(slice(None)))
                    raise self._refusal(
                        f"it raises for {rows.stop - rows.start} of the samples: {error}",
                        "an argument, or a size that the block stores, belongs to all samples",
                    ) from error
                runs.append((flatten_tensors(returned, results), results))
            random = not torch.equal(random_state, _random_state(tensors))
            num_calls = (self._expert_calls.num_range_calls - num_range_calls) // 3
            keeps_mode = (
                not self._shares_ranges
                or num_calls != 1
                or self._keeps_grad_mode(structure, copies(slice(0, size)))
            )
        (_, first), (_, second), (_, both) = runs
        same = self._equal_structures([structure for structure, _ in runs])
        for first_rows, second_rows, joint in zip(first, second, both, strict=False):
            if same and joint.dim() and not random:  # random results cannot be compared
                same = _are_close(torch.cat([first_rows, second_rows]), joint)
        if not same:
            raise self._refusal(
                f"{size} samples give other results in a larger batch",
                "its samples depend on one another, or its first dimension is not the batch",
            )
        if random:
            return "it draws random numbers (dropout)"
        if not keeps_mode:
            return "it sets the gradient mode around its call of experts"
        return "" if num_calls == 1 else f"it calls experts {num_calls} times"

    def _keeps_grad_mode(self, structure: Any, tensors: Sequence[Tensor]) -> bool:
        """Return True if a gradient mode that is set in the call of experts lasts to the end."""

        def compute(experts: Experts, call: RangeCall) -> Tensor:
            result = experts.compute(call)
            torch.set_grad_enabled(True)
            return result

        saved_unchanged = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.no_grad(), saved_unchanged, self._expert_calls.handled_by(compute):
            call_checked(self._forward, self._name, structure, tensors)
            return torch.is_grad_enabled()

    @contextmanager
    def _isolated(self, training: bool) -> Iterator[None]:
        """Disable hooks of other packages, and training mode unless `training`."""
        names = ("training", "_forward_hooks", "_forward_pre_hooks")
        attributes = [
            (part, {name: vars(part)[name] for name in names}) for part in self._module.modules()
        ]
        try:
            for part, values in attributes:
                part.training = part.training and training
                for name in names[1:]:  # those of infinity fetch weights
                    infinity_hooks = (
                        (k, h) for k, h in values[name].items() if is_infinity_hook(h)
                    )
                    vars(part)[name] = OrderedDict(infinity_hooks)
            yield
        finally:
            for part, values in attributes:
                vars(part).update(values)

    def _join(
        self, structures: Sequence[Any], results: Sequence[Sequence[Tensor]], rows: int, size: int
    ) -> Any:
        if not self._equal_structures(structures):
            raise self._refusal("its slices return different structures", "they cannot be joined")
        joined = []
        for tensors in zip(*results, strict=True):
            for index, tensor in enumerate(tensors):
                expected = min(size, rows - index * size)
                if tensor.dim() == 0 or tensor.shape[0] != expected:
                    raise self._refusal(
                        f"it returns a tensor of shape {tuple(tensor.shape)} for {expected} "
                        "samples",
                        "results of slices are joined sample by sample",
                    )
            joined.append(torch.cat(tensors))
        return unflatten_tensors(structures[0], joined)

    def _equal_structures(self, structures: Sequence[Any]) -> bool:
        try:
            return all(structure == structures[0] for structure in structures)
        except RuntimeError:  # from a comparison of tensors in an object
            raise self._refusal(
                "it returns an object that holds tensors",
                "only tensors, and tuples, lists and dicts of them can be joined",
            ) from None

    def _refusal(self, what: str, because: str, remedy: str | None = None) -> TrainingError:
        return TrainingError(
            f"block {self._name!r} cannot run in slices: {what}",
            because=because,
            remedy=remedy or "activations.slices=1, and smaller micro-batches if memory is short",
        )


def _are_close(separate: Tensor, joint: Tensor) -> bool:
    """Return True if results of two batch sizes are equal but for rounding."""
    if separate.shape != joint.shape:
        return False
    if not joint.is_floating_point():
        differing = int((separate != joint).sum())
        return differing <= _MAX_DIFFERING * joint.numel()
    largest = float(joint.abs().nan_to_num(0.0, 0.0).max()) if joint.numel() else 0.0
    tolerance = _TOLERANCE.get(joint.dtype, _COARSE) * largest
    return torch.allclose(separate, joint, rtol=0.0, atol=tolerance, equal_nan=True)


def _holds_tensors(value: Any) -> bool:
    """Return True if an object that `flatten_tensors` does not split holds tensors."""
    if isinstance(value, tuple | list):
        items: Any = value
    else:
        items = (
            value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
        )
    return any(isinstance(item, Tensor) for item in items)


def _random_state(tensors: Sequence[Tensor]) -> Tensor:
    """Return the states of the generators of the CPU and of the devices of `tensors`."""
    devices = {t.device for t in tensors if is_accelerator(t.device)}
    states = (module_of(d.type).get_rng_state(d) for d in sorted(devices, key=str))
    return torch.cat([torch.get_rng_state(), *states])
