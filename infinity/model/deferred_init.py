"""Deferred initialization of modules larger than RAM: run initialisers, drop values, replay later.

Inside `DeferredInitMode` every large tensor is created on the meta device; a *shadow* with the real
values lives only while operations use it. Every operation is carried out once for real, so that
random numbers are drawn and values that steer the initialiser (a rejection loop)
are read exactly as in an ordinary build, and is written to a log with the generator's state.
`value` repeats the part of the log that one tensor depends on. So the result equals the ordinary
build bit for bit, whatever the order in which values are asked for, and RAM holds about one
tensor at a time. The price is that initialisation runs twice.

Only tensors on the CPU are deferred: one that the model's code puts elsewhere itself stays there.

[Note: storages] A deferred tensor is known by its storage, so that views, `.data`, tied weights
and `nn.Parameter(...)` need no bookkeeping: real arguments are made from (storage, offset, size,
stride). The log holds the meta storages, which keeps their addresses from being used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from infinity.common.malloc import return_freed_memory
from infinity.model.torch_calls import (
    generator_state,
    mutated_arguments,
    nbytes_of,
    only_makes_views,
    results_on_meta,
    tensors_in,
)
from infinity.model.torch_private import (
    DispatchMode,
    is_number_on_meta,
    is_weight_norm,
    tree_leaves,
    tree_map,
    weight_norm_anywhere,
)

DEFER_FROM_BYTES = 256 << 10  # smaller tensors are simply made
KEEP_BYTES = 64 << 20  # shadows kept besides those of the operation under way
RETURN_BYTES = 32 << 20  # after dropping so much, free memory is given back to the system

# In-place operations after which nothing of the target's past matters.
_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_"})


@dataclass(frozen=True)
class _LoggedTensor:
    """A deferred tensor as an argument in the log."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()


@dataclass
class _Entry:
    """One logged call, with a `_LoggedTensor` for each deferred tensor, and its storages."""

    call: Any
    args: Any
    kwargs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: int | None
    made: tuple[tuple[int, int], ...]  # (index among the results, storage)
    state: Tensor | None  # of the random generator, before


@dataclass(eq=False)
class _Storage:
    """A meta storage, the numbers of the entries that wrote to it, its shadow while it lives."""

    meta: torch.UntypedStorage
    nbytes: int
    entries: list[int] = field(default_factory=list)
    shadow: torch.UntypedStorage | None = None


class _Disguise(TorchFunctionMode):
    """Deferred tensors say that they are on the CPU: `torch.nn.init` does nothing on meta."""

    def __init__(self, deferral: DeferredInitMode) -> None:
        super().__init__()
        self._answers: dict[Any, Any] = {
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: torch.device("cpu"),
        }
        self._deferral = deferral

    def __torch_function__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if call in self._answers and self._deferral.holds(args[0]):
            return self._answers[call]
        if is_weight_norm(call):  # of a large tensor, deferred, and a small one, which is not
            call = weight_norm_anywhere
        return call(*args, **(kwargs or {}))


