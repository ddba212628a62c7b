"""Heads whose logits are computed in chunks of tokens, inside the cross entropy.

[Note: sliced logits]
In training, and otherwise for more than `CHUNK_TOKENS` tokens, the `forward` of a head returns
`Logits`: a tensor without memory that refers to the hidden states it would be computed from.
Operations between head and loss (casts, a scale, a soft cap, dropping the last token, flattening)
are recorded and return `Logits` again; `F.cross_entropy` of these is `chunked_cross_entropy` of the
hidden states, with the recorded operations in each chunk. Any other operation materializes the full
logits, once, with one warning.

Operations are intercepted below autograd, which records them as for any tensor: so every use of
logits has its gradient, down to `_Head`, whose backward is that of a linear layer. The head's unit
is fetched whenever its weight is read, also after the model's call, when the user computes the
loss. Materializing logits after the weight was updated is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from infinity.losses import chunked_cross_entropy
from infinity.model.targets import target_of
from infinity.model.torch_private import (
    call_without_torch_function,
    may_alias,
    tensor_without_memory,
    tree_map,
)
from infinity.offload.activations import graph_of_closed_engine, modified_in_place
from infinity.offload.hooks import Hooks
from infinity.plan.activations import CHUNK_TOKENS

_aten = torch.ops.aten
# Elementwise operations, applied to chunks of logits.
_CAST = _aten._to_copy.default
_ELEMENTWISE = {_CAST, _aten.tanh.default, _aten.mul.Tensor, _aten.div.Tensor}
# Operations that select or rearrange tokens, applied to the hidden states.
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}
_SELECTIONS = {_aten.slice.Tensor, _aten.select.int}
_COPY = _aten.clone.default
_RECORDED = (
    _ELEMENTWISE | _RESHAPES | _SELECTIONS | {_COPY, _aten.detach.default, _aten.alias.default}
)
# They need gradients of logits, which a loss of hidden states does not compute.
_GRADIENT_METHODS = [
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.requires_grad_,
    getattr(Tensor.requires_grad, "__set__"),  # noqa: B009
]
_LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# They read memory directly, which `__torch_dispatch__` does not see.
_MEMORY_METHODS = {
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "data_ptr",
        "numpy", "tolist",
    )
}  # fmt: skip


def find_heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that compute logits, by name, if they use `nn.Linear.forward`.

    In a transformers model, wrapped or not, these are the output embeddings. In any other model
    they are the layers with the weight that the plan assumes for the head (`Target.heads`): one
    tied to an embedding, or else the last matrix with as many rows as an embedding.
    """
    head_ids = {id(layer) for module in model.modules() for layer in _output_layers(module)}
    if not head_ids:
        parameters, heads = list(model.parameters()), target_of("", model, {}).heads
        weights = {id(parameters[index]) for index in heads}
        head_ids = {id(m) for m in model.modules() if id(getattr(m, "weight", None)) in weights}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in head_ids
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
    }


def _output_layers(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers in the output embeddings; [] if their shapes differ."""
    getter = getattr(module, "get_output_embeddings", None)
    try:
        embeddings = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):  # a model without a head
        embeddings = None
    if embeddings is None:
        return []
    layers = [layer for layer in embeddings.modules() if isinstance(layer, nn.Linear)]
    return layers if len({layer.weight.shape for layer in layers}) == 1 else []


class ChunkedHeads:
    """Heads of a model, with their `forward` replaced until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        hooks: Hooks,
        parameters: Sequence[nn.Parameter],
        warn_once: Callable[[str, str], None],
    ) -> None:
        index_of = {id(p): i for i, p in enumerate(parameters)}
        self.heads = [
            Head(name, module, hooks, hooks.unit_of[index_of[id(module.weight)]], warn_once)
            for name, module in find_heads(model).items()
            if id(module.weight) in index_of
        ]

    def remove(self) -> None:
        """Restore the `forward` of every head; logits can no longer be materialized."""
        while self.heads:
            self.heads.pop().remove()


