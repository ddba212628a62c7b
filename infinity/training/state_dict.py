"""State dicts of an offloaded module: full values, read and written tensor by tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.common.sizes import parse_size
from infinity.distributed.context import DistContext
from infinity.errors import ConfigError
from infinity.model.buffers import persistent_buffers
from infinity.model.extra_state import modules_with_extra_state
from infinity.model.weight_files import TensorToWrite, write_shards
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.training.parameter_values import ParameterValues


@dataclass(frozen=True)
class StateEntry:
    """Tensor of a module with all its names, and a function that replaces its values.

    `names` are keys of the state dict; tied weights have several. `write` is None for a tensor on
    the meta device.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[Tensor], None] | None


class StateDict(Mapping[str, Any]):
    """Lazy mapping of names to full values, each read on access; see `engine.state_dict`.

    Values are tensors, and the extra state of modules in `extra`, by the names of that state.
    """

    def __init__(
        self, values: ParameterValues, parameters: Mapping[str, int], buffers: Mapping[str, Tensor],
        extra: Mapping[str, nn.Module], *, master: bool
    ) -> None:  # fmt: skip
        self.parameters = parameters
        self.buffers = buffers
        self.extra = extra
        self._values = values
        self._master = master

    def __getitem__(self, name: str) -> Any:
        if name in self.parameters:
            return self._values.read(self.parameters[name], master=self._master)
        if name in self.extra:
            return self.extra[name].get_extra_state()
        return self.buffers[name].detach().cpu().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as an `OrderedDict` of all values, in RAM.

        `torch.load` accepts that type with `weights_only`.
        """
        return OrderedDict, (), None, None, iter(self.items())

    def __contains__(self, name: object) -> bool:
        # Mapping's default reads a value.
        return name in self.parameters or name in self.buffers or name in self.extra

    def __iter__(self) -> Iterator[str]:
        yield from self.parameters
        yield from self.buffers
        yield from self.extra

    def __len__(self) -> int:
        return len(self.parameters) + len(self.buffers) + len(self.extra)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Write full values; raise `ConfigError` with all problems before any change."""
        problems = [f"missing {n!r}" for n in self if n not in state] if strict else []
        problems += [f"unexpected {n!r}" for n in state if n not in self] if strict else []
        common = [n for n in (*self.parameters, *self.buffers) if n in state]
        for name in common:
            shape, expected = tuple(state[name].shape), self._shape(name)
            if shape != expected:
                problems.append(f"{name!r} has shape {shape}, not {expected}")
        if problems:
            raise ConfigError("the state does not match the model: " + "; ".join(problems))
        for name in sorted(common, key=self._order):
            if name in self.parameters:
                self._values.write(self.parameters[name], state[name])
            else:
                self.buffers[name].copy_(state[name])
        for name in self.extra:
            if name in state:
                self.extra[name].set_extra_state(state[name])
        self._values.flush()

    def entries(self) -> list[StateEntry]:
        """Return all tensors, in an order that reads and writes each unit once.

        Call `flush` after the writes.

        Raises:
            ResidencyError: A parameter is materialized.
        """
        self._values.check_none_materialized("weights cannot be loaded as a whole")
        entries = []
        for names in self._tied_names():
            first = names[0]
            if first in self.parameters:
                index = self.parameters[first]
                dtype, write = self._values.dtype(index), partial(self._values.write, index)
            else:
                buffer = self.buffers[first]
                dtype, write = buffer.dtype, partial(copy_into, buffer)
            entries.append(StateEntry(names, self._shape(first), dtype, write))
        return entries

    def flush(self) -> None:
        """Write the last values of `StateEntry.write` to their tier."""
        self._values.flush()

    def abandon(self) -> None:
        """Flush after an error; see `ParameterValues.abandon`."""
        self._values.abandon()

    def save(
        self, directory: Path, dtype: torch.dtype | str | None, max_shard: int | str
    ) -> list[Path]:
        """Write weight files and return their paths; see `engine.save_weights`."""
        tensors = list(self.outgoing(dtype))
        write = partial(write_shards, directory.expanduser(), tensors, parse_size(max_shard))
        try:
            return write_on_first_rank(self._values.ranks, tensors, write)
        finally:
            self._values.flush()  # nothing was edited: only frees the cached unit

    def outgoing(
        self,
        dtype: torch.dtype | str | None,
        tied_name: Callable[[tuple[str, ...]], str] | None = None,
    ) -> Iterator[TensorToWrite]:
        """Yield the tensors for `save`, each once, named by `tied_name` or by its first name.

        `dtype` as in `engine.save_weights`.
        """
        self._values.check_none_materialized("weights cannot be saved as a whole")
        dtype = _parse_dtype(dtype)
        for names in self._tied_names():
            name = names[0] if tied_name is None else tied_name(names)
            if name not in self.parameters:
                buffer = self.buffers[name]
                yield TensorToWrite(name, self._shape(name), buffer.dtype, buffer.detach)
                continue
            index = self.parameters[name]
            compute_dtype = self._values.dtype(index)
            saved_dtype = compute_dtype
            if dtype is not None and compute_dtype in COMPUTE_DTYPES.values():
                saved_dtype = dtype
            # Read the master for another dtype: its values are rounded once, not twice.
            read = partial(self._values.read, index, master=saved_dtype is not compute_dtype)
            yield TensorToWrite(name, self._shape(name), saved_dtype, read)

    def _tied_names(self) -> list[tuple[str, ...]]:
        """Return all names, grouped by tensor: parameters in the order of units, then buffers."""
        groups: dict[int, list[str]] = {}
        for name in (*self.parameters, *self.buffers):
            parameter = self.parameters.get(name)
            key = id(self.buffers[name]) if parameter is None else ~parameter  # ids are >= 0
            groups.setdefault(key, []).append(name)
        return sorted(map(tuple, groups.values()), key=lambda names: self._order(names[0]))

    def _order(self, name: str) -> tuple[bool, tuple[int, bool, int]]:
        if name in self.parameters:
            return False, self._values.sort_key(self.parameters[name])
        return True, (0, False, 0)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.parameters:
            return self._values.shape(self.parameters[name])
        return tuple(self.buffers[name].shape)


