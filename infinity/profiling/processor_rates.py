"""Measured rates of processors: updates on the host and a device, copies, and compute."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from infinity.common.accelerators import is_accelerator
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import COMPUTE_DTYPES, VALUE_DTYPES, Moment
from infinity.optim.rules import AdamW
from infinity.plan import rates as names
from infinity.plan.machine import read_machine
from infinity.storage.device import HAPPENED, Device, DeviceArena, Event
from infinity.storage.disk_rates import (
    MIN_CALLS,
    NUM_NOISE,
    calls_per_s,
    make_noise,
    repeating,
    timed,
)
from infinity.storage.disk_speed import run_in_flight
from infinity.storage.host_arena import HostArena
from infinity.types import PAGE, MomentFormat, round_up

# For disk, updates, copies and products. Other operations of a block take two seconds more on two
# cores; several paths or a very slow machine take longer.
SECONDS = 2.0
# Shares of the time. The host's update share covers all formats; the device's update takes a third
# of it in addition.
_UPDATE_SHARE, _COPY_SHARE, _COMPUTE_SHARE = 0.17, 0.05, 0.17
_BETWEEN_SHARE = 0.04  # for each of seven measurements

_CHUNK = NUM_NOISE  # parameters
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 64
_BYTES_WITHOUT_MOMENTS = 6  # weight, residual and gradient, 16 bits each
_LARGEST_BYTES = _BYTES_WITHOUT_MOMENTS + 2 * 4
_COPY_BYTES = 32 << 20
_MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096)
_FLOP = 3 * 2  # three products with a multiplication and an addition each
# Transformer block without matrix products, by `Device.unified`: its width and maximum number of
# tokens. In a context of `_SHORT` tokens attention costs no more than its fixed overhead.
_WIDTH, _MOST_TOKENS = {True: 1024, False: 2048}, {True: 1024, False: 16384}
_HEAD, _SHORT, _LONG = 64, 64, 1024
_NUM_LOGITS, _LEAST_ROWS, _MOST_ROWS = 32768, 32, {True: 512, False: 1024}


def measure_processors(
    device: Device, num_threads: int, seconds: float = SECONDS
) -> dict[str, float]:
    """Return all rates but those of the disk, by the names of `Rates.numbers`."""
    share_s = _UPDATE_SHARE * seconds / len(names.UPDATE_FORMATS)
    copies = [] if device.unified else _copy_functions(device)[-1]
    with repeating(lambda: _copy_rate(copies, 0.0)) if copies else contextlib.nullcontext():
        numbers = _host_updates(num_threads, share_s)
    if copies:
        numbers |= measure_copies(device, _COPY_SHARE * seconds)
        numbers |= _device_update(device, share_s)
    for precision in names.PRECISIONS:
        share_s = _COMPUTE_SHARE * seconds / len(names.PRECISIONS)
        numbers[f"compute.{precision}"] = _flop_per_s(device, COMPUTE_DTYPES[precision], share_s)
    with torch.inference_mode(False), torch.enable_grad():
        for precision in names.PRECISIONS:
            rates = _block_rates(device, COMPUTE_DTYPES[precision], _BETWEEN_SHARE * seconds)
            numbers[f"between.{precision}"], numbers[f"attention.{precision}"] = rates
        numbers["logits"] = _logits_per_s(device, _BETWEEN_SHARE * seconds)
    device.return_freed_memory()  # budgets are derived from free memory
    return numbers


def _warm(work: Callable[[], None]) -> float:
    """Return the seconds of `work` after a warm-up call (memory, choice of kernels)."""
    work()
    return timed(work)


def _host_updates(num_threads: int, seconds: float) -> dict[str, float]:
    num_chunks, numbers = _num_chunks(), dict[str, float]()
    arena = HostArena(arena_bytes_for_pieces(num_chunks))
    with CpuKernels(num_threads) as kernels:
        for name in names.UPDATE_FORMATS:
            pieces = make_pieces(arena, num_chunks, MomentFormat(name))

            def update(pieces: Sequence[Piece] = pieces) -> None:
                for first in range(0, len(pieces), 4):  # batch size of an optimizer pass
                    kernels.update_all(pieces[first : first + 4])

            update()
            numbers[f"update.{name}"] = calls_per_s(update, seconds) * num_chunks * _CHUNK
    return numbers


def _num_chunks() -> int:
    """Return a number of chunks of at least twice the cache size, even with 8-bit moments."""
    machine = read_machine()
    needed = -(-2 * machine.cache_bytes // ((_BYTES_WITHOUT_MOMENTS + 2) * _CHUNK))
    fitting = machine.host_available_bytes // 8 // (_CHUNK * _LARGEST_BYTES)
    return max(1, min(fitting, _MOST_CHUNKS, max(needed, _LEAST_CHUNKS)))


def arena_bytes_for_pieces(num_chunks: int) -> int:
    """Return the bytes of an arena for `make_pieces`, sufficient for every format."""
    return num_chunks * _CHUNK * _LARGEST_BYTES + 8 * PAGE


def make_pieces(
    arena: DeviceArena, num_chunks: int, kind: MomentFormat, *, at_once: int = 1
) -> list[Piece]:
    """Return pieces of `at_once` chunks each: random weights and gradients, zero moments."""
    count, offset, size = num_chunks * _CHUNK, 0, at_once * _CHUNK

    def carve(dtype: torch.dtype, count: int = count) -> Tensor:
        nonlocal offset
        nbytes = count * dtype.itemsize
        tensor = arena.view(offset, nbytes).view(dtype)
        offset += round_up(nbytes, PAGE)
        return tensor

    weight, gradient = carve(torch.bfloat16), carve(torch.bfloat16)
    residual = carve(torch.int16)
    moments = []
    for _ in range(2):
        values = carve(VALUE_DTYPES[kind])
        num_scales = kind.num_scales(count)
        scales = carve(torch.float32, num_scales) if num_scales else None
        moments.append(Moment(values, scales, kind))
    for stored in (residual, *(t for m in moments for t in (m.values, m.scales) if t is not None)):
        stored.zero_()
    noise = make_noise(torch.bfloat16).to(weight.device)
    for tensor in (weight, gradient):
        tensor.view(-1, NUM_NOISE).copy_(noise)  # unwritten pages would all be the zero page
    pieces = []
    for first in range(0, count, size):
        span = slice(first, min(first + size, count))
        parts = [moment.part(span.start, span.stop) for moment in moments]
        rule_params = AdamW(lr=1e-4)
        pieces.append(
            Piece(
                weight[span], residual[span], parts, gradient[span], rule_params, 100, first=first
            )
        )
    return pieces


def _device_update(device: Device, seconds: float) -> dict[str, float]:
    """Measure the device's update kernels with fp32 moments; {} if there are none."""
    free_bytes = device.memory_bytes() or 0
    num_chunks = min(_MOST_CHUNKS, free_bytes // 16 // (_CHUNK * _LARGEST_BYTES))
    if num_chunks == 0 or device.why_no_kernels() is not None:
        return {}
    arena = device.reserve(arena_bytes_for_pieces(num_chunks))
    # One piece, because the rate excludes the host's overhead per piece.
    pieces = make_pieces(arena, num_chunks, MomentFormat.FP32, at_once=num_chunks)

    def update() -> None:
        device.update(pieces, after=device.compute_event()).wait()

    update()
    return {"device_update": calls_per_s(update, seconds) * num_chunks * _CHUNK}


def measure_copies(device: Device, seconds: float) -> dict[str, float]:
    """Return bytes per second of `names.COPIES` for a device that is not unified."""
    each = zip(names.COPIES, _copy_functions(device), strict=True)
    return {name: _copy_rate(copies, seconds / len(names.COPIES)) for name, copies in each}


def _copy_functions(device: Device) -> tuple[list[Callable[[Event], Event]], ...]:
    """Return functions that start a copy: to the device, from the device, and both."""
    # Pinned by torch: `Device.pin` would keep it pinned until the device is closed.
    pinned = is_accelerator(device.torch_device)
    arena = device.reserve(2 * _COPY_BYTES)
    device_views = [arena.view(i * _COPY_BYTES, _COPY_BYTES) for i in range(2)]
    host_buffers = [
        torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in device_views
    ]

    def copy_in(after: Event) -> Event:
        return device.copy_h2d(device_views[0], host_buffers[0], after)

    def copy_out(after: Event) -> Event:
        return device.copy_d2h(host_buffers[1], device_views[1], after)

    return [copy_in], [copy_out], [copy_in, copy_out]


def _copy_rate(copies: Sequence[Callable[[Event], Event]], seconds: float) -> float:
    """Return bytes per second of alternating `copies`, with two of each in flight."""
    events: list[Event] = [HAPPENED] * len(copies)

    def next_copy(turn: int) -> Event:
        direction = turn % len(copies)
        events[direction] = copies[direction](events[direction])
        return events[direction]

    run_in_flight(next_copy, 0.0, depth=1, least=len(copies))
    depth = 2 * len(copies)
    count, seconds = run_in_flight(next_copy, seconds, depth=depth, least=MIN_CALLS)
    return count * _COPY_BYTES / seconds


def _flop_per_s(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """Return FLOP per second of the three products of a linear layer that take `seconds`."""
    noise = make_noise(dtype).to(device.torch_device)
    call_s, rate = seconds / 6, 0.0  # larger matrices are tried while a call takes less
    for size in _MATRIX_SIZES:
        work = _linear_layer(device, noise, size)
        once_s = _warm(work)
        smaller_rate, rate = rate, size**3 / once_s
        # If another program occupies a processor, a small product takes at least one of its time
        # slices: a larger product then takes no longer, and gives a better estimate.
        if once_s > seconds or (once_s > call_s and rate < 2 * smaller_rate):
            break
    if once_s > seconds:
        return _FLOP * rate
    num_calls = max(1, int(call_s / once_s))  # amortizes waiting for the device
    if device.host_clock:
        return calls_per_s(lambda: work(num_calls), seconds) * num_calls * _FLOP * size**3
    # A GPU lowers its clock after sustained load, as in training: one second of it.
    calls_per_s(lambda: work(num_calls), 1.0)
    per_s = calls_per_s(lambda: work(num_calls), seconds, statistics.median)
    return per_s * num_calls * _FLOP * size**3


def _linear_layer(device: Device, noise: Tensor, size: int) -> Callable[..., None]:
    """Return the products of forward and backward: speeds of their kernels may differ."""
    inputs = _matrix(noise, size, size)
    weight, out = inputs.clone(), torch.empty_like(inputs)

    def work(num_calls: int = 1) -> None:
        for _ in range(num_calls):
            torch.mm(inputs, weight.t(), out=out)
            torch.mm(inputs, weight, out=out)
            torch.mm(inputs.t(), weight, out=out)
        device.compute_event().wait()

    return work


def _block_rates(device: Device, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """Return bytes per second of a block without its products, and FLOP per second of attention.

    Bytes are counted as in `plan.cost`, with a context so short that attention costs only its
    overhead; FLOP of attention are those of a longer context, in the time beyond the short one.
    """
    width, max_tokens = _WIDTH[device.unified], _MOST_TOKENS[device.unified]
    if (free_bytes := device.memory_bytes()) is not None:
        # An eighth of the memory; a token takes at most 40 values per unit of width.
        max_tokens = min(max_tokens, free_bytes // 8 // (40 * width * dtype.itemsize))
    work, tokens = _double_until_slow(
        lambda n: _block(device, dtype, n), 2 * _SHORT, max_tokens, seconds
    )
    values = tokens * 16 * width  # inputs and outputs of its products: 16 h per token
    moved_bytes = values * (names.PASSES_FORWARD + names.PASSES_BACKWARD) * dtype.itemsize
    between = moved_bytes * calls_per_s(work, seconds, statistics.median)
    longest, times = min(_LONG, tokens), []
    for context in (_SHORT, longest):
        work = _attention(device, dtype, tokens, context)
        work()
        times.append(1 / calls_per_s(work, seconds, statistics.median))
    short_s, long_s = times
    longer_s = max(long_s - short_s, long_s / 10)  # on a busy machine the short one may take longer
    return between, 7 * tokens * width * (longest - _SHORT) / longer_s


def _block(device: Device, dtype: torch.dtype, tokens: int) -> Callable[[], None]:
    """Return a GPT block without products: norms, attention, activation, residual sums."""
    width, noise = _WIDTH[device.unified], make_noise(dtype).to(device.torch_device)
    scale = torch.ones(width, dtype=dtype, device=device.torch_device)
    leaves = [_leaf(noise, tokens, n * width) for n in (1, 3, 1, 4, 1)]
    stream, qkv, out, up, down = leaves

    def work() -> None:
        after = stream + out
        norms = [F.layer_norm(x, (width,), scale, scale) for x in (stream, after)]
        _backward(device, [*norms, _attend(qkv, _SHORT), F.gelu(up), after + down], leaves)

    return work


def _attention(device: Device, dtype: torch.dtype, tokens: int, context: int) -> Callable[[], None]:
    """Return forward and backward of attention only."""
    noise = make_noise(dtype).to(device.torch_device)
    qkv = _leaf(noise, tokens, 3 * _WIDTH[device.unified])
    return lambda: _backward(device, [_attend(qkv, context)], [qkv])


def _attend(qkv: Tensor, context: int) -> Tensor:
    tokens, width = len(qkv), qkv.shape[1] // 3
    heads = qkv.view(-1, context, 3, width // _HEAD, _HEAD)
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).reshape(tokens, width)


def _backward(device: Device, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    for gradient in torch.autograd.grad(outputs, leaves, [output.detach() for output in outputs]):
        gradient.sum(0)  # the gradients of biases
    device.compute_event().wait()


def _logits_per_s(device: Device, seconds: float) -> float:
    """Return logits per second of fp32 cross entropy of bf16 logits, forward and backward."""
    noise = make_noise(torch.bfloat16).to(device.torch_device)

    def make_work(rows: int) -> Callable[[], None]:
        logits = _leaf(noise, rows, _NUM_LOGITS)
        targets = torch.zeros(rows, dtype=torch.long, device=device.torch_device)

        def work() -> None:
            torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)
            device.compute_event().wait()

        return work

    work, rows = _double_until_slow(make_work, _LEAST_ROWS, _MOST_ROWS[device.unified], seconds)
    return rows * _NUM_LOGITS * calls_per_s(work, seconds, statistics.median)


def _double_until_slow(
    make_work: Callable[[int], Callable[[], None]], size: int, most: int, seconds: float
) -> tuple[Callable[[], None], int]:
    """Double `size` while a call takes less than `seconds`; return the work and its size."""
    while _warm(work := make_work(size)) < seconds and 2 * size <= most:
        size *= 2
    return work, size


def _leaf(noise: Tensor, rows: int, columns: int) -> Tensor:
    return _matrix(noise, rows, columns).requires_grad_()


def _matrix(noise: Tensor, rows: int, columns: int) -> Tensor:
    count = rows * columns
    return noise.repeat(-(-count // NUM_NOISE))[:count].view(rows, columns)
