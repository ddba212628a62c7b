"""Deferred initialization of modules larger than RAM: run initializers, drop values, replay later.

Inside `DeferredInitMode` every large tensor is created on the meta device; a *shadow* with its real
values exists only while operations use it. Every operation runs once on real values, so that
random numbers are drawn and values that control an initializer (a rejection loop) are read exactly
as in an ordinary build. It is logged with the state of the random generator. `value` replays the
part of the log that one tensor depends on. The result equals the ordinary build bit for bit, in
whatever order values are requested, and RAM holds about one tensor at a time. The cost is that
initialization runs twice.

Only CPU tensors are deferred: tensors that the model's code creates on other devices stay there.

[Note: storages] A deferred tensor is identified by its storage, so that views, `.data`, tied
weights and `nn.Parameter(...)` need no bookkeeping: real arguments are built from (storage, offset,
size, stride). Meta storages are retained, so that their addresses are not reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from infinity.common.malloc import return_freed_memory
from infinity.errors import ConfigError
from infinity.model.torch_calls import (
    generator_state,
    indices_on_cpu,
    mutated_arguments,
    nbytes_of,
    results_on_meta,
    returns_only_views,
    tensors_in,
)
from infinity.model.torch_private import (
    DispatchMode,
    decomposed_weight_norm,
    is_meta_scalar,
    is_weight_norm,
    no_dispatch_modes,
    tree_leaves,
    tree_map,
)

DEFER_FROM_BYTES = 256 << 10  # smaller tensors are created as usual
KEEP_BYTES = 64 << 20  # shadows cached in addition to those of the current operation
RETURN_BYTES = 32 << 20  # of dropped shadows, after which free memory is returned to the system

# Methods that access elements without an operation of torch.
_IN_PYTHON = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.apply_, Tensor.map_})
_WITH_INDICES = frozenset({Tensor.__getitem__, Tensor.__setitem__})
# Methods that take the dtype and the device of an argument, at this position, and not its values.
_WITH_TYPE_OF = {Tensor.new: 0, Tensor.new_tensor: 0, Tensor.type_as: 1, Tensor.to: 1}
# In-place operations whose result does not depend on the target's previous values.
_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_"})


@dataclass(frozen=True)
class _LoggedTensor:
    """Reference to a deferred tensor, in the arguments of a logged call."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Entry:
    """One logged call, with a `_LoggedTensor` for each deferred argument, and its storages."""

    call: Any
    args: Any
    kwargs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: int | None
    created: tuple[tuple[int, int], ...]  # (index among the results, storage)
    state: Tensor | None  # of the random generator, before the call


@dataclass(eq=False)
class _Storage:
    """A meta storage, the indices of log entries that wrote to it, and its shadow if it has one."""

    meta: torch.UntypedStorage
    nbytes: int
    entries: list[int] = field(default_factory=list)
    shadow: torch.UntypedStorage | None = None


