"""How blocks run: recomputed in backward, in slices of their batch, or compiled.

[Note: wrappers of a block]
From outside in: the module's hooks (ours fetch the weights), slices, the checkpoint, the compiled
forward. All stand in the block's own `forward`, so users' hooks run once a call, and a block that
is called through its module, whoever calls it, is run like this. A recomputation does not pass
the module's hooks: it takes ours along, and so finds its weights; the buffers that it finds are as
they were, and what it writes to them is dropped (`Rerun`). Skipped are calls without
gradients, and what is recomputed anyway: inside a backward, under a checkpoint of the model's own
around the block, or inside another block.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.common.accelerators import is_accelerator, module_of
from infinity.errors import ConfigError, InfinityWarning, TrainingError, first_lines
from infinity.model.buffers import Rerun
from infinity.model.parameters import ParameterMap
from infinity.model.partitioner import UnitModules
from infinity.model.torch_private import inside_backward, same_flat_weights
from infinity.offload.hooks import Hooks, is_ours
from infinity.offload.shared_ranges import SharedSlices, hands_out_tensors
from infinity.offload.slice_sums import SlicedCall
from infinity.plan.activations import SavedPlan

# A block's forward, compiled by torch, while its weights come and go.
#
# [Note: compiled blocks]
# Hooks stay outside: what is compiled is the block's own `forward`. While it runs, the block's
# modules have plain dicts of parameters, which the compiler knows; the parameters in them are
# inputs of the graph, guarded by shape and dtype and not by address, so that weights in another
# slot are no reason to compile again, and blocks of one kind share one graph. Graphs of CUDA,
# which do hold addresses, are refused. A block with parameters of other units inside (experts,
# tied weights) cannot be run so, since these are fetched as they are reached for.


_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledForward:
    """`forward` of a module, compiled when it is first called; `options` are torch.compile's.

    `read` gives a parameter as a slice is to see it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        forward: Callable[..., Any],
        read: Callable[[nn.Parameter], Tensor],
        options: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._read = read
        self._owned = [
            (part, part._parameters, dict[str, Any](part._parameters))
            for part in module.modules()
            if isinstance(part._parameters, ParameterMap)
        ]
        self._run: Callable[..., Any] = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; raises `TrainingError` for what the compiler cannot take whole."""
        try:
            for part, owned, plain in self._owned:
                for name, parameter in owned.items():
                    plain[name] = None if parameter is None else self._read(parameter)
                part.__dict__["_parameters"] = plain
            return self._run(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ != "torch._dynamo.exc":
                raise
            raise TrainingError(
                f"block {self._name!r} cannot be compiled: {first_lines(error)}",
                because="the whole forward of a block must be one graph",
                remedy="leave compile out, or change the block as advised by the error above",
            ) from error
        finally:
            for part, owned, plain in self._owned:
                part.__dict__["_parameters"] = owned
                plain.update(owned)  # taps are views of slots


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `torch.compile`, with one graph a block; raises `ConfigError` for CUDA graphs."""
    chosen = {"fullgraph": True, **options}
    inner = chosen.get("options") or {}
    if chosen.get("mode") in _WITH_CUDA_GRAPHS or inner.get("triton.cudagraphs"):
        raise ConfigError(
            "blocks cannot be compiled with CUDA graphs",
            because="a graph replays addresses, and weights are in another place every time",
            remedy='use mode="default" or "max-autotune-no-cudagraphs"',
        )
    return chosen


# Arguments and results as tensors, and the shape that they stood in.


