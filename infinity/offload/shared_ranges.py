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
hooks of other packages take tensors out of it (these would have no gradients), if it calls experts
more than once (sums would be added in another order), or if it sets the gradient mode around the
call (step 2 of the backward would record nothing after it).
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
from infinity.model.buffers import RecomputeBuffers
from infinity.model.partitioner import Rows
from infinity.model.stacks import RangeCall, StackRange
from infinity.offload.expert_ranges import Experts
from infinity.offload.hooks import Hooks, is_infinity_hook
from infinity.offload.recorded_outputs import CAPTURING, active_records
from infinity.offload.slice_sums import SlicedCall

_SEVERAL_RUNS = "its slices share ranges of experts, and run several times for that"
# Gradients that a run records: none, those after the call of experts, or all.
_NO_GRADIENTS, _AFTER_EXPERTS, _ALL_GRADIENTS = range(3)
Leaf = tuple[int, Tensor]  # (parameter, its rows as a leaf of the graph of one slice)


class _ReachedError(Exception):
    """Signal of a slice that reached its call of experts before the result was known."""


@dataclass(slots=True)
class _ComputedCalls:
    """Calls of experts of all slices, and their results; lists have one item per slice."""

    experts: Experts
    ranges: list[Rows]
    calls: list[RangeCall]
    results: list[Tensor]
    result_gradients: list[Tensor | None] = field(default_factory=list)  # of the results
    row_gradients: list[list[Tensor | None]] = field(default_factory=list)  # of rows sent


