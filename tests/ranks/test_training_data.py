"""Tests of `training_data=`: batches are assigned to ranks in order, also after resuming."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import CASES
from support.ranks import make_engine, on_ranks
from support.trainer import make_config, masters_of
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from infinity.distributed.context import SINGLE_PROCESS, DistContext, SingleProcess
from infinity.errors import ConfigError
from infinity.training.resumable_loader import ResumableLoader
from infinity.training.rng_state import capture_rng, restore_rng

GPT = CASES["gpt"]


class FakeRank(SingleProcess):
    """One of several ranks, without communication."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


class Stream(IterableDataset[Tensor]):
    """Iterable dataset of the numbers 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.count))

    def __len__(self) -> int:
        return self.count


def numbers(count: int, stream: bool) -> Dataset[Any]:
    return Stream(count) if stream else TensorDataset(torch.arange(count))


def values_of(batch: Any) -> list[int]:
    found: list[int] = (batch if isinstance(batch, Tensor) else batch[0]).tolist()
    return found


def make_loaders(count: int, data: Dataset[Any], **options: Any) -> list[ResumableLoader]:
    return [
        ResumableLoader(data, FakeRank(r, count), batch_size=2, **options) for r in range(count)
    ]


def in_order(loaders: list[ResumableLoader]) -> Iterator[list[int]]:
    """Yield the batches in the order (micro-batch, rank)."""
    for together in zip(*loaders, strict=True):
        yield from map(values_of, together)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [12, 13, 15])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_are_dealt_to_ranks_in_order(
    count: int, samples: int, drop_last: bool, stream: bool
) -> None:
    data = numbers(samples, stream)
    all_batches = [
        values_of(b)
        for b in ResumableLoader(data, SINGLE_PROCESS, batch_size=2, drop_last=drop_last)
    ]
    num_samples = samples - samples % 2 if drop_last else samples
    assert [number for found in all_batches for number in found] == list(range(num_samples))
    loaders = make_loaders(count, data, drop_last=drop_last)
    expected = all_batches[: len(all_batches) // count * count]
    for _ in range(2):  # passes
        assert list(in_order(loaders)) == expected
    assert [len(loader) for loader in loaders] == [len(all_batches) // count] * count


@pytest.mark.parametrize("stream", [False, True])
def test_data_position_resumes_on_other_rank_counts(stream: bool) -> None:
    data = numbers(40, stream)
    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for count in (2, 3, 1, 4):
        loaders = make_loaders(count, data)
        for loader in loaders if state is not None else ():
            assert state is not None
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        seen += [values_of(next(iterator)) for iterator in iterators]
        state = loaders[-1].state_dict()
    assert seen == [[2 * i, 2 * i + 1] for i in range(10)]


class ShuffledStream(Stream):
    """The numbers in an order drawn from a global generator when the first one is read."""

    def __init__(self, count: int, draw: Callable[[int], Any]) -> None:
        super().__init__(count)
        self.draw = draw

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.as_tensor(self.draw(self.count))


@pytest.mark.parametrize(
    "draw", [torch.randperm, np.random.permutation, lambda n: random.sample(range(n), n)]
)
def test_order_drawn_by_stream_is_resumed(draw: Callable[[int], Any]) -> None:
    data = ShuffledStream(40, draw)
    (loader,) = make_loaders(1, data)
    iterator = iter(loader)
    seen = [values_of(next(iterator)) for _ in range(3)]
    draw(5)  # by the training loop
    state, generators = loader.state_dict(), capture_rng()
    remaining, after = [values_of(batch) for batch in iterator], draw(5)
    (resumed,) = make_loaders(1, data)
    resumed.load_state_dict(state)
    restore_rng(generators)
    assert [values_of(batch) for batch in resumed] == remaining
    assert list(draw(5)) == list(after), "the generators go on"
    assert sorted(number for batch in seen + remaining for number in batch) == list(range(40))


def test_rank_without_batch_is_rejected() -> None:
    message = r"makes 2 batches of 2 samples, for 3 ranks(.|\n)*fewer ranks"
    with pytest.raises(ConfigError, match=message):
        make_loaders(3, numbers(4, stream=False))


def test_training_and_resuming_on_ranks_match_single_rank(tmp_path: Path) -> None:
    tokens = torch.cat([batch.args[0] for batch in GPT.batches(24)])
    data = TensorDataset(tokens)
    micro_batches, steps = 6, 2

    def train(ranks: DistContext, models: Any, load: bool) -> tuple[list[float], dict[str, Tensor]]:
        config = make_config(gradient_accumulation_steps=micro_batches // ranks.count)
        with make_engine(
            ranks, models[ranks.rank], config, tmp_path / "nvme", training_data=data, batch_size=2
        ) as engine:
            (loader,) = engine._checkpoints.run_state._registered.values()
            if load:
                engine.load_checkpoint(tmp_path / "saves")
            losses = []
            batches = iter(loader)  # type: ignore[call-overload]
            while engine.global_steps < (4 if load else steps):
                loss = engine(*next(batches))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.save_checkpoint(tmp_path / "saves", wait=True)
            all_losses = (
                ranks.gather(torch.tensor(losses, dtype=torch.float64)).T.flatten().tolist()
            )
            return all_losses, masters_of(engine)

    def run(count: int, load: bool) -> tuple[list[float], dict[str, Tensor]]:
        if not load:
            shutil.rmtree(tmp_path / "saves", ignore_errors=True)
        models = [GPT.build() for _ in range(count)]
        return on_ranks(count, partial(train, models=models, load=load))[0]

    (tmp_path / "nvme").mkdir()
    expected = [run(1, False), run(1, True)]
    found = [run(2, False), run(3, True)]
    for (losses, masters), (expected_losses, values) in zip(found, expected, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(masters[name], values[name]) for name in values)
    assert found[0][0] != found[1][0]
