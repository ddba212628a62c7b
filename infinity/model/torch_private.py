"""All private torch calls of the package, each with a test."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, GeneratorType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def storage_use_count(tensor: Tensor) -> int:
    """Return the number of tensors that share the storage, itself included."""
    storage = tensor.untyped_storage()  # this Python wrapper counts as one reference
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_address(tensor: Tensor) -> int:
    """Return the address of the storage; 0 if there is no memory (some subclasses)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if pre- or post-hooks of its steps are registered."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def no_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context without active dispatch modes, such as that of selective checkpointing."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return _disable_current_modes()


def without_torch_function() -> AbstractContextManager[object]:
    """Return a context in which tensor subclasses behave as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def negated_view(tensor: Tensor) -> Tensor:
    """Return a view with the negative bit flipped."""
    return torch._neg_view(tensor)


# [Note: weights of RNNs]
# An RNN computes with the list `_flat_weights`. Each forward compares the weight attributes with
# weak references to the tensors of that list, and rebuilds the list if one differs: always for a
# parametrized weight, and for a parameter that a slice reads. torch does not swap tensors that have
# weak references, so these are dropped while parameters leave the meta device. The weights are not
# made contiguous: `flatten_parameters` would move them.


def drop_flat_weight_refs(model: nn.Module) -> Callable[[], None]:
    """Drop the weak references of RNNs to their weights; return a function that restores them."""
    modules = _rnns(model)
    for module in modules:
        module._flat_weight_refs = [None] * len(module._flat_weights)

    def restore() -> None:
        for module in modules:
            weights = module._flat_weights
            module._flat_weight_refs = [w if w is None else weakref.ref(w) for w in weights]

    return restore


@contextmanager
def restore_flat_weights(module: nn.Module) -> Iterator[None]:
    """Restore the weight lists of RNNs on exit: a slice fills them with views of slots."""
    saved = [(rnn, rnn._flat_weights, rnn._flat_weight_refs) for rnn in _rnns(module)]
    try:
        yield
    finally:
        for rnn, weights, references in saved:
            rnn._flat_weights, rnn._flat_weight_refs = weights, references


def _rnns(model: nn.Module) -> list[nn.RNNBase]:
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def has_storage_address(tensor: Tensor) -> bool:
    """Return True if the address of the tensor's storage can be read.

    It is 0 for meta tensors, including those of `Init` that report the CPU as their device.
    """
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def top_saved_tensors_hooks() -> SavedTensorHooks | None:
    """Return the innermost active (pack, unpack) pair of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def inside_function_transform() -> bool:
    """Return True while a `torch.func` transform (grad, vmap, ...) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def backward_task() -> int:
    """Return a number that identifies the backward on this thread, -1 outside a backward."""
    return int(torch._C._current_graph_task_id())


def inside_backward() -> bool:
    """Return True if this thread runs a backward, in which a forward is a recomputation."""
    return backward_task() != -1


def after_backward(then: Callable[[], None]) -> None:
    """Call `then` at the end of the backward on this thread, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def is_backward_code(code: CodeType) -> bool:
    """Return True for the code of the torch function that runs the autograd engine."""
    return code is torch.autograd.graph._engine_run_backward.__code__


def is_checkpoint_pair(hooks: SavedTensorHooks | None) -> bool:
    """Return True if the (pack, unpack) pair belongs to a non-reentrant checkpoint."""
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def close_checkpoints(error: BaseException) -> None:
    """Close the non-reentrant checkpoints in the traceback; each pops its saved-tensor hooks.

    Before torch 2.13 they are closed when their frames are collected, at any time, and pop the
    hooks that are on top of the stack then. Closing one twice has no effect.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            generator = frame.f_locals.get("gen")
            if isinstance(generator, GeneratorType):
                generator.close()


def saves_checkpoint_input() -> bool:
    """Return True in a pack hook that saves an input of a checkpoint.

    Slices that share ranges count as checkpoints. The caller of the hook is then the checkpoint, or
    the `Function.apply` that it calls, below frames of infinity.
    """
    frame = sys._getframe(2)
    skipped = ("infinity.", "torch._dynamo.")  # torch._dynamo: the hook is hidden from the compiler
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(skipped):
        frame = frame.f_back
    if frame.f_code.co_filename == torch.autograd.function.__file__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__") == "infinity.offload.shared_ranges":
        return True
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


class TensorIdentity:
    """Hashable identity of a tensor's values that does not keep them alive.

    Equal for tensors with the same storage, offset, size, stride, dtype and version.
    """

    __slots__ = ("_key", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        make_ref: Any = StorageWeakRef
        self._storage = make_ref(tensor.untyped_storage())  # keeps its address from being reused
        self._key = (
            self._storage.cdata,
            int(tensor.storage_offset()),
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorIdentity) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that receives every operation below autograd, as `call(*args, **kwargs)`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import the compiler (80 MiB, seconds) to disable it."""
        return False


def tensor_without_memory(
    cls: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    strides: tuple[int, ...] | None = None,
) -> Any:
    """Return a tensor of the subclass `cls` without values, contiguous by default."""
    make: Any = Tensor._make_wrapper_subclass
    return make(cls, shape, strides=strides, dtype=dtype, device=torch.device(device))


def call_without_torch_function(call: Any, args: Any, kwargs: Any) -> Any:
    """Return `call(*args, **kwargs)` with `__torch_function__` of subclasses disabled."""
    with torch._C.DisableTorchFunctionSubclass():
        return call(*args, **kwargs)


def may_alias(call: Any) -> bool:
    """Return True if an operation changes an argument or returns a view of one."""
    return any(argument.alias_info is not None for argument in call._schema.arguments)


def is_cast(call: Any) -> bool:
    """Return True if an operation in a `DispatchMode` is the copy of `.to(...)`."""
    return call.overloadpacket is torch.ops.aten._to_copy


def is_meta_scalar(call: Any, kwargs: Any) -> bool:
    """Return True if an operation in a `DispatchMode` makes a meta tensor of a Python number.

    Assigning a number to a slice of a meta tensor does so.
    """
    device = kwargs.get("device")
    is_scalar = call.overloadpacket is torch.ops.aten.scalar_tensor
    return is_scalar and device is not None and torch.device(device).type == "meta"


def is_weight_norm(call: Any) -> bool:
    """Return True if a function in a `TorchFunctionMode` is that of both weight norm utilities."""
    return bool(call == torch._weight_norm)


def decomposed_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `torch._weight_norm(v, g, dim)`, computed by operations that dispatch modes receive.

    `torch._weight_norm` compares the devices of `v` and `g` before any dispatch mode is called.
    """
    v, g = v.contiguous(), g.contiguous()
    if dim in (0, v.dim() - 1):
        return torch._weight_norm_interface(v, g, dim)[0]
    return v * (g / torch.norm_except_dim(v, 2, dim))
