"""Tests of the store of offloaded activations: placement, lifetime of graphs, and errors."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import SmallModel, batch, small_engine, small_model
from support.waiting import wait_until
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.config.schema import load_config
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineClosedError, TransferError
from infinity.model.torch_private import (
    TensorIdentity,
    inside_backward,
    is_checkpoint_pair,
    saves_checkpoint_input,
    top_saved_tensors_hooks,
)
from infinity.offload.activations import ActivationStore
from infinity.plan.saved_plan import TRANSIT, Ranges, SavedPlan, saved_moves, tiers_of
from infinity.types import PAGE, Tier, round_up

DISK: dict[str, Any] = {"checkpoint": "units", "offload": "disk", "tokens": 18, "min_bytes": 1}
HOST: dict[str, Any] = {**DISK, "offload": "host"}
TIGHT = {"checkpoint": "units", "offload": "disk", "host": 3 * PAGE, "disk": PAGE, "min_bytes": 1}
KINDS = {"disk": DISK, "host": HOST, "tight": TIGHT}


def deep_model() -> SmallModel:
    """Return a model with more block inputs than a pool of three pages holds."""
    return small_model(num_blocks=6)


def store_of(engine: Engine) -> ActivationStore:
    store = components(engine).activations
    assert store is not None
    return store


def assert_all_free(engine: Engine) -> None:
    """Assert that no graph holds activations and that all memory ranges are free."""
    gc.collect()
    store = store_of(engine)
    assert not any(store.held.values())
    assert wait_until(lambda: store._free_retired() or not store._retired)
    assert store._pool.free_bytes == store.plan.host_bytes
    assert store._disk.free_bytes == store.plan.disk_bytes
    assert not store._outgoing
    assert not store._incoming
    assert not store._handles


# --- placement rule and ranges -------------------------------------------------------------------


def brute_force_placement(sizes: tuple[int, ...], plan: SavedPlan) -> list[Tier]:
    """Brute-force reference for `tiers_of`: offload as many as possible, the last ones to RAM."""
    fits = [s >= plan.min_bytes and round_up(s, PAGE) <= plan.host_bytes for s in sizes]
    pages = [round_up(s, PAGE) for s in sizes]
    all_pages = sum(p for p, f in zip(pages, fits, strict=True) if f)
    host_bytes = plan.host_bytes
    if plan.offload is Tier.DISK and all_pages > host_bytes:
        host_bytes = max(
            host_bytes - TRANSIT * max(p for p, f in zip(pages, fits, strict=True) if f), 0
        )
    movable = [i for i, f in enumerate(fits) if f]
    for count in range(len(movable), -1, -1):
        for on_disk in range(count + 1):
            disk, host = movable[:on_disk], movable[on_disk:count]
            if sum(pages[i] for i in host) > host_bytes:
                continue
            if sum(pages[i] for i in disk) <= plan.disk_bytes:
                found = [Tier.DEVICE] * len(sizes)
                for i in disk:
                    found[i] = Tier.DISK
                for i in host:
                    found[i] = Tier.HOST
                return found
            break
    return [Tier.DEVICE] * len(sizes)


def test_tiers_of_matches_brute_force_placement() -> None:
    rng = random.Random(1)
    for _ in range(400):
        sizes = tuple(rng.choice((100, 4096, 5000, 9000)) for _ in range(rng.randint(0, 9)))
        plan = SavedPlan(
            offload=rng.choice((Tier.HOST, Tier.DISK)),
            host_bytes=PAGE * rng.randint(1, 14),
            min_bytes=rng.choice((1, 4096)),
            disk_bytes=0,
        )
        if plan.offload is Tier.DISK:
            plan = SavedPlan(
                offload=Tier.DISK,
                host_bytes=plan.host_bytes,
                disk_bytes=PAGE * rng.randint(0, 12),
                min_bytes=plan.min_bytes,
            )
        assert list(tiers_of(sizes, plan)) == brute_force_placement(sizes, plan), (sizes, plan)
        forward, backward = saved_moves(sizes, plan, unified=False)
        assert forward.get("from_device", 0) == backward.get("to_device", 0)
        assert forward.get("disk_write", 0) == backward.get("disk_read", 0) <= plan.disk_bytes


def test_ranges_match_list_of_pages() -> None:
    rng = random.Random(2)
    for _ in range(50):
        pages = [False] * 24
        ranges = Ranges(len(pages) * PAGE)
        taken: dict[int, int] = {}
        for _ in range(60):
            if taken and rng.random() < 0.45:
                start = rng.choice(list(taken))
                nbytes = taken.pop(start)
                ranges.give(start, nbytes)
                for page in range(start // PAGE, (start + round_up(nbytes, PAGE)) // PAGE):
                    pages[page] = False
            else:
                nbytes = rng.randint(1, 5 * PAGE)
                count = round_up(nbytes, PAGE) // PAGE
                fits = [i for i in range(len(pages) - count + 1) if not any(pages[i : i + count])]
                start_of = ranges.take(nbytes)
                assert start_of == (fits[0] * PAGE if fits else None)
                if start_of is not None:
                    taken[start_of] = nbytes
                    pages[start_of // PAGE : start_of // PAGE + count] = [True] * count
            assert ranges.free_bytes == pages.count(False) * PAGE


# --- detection of checkpoints and backward -------------------------------------------------------


def test_saved_by_checkpoint_detects_checkpoint_inputs() -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append((saves_checkpoint_input(), tuple(tensor.shape)))
        return tensor

    weight = torch.randn(3, 3, requires_grad=True)
    for reentrant in (False, True):
        seen.clear()
        x = torch.randn(2, 3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = checkpoint(lambda t: torch.tanh(t @ weight), x.exp(), use_reentrant=reentrant)
            y.square().sum()
        # Before torch 2.13 an empty tensor is saved too; it is below the offload threshold.
        assert [shape for by_checkpoint, shape in seen if by_checkpoint and shape != (0,)] == [
            (2, 3)
        ], seen
        assert len(seen) >= 3


def test_checkpoint_packs_identifies_checkpoint_hooks() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(is_checkpoint_pair(top_saved_tensors_hooks()))
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        run(x)
        y = checkpoint(run, x, use_reentrant=False)
    y.sum().backward()
    assert seen == [False, True, True], "around, in forward, and again in backward"
    assert not is_checkpoint_pair(None)


def test_inside_backward_true_only_during_backward() -> None:
    assert not inside_backward()
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(inside_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not inside_backward()


def test_tensor_identity_compares_values_without_reference() -> None:
    x = torch.randn(4, 4)
    one = TensorIdentity(x)
    assert one == TensorIdentity(x.detach())
    assert hash(one) == hash(TensorIdentity(x.view(4, 4)))
    assert one != TensorIdentity(x[:2])
    assert one != TensorIdentity(x.view(16))
    x.add_(1)
    assert one != TensorIdentity(x), "the values have changed"
    del x
    others = [torch.randn(4, 4) for _ in range(64)]  # one may reuse the address of x
    assert all(one != TensorIdentity(other) for other in others)


# --- graphs --------------------------------------------------------------------------------------


def device_for(kind: str) -> dict[str, Any]:
    return {"device": FakeAccelerator(3)} if kind == "fake" else {"device": "cpu"}


def reference(count: int) -> list[Tensor]:
    """Return the gradient of one weight for each of the first batches, from plain torch."""
    found = []
    for index in range(count):
        model = deep_model()
        model(batch(index)).backward()
        found.append(model.blocks[0].up.weight.grad)
    return found


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("kind", ["disk", "tight", "host"])
def test_saved_graphs_dropped_reordered_retained_partial(
    tmp_path: Path, kind: str, device: str
) -> None:
    if (kind, device) == ("host", "cpu"):
        pytest.skip("nothing is offloaded on the CPU")
    expected = reference(3)
    with small_engine(
        tmp_path, model=deep_model(), activations=KINDS[kind], arguments=device_for(device)
    ) as engine:
        weight = engine.module.blocks[0].up.weight

        def gradient() -> Tensor:
            return engine.gradient(weight)

        # dropped without a backward
        for _ in range(3):
            loss = engine(batch(0))
        assert store_of(engine).num_saved
        del loss
        assert_all_free(engine)
        # several graphs alive, backward in another order
        losses = [engine(batch(index)) for index in range(3)]
        for index in (2, 0, 1):
            engine.backward(losses[index])
            assert torch.equal(gradient(), expected[index])
            engine.zero_grad()
        assert_all_free(engine)  # although the losses are alive
        # retained for a second backward
        loss = engine(batch(1))
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        assert torch.equal(gradient(), expected[1] + expected[1])
        engine.zero_grad()
        # backward through a part of the graph only
        loss = engine(batch(2))
        (only,) = torch.autograd.grad(loss, engine.module.norm.bias)
        assert only.shape == (16,)
        del loss
        engine.zero_grad()
        assert_all_free(engine)
        loss = engine(batch(2))  # the store is usable as before
        engine.backward(loss)
        assert torch.equal(gradient(), expected[2])


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_exception_releases_all_activation_memory(tmp_path: Path, device: str) -> None:
    (expected,) = reference(1)
    with small_engine(
        tmp_path, model=deep_model(), activations=DISK, arguments=device_for(device)
    ) as engine:
        block = engine.module.blocks[1]
        for stage in ("forward", "backward", "recompute"):
            calls = 0

            def fail(*_: Any, stage: str = stage) -> None:
                nonlocal calls
                calls += 1
                if calls == (2 if stage == "recompute" else 1):
                    raise ValueError(stage)

            if stage == "backward":
                handle = block.norm.bias.register_hook(fail)
            else:
                handle = block.up.register_forward_hook(fail)
            with pytest.raises(ValueError, match=stage):
                engine.backward(engine(batch(0)))
            handle.remove()
        # After an exception in backward, torch keeps the remaining graph tasks until the next one.
        engine.backward(engine(batch(0)))
        assert_all_free(engine)
        assert torch.equal(engine.gradient(engine.module.blocks[0].up.weight), expected)


def test_activations_beyond_capacity_stay_on_device(tmp_path: Path) -> None:
    with small_engine(tmp_path, model=deep_model(), activations=TIGHT) as engine:
        for index in range(2):
            engine.backward(engine(batch(index)))
            engine.step()
        loss = engine(batch(2))
        size = 2 * 9 * 16 * 4
        assert (components(engine).forwards.recomputed, store_of(engine).num_saved) == (
            2 * 6,
            3 * 6,
        )
        # All 3 host pages are transit buffers, so none is stored in RAM; 1 page is on disk.
        assert store_of(engine).held == {Tier.DEVICE: 5 * size, Tier.HOST: 0, Tier.DISK: size}
        engine.backward(loss)
        engine.step()
        assert engine.last_report is not None
        assert engine.last_report.moved == engine.forecast()


def test_small_and_noncontiguous_tensors_not_offloaded(tmp_path: Path) -> None:
    with small_engine(tmp_path, activations={**DISK, "min_bytes": "1MiB"}) as engine:
        engine.backward(engine(batch(0)))
        assert store_of(engine).num_saved == 0
        x = torch.zeros(512, 1024, requires_grad=True)
        assert store_of(engine).save(x.t()) is None
        assert store_of(engine).save(x[:1, :1].expand(512, 1024)) is None
        assert store_of(engine).save(x.detach()) is None
        assert store_of(engine).save(x * 1) is not None


class InputModifyingModel(SmallModel):
    """Model that modifies a block's input after it was saved."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.blocks[0](x)
        with torch.no_grad():
            x.mul_(2)
        return self.norm(y)


