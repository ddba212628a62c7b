"""The built-in rules by their names in the config: hypers from groups, updates by the kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.formats import MomentFormat
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.hypers import hyper_of, lossy_notes, reserved_moments
from infinity.optim.moments import Moment
from infinity.optim.rules import Hyper, SgdHyper
from infinity.optim.tiles import Tile

_ADAM_STATE = ("exp_avg", "exp_avg_sq")
# What torch calls the moments of each rule, in the order of the kernels.
STATE_NAMES: dict[str, tuple[str, ...]] = {
    "AdamW": _ADAM_STATE,
    "Adam": _ADAM_STATE,
    "Lion": ("exp_avg",),
    "SGD": ("momentum_buffer",),
    "Adagrad": ("sum",),
}


class BuiltInRule:
    """One of the built-in rules; see `tiles.Rule`."""

    whole = False

    def __init__(self, name: str, moments: MomentFormat = MomentFormat.FP32) -> None:
        self.name = name
        self.moments: tuple[MomentFormat, ...] = ()
        self.notes = lossy_notes(moments)
        self._format = moments
        self._reserved = False

    def capture(self, group: Mapping[str, Any]) -> Hyper:
        """The group's hyper-parameters now."""
        hyper = hyper_of(self.name, group)
        if self._reserved and hyper.num_moments > len(self.moments):
            raise ConfigError(
                f"group['momentum'] is {group['momentum']}, but was 0 when the engine was made",
                because="no memory was reserved for momentum buffers",
                remedy="set it back to 0 and call step() again; to use momentum later, start with "
                "optimizer.momentum above 0: a schedule may change it then",
            )
        return hyper

    def reserve(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """As many moments as the group that needs the most."""
        self.moments = reserved_moments(self.name, groups, self._format)
        self._reserved = True

    def tile_elements(self, largest: int) -> int:
        """Nothing is copied."""
        return 0

    def initial(self, captured: Hyper) -> tuple[float, ...]:
        """Adagrad's initial accumulator value; nothing else begins with anything but zeros."""
        return captured.initial if any(captured.initial) else ()

    def updater(
        self, kernels: CpuKernels, names: Sequence[str], largest: int, seed: int
    ) -> KernelUpdater:
        """The kernels."""
        return KernelUpdater(kernels, names, STATE_NAMES[self.name], seed)


class KernelUpdater:
    """Updates tiles by the kernels; see `tiles.Updater`.

    `names` are those of the parameters, for the seeds of rounding; `state_names` torch's names of
    the rule's moments.
    """

    def __init__(
        self, kernels: CpuKernels, names: Sequence[str], state_names: tuple[str, ...], seed: int
    ) -> None:
        self.kernels = kernels
        self._names = names
        self._state_names = state_names
        self.seed = seed
        # By parameter, the step in which SGD made its momentum buffer: torch's state lacks the
        # buffer until then, our memory for it is always there.
        self._begun: dict[int, int] = {}

    def update(self, tiles: Sequence[Tile], grad_scale: float) -> None:
        """One step of each tile's rule, as one job."""
        self.kernels.update_all(self.pieces(tiles, grad_scale))

    def pieces(self, tiles: Sequence[Tile], grad_scale: float) -> list[Piece]:
        """What the kernels, of whichever device, need to know of the tiles."""
        return [self._piece(tile, grad_scale) for tile in tiles]

    def _piece(self, tile: Tile, grad_scale: float) -> Piece:
        hyper = self._begun_at(tile.parameter, tile.hyper, tile.step)
        moments = tile.moments[: hyper.num_moments]
        exact = all(moment.format.is_exact for moment in moments)
        name = self._names[tile.parameter]
        return Piece(
            tile.weight,
            tile.rest,
            moments,
            tile.gradient,
            hyper,
            tile.step,
            grad_scale,
            0 if exact else rounding_key(self.seed, name, tile.step),
            tile.first,
        )

    def _begun_at(self, parameter: int, hyper: Hyper, step: int) -> Hyper:
        """The hyper-parameters of one parameter, which say when its momentum began."""
        if not isinstance(hyper, SgdHyper) or not hyper.num_moments:
            return hyper
        begins = self._begun.setdefault(parameter, step)
        return hyper if begins == hyper.begins else replace(hyper, begins=begins)

    def begin(self, hypers: Mapping[int, Any], steps: Mapping[int, int]) -> None:
        """From now on `kept` tells of this step."""
        for parameter, step in steps.items():
            self._begun_at(parameter, hypers[parameter], step)

    def kept(self) -> dict[int, dict[str, Any]]:
        """What is kept of each parameter beside its moments, as data that can be saved."""
        return {parameter: {"begins": step} for parameter, step in self._begun.items()}

    def keep(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on with what `kept` gave."""
        self._begun = {parameter: entry["begins"] for parameter, entry in saved.items()}

    def moment_names(self, parameter: int, hyper: Hyper) -> tuple[str, ...]:
        """torch's names of the moments that `state_of` tells of this parameter."""
        begun = not isinstance(hyper, SgdHyper) or parameter in self._begun
        return self._state_names[: hyper.num_moments] if begun else ()

    def state_of(
        self,
        parameter: int,
        hyper: Hyper,
        moments: Sequence[Moment],
        shape: tuple[int, ...],
        step: int,
    ) -> dict[str, Any]:
        """Moments decoded to fp32, and the step count; torch's SGD keeps no count.

        SGD's buffer is there from its first step with momentum on, as torch's is.
        """
        state: dict[str, Any] = {}
        if isinstance(hyper, SgdHyper):
            kept = moments if parameter in self._begun else ()
        else:
            state["step"] = torch.tensor(float(step))
            kept = moments[: hyper.num_moments]
        for name, moment, unsigned in zip(self._state_names, kept, hyper.unsigned, strict=False):
            values = torch.empty(moment.values.numel(), dtype=torch.float32)
            self.kernels.decode(moment, values, signed=not unsigned)
            state[name] = values.view(shape)
        return state


def rounding_key(seed: int, name: str, step: int) -> int:
    """64 bits for the rounding of one parameter in one step; the same under every placement."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
