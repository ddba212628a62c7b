"""Models larger than RAM from birth: built without memory, filled when the engine takes over.

`Init` builds a model whose large tensors are on the meta device and can be made again bit for
bit, `remember_values` says where a model's values are to be read from, and `Origins` is what
`initialize` asks, one tensor at a time.

[Note: how a model remembers]
The model carries what it needs itself: a forward pre-hook on the modules concerned, put there by
torch's public call and taken off by `initialize`. So nothing is global, a model that is dropped
takes its `Init` along, a forward without values is an error, and so is a copy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from infinity.config import Config, load_config
from infinity.errors import ConfigError, PresenceError
from infinity.model.deferred import DEFER_FROM_BYTES, Deferral
from infinity.model.initialisers import Initialisers
from infinity.model.promised import keep_promises

Read = Callable[[], Tensor]
_M = TypeVar("_M", bound="_Mark")


class _Mark:
    """A forward pre-hook by which a module remembers; it goes along with copies."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Nothing: the forward runs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PresenceError(
            "a model whose values are still to be made cannot be pickled",
            remedy="call infinity.initialize(model, config) first, then engine.state_dict()",
        )


class _Unborn(_Mark):
    """On modules built under `Init`: what makes the values, and how tensors were left."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.is_open = True  # the block is running
        self.versions: dict[int, int] = {}  # by id of the tensor, when the block ended

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Refuse a forward without values; inside the block it is carried out."""
        if not self.is_open:
            raise PresenceError(
                f"this {type(module).__name__} was built under infinity.Init and has no values yet",
                remedy="engine, *_ = infinity.initialize(model, config); engine(...)",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_open:
            raise PresenceError(
                "a model built under infinity.Init cannot be copied: its tensors hold no values",
                remedy="copy it inside the `with infinity.Init()` block",
            )
        return self


class _Remembered(_Mark):
    """On the module that `remember_values` got: functions that read values, by name."""

    def __init__(self, read: Mapping[str, Read]) -> None:
        self.read = dict(read)


class Init:
    """Build a model without its memory: `with infinity.Init(): model = Build()`.

    Everything in the block runs as written, but a large tensor is forgotten as soon as it is not
    being worked on; `initialize` makes it again, on its way to its home. The result equals an
    ordinary build with the same seed bit for bit. RAM holds about one tensor at a time (64 MiB
    more while the model is built), and initialisation takes twice as long.

    `config` is what `initialize` takes; its `seed`, if set, seeds torch on entry. Tensors below
    `threshold_bytes`, and tensors that the model's code puts on another device, are simply made.

    Until `initialize`, the model can be looked at, but a forward, a copy or a pickle of it raises
    `PresenceError`. Casting (`.bfloat16()`), tying and changing values belong into the block; what
    is done to a tensor without values afterwards is lost, and refused by `initialize` where torch
    lets us see it (not through `.data`). Blocks do not nest.
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
        self._mark: _Unborn | None = None
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
        self._mark = _Unborn(Deferral(self._threshold))
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
    or so, when its values are on their way home, so one tensor is in RAM at a time. The fp32
    master is made of the values as they are returned. Nothing is initialised for covered tensors;
    all others are as without this call. A later call wins over an earlier one.

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


def is_unborn(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model is on meta: `initialize` will make its values."""
    return any(tensor.is_meta for _, tensor in _named_tensors(model))


class Origins:
    """Where the tensors of a model take their first values from.

    In this order: `remember_values`, the tensor itself if it is real, its `Init`, the initialisers
    of its module (see `initialisers.py`; there values follow from `seed`, drawn if it is None).
    Sources are looked up once, by identity, so parameters may become absent meanwhile.

    Raises `ConfigError` for tensors on meta that were changed, cast or copied after their `Init`.
    """

    def __init__(self, model: nn.Module, seed: int | None = None) -> None:
        for module, read in keep_promises(model):
            remember_values(module, read)
        self._model = model
        self._read: dict[int, Read] = {}
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

    def forget(self) -> None:
        """The model has its values: it need not remember anything, and neither need we."""
        for module in self._model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Mark)]:
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
                        self._read[id(tensor)] = partial(_checked, full, tensor.shape, read)

    def _take_from_init(self, named: Mapping[str, Tensor]) -> None:
        marks = {id(m): m for module in self._model.modules() for m in _marks(module, _Unborn)}
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
            elif any(True for _ in _marks(_holder(self._model, name), _Unborn)):
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


def _checked(name: str, shape: torch.Size, read: Read) -> Tensor:
    value = read()
    if value.shape != shape:
        raise ConfigError(
            f"the value that was read for {name!r} has shape {tuple(value.shape)}, the model's "
            f"tensor {tuple(shape)}",
            remedy="read it from weights of this model",
        )
    return value


def _marks(module: nn.Module, kind: type[_M]) -> list[_M]:
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, kind)]


def _put(module: nn.Module, mark: _Mark) -> None:
    if not any(known is mark for known in _marks(module, _Mark)):
        module.register_forward_pre_hook(mark)


def _settle(module: nn.Module, mark: _Unborn) -> None:
    """Note how the block leaves the module's own deferred tensors."""
    for store in (module._parameters, module._buffers):
        for tensor in store.values():
            if tensor is not None and mark.deferral.holds(tensor):
                _put(module, mark)
                mark.versions[id(tensor)] = tensor._version