def test_tensor_modified_before_copy_raises(tmp_path: Path) -> None:
    torch.manual_seed(0)
    slow = FakeAccelerator(0, max_delay_s=600.0, on_demand=True)
    arguments = {"device": slow}
    with small_engine(
        tmp_path, model=InputModifyingModel(), activations=HOST, arguments=arguments
    ) as engine:
        loss = engine(batch(0))
        with pytest.raises(RuntimeError, match="inplace operation"):
            engine.backward(loss)


def test_close_with_graphs_alive(tmp_path: Path) -> None:
    for kind in ("cpu", "fake"):
        with small_engine(
            tmp_path, model=deep_model(), activations=DISK, arguments=device_for(kind)
        ) as engine:
            loss = engine(batch(0))
        with pytest.raises(EngineClosedError):
            loss.backward()


def test_disk_write_error_raises_and_frees_memory(tmp_path: Path) -> None:
    on_device = {"weights": "device", "optimizer_state": "device", "gradients": "device"}
    with small_engine(tmp_path, on_device, model=deep_model(), activations=DISK) as engine:
        store = store_of(engine)
        write = store.transfers.write

        class FailingTicket:
            def __init__(self, ticket: Any) -> None:
                self.ticket = ticket

            def done(self) -> bool:
                return bool(self.ticket.done())

            def wait(self) -> None:
                self.ticket.wait()
                raise TransferError("it broke", path="x", offset=0, length=PAGE, errno=5)

        store.transfers.write = lambda *a, **k: FailingTicket(write(*a, **k))  # type: ignore[method-assign]
        with pytest.raises(TransferError):
            engine.backward(engine(batch(0)))
        store.transfers.write = write  # type: ignore[method-assign]
        engine.backward(engine(batch(0)))
        assert_all_free(engine)
        (expected,) = reference(1)
        assert torch.equal(engine.gradient(engine.module.blocks[0].up.weight), expected)


