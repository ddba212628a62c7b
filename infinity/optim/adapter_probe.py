"""Trying an adapted optimizer out on small parameters: what it keeps, and whether it may be cut
into tiles.

The trial compares plain use of the optimizer with our use of it, bit for bit: flat tiles first,
then whole parameters. Two parameters of each kind, one of them of zeros, get gradients of
magnitudes far apart, so that what an optimizer takes from one to another shows. All that a step may
leave for the next is compared: parameters, `state`, the entries of groups and the optimizer's
attributes. What equals neither is refused: it mixes parameters, draws random numbers, or keeps
state elsewhere.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, ResidencyError
from infinity.optim.adapter import (
    SMALL_ELEMENTS,
    AdaptedOptimizer,
    AdapterFacts,
    MakeState,
    copied,
    is_per_element,
    small_shape,
)
from infinity.optim.moments import Moment
from infinity.optim.update import Tile
from infinity.types import MomentFormat

OptimizerMaker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_HOST_FP32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_NOTHING = object()
MAX_MOMENTS = 6  # of `plan.layout.MOMENTS`
_CUTS = (0, 128, 384, 512)  # tiles of a probe of 512 elements
# Magnitude of gradients (for every second parameter its inverse), steps, and groups at most:
# clipping and trust ratios act in some of them, warm-ups end in the long one.
_TRIALS = ((1.0, 24, 4), (1e-9, 3, None), (1e3, 3, None))
_REFUSED = {
    "LBFGS": "it computes the loss again several times a step, by a closure",
    "SparseAdam": "it takes sparse gradients, and gradient ranges here are dense",
}


def open_adapter(
    given: torch.optim.Optimizer | OptimizerMaker, groups: list[dict[str, Any]]
) -> AdapterFacts:
    """What to know of an optimizer class, a function that makes one of groups, or an instance.

    `groups` are those of `model_parameters`; a function gets them with stand-ins of fp32 on the
    meta device, so that nothing is allocated. Raises `ConfigError` for what cannot be run.
    """
    _refuse_by_name(given if isinstance(given, type) else type(given))
    real = {id(p): p for group in groups for p in group["params"]}
    if isinstance(given, torch.optim.Optimizer):
        instance, make = given, None
    else:
        stand_ins = []
        for group in groups:
            mine = [_stand_in(p) for p in group["params"]]
            real |= {id(s): p for s, p in zip(mine, group["params"], strict=True)}
            stand_ins.append({**group, "params": mine})
        instance, make = _make(given, stand_ins), given
    name = _name_of(type(instance))
    made = instance.param_groups  # of a given instance the same objects: schedulers keep working
    if not isinstance(given, torch.optim.Optimizer):
        made = [{**g, "params": [_real_of(p, real) for p in g["params"]]} for g in made]
    has_state = any(instance.state.values())
    if has_state and (make is None or given is instance):
        raise ConfigError(
            f"the {name} has state already",
            because="it has stepped, or its constructor makes state",
            remedy="pass the class, or a function of groups: optimizer=lambda groups: ...",
        )
    worker = _without_parameters(instance, real.values())
    make_state = _state_maker(make, instance) if has_state and make is not None else None
    facts = AdapterFacts(name, worker, made, instance.defaults, make_state=make_state)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return _try_out(facts)


def _refuse_by_name(kind: type) -> None:
    for cls in kind.__mro__:
        reason = _REFUSED.get(cls.__name__)
        if reason is not None and cls.__module__.startswith("torch.optim"):
            raise ConfigError(
                f"{_name_of(kind)} cannot be used with offloaded state",
                because=reason,
                remedy="use another optimizer",
            )


def _name_of(kind: type) -> str:
    ours = kind.__module__.startswith("torch.optim")
    return f"torch.optim.{kind.__name__}" if ours else kind.__qualname__


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="meta"))


def _make(maker: OptimizerMaker, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        made = maker(groups)
    except ResidencyError as error:  # what our standalone optimizers say of stand-ins
        raise ConfigError(
            "infinity.CPUAdam or FusedAdam is not an optimizer for the engine",
            because="it is the standalone one, over parameters and state in the memory of a model; "
            "the engine runs the same kernels on state that it keeps itself",
            remedy='write optimizer: {"type": "AdamW", ...} in the config, with lr, betas, eps, '
            'weight_decay, maximize and moments ("Adam" for adamw_mode=False), and leave '
            "initialize(optimizer=...) out; or pass torch.optim.AdamW, which is that rule",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the optimizer refuses the model's parameter groups: {error}",
            remedy='optimizer: {"type": "Muon"} in the configuration, which leaves what are no '
            "matrices, embeddings and heads to AdamW"
            if getattr(maker, "__name__", "") == "Muon"
            else "optimizer takes a class, or a function of groups that returns an optimizer: "
            "optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3)",
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer made a {type(made).__name__}, not a torch.optim.Optimizer",
            remedy="pass a class, an instance, or a function of groups that returns an optimizer",
        )
    _refuse_by_name(type(made))
    return made


def _real_of(parameter: Tensor, real: Mapping[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in real:
        raise ConfigError("the optimizer holds a parameter that was not given to it")
    return real[id(parameter)]


def _without_parameters(
    instance: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """A copy with attributes of its own, but neither groups nor state."""
    worker = type(instance).__new__(type(instance))
    memo: dict[int, Any] = {id(p): p for p in parameters}
    memo |= {id(p): p for group in instance.param_groups for p in group["params"]}
    memo[id(instance)] = worker
    apart = ("param_groups", "state", "step")  # a scheduler may have wrapped `step`
    attributes = {k: v for k, v in vars(instance).items() if k not in apart}
    vars(worker).update(copy.deepcopy(attributes, memo))
    worker.param_groups = []
    worker.state = defaultdict(dict)
    return worker


def _state_maker(make: OptimizerMaker, instance: torch.optim.Optimizer) -> MakeState:
    """What makes the state of one tile as the constructor does."""

    def make_state(group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        fresh = make([{**group, "params": [parameter]}])
        return dict(fresh.state.get(parameter, {}))

    return make_state


# --- the trial -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """All that a trial left: by small parameter, and the attributes of the optimizer.

    `elsewhere` are names of what steps changed that is kept neither by parameter nor by group.
    """

    parameters: list[Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    elsewhere: tuple[str, ...] = ()

    def difference(self, other: _Outcome) -> str:
        """What is not the same, bit for bit, as in plain use; empty if nothing is."""
        if other.elsewhere:
            return f"steps change {other.elsewhere[0]}"
        for one, two in zip(self.parameters, other.parameters, strict=True):
            if not _same_value(one, two):
                return f"a parameter of shape {tuple(one.shape)} differs"
        for what, ours, theirs in (
            ("state[p]", self.states, other.states),
            ("its group", self.groups, other.groups),
            ("its attributes", [self.attributes], [other.attributes]),
        ):
            for mine, plain in zip(ours, theirs, strict=True):
                for name in {**mine, **plain}:
                    if not _same_value(mine.get(name, _NOTHING), plain.get(name, _NOTHING)):
                        return f"{name!r} of {what} differs"
        return ""


class _Trial:
    """Small parameters in the model's groups, two for each number of dimensions: one of zeros."""

    def __init__(self, facts: AdapterFacts, scale: float, steps: int, groups: int | None) -> None:
        self.facts = facts
        chance = torch.Generator().manual_seed(1)
        profile = torch.ones(SMALL_ELEMENTS, dtype=torch.float32)
        profile[: _CUTS[1]] = 0.05  # so that tiles differ in their means

        def draw(shape: Sequence[int]) -> Tensor:
            flat = torch.randn(SMALL_ELEMENTS, generator=chance, dtype=torch.float32) * profile
            return flat.view(shape) if shape else flat[0].clone()

        self.options: list[dict[str, Any]] = []
        self.values: list[tuple[int, Tensor]] = []  # number of the group, values
        for number, group in enumerate(facts.groups[:groups]):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            if isinstance(options.get("lr"), float) and options["lr"] == 0:
                options["lr"] = 1e-3  # a schedule may begin with 0, where nothing shows
            self.options.append(options)
            shapes = sorted({small_shape(p.shape, whole=True) for p in group["params"]}, key=len)
            for shape in shapes:
                self.values += [(number, draw(shape)), (number, torch.zeros(shape, **_HOST_FP32))]
        scales = (scale, 1 / scale)
        self.gradients = [
            [draw(v.shape) * scales[i % 2] for i, (_, v) in enumerate(self.values)]
            for _ in range(steps)
        ]
        for gradient in self.gradients[0][1::2]:
            gradient.zero_()

    def plain(self) -> _Outcome:
        """Plain use: all groups together in one optimizer."""
        worker = _without_parameters(self.facts.worker, ())
        mine = [nn.Parameter(value.clone()) for _, value in self.values]
        worker.param_groups = [{**copy.deepcopy(o), "params": []} for o in self.options]
        for (number, _), parameter in zip(self.values, mine, strict=True):
            group = worker.param_groups[number]
            group["params"].append(parameter)
            if self.facts.make_state is not None:
                worker.state[parameter] = self.facts.make_state(group, parameter)
        for gradients in self.gradients:
            for parameter, gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient.clone()
            with torch.no_grad():
                worker.step()
        before, after = map(_attributes, (self.facts.worker, worker))
        changed = {k: v for k, v in after.items() if not _same_value(v, before.get(k, _NOTHING))}
        groups = [worker.param_groups[number] for number, _ in self.values]
        return _Outcome(
            [p.detach() for p in mine],
            [dict(worker.state.get(p, {})) for p in mine],
            [{k: v for k, v in group.items() if k != "params"} for group in groups],
            after,
            (
                *(f"state[{k!r}]" for k in worker.state if not any(k is p for p in mine)),
                *(f"its attribute {k!r}" for k, v in changed.items() if not isinstance(v, bool)),
            ),
        )

    def wrote(self, outcome: _Outcome) -> bool:
        """Whether steps changed an entry of a group."""
        before = [self.options[number] for number, _ in self.values]
        return not _same_value(before, outcome.groups)

    def tiled(self, facts: AdapterFacts) -> _Outcome:
        """Our use: tile by tile, or parameter by parameter."""
        facts = replace(facts, worker=_without_parameters(facts.worker, ()))
        adapted = AdaptedOptimizer(facts, tile_elements=SMALL_ELEMENTS)
        flats = [value.clone().reshape(-1) for _, value in self.values]
        shapes = [tuple(value.shape) for _, value in self.values]
        params_by_index = {
            i: copied(self.options[number]) for i, (number, _) in enumerate(self.values)
        }
        moments = [
            tuple(Moment.zeros(f.numel(), MomentFormat.FP32) for _ in range(facts.num_moments))
            for f in flats
        ]
        for number, gradients in enumerate(self.gradients, 1):
            adapted.begin(params_by_index, dict.fromkeys(params_by_index, number))
            for index, (flat, gradient) in enumerate(zip(flats, gradients, strict=True)):
                inner = () if facts.whole else (c for c in _CUTS[1:] if c < flat.numel())
                for first, end in pairwise((0, *inner, flat.numel())):
                    parts = tuple(m.part(first, end) for m in moments[index])
                    part = gradient.reshape(-1)[first:end]
                    tile = Tile(
                        index, shapes[index], first, flat[first:end], None, parts, part,
                        params_by_index[index], number,
                    )  # fmt: skip
                    adapted.update([tile], 1.0)
        kept, indices = adapted.kept(), range(len(flats))
        return _Outcome(
            [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)],
            [adapted.state_of(i, None, moments[i], shapes[i], 0) for i in indices],
            [
                params_by_index[i] | {k: e["value"] for k, e in kept[i]["group"].items()}
                for i in indices
            ],
            _attributes(facts.worker),
        )


