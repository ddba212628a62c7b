"""Tests that all accesses to device memory are ordered and that the host rarely waits.

See `support/ordered_accelerator.py`: an access that a GPU would not have ordered is a violation,
even if the bytes were correct.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_accelerator import FORWARDING_MODULES, PAGEABLE_COPIERS, asker
from support.grids import diagonal
from support.models import CASES
from support.ordered_accelerator import OrderedAccelerator, ordered_device
from support.ranks import make_engine, on_ranks
from support.trainer import PLACEMENTS, TIERS, Result, Run, cpu_update_share, make_config, train
from torch import Tensor

import infinity
from infinity.distributed.context import DistContext
from infinity.errors import InfinityWarning
from infinity.offload import activations as activations_module
from infinity.offload import gradient_copies as copies_module
from infinity.offload import gradient_worker
from infinity.offload import slots as slots_module
from infinity.offload.activations import ActivationStore
from infinity.offload.gradients import GradientStore
from infinity.offload.transfers import Transfers
from infinity.storage.device import HAPPENED
from infinity.storage.host_arena import HostArena
from infinity.storage.staging import BufferPool
from infinity.training import unit_updater as streams_module
from infinity.training.unit_updater import UnitUpdater
from infinity.types import PAGE

CASE = CASES["gpt"]
IN_RAM = ("host", "host", "host")
ON_DEVICE = ("device", "device", "device")
ON_DISK = ("disk", "disk", "disk")
MIXED = ("disk", "device", "host")
OFFLOADS: dict[str, dict[str, Any]] = {
    "host": {"checkpoint": "units", "offload": "host", "tokens": 4, "min_bytes": 1},
    "disk": {"checkpoint": "units", "offload": "disk", "tokens": 4, "min_bytes": 1},
    "tight": {
        "checkpoint": "units",
        "offload": "disk",
        "host": 3 * PAGE,
        "disk": PAGE,
        "min_bytes": 1,
    },
}


LATE_S = 60.0  # copies start only when waited for, or at the end


def run(
    placement: tuple[str, str, str],
    *,
    kernels: bool,
    steps: int = 3,
    max_delay_s: float = LATE_S,
    **changes: Any,
) -> Any:
    """Train with few slots and without poisoning, which would order everything."""
    config = make_config(placement, prefetch_units=0, **changes)
    batches = CASE.batches(steps * config.get("gradient_accumulation_steps", 1))
    with ordered_device(seed=1, kernels=kernels, max_delay_s=max_delay_s) as device:
        result = train(CASE.build(), batches, config, device=device, poison=None)
    return SimpleNamespace(device=device, result=result)


@cache
def expected(micro_batches: int) -> Result:
    """Return the result of training with the default placement."""
    batches, case = CASE.batches(3 * micro_batches), CASE.build()
    return train(case, batches, make_config(gradient_accumulation_steps=micro_batches))


def train_ordered(placement: tuple[str, str, str], micro_batches: int, **more: Any) -> Result:
    """Train, and assert that all accesses are ordered and the result equals `expected`."""
    done = run(placement, gradient_accumulation_steps=micro_batches, **more)
    assert done.device.violations + done.result.differences(expected(micro_batches)) == []
    return done.result


UPDATES = ("no_kernels", "cpu", "device")


# All pairs of the tiers of weights, moments and gradients and of the update; and squares in RAM
# of gradients that arrive late.
ORDERED = [(w, m, (w + m) % 3, UPDATES[(w + 2 * m) % 3]) for w in range(3) for m in range(3)]
ORDERED.append((1, 1, 1, "no_kernels"))


@pytest.mark.parametrize(("weights", "moments", "gradients", "update"), ORDERED)
def test_device_order_each_placement_pair(
    weights: int, moments: int, gradients: int, update: str
) -> None:
    micro_batches, soon = 1 + (moments + gradients) % 2, bool((weights + gradients) % 2)
    placement = (TIERS[weights], TIERS[moments], TIERS[gradients])
    assert_run_ordered(placement, update, micro_batches, soon)


@pytest.mark.parametrize("number", range(8))
def test_device_order_streamed_with_cpu_share(number: int) -> None:
    placement = tuple(("host", "device")[number >> bit & 1] for bit in range(3))
    with cpu_update_share(0.4):
        assert_run_ordered(placement, "device", 1 + number % 2, soon=number in (1, 2, 4))


@pytest.mark.parametrize("placement", [(tier,) * 3 for tier in TIERS], ids="-".join)
def test_device_order_chunked_logits(placement: tuple[str, str, str]) -> None:
    sliced = {"activations": {"logits": "chunked"}}
    done = run(placement, kernels=True, **sliced)
    reference = train(CASE.build(), CASE.batches(3), make_config(**sliced))
    assert done.device.violations + done.result.differences(reference) == []


@pytest.mark.big
@pytest.mark.parametrize("soon", [True, False], ids=["soon", "late"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_device_order_all_placements(
    placement: tuple[str, str, str], update: str, micro_batches: int, soon: bool
) -> None:
    assert_run_ordered(placement, update, micro_batches, soon)


def assert_run_ordered(
    placement: tuple[str, str, str], update: str, micro_batches: int, soon: bool
) -> None:
    more: dict[str, Any] = {} if update == "no_kernels" else {"update": update}
    delay_s = 0.002 if soon else LATE_S
    train_ordered(placement, micro_batches, kernels=bool(more), max_delay_s=delay_s, **more)


@pytest.mark.parametrize(
    ("placement", "update"),
    [
        (("host", "disk", "disk"), "no_kernels"),
        (("disk", "device", "host"), "device"),
        (("device", "device", "device"), "cpu"),
        (("disk", "host", "device"), "no_kernels"),
    ],
)
def test_device_order_two_ranks(
    placement: tuple[str, str, str], update: str, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"precision": "bf16", "gradient_accumulation_steps": 2}
    more |= {} if update == "no_kernels" else {"update": update}
    config = make_config(placement, prefetch_units=0, **more)
    models, batches = [CASE.build() for _ in range(2)], CASE.batches(2 * 2 * 2)

    def work(ranks: DistContext) -> list[str]:
        kernels = update != "no_kernels"
        with ordered_device(seed=1, kernels=kernels, max_delay_s=LATE_S) as device:
            with make_engine(
                ranks, models[ranks.rank], config, tmp_path, device=device, poison=None
            ) as engine:
                for batch in batches[ranks.rank :: 2]:
                    engine.backward(batch.call(engine))
                    engine.step()
            return device.violations

    assert on_ranks(2, work) == [[], []]


@pytest.mark.parametrize(("placement_index", "offload"), diagonal(range(4), [*OFFLOADS]))
def test_device_order_offloaded_activations(placement_index: int, offload: str) -> None:
    number = placement_index + list(OFFLOADS).index(offload)
    placement = (IN_RAM, ON_DEVICE, ON_DISK, MIXED)[placement_index]
    delay_s, more = (LATE_S, 0.002)[number // 2 % 2], {"activations": OFFLOADS[offload]}
    result = train_ordered(placement, 1 + number % 2, kernels=True, max_delay_s=delay_s, **more)
    assert result.counters["from_device"] > 0


def skip_reader_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "after_all", lambda ready, compute: ready)


def publish_early(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = UnitUpdater._publish

    def too_early(self: UnitUpdater, *arguments: Any) -> Any:
        if self._target is not None:
            self._target.free_after = HAPPENED
        return publish(self, *arguments)

    monkeypatch.setattr(UnitUpdater, "_publish", too_early)


def compute_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderedAccelerator, "compute_wait", lambda self, event: event.wait)


def update_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not wait for what comes in."""
    monkeypatch.setattr(streams_module, "after_all", lambda *events: next(iter(events), HAPPENED))


