"""Models larger than RAM: built without memory, with values that `initialize` writes to their tier.

`Init` builds a model whose large tensors are on the meta device and can be computed again bit for
bit, `remember_values` sets functions that read a model's values, and `InitialValues` returns the
values to `initialize`, one tensor at a time.

[Note: origin of values]
The model itself holds this information, in a forward pre-hook on the modules concerned, which is
registered by torch's public method and removed by `initialize`. So there is no global state, the
data of `Init` are freed with the model, a forward without values raises, and so does a copy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from infinity.config.schema import Config, load_config
from infinity.errors import ConfigError, ResidencyError
from infinity.model.deferred_init import DEFER_FROM_BYTES, DeferredInitMode
from infinity.model.initializers import Initializers, tensors_of
from infinity.model.lazy_tensor import PackedRead, Read, range_reads_of, resolve_lazy_tensors
from infinity.model.targets import piece_bytes

_MarkT = TypeVar("_MarkT", bound="_InitMark")


class _InitMark:
    """Forward pre-hook that holds the origin of a module's values; copies share it."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing: the forward may run."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ResidencyError(
            "a model whose values are still to be made cannot be pickled",
            remedy="call infinity.initialize(model, config) first, then engine.state_dict()",
        )


class _DeferredMark(_InitMark):
    """Mark of modules built under `Init`: its deferred tensors, and their versions at its end."""

    def __init__(self, deferral: DeferredInitMode) -> None:
        self.deferral = deferral
        self.is_open = True  # inside the `with` block
        self.versions: dict[int, int] = {}  # by id of the tensor, at the end of the block

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise `ResidencyError` for a forward without values; inside the block it may run."""
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


class _ReadsMark(_InitMark):
    """Mark of a module passed to `remember_values`: functions that read values, by name."""

    def __init__(self, read: Mapping[str, Read]) -> None:
        self.read = dict(read)


class Init:
    """Context manager in which a model is built without memory for its large tensors.

    Code in the block runs unchanged, but a large tensor is released as soon as it is not in use;
    `initialize` computes its values again and writes them to their tier. The result equals an
    ordinary build with the same seed, bit for bit. RAM holds about one tensor at a time, plus
    64 MiB during the build; initialization takes twice as long.

    Until `initialize`, a forward, copy or pickle of the model raises `ResidencyError`. Cast, tie
    and change values inside the block: later changes are lost, and `initialize` raises if torch
    records them (not for changes through `.data`). Blocks do not nest.

    Args:
        config: As for `initialize`; its `seed`, if set, seeds torch at the start of the block.
        threshold_bytes: Tensors below this size, and tensors not on the CPU, are created as usual.

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
        self._mark: _DeferredMark | None = None
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
        self._mark = _DeferredMark(DeferredInitMode(self._threshold))
        with ExitStack() as undo:
            for register in (
                registration.register_module_parameter_registration_hook,
                registration.register_module_buffer_registration_hook,
                registration.register_module_module_registration_hook,
            ):
                undo.callback(register(self._on_registration).remove)
            undo.enter_context(self._mark.deferral)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        mark, self._mark = self._mark, None
        self._undo.close()
        assert mark is not None
        mark.deferral.drop_shadows()
        mark.is_open = False
        modules, self._modules = self._modules, {}
        if error_type is not None:
            return
        seen: set[nn.Module] = set()
        for reference in modules.values():
            root = reference()
            if root is not None:  # `seen` skips modules that another root has yielded
                for _, module in root.named_modules(memo=seen):
                    _release_graphs(module, mark)
                    _record_versions(module, mark)

    def _on_registration(self, module: nn.Module, name: str, item: Any) -> None:
        """Note a module that gets a parameter, buffer or child (torch's registration hook).

        It is marked at once, not only at the end of the block, so that deep copies are marked.
        """
        mark = self._mark
        if mark is None:
            return
        if isinstance(item, Tensor) and mark.deferral.holds(item):
            _add_mark(module, mark)
        self._modules[id(module)] = weakref.ref(module)


def remember_values(model: nn.Module, read: Mapping[str, Read]) -> None:
    """Let `initialize` read these values instead of those that the model holds or would compute.

    Each function is usually called once, when its tensor is written to its tier, so one tensor is
    in RAM at a time; of a `ChunkedRead` only the elements to write are read. The fp32 master is
    made from the values as returned. Tensors in `read` are not initialized, others are unaffected.
    A later call overrides an earlier one.

    Args:
        model: The module that has the tensors.
        read: Functions by names in `model.named_parameters()` and `named_buffers()` (either name of
            a tied tensor). Each returns the full tensor, on the CPU, in any dtype.

    Raises:
        ConfigError: The model has no tensor of a name. A wrong shape raises in `initialize`, once
            writing has begun.
    """
    known = {name for name, _ in _named_tensors(model)}
    unknown = [name for name in read if name not in known]
    if unknown:
        raise ConfigError(
            f"the model has no {', '.join(map(repr, unknown))}",
            remedy="use names from model.named_parameters() and model.named_buffers()",
        )
    _add_mark(model, _ReadsMark(read))


def is_building(threshold_bytes: int = DEFER_FROM_BYTES) -> bool:
    """Return True if large tensors are created on meta: by an `Init` block or `torch.device`."""
    probe = torch.empty(max(threshold_bytes, DEFER_FROM_BYTES), dtype=torch.uint8)
    return probe.untyped_storage().device.type == "meta"


