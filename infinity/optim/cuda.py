"""The optimizer kernels on a CUDA device: same bits as `CpuKernels`, many parameters in one launch.

Work is queued on the stream of the caller and the host never waits, but in `square_sum`, which
returns a number. Tensors are 1-D, contiguous and on the device; the caller keeps them alive until
the stream has passed. The maths is in csrc/adam/update.inl, the kernels in fused_adam.cu. Must not
know units, tiers or files.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from infinity.errors import MachineError, first_lines
from infinity.optim import cuda_compile
from infinity.optim.cpu import FLOATS, Piece, by_kind, check_pieces, check_tensor, step_matrices
from infinity.optim.rules import SGD
from infinity.types import MomentFormat

# From checked tensors to launches: the tables that csrc/adam/segments.cuh reads, as ctypes.
#
# A launch is (variant, kernel, number of blocks of threads, argument). Segments of one variant
# share launches, whatever their groups; a table holds as many as fit into kernel parameters. Pure:
# touches no device, so that everything but the launch itself is tested without one.


THREADS = 256
FOLD_THREADS = 1024
TILE = 4096  # elements that one block of threads pieces
SQUARE_TILE = 65536  # elements whose squares one block of threads sums
_PER_THREAD = 4
_NUM_SCALARS = 10

TYPES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
LAYOUTS = {torch.float32: "Whole", torch.bfloat16: "Split", torch.float16: "Half"}
FORMATS = {
    MomentFormat.FP32: "Exact",
    MomentFormat.BF16: "Rounded",
    MomentFormat.BF16_STOCHASTIC: "Stochastic",
    MomentFormat.INT8: "Blocks",
}

Variant = tuple[tuple[str, str], ...]  # macros; none for the helpers
HELPERS: Variant = ()


class Launch(NamedTuple):
    """One kernel of a variant on `blocks` x `threads` threads; arguments are passed by value."""

    variant: Variant
    kernel: str
    blocks: int
    threads: int
    arguments: tuple[ctypes.Structure, ...]


class _KernelSegment(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
        ("moment1", ctypes.c_uint64),
        ("moment2", ctypes.c_uint64),
        ("scales1", ctypes.c_uint64),
        ("scales2", ctypes.c_uint64),
        ("gradient", ctypes.c_uint64),
        ("n", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("first_tile", ctypes.c_uint32),
        ("scalars", ctypes.c_uint16),
        ("wide", ctypes.c_uint16),
    ]


class _SumSegment(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("n", ctypes.c_uint64),
        ("first_tile", ctypes.c_uint32),
        ("num_tiles", ctypes.c_uint32),
    ]


class _SumTable(ctypes.Structure):
    num_slots = 127
    _fields_ = [
        ("num_segments", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("partials", ctypes.c_uint64),
        ("segments", _SumSegment * num_slots),
    ]


def _update_table(rows: int, slots: int) -> type[Any]:
    class UpdateTable(ctypes.Structure):
        num_rows, num_slots = rows, slots
        _fields_ = [
            ("num_segments", ctypes.c_uint32),
            ("unused", ctypes.c_uint32),
            ("scalars", (ctypes.c_float * _NUM_SCALARS) * rows),
            ("segments", _KernelSegment * slots),
        ]

    return UpdateTable


_SmallUpdate, _LargeUpdate = _update_table(14, 40), _update_table(70, 340)


def variant_of(piece: Piece) -> Variant:
    """The macros that choose the kernel for a segment."""
    moments = piece.moments
    return (
        ("INFINITY_RULE", piece.rule_params.kernel),
        ("INFINITY_LAYOUT", LAYOUTS[piece.weight.dtype]),
        ("INFINITY_GRADIENT", TYPES[piece.gradient.dtype]),
        ("INFINITY_MOMENTS", FORMATS[moments[0].format] if moments else "Exact"),
    )


def update_launches(pieces: Sequence[Piece]) -> Iterator[Launch]:
    """As few launches as will do: one per variant, unless a table overflows."""
    by_variant: dict[Variant, list[Piece]] = {}
    for piece in pieces:
        if piece.weight.numel():
            by_variant.setdefault(variant_of(piece), []).append(piece)
    for variant, members in by_variant.items():
        yield from _launches_of(variant, members)


def _launches_of(variant: Variant, pieces: list[Piece]) -> Iterator[Launch]:
    rows: dict[bytes, int] = {}  # by bits: +0 and -0 are not the same
    batch: list[tuple[Piece, int]] = []
    for piece in pieces:
        numbers = piece.rule_params.scalars(piece.step, piece.grad_scale)
        scalars = struct.pack(f"{len(numbers)}f", *numbers)
        full = len(rows) == _LargeUpdate.num_rows and scalars not in rows
        if full or len(batch) == _LargeUpdate.num_slots:
            yield _launch(variant, batch, rows)
            rows, batch = {}, []
        batch.append((piece, rows.setdefault(scalars, len(rows))))
    yield _launch(variant, batch, rows)


def _launch(variant: Variant, batch: list[tuple[Piece, int]], rows: dict[bytes, int]) -> Launch:
    small = len(batch) <= _SmallUpdate.num_slots and len(rows) <= _SmallUpdate.num_rows
    table = _SmallUpdate() if small else _LargeUpdate()
    table.num_segments = len(batch)
    for scalars, row in rows.items():
        ctypes.memmove(table.scalars[row], scalars, len(scalars))
    tiles = 0
    for slot, (piece, row) in enumerate(batch):
        _fill(table.segments[slot], piece)
        table.segments[slot].scalars = row
        table.segments[slot].first_tile = tiles
        tiles += -(-piece.weight.numel() // TILE)
    name = "update_small" if small else "update_large"
    return Launch(variant, name, tiles, THREADS, (table,))


def _fill(segment: _KernelSegment, piece: Piece) -> None:
    tensors = {"weight": piece.weight, "rest": piece.master_state, "gradient": piece.gradient}
    for number, moment in enumerate(piece.moments, 1):
        tensors[f"moment{number}"] = moment.values
        if moment.scales is not None:
            setattr(segment, f"scales{number}", moment.scales.data_ptr())
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        setattr(segment, name, tensor.data_ptr())
    segment.n = piece.weight.numel()
    segment.first = piece.first
    segment.key = piece.key
    segment.wide = all(map(_is_wide, present.values()))


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether four neighbours may be moved as one vector."""
    return tensor.data_ptr() % (_PER_THREAD * tensor.element_size()) == 0