def write_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write-back does not wait for the kernel."""
    copy = Transfers.copy_d2h_unordered

    def too_early(self: Transfers, target: Any, source: Any, after: Any, label: Any) -> Any:
        return copy(self, target, source, HAPPENED, label)

    monkeypatch.setattr(Transfers, "copy_d2h_unordered", too_early)


def reuse_buffer_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is refilled before its previous chunk has been written back."""
    take = BufferPool.take

    def always_one(self: BufferPool, *more: Any) -> Any:
        if asker() != ("infinity.training.unit_updater", "_stream"):
            return take(self, *more)
        self.buffer = getattr(self, "buffer", None)
        self.buffer = take(self) if self.buffer is None else self.buffer
        return self.buffer

    monkeypatch.setattr(BufferPool, "take", always_one)


def drop_pending_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer pass uses gradients whose copies to RAM are pending."""
    take_copies = GradientStore.take_copies

    def hand_over_nothing(self: GradientStore) -> dict[int, Any]:
        take_copies(self)
        return {}

    monkeypatch.setattr(GradientStore, "take_copies", hand_over_nothing)


def release_units_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are released while copies of their state are pending."""
    complete_oldest = UnitUpdater._complete_oldest

    def too_early(self: UnitUpdater) -> None:
        self._in_flight[0].events.clear()
        complete_oldest(self)

    monkeypatch.setattr(UnitUpdater, "_complete_oldest", too_early)