def _attributes(worker: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(worker).items() if k not in ("param_groups", "state")}


def _try_out(facts: AdapterFacts) -> AdapterFacts:
    """The facts completed; raises `ConfigError` if plain use cannot be had in parts."""
    trials = [_Trial(facts, *how) for how in _TRIALS]
    try:
        torch.manual_seed(1)
        plain = [trial.plain() for trial in trials]
    except Exception as error:
        raise ConfigError(
            f"{facts.name} cannot step small parameters of the model's groups: {error}",
            because="an engine's step() has neither a closure nor sparse gradients",
            remedy="use an optimizer whose step() takes no argument; of one with modes pass a "
            "function of groups that calls its train() before it returns it",
        ) from error
    facts = replace(_with_names(facts, plain), writes=any(map(_Trial.wrote, trials, plain)))
    _require_change(facts, trials[0], plain[0])
    torch.manual_seed(2)  # so that nobody equals by drawing the same random numbers
    problem = ""
    for whole in (False, True):
        candidate = replace(facts, whole=whole)
        try:
            found = (t.tiled(candidate).difference(p) for t, p in zip(trials, plain, strict=True))
            problem = next(filter(None, found), "")
        except Exception as error:
            problem = repr(error)
        if not problem:
            return candidate
    raise ConfigError(
        f"{facts.name} does not give the same result when parameters are updated one at a time: "
        f"{problem}",
        because="it mixes parameters (D-Adaptation and Prodigy estimate one step size for all), "
        "draws random numbers, or keeps state outside of state[p] and its group",
        remedy="use an optimizer that treats every parameter separately, such as torch.optim.AdamW",
    )


