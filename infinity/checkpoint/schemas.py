"""Schemas of saved documents, which are validated before any of them is used.

A checksum shows that a file is unchanged, not that this package wrote it. So the types and ranges
of all values that are computed with are checked in one place, when a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from infinity.checkpoint.plain import DTYPES
from infinity.common.parsed_json import LARGEST, Count, made
from infinity.errors import CheckpointError
from infinity.plan.layout import PRECISIONS
from infinity.types import PAGE, FrozenFormat, MomentFormat, Tier, can_store

_MAX_RANKS = 1 << 16
_Positive = Annotated[int, Field(gt=0, le=LARGEST)]
_Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Tier = Annotated[Tier, Field(strict=False)]
_Moment = Annotated[MomentFormat, Field(strict=False)]
_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+\z")]


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


def _validate(schema: type[_Document], value: Any, where: str) -> None:
    try:
        made(schema, value)
    except ValueError as error:
        raise CheckpointError(
            f"{where} is invalid: {error}",
            because="it was changed, or was written by something else",
        ) from None


# --- plan.json of a durable run ------------------------------------------------------------------


class _SegmentSchema(_Document):
    name: str
    shape: list[Count]
    dtype: str
    numel: Count
    nbytes: Count
    offset: Count
    trained: bool
    form: str = ""
    whole: bool = False
    rows: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.rows and not (self.shape and self.rows[0] + self.shape[0] <= self.rows[1]):
            raise ValueError(f"rows {self.rows} do not fit the shape")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r:.60} is unknown")
        if self.form and not can_store(self.form, self.shape, trained=self.trained):
            raise ValueError(f"form {self.form!r:.60} does not fit")
        nbytes = self.numel * DTYPES[self.dtype].itemsize
        if self.form:
            nbytes = FrozenFormat(self.form).nbytes(tuple(self.shape))
        if self.numel != prod(self.shape) or (not self.trained and self.nbytes != nbytes):
            raise ValueError("numel or nbytes do not fit the shape")
        return self


class _UnitSchema(_Document):
    name: str
    numel: Count
    frozen_bytes: Count
    paired: _Positive | None = None
    segments: list[_SegmentSchema]

    @model_validator(mode="after")
    def _check_segments(self) -> Self:
        for segment in self.segments:
            if segment.trained:
                size, capacity = segment.numel, self.numel
            else:
                size, capacity = segment.nbytes, self.frozen_bytes
            if segment.offset + size > capacity:
                raise ValueError(f"{segment.name!r:.200} ends beyond its unit")
        return self


class _PlacementSchema(_Document):
    placement: Annotated[list[_Tier], Field(min_length=3, max_length=3)]


class _PlanSchema(_Document):
    engine_version: str
    run: str
    group: str = ""
    rank: Count = 0
    ranks: Annotated[int, Field(gt=0, le=_MAX_RANKS)] = 1
    precision: str
    rule: str
    moments: list[_Moment]
    gradient_itemsize: Annotated[int, Field(ge=2, le=4, multiple_of=2)]
    units: list[_UnitSchema]
    chunk_elements: _Positive
    placement: list[_PlacementSchema]
    directories: Annotated[list[_Path], Field(min_length=1)]
    stripe_bytes: Annotated[int, Field(gt=0, le=LARGEST, multiple_of=PAGE)]
    speeds: list[_Speed]
    room: list[Count]
    used: list[Count]

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        count = len(self.directories)
        segments = [s for unit in self.units for s in unit.segments]
        names = [(s.name, s.rows[0] if s.rows else 0) for s in segments]
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r:.60} is unknown")
        if self.rank >= self.ranks or any(unit.numel % self.ranks for unit in self.units):
            raise ValueError("the number of ranks does not fit")
        if len(self.placement) != len(self.units) or len(set(names)) != len(names):
            raise ValueError("units, their placements and parameters do not fit")
        if len(self.used) != count or not {len(self.speeds), len(self.room)} <= {0, count}:
            raise ValueError("the numbers of its directories and of their sizes differ")
        sizes = (max(unit.numel // self.ranks, unit.frozen_bytes) for unit in self.units)
        if max(chain([0], sizes)) > self.ranks * sum(self.used):
            raise ValueError("its units are larger than its files")
        return self


def check_plan(facts: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` unless `facts`, read from `where`, are a valid `plan.json`."""
    _validate(_PlanSchema, facts, where)


# --- the state of a run --------------------------------------------------------------------------


class _GroupSchema(_Document):
    parameters: list[str]
    values: dict[str, Any]


class _LossScaleSchema(_Document):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    patience: Count
    steps: Count
    last_overflow: Annotated[int, Field(ge=-1, le=LARGEST)]
    history: list[Annotated[list[_Number], Field(min_length=2, max_length=2)]]


class _RunStateSchema(_Document):
    progress: dict[str, Count] = {}
    loss_scale: _LossScaleSchema | None = None
    steps: dict[str, Count] = {}
    groups: list[_GroupSchema] = []
    kept: dict[str, Any] = {}
    rounding_seed: Count = 0
    scheduler: dict[str, Any] | None = None
    scheduler_type: str = ""
    rng: dict[str, Any] = {}
    registered: dict[str, Any] = {}
    extra_state: dict[str, Any] = {}
    buffers: dict[str, Tensor] = {}
    ranks: list[dict[str, Any]] = []


def check_run_state(state: Any, where: str) -> None:
    """Raise `CheckpointError` unless `state`, decoded, can be a result of `RunState.capture`."""
    _validate(_RunStateSchema, state, where)
