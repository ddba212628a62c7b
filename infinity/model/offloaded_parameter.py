"""Offloaded parameters: tensors without values that support reads and refuse edits.

[Note: offloaded parameters]
While a parameter is offloaded, its Python class is a subclass of its original class
(`offload_class`), so each Python operation on it calls `__torch_function__`:
- metadata, gradients and hooks are those of the placeholder, which has the real shape and dtype;
- between engine calls, reads that autograd does not record get a copy of the full value. It is
  read-only, so that an edit of `p.data` raises instead of being lost. A read of the copy after the
  parameter has changed raises: in plain torch `p.data` would have changed, too;
- reads that autograd records, and all reads during a call, first make the parameter resident, as
  attribute access does (see [Note: fetch on access] in `parameter_map.py`);
- edits raise.
Resident parameters have their original class, so a forward has no overhead and `torch.compile` sees
plain parameters. C++ code that takes the tensor without Python dispatch sees the placeholder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from infinity.errors import EngineClosedError, ResidencyError
from infinity.model.torch_private import without_torch_function

EDIT = "edit inside `with engine.materialized(module_or_params):`"
# Names that the placeholder answers. All others are reads or edits.
_METADATA = frozenset(
    """
    shape dtype device layout requires_grad grad grad_fn grad_dtype is_leaf ndim names name itemsize
    nbytes output_nr retains_grad is_sparse is_sparse_csr is_cuda is_cpu is_meta is_quantized
    is_nested is_mps is_xpu is_mkldnn is_ipu is_maia is_mtia is_vulkan _version _base _cdata
    _backward_hooks _post_accumulate_grad_hooks
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous
    is_floating_point is_complex is_signed is_inference is_pinned is_shared is_set_to get_device
    data_ptr untyped_storage _typed_storage _is_view __len__ __hash__ requires_grad_ retain_grad
    register_hook register_post_accumulate_grad_hook backward
    zeros_like ones_like empty_like full_like rand_like randn_like
    new_zeros new_ones new_empty new_full new_tensor
    """.split()  # noqa: SIM905
)
_IN_PLACE = frozenset(
    """
    __setitem__ __delitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ __imatmul__ __dlpack__
    """.split()  # noqa: SIM905
)
# These use only metadata of their second argument.
_LIKE_SECOND_ARGUMENT = frozenset(("view_as", "reshape_as", "expand_as", "type_as"))


class Access(Protocol):
    """Access to the values of an engine's offloaded parameters; raises `ResidencyError`."""

    def wake(self) -> None:
        """Load all values into the parameters permanently if the engine no longer exists."""

    def fetch(self, parameters: Sequence[Any]) -> list[Tensor]:
        """Make the parameters resident together; return them, or views to read instead."""

    def copy(self, parameter: Any) -> Tensor | None:
        """Return a copy of the full value on the compute device; None during a call."""

    def version(self, parameter: Any) -> int:
        """Return a number that changes whenever the value does."""

    def on_missing_gradient(self) -> None:
        """Handle a read of `p.grad` that returned None."""

    def check_gradient(self, parameter: Any, what: str) -> None:
        """Raise `ResidencyError` if autograd never computes the parameter's full gradient."""


_MARK_ATTRIBUTE = "_infinity_engine"


class _EngineMark:
    """Weak references to the engine of a parameter and its `Access`; not copied or pickled."""

    def __init__(self, engine: object | None, access: Access) -> None:
        # Called as a dead reference if there is no engine.
        self.engine: Callable[[], Any] = (lambda: None) if engine is None else weakref.ref(engine)
        self.access = weakref.ref(access)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()  # a type that `torch.load(weights_only=True)` allows

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def attach_engine(
    parameters: Iterable[nn.Parameter], engine: object | None, access: Access
) -> None:
    """Set the engine of parameters (None without one) and the access to their values."""
    mark = _EngineMark(engine, access)
    for parameter in parameters:
        setattr(parameter, _MARK_ATTRIBUTE, mark)


