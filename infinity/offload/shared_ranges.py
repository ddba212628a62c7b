"""Block calls in slices that share each fetched range of experts.

[Note: shared ranges]
A block calls its experts somewhere in its forward, and cannot be suspended there. So each slice
runs several times.

Forward:
1. Each slice runs without gradients up to its call of experts, where an exception ends the run.
2. Range by range, while the range is in its slot, the rows of all slices are computed.
3. Each slice runs again, and receives the result at its call.

Backward:
1. Steps 1 and 2 of the forward are repeated, as in a recomputation.
2. Each slice runs with gradients from the call on, which gives the gradient of the call's result.
3. Range by range, the last one first, the backward of all slices runs; the sum of their gradients
   (fp32, in the order of slices) goes to the gradient store.
4. Each slice runs with all gradients; those of its call are already known.

Each range is read once in forward and twice in backward, for any number of slices, and results are
those of slices that use the ranges separately. Between runs only the rows are stored that slices
send and receive.

Slices use ranges separately if the block draws random numbers (each run would draw others), if
hooks of other packages take tensors out of it (these would have no gradients), or if it calls
experts more than once (sums would be added in another order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from infinity.errors import TrainingError
from infinity.model.buffers import Rerun
from infinity.model.partitioner import Rows
from infinity.model.stacks import RangeCall, StackRange
from infinity.offload.expert_ranges import Experts
from infinity.offload.hooks import Hooks, is_ours
from infinity.offload.recorded_outputs import CAPTURING, active_records
from infinity.offload.slice_sums import SlicedCall

_SEVERAL_RUNS = "its slices pass ranges of experts together, and run several times for that"
# Gradients that a run records: none, those after the call of experts, or all.
_NONE, _BEHIND, _ALL = range(3)
Leaf = tuple[int, Tensor]  # (parameter, its rows as a leaf of the graph of one slice)


class _ReachedError(Exception):
    """Signal of a slice that reached its call of experts before the result was known."""


@dataclass(slots=True)
class _Known:
    """Calls of experts of all slices, and their results; lists have one item per slice."""

    experts: Experts
    ranges: list[Rows]
    calls: list[RangeCall]
    results: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)  # of the results
    sent: list[list[Tensor | None]] = field(default_factory=list)  # gradients of the rows sent


class _Linked(torch.autograd.Function):
    """Call of experts with a known result and known gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradients: list[Tensor | None], *rows: Any) -> Tensor:
        ctx.gradients = gradients
        return result.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients


class _Whole(torch.autograd.Function):
    """All slices of a block as one function of their tensors and of the block's parameters.

    Gradients of the parameters are returned as None: they are in the sums of the slices.
    """

    @staticmethod
    def forward(ctx: Any, shared: SharedSlices, num_inputs: int, *tensors: Tensor) -> Any:
        ctx.shared, ctx.count = shared, len(tensors)
        ctx.save_for_backward(*tensors[:num_inputs])
        return tuple(shared.forward())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.shared.backward(ctx.saved_tensors, gradients)
        return None, None, *found, *[None] * (ctx.count - len(found))


