"""Adapted optimizers: elementwise optimizers run on tiles of fp32 masters.

An adapted optimizer steps one tile at a time: it sees a single parameter with the tile's values,
their gradient and the state that its last step on the tile left. State tensors are stored as fp32
moments; all other state (step counts, changed group entries) is stored here, per parameter. An
elementwise optimizer gets flat tiles; any other gets full parameters in their original shape.
`adapter_probe.py` determines which of the two applies.

[Note: same bits as plain torch]
torch's vectorized loops end in a scalar loop, whose rounding may differ. Tiles are cut at multiples
of 128 elements of a parameter and are small enough for torch to use one thread, so each element is
computed by the same loop as in a step of the full parameter by one thread.

[Note: group entries]
An adapted optimizer may write to its group (a count, an estimated learning rate). Written values
are stored here, never in the user's group: updates run in the background. A written value is used
until the user or a scheduler edits the entry, that is, until the value in the user's group differs
from the value that it had at the write. Assigning the value that the group already has is no edit.

All tiles of a step begin with the entries that the group had before the step. A parameter that has
no gradient or is updated by another rank has no tile, so a group may have no tiles at all.
Therefore a small parameter takes each step first, as in plain torch: without a gradient if no
parameter of the group has one. The entries that it leaves are the group's entries from then on.

[Note: one parameter does not see another]
An update gets one parameter. Information can pass from it to the next one only through state that
persists between two calls of `step()`: the group, an attribute of the optimizer or of its class, or
an entry of `state` under another key than the parameter. All of these are compared after every
tile. The group must equal what the small parameter left, attributes must be unchanged, and `state`
must have one key; otherwise the update fails with an error that names the entry, before its result
is used. This covers the values of the model, in every step.

It does not detect a value that is computed from several parameters of one call, such as the norm of
all gradients, nor memory outside the optimizer (a global variable). `adapter_rule.py` checks for
the former, and for random numbers, before every step, with small parameters.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infinity.errors import InfinityError, TrainingError
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.update import Tile

HOST_FP32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # independent of the defaults
# Below torch's grain size of 32768, from which it splits loops over threads.
TILE_ELEMENTS = 1 << 14

# Shapes of the small parameters of trials and checks, by number of dimensions.
SMALL_SHAPES = {0: (), 1: (512,), 2: (16, 32), 3: (4, 8, 16), 4: (4, 4, 4, 8)}
SMALL_ELEMENTS = 512
COUPLING_CAUSE = (
    "it mixes parameters (D-Adaptation and Prodigy estimate one step size for all), draws random "
    "numbers, or keeps state outside of state[p] and its group"
)
COUPLING_REMEDY = (
    "use an optimizer that treats every parameter separately, such as torch.optim.AdamW"
)

MakeState = Callable[[Mapping[str, Any], nn.Parameter], dict[str, Any]]


@dataclass(frozen=True)
class AdapterFacts:
    """An adapted optimizer and its probed facts.

    `worker` is an instance without parameters. `tensor_names` are the state entries that are stored
    as moments, `num_moments` the maximum number of them per parameter. `make_state` returns the
    initial state for (group, parameter); None unless the constructor makes state.
    """

    name: str
    worker: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    needs_full: bool = False
    tensor_names: frozenset[str] = frozenset()
    num_moments: int = 0
    make_state: MakeState | None = None


class _Written(NamedTuple):
    """A value that the optimizer wrote to a group, and the user's value at that time, or None."""

    value: Any
    seen: Any


@dataclass(frozen=True)
class Captured:
    """A copy of a group's entries, and the shapes of its parameters."""

    entries: Mapping[str, Any]
    shapes: frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class _State:
    """State of one parameter other than its moments; replaced, not modified, by an update."""

    scalars: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the moments, in order