class DeferredInitMode(DispatchMode):  # type: ignore[no-untyped-call]
    """The context in which a model is built; afterwards it answers `value`."""

    def __init__(self, threshold_bytes: int = DEFER_FROM_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.threshold_bytes = threshold_bytes
        self._storages: dict[int, _Storage] = {}
        self._log: list[_Entry] = []
        self._live: dict[int, None] = {}  # storages with a shadow, least recently used first
        self._live_bytes = 0
        self._dropped_bytes = 0  # since free memory was given back
        self._disguise = _Disguise(self)

    # --- afterwards --------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's values can be made again here."""
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return False  # these have no storage
        return storage_key(tensor) in self._storages

    def value(self, tensor: Tensor, *, copy: bool = True) -> Tensor:
        """A contiguous CPU tensor with the values, of the tensor's shape and dtype.

        Without `copy` it may be the shadow itself, to be looked at and let go.
        """
        logged = _logged(tensor)
        shadow = self._storages[logged.storage].shadow
        if shadow is not None:
            view = _view(shadow, logged)
            return view.clone(memory_format=torch.contiguous_format) if copy else view
        made = self._replay(logged.storage)
        return _view(made, logged).contiguous()  # nobody else has it: no copy

    @property
    def num_operations(self) -> int:
        """How many were carried out on deferred tensors, and changed or made some."""
        return len(self._log)

    def written_since(self, number: int) -> set[int]:
        """The storages (see `storage_key`) that operations from this one on wrote to."""
        return {key for entry in self._log[number:] for key in entry.writes}

    def forget_shadows(self) -> None:
        """Give back the memory of values that are still around."""
        for key in list(self._live):
            self._set_live(key, None)
        return_freed_memory()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._disguise.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._disguise.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    # --- while the model is built --------------------------------------------------------------

    def __torch_dispatch__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logged = [_logged(t) for t in tensors_in((args, kwargs)) if self.holds(t)]
        if is_number_on_meta(call, kwargs):  # what `deferred[...] = 1` makes of its number
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if not logged and not self._makes_large(call, args, kwargs):
            return call(*args, **kwargs)
        if logged and only_makes_views(call):
            return call(*args, **kwargs)  # of meta tensors: another window on the same storage
        return self._carry_out(call, args, kwargs, logged)

    def _makes_large(self, call: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation without deferred arguments makes something large on the CPU."""
        if mutated_arguments(call, args, kwargs) or only_makes_views(call):
            return False
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            return False  # somebody else's meta tensors
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return any(
            nbytes_of(t) >= self.threshold_bytes
            for t in tensors_in(results_on_meta(call, args, kwargs))
        )

    def _carry_out(self, call: Any, args: Any, kwargs: Any, logged: Sequence[_LoggedTensor]) -> Any:
        state = generator_state(call, args, kwargs)
        logged_args, logged_kwargs = tree_map(self._to_log, (args, kwargs))
        reads = tuple(dict.fromkeys(p.storage for p in logged))
        mutated = [t for t in mutated_arguments(call, args, kwargs) if self.holds(t)]
        writes = tuple(dict.fromkeys(storage_key(t) for t in mutated))
        over = self._overwritten(call, mutated, logged)
        shadows = {key: self._revive(key, overwritten=key == over) for key in reads}
        real_args, real_kwargs = tree_map(lambda x: _real(x, shadows), (args, kwargs))
        result = call(*real_args, **real_kwargs)
        entry = _Entry(call, logged_args, logged_kwargs, reads, writes, over, (), state)
        returned, made = self._hand_out(call, args, kwargs, result)
        entry.made = tuple(made)
        if writes or made:
            self._log.append(entry)
            for key in (*writes, *(key for _, key in made)):
                self._storages[key].entries.append(len(self._log) - 1)
        self._trim({*reads, *(key for _, key in made)})
        return returned

    def _hand_out(
        self, call: Any, args: Any, kwargs: Any, result: Any
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Return the results: mutated arguments themselves, large tensors on meta."""
        mutated = mutated_arguments(call, args, kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        made: list[tuple[int, int]] = []
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
                self._set_live(key, shadow)
                made.append((index, key))
                results[index] = meta
        if isinstance(result, tuple | list):
            return type(result)(results), made
        return results[0], made

    def _to_log(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _logged(value) if self.holds(value) else value.detach().clone()

    def _overwritten(
        self, call: Any, mutated: Sequence[Tensor], logged: Sequence[_LoggedTensor]
    ) -> int | None:
        """The storage whose past does not matter any more: all of it is written, and not read."""
        if call.overloadpacket.__name__ not in _OVERWRITES or len(mutated) != 1:
            return None
        target = _logged(mutated[0])
        if sum(one.storage == target.storage for one in logged) > 1:
            return None
        covers_all = target.numel * target.dtype.itemsize == self._storages[target.storage].nbytes
        return target.storage if covers_all else None

    # --- shadows -------------------------------------------------------------------------------

    def _revive(self, key: int, *, overwritten: bool) -> torch.UntypedStorage:
        """The shadow of a storage; its values do not matter where it is `overwritten` now."""
        storage = self._storages[key]
        shadow = storage.shadow
        if shadow is None and overwritten:
            shadow = _empty(storage.nbytes)
        if shadow is None:
            shadow = self._replay(key)
        self._set_live(key, shadow)
        return shadow

    def _set_live(self, key: int, shadow: torch.UntypedStorage | None) -> None:
        """Keep or release the shadow of a storage that is used now."""
        storage = self._storages[key]
        if key in self._live:
            del self._live[key]
            self._live_bytes -= storage.nbytes
        storage.shadow = shadow
        if shadow is not None:
            self._live[key] = None
            self._live_bytes += storage.nbytes

    def _trim(self, in_use: set[int]) -> None:
        """Drop the least recently used shadows beyond `KEEP_BYTES`."""
        total = self._live_bytes - sum(self._storages[key].nbytes for key in in_use)
        while total > KEEP_BYTES:
            key = next(key for key in self._live if key not in in_use)
            total -= self._storages[key].nbytes
            self._dropped_bytes += self._storages[key].nbytes
            self._set_live(key, None)
        if self._dropped_bytes >= RETURN_BYTES:
            return_freed_memory()
            self._dropped_bytes = 0

    # --- making values again --------------------------------------------------------------------

    def _replay(self, key: int) -> torch.UntypedStorage:
        """A storage made again; the random generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            return self._carry_out_again(key)

    def _carry_out_again(self, key: int) -> torch.UntypedStorage:
        """Everything that `key` depends on."""
        shadows: dict[int, torch.UntypedStorage] = {}
        numbers, last_use = self._needed(key)
        for number in numbers:
            entry = self._log[number]
            for logged in tree_leaves((entry.args, entry.kwargs)):
                # Overwritten here: its past does not matter.
                if isinstance(logged, _LoggedTensor) and logged.storage not in shadows:
                    nbytes = self._storages[logged.storage].nbytes
                    shadows[logged.storage] = _empty(nbytes)
            if entry.state is not None:
                torch.set_rng_state(entry.state)
            args, kwargs = _arguments(entry, shadows)
            result = entry.call(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else [result]
            for index, made in entry.made:
                shadows[made] = results[index].untyped_storage()
            del args, kwargs, result, results
            for done in [k for k in shadows if k != key and last_use.get(k, -1) <= number]:
                del shadows[done]
        return shadows[key]

    def _needed(self, key: int) -> tuple[list[int], dict[int, int]]:
        """Numbers of the entries `key` depends on, in order, and each storage's last use there."""
        needed: set[int] = set()
        # (storage, entries before this number matter to somebody)
        open_questions = [(key, len(self._log))]
        while open_questions:
            storage, before = open_questions.pop()
            for number in reversed(self._storages[storage].entries):
                if number >= before:
                    continue
                entry = self._log[number]
                if number not in needed:
                    needed.add(number)
                    for read in entry.reads:
                        if read != storage and read != entry.overwrites:
                            open_questions.append((read, number))
                if entry.overwrites == storage:
                    break
        numbers = sorted(needed)
        last_use: dict[int, int] = {}
        for number in numbers:
            for used in (*self._log[number].reads, *(k for _, k in self._log[number].made)):
                last_use[used] = number
        return numbers, last_use


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


def _empty(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _view(storage: torch.UntypedStorage, logged: _LoggedTensor) -> Tensor:
    base = torch.empty(0, dtype=logged.dtype)
    return base.set_(storage, logged.offset, logged.size, logged.stride)


def _real(value: Any, shadows: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor) and value.is_meta and storage_key(value) in shadows:
        return _view(shadows[storage_key(value)], _logged(value))
    return value


def _from_log(value: Any, shadows: dict[int, torch.UntypedStorage], state: Tensor | None) -> Any:
    if isinstance(value, _LoggedTensor):
        return _view(shadows[value.storage], value)
    if isinstance(value, torch.Generator):  # the model's own; it has moved on since
        assert state is not None
        return torch.Generator().set_state(state)
    return value.clone() if isinstance(value, Tensor) else value


def _arguments(entry: _Entry, shadows: dict[int, torch.UntypedStorage]) -> Any:
    return tree_map(lambda x: _from_log(x, shadows, entry.state), (entry.args, entry.kwargs))
