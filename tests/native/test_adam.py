"""Tests of the native kernels: bitwise equal to the numpy reference, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adam_values import (
    ADAMW,
    BF16,
    FLOATS,
    HYPERS,
    LAYOUTS,
    SPECIAL,
    Source,
    assert_same,
    bits,
    copy_aligned,
    equal_or_both_nan,
    update_piece,
)
from support.reference import reference_square_sum, reference_update
from support.rounding import join_master, split_master

from infinity import _adam
from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import Moment
from infinity.types import MOMENT_BLOCK, MomentFormat

SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 32768, 32769, 49152, 70001])
)
property_test = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[CpuKernels]]:
    """One pool for each instruction set and thread count."""
    kernels = [CpuKernels(threads, isa) for isa in _adam.isas() for threads in (1, 2, 3, 5)]
    yield kernels
    for pool in kernels:
        pool.close()


# Bit equality with the reference, for every instruction set and thread count.


@property_test
@given(
    seed=st.integers(0, 2**32),
    n=SIZES,
    layout=st.sampled_from(LAYOUTS),
    gradient_dtype=st.sampled_from(FLOATS),
    rule_params=st.sampled_from(HYPERS),
    kind=st.sampled_from(MomentFormat),
    step=st.sampled_from([1, 2, 7, 100_000]),
    grad_scale=st.sampled_from([1.0, 0.37, 2.0**-16]),
    key=st.integers(0, 2**64 - 1),
    block=st.sampled_from([0, 1, 2**25 - 1, 2**25 - 2, 2**40]),
    wild=st.booleans(),
)
def test_update_equals_reference(
    pools, seed, n, layout, gradient_dtype, rule_params, kind, step, grad_scale, key, block, wild
) -> None:
    source = Source(seed)
    state = source.update_state(n, layout, rule_params, kind, wild=wild)
    gradient = source.floats(n, gradient_dtype, wild=wild)
    first = block * MOMENT_BLOCK
    if kind is not MomentFormat.INT8:
        first += seed % MOMENT_BLOCK
    arguments = (gradient, rule_params, step, grad_scale, key, first)
    want = state.copy()
    reference_update(want.weight, want.master_state, want.moments, *arguments)
    for pool in pools:
        got = state.copy()
        update_piece(pool, got.weight, got.master_state, got.moments, *arguments)
        assert_same(got.tensors, want.tensors)


@pytest.mark.parametrize("kind", MomentFormat)
@pytest.mark.parametrize("rule_params", HYPERS, ids=repr)
def test_update_equals_reference_for_every_rule_and_layout(pools, rule_params, kind) -> None:
    source = Source(17)
    for layout in LAYOUTS:
        for gradient_dtype in FLOATS:
            state = source.update_state(1033, layout, rule_params, kind)
            gradient = source.floats(1033, gradient_dtype)
            want = state.copy()
            reference_update(
                want.weight, want.master_state, want.moments, gradient, rule_params, 3, 0.5, 9, 256
            )
            for pool in pools[::4]:
                got = state.copy()
                update_piece(
                    pool,
                    got.weight,
                    got.master_state,
                    got.moments,
                    gradient,
                    rule_params,
                    3,
                    0.5,
                    9,
                    256,
                )
                assert_same(got.tensors, want.tensors)


@property_test
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 3000),
    kind=st.sampled_from(MomentFormat),
    rule_params=st.sampled_from(HYPERS),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
)
def test_update_does_not_depend_on_piece_boundaries(
    pools, seed, n, kind, rule_params, cuts
) -> None:
    """Updating consecutive pieces, in one job or in several, equals updating the whole tensor."""
    source = Source(seed)
    full = source.update_state(n, "split", rule_params, kind)
    gradient = source.floats(n, BF16)
    in_one_job, separately = full.copy(), full.copy()
    step, scale, key, first = 5, 0.25, 77, 2**32 - 2048
    update_piece(
        pools[-1],
        full.weight,
        full.master_state,
        full.moments,
        gradient,
        rule_params,
        step,
        scale,
        key,
        first,
    )
    grain = MOMENT_BLOCK if kind is MomentFormat.INT8 else 1
    boundaries = sorted({min(n, cut // grain * grain) for cut in cuts} | {0, n})
    job = []
    for start, end in pairwise(boundaries):
        state = in_one_job.part(start, end)
        arguments = (gradient[start:end], rule_params, step, scale, key, first + start)
        job.append(Piece(state.weight, state.master_state, state.moments, *arguments))
        separate_state = separately.part(start, end)
        update_piece(
            pools[0],
            separate_state.weight,
            separate_state.master_state,
            separate_state.moments,
            *arguments,
        )
    pools[-1].update_all(job)
    assert_same(in_one_job.tensors, full.tensors)
    assert_same(separately.tensors, full.tensors)


@pytest.mark.parametrize("kind", MomentFormat)
def test_job_of_many_pieces_equals_reference(pools, kind) -> None:
    source = Source(31)
    sizes = [0, 1, 127, 40_000, 128, 33_000, 5, 16_384, 16_385, 0]
    states = [source.update_state(n, "split", ADAMW, kind, wild=False) for n in sizes]
    gradients = [source.floats(n, BF16, wild=False) for n in sizes]
    wants = [state.copy() for state in states]
    for key, (want, gradient) in enumerate(zip(wants, gradients, strict=True)):
        reference_update(want.weight, want.master_state, want.moments, gradient, ADAMW, 2, 1.0, key)
    for pool in pools:
        gots = [state.copy() for state in states]
        pieces = [
            Piece(got.weight, got.master_state, got.moments, gradient, ADAMW, 2, 1.0, key)
            for key, (got, gradient) in enumerate(zip(gots, gradients, strict=True))
        ]
        pool.update_all(pieces)
        for got, want in zip(gots, wants, strict=True):
            assert_same(got.tensors, want.tensors)


@property_test
@given(
    seed=st.integers(0, 2**32),
    n=SIZES,
    target_dtype=st.sampled_from(FLOATS),
    source_dtype=st.sampled_from(FLOATS),
)
def test_accumulate_and_convert_equal_torch(pools, seed, n, target_dtype, source_dtype) -> None:
    source = Source(seed)
    target = source.floats(n, target_dtype)
    term = source.floats(n, source_dtype)
    added = target.clone().add_(term)
    converted = torch.empty_like(target).copy_(term)
    results = []
    for pool in pools:
        total = copy_aligned(target)
        pool.accumulate(total, term)
        assert equal_or_both_nan(total, added)
        assert set(bits(total)[total.isnan().numpy()]) <= {0x7FC00000, 0x7FC0, 0x7E00}
        cast = copy_aligned(target)
        pool.convert(cast, term)
        assert equal_or_both_nan(cast, converted)
        if target_dtype == source_dtype:
            np.testing.assert_array_equal(bits(cast), bits(term))
        results.append([total, cast])
    for result in results[1:]:
        assert_same(result, results[0])


@property_test
@given(
    seed=st.integers(0, 2**32),
    n=st.one_of(SIZES, st.sampled_from([16 * 4096 + 1, 29 * 4096 - 5])),
    dtype=st.sampled_from(FLOATS),
    wild=st.booleans(),
)
def test_square_sum_equals_reference_on_every_pool(pools, seed, n, dtype, wild) -> None:
    values = Source(seed).floats(n, dtype, wild=wild)
    want = reference_square_sum(values)
    for pool in pools:
        np.testing.assert_equal(pool.square_sum(values), want)
    if not wild:
        assert want == pytest.approx(float((values.double() ** 2).sum()), rel=1e-12)


def test_square_sum_of_non_finite_values(pools) -> None:
    values = torch.zeros(10_000)
    values[7000] = -torch.inf
    assert all(pool.square_sum(values) == np.inf for pool in pools)
    values[12] = torch.nan
    assert all(np.isnan(pool.square_sum(values)) for pool in pools)
    huge = torch.full((10_000,), 3e38)
    assert all(np.isfinite(pool.square_sum(huge)) for pool in pools)


@property_test
@given(seed=st.integers(0, 2**32), n=SIZES)
def test_split_and_join_equal_reference(pools, seed, n) -> None:
    source = Source(seed)
    master = source.floats(n, torch.float32)
    weight, residual = split_master(master)
    for pool in pools:
        got = torch.empty(n, dtype=BF16), torch.empty(n, dtype=torch.int16)
        pool.split(master, *got)
        np.testing.assert_array_equal(bits(got[0]), bits(weight))
        np.testing.assert_array_equal(bits(got[1]), bits(residual))
        joined = torch.empty(n)
        pool.join(*got, joined)
        np.testing.assert_array_equal(bits(joined), bits(join_master(*got)))


# The split layout, tested against its definition.


def check_split(pool: CpuKernels, patterns: np.ndarray) -> None:
    n = patterns.size
    weight, residual = torch.empty(n, dtype=BF16), torch.empty(n, dtype=torch.int16)
    joined = torch.empty(n)
    pool.split(torch.from_numpy(patterns.view(np.float32)), weight, residual)
    pool.join(weight, residual, joined)
    nan = (patterns & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    stored = np.where(nan, np.uint32(0x7FC00000), patterns)
    assert np.array_equal(bits(joined).view(np.uint32), stored)
    high = (stored + np.uint32(0x8000)) >> np.uint32(16)
    assert np.array_equal(bits(weight).view(np.uint16), high.astype(np.uint16))
    offset = bits(residual).astype(np.int32).view(np.uint32)
    assert np.array_equal((high << np.uint32(16)) + offset, stored)
    assert (bits(weight)[nan] == 0x7FC0).all()
    assert not bits(residual)[nan].any()


def test_split_is_lossless_on_sampled_bit_patterns(pools) -> None:
    sample = np.arange(0, 2**32, 9973, dtype=np.uint64).astype(np.uint32)
    for pool in pools[:: len(pools) // len(_adam.isas())]:
        check_split(pool, np.concatenate([sample, SPECIAL]))


@pytest.mark.big
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", _adam.isas())
def test_split_is_lossless_on_all_bit_patterns(isa) -> None:
    with CpuKernels(isa=isa) as pool:
        for start in range(0, 2**32, 2**24):
            check_split(pool, np.arange(start, start + 2**24, dtype=np.uint64).astype(np.uint32))


def test_nan_is_canonical_after_an_update(pools) -> None:
    for split in (True, False):
        for pool in pools:
            weight, residual, moment1, moment2 = Source(3).state(100, split=split, wild=False)
            gradient = torch.full((100,), -torch.nan)
            update_piece(
                pool, weight, residual, [Moment(moment1), Moment(moment2)], gradient, ADAMW, 1
            )
            assert set(bits(weight)) == {0x7FC0 if split else 0x7FC00000}
            assert residual is None or set(bits(residual)) == {0}
            assert set(bits(moment1)) == set(bits(moment2)) == {0x7FC00000}