class _ReportCpuMode(TorchFunctionMode):
    """Mode in which deferred tensors report a CPU device: `torch.nn.init` skips meta tensors."""

    def __init__(self, deferral: DeferredInitMode) -> None:
        super().__init__()
        self._reported: dict[Any, Any] = {
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: torch.device("cpu"),
        }
        self._deferral = deferral

    def __torch_function__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if call in self._reported and self._deferral.holds(args[0]):
            return self._reported[call]
        if call in _IN_PYTHON and any(map(self._deferral.holds, tensors_in(args))):
            return self._call_with_values(call, args, kwargs)
        if call in _WITH_INDICES and self._deferral.holds(args[0]):
            args = (args[0], indices_on_cpu(args[1]), *args[2:])
        elif call in _WITH_TYPE_OF:
            position = _WITH_TYPE_OF[call]
            like = args[position] if position < len(args) else None
            if isinstance(like, Tensor) and self._deferral.holds(like):
                real = torch.empty(0, dtype=like.dtype, device="cpu")
                args = (*args[:position], real, *args[position + 1 :])
        elif is_weight_norm(call):  # of a large, deferred tensor and a small, real one
            call = decomposed_weight_norm
        return call(*args, **kwargs)

    def _call_with_values(self, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a method that reads or writes elements outside torch with real values."""
        with no_dispatch_modes():
            values = [
                self._deferral.value(a) if isinstance(a, Tensor) and self._deferral.holds(a) else a
                for a in args
            ]
            result = call(*values, **kwargs)
        if isinstance(result, Tensor):  # written in place
            with torch.no_grad():
                return args[0].copy_(result)
        if not isinstance(result, list):
            result.setflags(write=False)  # an array of a copy: writes would be lost
        return result


class DeferredInitMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Context in which a model is built with deferred tensors; `value` computes them afterwards."""

    def __init__(self, threshold_bytes: int = DEFER_FROM_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.threshold_bytes = threshold_bytes
        self._storages: dict[int, _Storage] = {}
        self._log: list[_Entry] = []
        self._cached: dict[int, None] = {}  # storages with a shadow, least recently used first
        self._cached_bytes = 0
        self._dropped_bytes = 0  # since free memory was last returned
        self._report_cpu = _ReportCpuMode(self)

    # --- after the build -----------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor is deferred, so that `value` can compute its values."""
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return False  # these have no storage
        return storage_key(tensor) in self._storages

    def value(self, tensor: Tensor, *, copy: bool = True) -> Tensor:
        """Return the values in a contiguous CPU tensor of the tensor's shape and dtype.

        Without `copy` it may be a view of the shadow, with the tensor's strides, for immediate use.
        """
        logged = _logged(tensor)
        shadow = self._storages[logged.storage].shadow
        if shadow is not None:
            view = _view(shadow, logged)
            return view.clone(memory_format=torch.contiguous_format) if copy else view
        storage = self._replay(logged.storage)
        return _view(storage, logged).contiguous()  # not shared: no copy needed

    @property
    def num_operations(self) -> int:
        """Return the number of operations that wrote to or created deferred tensors."""
        return len(self._log)

    def written_since(self, number: int) -> set[int]:
        """Return the storages (see `storage_key`) written to from operation `number` on."""
        return {key for entry in self._log[number:] for key in entry.writes}

    def drop_shadows(self) -> None:
        """Drop all shadows and return their memory to the system."""
        for key in list(self._cached):
            self._set_shadow(key, None)
        return_freed_memory()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._report_cpu.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._report_cpu.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    # --- during the build ----------------------------------------------------------------------

    def __torch_dispatch__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        logged = [_logged(t) for t in tensors if self.holds(t)]
        if logged and any(t.is_meta and not self.holds(t) for t in tensors):
            raise ConfigError(
                f"under infinity.Init, {call} got a tensor on the meta device, which has no values",
                because="it was created there, perhaps for an index or a number",
                remedy="create it with device='cpu'",
            )
        if is_meta_scalar(call, kwargs):  # the scalar of `deferred[...] = 1`
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if not logged and not self._creates_large(call, args, kwargs):
            return call(*args, **kwargs)
        if logged and returns_only_views(call):
            return call(*args, **kwargs)  # a view of the same meta storage
        return self._run_and_log(call, args, kwargs, logged)

    def _creates_large(self, call: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a call without deferred arguments creates a large CPU tensor."""
        if mutated_arguments(call, args, kwargs) or returns_only_views(call):
            return False
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            return False  # meta tensors that are not deferred
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return any(
            nbytes_of(t) >= self.threshold_bytes
            for t in tensors_in(results_on_meta(call, args, kwargs))
        )

    def _run_and_log(
        self, call: Any, args: Any, kwargs: Any, logged: Sequence[_LoggedTensor]
    ) -> Any:
        state = generator_state(call, args, kwargs)
        logged_args, logged_kwargs = tree_map(self._for_log, (args, kwargs))
        reads = tuple(dict.fromkeys(p.storage for p in logged))
        mutated = [t for t in mutated_arguments(call, args, kwargs) if self.holds(t)]
        writes = tuple(dict.fromkeys(storage_key(t) for t in mutated))
        overwritten: int | None = None  # the storage that the call sets completely without a read
        if call.overloadpacket.__name__ in _OVERWRITES and len(mutated) == 1:
            num_arguments = sum(argument.storage == writes[0] for argument in logged)
            if num_arguments == 1 and nbytes_of(mutated[0]) == self._storages[writes[0]].nbytes:
                overwritten = writes[0]
        shadows: dict[int, torch.UntypedStorage] = {}
        for key in reads:
            storage = self._storages[key]
            shadow = storage.shadow
            if shadow is None:
                shadow = _empty_storage(storage.nbytes) if key == overwritten else self._replay(key)
            self._set_shadow(key, shadow)
            shadows[key] = shadow
        real_args, real_kwargs = tree_map(lambda x: _to_real(x, shadows), (args, kwargs))
        result = call(*real_args, **real_kwargs)
        entry = _Entry(call, logged_args, logged_kwargs, reads, writes, overwritten, (), state)
        returned, created = self._wrap_results(call, args, kwargs, result)
        entry.created = tuple(created)
        if writes or created:
            self._log.append(entry)
            for key in (*writes, *(key for _, key in created)):
                self._storages[key].entries.append(len(self._log) - 1)
        self._trim({*reads, *(key for _, key in created)})
        return returned

    def _wrap_results(
        self, call: Any, args: Any, kwargs: Any, result: Any
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Return the results, large ones on meta, and (index, storage) of new deferred tensors."""
        mutated = mutated_arguments(call, args, kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        created: list[tuple[int, int]] = []
        for index, real in enumerate(results):
            if not isinstance(real, Tensor):
                continue
            if index < len(mutated):
                results[index] = mutated[index]
            elif real.device.type == "cpu" and nbytes_of(real) >= self.threshold_bytes:
                meta = torch.empty_strided(
                    real.size(), real.stride(), dtype=real.dtype, device="meta"
                )
                shadow, key = real.untyped_storage(), storage_key(meta)
                self._storages[key] = _Storage(meta.untyped_storage(), shadow.nbytes())
                self._set_shadow(key, shadow)
                created.append((index, key))
                results[index] = meta
        if isinstance(result, tuple | list):
            return type(result)(results), created
        return results[0], created

    def _for_log(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _logged(value) if self.holds(value) else value.detach().clone()

    # --- shadows -------------------------------------------------------------------------------

    def _set_shadow(self, key: int, shadow: torch.UntypedStorage | None) -> None:
        """Set or drop (None) the shadow of a storage, and make it the most recently used."""
        storage = self._storages[key]
        if key in self._cached:
            del self._cached[key]
            self._cached_bytes -= storage.nbytes
        storage.shadow = shadow
        if shadow is not None:
            self._cached[key] = None
            self._cached_bytes += storage.nbytes

    def _trim(self, in_use: set[int]) -> None:
        """Drop the least recently used shadows beyond `KEEP_BYTES`, not counting those `in_use`."""
        total = self._cached_bytes - sum(self._storages[key].nbytes for key in in_use)
        while total > KEEP_BYTES:
            key = next(key for key in self._cached if key not in in_use)
            total -= self._storages[key].nbytes
            self._dropped_bytes += self._storages[key].nbytes
            self._set_shadow(key, None)
        if self._dropped_bytes >= RETURN_BYTES:
            return_freed_memory()
            self._dropped_bytes = 0

    # --- replay ---------------------------------------------------------------------------------

    def _replay(self, key: int) -> torch.UntypedStorage:
        """Compute a storage again, without advancing the random generator."""
        with torch.random.fork_rng(devices=[]):
            return self._run_logged(key)

    def _run_logged(self, key: int) -> torch.UntypedStorage:
        """Run all logged calls that the storage depends on, and return it."""
        shadows: dict[int, torch.UntypedStorage] = {}
        indices, last_use = self._dependencies(key)
        for index in indices:
            entry = self._log[index]
            for logged in tree_leaves((entry.args, entry.kwargs)):
                # Allocated without values: this call overwrites it.
                if isinstance(logged, _LoggedTensor) and logged.storage not in shadows:
                    nbytes = self._storages[logged.storage].nbytes
                    shadows[logged.storage] = _empty_storage(nbytes)
            if entry.state is not None:
                torch.set_rng_state(entry.state)
            to_real = partial(_from_log, shadows=shadows, state=entry.state)
            args, kwargs = tree_map(to_real, (entry.args, entry.kwargs))
            result = entry.call(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else [result]
            for result_index, storage in entry.created:
                shadows[storage] = results[result_index].untyped_storage()
            del args, kwargs, result, results
            for unused in [k for k in shadows if k != key and last_use.get(k, -1) <= index]:
                del shadows[unused]
        return shadows[key]

    def _dependencies(self, key: int) -> tuple[list[int], dict[int, int]]:
        """Return the log entries `key` depends on, in order, and the last use of each storage."""
        needed: set[int] = set()
        # (storage, end): its entries before index `end` are needed
        pending = [(key, len(self._log))]
        while pending:
            storage, end = pending.pop()
            for index in reversed(self._storages[storage].entries):
                if index >= end:
                    continue
                entry = self._log[index]
                if index not in needed:
                    needed.add(index)
                    for read in entry.reads:
                        if read != storage and read != entry.overwrites:
                            pending.append((read, index))
                if entry.overwrites == storage:
                    break
        indices = sorted(needed)
        last_use: dict[int, int] = {}
        for index in indices:
            for used in (*self._log[index].reads, *(k for _, k in self._log[index].created)):
                last_use[used] = index
        return indices, last_use


def storage_key(tensor: Tensor) -> int:
    """Return a key of a tensor's storage: equal for tensors that share it."""
    return int(tensor.untyped_storage()._cdata)


def _logged(tensor: Tensor) -> _LoggedTensor:
    return _LoggedTensor(
        storage_key(tensor),
        tensor.dtype,
        tuple(tensor.size()),
        tensor.stride(),
        int(tensor.storage_offset()),
    )


def _empty_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _view(storage: torch.UntypedStorage, logged: _LoggedTensor) -> Tensor:
    base = torch.empty(0, dtype=logged.dtype)
    return base.set_(storage, logged.offset, logged.size, logged.stride)


def _to_real(value: Any, shadows: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor) and value.is_meta and storage_key(value) in shadows:
        return _view(shadows[storage_key(value)], _logged(value))
    return value


def _from_log(value: Any, shadows: dict[int, torch.UntypedStorage], state: Tensor | None) -> Any:
    if isinstance(value, _LoggedTensor):
        return _view(shadows[value.storage], value)
    if isinstance(value, torch.Generator):  # it has advanced since
        assert state is not None
        return torch.Generator().set_state(state)
    return value.clone() if isinstance(value, Tensor) else value
