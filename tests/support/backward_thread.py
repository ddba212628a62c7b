"""Backward on a separate thread, as on a GPU, while the calling thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from infinity.model.torch_private import inside_backward

NAME = "backward"


def backward_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[str]:
    """Patch `torch.autograd.backward` to run on another thread, inside the context `around`.

    Returns:
        A list to which each backward appends the name of its thread.
    """
    backward, ran = torch.autograd.backward, list[str]()

    def elsewhere(*arguments: Any, **named: Any) -> None:
        if inside_backward():  # of a recomputed block: autograd stays on its thread
            backward(*arguments, **named)
            return
        errors: list[BaseException] = []

        def work() -> None:
            ran.append(threading.current_thread().name)
            try:
                with around():
                    backward(*arguments, **named)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name=NAME)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()

    monkeypatch.setattr(torch.autograd, "backward", elsewhere)
    return ran
