"""State dicts of an offloaded module: full values given and taken, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import ConfigError
from infinity.training.values import Values


class StateDict(Mapping[str, Tensor]):
    """`engine.state_dict()`: names to full values, each read when it is asked for."""

    def __init__(
        self, values: Values, parameters: Mapping[str, int], buffers: Mapping[str, Tensor],
        *, master: bool
    ) -> None:  # fmt: skip
        self.parameters = parameters
        self.buffers = buffers
        self._values = values
        self._master = master

    def __getitem__(self, name: str) -> Tensor:
        if name in self.parameters:
            return self._values.read(self.parameters[name], master=self._master)
        return self.buffers[name].detach().cpu().clone()

    def __iter__(self) -> Iterator[str]:
        yield from self.parameters
        yield from self.buffers

    def __len__(self) -> int:
        return len(self.parameters) + len(self.buffers)

    def load(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Write values home; raises `ConfigError` naming all problems before any change."""
        problems = [f"missing {n!r}" for n in self if n not in state] if strict else []
        problems += [f"unexpected {n!r}" for n in state if n not in self] if strict else []
        common = [n for n in self if n in state]
        for name in common:
            given, expected = tuple(state[name].shape), self._shape(name)
            if given != expected:
                problems.append(f"{name!r} has shape {given}, not {expected}")
        if problems:
            raise ConfigError("the state does not match the model: " + "; ".join(problems))
        for name in common:
            if name in self.parameters:
                self._values.write(self.parameters[name], state[name])
            else:
                self.buffers[name].copy_(state[name])
        self._values.flush()

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.parameters:
            return self._values.shape(self.parameters[name])
        return tuple(self.buffers[name].shape)


def state_dict_of(
    module: nn.Module, values: Values, index_of: Mapping[int, int], *, master: bool
) -> StateDict:
    """A lazy state dict: the names of `module.state_dict()`, tied ones included."""
    names = {name: index_of[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }
    return StateDict(values, names, buffers, master=master)


class ModuleStateHooks:
    """`module.state_dict()` and `load_state_dict()` on the owned tree give and take full values."""

    def __init__(self, root: nn.Module, values: Values, index_of: Mapping[int, int]) -> None:
        self.values = values
        self._index_of = index_of
        self._handles: list[RemovableHandle] = []

        def give(*args: Any) -> None:  # torch marks the hook, which a bound method refuses
            self._give(*args)

        for module in root.modules():
            if self._own(module):
                hooked: Any = module
                self._handles += [
                    hooked.register_state_dict_post_hook(give),
                    hooked.register_load_state_dict_pre_hook(self._open),
                    hooked.register_load_state_dict_post_hook(self._close),
                ]

    def _own(self, module: nn.Module) -> dict[str, int]:
        items = module._parameters.items()  # iterating does not fetch
        return {name: self._index_of[id(p)] for name, p in items if p is not None}

    def _give(
        self, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object
    ) -> None:
        for name, index in self._own(module).items():
            state[prefix + name] = self.values.read(index)

    def _open(
        self, module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: object
    ) -> None:
        for name, index in self._own(module).items():
            value = state.get(prefix + name)
            if value is not None and index not in self.values.lent:
                # Values in the compute dtype keep the residual where their bits did not change.
                compute = self.values.mover.presence.dtypes[index]
                self.values.lend(index, master=getattr(value, "dtype", None) is not compute)

    def _close(self, module: nn.Module, incompatible: object) -> None:
        for index in self._own(module).values():
            self.values.take_back(index)

    def remove(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