class Head:
    """Head whose weight belongs to `unit`."""

    def __init__(
        self,
        name: str,
        module: nn.Linear,
        hooks: Hooks,
        unit: int,
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._name = name
        self._module: nn.Linear | None = module
        self._entry = hooks.prefetcher.ledger.entries[unit]
        self._before, self._after = hooks.around(unit)
        self._warn_once = warn_once
        self._module_forward = module.forward
        module.__dict__["forward"] = self._forward

    def remove(self) -> None:
        assert self._module is not None
        self._module.__dict__.pop("forward", None)
        self._module = None
        del self._entry, self._before, self._after  # logits may outlive this

    @property
    def updates(self) -> int:
        """Number of updates and edits of the weight."""
        return self._entry.updates

    def _forward(self, hidden: Tensor) -> Tensor:
        module = self._module
        assert module is not None
        trains = module.training and torch.is_grad_enabled()
        # Outside training too if there are many: an evaluation may use only the loss.
        many = hidden.numel() > CHUNK_TOKENS * hidden.shape[-1]
        if not (trains or many) or torch.is_autocast_enabled(hidden.device.type):
            return self._module_forward(hidden)
        weight = module.weight
        if hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[1]:
            return self._module_forward(hidden)  # raises
        apply: Any = _Head.apply
        logits: Tensor = apply(hidden, weight, module.bias, self)
        return logits

    def compute(self, updates: int, function: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Fetch the unit and return `function(weight, bias)`, as a separate engine call.

        Raises `RuntimeError` if the weight has changed since its update count was `updates`, and
        `EngineClosedError` after `remove`.
        """
        if self._module is None:
            raise graph_of_closed_engine()
        self._before(self._module, (), {})
        try:
            weight, bias = self._module.weight, self._module.bias
            if self.updates != updates:
                raise modified_in_place(
                    f"the weights of {self._name!r} were updated before its logits were "
                    "computed; read them before step, or train with activations.logits: full"
                )
            return function(weight, bias)
        finally:
            self._after(self._module, (), None)

    def warn_materialized(self, because: str) -> None:
        """Warn once that logits of a training forward are materialized."""
        if self._module is not None and not self._module.training:
            return
        self._warn_once(
            f"logits of {self._name}",
            f"all logits of {self._name!r} are materialized, for {because}: only cross_entropy "
            "(mean or sum, without weights) computes them in chunks; activations.logits: full "
            "silences this",
        )


class _Head(torch.autograd.Function):
    """Linear layer whose forward returns `Logits` and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head
    ) -> Logits:
        ctx.save_for_backward(hidden, weight)
        shape = (*hidden.shape[:-1], weight.shape[0])
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return Logits(_Recipe(meta, head, head.updates, hidden), hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        gradient, needs_grad = grads[0], ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if needs_grad[0] else None,
            flat.t() @ hidden.reshape(-1, hidden.shape[-1]) if needs_grad[1] else None,
            flat.sum(0) if needs_grad[2] else None,
            None,
        )


@dataclass(eq=False)
class _Recipe:
    """Recipe of logits. Refers to no `Logits`: a graph that saves them would hold itself."""

    meta: Tensor  # shape, strides and dtype of the logits
    head: Head
    updates: int
    hidden: Tensor  # input of the head, with its graph
    parent: _Recipe | None = None
    call: Any = None  # the operation, of `_RECORDED`; None if it changes nothing
    operation: Callable[[Tensor], Tensor] = field(default=lambda values: values)
    watched: bool = False
    exposed: bool = False  # the values may be modified in place
    values: Tensor | None = None
    children: WeakSet[_Recipe] = field(default_factory=WeakSet)

    def lineage(self) -> Iterator[_Recipe]:
        """Yield this and all its ancestors."""
        recipe: _Recipe | None = self
        while recipe is not None:
            yield recipe
            recipe = recipe.parent

    def materialize(self, because: str) -> Tensor:
        """Return the full values without a graph, and cache them; warns once."""
        if self.values is None:
            with torch.no_grad():
                if self.parent is not None:
                    self.values = self.operation(self.parent.materialize(because))
                else:
                    self.head.warn_materialized(because)
                    self.values = self.head.compute(self.updates, partial(F.linear, self.hidden))
        return self.values

    @property
    def is_view(self) -> bool:
        """True if the values share the parent's memory."""
        new_storage = self.parent is None or self.call in _ELEMENTWISE or self.call is _COPY
        return not new_storage

    def expose(self, because: str) -> None:
        """Allow in-place changes of the values, after materializing all that depend on them."""
        recipe = next(recipe for recipe in self.lineage() if not recipe.is_view)
        views = [recipe]
        for recipe in views:
            recipe.exposed = True
            for child in (recipe, *recipe.children):
                child.materialize(because)
                if child.is_view and child is not recipe:
                    views.append(child)


class Logits(Tensor):
    """Logits without memory, materialized on demand."""

    recipe: _Recipe

    @staticmethod
    def __new__(cls, recipe: _Recipe, device: torch.device) -> Logits:
        meta = recipe.meta
        logits: Logits = tensor_without_memory(cls, meta.shape, meta.dtype, device, meta.stride())
        logits.recipe = recipe
        return logits

    def __init__(self, recipe: _Recipe, device: torch.device) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if call is F.cross_entropy:
            loss = _chunked_loss(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        if call in _MEMORY_METHODS:
            return call(args[0].recipe.materialize(call.__name__), *args[1:], **(kwargs or {}))
        if call in _GRADIENT_METHODS:
            args[0].recipe.watched = True
        return call_without_torch_function(call, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorded = _recorded(call, args, kwargs)
        if recorded is not None:
            return recorded
        logits_of: dict[int, Logits] = {}
        aliases = may_alias(call)

        def materialized(value: Any) -> Any:
            if not isinstance(value, Logits):
                return value
            because = call.overloadpacket.__name__.strip("_")
            if aliases:
                value.recipe.expose(because)
            values = value.recipe.materialize(because)
            logits_of[id(values)] = value
            return values

        result = call(*tree_map(materialized, args), **tree_map(materialized, kwargs))
        # In-place operations return the `Logits` that they changed.
        return tree_map(lambda value: logits_of.get(id(value), value), result)


def _recorded(call: Any, args: Any, kwargs: dict[str, Any]) -> Logits | None:
    """Return `Logits` that record the operation, or None if it needs the values."""
    logits, remaining = args[0], args[1:]
    if not isinstance(logits, Logits):
        return None
    if any(isinstance(other, Tensor) for other in (*remaining, *kwargs.values())):
        return None
    if kwargs.get("device") not in (None, logits.device) or call not in _RECORDED:
        return None
    parent = logits.recipe
    without_device = {name: value for name, value in kwargs.items() if name != "device"}
    meta = call(parent.meta, *remaining, **without_device)
    on_last_dim = call in _SELECTIONS and remaining[0] % logits.dim() == logits.dim() - 1
    if (
        not meta.dim()
        or meta.shape[-1] != logits.shape[-1]
        or (on_last_dim and meta.shape != logits.shape)
    ):
        return None
    recipe = _Recipe(
        meta, parent.head, parent.updates, parent.hidden, parent, None if on_last_dim else call
    )
    recipe.operation = lambda values: call(values, *remaining, **kwargs)  # captures no `Logits`
    parent.children.add(recipe)
    return Logits(recipe, logits.device)


def _chunked_loss(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the cross entropy, computed in chunks of logits; None if that is not supported."""
    has_defaults = weight is None and size_average is None and reduce is None
    if not has_defaults or reduction not in ("mean", "sum") or not _is_supported(logits, target):
        return None
    source = logits.recipe
    hidden, elementwise = source.hidden, []
    for recipe in reversed(list(source.lineage())):
        if recipe.call in _ELEMENTWISE:
            elementwise.append(recipe)
        elif recipe.call in _RESHAPES:
            hidden = hidden.reshape(*recipe.meta.shape[:-1], hidden.shape[-1])
        elif recipe.call in _SELECTIONS:
            hidden = recipe.operation(hidden)
    if elementwise and elementwise[-1].call is _CAST and logits.dtype is torch.float32:
        elementwise.pop()  # the loss casts anyway
    operations = [recipe.operation for recipe in elementwise]

    def transform(values: Tensor) -> Tensor:
        for operation in operations:
            values = operation(values)
        return values

    def loss_of(weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs = hidden, weight, bias
        if not (logits.requires_grad and torch.is_grad_enabled()):  # e.g. detached logits
            inputs = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        return chunked_cross_entropy(
            inputs[0],
            inputs[1],
            target,
            bias=inputs[2],
            chunk_size=CHUNK_TOKENS // 2 if operations else CHUNK_TOKENS,  # results take memory
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            transform=transform if operations else None,
            reduction=reduction,
        )

    loss: Tensor = source.head.compute(source.updates, loss_of).to(logits.dtype)
    return loss


def _is_supported(logits: Any, target: Any) -> bool:
    """Return True if the cross entropy can be computed from the hidden states."""
    if not isinstance(logits, Logits) or logits.dim() != 2 or logits.dtype not in _LOSS_DTYPES:
        return False
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() != 1:
        return False
    if len(target) != len(logits):
        return False
    return not any(recipe.watched or recipe.exposed for recipe in logits.recipe.lineage())
