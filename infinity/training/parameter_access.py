"""Full values of parameters: read, edited and written back, from and to any tier.

One unit is cached at a time, so that walking through a model in the order of
`ParameterValues.place` reads and writes each unit once. Residuals (or the fp32 masters of fp16
weights) are read only for masters and for edits. Nothing here is fast; all of it is exact.

Of several ranks all must call, and get whole values; of what they write each keeps its own shard.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from infinity.checkpoint.plain import decode, encode
from infinity.errors import ConfigError, InfinityWarning, ResidencyError, TransferError
from infinity.model.parameters import ParameterBinding
from infinity.model.quantised import dequantise, quantise_exactly
from infinity.offload.call_guard import CallGuard, engine_call
from infinity.offload.hooks import Hooks
from infinity.offload.prefetch import Prefetcher
from infinity.offload.state import StateStore
from infinity.offload.window import AccumulationWindow
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import KIND_DTYPES, Moment, moment_in
from infinity.optim.update import KernelUpdater, Updater
from infinity.plan.layout import Segment, UnitLayout
from infinity.plan.plan import Plan
from infinity.types import FrozenFormat, Kind

# What the optimizer keeps of a parameter, read from and written to any tier.


def read_state(
    store: StateStore, updater: Updater, parameter: int, rule_params: Any, steps: Sequence[int]
) -> dict[str, Any]:
    """The state of one parameter, by torch's names; moments as fresh fp32 tensors of its shape.

    No update may be owed; all ranks call. `steps` counts updates by parameter index. Raises
    `ConfigError` if the parameter has no state.
    """
    states: list[dict[str, Any]] = []
    for layout in store.plan.units:
        for segment in layout.segments:
            if parameter in (segment.parameter, segment.origin) and segment.trained:
                kinds = filter(segment.keeps, store.plan.precision.moment_kinds)
                moments = [_moment(store, layout, segment, kind) for kind in kinds]
                index, shape = segment.parameter, segment.shape
                share_kept(store, updater, {index})
                states.append(updater.state_of(index, rule_params, moments, shape, steps[index]))
    if len(states) > 1:  # of rows of a stack
        return {
            name: torch.cat([state[name] for state in states])
            if isinstance(value, Tensor) and value.dim()
            else value
            for name, value in states[0].items()
        }
    if states:
        return states[0]
    raise ConfigError("this parameter is frozen and has no optimizer state")


def share_kept(store: StateStore, updater: Updater, parameters: Collection[int]) -> None:
    """Of several ranks: let all know what the updater keeps of these parameters beside moments.

    A rank knows it of those that it updates a part of; whoever has the last part tells.
    """
    ranks, plan = store.ranks, store.plan
    if ranks.count == 1 or _is_ours(updater):  # ours counts steps, of all parameters
        return
    doing = "tells what the optimizer keeps"
    own = {s.parameter for unit in plan.own for s in unit.trained_segments}.intersection(parameters)
    kept = updater.kept()
    with ranks.propagate_errors(doing):
        encoded = encode({i: kept[i] for i in own & kept.keys()}, "the optimizer's state")
    ranks.synchronize(doing)
    for theirs in ranks.all_gather_object(encoded):  # in the order of parts
        kept |= decode(theirs)
    updater.keep(kept)


def _moment(store: StateStore, layout: UnitLayout, segment: Segment, kind: Kind) -> Moment:
    """A copy of the whole moment of one parameter, its chunks put together."""
    number_format = store.plan.precision.format_of(kind)
    values, scales = [], []
    for part in _parts_of(store.plan, layout, segment, kind, store.read(layout.index, kind)):
        values.append(part.values)
        scales += [] if part.scales is None else [part.scales]
    if not values:
        return Moment.zeros(0, number_format)
    return Moment(torch.cat(values), torch.cat(scales) if scales else None, number_format)


def _parts_of(
    plan: Plan, layout: UnitLayout, segment: Segment, kind: Kind, flat: Tensor
) -> Iterator[Moment]:
    """What the chunks of all shards hold of a parameter; `flat` is what `StateStore.read` gave."""
    for rank, own in enumerate(flat.view(layout.shards, -1)):
        shard = layout.of_shard(rank)
        for found in (s for s in shard.segments if s.parameter == segment.parameter):
            for index, (start, count) in enumerate(shard.chunks(plan.chunk_elements)):
                first, last = found.within(start, count)
                if first < last:
                    part = own[plan.part(shard, kind, index)]
                    kept = plan.precision_of(shard).num_kept(kind, count)
                    whole = moment_in(part, kept, plan.precision.format_of(kind))
                    yield whole.part(first, last)


def write_state(
    store: StateStore,
    updater: Updater,
    kernels: CpuKernels,
    place: tuple[UnitLayout, Segment],
    rule_params: Any,
    name: str,
    value: Tensor,
) -> None:
    """Replace one moment of a parameter, by torch's name; `value` has its shape.

    No update may be owed. Raises `ConfigError` for a name that is no moment there.
    """
    layout, segment = place
    names = updater.moment_names(segment.parameter, rule_params) if _is_ours(updater) else ()
    if name not in names:
        raise ConfigError(
            f"{segment.name!r} has no optimizer state {name!r} that can be written",
            because="the state of adapted torch optimizers is not accessible"
            if not _is_ours(updater)
            else None,
            remedy=f"one of {', '.join(names)}" if names else None,
        )
    index = names.index(name)
    kind, plan = store.plan.precision.moment_kinds[index], store.plan
    signed, flat = not rule_params.nonnegative[index], store.read(layout.index, kind)
    values = value.detach().to("cpu", torch.float32).contiguous().view(-1)
    done = 0
    for moment in _parts_of(plan, layout, segment, kind, flat):
        count = moment.values.numel()
        kernels.encode(values[done : done + count], moment, signed=signed)
        done += count
    store.ranks.synchronize_write(f"{name} of {segment.name!r}", flat)
    store.write(layout.index, kind, flat)


def _is_ours(updater: Updater) -> TypeGuard[KernelUpdater]:
    return isinstance(updater, KernelUpdater)


_BLOCK = 1 << 20  # elements converted at a time: temporaries stay small beside the tensor


@dataclass
class _CachedUnit:
    """Flat copies of one unit's weights and, once it was needed, of what stands beside them."""

    layout: UnitLayout
    weight: Tensor
    rest: Tensor | None = None
    given: bool = False  # values, the same ones or others
    dirty: bool = False

    def replace(self, part: Tensor, value: Tensor) -> None:
        """Overwrite a part of a range; the unit is dirty if any byte changes."""
        old, new = part.view(torch.uint8), value.view(torch.uint8)
        self.given = True
        if not torch.equal(old, new):
            self.dirty = True
            old.copy_(new)


