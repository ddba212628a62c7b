"""The private torch calls the residency mechanism needs, and nothing else; each has a test."""

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
    """How many tensors share the tensor's storage, itself included: views, saves, aliases."""
    storage = tensor.untyped_storage()  # a Python wrapper, which counts as one reference itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_address(tensor: Tensor) -> int:
    """Where the tensor's storage begins; 0 where it has no memory (some subclasses)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody asked to be called before or after its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def no_dispatch_modes() -> AbstractContextManager[object]:
    """Context without dispatch modes of others, such as those of selective checkpointing."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return _disable_current_modes()


def without_torch_function() -> AbstractContextManager[object]:
    """Run operations on tensors of a subclass as on plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def negated_view(tensor: Tensor) -> Tensor:
    """The same memory, taken as the negative."""
    return torch._neg_view(tensor)


# [Note: weights of RNNs]
# An RNN computes with the list `_flat_weights`. Each forward compares the weight attributes with
# weak references to that list, and makes the list anew if one is another tensor: a parametrized
# weight always is, as is a parameter read by a slice. torch swaps no tensor that is referred to
# weakly, so the references are away while parameters leave the meta device. The memory behind the
# list stays as it is (`flatten_parameters` would move it).


def forget_flat_weights(model: nn.Module) -> Callable[[], None]:
    """Drop the weak references of RNNs to their weights; returns a function that renews them."""
    modules = _rnns(model)
    for module in modules:
        module._flat_weight_refs = [None] * len(module._flat_weights)

    def renew() -> None:
        for module in modules:
            weights = module._flat_weights
            module._flat_weight_refs = [w if w is None else weakref.ref(w) for w in weights]

    return renew


@contextmanager
def same_flat_weights(module: nn.Module) -> Iterator[None]:
    """Restore the weight lists of RNNs afterwards: a slice fills them with views of slots."""
    before = [(rnn, rnn._flat_weights, rnn._flat_weight_refs) for rnn in _rnns(module)]
    try:
        yield
    finally:
        for rnn, weights, references in before:
            rnn._flat_weights, rnn._flat_weight_refs = weights, references


def _rnns(model: nn.Module) -> list[nn.RNNBase]:
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def has_memory(tensor: Tensor) -> bool:
    """Whether the tensor's memory may be read, or is known not to be there: on meta, also where
    `Init` has it say that it is on the CPU, an address is 0.
    """
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def top_saved_tensors_hooks() -> SavedTensorHooks | None:
    """The innermost active (pack, unpack) pair of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def inside_function_transform() -> bool:
    """Whether a `torch.func` transform (grad, vmap, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def backward_task() -> int:
    """Which backward this thread runs: another number for each, -1 if none."""
    return int(torch._C._current_graph_task_id())


def inside_backward() -> bool:
    """Whether this thread runs a backward: what computes now is computed again."""
    return backward_task() != -1


def after_backward(then: Callable[[], None]) -> None:
    """Call `then` at the end of the backward that this thread runs; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def runs_backward(code: CodeType) -> bool:
    """Return True for the code object of torch in which a backward starts and ends."""
    return code is torch.autograd.graph._engine_run_backward.__code__


def checkpoint_packs(hooks: SavedTensorHooks | None) -> bool:
    """Whether a (pack, unpack) pair is that of a `torch.utils.checkpoint` without reentry."""
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def end_checkpoints(error: BaseException) -> None:
    """End the checkpoints without reentry that an exception left: each takes its hooks back.

    Before torch 2.13 they are ended when their frames are collected, which may be at any time, and
    take what is on top of the stack then. One that has ended is left alone.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            generator = frame.f_locals.get("gen")
            if isinstance(generator, GeneratorType):
                generator.close()


def saved_by_checkpoint() -> bool:
    """Whether the pack hook that this is called by was called for an input of a checkpoint, or of
    slices that share ranges, which are recomputed too.

    The caller of the hook is the checkpoint then, or `Function.apply` on its behalf; in between
    stand only frames of ours.
    """
    frame = sys._getframe(2)
    ours = ("infinity.", "torch._dynamo.")  # the latter where the hook is hidden from the compiler
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    if frame.f_code.co_filename == torch.autograd.function.__file__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__") == "infinity.offload.shared_ranges":
        return True
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


class TensorIdentity:
    """Which values a tensor shows, without keeping them alive.

    Equal for tensors over the same part of the same storage at the same version.
    """

    __slots__ = ("_key", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        weak: Any = StorageWeakRef
        self._storage = weak(tensor.untyped_storage())  # so its address stays taken
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
    """A context that sees every operation, after autograd, as `call(*args, **kwargs)`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import the compiler, 80 MiB and seconds, to turn it off."""
        return False


def tensor_without_memory(
    cls: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    strides: tuple[int, ...] | None = None,
) -> Any:
    """A tensor of the subclass `cls` without values, contiguous unless `strides` are given."""
    make: Any = Tensor._make_wrapper_subclass
    return make(cls, shape, strides=strides, dtype=dtype, device=torch.device(device))


def below_torch_function(call: Any, args: Any, kwargs: Any) -> Any:
    """`call(*args, **kwargs)`, as if no subclass had a `__torch_function__`; results stay as is."""
    with torch._C.DisableTorchFunctionSubclass():
        return call(*args, **kwargs)


def may_alias(call: Any) -> bool:
    """Whether an operation changes an argument, or returns a view of one."""
    return any(argument.alias_info is not None for argument in call._schema.arguments)


def is_cast(call: Any) -> bool:
    """Whether an operation, as a `DispatchMode` sees it, is `.to(...)` and nothing else."""
    return call.overloadpacket is torch.ops.aten._to_copy


def is_number_on_meta(call: Any, kwargs: Any) -> bool:
    """Whether an operation, as a `DispatchMode` sees it, puts one number into a tensor on meta.

    As an assignment to a part of a tensor on meta does it.
    """
    device = kwargs.get("device")
    is_scalar = call.overloadpacket is torch.ops.aten.scalar_tensor
    return is_scalar and device is not None and torch.device(device).type == "meta"


def is_weight_norm(call: Any) -> bool:
    """Whether a function, as a `TorchFunctionMode` sees it, is that of both weight norms."""
    return bool(call == torch._weight_norm)


def weight_norm_anywhere(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` scaled to the norms `g`, as `torch._weight_norm` does it, operation by operation.

    That compares the devices of both before any dispatch mode is asked.
    """
    v, g = v.contiguous(), g.contiguous()
    if dim in (0, v.dim() - 1):
        return torch._weight_norm_interface(v, g, dim)[0]
    return v * (g / torch.norm_except_dim(v, 2, dim))
