"""Adapted optimizers: those of torch's, or of the user's, run on tiles of fp32 masters.

An adapted optimizer is asked to step one tile at a time: it gets a parameter of the tile's values,
the gradient and the state it left there last time, and never knows that the rest of the model is
elsewhere. State tensors rest as fp32 moments; everything else it keeps (step counts, what it
changes in a group) is kept here, per parameter. An elementwise one gets flat tiles; any other gets
whole parameters in their own shape. `adapter_probe.py` finds out which.

[Note: same bits as plain torch]
torch's vector loops end in scalar ones, whose rounding may differ. Tiles are cut at multiples of
128 elements of a parameter and are small enough for torch to use one thread, so every element is
computed by the loop that would compute it if the parameter were stepped whole by one thread.

[Note: group entries]
An adapted optimizer may write to its group (a count, a learning rate of its own). What it writes is
kept here, never in the user's group: updates run behind the user's back. It holds until the user,
or a scheduler, changes the entry: until the group's value differs from the one the adapted
optimizer saw when it wrote. To write the value that is there already is no edit.

All tiles of a step begin with the entries that the group had before it, and each leaves the same
ones behind: the trial refuses what writes otherwise. Parameters without a gradient, or that another
rank updates, have no tile, and a group may have none: so a stand-in takes each step first, without
a gradient where the whole group has none, as in plain torch. That is left out of optimizers that
write nothing in the trial.

[Note: rehearsal]
What an adapted optimizer keeps may depend on its group: momentum that is switched on needs a
buffer. So small parameters go ahead: when an entry of a group is switched, one that has gone all
the way with the group and one that begins take two steps with it, before the commit. What they
cannot do is refused while nothing has changed.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, InfinityError, TrainingError
from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.update import Tile
from infinity.types import MomentFormat

_HOST_FP32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
# Below torch's grain of 32768, from which on it cuts loops between threads.
TILE_ELEMENTS = 1 << 14

# Of small parameters that things are tried out on, by their number of dimensions.
SMALL_SHAPES = {0: (), 1: (512,), 2: (16, 32), 3: (4, 8, 16), 4: (4, 4, 4, 8)}
SMALL_ELEMENTS = 512
_REHEARSED_STEPS = 2  # the first makes state, the second uses it

MakeState = Callable[[Mapping[str, Any], nn.Parameter], dict[str, Any]]


@dataclass(frozen=True)
class AdapterFacts:
    """An adapted optimizer and what was found out about it.

    `worker` is an instance without parameters. `tensor_names` are the entries of its state that
    have one value per element or so, `num_moments` how many of them a parameter has at most; it
    `writes` to groups.
    `make_state` is there where its constructor makes state: (group, parameter) -> state.
    """

    name: str
    worker: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    whole: bool = False
    tensor_names: frozenset[str] = frozenset()
    num_moments: int = 0
    writes: bool = True
    make_state: MakeState | None = None


class _Written(NamedTuple):
    """What the optimizer wrote to an entry, and what the group held then; None if nothing."""

    value: Any
    seen: Any


@dataclass(frozen=True)
class _Kept:
    """What is kept of one parameter beside its moments; replaced after its last tile of a step."""

    scalars: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in order of the moments


@dataclass
class _GroupWrites:
    """Entries of a group that steps have written, and the last of these steps."""

    written: Mapping[str, _Written]
    rule_params: Mapping[str, Any] = field(default_factory=dict)  # as captured
    before: Mapping[str, _Written] = field(default_factory=dict)  # what was written before
    given: Mapping[str, Any] = field(default_factory=dict)  # `rule_params` with that

    def write(self, after: Mapping[str, Any]) -> None:
        """Take over what differs `after` the step from what was `given` to it."""
        changed = {
            key: _Written(value, self.rule_params.get(key))
            for key, value in after.items()
            if key != "params" and not same(value, self.given.get(key))
        }
        self.written = {**self.before, **changed}


_Small = tuple[Mapping[int, Any], Sequence[Moment]]  # what is kept: nothing before the first step


@dataclass(frozen=True)
class _Rehearsed:
    """A group as it was when last rehearsed, and the small parameters that go with it."""

    values: Mapping[str, Any]
    outlines: Mapping[str, Any]
    small: Mapping[tuple[int, ...], _Small]  # by shape


class AdapterRule:
    """The rule that an adapted optimizer is; see `infinity.optim.update.Rule`."""

    def __init__(self, facts: AdapterFacts) -> None:
        self.facts = facts
        self.name = facts.name
        self.whole = facts.whole
        self.matrix_steps = 0
        self.moments = (MomentFormat.FP32,) * facts.num_moments
        parts = "whole parameters" if facts.whole else f"tiles of {TILE_ELEMENTS} elements"
        self.notes: tuple[str, ...] = (
            f"{facts.name} is run by torch on {parts}: slower than the built-in rules",
        )
        self._rehearsed: dict[int, _Rehearsed] = {}  # by the id of the first parameter

    def capture(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the group, without its parameters.

        Raises `ConfigError` for an edit that needs state which was not planned.
        """
        captured = copied({k: v for k, v in group.items() if k not in ("params", "param_names")})
        parameters = group["params"]
        if not parameters:
            return captured
        known = self._rehearsed.get(id(parameters[0]))
        outlines = {key: outline(value) for key, value in captured.items()}
        if known is None or outlines != known.outlines:
            shapes = {small_shape(p.shape, whole=self.whole) for p in parameters}
            try:
                small = {shape: self._rehearse(captured, known, shape) for shape in shapes}
            except Exception as error:
                raise self._refusal(captured, known, error) from error
            self._rehearsed[id(parameters[0])] = _Rehearsed(captured, outlines, small)
        return captured

    def _rehearse(
        self, captured: dict[str, Any], known: _Rehearsed | None, shape: tuple[int, ...]
    ) -> _Small:
        """Two steps of small parameters; raises what the adapted optimizer raises.

        The worker is shared: groups are captured only while no update is under way.
        """
        numel = math.prod(shape)
        begun: _Small = {}, [Moment.zeros(numel, form) for form in self.moments]
        for kept, values in [begun] if known is None else [begun, known.small[shape]]:
            adapted = AdaptedOptimizer(self.facts, SMALL_ELEMENTS)
            adapted.keep(kept)
            with torch.device("cpu"):  # whatever the default is: the pass has a thread without
                weight, moments = (
                    torch.linspace(0.5, 1, numel, dtype=torch.float32),
                    tuple(m.clone() for m in values),
                )
                for step in range(1, _REHEARSED_STEPS + 1):
                    adapted.begin({0: captured}, {0: step})
                    tile = Tile(0, shape, 0, weight, None, moments, weight.clone(), captured, step)
                    adapted.update([tile], 1.0)
        return adapted.kept(), moments

    def _refusal(
        self, captured: Mapping[str, Any], known: _Rehearsed | None, error: Exception
    ) -> ConfigError:
        what = error.what if isinstance(error, InfinityError) else repr(error)
        edits = {} if known is None else differences(known.values, captured)
        names = " and ".join(edits) or "the group"
        return ConfigError(
            f"{self.name} cannot step with {' and '.join(edits.values()) or 'its groups'}",
            because=f"tried on a small parameter: {what}; the stored state was planned "
            "from the groups that initialize() got",
            remedy=f"set {names} back and call step() again; to use it later, let initialize() "
            f"get it switched on ({names} > 0, say): a schedule may change it then",
        )

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The trial has found what is kept; later edits are compared with these groups."""
        for group in groups:
            self.capture(group)

    def tile_elements(self, largest: int) -> int:
        """Whole parameters, or tiles that torch steps in one thread."""
        return largest if self.whole else min(largest, TILE_ELEMENTS)

    def initial(self, captured: Any) -> tuple[float, ...]:
        """An adapted optimizer fills its state by itself."""
        return ()

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> AdaptedOptimizer:
        """The adapted optimizer."""
        return AdaptedOptimizer(self.facts, self.tile_elements(largest), kernels)


class AdaptedOptimizer:
    """Runs an adapted optimizer's `step()` on tiles; used by one thread."""

    def __init__(
        self, facts: AdapterFacts, tile_elements: int, kernels: CpuKernels | None = None
    ) -> None:
        """`kernels` joins and splits masters; without them weights must be fp32."""
        self.facts = facts
        self.kernels = kernels
        self._kept: dict[int, _Kept] = {}  # by parameter
        self._groups: dict[int, _GroupWrites] = {}  # by parameter
        self._stepping: dict[int, _GroupWrites] = {}  # by the id of what was captured
        # Of a parameter's last tile: where it ended, and what was kept before that step.
        self._last: dict[int, tuple[int, _Kept | None]] = {}
        self._worker = facts.worker
        self._master = torch.empty(tile_elements if kernels is not None else 0, **_HOST_FP32)
        self._gradient = torch.empty(tile_elements, **_HOST_FP32)

    def begin(self, params_by_index: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """Take the step with a stand-in for each group; see [Note: group entries]."""
        members: dict[int, list[int]] = {}
        for index, rule_params in params_by_index.items():
            members.setdefault(id(rule_params), []).append(index)
        self._stepping = {}
        for key, indices in members.items():
            theirs = params_by_index[indices[0]]
            known = next((self._groups[i].written for i in indices if i in self._groups), {})
            written = {k: w for k, w in known.items() if same(theirs.get(k), w.seen)}  # not edited
            given = {**theirs, **{k: entry.value for k, entry in written.items()}}
            group = self._stepping[key] = _GroupWrites(written, theirs, written, given)
            self._groups.update((index, group) for index in indices)
            if not self.facts.writes:
                continue
            with suppress(Exception), torch.device("cpu"):  # where it takes no such parameter
                shape = SMALL_SHAPES[1 + self.facts.whole]
                stand_in = nn.Parameter(torch.ones(shape, dtype=torch.float32))
                if not steps.keys().isdisjoint(indices):
                    stand_in.grad = torch.ones_like(stand_in)
                group.write(self._step(given, stand_in, self._fresh(given, stand_in))[0])

    def kept(self) -> dict[int, dict[str, Any]]:
        """What is kept of each parameter beside its moments, as data that can be saved."""
        found: dict[int, dict[str, Any]] = {
            index: {"group": {key: entry._asdict() for key, entry in group.written.items()}}
            for index, group in self._groups.items()
            if group.written or index in self._kept
        }
        for index, kept in self._kept.items():
            found[index] |= {"scalars": copied(kept.scalars), "shapes": dict(kept.shapes)}
        return found

    def keep(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on with what `kept` gave."""
        self._last.clear()
        self._kept = {
            index: _Kept(
                copied(entry["scalars"]),
                {name: tuple(shape) for name, shape in entry["shapes"].items()},
            )
            for index, entry in saved.items()
            if "scalars" in entry
        }
        self._groups = {
            index: _GroupWrites(
                {k: _Written(e["value"], e.get("seen")) for k, e in kept["group"].items()}
            )
            for index, kept in saved.items()
        }

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """Step the optimizer on each tile; `rule_params` is its group, `step` is not used."""
        for tile in tiles:
            self._update(tile, grad_scale)

    def _update(self, tile: Tile, grad_scale: float) -> None:
        count, size = tile.weight.numel(), math.prod(tile.shape)
        if self.facts.whole and (tile.first or count != size):
            raise TrainingError(f"{self.facts.name} needs whole parameters, got a part of one")
        end, before = self._last.get(tile.parameter, (-1, None))
        if tile.first != end:  # the first tile of a step, wherever what a rank has of it begins
            before = self._kept.get(tile.parameter)
        after = before
        for part in [tile] if self.facts.whole else _cut(tile):
            after = self._run(part, before, grad_scale)
        self._last[tile.parameter] = tile.first + count, before
        if after is not None:
            self._kept[tile.parameter] = after

    def state_of(
        self,
        parameter: int,
        rule_params: Any,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """The optimizer's `state[p]`, as fresh tensors; empty before the first step."""
        kept = self._kept.get(parameter, _Kept())
        state = copied(kept.scalars)
        for moment, (name, own) in zip(moments, kept.shapes.items(), strict=False):
            own = own if self.facts.whole else shape
            state[name] = moment.values[: math.prod(own)].clone().view(own)
        return state

    def _run(self, tile: Tile, before: _Kept | None, grad_scale: float) -> _Kept:
        count = tile.weight.numel()
        shape = tile.shape if self.facts.whole else (count,)
        master = tile.weight
        if tile.rest is not None:
            assert self.kernels is not None
            master = self._master[:count]
            self.kernels.join(tile.weight, tile.rest, master)
        gradient = self._gradient[:count].copy_(tile.gradient)
        if grad_scale != 1.0:
            gradient.mul_(grad_scale)
        parameter = nn.Parameter(master.view(shape))
        parameter.grad = gradient.view(shape)
        group = self._stepping[id(tile.rule_params)]
        state = self._load(before, tile, parameter, group.given)
        after, left = self._step(group.given, parameter, state)
        if parameter.data_ptr() != master.data_ptr():  # it bound another tensor to .data
            master.copy_(parameter.detach().reshape(-1))
        kept = self._collect(tile, left, before or _Kept())
        if tile.rest is not None:
            assert self.kernels is not None
            self.kernels.split(master, tile.weight, tile.rest)
        group.write(after)
        return kept

    def _step(
        self, given: Mapping[str, Any], parameter: nn.Parameter, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step of a parameter alone; returns what its group and its state hold then."""
        group = copied(given)
        group["params"] = [parameter]
        self._worker.param_groups = [group]
        self._worker.state = defaultdict(dict)
        if state:
            self._worker.state[parameter] = state
        try:
            with torch.no_grad():
                self._worker.step()
            return group, self._worker.state.get(parameter, {})
        finally:
            self._worker.param_groups = []
            self._worker.state = defaultdict(dict)

    def _load(
        self, before: _Kept | None, tile: Tile, parameter: nn.Parameter, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state the optimizer left for this tile; state tensors are views of the moments."""
        if before is None:
            return self._fresh(group, parameter)
        state = copied(before.scalars)  # steps change them in place
        for moment, (name, own) in zip(tile.moments, before.shapes.items(), strict=False):
            shape = own if self.facts.whole else tuple(parameter.shape)
            state[name] = moment.values[: math.prod(shape)].view(shape)
        return state

    def _fresh(self, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        return self.facts.make_state(group, parameter) if self.facts.make_state else {}

    def _collect(self, tile: Tile, state: Mapping[str, Any], before: _Kept) -> _Kept:
        """Take the optimizer's state over: tensors to the moments, the rest as it is."""
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
        return _Kept(scalars, shapes)

    def _check_tensor(self, tile: Tile, name: str, value: Tensor, index: int) -> None:
        room = tile.weight.numel()
        fits = value.numel() <= room if self.facts.whole else value.numel() == room
        if index < len(tile.moments) and value.dtype is torch.float32 and fits:
            return
        raise TrainingError(
            f"{self.facts.name} keeps {name!r} of shape {tuple(value.shape)} and dtype "
            f"{value.dtype} for a tile of {room} elements; {len(tile.moments)} fp32 state tensors "
            "were planned",
            because="it did not do so when it was tried out on small parameters",
            remedy="use an optimizer whose state has the same form for all parameters",
        )


def is_per_element(name: str, value: Any, tensor_names: frozenset[str]) -> bool:
    """Whether an entry of the optimizer's state rests as a moment."""
    return isinstance(value, Tensor) and (value.numel() > 1 or name in tensor_names)


def small_shape(shape: Sequence[int], *, whole: bool) -> tuple[int, ...]:
    """That of a small parameter in place of what the optimizer is handed for one of this shape."""
    return SMALL_SHAPES[min(len(shape), 4) if whole else 1]


def _cut(tile: Tile) -> Iterator[Tile]:
    """Parts of a tile that are small enough for torch to use one thread."""
    count = tile.weight.numel()
    for start in range(0, count, TILE_ELEMENTS):
        part = slice(start, min(start + TILE_ELEMENTS, count))
        yield replace(
            tile,
            first=tile.first + start,
            weight=tile.weight[part],
            rest=None if tile.rest is None else tile.rest[part],
            moments=tuple(m.part(part.start, part.stop) for m in tile.moments),
            gradient=tile.gradient[part],
        )


# --- entries of groups -------------------------------------------------------------------------


def outline(value: Any) -> Any:
    """What of an entry may decide which state is kept: of a number its sign, not its size."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        number: Any = value
        return (number > 0) - (number < 0)
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bool(value.any())
    if isinstance(value, Mapping):
        return tuple((key, outline(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(outline, value))
    return type(value)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The entries whose outline differs -> what they are and were, in words."""
    return {
        key: f"group[{key!r}] {new.get(key)!r}, which was {old.get(key)!r}"
        for key in {**old, **new}
        if outline(old.get(key)) != outline(new.get(key))
    }


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that may be changed in place."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def same(one: Any, other: Any) -> bool:
    """Whether two entries are equal; NaN and objects are the same only as one object."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
