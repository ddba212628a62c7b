"""The private torch calls the presence mechanism needs, and nothing else; each has a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors share the tensor's storage, itself included: views, saves, aliases."""
    storage = tensor.untyped_storage()  # a Python wrapper, which counts as one reference itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def top_saved_tensors_hooks() -> SavedTensorHooks | None:
    """The innermost active (pack, unpack) pair of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def inside_function_transform() -> bool:
    """Whether a `torch.func` transform (grad, vmap, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that sees every operation, after autograd, as `call(*args, **kwargs)`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import the compiler, 80 MiB and seconds, to turn it off."""
        return False