class SharedSlices:
    """One call of a block in slices that share each fetched range of experts.

    Args:
        hooks: Hooks of the engine.
        unit: Index of the block's unit.
        module: The block.
        given: Arguments of the block with placeholders for its tensors; see `take_apart`.
        run: Runs the block on the tensors of one slice and returns its result.
        flatten: Appends the tensors of a result to a list and returns the remaining structure.
        call: Provides the parameters that slices read.
        slices: Tensors of each slice.
        refusal: Returns the error for a block that cannot run in this way.
        count_again: Called for each slice that is recomputed.
    """

    def __init__(
        self,
        hooks: Hooks,
        unit: int,
        module: nn.Module,
        given: Any,
        run: Callable[[Sequence[Tensor]], Any],
        flatten: Callable[[Any, list[Tensor]], Any],
        call: SlicedCall,
        slices: list[list[Tensor]],
        refusal: Callable[..., TrainingError],
        count_again: Callable[[], None],
    ) -> None:
        self._hooks = hooks
        self._expert_calls = hooks.expert_calls
        self._before, self._after = hooks.around(unit)
        self._module = module
        self._given = given
        self._run = run
        self._flatten = flatten
        self._call = call
        self._slices: list[list[Tensor]] = slices
        self._counts = [len(tensors) for tensors in slices]
        self._refusal = refusal
        self._count_again = count_again
        self._parameters = hooks.trained_of(module)
        parts = [*module.modules()]
        self._reruns = [Rerun(parts) for _ in slices]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", hooks.device.torch_device.type}
        ]
        self._known: _Known | None = None
        self._pending: tuple[Experts, RangeCall] | None = None
        self._number = 0  # index of the slice that runs
        self._seen = 0  # calls of experts in this run
        self._wanted = _NONE
        self._start: Tensor | None = None  # leaf for gradients after the call: its result
        self.forms: list[Any] = [None] * len(slices)
        self._returned = [0] * len(slices)  # number of tensors of each result

    def compute(self) -> list[list[Tensor]]:
        """Return the tensors of each slice's result, and set `forms`."""
        inputs = [tensor for tensors in self._slices for tensor in tensors]
        parameters = self._parameters.values()
        apply: Any = _Whole.apply
        flat = iter(apply(self, len(inputs), *inputs, *parameters))
        return [[next(flat) for _ in range(count)] for count in self._returned]

    def forward(self) -> list[Tensor]:
        """Run all slices; return the tensors of all results without storing them."""
        results: list[list[Tensor]] = [[] for _ in self._slices]
        versions = [t._version for tensors in self._slices for t in tensors]
        with self._computing():
            self._known = self._pass_ranges()
            for number in reversed(range(len(self._slices))):
                with self._reruns[number].first():
                    result = self._attempt(number)
                self.forms[number] = self._flatten(result, results[number])
        if versions != [t._version for tensors in self._slices for t in tensors]:
            raise self._refusal("it changes its input in place", _SEVERAL_RUNS)
        self._slices, self._returned = [], [len(tensors) for tensors in results]
        return [tensor for tensors in results for tensor in tensors]

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all slices' tensors; add those of parameters to their sums."""
        tensors, wanted = iter(saved), iter(gradients)
        self._slices = [[next(tensors) for _ in range(count)] for count in self._counts]
        by_slice = [[next(wanted) for _ in range(count)] for count in self._returned]
        found: list[Tensor | None] = []
        with self._computing(), ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            self._before(self._module, (self._given, *saved), {})
            try:
                self._known = self._pass_ranges()
                self._known.gradients = [
                    self._gradient_of(number, given) for number, given in enumerate(by_slice)
                ]
                self._pass_back(self._known)
                for number, given in enumerate(by_slice):
                    found += self._full_backward(number, given)
            finally:
                self._after(self._module, saved, None)
        self._slices = []
        return found

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Disable gradients, and let `_reached` compute the calls of experts."""
        try:
            with torch.no_grad(), self._expert_calls.computed_by(self._reached):
                yield
        finally:
            self._known = self._pending = self._start = None
            self._wanted = _NONE

    # --- runs of one slice -----------------------------------------------------------------------

    def _attempt(self, number: int, *, taps: bool = True) -> Any:
        self._number, self._seen = number, 0
        if taps:
            with self._call.slice(number):
                result = self._run(self._slices[number])
        else:
            result = self._run(self._slices[number])
        if self._seen != 1:
            raise self._other_calls()
        return result

    def _reached(self, experts: Experts, call: RangeCall) -> Tensor:
        """Return the result of a slice's call of experts; `_ReachedError` if not known yet."""
        self._seen += 1
        if self._known is None:
            self._pending = experts, call
            raise _ReachedError
        # A checkpoint inside the block repeats the call in backward.
        if self._seen > 1 and self._wanted != _ALL:
            raise self._other_calls()
        known, number = self._known, self._number
        if known.experts is not experts or known.calls[number].counts != call.counts:
            raise self._refusal(
                "it sends other tokens to its experts when it runs again", _SEVERAL_RUNS
            )
        result = known.results[number]
        if self._wanted == _NONE:
            experts.count(call)
            return result
        if self._wanted == _BEHIND:
            torch.set_grad_enabled(True)  # until the end of this run
            self._start = result.detach().requires_grad_()
            return self._start
        if any(tensor.grad_fn is not None for tensor in _captured(call.compute)):
            raise self._refusal(
                "its function of a range of experts uses a tensor that needs a gradient",
                "gradients reach only the tensors that compute_ranges is given",
                "give it to compute_ranges as rows",
            )
        apply: Any = _Linked.apply
        linked: Tensor = apply(result, known.sent[number], *call.rows)
        return linked

    def _gradient_of(self, number: int, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the gradient of the result of a slice's call of experts."""
        self._wanted = _BEHIND
        with torch.no_grad(), self._reruns[number].again():
            found = self._attempt(number, taps=False)
        start, self._start = self._start, None
        pairs = self._with_gradients(found, gradients)
        if not pairs or start is None:
            return None
        outputs, given = [o for o, _ in pairs], [g for _, g in pairs]
        return torch.autograd.grad(outputs, start, given, allow_unused=True)[0]

    def _with_gradients(
        self, result: Any, gradients: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        outputs: list[Tensor] = []
        self._flatten(result, outputs)
        each = zip(outputs, gradients, strict=True)
        return [(output, gradient) for output, gradient in each if output.requires_grad]

    def _full_backward(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run a slice with all gradients, and its backward; return the gradients of its tensors."""
        given = self._slices[number]
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
        self._slices[number], self._wanted = leaves, _ALL
        self._count_again()
        with torch.enable_grad(), self._reruns[number].again():
            result = self._attempt(number)
        pairs = self._with_gradients(result, gradients)
        if missing := self._call.parameters - self._parameters.keys():
            raise self._refusal(
                f"it reads {len(missing)} parameters that are not its own",
                _SEVERAL_RUNS,
            )
        del result
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        self._slices[number] = []
        return [leaf.grad for leaf in leaves]

    # --- ranges of all slices --------------------------------------------------------------------

    def _pass_ranges(self) -> _Known:
        """Compute the results of all slices' calls of experts, range by range."""
        found: dict[int, tuple[Experts, RangeCall]] = {}
        for number in reversed(range(len(self._slices))):
            with suppress(_ReachedError), self._reruns[number].again():
                self._attempt(number)
            if self._pending is None or (found and self._pending[0] is not found[number + 1][0]):
                raise self._other_calls()
            found[number], self._pending = self._pending, None
        experts, calls = found[0][0], [found[number][1] for number in range(len(found))]
        ranges = experts.used([call.counts for call in calls])
        rows = [call.split(ranges) for call in calls]
        parts: list[list[Tensor]] = [[] for _ in calls]
        for index, one in enumerate(ranges):
            for number in _sending(one, ranges, calls):
                view = experts.view_of(one, calls[number])
                parts[number].append(calls[number].compute(view, *rows[number][index]))
        return _Known(experts, ranges, calls, [torch.cat(results) for results in parts])

    def _other_calls(self) -> TrainingError:
        return self._refusal("its slices call their experts in different ways", _SEVERAL_RUNS)

    def _pass_back(self, known: _Known) -> None:
        """Compute the gradients of each range, hand them over, and compute those of rows sent."""
        rows = [call.split(known.ranges) for call in known.calls]
        each = zip(known.gradients, known.results, known.calls, strict=True)
        split = [
            torch.split(
                torch.zeros_like(result) if gradient is None else gradient,
                [call.rows_of(one) for one in known.ranges],
            )
            for gradient, result, call in each
        ]
        known.gradients = []
        sent: list[list[Sequence[Tensor | None]]] = [[] for _ in known.calls]
        for index, one in reversed([*enumerate(known.ranges)]):
            self._hooks.expect(one.parameters)
            totals: dict[int, Tensor] = {}
            # In the order in which gradients of slices are summed.
            for number in _sending(one, known.ranges, known.calls):
                found = self._range_backward(
                    known.experts, one, known.calls[number], rows[number][index],
                    split[number][index], totals,
                )  # fmt: skip
                sent[number].insert(0, found)
            for parameter, total in totals.items():
                self._hooks.sums.summed.add(parameter)
                self._hooks.receive(parameter, total)
        known.sent = [
            [None if each[0] is None else torch.cat(each) for each in zip(*found, strict=True)]
            for found in sent
        ]
        known.calls = [replace(call, rows=()) for call in known.calls]

    def _range_backward(
        self,
        experts: Experts,
        one: Rows,
        call: RangeCall,
        rows: tuple[Tensor | None, ...],
        gradient: Tensor,
        totals: dict[int, Tensor],
    ) -> list[Tensor | None]:
        """Add one slice's gradients of a range to `totals`; return the gradients of its rows."""
        read: list[Leaf] = []

        def read_rows(name: str) -> Tensor:
            weights = experts.read(one, name)
            leaf = weights.detach().requires_grad_(weights.requires_grad)
            read.append((one.parameters[name], leaf))
            return leaf

        leaves = [None if t is None else t.detach() for t in rows]
        for leaf in leaves:
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_()
        with torch.enable_grad():
            view = StackRange(one.first, one.end, call.counts, read_rows)
            result = call.compute(view, *leaves)
        if result.requires_grad:
            torch.autograd.backward(result, gradient)
        for parameter, weights in read:
            if weights.grad is None:
                continue
            if parameter in totals:
                totals[parameter].add_(weights.grad)
            else:
                totals[parameter] = weights.grad.to(torch.float32, copy=True)
        return [None if leaf is None else leaf.grad for leaf in leaves]


def _sending(one: Rows, ranges: Sequence[Rows], calls: Sequence[RangeCall]) -> list[int]:
    """Return the slices that have rows for a range; slice 0 if only other ranks have any.

    A slice without any rows takes part in the first range.
    """
    first = one is ranges[0]
    sending = [call.rows_of(one) or (first and not any(call.counts)) for call in calls]
    return [number for number, sends in enumerate(sending) if sends] or [0]


def _captured(function: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function captures: bound arguments and closure cells."""
    values = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
    values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    yield from (value for value in values if isinstance(value, Tensor))
    if inner := getattr(function, "func", None):
        yield from _captured(inner)


def hands_out_tensors(module: nn.Module) -> bool:
    """Return True if hooks of other packages may keep tensors of the block's forward."""
    if any("hidden_states" not in key for key in active_records()):
        return True
    for part in module.modules():
        kinds = (part._forward_hooks, part._forward_pre_hooks) if part is not module else ()
        for hook in (h for hooks in kinds for h in hooks.values()):
            if not is_ours(hook) and getattr(hook, "__module__", "") != CAPTURING:
                return True
        if part is not module and (part._backward_hooks or part._backward_pre_hooks):
            return True
    return any(parameter._backward_hooks for parameter in module.parameters())
