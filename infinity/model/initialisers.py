"""Values for a model built on the meta device: the initialisers of one module at a time.

A tensor that was left on meta is made by the module that holds it, alone: this module's tensors
become real for a moment, everything else below is on meta, and whoever initialises in an ordinary
build is called in the same order. That is `_init_weights(module)` of the nearest ancestor that
has it (Hugging Face's protocol), for the module and for the modules between; where this leaves
something untouched, `reset_parameters()`, `_reset_parameters()` and `reset_running_stats()` of
the module and of its ancestors come before it.

Random numbers come from (seed, name of the module), so the values depend neither on the order in
which they are asked for nor on where they will live. They are drawn from the same distributions
as in an ordinary build, but they are not the same numbers: there, all modules share one stream.

[Note: filled]
Whether an initialiser did its work shows in the tensor: it is filled with NaN before, and may
hold none afterwards. Types without NaN are filled with one byte; if every byte is the same
afterwards, the module is run once more with another byte.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError

REMEDY = "build the model with real initialisers: `with infinity.Init(): model = Build()`"
_OWN = ("reset_parameters", "_reset_parameters", "reset_running_stats")
_FAMILY = "_init_weights"

_Named = tuple[str, nn.Module]


@dataclass(frozen=True)
class _Facts:
    """What a wanted tensor is like; the tensor itself may be a placeholder by now."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool

    def make(self, byte: int) -> Tensor:
        """A real one, filled with what no initialiser leaves; see [Note: filled]."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        _fill(made, byte)
        return nn.Parameter(made, self.requires_grad) if self.is_parameter else made


@dataclass(frozen=True)
class _Owner:
    """A module that holds wanted tensors, and who initialises them.

    `keys` maps its own names to ids of the tensors. `own` are the modules with initialisers of
    their own, `family` those that `_init_weights` of the last one is called for; from the module
    upwards.
    """

    name: str
    module: nn.Module
    keys: Mapping[str, int]
    own: tuple[_Named, ...]
    family: tuple[_Named, ...]


class Initialisers:
    """Makes the values of `wanted`, tensors of the model that are on meta.

    Called while parameters may be on meta or absent, by one thread. Beside what it returns it
    keeps the other tensors of one module.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], seed: int) -> None:
        self._seed = seed
        self._facts = {
            id(t): _Facts(n, t.shape, t.dtype, isinstance(t, nn.Parameter), t.requires_grad)
            for n, t in wanted.items()
        }
        self._owners: dict[int, list[tuple[_Owner, str]]] = {key: [] for key in self._facts}
        self._by_signature: dict[Any, list[_Owner]] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._kept: tuple[_Owner, dict[str, Tensor]] | None = None
        modules = dict(model.named_modules())
        for name, module in modules.items():
            keys = {k: id(t) for k, t in _tensors_of(module) if id(t) in self._facts}
            if keys:
                owner = _owner(name, module, keys, modules)
                self._by_signature.setdefault(self._signature(owner), []).append(owner)
                for key, tensor in keys.items():
                    self._owners[tensor].append((owner, key))

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a wanted tensor, on the CPU. Raises `ConfigError` if nobody makes them."""
        for owner, key in self._owners[id(tensor)]:
            if self._kept is None or self._kept[0] is not owner or key not in self._kept[1]:
                self._kept = None  # before the next are made
                self._kept = (owner, self._made(owner))
            if key in self._kept[1]:
                return self._kept[1].pop(key).detach()
        raise _no_initialiser([self._facts[id(tensor)].name])

    def forget(self) -> None:
        """Let go of tensors that are kept."""
        self._kept = None

    def check(self) -> None:
        """Raise one `ConfigError` that names every tensor that no initialiser fills.

        One of each kind of module (class, shapes, and the classes above) is run.
        """
        filled: set[int] = set()
        problem: ConfigError | None = None
        for owners in self._by_signature.values():
            try:
                made = self._made(owners[0])
            except ConfigError as error:
                problem = problem or error
                continue
            filled.update(owner.keys[key] for owner in owners for key in made)
        missing = [facts.name for key, facts in self._facts.items() if key not in filled]
        if missing:
            raise _no_initialiser(missing, problem)

    def _signature(self, owner: _Owner) -> Any:
        facts = [(key, self._facts[t].shape, self._facts[t].dtype) for key, t in owner.keys.items()]
        above = [type(module) for _, module in (*owner.own, *owner.family)]
        return (type(owner.module), tuple(facts), tuple(above))

    def _made(self, owner: _Owner) -> dict[str, Tensor]:
        """Those of the module's wanted tensors that its initialisers fill."""
        made = self._run(owner, 1)
        doubtful = [key for key, tensor in made.items() if not _is_filled(tensor, 1)]
        again = {}
        if any(not _has_nan(made[key].dtype) for key in doubtful):
            again = self._run(owner, 0)
        for key in doubtful:
            if key not in again or not _is_filled(again[key], 0):
                del made[key]
        return made

    def _run(self, owner: _Owner, byte: int) -> dict[str, Tensor]:
        """The module's wanted tensors after its initialisers ran on `byte`."""
        made = {key: self._facts[tensor].make(byte) for key, tensor in owner.keys.items()}
        line = ((owner.name, owner.module), *owner.own, *owner.family)
        _, top = min(line, key=lambda named: len(named[0]))  # the one that holds all others
        reals = {tensor: made[key] for key, tensor in owner.keys.items()}
        state = torch.get_rng_state()
        try:
            with torch.no_grad(), self._on_stage(top, reals):
                self._call_family(owner)
                if not owner.family or not all(_is_filled(t, byte) for t in made.values()):
                    for tensor in made.values():
                        _fill(tensor, byte)
                    for name, module in owner.own:
                        for method in _own_initialisers(module):
                            self._draw_from(owner.name, name, method.__name__)
                            method()
                    self._call_family(owner)
        except Exception as error:
            raise ConfigError(
                f"module {owner.name or 'model'!r} cannot be initialised by itself: "
                f"{type(error).__name__}: {error}",
                because="the model was built on the meta device, and is initialised module by "
                "module",
                remedy=REMEDY,
            ) from error
        finally:
            torch.set_rng_state(state)
        return made

    def _call_family(self, owner: _Owner) -> None:
        for name, module in owner.family:
            self._draw_from(owner.name, name, _FAMILY)
            getattr(owner.family[-1][1], _FAMILY)(module)

    def _draw_from(self, *names: str) -> None:
        """Random numbers of their own for every module and everyone who initialises it."""
        text = "\0".join((str(self._seed), *names))
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number >> 1)

    @contextmanager
    def _on_stage(self, top: nn.Module, reals: Mapping[int, Tensor]) -> Iterator[None]:
        """Below `top`, `reals` stand for the tensors with these ids; all others are on meta.

        So that an initialiser that reaches further neither overwrites values nor allocates.
        """
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for module in top.modules():
                stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for store in stores:
                    for key, tensor in store.items():
                        if tensor is None or (tensor.is_meta and id(tensor) not in reals):
                            continue
                        replaced.append((store, key, tensor))
                        real = reals.get(id(tensor))
                        store[key] = self._stand_in(tensor) if real is None else real
            yield
        finally:
            for store, key, tensor in replaced:
                store[key] = tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._stand_ins:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._stand_ins[id(tensor)] = made
        return self._stand_ins[id(tensor)]