class _CallWithResult(torch.autograd.Function):
    """Call of experts with a known result and known gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradients: list[Tensor | None], *rows: Any) -> Tensor:
        ctx.gradients = gradients
        return result.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradients


class _AllSlices(torch.autograd.Function):
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
        input_gradients = ctx.shared.backward(ctx.saved_tensors, gradients)
        return None, None, *input_gradients, *[None] * (ctx.count - len(input_gradients))


class SharedSlices:
    """One call of a block in slices that share each fetched range of experts.

    Args:
        hooks: Hooks of the engine.
        unit: Index of the block's unit.
        module: The block.
        structure: Arguments of the block with placeholders for its tensors; see `flatten_tensors`.
        run: Runs the block on the tensors of one slice and returns its result.
        flatten: Appends the tensors of a result to a list and returns the remaining structure.
        call: Provides the parameters that slices read.
        slices: Tensors of each slice.
        refusal: Returns the error for a block that cannot run in this way.
        count_recomputed: Called for each slice that is recomputed.
    """

    def __init__(
        self,
        hooks: Hooks,
        unit: int,
        module: nn.Module,
        structure: Any,
        run: Callable[[Sequence[Tensor]], Any],
        flatten: Callable[[Any, list[Tensor]], Any],
        call: SlicedCall,
        slices: list[list[Tensor]],
        refusal: Callable[..., TrainingError],
        count_recomputed: Callable[[], None],
    ) -> None:
        self._hooks = hooks
        self._expert_calls = hooks.expert_calls
        self._before, self._after = hooks.around(unit)
        self._module = module
        self._structure = structure
        self._run = run
        self._flatten = flatten
        self._call = call
        self._slices: list[list[Tensor]] = slices
        self._num_inputs = [len(tensors) for tensors in slices]
        self._refusal = refusal
        self._count_again = count_recomputed
        self._parameters = hooks.trainable_parameters(module)
        modules = [*module.modules()]
        self._reruns = [RecomputeBuffers(modules) for _ in slices]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", hooks.device.torch_device.type}
        ]
        self._computed: _ComputedCalls | None = None
        self._pending: tuple[Experts, RangeCall] | None = None
        self._number = 0  # index of the slice that runs
        self._num_calls = 0  # calls of experts in this run
        self._mode = _NO_GRADIENTS
        self._result_leaf: Tensor | None = None  # leaf for gradients after the call: its result
        self.structures: list[Any] = [None] * len(slices)
        self._num_outputs = [0] * len(slices)  # number of tensors of each result

    def compute(self) -> list[list[Tensor]]:
        """Return the tensors of each slice's result, and set `structures`."""
        inputs = [tensor for tensors in self._slices for tensor in tensors]
        parameters = self._parameters.values()
        apply: Any = _AllSlices.apply
        flat = iter(apply(self, len(inputs), *inputs, *parameters))
        return [[next(flat) for _ in range(count)] for count in self._num_outputs]

    def forward(self) -> list[Tensor]:
        """Run all slices; return the tensors of all results without storing them."""
        results: list[list[Tensor]] = [[] for _ in self._slices]
        versions = [t._version for tensors in self._slices for t in tensors]
        with self._computing():
            self._computed = self._compute_ranges()
            for number in reversed(range(len(self._slices))):
                with self._reruns[number].first():
                    result = self._run_slice(number)
                self.structures[number] = self._flatten(result, results[number])
        if versions != [t._version for tensors in self._slices for t in tensors]:
            raise self._refusal("it changes its input in place", _SEVERAL_RUNS)
        self._slices = []
        self._num_outputs = [len(tensors) for tensors in results]
        return [tensor for tensors in results for tensor in tensors]

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all slices' tensors; add those of parameters to their sums."""
        tensors = iter(saved)
        output_gradients = iter(gradients)
        self._slices = [[next(tensors) for _ in range(count)] for count in self._num_inputs]
        gradients_by_slice = [
            [next(output_gradients) for _ in range(count)] for count in self._num_outputs
        ]
        input_gradients: list[Tensor | None] = []
        with self._computing(), ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            self._before(self._module, (self._structure, *saved), {})
            try:
                self._computed = self._compute_ranges()
                self._computed.result_gradients = [
                    self._result_gradient(number, slice_gradients)
                    for number, slice_gradients in enumerate(gradients_by_slice)
                ]
                self._backward_of_ranges(self._computed)
                for number, slice_gradients in enumerate(gradients_by_slice):
                    input_gradients += self._backward_of_slice(number, slice_gradients)
            finally:
                self._after(self._module, saved, None)
        self._slices = []
        return input_gradients

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Disable gradients, and let `_compute_experts` compute the calls of experts."""
        try:
            with torch.no_grad(), self._expert_calls.handled_by(self._compute_experts):
                yield
        finally:
            self._computed = self._pending = self._result_leaf = None
            self._mode = _NO_GRADIENTS

    # --- runs of one slice -----------------------------------------------------------------------

    def _run_slice(self, number: int, *, taps: bool = True) -> Any:
        self._number, self._num_calls = number, 0
        if taps:
            with self._call.slice(number):
                result = self._run(self._slices[number])
        else:
            result = self._run(self._slices[number])
        if self._num_calls != 1:
            raise self._calls_differ_error()
        return result

    def _compute_experts(self, experts: Experts, call: RangeCall) -> Tensor:
        """Return the result of a slice's call of experts; `_ReachedError` if not computed yet."""
        self._num_calls += 1
        if self._computed is None:
            self._pending = experts, call
            raise _ReachedError
        # A checkpoint inside the block repeats the call in backward.
        if self._num_calls > 1 and self._mode != _ALL_GRADIENTS:
            raise self._calls_differ_error()
        computed, number = self._computed, self._number
        if computed.experts is not experts or computed.calls[number].counts != call.counts:
            raise self._refusal(
                "it sends other tokens to its experts when it runs again", _SEVERAL_RUNS
            )
        result = computed.results[number]
        if self._mode == _NO_GRADIENTS:
            experts.count(call)
            return result
        if self._mode == _AFTER_EXPERTS:
            torch.set_grad_enabled(True)  # until the end of this run
            self._result_leaf = result.detach().requires_grad_()
            return self._result_leaf
        if any(tensor.grad_fn is not None for tensor in _captured_tensors(call.compute)):
            raise self._refusal(
                "its function of a range of experts uses a tensor that needs a gradient",
                "gradients reach only the tensors that compute_ranges is given",
                "give it to compute_ranges as rows",
            )
        apply: Any = _CallWithResult.apply
        output: Tensor = apply(result, computed.row_gradients[number], *call.rows)
        return output

    def _result_gradient(self, number: int, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the gradient of the result of a slice's call of experts."""
        self._mode = _AFTER_EXPERTS
        with torch.no_grad(), self._reruns[number].again():
            result = self._run_slice(number, taps=False)
            if not torch.is_grad_enabled():
                raise self._refusal(
                    "it sets the gradient mode around its call of experts", _SEVERAL_RUNS
                )
        leaf, self._result_leaf = self._result_leaf, None
        pairs = self._differentiable_outputs(result, gradients)
        if not pairs or leaf is None:
            return None
        outputs = [output for output, _ in pairs]
        output_gradients = [gradient for _, gradient in pairs]
        return torch.autograd.grad(outputs, leaf, output_gradients, allow_unused=True)[0]

    def _differentiable_outputs(
        self, result: Any, gradients: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        outputs: list[Tensor] = []
        self._flatten(result, outputs)
        pairs = zip(outputs, gradients, strict=True)
        return [(output, gradient) for output, gradient in pairs if output.requires_grad]

    def _backward_of_slice(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Run a slice with all gradients, and its backward; return the gradients of its tensors."""
        tensors = self._slices[number]
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._slices[number], self._mode = leaves, _ALL_GRADIENTS
        self._count_again()
        with torch.enable_grad(), self._reruns[number].again():
            result = self._run_slice(number)
        pairs = self._differentiable_outputs(result, gradients)
        if missing := self._call.parameters - self._parameters.keys():
            raise self._refusal(
                f"it reads {len(missing)} parameters of other modules",
                _SEVERAL_RUNS,
            )
        del result
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        self._slices[number] = []
        return [leaf.grad for leaf in leaves]

    # --- ranges of all slices --------------------------------------------------------------------

    def _compute_ranges(self) -> _ComputedCalls:
        """Compute the results of all slices' calls of experts, range by range."""
        reached: dict[int, tuple[Experts, RangeCall]] = {}
        for number in reversed(range(len(self._slices))):
            with suppress(_ReachedError), self._reruns[number].again():
                self._run_slice(number)
            if self._pending is None or (
                reached and self._pending[0] is not reached[number + 1][0]
            ):
                raise self._calls_differ_error()
            reached[number] = self._pending
            self._pending = None
        experts = reached[0][0]
        calls = [reached[number][1] for number in range(len(reached))]
        ranges = experts.used([call.counts for call in calls])
        rows = [call.split(ranges) for call in calls]
        results: list[list[Tensor]] = [[] for _ in calls]
        for index, expert_range in enumerate(ranges):
            for number in _slices_with_rows(expert_range, ranges, calls):
                view = experts.view_of(expert_range, calls[number])
                results[number].append(calls[number].compute(view, *rows[number][index]))
        return _ComputedCalls(experts, ranges, calls, [torch.cat(parts) for parts in results])

    def _calls_differ_error(self) -> TrainingError:
        return self._refusal("its slices call their experts in different ways", _SEVERAL_RUNS)

    def _backward_of_ranges(self, computed: _ComputedCalls) -> None:
        """Compute the gradients of each range, hand them over, and compute those of rows sent."""
        rows = [call.split(computed.ranges) for call in computed.calls]
        entries = zip(computed.result_gradients, computed.results, computed.calls, strict=True)
        gradients = [
            torch.split(
                torch.zeros_like(result) if gradient is None else gradient,
                [call.rows_of(expert_range) for expert_range in computed.ranges],
            )
            for gradient, result, call in entries
        ]
        computed.result_gradients = []
        row_gradients_by_slice: list[list[Sequence[Tensor | None]]] = [[] for _ in computed.calls]
        for index, expert_range in reversed([*enumerate(computed.ranges)]):
            self._hooks.expect(expert_range.parameters)
            totals: dict[int, Tensor] = {}
            # In the order in which gradients of slices are summed.
            for number in _slices_with_rows(expert_range, computed.ranges, computed.calls):
                row_gradients = self._backward_of_range(
                    computed.experts, expert_range, computed.calls[number], rows[number][index],
                    gradients[number][index], totals,
                )  # fmt: skip
                row_gradients_by_slice[number].insert(0, row_gradients)
            for parameter, total in totals.items():
                self._hooks.sums.summed.add(parameter)
                self._hooks.receive(parameter, total)
        computed.row_gradients = [
            [None if each[0] is None else torch.cat(each) for each in zip(*by_range, strict=True)]
            for by_range in row_gradients_by_slice
        ]
        computed.calls = [replace(call, rows=()) for call in computed.calls]

    def _backward_of_range(
        self,
        experts: Experts,
        expert_range: Rows,
        call: RangeCall,
        rows: tuple[Tensor | None, ...],
        gradient: Tensor,
        totals: dict[int, Tensor],
    ) -> list[Tensor | None]:
        """Add one slice's gradients of a range to `totals`; return the gradients of its rows."""
        leaves_read: list[Leaf] = []

        def read_rows(name: str) -> Tensor:
            weights = experts.read(expert_range, name)
            leaf = weights.detach().requires_grad_(weights.requires_grad)
            leaves_read.append((expert_range.parameters[name], leaf))
            return leaf

        leaves = [None if t is None else t.detach() for t in rows]
        for leaf in leaves:
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_()
        with torch.enable_grad():
            view = StackRange(expert_range.first, expert_range.end, call.counts, read_rows)
            result = call.compute(view, *leaves)
        if result.requires_grad:
            torch.autograd.backward(result, gradient)
        for parameter, weights in leaves_read:
            if weights.grad is None:
                continue
            if parameter in totals:
                totals[parameter].add_(weights.grad)
            else:
                totals[parameter] = weights.grad.to(torch.float32, copy=True)
        return [None if leaf is None else leaf.grad for leaf in leaves]


def _slices_with_rows(
    expert_range: Rows, ranges: Sequence[Rows], calls: Sequence[RangeCall]
) -> list[int]:
    """Return the slices that have rows for a range; slice 0 if only other ranks have any.

    A slice without any rows takes part in the first range.
    """
    is_first = expert_range is ranges[0]
    has_rows = [call.rows_of(expert_range) or (is_first and not any(call.counts)) for call in calls]
    return [number for number, has in enumerate(has_rows) if has] or [0]


def _captured_tensors(function: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function captures: bound arguments and closure cells."""
    values = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
    values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    yield from (value for value in values if isinstance(value, Tensor))
    if inner := getattr(function, "func", None):
        yield from _captured_tensors(inner)


def has_output_hooks(module: nn.Module) -> bool:
    """Return True if hooks of other packages may keep tensors of the block's forward."""
    if any("hidden_states" not in key for key in active_records()):
        return True
    for child in module.modules():
        hook_dicts = (child._forward_hooks, child._forward_pre_hooks) if child is not module else ()
        for hook in (h for hooks in hook_dicts for h in hooks.values()):
            if not is_infinity_hook(hook) and getattr(hook, "__module__", "") != CAPTURING:
                return True
        if child is not module and (child._backward_hooks or child._backward_pre_hooks):
            return True
    return any(parameter._backward_hooks for parameter in module.parameters())