@pytest.mark.parametrize(
    "mistake",
    [
        update_early,
        write_back_early,
        reuse_buffer_early,
        drop_pending_gradients,
        release_units_early,
    ],
)
def test_missing_wait_in_streamed_update_detected(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"is not ordered after|overlaps an earlier one"):
        run_repeatedly(IN_RAM, kernels=True, update="device")


def run_repeatedly(*placement: Any, **more: Any) -> None:
    """Repeat the run, because on a busy machine unrelated waits may order the accesses by chance.

    Nearly always the first run raises.
    """
    for _ in range(40):
        run(*placement, **more)


@pytest.mark.parametrize("mistake", [skip_reader_wait, publish_early, compute_early])
def test_missing_wait_detected_with_correct_bytes(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="is not ordered after"):
        run_repeatedly(IN_RAM, kernels=False, gradient_accumulation_steps=2)


# --- memory freed too early ----------------------------------------------------------------------


def free_gradients_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference is held to a gradient that is being copied."""
    copy = copies_module.Copy
    monkeypatch.setattr(
        copies_module,
        "Copy",
        lambda unit, event, source: copy(unit, event, torch.empty_like(source)),
    )


def free_staged_gradients_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference is held to a gradient that is being copied to the staging buffer."""
    task = gradient_worker._Task
    monkeypatch.setattr(
        gradient_worker,
        "_Task",
        lambda run, after, _, *allocation: task(run, after, None, *allocation),
    )


def free_saved_tensors_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference is held to a block's input while it is copied out."""
    advance = ActivationStore._advance

    def too_early(self: ActivationStore, record: Any, **more: Any) -> bool:
        if record.source is not None:
            record.source = torch.empty_like(record.source)
        return advance(self, record, **more)

    monkeypatch.setattr(ActivationStore, "_advance", too_early)


