"""Models larger than RAM from the start: built without memory, filled when the engine takes over.

`Init` builds a model whose large tensors are on the meta device and can be made again bit for
bit, `remember_values` says where a model's values are to be read from, and `InitialValues` is what
`initialize` asks, one tensor at a time.

[Note: origin of values]
The model carries what it needs itself: a forward pre-hook on the modules concerned, put there by
torch's public call and taken off by `initialize`. So nothing is global, a model that is dropped
takes its `Init` along, a forward without values is an error, and so is a copy.
"""

from __future__ import annotations

import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import MethodType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from infinity.config.schema import Config, load_config
from infinity.errors import ConfigError, ResidencyError
from infinity.model.deferred_init import DEFER_FROM_BYTES, DeferredInitMode, storage_key
from infinity.model.lazy_tensor import PackedRead, Read, pieces_of, resolve_lazy_tensors

# Values for a model built on the meta device: its initialisers, run as under `Init`.
#
# Deferred tensors stand in the model's for a moment, and whoever initialises in an ordinary build
# is called for every module, those inside first. That is `_init_weights(module)` of the nearest
# ancestor that has it (Hugging Face's protocol); where this leaves something untouched,
# `reset_parameters()`, `_reset_parameters()` and `reset_running_stats()` of the module and of its
# ancestors come before it. Of modules that share a tensor the first one has the last word.
#
# Random numbers come from (seed, name of the module), so the values do not depend on where they
# will live. They are drawn from the same distributions as in an ordinary build, but they are not
# the same numbers: there, all modules share one stream.
#
# [Note: module initializers]
# Whether an initialiser did its work shows in the tensor: it is filled with NaN before, and may
# hold none afterwards. One of a type without NaN must have been written to.


REMEDY = "build the model with real initialisers: `with infinity.Init(): model = Build()`"
PIECE_ELEMENTS = 4 << 20  # of values that can be read in pieces, so many at a time
_OWN = ("reset_parameters", "_reset_parameters", "reset_running_stats")
_FAMILY = "_init_weights"


class Initialisers:
    """Makes the values of `wanted`, tensors of the model that are on meta.

    The model is asked by `check`, or by the first `value`, and must be as it was until then; one
    thread may do so.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor], seed: int) -> None:
        self._seed = seed
        self._model = model
        self._names = {id(tensor): name for name, tensor in wanted.items()}
        self._deferral = DeferredInitMode(threshold_bytes=1)
        self._made: dict[int, Tensor] = {}
        self._by_storage: dict[int, int] = {}
        self._filled: set[int] = set()
        self._problem: ConfigError | None = None

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a wanted tensor, on the CPU. Raises `ConfigError` if nobody makes them."""
        self.check()
        return self._deferral.value(self._made[id(tensor)].data)

    def check(self) -> None:
        """Run the initialisers, with the memory of one module at a time.

        Raises one `ConfigError` that names every tensor that none of them fills.
        """
        if self._made:
            return
        modules = dict(self._model.named_modules())
        owners: dict[int, list[str]] = {key: [] for key in self._names}
        for name, module in modules.items():
            for _, _, tensor in _tensors_of(module):
                if id(tensor) in owners:
                    owners[id(tensor)].append(name)
        state = torch.get_rng_state()
        try:
            with torch.no_grad(), self._on_stage():
                every = _inside_first(modules, owners.values())
                self._call_families(modules, every)
                unfilled = [names for key, names in owners.items() if key not in self._filled]
                for name in _inside_first(modules, unfilled):
                    for method in _own_initialisers(modules[name]):
                        self._call(name, method)
                if unfilled:
                    self._call_families(modules, every)
        finally:
            torch.set_rng_state(state)
        missing = [name for key, name in self._names.items() if key not in self._filled]
        if missing:
            raise _no_initialiser(missing, self._problem)
        if self._problem is not None:
            raise self._problem

    def _call_families(self, modules: Mapping[str, nn.Module], names: list[str]) -> None:
        for name in names:
            line = (modules[above] for above in _line(name))
            head = next((m for m in line if callable(getattr(m, _FAMILY, None))), None)
            if head is not None:
                self._call(name, getattr(head, _FAMILY), modules[name])

    def _call(self, name: str, method: Callable[..., Any], *modules: nn.Module) -> None:
        """An initialiser, with random numbers of its own; what it wrote to is looked at."""
        self._draw_from(name, method.__name__)
        begun = self._deferral.num_operations
        try:
            with self._deferral:
                method(*modules)
        except Exception as error:
            self._problem = self._problem or ConfigError(
                f"module {name or 'model'!r} cannot be initialised alone: "
                f"{type(error).__name__}: {error}",
                because="the model was built on the meta device, and is initialised module by "
                "module",
                remedy=REMEDY,
            )
        for storage in self._deferral.written_since(begun) & self._by_storage.keys():
            key = self._by_storage[storage]
            value = self._deferral.value(self._made[key].data, copy=False)
            if not (_has_nan(value.dtype) and _shows_nan(value)):
                self._filled.add(key)
        self._deferral.forget_shadows()

    def _draw_from(self, *names: str) -> None:
        """Random numbers of their own for every module and everyone who initialises it."""
        text = "\0".join((str(self._seed), *names))
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number >> 1)

    @contextmanager
    def _on_stage(self) -> Iterator[None]:
        """Deferred tensors stand for the wanted ones, meta tensors for those that have values.

        So that an initialiser that reaches further does not overwrite them.
        """
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        others: dict[int, Tensor] = {}
        try:
            for module in self._model.modules():
                for store, key, tensor in _tensors_of(module):
                    wanted = id(tensor) in self._names
                    if wanted or not tensor.is_meta:
                        made = self._made if wanted else others
                        if id(tensor) not in made:
                            with self._deferral:
                                made[id(tensor)] = _stand_in(tensor, "cpu" if wanted else "meta")
                        replaced.append((store, key, tensor))
                        store[key] = made[id(tensor)]
            self._by_storage = {storage_key(t): key for key, t in self._made.items()}
            self._deferral.threshold_bytes = DEFER_FROM_BYTES  # of what initialisers make
            yield
        finally:
            for store, key, tensor in replaced:
                store[key] = tensor


