"""Initial values of a model built on the meta device, computed by its own initializers.

Deferred tensors temporarily replace those of the model, and the initializers of an ordinary build
are called for every module, children first: `_init_weights(module)` of the nearest ancestor that
has it (Hugging Face's protocol). If this leaves a tensor unfilled, `reset_parameters()`,
`_reset_parameters()` and `reset_running_stats()` of its module and of the ancestors are called, and
then `_init_weights` of all again. Modules run in reverse order, so that the first of those that
share a tensor determines its values.

Random numbers are seeded by (seed, module, initializer), so values do not depend on their tier.
They have the same distributions as in an ordinary build, but are not the same numbers: there, all
modules share one stream.

[Note: module initializers]
A tensor is filled with NaN before the initializers run, and counts as initialized when it has been
written to and holds no NaN. For a dtype without NaN, a write is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.model.deferred_init import DEFER_FROM_BYTES, DeferredInitMode, storage_key

REMEDY = "build the model with real initializers: `with infinity.Init(): model = Build()`"
_INIT_WEIGHTS = "_init_weights"


class Initializers:
    """Values of `wanted`, the model's tensors on meta, by name.

    `check`, or the first `value`, runs the model's initializers; the model must not change before.
    Not thread-safe.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], seed: int) -> None:
        self._seed = seed
        self._model = model
        self._names = {id(tensor): name for name, tensor in wanted.items()}
        self._deferral = DeferredInitMode(threshold_bytes=1)
        self._stand_ins: dict[int, Tensor] = {}
        self._key_by_storage: dict[int, int] = {}
        self._filled: set[int] = set()
        self._first_error: ConfigError | None = None

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, on the CPU; raise `ConfigError` as `check` does."""
        self.check()
        return self._deferral.value(self._stand_ins[id(tensor)].data)

    def check(self) -> None:
        """Run the initializers, with the memory of one module at a time.

        Raises one `ConfigError` that names every tensor that no initializer fills.
        """
        if self._stand_ins:
            return
        modules = dict(self._model.named_modules())
        owners: dict[int, list[str]] = {key: [] for key in self._names}
        for name, module in modules.items():
            for _, _, tensor in tensors_of(module):
                if id(tensor) in owners:
                    owners[id(tensor)].append(name)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), self._with_stand_ins():
            all_names = _children_first(modules, owners.values())
            self._call_init_weights(modules, all_names)
            unfilled = [names for key, names in owners.items() if key not in self._filled]
            for name in _children_first(modules, unfilled):
                for method in _callable_initializers(modules[name]):
                    self._call(name, method)
            if unfilled:
                self._call_init_weights(modules, all_names)
        missing = [name for key, name in self._names.items() if key not in self._filled]
        if missing:
            because = "neither _init_weights(module) nor reset_parameters() of a module fills them"
            error = self._first_error
            raise ConfigError(
                f"{len(missing)} tensor(s) on the meta device have no values: "
                + ", ".join(map(repr, missing)),
                because=because if error is None else error.what,
                remedy=REMEDY,
            )
        if self._first_error is not None:
            raise self._first_error

    def _call_init_weights(self, modules: Mapping[str, nn.Module], names: list[str]) -> None:
        for name in names:
            ancestors = (modules[ancestor] for ancestor in _lineage(name))
            owner = next((m for m in ancestors if callable(getattr(m, _INIT_WEIGHTS, None))), None)
            if owner is not None:
                self._call(name, getattr(owner, _INIT_WEIGHTS), modules[name])

    def _call(self, name: str, method: Callable[..., Any], *modules: nn.Module) -> None:
        """Run an initializer with its own random seed, and record the tensors that it fills."""
        text = "\0".join((str(self._seed), name, method.__name__))
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number >> 1)
        first_operation = self._deferral.num_operations
        try:
            with self._deferral:
                method(*modules)
        except Exception as error:
            self._first_error = self._first_error or ConfigError(
                f"module {name or 'model'!r} cannot be initialized alone: "
                f"{type(error).__name__}: {error}",
                because="the model was built on the meta device, and is initialized module by "
                "module",
                remedy=REMEDY,
            )
        for storage in self._deferral.written_since(first_operation) & self._key_by_storage.keys():
            key = self._key_by_storage[storage]
            value = self._deferral.value(self._stand_ins[key].data, copy=False)
            if _supports_nan(value.dtype) and value.numel():
                flat = torch.view_as_real(value) if value.is_complex() else value
                if flat.min().isnan():  # `min` propagates NaN without a temporary tensor
                    continue
            self._filled.add(key)
        self._deferral.drop_shadows()

    @contextmanager
    def _with_stand_ins(self) -> Iterator[None]:
        """Replace wanted tensors by deferred ones, and tensors with values by meta tensors.

        The latter are then safe from initializers that write to other modules' tensors.
        """
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        meta_stand_ins: dict[int, Tensor] = {}
        try:
            for module in self._model.modules():
                for tensors, key, tensor in tensors_of(module):
                    wanted = id(tensor) in self._names
                    if not wanted and tensor.is_meta:
                        continue
                    stand_ins = self._stand_ins if wanted else meta_stand_ins
                    if id(tensor) not in stand_ins:
                        with self._deferral:
                            device = "cpu" if wanted else "meta"
                            stand_ins[id(tensor)] = _stand_in(tensor, device)
                    replaced.append((tensors, key, tensor))
                    tensors[key] = stand_ins[id(tensor)]
            self._key_by_storage = {storage_key(t): key for key, t in self._stand_ins.items()}
            self._deferral.threshold_bytes = DEFER_FROM_BYTES  # for temporaries
            yield
        finally:
            for tensors, key, tensor in replaced:
                tensors[key] = tensor


def _stand_in(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor of the same shape; filled with NaN (see [Note: module initializers])."""
    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if device == "cpu" and _supports_nan(tensor.dtype):
        stand_in.fill_(float("nan"))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in, tensor.requires_grad)
    return stand_in


def _children_first(modules: Mapping[str, nn.Module], owners: Iterable[list[str]]) -> list[str]:
    """Return the owners and their ancestors, in reverse module order: children first."""
    included = {ancestor for names in owners for name in names for ancestor in _lineage(name)}
    return [name for name in reversed(list(modules)) if name in included]


def _lineage(name: str) -> Iterator[str]:
    """Yield the name of a module and those of its ancestors, up to the root."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _callable_initializers(module: nn.Module) -> list[MethodType]:
    """Return the initializers of a module that can be called without arguments."""
    methods: list[MethodType] = []
    for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"):
        method = getattr(module, name, None)
        if inspect.ismethod(method):
            parameters = inspect.signature(method).parameters.values()
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if all(p.default is not p.empty or p.kind in variable for p in parameters):
                methods.append(method)
    return methods


def tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (dict, key, tensor) of a module's direct parameters and buffers."""
    stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for store in stores:
        yield from ((store, key, t) for key, t in list(store.items()) if t is not None)


def _supports_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
