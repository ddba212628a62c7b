"""The `activations` section: what happens to what autograd keeps between forward and backward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from infinity.config_values import Section, Size


class ActivationsConfig(Section):
    """Recomputation and slices belong to the computation; where kept tensors wait does not.

    Sizes are bytes. `host` and `disk` follow from `tokens` if they are left out.
    """

    # "units": a block keeps only its inputs, and runs again in backward.
    checkpoint: Literal["none", "units"] = "none"
    # Where inputs of recomputed blocks wait for backward, beyond the device: "disk" is RAM first.
    offload: Literal["none", "host", "disk"] = "none"
    # The most tokens of one micro-batch; what the sizes below are made for if they are left out.
    tokens: int | None = Field(default=None, ge=1)
    host: Size | None = None  # pinned RAM that is reserved for them
    disk: Size | None = None  # of scratch space
    min_bytes: Size = 1 << 20  # smaller tensors stay where they are
    # A block runs its batch in so many slices, so that its weights are fetched once for all.
    slices: int = Field(default=1, ge=1)

    @field_validator("host", "disk")
    @classmethod
    def _is_used(cls, value: int | None, info: ValidationInfo) -> int | None:
        offload = info.data.get("offload")
        if value is not None and offload == "none":
            raise ValueError("is for activations.offload: host or disk")
        if value is not None and info.field_name == "disk" and offload == "host":
            raise ValueError("is for activations.offload: disk")
        return value