def _stand_in(tensor: Tensor, device: str) -> Tensor:
    """Another tensor like it, filled as [Note: module initializers] says."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if device == "cpu" and _has_nan(tensor.dtype):
        made.fill_(float("nan"))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _inside_first(modules: Mapping[str, nn.Module], owners: Iterable[list[str]]) -> list[str]:
    """The modules that hold tensors and those that these are in, the innermost and last first."""
    lines = {above for names in owners for name in names for above in _line(name)}
    return [name for name in reversed(list(modules)) if name in lines]


def _line(name: str) -> Iterator[str]:
    """The name of a module, and those of the modules that it is in."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


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


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """A module's own tensors, with the dict that each is in."""
    stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for store in stores:
        yield from ((store, key, t) for key, t in list(store.items()) if t is not None)


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _shows_nan(tensor: Tensor) -> bool:
    """Without memory of the tensor's size: the least of numbers and NaN is NaN."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool(flat.numel()) and bool(flat.min().isnan())


def _no_initialiser(names: list[str], error: ConfigError | None = None) -> ConfigError:
    listed = ", ".join(repr(name) for name in names)
    because = "neither _init_weights(module) nor reset_parameters() of a module fills them"
    return ConfigError(
        f"{len(names)} tensor(s) on the meta device have no values: {listed}",
        because=error.what if error is not None else because,
        remedy=REMEDY,
    )


_M = TypeVar("_M", bound="_InitMark")


class _InitMark:
    """A forward pre-hook by which a module remembers; it goes along with copies."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Nothing: the forward runs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ResidencyError(
            "a model whose values are still to be made cannot be pickled",
            remedy="call infinity.initialize(model, config) first, then engine.state_dict()",
        )