def free_fetched_tensors_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference is held to an activation that is fetched ahead of its use."""
    copy_h2d = ActivationStore._copy_in

    def too_early(self: ActivationStore, record: Any) -> None:
        copy_h2d(self, record)
        record.fetched = torch.empty_like(record.fetched)

    monkeypatch.setattr(ActivationStore, "_copy_in", too_early)


@pytest.mark.parametrize(
    ("mistake", "changes"),
    [
        (free_gradients_early, {}),
        (free_staged_gradients_early, {"precision": "bf16", "gradient_accumulation_steps": 2}),
        (free_saved_tensors_early, {"activations": OFFLOADS["host"]}),
        (free_saved_tensors_early, {"activations": OFFLOADS["disk"]}),
        (free_fetched_tensors_early, {"activations": OFFLOADS["host"]}),
        (free_fetched_tensors_early, {"activations": OFFLOADS["disk"]}),
    ],
)
def test_memory_freed_during_copy_detected(
    mistake: Callable[[pytest.MonkeyPatch], None],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    # The next user of the memory may be reported first.
    pattern = r"memory was let go|is not ordered after|overlaps an earlier one"
    with pytest.raises(AssertionError, match=pattern):
        run_repeatedly(IN_RAM, kernels=True, **changes)


def test_unreserved_memory_filled_before_compute_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations_module, "after_all", lambda compute, freed: freed)
    with pytest.raises(AssertionError, match="copy in is not ordered after compute before it"):
        run_repeatedly(IN_RAM, kernels=True, activations=OFFLOADS["host"])


def test_compute_write_during_copy_detected() -> None:
    with ordered_device(seed=1, max_delay_s=LATE_S) as device:
        arena = HostArena(4096)
        device.pin(arena)
        gradient = torch.ones(1024)
        event = device.copy_d2h(arena.view(0, 4096), gradient.view(torch.uint8))
        gradient.sum()
        assert device.violations == []
        gradient.add_(1)
        assert len(device.violations) == 1
        event.wait()
        gradient.add_(1)
        assert len(device.violations) == 1
        device.close()


# --- memory that is not pinned -------------------------------------------------------------------

# Functions that pin, each with a run that copies to or from the memory it pins.
PINNED: dict[tuple[str, str], tuple[tuple[str, str, str], dict[str, Any]]] = {
    ("infinity.offload.state", "_reserve"): (IN_RAM, {}),
    ("infinity.offload.gradients", "_reserve"): (IN_RAM, {}),
    ("infinity.offload.gradients", "__init__"): (
        IN_RAM,
        {"precision": "bf16", "gradient_accumulation_steps": 2},
    ),
    ("infinity.offload.fetcher", "__init__"): (ON_DISK, {}),
    ("infinity.training.unit_updater", "__init__"): (ON_DISK, {}),
    ("infinity.offload.activations", "__init__"): (IN_RAM, {"activations": OFFLOADS["host"]}),
    ("infinity.checkpoint.durability", "__init__"): (
        ON_DEVICE,
        {"durable": True, "commit_every": 1, "resume": "never"},
    ),
    ("infinity.training.async_save", "_copy"): (ON_DEVICE, {}),
}


@cache
def called_names() -> dict[tuple[str, str], set[str]]:
    """Return the names called by each (module, function) of `infinity`."""
    root = Path(infinity.__file__).parent
    found: dict[tuple[str, str], set[str]] = {}
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = (n.func for n in ast.walk(function) if isinstance(n, ast.Call))
                names = {getattr(c, "attr", getattr(c, "id", "")) for c in calls}
                found.setdefault((module, function.name), set()).update(names)
    return found


def functions_that_call(name: str) -> set[tuple[str, str]]:
    """Return (module, function) of every function of `infinity` that calls this name."""
    return {each for each, names in called_names().items() if name in names}


# Functions that reserve unpinned memory: buffers of the initial write, and device memory. Shared
# memory is pinned by the ranks: tests/ranks/test_shared.py.
UNPINNED_RESERVERS = {
    ("infinity.distributed.shared_memory", "__init__"),
    ("infinity.training.initial_write", "__init__"),
    ("infinity.offload.slots", "__post_init__"),
    ("infinity.offload.exchange", "__init__"),
}


def test_pinned_table_lists_every_pinning_function() -> None:
    reserving = {each for each in functions_that_call("reserve") if ".offload." in each[0]}
    pinning = reserving | functions_that_call("pin") | functions_that_call("BufferPool")
    pinning = {each for each in pinning if each[0] not in FORWARDING_MODULES}
    assert pinning - UNPINNED_RESERVERS == set(PINNED)
    calls = [
        functions_that_call(name) for name in ("copy_h2d", "copy_d2h", "stage", "read", "write")
    ]
    copying = set().union(*calls)
    assert copying >= PAGEABLE_COPIERS


@pytest.mark.parametrize("function", PINNED, ids=".".join)
def test_missing_pin_detected(
    tmp_path: Path, function: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = OrderedAccelerator.pin

    def pin_others(self: OrderedAccelerator, arena: HostArena) -> None:
        if asker() != function:
            pin(self, arena)

    monkeypatch.setattr(OrderedAccelerator, "pin", pin_others)
    placement, changes = PINNED[function]
    with ordered_device(seed=1, kernels=True) as device:
        config = make_config(placement, prefetch_units=0, **changes)
        with suppress(AssertionError), Run(CASE.build(), config, device=device, poison=None) as r:
            at_start = device.violations.copy()
            for batch in CASE.batches(2 * r.engine.plan.micro_batches):
                r.engine.backward(batch.call(r.engine))
                r.engine.step()
            r.engine.save_checkpoint(tmp_path, wait=True)
    assert at_start == []
    assert {v.partition(": ")[2].partition(",")[0] for v in device.violations} == {
        "host memory is not pinned"
    }


# --- waits of the host ---------------------------------------------------------------------------


def waits_by_step(
    placement: tuple[str, str, str], steps: int = 3, **changes: Any
) -> tuple[OrderedAccelerator, list[dict[str, int]]]:
    """Return the device and the training thread's waits in each step."""
    config = make_config(placement, prefetch_units=0, precision="bf16", **changes)
    waits = []
    with (
        ordered_device(seed=1, kernels=True) as device,
        Run(CASE.build(), config, device=device, poison=None) as r,
    ):
        batches = CASE.batches(steps * r.engine.plan.micro_batches)
        for _ in range(steps):
            before = device.host_waits.copy()
            for _ in range(r.engine.plan.micro_batches):
                r.engine.backward(batches.pop().call(r.engine))
                r.engine.step()
            waits.append(dict(device.host_waits - before))
        assert (device.num_updates > 0) == (
            placement == ON_DEVICE or changes.get("update") == "device"
        )
    return device, waits