@dataclass(frozen=True, slots=True)
class _TensorPosition:
    """Where a tensor stood."""

    index: int


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The same with a place for every tensor, which are appended to `tensors`.

    Looks into plain tuples, lists and dicts; parameters, and objects of other classes, stay.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensors.append(value)
        return _TensorPosition(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(take_apart(item, tensors) for item in value)
    if type(value) is dict:
        return {key: take_apart(item, tensors) for key, item in value.items()}
    return value


def put_together(shape: Any, tensors: Sequence[Tensor]) -> Any:
    """What was taken apart, with these tensors."""
    if isinstance(shape, _TensorPosition):
        return tensors[shape.index]
    if type(shape) in (tuple, list):
        return type(shape)(put_together(item, tensors) for item in shape)
    if type(shape) is dict:
        return {key: put_together(item, tensors) for key, item in shape.items()}
    return shape


def leaves(shape: Any) -> Iterator[Any]:
    """What `take_apart` left as it is, outside of its lists and dicts."""
    if type(shape) in (tuple, list, dict):
        for item in shape.values() if type(shape) is dict else shape:
            yield from leaves(item)
    elif not isinstance(shape, _TensorPosition):
        yield shape


def is_as_given(value: Any, shape: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether what was put together is as it was: nobody put anything into its lists and dicts."""
    if isinstance(shape, _TensorPosition):
        return value is tensors[shape.index]
    if type(shape) is dict:
        same = value.keys() == shape.keys()
        return same and all(is_as_given(value[key], shape[key], tensors) for key in shape)
    if type(shape) in (tuple, list):
        each = zip(value, shape, strict=False)
        return len(value) == len(shape) and all(is_as_given(v, s, tensors) for v, s in each)
    return value is shape


def _run_once(
    function: Callable[..., Any], name: str, shape: Any, tensors: Sequence[Tensor]
) -> Any:
    """Call it with copies of the lists and dicts that it was given.

    Raises `TrainingError` if it changes them: the caller would not see it.
    """
    args, kwargs = put_together(shape, tensors)
    result = function(*args, **kwargs)
    if not is_as_given((args, kwargs), shape, tensors):
        raise TrainingError(
            f"block {name!r} changes a list or dict that it was given",
            because="a block that is recomputed, or runs in slices, would do it several times",
            remedy="return the added values, or leave out activations.checkpoint and "
            "activations.slices",
        )
    return result


# A block that runs its batch slice by slice, on weights that are fetched once for all.
#
# [Note: effects of slices]
# The batch is split along the first dimension, each slice runs alone, and results are put behind
# one another. Where no sample sees another, the numbers are those of plain torch run with the same
# slices, bit for bit. They are not those of the whole batch at once: matrix products of other
# shapes round differently. Gradients of slices are summed in fp32 (`slice_sums.py`). What cannot be
# sliced is refused by name; and the first call of each block is tried out (and the first that is
# cut in another way), on two slices together and on each of them alone, without dropout and with
# it, unseen by the hooks of others, which leaves no trace in its buffers. A slice is a call of its
# own: what a forward counts in a buffer is counted once a slice.


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# By how much rows of one block may differ between two shapes of a batch, relative to the largest.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 5e-2

Forward = Callable[..., Any]


class Slicer:
    """Slices the calls of one block."""

    def __init__(
        self,
        module: nn.Module,
        plain: Forward,
        unit: int,
        cut: UnitModules,
        count: int,
        owner: UnitForwards,
        hooks: Hooks,
    ) -> None:
        self._module = module
        self._own = frozenset(cut.parameters)
        self._unit = unit
        self._owner = owner
        self._hooks = hooks
        self._sums = hooks.sums
        self._plain = plain
        self._name = cut.name
        stacks = hooks.prefetcher.ledger.plan.shared_stacks
        self._shares = any(f"{path}.".startswith(f"{cut.name}.") for path in stacks)
        self._count = count
        # Why slices cannot pass ranges of experts together, by the kind of call; "" if they can.
        self._tried: dict[object, str] = {}
        for path, part in module.named_modules():
            if getattr(part, "batch_first", True) is False:
                raise self._refusal(
                    f"{path or 'it'} has batch_first=False", "its first dimension is not the batch"
                )

    def __call__(self, run: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`, slice by slice; raises `TrainingError` for what has no slices."""
        for path, part in self._module.named_modules():
            whole = part.training or getattr(part, "running_mean", None) is None
            if isinstance(part, _BATCH_NORMS) and whole:
                raise self._refusal(
                    f"{path or 'it'} is a {type(part).__name__} in training",
                    "it normalises over the batch",
                )
        tensors: list[Tensor] = []
        shape = take_apart((args, dict(kwargs)), tensors)
        for leaf in leaves(shape):
            if _holds_tensors(leaf):
                raise self._refusal(
                    f"it is given a {type(leaf).__name__} that holds tensors",
                    "only tensors, and tuples, lists and dicts of them can be cut",
                )
        rows, sliced = self._sliced(tensors)
        size = -(-rows // self._count)
        if size == rows:
            return run(*args, **kwargs)
        parts = [torch.split(t, size) if s else (t,) for t, s in zip(tensors, sliced, strict=True)]
        calls = []
        for index in range(-(-rows // size)):
            calls.append([p[index] if s else p[0] for p, s in zip(parts, sliced, strict=True)])
        before: dict[tuple[int, str], Tensor] | None = None
        if (kind := (self._module.training, *sliced)) not in self._tried:
            before = self._attributes()
            self._tried[kind] = self._try_out(shape, tensors, sliced, size)
        results: list[list[Tensor]] = [[] for _ in calls]
        forms: list[Any] = [None] * len(calls)
        if self._shares and self._may_share(self._tried[kind]):
            forms, results = self._shared(shape, calls)
            return self._joined(forms, results, rows, size)
        call = SlicedCall(self._sums, self._own)
        for number in reversed(range(len(calls))):  # backward finds them the other way round
            with call.slice(number), same_flat_weights(self._module):
                result = _run_once(run, self._name, shape, calls[number])
            forms[number] = take_apart(result, results[number])
        if before is not None:
            self._check_left(before)
        return self._joined(forms, results, rows, size)

    def _may_share(self, why_not: str) -> bool:
        """Return True if slices can pass ranges together; warn if they should and cannot."""
        if hands_out_tensors(self._module):
            why_not = "hooks take tensors out of it (output_router_logits=True does that)"
        if why_not:
            self._owner.warn_once(
                "ranges",
                f"slices of block {self._name!r} read each range of experts anew, more than was "
                f"planned, since they cannot run several times to share it: {why_not}",
            )
        return not why_not

    def _shared(
        self, shape: Any, calls: list[list[Tensor]]
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Run slices that pass ranges of experts together; see `shared_ranges.py`."""

        def run(tensors: Sequence[Tensor]) -> Any:
            self._owner.inside += 1
            try:
                with same_flat_weights(self._module):
                    return _run_once(self._plain, self._name, shape, tensors)
            finally:
                self._owner.inside -= 1

        call = SlicedCall(self._sums, self._own, apart=True)
        shared = SharedSlices(
            self._hooks, self._unit, self._module, shape, run, take_apart, call, calls,
            self._refusal, self._owner.count_again,
        )  # fmt: skip
        results = shared.compute()
        return shared.forms, results

    def _check_left(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        for place, tensor in self._attributes().items():
            # What had a graph before is made anew by each call, as a weight by its parametrization.
            had = place in before and before[place].grad_fn is not None
            if tensor.grad_fn is not None and not had:
                raise self._refusal(
                    f"it leaves a tensor in its attribute {place[1]!r}",
                    "the tensor there belongs to one slice only",
                    "let it return the tensor, or set activations.slices=1",
                )

    def _attributes(self) -> dict[tuple[int, str], Tensor]:
        """Tensors that the block's modules have as attributes, also in lists and dicts of these
        (as buffers are), by module and name.
        """
        found: dict[tuple[int, str], Tensor] = {}
        for part in self._module.modules():
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    found[id(part), name] = value
                elif type(value) in (list, tuple):
                    inside = ((f"{name}[{i}]", item) for i, item in enumerate(value))
                    found |= {(id(part), at): x for at, x in inside if isinstance(x, Tensor)}
                elif type(value) in (dict, OrderedDict):
                    found |= {(id(part), str(at)): x for at, x in value.items()
                              if isinstance(x, Tensor)}  # fmt: skip
        return found

    def _sliced(self, tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
        """How many samples there are, and which tensors have one row for each."""
        main = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if main is None:
            raise self._refusal("it is given no tensor of (batch, ...)", "there is nothing to cut")
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

    def _try_out(
        self, shape: Any, tensors: Sequence[Tensor], sliced: Sequence[bool], size: int
    ) -> str:
        """Raise if slices compute something else beside one another than alone: as in evaluation,
        where dropout hides nothing, and as it is.

        Returns why slices cannot pass ranges of experts together, or "".
        """
        found = ""
        for training in sorted({False, self._module.training}):
            found = self._try_out_as(training, shape, tensors, sliced, size)
        return found

    def _try_out_as(
        self, training: bool, shape: Any, tensors: Sequence[Tensor], sliced: Sequence[bool],
        size: int,
    ) -> str:  # fmt: skip
        before = self._hooks.expert_calls.num_ranged
        gpus = {t.get_device() for t in tensors if t.is_cuda}
        runs, alone = Rerun([*self._module.modules()]), self._undisturbed(training)
        uncounted = self._hooks.expert_calls.paused()
        with torch.no_grad(), torch.random.fork_rng(gpus), runs.again(), alone, uncounted:
            drawn = _random_state(tensors)
            first, second, both = (
                self._floats_of(
                    shape,  # copies: a block may change them in place
                    [
                        t[rows].clone() if s else t.clone()
                        for t, s in zip(tensors, sliced, strict=True)
                    ],
                )
                for rows in (slice(0, size), slice(size, 2 * size), slice(0, 2 * size))
            )
            random = not torch.equal(drawn, _random_state(tensors))
        for one, two, other in zip(first, second, both, strict=True):
            largest = float(other.abs().nan_to_num(0.0, 0.0).max()) if other.numel() else 0.0
            apart = torch.cat([one, two])
            same = apart.shape == other.shape and torch.allclose(
                apart, other, rtol=0.0, atol=_TOLERANCE.get(one.dtype, _COARSE) * largest,
                equal_nan=True,
            )  # fmt: skip
            if not same and not random:  # of a function that draws, whatever it is told
                raise self._refusal(
                    f"{size} samples give other results in a larger batch",
                    "its samples see one another, or its first dimension is not the batch",
                )
        num_calls = (self._hooks.expert_calls.num_ranged - before) // 3
        if random:
            return "it draws random numbers (dropout)"
        return "" if num_calls == 1 else f"it calls experts {num_calls} times"

    @contextmanager
    def _undisturbed(self, training: bool) -> Iterator[None]:
        """Unseen by the hooks of others, and as in evaluation if not `training`."""
        names = ("training", "_forward_hooks", "_forward_pre_hooks")
        before = [
            (part, {name: vars(part)[name] for name in names}) for part in self._module.modules()
        ]
        try:
            for part, own in before:
                part.training = part.training and training
                for name in names[1:]:  # ours fetch weights
                    kept = ((k, h) for k, h in own[name].items() if is_ours(h))
                    vars(part)[name] = OrderedDict(kept)
            yield
        finally:
            for part, own in before:
                vars(part).update(own)

    def _floats_of(self, shape: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        take_apart(_run_once(self._plain, self._name, shape, tensors), found)
        return [t for t in found if t.is_floating_point() and t.dim() > 0]

    def _joined(
        self, forms: Sequence[Any], results: Sequence[Sequence[Tensor]], rows: int, size: int
    ) -> Any:
        try:
            equal = all(form == forms[0] for form in forms)
        except RuntimeError:  # of tensors inside
            raise self._refusal(
                "it returns an object that holds tensors",
                "only tensors, and tuples, lists and dicts of them can be joined",
            ) from None
        if not equal:
            raise self._refusal("its slices return different things", "they cannot be joined")
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
        return put_together(forms[0], joined)

    def _refusal(self, what: str, because: str, remedy: str | None = None) -> TrainingError:
        return TrainingError(
            f"block {self._name!r} cannot run in slices: {what}",
            because=because,
            remedy=remedy or "activations.slices=1, and smaller micro-batches if memory is short",
        )


def _holds_tensors(value: Any) -> bool:
    """Of an object that `take_apart` leaves whole."""
    if isinstance(value, tuple | list):
        parts: Any = value
    else:
        parts = (
            value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
        )
    return any(isinstance(part, Tensor) for part in parts)


def _random_state(tensors: Sequence[Tensor]) -> Tensor:
    """Return the states of the generators of the CPU and of the devices of `tensors`."""
    devices = {t.device for t in tensors if is_accelerator(t.device)}
    states = (module_of(d.type).get_rng_state(d) for d in sorted(devices, key=str))
    return torch.cat([torch.get_rng_state(), *states])


# What Hugging Face's blocks call a cache of keys and values; a block that runs twice, or in
# parts, would write to it twice.
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")
_CACHE_FLAGS = ("use_cache",)


class UnitForwards:
    """Replaces the `forward` of every block where there is a reason; `remove` gives them back.

    `recomputed` counts runs of blocks in backward since the start, slices each by themselves.
    """

    def __init__(
        self,
        hooks: Hooks,
        cuts: Sequence[UnitModules],
        parameters: Sequence[nn.Parameter],
        plan: SavedPlan,
    ) -> None:
        self.recomputed = 0
        self._said: set[str] = set()  # of what was warned
        self.inside = 0  # blocks whose recomputable forward runs
        self._hooks = hooks
        self._cuts = cuts
        self._parameters = parameters
        self._plan = plan
        self._blocks: list[_Block] = []
        if plan.recompute or plan.slices > 1:
            self._replace()

    def _replace(self) -> None:
        blocks = 0
        for unit, cut in enumerate(self._cuts):
            again = self._plan.recompute == "all" or blocks < self._plan.recompute
            blocks += cut.is_block
            own = {id(self._parameters[index]) for index in cut.parameters}
            for module in blocks_of(cut):
                alone = own.issuperset(id(p) for p in module.parameters())
                self._blocks.append(
                    _Block(self, self._hooks, self._plan, module, unit, cut, alone, again)
                )

    def compile_units(self, **options: Any) -> None:
        """Compile every block's forward, when it is first called in training mode.

        `options` are those of `torch.compile`; a block is one graph unless `fullgraph` is false.
        Raises `ConfigError` where there is nothing to compile, or for CUDA graphs.
        """
        chosen = check_options(options)
        if not self._blocks:
            self._replace()
        alone = [block for block in self._blocks if block.alone]
        if not alone:
            raise ConfigError(
                "there is no block that can be compiled",
                because="they hold experts, which are units of their own, or weights of others"
                if self._blocks
                else "the model has no blocks that repeat",
                remedy="leave compile out, or cut it yourself: initialize(units=[...])",
            )
        self._hooks.saved.hide_from_compiler()
        for block in alone:
            block.compile(chosen)

    @property
    def num_compiled(self) -> int:
        """Blocks that are, or will be, compiled."""
        return sum(block.compiled is not None for block in self._blocks)

    def count_again(self) -> None:
        """Count a slice that is computed again."""
        self.recomputed += 1

    def warn_once(self, of: str, text: str) -> None:
        """Warn, the first time `of` this."""
        if of not in self._said:
            self._said.add(of)
            warnings.warn(text, InfinityWarning, stacklevel=3)

    def remove(self) -> None:
        """Every block has its own forward again."""
        while self._blocks:
            self._blocks[-1].remove()
            self._blocks.pop()


class _Block:
    """One block, and how it runs now."""

    def __init__(
        self,
        owner: UnitForwards,
        hooks: Hooks,
        plan: SavedPlan,
        module: nn.Module,
        unit: int,
        cut: UnitModules,
        alone: bool,
        again: bool,
    ) -> None:
        self.alone = alone  # no other unit has parameters inside
        self.compiled: CompiledForward | None = None
        self._owner = owner
        self._saved = hooks.saved
        self._sums = hooks.sums
        self._recomputes = again
        self._name = cut.name
        self._read = hooks.read
        self._module = module
        self._before, self._after = hooks.around(unit)
        self._own: Callable[..., Any] = module.forward
        self._slicer = None
        if plan.slices > 1:
            self._slicer = Slicer(module, self._own, unit, cut, plan.slices, owner, hooks)
        self._replaced = module.__dict__.get("forward")

        @functools.wraps(self._own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        module.__dict__["forward"] = forward

    def compile(self, options: Mapping[str, Any]) -> None:
        """From the next call on."""
        self.compiled = CompiledForward(self._module, self._name, self._own, self._read, options)

    def remove(self) -> None:
        """The module's own forward again."""
        self._module.__dict__.pop("forward", None)
        if self._replaced is not None:
            self._module.__dict__["forward"] = self._replaced

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = inside_backward() or self._saved.under_checkpoint
        if not torch.is_grad_enabled() or again or self._sums.call is not None:
            if again and self._slicer is not None and not self._owner.inside:
                self._owner.warn_once(
                    "left whole",
                    f"block {self._name!r} does not run in slices: the model checkpoints it, and "
                    "would keep all slices' tensors while it computes it again; turn that off, and "
                    "set activations.checkpoint: units, which does it slice by slice",
                )
            return self._plain(*args, **kwargs)
        if self._recomputes or self._slicer is not None:
            kwargs = self._without_caches(kwargs)
        if self._slicer is not None:
            return self._slicer(self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._recomputes:
            parts = [*self._module.modules()]  # now: parts without parameters may have come
            run = functools.partial(self._recomputable, Rerun(parts))
            return checkpointed(run, self._name, args, kwargs)
        return self._plain(*args, **kwargs)

    def _recomputable(self, rerun: Rerun, *args: Any, **kwargs: Any) -> Any:
        again, pushed = inside_backward(), False
        if again:
            self._owner.recomputed += 1
            self._before(self._module, args, kwargs)
        else:  # the module's hooks have run
            pushed = self._saved.push()
        self._owner.inside += 1
        try:
            with rerun.again() if again else rerun.first():
                return self._plain(*args, **kwargs)
        finally:
            self._owner.inside -= 1
            if again:
                self._after(self._module, args, None)
            elif pushed:
                self._saved.pop()

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None and self._module.training:
            return self.compiled(*args, **kwargs)
        return self._own(*args, **kwargs)

    def _without_caches(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Without what a second run would write to again; raises `TrainingError` if it matters."""
        kept = dict(kwargs)
        for key in _CACHES:
            cache = kept.get(key)
            if cache is None:
                continue
            length = getattr(cache, "get_seq_length", None)
            if not callable(length) or length() > 0:
                raise TrainingError(
                    f"block {self._name!r} was given {key} that is not empty, to train with",
                    because="a block that is recomputed, or runs in slices, cannot have a cache",
                    remedy="train without a cache (use_cache=False), or without "
                    "activations.checkpoint and activations.slices",
                )
            kept[key] = None
            self._owner.warn_once(
                "cache",
                "blocks that are recomputed or sliced are not given a cache of keys and values "
                "while they train; pass use_cache=False to silence this",
            )
        for key in _CACHE_FLAGS:
            if kept.get(key) is True:
                kept[key] = False
        return kept


def blocks_of(cut: UnitModules) -> list[nn.Module]:
    """The modules of a unit that are worth running apart: not single layers of torch's."""
    if not cut.is_block:
        return []
    return [
        module
        for module in cut.modules
        if any(True for _ in module.children())
        or not type(module).__module__.startswith("torch.nn.modules.")
    ]


def checkpointed(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`function(*args, **kwargs)`, run again in backward; all its tensors are inputs.

    torch's checkpoint saves positional tensors only; here those in kwargs, tuples, lists and
    dicts are saved like them.
    """
    tensors: list[Tensor] = []
    shape = take_apart((args, dict(kwargs)), tensors)

    def run(*given: Tensor) -> Any:
        return _run_once(function, name, shape, given)

    return checkpoint(run, *tensors, use_reentrant=False)
