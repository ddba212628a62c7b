"""Tests of the moment formats: encoding, stochastic rounding, non-finite values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adam_values import ADAMW, Source, update_piece
from support.reference import read_moment, write_moment
from support.rounding import random_bits, random_for_bf16

from infinity.optim.cpu import CpuKernels
from infinity.optim.moments import Moment
from infinity.optim.rules import Adagrad
from infinity.types import MOMENT_BLOCK, MomentFormat

INT8 = MomentFormat.INT8
LOSSY = [kind for kind in MomentFormat if not kind.is_exact]


@pytest.fixture(scope="module")
def kernels() -> Iterator[CpuKernels]:
    with CpuKernels(2) as pool:
        yield pool


def encode(kernels: CpuKernels, values: torch.Tensor, kind: MomentFormat, signed: bool) -> Moment:
    moment = Moment.zeros(values.numel(), kind)
    kernels.encode(values, moment, signed=signed)
    return moment


def decode(kernels: CpuKernels, moment: Moment, signed: bool) -> torch.Tensor:
    values = torch.empty(moment.values.numel())
    kernels.decode(moment, values, signed=signed)
    return values


@pytest.mark.parametrize("kind", MomentFormat)
@pytest.mark.parametrize("signed", [True, False])
def test_zeroed_moments_decode_to_zero(kernels, kind, signed) -> None:
    assert torch.equal(decode(kernels, Moment.zeros(300, kind), signed), torch.zeros(300))


@pytest.mark.parametrize("kind", MomentFormat)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("wild", [True, False])
def test_encode_and_decode_equal_reference(kernels, kind, signed, wild) -> None:
    for seed, n in enumerate((0, 1, 128, 129, 5000)):
        values = Source(seed).floats(n, torch.float32, wild=wild)
        if not signed:
            values.abs_()
        want = Moment.zeros(n, kind)
        write_moment(want, values.numpy(), signed=signed)
        got = encode(kernels, values, kind, signed)
        assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
        if got.scales is not None and want.scales is not None:
            assert torch.equal(got.scales.view(torch.int32), want.scales.view(torch.int32))
        decoded = decode(kernels, got, signed)
        np.testing.assert_array_equal(decoded.numpy(), read_moment(want, signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_int8_relative_error_is_bounded(kernels, signed) -> None:
    """Eight codes per octave: error at most 1/16, down to 2^-16 (unsigned 2^-32) of the largest."""
    octaves = 15 if signed else 31
    exponents = torch.linspace(0, octaves, 40 * MOMENT_BLOCK)[torch.randperm(40 * MOMENT_BLOCK)]
    values = torch.exp2(-exponents)
    values[::MOMENT_BLOCK] = 1.0
    if signed:
        values[1::2] *= -1
    decoded = decode(kernels, encode(kernels, values, INT8, signed), signed)
    assert float((decoded / values - 1).abs().max()) <= 1 / 16 + 1e-6
    assert torch.equal(decoded[::MOMENT_BLOCK], values[::MOMENT_BLOCK])  # the largest is exact


@pytest.mark.parametrize("signed", [True, False])
def test_int8_codes_survive_a_round_trip(kernels, signed) -> None:
    """Decoding and encoding again gives the same codes at every scale."""
    for scale in (1.0, 3e-5, 1.1754944e-38, 2.0**100, torch.finfo(torch.float32).max):
        codes = torch.arange(256, dtype=torch.uint8).repeat(2)
        codes[::MOMENT_BLOCK] = 127 if signed else 255  # keeps the scale of the block
        if signed:
            codes[codes == 128] = 0  # -0.0 encodes as 0.0
        moment = Moment(codes, torch.full((4,), scale), INT8)
        reencoded = encode(kernels, decode(kernels, moment, signed), INT8, signed)
        if scale > 1e-30:
            assert torch.equal(reencoded.values, codes)
        torch.testing.assert_close(
            decode(kernels, reencoded, signed), decode(kernels, moment, signed), rtol=0, atol=1e-38
        )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_value_turns_its_int8_block_nan(kernels, signed, bad) -> None:
    values = torch.ones(3 * MOMENT_BLOCK)
    values[MOMENT_BLOCK + 5] = bad
    moment = encode(kernels, values, INT8, signed)
    decoded = decode(kernels, moment, signed)
    assert decoded.isnan().nonzero().flatten().tolist() == list(
        range(MOMENT_BLOCK, 2 * MOMENT_BLOCK)
    )
    assert int(moment.values[MOMENT_BLOCK : 2 * MOMENT_BLOCK].sum()) == 0


def test_nan_gradient_propagates_to_moments_and_weight(kernels) -> None:
    for kind in MomentFormat:
        weight = torch.ones(256)
        moments = [Moment.zeros(256, kind), Moment.zeros(256, kind)]
        gradient = torch.ones(256)
        gradient[3] = torch.nan
        update_piece(kernels, weight, None, moments, gradient, ADAMW, 1)
        assert weight.isnan().nonzero().flatten().tolist() == [3]
        for moment, signed in zip(moments, (True, False), strict=True):
            assert decode(kernels, moment, signed)[3].isnan()


def test_int8_second_moment_stays_positive(kernels) -> None:
    """A second moment of zero in the denominator would make the update explode."""
    gradient = torch.exp2(-torch.linspace(0, 60, 256))
    weight = torch.zeros(256)
    moments = [Moment.zeros(256, INT8), Moment.zeros(256, INT8)]
    for step in range(1, 30):
        update_piece(kernels, weight, None, moments, gradient, ADAMW, step, key=step)
    assert (decode(kernels, moments[1], signed=False) > 0).all()
    assert float(weight.abs().max()) < 29 * ADAMW.lr * 1.5


def test_int8_denormal_moments_round_trip(kernels) -> None:
    values = torch.full((MOMENT_BLOCK,), 2.0**-140)
    for signed in (True, False):
        decoded = decode(kernels, encode(kernels, values, INT8, signed), signed)
        torch.testing.assert_close(decoded, values, rtol=0.07, atol=0)


@pytest.mark.parametrize("kind", [MomentFormat.BF16_STOCHASTIC, INT8])
def test_stochastic_rounding_is_unbiased(kernels, kind) -> None:
    """The mean over 400 keys of Adagrad's sum equals the exact sum."""
    rule_params = Adagrad(lr=0.0)
    n = 64 * MOMENT_BLOCK
    exact = torch.exp2(-torch.linspace(0, 9, n))
    exact[::MOMENT_BLOCK] = 1.0
    start = encode(kernels, exact, kind, signed=False)
    gradient = (0.3 * exact.sqrt()).contiguous()  # the sum is between two representable values
    total = torch.zeros(n, dtype=torch.float64)
    rounds = 400
    for key in range(rounds):
        moment = start.clone()
        update_piece(kernels, torch.zeros(n), None, [moment], gradient, rule_params, 1, key=key)
        total += decode(kernels, moment, signed=False).double()
    want = decode(kernels, start, signed=False).double() + gradient.double() ** 2
    step = want * (2.0**-7 if kind is MomentFormat.BF16_STOCHASTIC else 2.0**-3)
    # A mean of `rounds` values, each off by less than a step: four standard errors.
    error = (total / rounds - want).abs() / step
    assert float(error.max()) < 5 * 0.5 / rounds**0.5
    assert abs(float(((total / rounds - want) / step).mean())) < 4 * 0.5 / (rounds * n) ** 0.5