@pytest.mark.parametrize(
    ("placement", "update", "micro_batches"),
    [
        (IN_RAM, "cpu", 1),
        (IN_RAM, "device", 1),
        (IN_RAM, "device", 2),
        (ON_DEVICE, "cpu", 1),
        (ON_DISK, "cpu", 2),
        (MIXED, "device", 1),
        (("host", "host", "device"), "device", 2),
    ],
)
def test_host_waits_at_most_once_per_step(
    placement: tuple[str, str, str], update: str, micro_batches: int
) -> None:
    """The host never waits for a copy, only for sums of squares computed on the device."""
    _, waits = waits_by_step(placement, update=update, gradient_accumulation_steps=micro_batches)
    once = {"compute": 1}
    if placement[2] == "device":
        assert waits == [once] * len(waits)
    elif placement[2] == "host" and micro_batches == 1:
        assert all(step in ({}, once) for step in waits)  # another thread may see it first
    else:  # a worker thread computes them in RAM
        assert waits == [{}] * len(waits)


@pytest.mark.parametrize(
    ("placement", "offload"), diagonal([IN_RAM, ON_DISK, ON_DEVICE], ["disk", "host", "disk"])
)
def test_host_waits_with_offloaded_activations_bounded(
    placement: tuple[str, str, str], offload: str
) -> None:
    """It may wait for one copy: four activations are offloaded, three may be pending."""
    _, waits = waits_by_step(placement, activations=OFFLOADS[offload])
    allowed = {"device": {1}, "host": {0, 1}, "disk": {0}}[placement[2]]
    assert {step.pop("compute", 0) for step in waits} <= allowed
    assert {step.pop("copy", 0) for step in waits} <= {0, 1}
    assert not any(waits)


def test_close_synchronizes_once() -> None:
    device, _ = waits_by_step(IN_RAM, steps=1)
    assert device.host_waits["synchronize"] == 1


def test_host_wait_for_gradient_copy_counted() -> None:
    with (
        ordered_device(seed=1, kernels=True, max_delay_s=LATE_S) as device,
        Run(CASE.build(), make_config(IN_RAM), device=device, poison=None) as r,
    ):
        (one,) = CASE.batches(1)
        r.engine.backward(one.call(r.engine))
        before = device.host_waits["copy"]
        for parameter in r.engine.module.parameters():  # their copies start when read
            r.engine.gradient(parameter)
        assert device.host_waits["copy"] > before


def test_slot_reuse_waits_for_compute_on_alias() -> None:
    """The slot is reused when the alias dies, but compute that read it may not have finished."""
    config = make_config(IN_RAM, prefetch_units=0)
    with (
        ordered_device(seed=1) as device,
        Run(CASE.build(), config, device=device, poison=None) as r,
    ):
        engine = r.engine
        aliases: list[Tensor] = []
        for batch in CASE.batches(4):
            loss = batch.call(engine)
            aliases.append(engine.module.blocks[0].qkv.weight.detach())  # fetched by access
            assert aliases[0].isfinite().all()
            engine.backward(loss)
            engine.step()  # the weights are evicted, the alias holds their slot
            with torch.no_grad():
                aliases[-1].sum()  # compute over the stale weights
            aliases.clear()
        engine.settle()
        assert device.violations == []


def test_device_warnings_reported_at_initialize() -> None:
    with ordered_device(seed=1) as device:
        device.warnings = ["not pinned, slow"]
        config = make_config(IN_RAM)
        with (
            pytest.warns(InfinityWarning, match="not pinned, slow"),
            Run(CASE.build(), config, device=device, poison=None) as r,
        ):
            assert r.engine.warnings == ("not pinned, slow",)
