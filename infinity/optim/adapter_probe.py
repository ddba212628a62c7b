"""Trial of an adapted optimizer on small parameters: its state tensors, and its use with tiles.

The trial compares plain use of the optimizer with the engine's use of it, bit for bit: with flat
tiles first, then with full parameters. There are two parameters of each shape, one of them zeros,
with gradients of very different magnitudes, so that a value that leaks from one parameter to
another changes a result. Everything that persists from a step to the next is compared: parameters,
`state` and group entries. An optimizer whose results differ in both uses is rejected. Later steps
are checked too: see [Note: one parameter does not see another] and
[Note: small parameters step first].
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, InfinityError, ResidencyError
from infinity.optim.adapter import (
    COUPLING_CAUSE,
    COUPLING_REMEDY,
    HOST_FP32,
    SMALL_ELEMENTS,
    AdaptedOptimizer,
    AdapterFacts,
    Captured,
    copied,
    is_per_element,
    on_cpu,
    same,
    small_shape,
)
from infinity.optim.moments import Moment
from infinity.optim.update import Tile
from infinity.types import MomentFormat

OptimizerMaker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_MISSING = object()
MAX_MOMENTS = 6  # length of `plan.layout.MOMENTS`
_CUTS = (0, 128, 384, 512)  # tile boundaries of a small parameter of 512 elements
# Magnitudes of gradients (the inverse for every second parameter): clipping and trust ratios take
# effect in some of them.
SCALES = (1.0, 1e-9, 1e3)
# (magnitude, steps, maximum number of groups) of each trial; the first outlasts short warm-ups.
_TRIALS = tuple(zip(SCALES, (24, 3, 3), (4, None, None), strict=True))
_REFUSED = {
    "LBFGS": "it recomputes the loss several times per step, by a closure",
    "SparseAdam": "it takes sparse gradients, and the engine stores dense ones",
}


def probe_optimizer(
    given: torch.optim.Optimizer | OptimizerMaker, groups: list[dict[str, Any]]
) -> AdapterFacts:
    """Probe an optimizer, given as a class, as a function of groups, or as an instance.

    `groups` are those of `model_parameters`. A class or function is called with fp32 stand-ins on
    the meta device, so that nothing is allocated. Raises `ConfigError` for an optimizer that cannot
    be adapted.
    """
    _refuse_by_name(given if isinstance(given, type) else type(given))
    by_id = {id(p): p for group in groups for p in group["params"]}
    if isinstance(given, torch.optim.Optimizer):
        instance, make = given, None
    else:
        stand_ins = []
        for group in groups:
            group_stand_ins = [
                nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="meta"))
                for p in group["params"]
            ]
            by_id |= {id(s): p for s, p in zip(group_stand_ins, group["params"], strict=True)}
            stand_ins.append({**group, "params": group_stand_ins})
        instance, make = _call_maker(given, stand_ins), given
    name = _name_of(type(instance))
    made_groups = instance.param_groups  # the instance's objects, which schedulers hold
    if not isinstance(given, torch.optim.Optimizer):
        if not all(id(p) in by_id for g in made_groups for p in g["params"]):
            raise ConfigError("the optimizer holds a parameter that was not given to it")
        made_groups = [{**g, "params": [by_id[id(p)] for p in g["params"]]} for g in made_groups]
    has_state = any(instance.state.values())
    if has_state and (make is None or given is instance):
        raise ConfigError(
            f"the {name} has state already",
            because="it has stepped, or its constructor makes state",
            remedy="pass the class, or a function of groups: optimizer=lambda groups: ...",
        )
    worker = _without_parameters(instance, by_id.values())
    make_state = partial(_made_state, make) if has_state and make is not None else None
    facts = AdapterFacts(name, worker, made_groups, instance.defaults, make_state=make_state)
    with torch.random.fork_rng(devices=[]), on_cpu():
        return _run_trials(facts)


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
    in_torch = kind.__module__.startswith("torch.optim")
    return f"torch.optim.{kind.__name__}" if in_torch else kind.__qualname__


def _call_maker(maker: OptimizerMaker, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        optimizer = maker(groups)
    except ResidencyError as error:  # raised by CPUAdam and FusedAdam for stand-ins
        raise ConfigError(
            "infinity.CPUAdam or FusedAdam is not an optimizer for the engine",
            because="it is the standalone optimizer, which stores state on the devices of the "
            "parameters; the engine runs the same kernels on state in its tiers",
            remedy='write optimizer: {"type": "AdamW", ...} in the config, with lr, betas, eps, '
            'weight_decay, maximize and moments ("Adam" for adamw_mode=False), and leave '
            "initialize(optimizer=...) out; or pass torch.optim.AdamW, which selects that rule",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the optimizer refuses the model's parameter groups: {error}",
            remedy='optimizer: {"type": "Muon"} in the configuration, which uses AdamW for '
            "embeddings, heads and all that are not matrices"
            if getattr(maker, "__name__", "") == "Muon"
            else "optimizer takes a class, or a function of groups that returns an optimizer: "
            "optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3)",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer made a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            remedy="pass a class, an instance, or a function of groups that returns an optimizer",
        )
    _refuse_by_name(type(optimizer))
    return optimizer


def _without_parameters(
    instance: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """Return a copy with deep-copied attributes, without groups and state."""
    worker = type(instance).__new__(type(instance))
    memo: dict[int, Any] = {id(p): p for p in parameters}
    memo |= {id(p): p for group in instance.param_groups for p in group["params"]}
    memo[id(instance)] = worker
    excluded = ("param_groups", "state", "step")  # a scheduler may have wrapped `step`
    attributes = {k: v for k, v in vars(instance).items() if k not in excluded}
    vars(worker).update(copy.deepcopy(attributes, memo))
    worker.param_groups = []
    worker.state = defaultdict(dict)
    return worker


def _made_state(
    make: OptimizerMaker, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    fresh = make([{**group, "params": [parameter]}])
    return dict(fresh.state.get(parameter, {}))


# --- the trial -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """State of a small parameter: an entry of `AdaptedOptimizer.extra_state()`, and moments."""

    extra_state: Mapping[str, Any]
    moments: Sequence[Moment]


@dataclass(frozen=True)
class Outcome:
    """Results of a trial, by small parameter; `small_states` only if it was stepped by tiles."""

    parameters: list[Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    small_states: Sequence[Small] = ()

    def difference(self, plain: Outcome) -> str:
        """Describe the first bitwise difference from plain use; empty if there is none."""
        for value, plain_value in zip(self.parameters, plain.parameters, strict=True):
            if not same(value, plain_value):
                return f"a parameter of shape {tuple(value.shape)} differs"
        for label, dicts, plain_dicts in (
            ("state[p]", self.states, plain.states),
            ("its group", self.groups, plain.groups),
        ):
            for entries, plain_entries in zip(dicts, plain_dicts, strict=True):
                for name in {**entries, **plain_entries}:
                    if not same(entries.get(name, _MISSING), plain_entries.get(name, _MISSING)):
                        return f"{name!r} of {label} differs"
        return ""


class Trial:
    """Small parameters in groups, stepped as in plain torch, and tile by tile.

    There are two of each shape. The second one is zeros, and so is its first gradient if there are
    several steps. `groups` are (entries, shapes); `starts` has the state of parameters that have
    stepped before, by index.
    """

    def __init__(
        self,
        facts: AdapterFacts,
        groups: Sequence[tuple[Mapping[str, Any], Iterable[tuple[int, ...]]]],
        scale: float,
        steps: int = 1,
        starts: Mapping[int, Small] = MappingProxyType({}),
    ) -> None:
        self.facts = facts
        self.starts = starts
        generator = torch.Generator().manual_seed(1)
        profile = torch.ones(SMALL_ELEMENTS, dtype=torch.float32)
        profile[: _CUTS[1]] = 0.05  # so that the means of tiles differ

        def draw(shape: Sequence[int]) -> Tensor:
            flat = torch.randn(SMALL_ELEMENTS, generator=generator, dtype=torch.float32) * profile
            return flat.view(shape) if shape else flat[0].clone()

        self.options: list[dict[str, Any]] = []
        self.values: list[tuple[int, Tensor]] = []  # number of the group, values
        for number, (entries, shapes) in enumerate(groups):
            options = copied(entries)
            if isinstance(options.get("lr"), float) and options["lr"] == 0:
                options["lr"] = 1e-3  # a schedule may begin at 0, which hides all differences
            self.options.append(options)
            for shape in sorted({small_shape(shape) for shape in shapes}, key=len):
                self.values += [(number, draw(shape)), (number, torch.zeros(shape, **HOST_FP32))]
        scales = (scale, 1 / scale)
        self.gradients = [
            [draw(v.shape) * scales[i % 2] for i, (_, v) in enumerate(self.values)]
            for _ in range(steps)
        ]
        for gradient in self.gradients[0][1::2] if steps > 1 else ():
            gradient.zero_()

    def compare(self, facts: AdapterFacts, plain: Outcome) -> tuple[str, Sequence[Small]]:
        """Return the first difference between tiles and `plain` use, and the state after tiles."""
        try:
            tiled = self.tiled(facts)
        except InfinityError as error:
            return error.what, ()
        except Exception as error:
            return repr(error), ()
        return tiled.difference(plain), tiled.small_states

    def _adapted(self, facts: AdapterFacts) -> tuple[AdaptedOptimizer, list[Sequence[Moment]]]:
        facts = replace(facts, worker=_without_parameters(facts.worker, ()))
        adapted = AdaptedOptimizer(facts, tile_elements=SMALL_ELEMENTS)
        adapted.load_extra_state({index: small.extra_state for index, small in self.starts.items()})
        return adapted, [
            [m.clone() for m in self.starts[index].moments]
            if index in self.starts
            else [Moment.zeros(v.numel(), MomentFormat.FP32) for _ in range(facts.num_moments)]
            for index, (_, v) in enumerate(self.values)
        ]

    def plain(self) -> Outcome:
        """Step all groups together in one optimizer."""
        adapted, moments = self._adapted(self.facts)
        worker = adapted.facts.worker
        parameters = [nn.Parameter(value.clone()) for _, value in self.values]
        worker.param_groups = [{**copied(o), "params": []} for o in self.options]
        for index, ((number, value), parameter) in enumerate(
            zip(self.values, parameters, strict=True)
        ):
            group = worker.param_groups[number]
            group["params"].append(parameter)
            if index in self.starts:
                shape = tuple(value.shape)
                worker.state[parameter] = adapted.state_of(index, None, moments[index], shape, 0)
            elif self.facts.make_state is not None:
                worker.state[parameter] = self.facts.make_state(group, parameter)
        for gradients in self.gradients:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            with torch.no_grad():
                worker.step()
        flags = {name: value for name, value in vars(worker).items() if isinstance(value, bool)}
        vars(self.facts.worker).update(flags)  # such as a flag that the first step clears
        groups = [worker.param_groups[number] for number, _ in self.values]
        return Outcome(
            [p.detach() for p in parameters],
            [dict(worker.state.get(p, {})) for p in parameters],
            [{k: v for k, v in group.items() if k != "params"} for group in groups],
        )

    def tiled(self, facts: AdapterFacts) -> Outcome:
        """Step as the engine does: tile by tile, or parameter by parameter."""
        adapted, moments = self._adapted(facts)
        flats = [value.clone().reshape(-1) for _, value in self.values]
        shapes = [tuple(value.shape) for _, value in self.values]
        captured = [Captured(copied(options), frozenset()) for options in self.options]
        params_by_index = {index: captured[number] for index, (number, _) in enumerate(self.values)}
        for number, gradients in enumerate(self.gradients, 1):
            adapted.begin(params_by_index, dict.fromkeys(params_by_index, number))
            for index, (flat, gradient) in enumerate(zip(flats, gradients, strict=True)):
                cuts = () if facts.needs_full else (c for c in _CUTS[1:] if c < flat.numel())
                for first, end in pairwise((0, *cuts, flat.numel())):
                    moment_slices = tuple(m.part(first, end) for m in moments[index])
                    gradient_slice = gradient.reshape(-1)[first:end]
                    tile = Tile(
                        index, shapes[index], first, flat[first:end], None, moment_slices,
                        gradient_slice, params_by_index[index], number,
                    )  # fmt: skip
                    adapted.update([tile], 1.0)
        saved, indices = adapted.extra_state(), range(len(flats))
        written = [{k: e["value"] for k, e in saved[i].pop("group").items()} for i in indices]
        return Outcome(
            [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)],
            [adapted.state_of(i, None, moments[i], shapes[i], 0) for i in indices],
            [{**params_by_index[i].entries, **written[i]} for i in indices],
            [Small({"group": {}, **saved[i]}, moments[i]) for i in indices],
        )


def _run_trials(facts: AdapterFacts) -> AdapterFacts:
    """Return the completed facts; raises `ConfigError` if no use equals plain use."""
    groups = [
        (
            {k: v for k, v in group.items() if k not in ("params", "param_names")},
            {tuple(p.shape) for p in group["params"]},
        )
        for group in facts.groups
    ]
    trials = [
        Trial(facts, groups[:max_groups], scale, steps) for scale, steps, max_groups in _TRIALS
    ]
    try:
        torch.manual_seed(1)
        plain = [trial.plain() for trial in trials]
    except Exception as error:
        raise ConfigError(
            f"{facts.name} cannot step small parameters of the model's groups: {error!r}",
            because="they have random values, or zeros, and an engine's step() has neither a "
            "closure nor sparse gradients",
            remedy="use an optimizer whose step() takes no argument; for an optimizer with modes, "
            "pass a function of groups that calls its train() and returns it",
        ) from error
    facts = _with_state_tensors(facts, plain)
    _require_change(facts, trials[0], plain[0])
    torch.manual_seed(2)  # so that plain use and tiles draw different random numbers
    problem = ""
    for needs_full in (False, True):
        candidate = replace(facts, needs_full=needs_full)
        problems = (t.compare(candidate, p)[0] for t, p in zip(trials, plain, strict=True))
        problem = next(filter(None, problems), "")
        if not problem:
            return candidate
    raise ConfigError(
        f"{facts.name} does not give the same result when parameters are updated one at a time: "
        f"{problem}",
        because=COUPLING_CAUSE,
        remedy=COUPLING_REMEDY,
    )


def _with_state_tensors(facts: AdapterFacts, plain: Sequence[Outcome]) -> AdapterFacts:
    names: set[str] = set()
    num_moments = 0
    for outcome in plain:
        for parameter, state in zip(outcome.parameters, outcome.states, strict=True):
            tensors = {
                name: value
                for name, value in state.items()
                if is_per_element(name, value, frozenset())
            }
            for name, value in tensors.items():
                if value.dtype is not torch.float32 or value.numel() > parameter.numel():
                    raise ConfigError(
                        f"{facts.name} keeps {name!r} of shape {tuple(value.shape)} and dtype "
                        f"{value.dtype} for a parameter of shape {tuple(parameter.shape)}",
                        because="state tensors are stored in fp32, at most one number per element",
                        remedy="use an optimizer with fp32 state no larger than the parameter",
                    )
            names |= tensors.keys()
            num_moments = max(num_moments, len(tensors))
    if num_moments > MAX_MOMENTS:
        raise ConfigError(
            f"{facts.name} keeps {num_moments} state tensors per parameter; "
            f"at most {MAX_MOMENTS} are supported"
        )
    return replace(facts, tensor_names=frozenset(names), num_moments=num_moments)


def _require_change(facts: AdapterFacts, trial: Trial, plain: Outcome) -> None:
    for (_, old), new in list(zip(trial.values, plain.parameters, strict=True))[::2]:
        if torch.equal(old, new):
            raise ConfigError(
                f"{facts.name} changed nothing in {len(trial.gradients)} steps",
                because="its step() does not use param_groups, or a learning rate is 0",
                remedy="pass an optimizer that updates the parameters of param_groups",
            )