def test_ranges_not_reused_during_pending_copies(tmp_path: Path) -> None:
    expected = reference(2)
    late = FakeAccelerator(1, max_delay_s=0.06, workers=1)
    on_device = {"weights": "device", "optimizer_state": "device", "gradients": "device"}
    with small_engine(
        tmp_path, on_device, deep_model(), activations=DISK, arguments={"device": late}
    ) as engine:
        for index in range(2):
            engine.backward(engine(batch(index)))
            gradient = engine.gradient(engine.module.blocks[0].up.weight)
            assert torch.equal(gradient, expected[index])
            engine.zero_grad()
    assert not late.violations


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activations", "more", "message"),
    [
        ({"offload": "disk", "tokens": 8}, {}, "nvme_path"),
        ({"offload": "host", "disk": "1GiB"}, {}, "offload: disk"),
        ({"host": "1GiB"}, {}, "offload: host or disk"),
        ({"slices": 0}, {}, "slices"),
        (
            {"offload": "disk", "tokens": 8},
            {"nvme_path": "/x", "durable": True},
            "durable",
        ),
    ],
)
def test_invalid_activations_config_rejected(
    activations: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"activations": activations, **more})


def test_disk_size_without_tokens_or_blocks_rejected(tmp_path: Path) -> None:
    disk = {"offload": "disk", "host": "1MiB"}
    with (
        pytest.raises(ConfigError, match=r"activations\.tokens"),
        small_engine(tmp_path, activations=disk),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="no blocks that repeat"),
        small_engine(tmp_path, model=nn.Linear(4, 4), activations={**disk, "tokens": 8}),
    ):
        pass