def test_stochastic_rounding_accumulates_small_terms(kernels) -> None:
    """1000 additions of 1/1000, which rounding to nearest would lose."""
    for kind, grows in (
        (INT8, True),
        (MomentFormat.BF16_STOCHASTIC, True),
        (MomentFormat.BF16, False),
    ):
        moment = encode(kernels, torch.ones(4096), kind, signed=False)
        gradient = torch.full((4096,), 1e-3**0.5)
        gradient[::MOMENT_BLOCK] = 0.0  # keeps the scale of the block
        for step in range(1, 1001):
            update_piece(
                kernels,
                torch.zeros(4096),
                None,
                [moment],
                gradient,
                Adagrad(lr=0.0),
                step,
                key=step,
            )
        mean = float(decode(kernels, moment, signed=False).mean())
        assert (1.8 < mean < 2.1) if grows else mean == 1.0


def test_random_bits_are_uniform_and_independent() -> None:
    bits = random_bits(1234, 0, 1 << 18)
    other = random_bits(1235, 0, 1 << 18)
    shifted = random_bits(1234, 1 << 18, 1 << 18)
    for moment in (0, 1):
        uniform = random_for_bf16(bits, moment) / 2.0**16
        assert abs(uniform.mean() - 0.5) < 0.004
        assert abs(uniform.var() - 1 / 12) < 0.002
        for other_bits in (other, shifted, np.roll(bits, 1), np.roll(bits, 128)):
            correlation = np.corrcoef(uniform, random_for_bf16(other_bits, moment) / 2.0**16)[0, 1]
            assert abs(correlation) < 0.01
    low, high = (random_for_bf16(bits, moment) for moment in (0, 1))
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.01
    counts = np.unpackbits(bits.view(np.uint8)).reshape(-1, 8).mean(axis=0)
    assert np.abs(counts - 0.5).max() < 0.004


@settings(max_examples=30, deadline=None, derandomize=True)
@given(key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**40), n=st.integers(1, 500))
def test_random_bits_do_not_depend_on_split(key, first, n) -> None:
    full = random_bits(key, first, n)
    middle = n // 3
    halves = [random_bits(key, first, middle), random_bits(key, first + middle, n - middle)]
    np.testing.assert_array_equal(np.concatenate(halves), full)


@pytest.mark.parametrize("kind", LOSSY)
def test_lossy_moments_stay_close_to_fp32(kernels, kind) -> None:
    """After 200 steps of AdamW the weights are close to those of fp32 moments."""
    n = 4096
    generator = torch.Generator().manual_seed(7)
    spread = torch.exp(torch.randn(n, generator=generator))
    mean = 0.3 * spread * torch.randn(n, generator=generator)
    exact, lossy = torch.zeros(n), torch.zeros(n)
    exact_moments = [Moment.zeros(n, MomentFormat.FP32) for _ in range(2)]
    lossy_moments = [Moment.zeros(n, kind) for _ in range(2)]
    for step in range(1, 201):
        gradient = mean + spread * torch.randn(n, generator=generator)
        update_piece(kernels, exact, None, exact_moments, gradient, ADAMW, step)
        update_piece(kernels, lossy, None, lossy_moments, gradient, ADAMW, step, key=step)
    distance = float((exact - lossy).norm() / exact.norm())
    assert distance < {INT8: 0.12, MomentFormat.BF16: 0.05}.get(kind, 0.02)
