"""Peak of live tensor bytes, counted by storage rather than sampled.

Memory that an operation allocates and frees internally is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts storages made by operations, except those of `known`.

    `now` is the number of live bytes, `peak` its maximum.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        try:
            address, nbytes = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # of a fake tensor
            return
        if address in self._seen or not address or not nbytes:  # meta tensors have no address
            return
        self._seen.add(address)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, address, nbytes)

    def _freed(self, address: int, nbytes: int) -> None:
        self._seen.discard(address)
        self.now -= nbytes
