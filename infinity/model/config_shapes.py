"""Models that only transformers knows, as modules on the meta device; it is imported when asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infinity.errors import ConfigError, InfinityError, first_lines

_MOST_TEXT = 400  # of an error of transformers: it may name all families there are
_SETTERS = (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_)


class _Unset(TorchFunctionMode):
    """Initialisers do nothing: on meta there is nothing to set, and torch takes seconds to learn.

    The first random number on meta makes torch import its compiler.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init" or function in _SETTERS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def explained(what: str, remedy: str | None = None) -> Iterator[None]:
    """Errors of transformers about a user's config or files as ours, with their first lines.

    It divides by numbers and calls methods of values that it never looked at, so that any kind of
    error may come. A lack of memory, and errors of ours, pass through.
    """
    try:
        yield
    except (InfinityError, MemoryError):
        raise
    except Exception as error:
        because = first_lines(error, 12)[:_MOST_TEXT]
        if isinstance(error, ArithmeticError | LookupError):  # "division by zero", "'rope_type'"
            because = f"{type(error).__name__}: {because}"
        raise ConfigError(what, because=because, remedy=remedy) from error


def from_transformers(config: Mapping[str, Any], known: Sequence[str]) -> nn.Module:
    """Any causal language model that transformers knows; `known` are families known without it.

    Raises `ConfigError` where it is not installed, or cannot build one.
    """
    family = config.get("model_type")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"model_type {family!r} is not known here",
            because=f"known without transformers: {', '.join(known)}",
            remedy="pip install transformers, and it is asked instead",
        ) from error
    settings = {name: value for name, value in config.items() if name != "model_type"}
    what = f"transformers cannot build model_type {family!r}"
    remedy = f"correct config.json; known without transformers: {', '.join(known)}"
    with explained(what, remedy), torch.device("meta"), _Unset():
        wanted = transformers.AutoConfig.for_model(family, **settings)
        model = transformers.AutoModelForCausalLM.from_config(wanted)
    assert isinstance(model, nn.Module)
    return model