class ParameterValues:
    """Reads and writes parameters by index; `settle` must lift the pacing and wait for updates.

    `pieces` has the parameters that are rows of a stack of experts, by the stack's index, which
    names it here as well.
    """

    def __init__(
        self,
        store: StateStore,
        prefetcher: Prefetcher,
        binding: ParameterBinding,
        kernels: CpuKernels,
        settle: Callable[[], None],
        guard: CallGuard,
        before_change: Callable[[int], None],
        pieces: Mapping[int, Sequence[int]],
    ) -> None:
        self.pieces = pieces
        self.store = store
        self._prefetcher = prefetcher
        self.ledger = prefetcher.ledger
        self.device = prefetcher.ledger.device.torch_device
        self._binding = binding
        self.kernels = kernels
        self.settle = settle
        self.materialized_now: dict[int, torch.dtype] = {}
        self.before_change = before_change  # told of a unit
        self._places = {s.parameter: (u, s) for u in store.plan.units for s in u.segments}
        self._cached: _CachedUnit | None = None
        self._taken: dict[int, Tensor] = {}  # stacks of which some rows were taken
        self._at_rest = False
        self._guard = guard

    # --- single values -----------------------------------------------------------------------

    @engine_call
    def read(self, parameter: int, *, master: bool = False) -> Tensor:
        """A fresh CPU tensor: the compute-dtype value, or the fp32 master of a trained one."""
        if parameter in self.pieces:
            return self._read_stack(parameter, master=master)
        layout, segment = self._places[parameter]
        weight, rest = self._parts(self._load(layout), segment, with_rest=master)
        if rest is None:
            return self._value(segment, weight)
        joined = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
        self.kernels.join(weight, rest, joined)
        return joined.view(segment.shape)

    def _read_stack(self, parameter: int, *, master: bool) -> Tensor:
        whole: Tensor | None = None
        for piece, rows in self.rows(parameter):
            value = self.read(piece, master=master)
            if whole is None:
                whole = torch.empty(self.shape(parameter), dtype=value.dtype, device="cpu")
            whole[rows] = value
        assert whole is not None
        return whole

    def rows(self, parameter: int) -> Iterator[tuple[int, slice]]:
        """Yield the parameters that hold rows of one, and which; of any other one itself."""
        if parameter not in self.pieces:
            yield parameter, slice(None)
            return
        for piece in self.pieces[parameter]:
            segment = self._places[piece][1]
            assert segment.stack is not None
            yield piece, slice(segment.stack.first, segment.stack.first + segment.shape[0])

    def _value(self, segment: Segment, weight: Tensor) -> Tensor:
        if segment.form:
            return self._dequantised(segment, weight)
        return weight.view(segment.shape).clone()

    def come_to_rest(self) -> None:
        """Only read from now on: nothing is resident or edited, and no update is owed."""
        self._at_rest = True

    def take(self, layout: UnitLayout) -> dict[int, Tensor]:
        """Return all values of a unit, by parameter, which rest nowhere else from then on; of a
        stack of experts with its first rows, all.

        Where the optimizer pass is over, nothing is resident any more, and units are taken from the
        last to the first.
        """
        unit = _CachedUnit(layout, self.store.take_weights(layout.index))
        found: dict[int, Tensor] = {}
        for segment in layout.segments:
            value = self._value(segment, self._parts(unit, segment, with_rest=False)[0])
            if not segment.is_rows:
                found[segment.parameter] = value
                continue
            assert segment.stack is not None
            origin, first = segment.origin, segment.stack.first
            if origin not in self._taken:
                self._taken[origin] = torch.empty(
                    segment.full_shape, dtype=value.dtype, device="cpu"
                )
            self._taken[origin][first : first + segment.shape[0]] = value
            if first == 0:
                found[origin] = self._taken.pop(origin)
        return found

    @engine_call
    def write(self, parameter: int, value: Tensor) -> None:
        """Replace a value. fp32 values of trained parameters become the master as they are;
        values in the compute dtype keep the master where their bits did not change. What rests
        quantised is quantised anew, unless the value is what it stands for.
        """
        if tuple(value.shape) != self.shape(parameter):
            name, shape = self.name(parameter), self.shape(parameter)
            raise ConfigError(f"parameter {name!r} has shape {shape}, got {tuple(value.shape)}")
        if parameter in self.pieces:
            for piece, rows in self.rows(parameter):
                self.write(piece, value[rows])
            return
        layout, segment = self._places[parameter]
        cached = self._load(layout)
        flat = value.detach().cpu().contiguous().view(-1)
        weight, rest = self._parts(cached, segment, with_rest=True)
        if segment.form:
            flat, dtype = flat.view(segment.shape), self.dtype(parameter)
            if not torch.equal(flat.to(dtype), self._dequantised(segment, weight)):
                packed = torch.zeros_like(weight)
                quantise_exactly(flat, FrozenFormat(segment.form), dtype, packed)
                cached.replace(weight, packed)
            return
        for start in range(0, segment.numel, _BLOCK):
            block = slice(start, start + _BLOCK)
            if rest is None:
                cached.replace(weight[block], flat[block].to(weight.dtype))
            else:
                self._write_split(cached, weight[block], rest[block], flat[block])

    @engine_call
    def write_packed(self, parameter: int, packed: Tensor) -> None:
        """Replace what rests quantised by bytes (uint8) in the same format, as they are."""
        layout, segment = self._places[parameter]
        cached = self._load(layout)
        cached.replace(self._parts(cached, segment, with_rest=False)[0], packed)

    def _write_split(
        self, cached: _CachedUnit, weight: Tensor, rest: Tensor, value: Tensor
    ) -> None:
        new_weight, new_rest = torch.empty_like(weight), torch.empty_like(rest)
        self.kernels.split(value.float(), new_weight, new_rest)
        if value.dtype is weight.dtype:
            keep = value.view(torch.int16) == weight.view(torch.int16)
            new_weight = torch.where(keep, weight, new_weight)
            new_rest = torch.where(keep, rest, new_rest)
        cached.replace(weight, new_weight)
        cached.replace(rest, new_rest)

    def _dequantised(self, segment: Segment, packed: Tensor) -> Tensor:
        value = torch.empty(segment.shape, dtype=self.dtype(segment.parameter), device="cpu")
        dequantise(packed, FrozenFormat(segment.form), value)
        return value

    def shape(self, parameter: int) -> tuple[int, ...]:
        """The parameter's real shape."""
        segment = self.place_of(parameter)[1]
        return segment.full_shape if parameter in self.pieces else segment.shape

    def name(self, parameter: int) -> str:
        """The parameter's name in the model."""
        return self.place_of(parameter)[1].name

    def dtype(self, parameter: int) -> torch.dtype:
        """The dtype the parameter computes in."""
        return self._binding.dtypes[parameter]

    def place_of(self, parameter: int) -> tuple[UnitLayout, Segment]:
        """Its unit, and where it lies in that; of a stack that is cut, of its first rows."""
        return self._places[self.pieces.get(parameter, (parameter,))[0]]

    def units_of(self, parameter: int) -> list[int]:
        """The units that hold it: one, or those of its rows."""
        return [self._places[piece][0].index for piece, _ in self.rows(parameter)]

    def place(self, parameter: int) -> tuple[int, bool, int]:
        """Sorts parameters by unit, then by where they lie in it."""
        layout, segment = self.place_of(parameter)
        return layout.index, not segment.trained, segment.offset

    def flush(self) -> None:
        """Write the cached unit back if it was edited, and forget it."""
        cached, self._cached = self._cached, None
        if cached is not None and cached.given:
            parts = (cached.weight, cached.rest) if cached.dirty else ()
            self.store.ranks.synchronize_write(f"unit {cached.layout.name!r}", *parts)
        if cached is not None and cached.dirty:
            unit = cached.layout.index
            self.before_change(unit)
            try:
                self._prefetcher.drop(unit)
            finally:  # an edit outside a loan raises, those inside one are kept
                try:
                    self.store.write(unit, Kind.WEIGHT, cached.weight)
                    kind = self.store.plan.precision.rest_kind
                    if cached.rest is not None and kind is not None:
                        self.store.write(unit, kind, cached.rest)
                except TransferError as error:  # neither the old value nor the new one is at rest
                    self._prefetcher.failure.fail(error)
                    raise
                self.ledger.note_edit(unit)

    def abandon(self) -> None:
        """`flush` after an error; of several ranks nothing is written, as others may do."""
        if self.store.ranks.count > 1:
            self._cached = None
        self.flush()

    def flush_edits(self) -> None:
        """`flush`, if values were given."""
        if self._cached is not None and self._cached.given:
            self.flush()

    def _load(self, layout: UnitLayout) -> _CachedUnit:
        self._guard.check()
        if not self._at_rest:
            self._prefetcher.bound.verify(layout.index)
        if self._cached is not None and self._cached.layout is layout:
            return self._cached
        if not self._at_rest:
            self.flush()
            self.settle()
        self._cached = _CachedUnit(layout, self.store.read(layout.index, Kind.WEIGHT))
        return self._cached

    def _parts(
        self, cached: _CachedUnit, segment: Segment, *, with_rest: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Flat views of the parameter's weight and, if wanted, of what stands beside it, if any.

        Of one that rests quantised: of its bytes.
        """
        layout, dtype = cached.layout, self.dtype(segment.parameter)
        if not segment.trained:
            start = layout.trained_bytes + segment.offset
            part = cached.weight[start : start + segment.nbytes]
            return part if segment.form else part.view(dtype), None
        elements = slice(segment.offset, segment.offset + segment.numel)
        weight = cached.weight[: layout.trained_bytes].view(dtype)[elements]
        kind = self.store.plan.precision.rest_kind
        if not with_rest or kind is None:
            return weight, None
        if cached.rest is None:
            self.settle()  # of the same update as the weight: a step forgets what is cached
            cached.rest = self.store.read(layout.index, kind)
        return weight, cached.rest.view(KIND_DTYPES[kind])[elements]

    # --- lending -----------------------------------------------------------------------------

    @contextmanager
    def materialized(self, parameters: Iterable[int], *, master: bool) -> Iterator[None]:
        """Full values bound to the parameters; edits are written back on leaving."""
        indices = sorted(set(parameters))
        taken = [i for i in indices if i in self.materialized_now]
        if taken:
            name = self.name(taken[0])
            raise ResidencyError(f"parameter {name!r} is materialized already")
        try:
            self._lend_all(indices, master=master)
            yield
        except BaseException as error:
            if self.store.ranks.count == 1:
                self._release_materialized(indices)
            else:  # the others, who write at the end, write nothing either
                if isinstance(error, Exception):
                    self.store.ranks.broadcast_error("edits values", error)
                self._drop(indices)
            raise
        self._release_materialized(indices)

    @engine_call
    def _lend_all(self, indices: Sequence[int], *, master: bool) -> None:
        for index in indices:
            self.materialize(index, master=master)

    @engine_call
    def _release_materialized(self, indices: Collection[int]) -> None:
        try:
            for index in indices:
                self.release_materialized(index)
            self.flush()
        except BaseException:
            if self.store.ranks.count > 1:
                self._drop(indices)
            raise

    @engine_call
    def _drop(self, indices: Collection[int]) -> None:
        """End loans, and write nothing."""
        self._cached = None
        for index in indices:
            if self.materialized_now.pop(index, None) is not None:
                self._binding.unbind_materialized(index)

    def materialize(self, index: int, *, master: bool) -> None:
        """Bind a parameter to a full value of its own."""
        value = self.read(index, master=master)
        for unit in self.units_of(index):
            self._prefetcher.drop(unit)
        self.materialized_now[index] = value.dtype
        self._binding.bind_materialized(index, value.to(self.device))

    def release_materialized(self, index: int) -> None:
        """Write a lent value back and make the parameter offloaded."""
        if self.materialized_now.pop(index, None) is not None:
            try:
                self.write(index, self._binding.parameters[index].detach())
            finally:
                self._binding.unbind_materialized(index)

    def release_all_materialized(self) -> None:
        """End every loan that a `load_state_dict` which failed may have left, and flush."""
        self._release_materialized(list(self.materialized_now))


class ParameterAccess:
    """Access to the values of an engine's offloaded parameters; see `OffloadedParameter`."""

    def __init__(
        self,
        values: ParameterValues,
        hooks: Hooks,
        guard: CallGuard,
        parameters: Sequence[nn.Parameter],
        window: AccumulationWindow,
    ) -> None:
        self._values = values
        self._hooks = hooks
        self._guard = guard
        self._window = window
        self._warned = False
        self._index_of = {id(p): i for i, p in enumerate(parameters)}

    def wake(self) -> None:
        """Do nothing: the engine is there."""

    def fetch(self, parameter: nn.Parameter) -> Tensor:
        """Make the parameter resident, as access by attribute does."""
        return self._hooks.touch(parameter)

    def copy(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of the full value on the compute device; None during a call."""
        if self._guard.busy:
            return None
        value = self._values.read(self._index_of[id(parameter)])
        return value.to(self._values.device)

    def version(self, parameter: nn.Parameter) -> int:
        """Return a number that changes with each update, from `step()` on, and each edit."""
        index, ledger = self._index_of[id(parameter)], self._values.ledger
        _, segment = self._values.place_of(index)
        units = self._values.units_of(index)
        return sum(ledger.version(unit, trained=segment.trained) for unit in units)

    def note_missing_gradient(self) -> None:
        """Warn once if there are gradients that a loop looks for in `p.grad`."""
        expected = self._window.is_open or self._window.has_news
        if self._warned or not expected or self._guard.busy:
            return
        self._warned = True
        warnings.warn(
            "p.grad was read between backward and step, and is None: gradients are moved to the "
            "optimizer's tier as they arrive. So torch.nn.utils.clip_grad_norm_ clips nothing and "
            "returns 0, and an optimizer of your own updates nothing: engine.step() does. "
            "gradient_clipping in the configuration clips, engine.grad_norm is the norm after "
            "step(), engine.gradient(p) a copy of a gradient",
            InfinityWarning,
            stacklevel=3,
        )


def targets(
    target: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
    index_of: Mapping[int, int],
) -> Sequence[int]:
    """Parameter indices meant by a module, a parameter, or several of them."""
    if isinstance(target, nn.Parameter):
        if id(target) not in index_of:
            raise ConfigError("this parameter does not belong to the engine's module")
        return [index_of[id(target)]]
    if isinstance(target, nn.Module):
        return [i for p in target.parameters() for i in targets(p, index_of)]
    return [i for item in target for i in targets(item, index_of)]


# Adapters (peft) may be merged where the weights they are merged into are, and not elsewhere.


# Of a layer with adapters, and of the module that put them there.
_MERGE = ("merge", "unmerge")
_UNLOAD = ("merge_and_unload", "unload")


class MergeGuard:
    """Refuses what would lose edits of a module's adapters, before anything is changed.

    `merge` and `unmerge` of a layer outside a block of `materialized`: peft edits `.data`, which of
    an offloaded parameter is a passing copy, so that the edit would be lost while the layer is
    marked as merged. All of peft's ways (`merge_adapter`, `merge_and_unload`, a merged layer in
    `disable_adapter()`) end in these two methods. `merge_and_unload` and `unload` anywhere: they
    take adapters, whose weights and state are the engine's, out of its module for good.
    """

    def __init__(
        self, module: nn.Module, values: ParameterValues, index_of: Mapping[int, int]
    ) -> None:
        self._values = values
        self._index_of = index_of
        self._guarded: list[tuple[nn.Module, str]] = []
        # Who has not imported peft has no adapters of it.
        peft = sys.modules.get("peft.tuners.tuners_utils")
        if peft is not None:
            self._guard(module, peft.BaseTunerLayer, _MERGE, self._check_merge)
            self._guard(module, peft.BaseTuner, _UNLOAD, self._refuse_unload)

    def remove(self) -> None:
        """Leave the modules as they were."""
        while self._guarded:
            part, name = self._guarded.pop()
            vars(part).pop(name, None)

    def _guard(
        self,
        module: nn.Module,
        kind: type[nn.Module],
        names: tuple[str, ...],
        check: Callable[[nn.Module, str], None],
    ) -> None:
        for part in [m for m in module.modules() if isinstance(m, kind)]:
            for name in names:
                if name not in vars(part):
                    # Bound, so that a deep copy of the part merges itself and not this one.
                    setattr(part, name, MethodType(_checked(name, check), part))
                    self._guarded.append((part, name))

    def _check_merge(self, layer: nn.Module, name: str) -> None:
        if not self._guarded:
            return  # removed: this is a copy's
        indices = [self._index_of.get(id(parameter)) for parameter in layer.parameters()]
        offloaded = sum(i is not None and i not in self._values.materialized_now for i in indices)
        if offloaded:
            raise ResidencyError(
                f"{name}() of a {type(layer).__name__} layer of adapters: {offloaded} of its "
                f"{len(indices)} parameters are not materialized",
                because="an edit of offloaded weights is lost; nothing was changed",
                remedy=f"with engine.materialized(engine.module): engine.module.{name}_adapter()",
            )

    def _refuse_unload(self, tuner: nn.Module, name: str) -> None:
        if not self._guarded:
            return
        raise ResidencyError(
            f"{name}() of a model that an engine trains",
            because="it takes the adapters out of the model for good, and the engine holds "
            "their weights and optimizer state; nothing was changed",
            remedy=f"engine.close(restore=True), and then {name}(); or to merge and go on: "
            "with engine.materialized(engine.module): engine.module.merge_adapter()",
        )


def _checked(name: str, check: Callable[[nn.Module, str], None]) -> Callable[..., Any]:
    def checked(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(part, name)
        return getattr(type(part), name)(part, *args, **kwargs)

    return checked