def detach_engine(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `attach_engine`."""
    for parameter in parameters:
        vars(parameter).pop(_MARK_ATTRIBUTE, None)


def engine_of(tensor: Tensor) -> Any:
    """Return the engine that a parameter belongs to, or None."""
    mark = getattr(tensor, _MARK_ATTRIBUTE, None)
    return mark.engine() if isinstance(mark, _EngineMark) else None


class OffloadedParameter:
    """Mixin of the classes of offloaded parameters."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, is_set = _name_of(func)
        hooks = ("register_hook", "register_post_accumulate_grad_hook")
        if name in hooks or func is torch.autograd.grad:
            for parameter in _tensors((args, kwargs)):
                if (access := _access_of(parameter)) is not None:
                    access.check_gradient(parameter, name)
        if name in _METADATA or (
            name in _LIKE_SECOND_ARGUMENT and not isinstance(args[0], OffloadedParameter)
        ):
            with without_torch_function():
                result = func(*args, **kwargs)
            if name == "grad" and result is None and not is_set and (access := _access_of(args[0])):
                access.on_missing_gradient()
            return result
        parameters = [p for p in _tensors((args, kwargs)) if isinstance(p, OffloadedParameter)]
        for parameter in parameters:
            if isinstance(parameter, OffloadedParameter):  # `wake` of the first may load the others
                _access(parameter).wake()
        if _is_edit(func, name, args, kwargs, is_set=is_set):
            raise _edit_error(name, "an offloaded parameter")
        recorded = torch.is_grad_enabled() and name not in ("data", "detach")
        values: dict[int, Tensor] = {}
        used: dict[Access, list[Any]] = {}  # resident ones too, which a fetch must not evict
        for parameter in _tensors((args, kwargs)):
            if not isinstance(parameter, OffloadedParameter):
                if (resident_access := _access_of(parameter)) is not None:
                    used.setdefault(resident_access, []).append(parameter)
                continue
            access, value = _access(parameter), None
            if not (recorded and _metadata(parameter, "requires_grad")):
                value = access.copy(parameter)
            if value is None:
                used.setdefault(access, []).append(parameter)
            else:
                values[id(parameter)] = _as_read_only(value, _Origin(parameter, access))
        for access, together in used.items():
            if any(isinstance(p, OffloadedParameter) for p in together):
                values.update(zip(map(id, together), access.fetch(together), strict=True))
        return func(*_replace(args, values), **_replace(kwargs, values))

    def __repr__(self) -> str:
        shape, dtype = (_metadata(self, attribute) for attribute in ("shape", "dtype"))
        return f"Parameter containing: offloaded, shape {tuple(shape)}, {dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = self._plain()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> nn.Parameter:
        """Return a plain parameter with a copy of the value."""
        value = _access(self).copy(self)
        if value is None:
            raise ResidencyError(
                "an offloaded parameter cannot be copied or pickled during a call of the engine",
                remedy="do it between calls",
            )
        return nn.Parameter(value, requires_grad=_metadata(self, "requires_grad"))


class _Origin:
    """The parameter that a value was copied from, and its version at that time."""

    def __init__(self, parameter: OffloadedParameter, access: Access) -> None:
        self._access = weakref.ref(access)
        self._parameter = parameter
        self._version = access.version(parameter)

    def check(self) -> None:
        """Raise `ResidencyError` if the parameter has changed since the copy."""
        access = self._access()
        if access is not None and access.version(self._parameter) != self._version:
            raise ResidencyError(
                "p.data (or p.detach()) of an offloaded parameter was kept, and the parameter has "
                "changed since",
                because="it is a copy, which does not change with the parameter",
                remedy="keep the parameter and read it again; or keep p.detach().clone()",
            )


class ReadOnly(Tensor):
    """Copy of the value of an offloaded parameter: reads return plain tensors, edits raise.

    Tensors that share its memory are read-only, too.
    """

    origin: _Origin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, is_set = _name_of(func)
        if name not in _METADATA and _is_edit(func, name, args, kwargs, is_set=is_set):
            raise _edit_error(name, "the value of an offloaded parameter")
        shared = {t: t.origin for t in _tensors((args, kwargs)) if isinstance(t, ReadOnly)}
        for origin in shared.values() if name not in _METADATA else ():
            origin.check()
        with without_torch_function():
            result = func(*args, **kwargs)
        if name == "numpy":
            result.setflags(write=False)
        return _protect(result, {_storage(t): origin for t, origin in shared.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


@cache
def offload_class(kind: type[nn.Parameter]) -> type:
    """Return the class of offloaded parameters of class `kind`."""
    members = {"__slots__": (), "__module__": __name__}
    metaclass: Any = type(kind)
    offloaded_class: type = metaclass(
        f"Offloaded{kind.__name__}", (OffloadedParameter, kind), members
    )
    return offloaded_class


def released_error() -> EngineClosedError:
    """Return the error for parameters whose engine was released without restoring them."""
    return EngineClosedError(
        "the engine of this module was released without close(restore=True), and the values of "
        "the parameters with it",
        because="weights were in its memory and files; it was closed, or had failed",
        remedy="use the module, and save it, while the engine is there; call "
        "engine.close(restore=True) for a plain module; or build the module anew",
    )


def _access_of(tensor: Tensor) -> Access | None:
    mark = vars(tensor).get(_MARK_ATTRIBUTE)
    return mark.access() if isinstance(mark, _EngineMark) else None


def _access(parameter: Any) -> Access:
    access = _access_of(parameter)
    if access is None:
        raise released_error()
    return access


def _metadata(parameter: Any, name: str) -> Any:
    with without_torch_function():
        return getattr(parameter, name)


def _name_of(func: Any) -> tuple[str, bool]:
    """Return the name of a function or property, and whether a property is set or deleted."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        property_name = getattr(getattr(func, "__self__", None), "__name__", "")
        return property_name, name != "__get__"
    return name, False


def _is_edit(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_set: bool
) -> bool:
    """Return True if the operation writes to an offloaded parameter or a `ReadOnly` copy."""
    writes = is_set or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    targets = [
        kwargs.get("out"),
        args[:1] if writes else None,
        _written_arguments(func, args, kwargs),
    ]
    return any(isinstance(t, OffloadedParameter | ReadOnly) for t in _tensors(targets))


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a `torch.ops` operation writes to, from its schemas."""
    overload_names = getattr(func, "overloads", None)
    overloads = (
        [func] if overload_names is None else [getattr(func, name) for name in overload_names()]
    )
    written = []
    for schema in filter(None, (getattr(overload, "_schema", None) for overload in overloads)):
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [*args[index : index + 1], kwargs.get(argument.name)]
    return written


def _edit_error(name: str, subject: str) -> ResidencyError:
    return ResidencyError(
        f"{name} of {subject}: it cannot be edited here; nothing was changed",
        because="its memory is on another tier, or is a slot that is reused",
        remedy=EDIT,
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _replace(tree: Any, values: Mapping[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return values.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: _replace(item, values) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replace(item, values) for item in tree)
    return tree


def _storage(tensor: Tensor) -> int:
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)


def _as_read_only(value: Tensor, origin: _Origin) -> ReadOnly:
    read_only = value.as_subclass(ReadOnly)
    read_only.origin = origin
    return read_only


def _protect(result: Any, shared: Mapping[int, _Origin]) -> Any:
    if type(result) is Tensor and _storage(result) in shared:
        return _as_read_only(result, shared[_storage(result)])
    if type(result) in (list, tuple):
        return type(result)(_protect(item, shared) for item in result)
    return result