def num_square_tiles(tensors: Sequence[torch.Tensor]) -> int:
    """Partial sums (fp64) that `square_launches` needs room for."""
    return sum(-(-tensor.numel() // SQUARE_TILE) for tensor in tensors)


def square_launches(
    tensors: Sequence[torch.Tensor], sums: torch.Tensor, partials: torch.Tensor
) -> Iterator[Launch]:
    """Sums of squares of `tensors` into the fp64 `sums`, one each, by way of `partials`."""
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append((tensor, index))
    used = 0
    for dtype, members in by_dtype.items():
        for start in range(0, len(members), _SumTable.num_slots):
            batch = members[start : start + _SumTable.num_slots]
            table = _SumTable(num_segments=len(batch))
            table.partials = partials.data_ptr() + used * partials.element_size()
            tiles = 0
            for slot, (tensor, index) in enumerate(batch):
                segment = table.segments[slot]
                segment.source = tensor.data_ptr()
                segment.sum = sums.data_ptr() + index * sums.element_size()
                segment.n = tensor.numel()
                segment.first_tile = tiles
                segment.num_tiles = num_square_tiles([tensor])
                tiles += segment.num_tiles
            used += tiles
            if tiles:
                yield Launch(HELPERS, f"square_tiles_{TYPES[dtype]}", tiles, THREADS, (table,))
            yield Launch(HELPERS, "fold_partials", len(batch), FOLD_THREADS, (table,))


# Launches on a CUDA device: kernels compiled on first use and kept, arguments passed by value.
#
# `cuda-core` compiles and loads. It launches with scalars and pointers only, so launches go
# through `cuda-bindings`, on which it rests: the driver takes a table of up to 32764 bytes by
# value.


_OLDEST_DRIVER = 12010  # CUDA 12.1: parameters of more than 4 KiB
_OLDEST_DEVICE = (7, 0)


def why_not(device: torch.device) -> str | None:
    """Why `device` cannot run the kernels, in one line; None if it can. Compiles nothing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is not a CUDA device that torch can use"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_DEVICE:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    if (reason := cuda_compile.why_not()) is not None:
        return reason
    version = int(_checked(_driver().cuDriverGetVersion()))
    if version < _OLDEST_DRIVER:
        return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}, older than 12.1"
    return None


class CudaLauncher:
    """The kernels of one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises `MachineError` where `why_not` gives a reason."""
        if (reason := why_not(device)) is not None:
            raise MachineError(f"no kernels for {device}", because=reason)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self._index)
        major, minor = torch.cuda.get_device_capability(self._index)
        self._arch = f"sm_{major}{minor}"
        self._modules: dict[Variant, Any] = {}
        self._kernels: dict[tuple[Variant, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch on `stream`, by default torch's current one."""
        with torch.cuda.device(self._index):
            # Torch's context is made current each time: the driver asks for one, torch does not, it
            # is of the thread, and others may have made theirs current meanwhile.
            cuda_compile.core().Device(self._index).set_current()
            kernel = self._kernel(launch.variant, launch.kernel)
            queue = torch.cuda.current_stream(self._index) if stream is None else stream
            addresses = (ctypes.c_void_p * len(launch.arguments))(
                *(ctypes.addressof(argument) for argument in launch.arguments)
            )
            driver = _driver()
            _checked(
                driver.cuLaunchKernel(
                    driver.CUfunction(kernel),
                    *(launch.blocks, 1, 1),
                    *(launch.threads, 1, 1),
                    0,
                    driver.CUstream(queue.cuda_stream),
                    ctypes.addressof(addresses),
                    0,
                )
            )

    def room(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Return fp64 memory from the caching allocator, reused in the order of `stream`."""
        queue = torch.cuda.current_stream(self._index) if stream is None else stream
        with torch.cuda.stream(queue):
            return torch.empty(num_elements, dtype=torch.float64, device=self.device)

    def _kernel(self, variant: Variant, name: str) -> int:
        """The driver's handle of a kernel, whose variant is compiled unless its code was kept."""
        found = self._kernels.get((variant, name))
        if found is None:
            with self._lock:
                if variant not in self._modules:
                    code = cuda_compile.cubin(self._arch, variant)
                    self._modules[variant] = cuda_compile.core().ObjectCode.from_cubin(code)
            found = int(self._modules[variant].get_kernel(name).handle)
            self._kernels[variant, name] = found
        return found


@cache  # asked for with every launch, as `cuda_compile.core` is
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(answer: tuple[Any, ...]) -> Any:
    """Check the result of a driver call; raises `MachineError` with the name of its error."""
    status, *values = answer
    if int(status) != 0:
        raise MachineError(f"the CUDA driver answered {status!r}")
    return values[0] if values else None


class Launcher(Protocol):
    """What carries out launches: `CudaLauncher`, and a stand-in where there is no GPU."""

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch."""

    def room(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """fp64 scratch memory on the device, for work on this stream."""


class CudaKernels:
    """The kernels of one device; may be used from several threads at once."""

    def __init__(self, device: torch.device | str, launcher: Launcher | None = None) -> None:
        """Raises `MachineError` where kernels cannot be compiled or run on `device`."""
        self.device = torch.device(device)
        if launcher is None:
            launcher = CudaLauncher(self.device)
            self.device = launcher.device
        self._launch = launcher
        self._prove()

    def _prove(self) -> None:
        """Launch a kernel of each sort: what only the driver refuses is known before training."""
        try:
            total = self.square_sum(torch.ones(10, dtype=torch.float32, device=self.device))
            weight, gradient = torch.ones(2, 1, dtype=torch.float32, device=self.device)
            self.update_all([Piece(weight, None, (), gradient, SGD(lr=0.25), 1)])
            found = total, float(weight)
        except MachineError:
            raise
        except Exception as error:  # of cuda-core, which loads code when it is first wanted
            raise MachineError(
                f"the CUDA kernels do not run on {self.device}", because=first_lines(error)
            ) from error
        if found != (10.0, 0.75):
            raise MachineError(
                f"the CUDA kernels compute wrong on {self.device}",
                because=f"10 ones squared are {found[0]:g}, and 1 - 0.25 is {found[1]:g}",
            )

    def update_all(self, pieces: Iterable[Piece], stream: torch.cuda.Stream | None = None) -> None:
        """One step of every piece, in place; groups and steps may differ from one to another.

        All pieces are checked first; no two may share memory. One launch per combination of rule,
        dtypes and formats, and torch's own for a matrix. `stream` is by default torch's current
        one.
        """
        elementwise, matrices = by_kind(pieces)
        check_pieces(elementwise, self.device)
        for launch in list(update_launches(elementwise)):
            self._launch(launch, stream)
        with torch.cuda.stream(stream) if matrices else nullcontext():
            step_matrices(matrices)

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Sum of squares in fp64 over a fixed tree; inf or nan if any element is. Waits for it."""
        sums = self._launch.room(1, None)
        self.square_sums([tensor], sums)
        total = float(sums.item())
        return math.nan if math.isnan(total) else total

    def square_sums(
        self,
        tensors: Sequence[torch.Tensor],
        sums: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Sums of squares of `tensors` into the fp64 device tensor `sums`, one each."""
        check_tensor("sums", sums, len(tensors), (torch.float64,), self.device)
        for tensor in tensors:
            check_tensor("tensor", tensor, tensor.numel(), FLOATS, self.device)
        partials = self._launch.room(num_square_tiles(tensors), stream)
        for launch in square_launches(tensors, sums, partials):
            self._launch(launch, stream)
