"""What a disk's rates mean for training, from the byte table of docs/ARCHITECTURE.md."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# bf16 AdamW with one micro-batch; bytes per parameter and step.
STATE_BYTES = 12  # weight 2, residual 2, two moments 4 each
SWEEP_BYTES = 2 * STATE_BYTES  # each is read and written once
FETCH_BYTES = 2  # the weights once more, for backward
EXAMPLE_PARAMETERS = 7_000_000_000
_TERABYTE = 10**12


@dataclass(frozen=True)
class TrainingTerms:
    """A step with all state on disk and gradients in RAM, one micro-batch."""

    sweep_parameters_per_s: float
    """How fast the optimizer's state streams through: read, updated, written back."""
    num_parameters: int
    read_bytes: int
    written_bytes: int
    step_s: float
    """The step cannot be shorter: reads and writes of the sweep, then the fetch for backward."""
    steps_per_100_tbw: float
    """How many steps use up 100 TB of what a drive is rated to have written to it."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def training_terms(
    mixed_bytes_per_s: float,
    read_bytes_per_s: float,
    num_parameters: int = EXAMPLE_PARAMETERS,
) -> TrainingTerms:
    """Translate rates; `mixed_bytes_per_s` counts both directions, moved 1:1."""
    written = STATE_BYTES * num_parameters
    return TrainingTerms(
        sweep_parameters_per_s=mixed_bytes_per_s / SWEEP_BYTES,
        num_parameters=num_parameters,
        read_bytes=(STATE_BYTES + FETCH_BYTES) * num_parameters,
        written_bytes=written,
        step_s=num_parameters * (SWEEP_BYTES / mixed_bytes_per_s + FETCH_BYTES / read_bytes_per_s),
        steps_per_100_tbw=100 * _TERABYTE / written,
    )