class _Unwritten(_InitMark):
    """On modules built under `Init`: what makes the values, and how tensors were left."""

    def __init__(self, deferral: DeferredInitMode) -> None:
        self.deferral = deferral
        self.is_open = True  # the block is running
        self.versions: dict[int, int] = {}  # by id of the tensor, when the block ended

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Refuse a forward without values; inside the block it is carried out."""
        if not self.is_open:
            raise ResidencyError(
                f"this {type(module).__name__} was built under infinity.Init and has no values yet",
                remedy="engine, *_ = infinity.initialize(model, config); engine(...)",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_open:
            raise ResidencyError(
                "a model built under infinity.Init cannot be copied: its tensors hold no values",
                remedy="copy it inside the `with infinity.Init()` block",
            )
        return self


class _Remembered(_InitMark):
    """On the module that `remember_values` got: functions that read values, by name."""

    def __init__(self, read: Mapping[str, Read]) -> None:
        self.read = dict(read)


class Init:
    """Context manager in which a model is built without its memory.

    Code in the block runs unchanged, but a large tensor is released as soon as it is not in use;
    `initialize` makes its values again, directly in their tier. The result equals an ordinary build
    with the same seed, bit for bit. RAM holds about one tensor at a time, and 64 MiB more during
    the build; initialization takes twice as long.

    Until `initialize`, a forward, copy or pickle of the model raises `ResidencyError`. Cast, tie
    and change values inside the block: changes after it are lost, and refused by `initialize` where
    torch shows them (not those through `.data`). Blocks do not nest.

    Args:
        config: As for `initialize`; its `seed`, if set, seeds torch at the start of the block.
        threshold_bytes: Tensors below this size, and tensors on other devices, are made as usual.

    Raises:
        ConfigError: Another `Init`, or ``torch.device("meta")``, is active.

    Example:
        >>> with infinity.Init(config):
        ...     model = Model()
        >>> engine, *_ = infinity.initialize(model, config)
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        threshold_bytes: int = DEFER_FROM_BYTES,
    ) -> None:
        self._seed = load_config(config).seed if config is not None else None
        self._threshold = threshold_bytes
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._mark: _Unwritten | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if is_building(self._threshold):
            raise ConfigError(
                "infinity.Init cannot begin here: tensors are made on meta already",
                because="another Init, or torch.device('meta'), is active",
                remedy="use one `with infinity.Init()` block, and nothing else around the model",
            )
        if self._seed is not None:
            torch.manual_seed(self._seed)
        self._modules = {}
        self._mark = _Unwritten(DeferredInitMode(self._threshold))
        with ExitStack() as undo:
            for register in (
                registration.register_module_parameter_registration_hook,
                registration.register_module_buffer_registration_hook,
                registration.register_module_module_registration_hook,
            ):
                undo.callback(register(self._note).remove)
            undo.enter_context(self._mark.deferral)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        mark, self._mark = self._mark, None
        self._undo.close()
        assert mark is not None
        mark.deferral.forget_shadows()
        mark.is_open = False
        modules, self._modules = self._modules, {}
        if kind is not None:
            return
        seen: set[nn.Module] = set()
        for reference in modules.values():
            root = reference()
            if root is not None:  # `seen` also leaves out what another root has shown
                for _, module in root.named_modules(memo=seen):
                    _settle(module, mark)

    def _note(self, module: nn.Module, name: str, item: Any) -> None:
        """A module has got a parameter, a buffer or a child.

        Modules are marked now and not at the end only, so that deep copies are marked.
        """
        mark = self._mark
        if mark is None:
            return
        if isinstance(item, Tensor) and mark.deferral.holds(item):
            _put(module, mark)
        self._modules[id(module)] = weakref.ref(module)


def remember_values(model: nn.Module, read: Mapping[str, Read]) -> None:
    """Let `initialize` read these values, in place of what the model holds or would make.

    `read` maps names of `model.named_parameters()` and `named_buffers()` (of tied ones either
    name) to functions that return the whole tensor, on the CPU, in any dtype; each is called once
    or so, when its values are on their way to its tier, so one tensor is in RAM at a time. Of a
    `StoredTensor` only what is written is read, in parts. The fp32 master is made of the values as
    they are returned. Nothing is initialised for covered tensors; all others are as without this
    call. A later call wins over an earlier one.

    Raises `ConfigError` for names the model does not have. A wrong shape is a `ConfigError` of
    `initialize`, once writing has begun.
    """
    known = {name for name, _ in _named_tensors(model)}
    unknown = [name for name in read if name not in known]
    if unknown:
        raise ConfigError(
            f"the model has no {', '.join(map(repr, unknown))}",
            remedy="use names from model.named_parameters() and model.named_buffers()",
        )
    _put(model, _Remembered(read))


def is_building(threshold_bytes: int = DEFER_FROM_BYTES) -> bool:
    """Whether large tensors are made on meta now: in an `Init` block, or by `torch.device`."""
    made = torch.empty(max(threshold_bytes, DEFER_FROM_BYTES), dtype=torch.uint8)
    return made.untyped_storage().device.type == "meta"