class InitialValues:
    """Initial values of a model's tensors.

    Sources in order of precedence: `remember_values`, `known` (by id of the tensor), the tensor
    itself if it is real, its `Init`, and initializers (see `Initializers`) with `seed`, which is
    random if None. Sources are looked up once, by identity, so parameters may be offloaded later.

    Raises `ConfigError` for tensors on meta that were changed, cast or copied after their `Init`.
    """

    def __init__(
        self, model: nn.Module, seed: int | None = None, known: Mapping[int, Read] | None = None
    ) -> None:
        for module, read in resolve_lazy_tensors(model):
            remember_values(module, read)
        self._model = model
        self._reads: dict[int, Read] = dict(known or {})
        self._initializers: Initializers | None = None
        self._take_remembered()
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in _named_tensors(model):
            if tensor.is_meta and id(tensor) not in self._reads:
                named.setdefault(id(tensor), (name, tensor))
        self._take_deferred(dict(named.values()))
        wanted = {name: tensor for key, (name, tensor) in named.items() if key not in self._reads}
        if wanted:
            if seed is None:
                seed = int(torch.randint(2**62, ()))
            self._initializers = Initializers(model, wanted, seed)
            for tensor in wanted.values():
                self._reads[id(tensor)] = partial(self._initializers.value, tensor)

    def check(self) -> None:
        """Raise one `ConfigError` naming every tensor on meta that no initializer fills.

        Runs initializers, with the memory of one module at a time.
        """
        if self._initializers is not None:
            self._initializers.check()

    def value(self, tensor: Tensor) -> Tensor:
        """Return the initial value of a parameter or buffer: the tensor itself if it has no source.

        Other values are CPU tensors of the same shape, of any dtype if they are read.
        """
        read = self._reads.get(id(tensor))
        return tensor if read is None else read()

    def makes(self, tensor: Tensor) -> bool:
        """Return True if each call of `value` computes or reads the value anew."""
        return id(tensor) in self._reads

    def pieces(self, tensor: Tensor, first: int, count: int) -> list[Read] | None:
        """Return reads of `count` elements of the initial value from `first`; see `ChunkedRead`."""
        read = self._reads.get(id(tensor))
        return None if read is None else range_reads_of(read, tensor.shape, first, count)

    def largest_value_bytes(self, parameters: Iterable[Tensor], quantizes: bool) -> int:
        """Return the bytes of the largest value made at once, of the parameters on meta.

        With `quantizes`, frozen matrices are read in full (see `piece_bytes`).
        """

        def nbytes(tensor: Tensor) -> int:
            reads = self.pieces(tensor, 0, tensor.numel())
            if reads is None:
                return tensor.nbytes
            packed = any(isinstance(read, PackedRead) for read in reads[:1])
            return piece_bytes(tensor, is_matrix=packed or (quantizes and not tensor.requires_grad))

        return max((nbytes(tensor) for tensor in parameters if tensor.is_meta), default=0)

    def free(self) -> None:
        """Remove all marks from the model and drop the sources, once values have been written."""
        for module in self._model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _InitMark)]:
                del hooks[key]
        self._reads.clear()
        self._initializers = None

    def _take_remembered(self) -> None:
        tensors = dict(_named_tensors(self._model))
        for path, module in self._model.named_modules():
            for mark in _marks(module, _ReadsMark):
                for name, read in mark.read.items():
                    full_name = f"{path}.{name}" if path else name
                    if full_name in tensors:
                        tensor = tensors[full_name]
                        self._reads[id(tensor)] = _CheckedRead(full_name, tensor.shape, read)

    def _take_deferred(self, named: Mapping[str, Tensor]) -> None:
        marks = {
            id(m): m for module in self._model.modules() for m in _marks(module, _DeferredMark)
        }
        if any(mark.is_open for mark in marks.values()):
            raise ConfigError(
                "initialize() was called inside the `with infinity.Init()` block of its model",
                remedy="end the block after the model is built",
            )
        changed = []
        for name, tensor in named.items():
            mark = next((m for m in marks.values() if m.deferral.holds(tensor)), None)
            if mark is not None:
                self._reads[id(tensor)] = partial(mark.deferral.value, tensor.data)
                if mark.versions.get(id(tensor), tensor._version) != tensor._version:
                    changed.append(name)
            elif _marks(self._model.get_submodule(name.rpartition(".")[0]), _DeferredMark):
                changed.append(name)
        if changed:
            raise ConfigError(
                f"changed after infinity.Init: {', '.join(map(repr, changed))}",
                because="a tensor without values was edited, cast, copied or replaced; the change "
                "cannot be made again",
                remedy="do it inside the `with infinity.Init()` block",
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True, slots=True)
class _CheckedRead:
    """A `Read` that checks that the value has the shape of the model's tensor."""

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
        return range_reads_of(self.read, self.shape, first, count)


def _marks(module: nn.Module, mark_class: type[_MarkT]) -> list[_MarkT]:
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, mark_class)]


def _add_mark(module: nn.Module, mark: _InitMark) -> None:
    if not any(hook is mark for hook in _marks(module, _InitMark)):
        module.register_forward_pre_hook(mark)


def _release_graphs(module: nn.Module, mark: _DeferredMark) -> None:
    """Detach deferred results that are attributes, as the weight of `nn.utils.weight_norm`.

    A parameter cannot get values while a graph refers to it. Views stay, and `initialize` raises.
    """
    for name, value in list(vars(module).items()):
        is_result = isinstance(value, Tensor) and value.grad_fn is not None and value._base is None
        if is_result and mark.deferral.holds(value):
            setattr(module, name, value.detach())


def _record_versions(module: nn.Module, mark: _DeferredMark) -> None:
    """Record the versions of the module's direct deferred tensors at the end of the block."""
    for _, _, tensor in tensors_of(module):
        if mark.deferral.holds(tensor):
            _add_mark(module, mark)
            mark.versions[id(tensor)] = tensor._version
