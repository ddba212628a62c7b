"""Checks of a model before an engine is created for it."""

from __future__ import annotations

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.model.offloaded_parameter import engine_of
from infinity.model.parameter_map import ParameterMap, recomputed_weights
from infinity.model.torch_private import has_storage_address, storage_address

_WRAPPERS = (
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule",
    "OptimizedModule",
)  # fmt: skip


def check_model(model: nn.Module) -> None:
    """Raise `ConfigError` if an engine cannot own the model."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name or 'model'!r} is a TorchScript module",
                because="it takes no hooks, which fetch weights",
                remedy="use the module it was scripted from",
            )
        bases = type(module).__mro__  # compared by name, without importing wrappers
        torch_bases = (b.__name__ for b in bases if b.__module__.startswith("torch."))
        wrapper = next((name for name in torch_bases if name in _WRAPPERS), None)
        if wrapper is not None:
            compiled = wrapper == "OptimizedModule"
            raise ConfigError(
                f"module {name or 'model'!r} is torch's {wrapper}",
                because="hooks, which fetch weights, would be compiled with it"
                if compiled
                else "the engine shares weights and gradients out among ranks itself",
                remedy="pass the module without it"
                + (", and write compile: true" if compiled else ", the same on all ranks"),
            )
        if (
            isinstance(module._parameters, ParameterMap)
            and next(module.parameters(), None) is not None
        ):
            raise ConfigError(
                f"module {name or 'model'!r} is owned by another engine",
                remedy="close that engine first",
            )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet",
                remedy="pass a batch through the model before initialize()",
            )
        if type(parameter) is nn.Parameter and not has_storage_address(parameter):
            raise ConfigError(
                f"parameter {name!r} has no memory",
                because="its .data was taken from a weight that is still in a file",
                remedy="make it a parameter of its own, or tie it: head.weight = embedding.weight",
            )
        if engine_of(parameter) is not None:
            raise ConfigError(
                f"parameter {name!r} is owned by another engine",
                remedy="close that engine first, or put both models into one module",
            )
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None:
            raise ConfigError(
                f"{name!r}, an nn.{type(module).__name__}, has max_norm",
                because="its forward edits the weight, of which the engine lends a copy",
                remedy="leave max_norm out, and shorten rows in engine.materialized(...) now and "
                "then",
            )
    _refuse_shared_memory(model)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise `ConfigError` for trained parameters that share memory with other tensors."""
    ranges = []
    attributes = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if name not in recomputed_weights(module)
    ]
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *attributes]:
        # Non-contiguous parameters are skipped: interleaved ones overlap without sharing elements.
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        dense = tensor.is_contiguous() or not isinstance(tensor, nn.Parameter)
        if dense and (base := storage_address(tensor)):
            start = base + int(tensor.storage_offset()) * tensor.element_size()
            dims = zip(tensor.shape, tensor.stride(), strict=True)
            span = (1 + sum((n - 1) * stride for n, stride in dims)) * tensor.element_size()
            trained = tensor.requires_grad and isinstance(tensor, nn.Parameter)
            ranges.append((start, start + span, name, trained))
    last_end, last_name, last_trained = 0, "", False  # the range so far that ends last
    for begin, end, name, trained in sorted(ranges):
        if begin < last_end and (trained or last_trained):
            raise ConfigError(
                f"{last_name!r} and {name!r} share memory and are not one parameter",
                because="the engine moves each separately: one would not follow the other",
                remedy="tie them: head.weight = embedding.weight; or give one a .clone()",
            )
        if end > last_end:
            last_end, last_name, last_trained = end, name, trained


def recomputes_itself(model: nn.Module) -> bool:
    """Return True if gradient checkpointing of transformers is enabled in the model."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