def write_on_first_rank(
    ranks: DistContext, tensors: Sequence[TensorToWrite], write: Callable[[], list[Path]]
) -> list[Path]:
    """Call `write` on the first rank, and return its files on all ranks.

    `write` must read all tensors in order. Reads are collective, so the other ranks read them too.
    """
    files: list[Path] = []
    with ranks.collective_section("saves weights"):
        if ranks.rank == 0:
            files = write()
        else:
            for tensor in tensors:
                tensor.read()
    return [Path(file) for file in ranks.all_gather_object([str(file) for file in files])[0]]


class _BroadcastReads(Mapping[str, Any]):
    """Values that the first rank reads, and the other ranks with it, since reads are collective.

    For code that chooses the values and their order; the first rank broadcasts their names.
    """

    def __init__(self, state: StateDict, ranks: DistContext) -> None:
        self._state = state
        self._ranks = ranks

    def broadcast(self, name: str) -> str:
        """Broadcast the name that the first rank reads next; "" ends the reads."""
        self._ranks.synchronize("reads values that the first rank chooses")
        return str(self._ranks.all_gather_object(name)[0])

    def __getitem__(self, name: str) -> Any:
        self.broadcast(name)
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def read_on_first_rank(
    ranks: DistContext, state: StateDict, use: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Call `use` with full values on the first rank; it may read them in any order."""
    with ranks.collective_section("saves weights"):
        broadcast_reads = _BroadcastReads(state, ranks)
        if ranks.rank == 0:
            use(state if ranks.count == 1 else broadcast_reads)
            broadcast_reads.broadcast("")
        else:
            while name := broadcast_reads.broadcast(""):
                state[name]


def _parse_dtype(requested: torch.dtype | str | None) -> torch.dtype | None:
    for name, dtype in COMPUTE_DTYPES.items():
        if requested in (name, dtype):
            return dtype
    if requested is not None:
        raise ConfigError(
            f"weights cannot be saved as {requested!r}",
            remedy=f"one of {', '.join(COMPUTE_DTYPES)}, or None for the compute dtype",
        )
    return None


def state_dict_of(
    module: nn.Module,
    values: ParameterValues,
    index_of: Mapping[int, int],
    *,
    master: bool,
    prefix: str = "",
) -> StateDict:
    """Return a lazy state dict with the names of `module.state_dict()`, tied ones included."""
    parameters = module.named_parameters(prefix.removesuffix("."), remove_duplicate=False)
    names = {name: index_of[id(p)] for name, p in parameters}
    buffers = {prefix + name: buffer for name, buffer in persistent_buffers(module).items()}
    extra = modules_with_extra_state(module, prefix)
    return StateDict(values, names, buffers, extra, master=master)


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a tensor that is not offloaded."""
    with torch.no_grad():
        tensor.copy_(value)


class ModuleStateHooks:
    """Hooks that give `state_dict()` and `load_state_dict()` of an owned tree full values."""

    def __init__(
        self, root: nn.Module, values: ParameterValues, index_of: Mapping[int, int]
    ) -> None:
        self.values = values
        self._index_of = index_of
        self._handles: list[RemovableHandle] = []

        for module in root.modules():
            self.add(module)

    def add(self, hooked: Any) -> None:
        """Install the hooks on a module of the tree, which may have been added later."""

        def add_values(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
            for name, index in self._direct_parameters(module).items():
                state[prefix + name] = self.values.read(index)

        if self._direct_parameters(hooked):
            self._handles += [
                # torch sets an attribute on the hook, which a bound method does not allow.
                hooked.register_state_dict_post_hook(add_values),
                hooked.register_load_state_dict_pre_hook(self._materialize),
                hooked.register_load_state_dict_post_hook(self._release),
            ]

    def _direct_parameters(self, module: nn.Module) -> dict[str, int]:
        items = module._parameters.items()  # iterating does not fetch
        return {name: self._index_of[id(p)] for name, p in items if p is not None}

    def _materialize(
        self, module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: object
    ) -> None:
        for name, index in self._direct_parameters(module).items():
            value = state.get(prefix + name)
            if value is not None and index not in self.values.materialized_dtypes:
                # Values in the compute dtype leave the master unchanged where bits are unchanged.
                compute_dtype = self.values.dtype(index)
                is_compute_dtype = getattr(value, "dtype", None) is compute_dtype
                self.values.materialize(index, master=not is_compute_dtype)

    def _release(self, module: nn.Module, incompatible: object) -> None:
        for index in self._direct_parameters(module).values():
            self.values.release_materialized(index)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
