"""Methods of `torch.optim.Optimizer` without the wrapper that imports `torch._dynamo`.

torch decorates some of them so that `torch.compile` does not look inside. The first call of any
imports the compiler: 80 MiB and two seconds or more, for every program that makes an optimizer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def optimizer_method(name: str) -> Callable[..., Any]:
    """`torch.optim.Optimizer`'s function `name`; undecorated while there is no compiler to tell.

    `functools.wraps` says what a wrapper wraps, so a torch that decorates nothing, or otherwise,
    is right too.
    """
    method: Callable[..., Any] = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else inspect.unwrap(method)
