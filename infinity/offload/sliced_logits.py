"""Heads whose logits are made a chunk of tokens at a time, by the cross entropy that wants them.

[Note: sliced logits]
In training, and of many tokens, the `forward` of a head returns `Logits`: a tensor that has no
memory, only the hidden states it would be made of. What models do between head and loss (casts, a
scale, a soft cap, leaving out the last token, flattening) is noted down and returns `Logits` again;
`F.cross_entropy` of that is `chunked_cross_entropy` of the hidden states, with the noted operations
in each chunk. Any other operation makes the logits, whole, once, and says so in one warning.

Operations are seen below autograd, which records them as of any tensor: so whatever is done with
logits has its gradient, up to `_Head`, whose backward is that of a linear layer. The head's unit is
brought whenever its weight is read, also after the model's call, when its user computes the loss;
logits that are asked for after the weight was updated are an error.
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
    below_torch_function,
    may_alias,
    tensor_without_memory,
    tree_map,
)
from infinity.offload.activations import graph_of_closed_engine, modified_in_place
from infinity.offload.hooks import Hooks
from infinity.plan.activations import CHUNK_TOKENS

_aten = torch.ops.aten
# Of each element alone: done to chunks.
_CAST = _aten._to_copy.default
_ELEMENTWISE = {_CAST, _aten.tanh.default, _aten.mul.Tensor, _aten.div.Tensor}
# They choose and rearrange tokens, or nothing: done to the hidden states.
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}
_PARTS = {_aten.slice.Tensor, _aten.select.int}
_COPY = _aten.clone.default
_NOTED = _ELEMENTWISE | _RESHAPES | _PARTS | {_COPY, _aten.detach.default, _aten.alias.default}
# They want gradients of logits, which a loss of hidden states does not make.
_WATCHES = [
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.requires_grad_,
    getattr(Tensor.requires_grad, "__set__"),  # noqa: B009
]
_LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# They read memory, past all that a subclass of tensors sees.
_READS = {
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "data_ptr",
        "numpy", "tolist",
    )
}  # fmt: skip


def heads_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that make logits, by name; subclasses with a forward of their own are none.

    They are the output embeddings of models of transformers, wrapped or not. In any other model,
    those with the matrix that the plan takes for the head's (`Target.heads`): that of an embedding,
    or else the last one with as many rows.
    """
    found = {id(layer) for module in model.modules() for layer in _output_of(module)}
    if not found:
        parameters, heads = list(model.parameters()), target_of("", model, {}).heads
        weights = {id(parameters[index]) for index in heads}
        found = {id(m) for m in model.modules() if id(getattr(m, "weight", None)) in weights}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in found
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
    }


