"""Flat views of one parameter and its state, kept from step to step while nothing replaced them.

Making them anew takes several times as long as the update of a small parameter.
"""

from __future__ import annotations

from operator import is_

import torch
from torch import Tensor

from infinity.formats import MomentFormat
from infinity.optim.standalone_state import State, moments_of, rest_of


class Ready:
    """What the kernels take of a parameter; `rest` is None without a master.

    Between steps the parameter must not be edited: `is_marked` tells, as far as torch can.
    """

    __slots__ = (
        "_address",
        "_count",
        "_dtype",
        "_num_elements",
        "_parameter",
        "_values",
        "_version",
        "device",
        "moments",
        "rest",
        "weight",
    )

    def __init__(
        self, parameter: Tensor, state: State, kind: MomentFormat, *, master: bool
    ) -> None:
        self.weight = parameter.detach().view(-1)
        self.rest = rest_of(state, parameter) if master else None
        self.moments = moments_of(state, kind)
        self.device = parameter.device
        count = state["step"]
        if not isinstance(count, Tensor) or count.device.type != "cpu":
            count = state["step"] = torch.tensor(float(count))
        self._count = count.detach().numpy()  # the same memory
        self._parameter = parameter
        self._address = parameter.data_ptr()
        self._dtype = parameter.dtype
        self._num_elements = parameter.numel()
        self._values = tuple(state.values())
        self._version = parameter._version

    def is_marked(self) -> bool:
        """Whether the master is known to be the parameter's: another version means an edit."""
        parameter = self._parameter
        return parameter._version == self._version and parameter.dtype is self._dtype

    def fits(self, state: State) -> bool:
        """Whether the parameter has the memory it had, and the state the tensors it had."""
        parameter = self._parameter
        return (
            parameter.data_ptr() == self._address
            and parameter.numel() == self._num_elements
            and parameter.is_contiguous()
            and len(state) == len(self._values)
            and all(map(is_, state.values(), self._values))
            and self.is_marked()
        )

    @property
    def next_step(self) -> int:
        """Number of the step to come; from 1."""
        return int(self._count) + 1

    def advance(self) -> None:
        """A step was taken, of which the parameter's version knows."""
        self._count[...] = self.next_step
        self._version = self._parameter._version


def flat_gradient(gradient: Tensor) -> Tensor:
    """The gradient's values in one dimension; a copy where they are not in order."""
    if gradient.is_contiguous():
        return gradient.view(-1) if gradient.dim() != 1 else gradient
    return gradient.contiguous().view(-1)