class InitialValues:
    """Where the tensors of a model take their first values from.

    In this order: `remember_values`, `known` (by id of the tensor), the tensor itself if it is
    real, its `Init`, the initialisers of its module (below; there values follow from `seed`, drawn
    if it is None).
    Sources are looked up once, by identity, so parameters may become offloaded meanwhile.

    Raises `ConfigError` for tensors on meta that were changed, cast or copied after their `Init`.
    """

    def __init__(
        self, model: nn.Module, seed: int | None = None, known: Mapping[int, Read] | None = None
    ) -> None:
        for module, read in resolve_lazy_tensors(model):
            remember_values(module, read)
        self._model = model
        self._read: dict[int, Read] = dict(known or {})
        self._initialisers: Initialisers | None = None
        self._remember()
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in _named_tensors(model):
            if tensor.is_meta and id(tensor) not in self._read:
                named.setdefault(id(tensor), (name, tensor))
        self._take_from_init(dict(named.values()))
        wanted = {name: tensor for key, (name, tensor) in named.items() if key not in self._read}
        if wanted:
            if seed is None:
                seed = int(torch.randint(2**62, ()))
            self._initialisers = Initialisers(model, wanted, seed)
            for tensor in wanted.values():
                self._read[id(tensor)] = partial(self._initialisers.value, tensor)

    def check(self) -> None:
        """Raise one `ConfigError` naming every tensor on meta whose values nobody can make.

        Runs initialisers, with the memory of one module at a time.
        """
        if self._initialisers is not None:
            self._initialisers.check()

    def value(self, tensor: Tensor) -> Tensor:
        """The first value of a parameter or buffer; the tensor itself where it is to be kept.

        A made value is a CPU tensor of the same shape, of any dtype if it was read.
        """
        read = self._read.get(id(tensor))
        return tensor if read is None else read()

    def pieces(self, tensor: Tensor, first: int, count: int) -> list[Read] | None:
        """What gives `count` elements of its first value from `first`, flat, one piece after the
        other; None where that comes whole.
        """
        read = self._read.get(id(tensor))
        return None if read is None else pieces_of(read, tensor.shape, first, count)

    def most_bytes(self, parameters: Iterable[Tensor], quantises: bool) -> int:
        """The largest value that is made at once, of those that are not there yet, in bytes.

        With `quantises` matrices of frozen ones come whole, of which some are joined.
        """

        def nbytes(tensor: Tensor) -> int:
            inside = self.pieces(tensor, 0, tensor.numel())
            if inside is None:
                return tensor.nbytes
            is_whole = quantises and not tensor.requires_grad
            if is_whole or any(isinstance(read, PackedRead) for read in inside[:1]):
                whole = math.prod(tensor.shape[-2:]) * tensor.element_size()
                return (1 + (tensor.dim() > 2)) * whole
            return 4 * min(tensor.numel(), PIECE_ELEMENTS)

        return max((nbytes(tensor) for tensor in parameters if tensor.is_meta), default=0)

    def forget(self) -> None:
        """The model has its values: it need not remember anything, and neither need we."""
        for module in self._model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _InitMark)]:
                del hooks[key]
        self._read.clear()
        self._initialisers = None

    def _remember(self) -> None:
        tensors = dict(_named_tensors(self._model))
        for path, module in self._model.named_modules():
            for mark in _marks(module, _Remembered):
                for name, read in mark.read.items():
                    full = f"{path}.{name}" if path else name
                    if full in tensors:
                        tensor = tensors[full]
                        self._read[id(tensor)] = _Checked(full, tensor.shape, read)

    def _take_from_init(self, named: Mapping[str, Tensor]) -> None:
        marks = {id(m): m for module in self._model.modules() for m in _marks(module, _Unwritten)}
        if any(mark.is_open for mark in marks.values()):
            raise ConfigError(
                "initialize() was called inside the `with infinity.Init()` block of its model",
                remedy="end the block after the model is built",
            )
        lost = []
        for name, tensor in named.items():
            mark = next((m for m in marks.values() if m.deferral.holds(tensor)), None)
            if mark is not None:
                self._read[id(tensor)] = partial(mark.deferral.value, tensor.data)
                if mark.versions.get(id(tensor), tensor._version) != tensor._version:
                    lost.append(name)
            elif any(True for _ in _marks(_holder(self._model, name), _Unwritten)):
                lost.append(name)
        if lost:
            raise ConfigError(
                f"changed after infinity.Init: {', '.join(map(repr, lost))}",
                because="a tensor without values was edited, cast, copied or replaced; the change "
                "cannot be made again",
                remedy="do it inside the `with infinity.Init()` block",
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _holder(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


@dataclass(frozen=True, slots=True)
class _Checked:
    """Reads a value that must have the shape of the model's tensor."""

    name: str
    shape: torch.Size
    read: Read

    def __call__(self) -> Tensor:
        value = self.read()
        if value.shape != self.shape:
            raise ConfigError(
                f"the value that was read for {self.name!r} has shape {tuple(value.shape)}, the "
                f"model's tensor {tuple(self.shape)}",
                remedy="read it from weights of this model",
            )
        return value

    def pieces(self, first: int, count: int) -> list[Read] | None:
        """See `ChunkedRead`."""
        return pieces_of(self.read, self.shape, first, count)


def _marks(module: nn.Module, kind: type[_M]) -> list[_M]:
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, kind)]


def _put(module: nn.Module, mark: _InitMark) -> None:
    if not any(known is mark for known in _marks(module, _InitMark)):
        module.register_forward_pre_hook(mark)


def _settle(module: nn.Module, mark: _Unwritten) -> None:
    """Note how the block leaves the module's own deferred tensors."""
    for _, _, tensor in _tensors_of(module):
        if mark.deferral.holds(tensor):
            _put(module, mark)
            mark.versions[id(tensor)] = tensor._version