def _owner(
    name: str, module: nn.Module, keys: Mapping[str, int], modules: Mapping[str, nn.Module]
) -> _Owner:
    line = [(name, module)]
    while name:
        name = name.rpartition(".")[0]
        line.append((name, modules[name]))
    heads = [i for i, (_, m) in enumerate(line) if callable(getattr(m, _FAMILY, None))]
    family = line[: heads[0] + 1] if heads else []
    own = [(n, m) for n, m in line if _own_initialisers(m)]
    return _Owner(line[0][0], module, keys, tuple(own), tuple(family))


def _own_initialisers(module: nn.Module) -> list[MethodType]:
    """The methods that initialise a module, as far as they can be called without arguments."""
    found: list[MethodType] = []
    for name in _OWN:
        method = getattr(module, name, None)
        if inspect.ismethod(method):
            parameters = inspect.signature(method).parameters.values()
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if all(p.default is not p.empty or p.kind in variable for p in parameters):
                found.append(method)
    return found


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in store.items() if tensor is not None)


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _fill(tensor: Tensor, byte: int) -> None:
    if _has_nan(tensor.dtype):
        tensor.detach().fill_(float("nan"))
    else:
        _bytes_of(tensor).fill_(byte)


def _is_filled(tensor: Tensor, byte: int) -> bool:
    """Whether nothing is left of `_fill`; without memory of the tensor's size."""
    if not tensor.numel():
        return True
    if _has_nan(tensor.dtype):
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return not bool(flat.detach().min().isnan())  # the least of numbers and NaN is NaN
    raw = _bytes_of(tensor)
    return int(raw.min()) != byte or int(raw.max()) != byte


def _no_initialiser(names: list[str], error: ConfigError | None = None) -> ConfigError:
    listed = ", ".join(repr(name) for name in names)
    because = "neither _init_weights(module) nor reset_parameters() of a module fills them"
    return ConfigError(
        f"{len(names)} tensor(s) on the meta device have no values: {listed}",
        because=error.what if error is not None else because,
        remedy=REMEDY,
    )
