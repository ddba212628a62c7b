"""Splitting of a step's batch into micro-batches, and the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from infinity.errors import TrainingError, first_lines, listed
from infinity.model.torch_private import tree_leaves, tree_map

LossFn = Callable[[Any, Any], Tensor]


def iter_micro_batches(data: Any, count: int) -> Iterator[Any]:
    """Return an iterator over the micro-batches of a step: views of a batch, or the given ones.

    Args:
        data: A batch or an iterator of micro-batches. A batch is a tensor, or a mapping, tuple or
            list that contains tensors at any depth: each tensor with dimensions is split along its
            first dimension, other values are passed to every micro-batch. An iterator (an object
            with `__next__`) is advanced when a micro-batch is due, so that not all of them are in
            memory at once.
        count: Number of micro-batches. With 1 a batch is not split, whatever its sizes.

    Raises:
        TrainingError: The batch has another type or cannot be split (raised at once), or the
            iterator ends early (raised when the missing micro-batch is due).
    """
    if hasattr(data, "__next__"):
        return _iterate_source(data, count)
    if not isinstance(data, Tensor | Mapping | tuple | list):
        raise TrainingError(
            f"train_batch() got a {type(data).__name__}: neither a batch nor an iterator",
            remedy="a tensor, mapping, tuple or list; of a DataLoader iter(loader), made before "
            "the loop; of micro-batches that are there iter([first, second, ...])",
        )
    batch = dict(data) if isinstance(data, Mapping) else data  # also types unknown to pytree
    if count == 1:
        return iter([batch])
    size = _num_samples(batch, count) // count

    def slice_rows(value: Any, start: int) -> Any:
        return value.narrow(0, start, size) if isinstance(value, Tensor) and value.dim() else value

    return (
        tree_map(lambda value, index=index: slice_rows(value, index * size), batch)
        for index in range(count)
    )


def _num_samples(batch: Any, count: int) -> int:
    """Return the number of samples of a batch; raise unless a positive multiple of `count`."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = sorted({tensor.shape[0] for tensor in tensors})
    if len(sizes) != 1:
        shapes = listed([str(tuple(tensor.shape)) for tensor in tensors])
        raise TrainingError(
            f"a batch with tensors of shape {shapes} cannot be cut into {count} micro-batches"
            if sizes
            else f"a batch without a tensor of (samples, ...) has no {count} micro-batches",
            because="every tensor that has dimensions is cut along the first, the samples",
            remedy="one number of samples in all of them; or cut it yourself, and pass "
            f"iter([...]) with the {count} micro-batches",
        )
    num_samples = sizes[0]
    if num_samples % count or not num_samples:
        lower = num_samples // count * count
        raise TrainingError(
            f"a batch of {num_samples} samples cannot be cut into {count} micro-batches of equal "
            f"size (gradient_accumulation_steps is {count})",
            remedy=(f"{lower} or " if lower else "") + f"{lower + count} samples; a DataLoader "
            "leaves out a short last batch with drop_last=True",
        )
    return num_samples


def _iterate_source(source: Any, count: int) -> Iterator[Any]:
    for number in range(count):
        try:
            batch = next(source)
        except StopIteration:
            raise TrainingError(
                f"the iterator ended: {number} of the {count} micro-batches of this step were left",
                because=f"a step takes {count} (gradient_accumulation_steps); these were not "
                "trained on, and the window starts over",
                remedy=f"len(loader) // {count} steps an epoch, or an iterator without an end",
            ) from None
        yield batch


def train_micro_batch(engine: Any, batch: Any, loss_fn: LossFn | None) -> Tensor:
    """Run forward, backward and `step()`; return the detached fp32 loss, shape ().

    A separate frame frees the model's output before the next micro-batch computes.
    """
    loss = _loss_of(engine, batch, loss_fn)
    engine.backward(loss)
    engine.step()
    return loss.detach().float().reshape(())


def _loss_of(engine: Any, batch: Any, loss_fn: LossFn | None) -> Tensor:
    target = batch
    if loss_fn is not None and not callable(loss_fn):
        raise TrainingError(
            f"train_batch() got a {type(loss_fn).__name__} as its loss_fn",
            remedy="one batch, and then a function: train_batch((inputs, target), loss_fn)",
        )
    if isinstance(batch, Mapping):
        output = engine(**batch)
    elif isinstance(batch, tuple | list):
        inputs = batch
        if loss_fn is not None:
            if len(batch) < 2:
                raise TrainingError(
                    f"a micro-batch of {len(batch)} elements, and a loss_fn",
                    because="the last is the target, the others are the model's inputs",
                    remedy="(inputs, target); or leave loss_fn out where the model makes the loss",
                )
            *inputs, target = batch
        try:
            output = engine(*inputs)
        except TypeError as error:
            signature_error = f"{type(engine.module).forward.__qualname__}() takes "
            if loss_fn is not None or signature_error not in str(error):
                raise
            raise TrainingError(
                f"the model does not take the {len(batch)} elements of a micro-batch",
                because=first_lines(error),
                remedy="train_batch(data, loss_fn), where loss_fn(output, target) gets the last "
                "one; or a model that makes the loss of all",
            ) from error
    else:
        output = engine(batch)
    return _loss_in(output) if loss_fn is None else loss_fn(output, target)


def _loss_in(output: Any) -> Tensor:
    """Return the loss in a model's output; raise `TrainingError` if there is none."""
    loss = getattr(output, "loss", output)
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    elif isinstance(loss, tuple | list):
        loss = loss[0] if loss else None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    description = f"a {type(output).__name__}"
    if isinstance(output, Mapping):
        description += (
            f" with {listed([repr(key) for key in output])}" if output else " with nothing"
        )
    if isinstance(loss, Tensor):
        location = "" if loss is output else " with one"
        description += f"{location} of shape {tuple(loss.shape)}"
    raise TrainingError(
        f"the model returned no loss, but {description}",
        because="without loss_fn its output is the loss: a scalar, a tuple or list that begins "
        "with one, or an object that has one as .loss or ['loss']",
        remedy="train_batch(data, loss_fn), which is called with output and target; or pass the "
        "labels to the model, if it makes a loss of them",
    )