def _output_of(module: nn.Module) -> list[nn.Linear]:
    """What transformers calls the output embeddings; in a wrapper, those that are of one shape."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        made = ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):  # a model without a head
        made = None
    layers = [m for m in made.modules() if isinstance(m, nn.Linear)] if made is not None else []
    return layers if len({layer.weight.shape for layer in layers}) == 1 else []


class SlicedHeads:
    """Replaces the `forward` of every head; `remove` gives them back."""

    def __init__(
        self,
        model: nn.Module,
        hooks: Hooks,
        parameters: Sequence[nn.Parameter],
        warn_once: Callable[[str, str], None],
    ) -> None:
        index_of = {id(p): i for i, p in enumerate(parameters)}
        self.heads = [
            Head(name, module, hooks, hooks.unit_of(index_of[id(module.weight)]), warn_once)
            for name, module in heads_of(model).items()
            if id(module.weight) in index_of
        ]

    def remove(self) -> None:
        """Every head has its own forward again; logits that were not made cannot be made."""
        while self.heads:
            self.heads.pop().remove()


class Head:
    """One head, whose weight belongs to `unit`."""

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
        """The module's own forward again."""
        assert self._module is not None
        self._module.__dict__.pop("forward", None)
        self._module = None
        del self._entry, self._before, self._after  # logits may live on

    @property
    def updates(self) -> int:
        """How often the weight was updated or edited."""
        return self._entry.updates

    def _forward(self, hidden: Tensor) -> Tensor:
        module = self._module
        assert module is not None
        # Elsewhere as well if there are many: an evaluation is after the loss, too.
        many = hidden.numel() > CHUNK_TOKENS * hidden.shape[-1]
        if not (self._trains() or many) or torch.is_autocast_enabled(hidden.device.type):
            return self._module_forward(hidden)
        weight = module.weight
        if hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[1]:
            return self._module_forward(hidden)  # raises
        apply: Any = _Head.apply
        logits: Tensor = apply(hidden, weight, module.bias, self)
        return logits

    def _trains(self) -> bool:
        module = self._module
        return module is not None and module.training and torch.is_grad_enabled()

    def compute(self, updates: int, function: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """`function(weight, bias)`, with both there; a call of the engine's of its own.

        Raises `RuntimeError` where they are not those of `updates` updates any more, and
        `EngineClosedError` where they are gone.
        """
        if self._module is None:
            raise graph_of_closed_engine()
        self._before(self._module, (), {})
        try:
            weight, bias = self._module.weight, self._module.bias
            if self.updates != updates:
                raise modified_in_place(
                    f"the weights of {self._name!r} were updated before its logits were made; read "
                    "them before step, or train with activations.logits: full"
                )
            return function(weight, bias)
        finally:
            self._after(self._module, (), None)

    def warn_materialized(self, because: str) -> None:
        """Say once that logits are made whole, although a loss was to be expected."""
        if self._module is not None and not self._module.training:
            return
        self._warn_once(
            f"logits of {self._name}",
            f"all logits of {self._name!r} are made at once, for {because}: only cross_entropy "
            "(mean or sum, without weights) takes them in slices; activations.logits: full "
            "silences this",
        )


class _Head(torch.autograd.Function):
    """A linear layer that computes nothing yet."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head
    ) -> Logits:
        ctx.save_for_backward(hidden, weight)
        shape = (*hidden.shape[:-1], weight.shape[0])
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return Logits(_Made(meta, head, head.updates, hidden), hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        gradient, wants = grads[0], ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if wants[0] else None,
            flat.t() @ hidden.reshape(-1, hidden.shape[-1]) if wants[1] else None,
            flat.sum(0) if wants[2] else None,
            None,
        )


@dataclass(eq=False)
class _Made:
    """How logits are made. Knows no `Logits`: a graph that saves some would hold itself."""

    meta: Tensor  # their shape, strides and dtype
    head: Head
    updates: int
    hidden: Tensor  # of the source, with its graph
    parent: _Made | None = None
    call: Any = None  # of `_NOTED`, or None where it changes nothing
    operation: Callable[[Tensor], Tensor] = field(default=lambda values: values)
    watched: bool = False
    exposed: bool = False  # whoever has the values may change them
    real: Tensor | None = None
    children: WeakSet[_Made] = field(default_factory=WeakSet)

    def lineage(self) -> Iterator[_Made]:
        """What this was made of, itself first."""
        made: _Made | None = self
        while made is not None:
            yield made
            made = made.parent

    def materialize(self, because: str) -> Tensor:
        """Return the full values without a graph, and cache them; warns once."""
        if self.real is None:
            with torch.no_grad():
                if self.parent is not None:
                    self.real = self.operation(self.parent.materialize(because))
                else:
                    self.head.warn_materialized(because)
                    self.real = self.head.compute(self.updates, partial(F.linear, self.hidden))
        return self.real

    @property
    def is_view(self) -> bool:
        """Whether the values lie in the parent's memory."""
        new_storage = self.parent is None or self.call in _ELEMENTWISE or self.call is _COPY
        return not new_storage

    def expose(self, because: str) -> None:
        """Somebody may change the values from now on: others that depend on them are made first."""
        made = next(made for made in self.lineage() if not made.is_view)
        views = [made]
        for made in views:
            made.exposed = True
            for child in (made, *made.children):
                child.materialize(because)
                if child.is_view and child is not made:
                    views.append(child)


class Logits(Tensor):
    """Logits that are not there."""

    made: _Made

    @staticmethod
    def __new__(cls, made: _Made, device: torch.device) -> Logits:
        """They have no graph yet."""
        meta = made.meta
        logits: Logits = tensor_without_memory(cls, meta.shape, meta.dtype, device, meta.stride())
        logits.made = made
        return logits

    def __init__(self, made: _Made, device: torch.device) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if call is F.cross_entropy:
            loss = _in_chunks(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        if call in _READS:
            return call(args[0].made.materialize(call.__name__), *args[1:], **(kwargs or {}))
        if call in _WATCHES:
            args[0].made.watched = True
        return below_torch_function(call, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        noted = _noted(call, args, kwargs)
        if noted is not None:
            return noted
        real: dict[int, Logits] = {}
        shares = may_alias(call)

        def in_memory(value: Any) -> Any:
            if not isinstance(value, Logits):
                return value
            because = call.overloadpacket.__name__.strip("_")
            if shares:
                value.made.expose(because)
            values = value.made.materialize(because)
            real[id(values)] = value
            return values

        result = call(*tree_map(in_memory, args), **tree_map(in_memory, kwargs))
        return tree_map(lambda value: real.get(id(value), value), result)  # changed in place


def _noted(call: Any, args: Any, kwargs: dict[str, Any]) -> Logits | None:
    """`Logits` that remember the operation; None for one that needs the values."""
    given, remaining = args[0], args[1:]
    if not isinstance(given, Logits):
        return None
    if any(isinstance(other, Tensor) for other in (*remaining, *kwargs.values())):
        return None
    if kwargs.get("device") not in (None, given.device) or call not in _NOTED:
        return None
    parent = given.made
    without_device = {name: value for name, value in kwargs.items() if name != "device"}
    meta = call(parent.meta, *remaining, **without_device)
    last = call in _PARTS and remaining[0] % given.dim() == given.dim() - 1
    if not meta.dim() or meta.shape[-1] != given.shape[-1] or (last and meta.shape != given.shape):
        return None
    made = _Made(meta, parent.head, parent.updates, parent.hidden, parent, None if last else call)
    made.operation = lambda values: call(values, *remaining, **kwargs)  # nothing here is `Logits`
    parent.children.add(made)
    return Logits(made, given.device)


def _in_chunks(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The cross entropy, a chunk of logits at a time; None where that cannot be."""
    usual = weight is None and size_average is None and reduce is None
    if not usual or reduction not in ("mean", "sum") or not _fit(logits, target):
        return None
    source, hidden, elementwise = logits.made, logits.made.hidden, []
    for made in reversed(list(source.lineage())):
        if made.call in _ELEMENTWISE:
            elementwise.append(made)
        elif made.call in _RESHAPES:
            hidden = hidden.reshape(*made.meta.shape[:-1], hidden.shape[-1])
        elif made.call in _PARTS:
            hidden = made.operation(hidden)
    if elementwise and elementwise[-1].call is _CAST and logits.dtype is torch.float32:
        elementwise.pop()  # the loss does that
    operations = [made.operation for made in elementwise]

    def loss_of(weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs = hidden, weight, bias
        if not (logits.requires_grad and torch.is_grad_enabled()):  # detached on the way, say
            inputs = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        return chunked_cross_entropy(
            inputs[0],
            inputs[1],
            target,
            bias=inputs[2],
            chunk_size=CHUNK_TOKENS // 2 if operations else CHUNK_TOKENS,  # these have results too
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            transform=partial(_one_by_one, operations) if operations else None,
            reduction=reduction,
        )

    loss: Tensor = source.head.compute(source.updates, loss_of).to(logits.dtype)
    return loss


def _fit(logits: Any, target: Any) -> bool:
    """Return True if a cross entropy may use the hidden states with equal results."""
    if not isinstance(logits, Logits) or logits.dim() != 2 or logits.dtype not in _LOSS_DTYPES:
        return False
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() != 1:
        return False
    if len(target) != len(logits):
        return False
    return not any(made.watched or made.exposed for made in logits.made.lineage())


def _one_by_one(operations: Sequence[Callable[[Tensor], Tensor]], logits: Tensor) -> Tensor:
    for operation in operations:
        logits = operation(logits)
    return logits