@dataclass
class Group:
    """Entries of a parameter group: captured from the user's group, and written by steps."""

    written: Mapping[str, _Written]
    rule_params: Mapping[str, Any] = field(default_factory=dict)  # as captured
    before: Mapping[str, _Written] = field(default_factory=dict)  # written by earlier steps
    given: Mapping[str, Any] = field(default_factory=dict)  # `rule_params` updated with `before`
    has_stepped: bool = False

    def write(self, after: Mapping[str, Any]) -> None:
        """Record the entries that a step changed from `given`.

        Raises `_CouplingError` if the step of another parameter left different entries.
        """
        changed = {
            key: _Written(value, self.rule_params.get(key))
            for key, value in after.items()
            if key != "params" and not same(value, self.given.get(key))
        }
        written = {**self.before, **changed}
        if self.has_stepped:
            for key in {**written, **self.written}:
                if not same(written.get(key), self.written.get(key)):
                    value = after.get(key)
                    other = self.written.get(key, _Written(None, None)).value
                    raise _CouplingError(
                        f"group[{key!r}] is {value!r} after this parameter, {other!r} after another"
                    )
        self.written, self.has_stepped = written, True


class _CouplingError(Exception):
    """A step left a value outside `state[p]` that depends on its parameter."""


class AdaptedOptimizer:
    """Runs an adapted optimizer's `step()` on tiles; used by one thread."""

    def __init__(
        self,
        facts: AdapterFacts,
        tile_elements: int,
        kernels: CpuKernels | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """`kernels` join and split masters; without them weights must be fp32."""
        self.facts = facts
        self.kernels = kernels
        self._names = names
        self._states: dict[int, _State] = {}  # by parameter
        self._groups: dict[int, Group] = {}  # by parameter
        self._step_groups: dict[int, Group] = {}  # by id of the `Captured`
        # By parameter: end of its last tile, and its state before the step of that tile.
        self._last_tiles: dict[int, tuple[int, _State | None]] = {}
        self._worker = facts.worker
        self._attributes = copy.deepcopy(
            _attributes(facts.worker), {id(facts.worker): facts.worker}
        )
        self._master = torch.empty(tile_elements if kernels is not None else 0, **HOST_FP32)
        self._gradient = torch.empty(tile_elements, **HOST_FP32)

    def grouped(self, params_by_index: Mapping[int, Captured]) -> list[tuple[list[int], Group]]:
        """Return (parameter indices, entries before the step) of each group."""
        members: dict[int, list[int]] = {}
        for index, rule_params in params_by_index.items():
            members.setdefault(id(rule_params), []).append(index)
        groups = []
        for indices in members.values():
            entries = params_by_index[indices[0]].entries
            known = next((self._groups[i].written for i in indices if i in self._groups), {})
            written = {k: w for k, w in known.items() if same(entries.get(k), w.seen)}  # not edited
            given = {**entries, **{k: entry.value for k, entry in written.items()}}
            groups.append((indices, Group(written, entries, written, given)))
        return groups

    def begin(self, params_by_index: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """Step a small parameter of each group; see [Note: group entries]."""
        self._step_groups = {}
        for indices, group in self.grouped(params_by_index):
            self._step_groups[id(params_by_index[indices[0]])] = group
            self._groups.update((index, group) for index in indices)
            with suppress(Exception), on_cpu():  # the optimizer may not accept this shape
                shape = SMALL_SHAPES[1 + self.facts.needs_full]
                stand_in = nn.Parameter(torch.ones(shape, dtype=torch.float32))
                if not steps.keys().isdisjoint(indices):
                    stand_in.grad = torch.ones_like(stand_in)
                fresh = self._fresh(group.given, stand_in)
                group.write(self._step(group.given, stand_in, fresh)[0])

    def extra_state(self) -> dict[int, dict[str, Any]]:
        """Return the serializable state of each parameter, without moments."""
        saved: dict[int, dict[str, Any]] = {
            index: {"group": {key: entry._asdict() for key, entry in group.written.items()}}
            for index, group in self._groups.items()
            if group.written or index in self._states
        }
        for index, state in self._states.items():
            saved[index] |= {"scalars": copied(state.scalars), "shapes": dict(state.shapes)}
        return saved

    def load_extra_state(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore state returned by `extra_state`."""
        self._last_tiles.clear()
        self._states = {
            index: _State(
                copied(entry["scalars"]),
                {name: tuple(shape) for name, shape in entry["shapes"].items()},
            )
            for index, entry in saved.items()
            if "scalars" in entry
        }
        self._groups = {
            index: Group(
                {k: _Written(e["value"], e.get("seen")) for k, e in entry["group"].items()}
            )
            for index, entry in saved.items()
        }

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """Step the optimizer on each tile; the `step` of tiles is not used."""
        for tile in tiles:
            self._update(tile, grad_scale)

    def _update(self, tile: Tile, grad_scale: float) -> None:
        count, size = tile.weight.numel(), math.prod(tile.shape)
        if self.facts.needs_full and (tile.first or count != size):
            raise TrainingError(f"{self.facts.name} needs full parameters, got a slice of one")
        end, before = self._last_tiles.get(tile.parameter, (-1, None))
        if tile.first != end:  # the first tile of a step, at any offset: ranks have shards
            before = self._states.get(tile.parameter)
        after = before
        try:
            for small_tile in [tile] if self.facts.needs_full else _split_tile(tile):
                after = self._run(small_tile, before, grad_scale)
            current, expected = _attributes(self._worker), self._attributes
            if not same(current, expected):
                names = {**expected, **current}
                changed = [k for k in names if not same(current.get(k), expected.get(k))]
                raise _CouplingError(f"it changes its attribute {changed[0]!r}")
        except InfinityError:
            raise
        except Exception as error:
            raise self._failure(tile, error) from error
        self._last_tiles[tile.parameter] = tile.first + count, before
        if after is not None:
            self._states[tile.parameter] = after

    def state_of(
        self,
        parameter: int,
        rule_params: Any,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """Return the optimizer's `state[p]`, as new tensors; empty before the first step."""
        cached = self._states.get(parameter, _State())
        state = copied(cached.scalars)
        for moment, (name, state_shape) in zip(moments, cached.shapes.items(), strict=False):
            state_shape = state_shape if self.facts.needs_full else shape
            state[name] = moment.values[: math.prod(state_shape)].clone().view(state_shape)
        return state

    def _run(self, tile: Tile, before: _State | None, grad_scale: float) -> _State:
        count = tile.weight.numel()
        shape = tile.shape if self.facts.needs_full else (count,)
        master = tile.weight
        if tile.master_state is not None:
            assert self.kernels is not None
            master = self._master[:count]
            self.kernels.join(tile.weight, tile.master_state, master)
        gradient = self._gradient[:count].copy_(tile.gradient)
        if grad_scale != 1.0:
            gradient.mul_(grad_scale)
        parameter = nn.Parameter(master.view(shape))
        parameter.grad = gradient.view(shape)
        group = self._step_groups[id(tile.rule_params)]
        if before is None:
            state = self._fresh(group.given, parameter)
        else:  # state tensors are views of the moments; steps modify other values in place
            state = copied(before.scalars)
            for moment, (name, full) in zip(tile.moments, before.shapes.items(), strict=False):
                state_shape = full if self.facts.needs_full else shape
                state[name] = moment.values[: math.prod(state_shape)].view(state_shape)
        entries, new_state = self._step(group.given, parameter, state)
        group.write(entries)
        if parameter.data_ptr() != master.data_ptr():  # the optimizer replaced .data
            master.copy_(parameter.detach().reshape(-1))
        after = self._collect(tile, new_state, before or _State())
        if tile.master_state is not None:
            assert self.kernels is not None
            self.kernels.split(master, tile.weight, tile.master_state)
        return after

    def _failure(self, tile: Tile, error: Exception) -> TrainingError:
        name = repr(self._names[tile.parameter]) if self._names else "a small parameter"
        if isinstance(error, _CouplingError):
            prefix = f"{self.facts.name} does not update {name} alone: " if self._names else ""
            return TrainingError(f"{prefix}{error}", because=COUPLING_CAUSE, remedy=COUPLING_REMEDY)
        tensors = {"values": tile.weight, "gradient": tile.gradient}
        zeros = [label for label, tensor in tensors.items() if not tensor.any()]
        return TrainingError(
            f"{self.facts.name} raised {error!r} when it updated {name} of shape {tile.shape}",
            because=f"zeros in all of its {' and '.join(zeros)}: an optimizer may divide by their "
            "norm"
            if zeros
            else None,
            remedy=f"use another optimizer, or keep {name} out of model_parameters",
        )

    def _step(
        self, given: Mapping[str, Any], parameter: nn.Parameter, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Step one parameter; return the entries of its group and of its state after the step."""
        group = copied(given)
        group["params"] = [parameter]
        self._worker.param_groups = [group]
        self._worker.state = defaultdict(dict)
        if state:
            self._worker.state[parameter] = state
        try:
            with torch.no_grad():
                self._worker.step()
            for key in self._worker.state:
                if key is not parameter:
                    raise _CouplingError(f"it changes state[{key!r}]")
            return group, self._worker.state.get(parameter, {})
        finally:
            self._worker.param_groups = []
            self._worker.state = defaultdict(dict)

    def _fresh(self, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        return self.facts.make_state(group, parameter) if self.facts.make_state else {}

    def _collect(self, tile: Tile, state: Mapping[str, Any], before: _State) -> _State:
        """Copy state tensors into the moments; return all other state."""
        scalars: dict[str, Any] = {}
        shapes = dict(before.shapes)
        for name, value in state.items():
            if not is_per_element(name, value, self.facts.tensor_names):
                scalars[name] = value
                continue
            shapes[name] = tuple(value.shape)
            index = list(shapes).index(name)
            self._check_tensor(tile, name, value, index)
            target = tile.moments[index].values[: value.numel()]
            if value.data_ptr() != target.data_ptr() or not value.is_contiguous():
                target.copy_(value.detach().clone().reshape(-1))
        return _State(scalars, shapes)

    def _check_tensor(self, tile: Tile, name: str, value: Tensor, index: int) -> None:
        count = tile.weight.numel()
        fits = value.numel() <= count if self.facts.needs_full else value.numel() == count
        if index < len(tile.moments) and value.dtype is torch.float32 and fits:
            return
        raise TrainingError(
            f"{self.facts.name} keeps {name!r} of shape {tuple(value.shape)} and dtype "
            f"{value.dtype} for a tile of {count} elements; {len(tile.moments)} fp32 state tensors "
            "were planned",
            because="it did not do so in the trial, which planned them",
            remedy="use an optimizer whose state has the same form for all parameters",
        )


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context with the CPU as default device; a no-op if it is (a mode slows calls)."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def is_per_element(name: str, value: Any, tensor_names: frozenset[str]) -> bool:
    """Return True if an entry of the optimizer's state is stored as a moment."""
    return isinstance(value, Tensor) and (value.numel() > 1 or name in tensor_names)


def small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the small parameter that represents this shape in checks."""
    return SMALL_SHAPES[min(len(shape), 4)]


def _split_tile(tile: Tile) -> Iterator[Tile]:
    """Yield slices of a tile that are small enough for torch to use one thread."""
    count = tile.weight.numel()
    for start in range(0, count, TILE_ELEMENTS):
        part = slice(start, min(start + TILE_ELEMENTS, count))
        yield replace(
            tile,
            first=tile.first + start,
            weight=tile.weight[part],
            master_state=None if tile.master_state is None else tile.master_state[part],
            moments=tuple(m.part(part.start, part.stop) for m in tile.moments),
            gradient=tile.gradient[part],
        )


# --- entries of groups -------------------------------------------------------------------------


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return a message for each entry that changed, except from one rate to another."""
    return {
        key: f"group[{key!r}] {new.get(key)!r}, which was {old.get(key)!r}"
        for key in {**old, **new}
        if not same(old.get(key), new.get(key)) and not are_rates(old.get(key), new.get(key))
    }


def are_rates(*values: Any) -> bool:
    """Return True for nonzero floats; an integer may select a variant of the optimizer."""
    return all(type(value) is float and value for value in values)


def _attributes(worker: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer and its classes, without groups and state."""
    classes = [
        k for k in type(worker).__mro__ if not k.__module__.startswith(("torch.", "builtins"))
    ]
    attributes = {
        key: value
        for cls in reversed(classes)
        for key, value in vars(cls).items()
        if isinstance(value, numbers.Number | Tensor | list | dict | set)
    }
    return attributes | {
        k: v for k, v in vars(worker).items() if k not in ("param_groups", "state")
    }


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of the values, with tensors detached."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def same(a: Any, b: Any) -> bool:
    """Return True if values are equal: tensors bitwise, NaN to NaN, objects by attributes."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype is not b.dtype or a.shape != b.shape:
            return False
        return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, numbers.Real) and isinstance(b, numbers.Real):
        return a == b or (a != a and b != b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if hasattr(a, "__dict__"):
        return same(vars(a), vars(b))
    return bool(a == b)