def _with_names(facts: AdapterFacts, plain: Sequence[_Outcome]) -> AdapterFacts:
    names: set[str] = set()
    most = 0
    for outcome in plain:
        for parameter, state in zip(outcome.parameters, outcome.states, strict=True):
            found = {
                name: value
                for name, value in state.items()
                if is_per_element(name, value, frozenset())
            }
            for name, value in found.items():
                if value.dtype is not torch.float32 or value.numel() > parameter.numel():
                    raise ConfigError(
                        f"{facts.name} keeps {name!r} of shape {tuple(value.shape)} and dtype "
                        f"{value.dtype} for a parameter of shape {tuple(parameter.shape)}",
                        because="state tensors rest in fp32, in the place of one number an element",
                        remedy="use an optimizer with fp32 state no larger than the parameter",
                    )
            names |= found.keys()
            most = max(most, len(found))
    if most > MAX_MOMENTS:
        raise ConfigError(
            f"{facts.name} keeps {most} state tensors per parameter; {MAX_MOMENTS} is the most"
        )
    return replace(facts, tensor_names=frozenset(names), num_moments=most)


def _require_change(facts: AdapterFacts, trial: _Trial, plain: _Outcome) -> None:
    for (_, old), new in list(zip(trial.values, plain.parameters, strict=True))[::2]:
        if torch.equal(old, new):
            raise ConfigError(
                f"{facts.name} changed nothing in {len(trial.gradients)} steps",
                because="its step() does not go by param_groups, or a learning rate is 0",
                remedy="pass an optimizer that updates the parameters of param_groups",
            )


def _same_value(one: Any, other: Any) -> bool:
    """Whether two values have the same bits; objects are compared by their attributes."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and _same_bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_value(one[k], other[k]) for k in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_value, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)  # NaN equals NaN
    if hasattr(one, "__dict__"):
        return _same_value(vars(one), vars(other))
    return bool(one == other)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)
