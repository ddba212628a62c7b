"""Tests of asynchronous saving: snapshots, waits, errors, loading and buffers."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.internals import components
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from torch import Tensor, nn

import infinity
from infinity.checkpoint import writer
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import CheckpointWriter
from infinity.engine import Engine
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    EngineFailedError,
    InfinityWarning,
    MachineError,
    ResidencyError,
)
from infinity.integrations.deepspeed.import_checkpoint import import_deepspeed
from infinity.training import checkpoints
from infinity.types import Kind

PLACEMENTS = {"disk": ON_DISK, "mixed": MIXED, "device": ON_DEVICE}
every_placement = pytest.mark.parametrize(
    "placement", list(PLACEMENTS.values()), ids=list(PLACEMENTS)
)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved"


class SlowWriter:
    """Makes every background write of a checkpoint wait for the event `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.num_writes = 0
        write = CheckpointWriter.write

        def slow(writer: CheckpointWriter, stream: str, data: Tensor) -> None:
            if threading.current_thread().name == "infinity-save":
                assert self.go.wait(60)
                self.num_writes += 1
            write(writer, stream, data)

        monkeypatch.setattr(CheckpointWriter, "write", slow)

    def on_wait(self, engine: Engine, act: Callable[[], None]) -> None:
        """Call `act` when a thread starts to wait for bytes that are not copied yet."""
        changed = components(engine).saver._changed
        wait = changed.wait

        def notify(timeout: float | None = None) -> bool:
            act()
            return wait(timeout)

        changed.wait = notify  # type: ignore[method-assign]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowWriter]:
    writer = SlowWriter(monkeypatch)
    yield writer
    writer.go.set()


def saved_masters(root: Path, tag: str) -> dict[str, Tensor]:
    with CheckpointReader(root, tag) as reader:
        return {p.name: reader.master(p.name) for p in reader.manifest.parameters}


@every_placement
def test_save_stores_state_at_time_of_call(
    nvme: Path, saved: Path, slow: SlowWriter, placement: dict[str, str]
) -> None:
    with small_engine(nvme, placement, precision="bf16") as engine:
        train(engine, 2)
        expected = masters(engine)
        engine.save_checkpoint(saved)  # returns before anything is copied
        assert not (saved / "latest").exists()
        slow.on_wait(engine, slow.go.set)
        loss = engine(batch(5))  # forward and backward do not wait
        engine.backward(loss)
        assert not slow.go.is_set()
        engine.step()
        train(engine, 2, first=6)
        engine.finish_saving()
        assert slow.num_writes
        assert (saved / "latest").read_text().strip() == "global_step2"
        found = saved_masters(saved, "global_step2")
        assert found.keys() <= expected.keys()
        assert same({n: expected[n] for n in found}, found)
        assert not same(expected, masters(engine))


def test_optimizer_pass_waits_for_units_being_saved(
    nvme: Path, saved: Path, slow: SlowWriter
) -> None:
    with small_engine(nvme, ON_DEVICE) as engine:
        train(engine, 1)
        before = masters(engine)
        engine.save_checkpoint(saved)
        waits = threading.Semaphore(0)
        slow.on_wait(engine, waits.release)
        engine.backward(engine(batch(5)))
        engine.step()
        assert waits.acquire(timeout=60)
        # The update has not started: all state is unchanged.
        segment = engine.plan.units[0].trained_segments[0]
        at_rest = components(engine).store.units[0].in_ram(Kind.WEIGHT)
        assert at_rest is not None
        values = at_rest.view(torch.float32)
        values = values[segment.offset : segment.offset + segment.numel].view(segment.shape)
        assert torch.equal(values, before[segment.name])
        slow.go.set()
        engine.settle()
        assert not torch.equal(values, before[segment.name])


def test_edit_waits_for_units_being_saved(nvme: Path, saved: Path, slow: SlowWriter) -> None:
    with small_engine(nvme, ON_DISK) as engine:
        train(engine, 1)
        expected = masters(engine)
        engine.save_checkpoint(saved)
        slow.on_wait(engine, slow.go.set)
        with engine.materialized(engine.module.norm), torch.no_grad():
            engine.module.norm.weight.fill_(7.0)
        assert slow.go.is_set()
        engine.finish_saving()
        found = saved_masters(saved, "global_step1")
        assert torch.equal(found["norm.weight"], expected["norm.weight"])
        assert float(masters(engine)["norm.weight"][0]) == 7.0


def test_close_completes_pending_save(nvme: Path, saved: Path) -> None:
    with small_engine(nvme) as engine:
        train(engine, 1)
        path = engine.save_checkpoint(saved, "mine", {"epoch": 3, "pair": (1, 2.5)})
    assert (path / "manifest.json").exists()
    with CheckpointReader(saved, "mine") as reader:
        assert list(reader.verify()) == []


@pytest.mark.parametrize("how", ["collected", "process exit"])
def test_save_of_engine_without_close_completes(
    nvme: Path, saved: Path, slow: SlowWriter, how: str
) -> None:
    engine, *_ = infinity.initialize(
        torch.nn.Linear(4, 4), {"precision": "fp32", "nvme_path": str(nvme)}
    )
    engine.save_checkpoint(saved, "mine")
    threading.Timer(0.2, slow.go.set).start()
    if how == "process exit":
        engine._finalizer()
    del engine
    gc.collect()
    assert "infinity-save" not in {t.name for t in threading.enumerate()}
    with CheckpointReader(saved, "mine") as reader:
        assert list(reader.verify()) == []


def test_save_that_fails_after_engine_was_dropped_warns(
    nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = infinity.initialize(
        torch.nn.Linear(4, 4), {"precision": "fp32", "nvme_path": str(nvme)}
    )

    def full(*_: Any, **__: Any) -> None:
        raise DoesNotFitError("the drive is full")

    monkeypatch.setattr(CheckpointWriter, "finish", full)
    engine.save_checkpoint(saved)
    with pytest.warns(InfinityWarning, match="was not saved: the drive is full"):
        engine._finalizer()


@pytest.mark.parametrize("how", ["save", "finish", "close"])
def test_background_save_error_is_reported(
    nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DoesNotFitError("the disk is full")

    engine_closed = False
    with pytest.raises(DoesNotFitError) if how == "close" else warnings.catch_warnings():
        with small_engine(nvme) as engine:
            train(engine, 1)
            monkeypatch.setattr(CheckpointWriter, "finish", full)
            engine.save_checkpoint(saved)
            thread = components(engine).saver._thread
            assert thread is not None
            thread.join(600)
            monkeypatch.undo()
            with pytest.warns(InfinityWarning, match="was not saved: the disk is full"):
                train(engine, 1, first=3)
            losses = train(engine, 1, first=4)
            assert losses
            if how == "save":
                with pytest.raises(DoesNotFitError):
                    engine.save_checkpoint(saved)
                engine.save_checkpoint(saved)  # the error is raised once
            if how == "finish":
                with pytest.raises(DoesNotFitError):
                    engine.finish_saving()
        engine_closed = True
    assert engine_closed == (how != "close")
    assert not list(saved.glob("*.tmp"))


def test_refused_calls_leave_engine_unchanged(nvme: Path, saved: Path) -> None:
    with small_engine(nvme) as engine:
        train(engine, 1)
        before = masters(engine)
        engine.save_checkpoint(saved, "twice", wait=True)
        with pytest.raises(CheckpointError, match="twice"):
            engine.save_checkpoint(saved, "twice")
        with pytest.raises(ConfigError, match=r"client_state\.model"):
            engine.save_checkpoint(saved, "other", {"model": object()})
        with engine.materialized(engine.module.norm), pytest.raises(ResidencyError):
            engine.save_checkpoint(saved, "other")
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(saved, "not there")
        assert {p.name for p in saved.iterdir()} == {"twice", "latest"}
        assert same(masters(engine), before)
        train(engine, 1, first=5)


def test_load_without_checkpoint_warns(nvme: Path, saved: Path) -> None:
    saved.mkdir()
    expected = pytest.warns(InfinityWarning, match="nothing was loaded")
    with small_engine(nvme) as engine, expected:
        assert engine.load_checkpoint(saved) == (None, None)


def test_failed_load_is_recovered_by_another_load(nvme: Path, saved: Path) -> None:
    with small_engine(nvme) as engine:
        train(engine, 1)
        engine.save_checkpoint(saved, "good", wait=True)
        expected = masters(engine)
        train(engine, 1, first=3)
        engine.save_checkpoint(saved, "bad", wait=True)
        path = saved / "bad" / "moment2.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"moment2\.safetensors"):
            engine.load_checkpoint(saved)
        with pytest.raises(EngineFailedError, match="load another checkpoint"):
            engine(batch(0))
        with pytest.raises(EngineFailedError):
            engine.save_checkpoint(saved, "third")
        engine.load_checkpoint(saved, "good")
        assert same(masters(engine), expected)
        train(engine, 1, first=9)


def test_load_restores_registered_state_and_loader(nvme: Path, saved: Path) -> None:
    class Curriculum:
        def __init__(self) -> None:
            self.level = 0

        def state_dict(self) -> dict[str, Any]:
            return {"level": self.level}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.level = state["level"]

    data = torch.utils.data.TensorDataset(torch.arange(10.0).view(10, 1))

    def make() -> tuple[Any, Any, Curriculum]:
        config = {"precision": "fp32", "nvme_path": str(nvme)}
        engine, _, loader, _ = infinity.initialize(
            torch.nn.Linear(1, 1), config, training_data=data, batch_size=2
        )
        curriculum = Curriculum()
        engine.register_state("curriculum", curriculum)
        return engine, loader, curriculum

    engine, loader, curriculum = make()
    with engine:
        batches = iter(loader)
        seen = [next(batches)[0].flatten().tolist() for _ in range(2)]
        curriculum.level = 4
        engine.save_checkpoint(saved, wait=True)
        remaining = [b[0].flatten().tolist() for b in batches]
    engine, loader, curriculum = make()
    with engine:
        engine.load_checkpoint(saved)
        assert curriculum.level == 4
        assert [b[0].flatten().tolist() for b in loader] == remaining
        assert [b[0].flatten().tolist() for b in loader] == seen + remaining


class ImportedModel(torch.nn.Module):
    """Model of the checkpoints in tests/data/deepspeed."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.l1 = torch.nn.Linear(6, 7)
        self.ln = torch.nn.LayerNorm(7)
        self.l2 = torch.nn.Linear(7, 6, bias=False).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("cnt", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.l2(self.ln(self.l1(self.emb(ids))))
        return torch.nn.functional.cross_entropy(self.head(x).float(), ids)


@every_placement
@pytest.mark.parametrize("kind", ["z1-fp32", "z3-fp32", "z2-bf16-w2", "z3-bf16-w2"])
def test_training_resumes_from_imported_deepspeed_checkpoint(
    nvme: Path, saved: Path, kind: str, placement: dict[str, str]
) -> None:
    data = Path(__file__).parents[2] / "data/deepspeed" / kind
    import_deepspeed(data, saved, "0.1.0")
    precision = "bf16" if "bf16" in kind else "fp32"
    with small_engine(nvme, placement, ImportedModel(), precision=precision) as engine:
        engine.load_checkpoint(saved)
        assert engine.global_steps == 3
        expected = saved_masters(saved, "global_step3")
        found = masters(engine)
        assert all(
            torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected
        )
        with CheckpointReader(saved, "global_step3") as reader:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    state = engine.optimizer.read_state(parameter)
                    assert float(state["step"]) == 3
                    moment = torch.empty(parameter.shape)
                    reader.read_into("moment2", name, 0, moment.view(-1).view(torch.uint8))
                    assert torch.equal(state["exp_avg_sq"], moment)
        engine.backward(engine(torch.arange(11)))
        engine.step()
        assert engine.global_steps == 4


@every_placement
def test_loaded_checkpoint_is_committed_immediately(
    nvme: Path, saved: Path, placement: dict[str, str]
) -> None:
    with small_engine(nvme, placement) as engine:
        train(engine, 3)
        engine.save_checkpoint(saved)
        expected = masters(engine)
    config = settings(nvme, placement, durable=True, commit_every=4)
    engine, *_ = infinity.initialize(small_model(seed=9), config)
    train(engine, 1, first=7)
    engine.load_checkpoint(saved)
    with engine.materialized(engine.module.norm), torch.no_grad():
        engine.module.norm.weight.fill_(7.0)  # never committed
    engine.close()
    engine, *_ = infinity.initialize(small_model(seed=8), {**config, "resume": "auto"})
    with engine:
        assert engine.resumed
        assert engine.global_steps == 3
        assert same(masters(engine), expected)


# --- buffers and data other than tensors ----------------------------------------------------------


class Buffered(nn.Module):
    """Small model with expanded, shared, conjugated and persistent buffers."""

    def __init__(self, theta: float = 1.0) -> None:
        super().__init__()
        self.model = small_model()
        mask = torch.ones(4, 4).tril()
        self.register_buffer("mask", mask.expand(3, 4, 4), persistent=False)
        self.register_buffer("theta", torch.full((4,), theta), persistent=False)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.ones(4, dtype=torch.complex64).conj())
        cache = torch.zeros(4, dtype=torch.float64)
        self.first, self.second = nn.Module(), nn.Module()
        for submodule in (self.first, self.second):
            submodule.register_buffer("cache", cache, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        return loss


def test_buffers_of_any_kind_round_trip(nvme: Path, saved: Path) -> None:
    """Covers expanded, shared, resized and conjugated buffers; persistent ones keep their dtype."""
    with small_engine(nvme, model=Buffered()) as engine:
        train(engine, 1)
        module: Any = engine.module
        for submodule in (module.first, module.second):
            submodule.cache = (
                submodule.cache.new_ones(6) if submodule is module.first else module.first.cache
            )
        module.mean = torch.full((4,), 2.0)  # wider dtype than at registration
        module.theta = torch.full((4,), 1.0, dtype=torch.float64)
        engine.save_checkpoint(saved, "one")
        engine.finish_saving()
    with small_engine(nvme, model=Buffered(theta=2.0)) as engine:
        module = engine.module
        engine.load_checkpoint(saved, load_module_only=True)
        assert float(module.theta[0]) == 2, "of the module's code"
        assert float(module.mean[0]) == 2
        engine.load_checkpoint(saved)
        assert float(module.theta[0]) == 1
        assert module.theta.dtype is torch.float64, "as it was"
        assert module.mask.equal(torch.ones(4, 4).tril().expand(3, 4, 4))
        assert module.first.cache is module.second.cache
        assert module.first.cache.shape == (6,)
        assert module.mean.dtype is torch.bfloat16


def test_load_checks_only_persistent_buffers(nvme: Path, saved: Path) -> None:
    with small_engine(nvme) as engine:
        engine.save_checkpoint(saved, "one")
        engine.finish_saving()
    model = small_model()
    model.register_buffer("later", torch.ones(3), persistent=False)
    with small_engine(nvme, model=model) as engine:
        engine.load_checkpoint(saved)
    model = small_model()
    model.register_buffer("later", torch.ones(3))
    with small_engine(nvme, model=model) as engine:
        with pytest.raises(CheckpointError, match="'later' is missing"):
            engine.load_checkpoint(saved)
        engine.save_checkpoint(saved, "two")
        engine.finish_saving()
    with small_engine(nvme) as engine:
        with pytest.raises(CheckpointError, match="'later' is not in the model"):
            engine.load_checkpoint(saved)
        engine.load_checkpoint(saved, load_module_strict=False, load_module_only=True)


class CountingModel(nn.Module):
    """Model with extra state: a count of forwards, on which its loss depends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.count = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        loss: Tensor = self.inner(tokens) * self.count
        return loss

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_of_modules_is_restored(
    nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(nvme, MIXED, durable=True, commit_every=1)
    with infinity.initialize(CountingModel(), config)[0] as engine:
        train(engine, 2)
        engine.save_checkpoint(saved)
        state = dict(engine.state_dict())
        assert set(state) == set(engine.module.state_dict())
        train(engine, 1, first=2)
    with infinity.initialize(CountingModel(), {**config, "resume": "auto"})[0] as engine:
        assert engine.module.count == 3, "of the last commit"
        engine.load_checkpoint(saved, load_module_only=True)
        assert engine.module.count == 2
        engine.load_state_dict(state | {"_extra_state": {"count": 9}})
        assert engine.module.count == 9
        monkeypatch.setattr(CountingModel, "get_extra_state", nn.Module.get_extra_state)
        with pytest.raises(CheckpointError, match="extra state of modules does not fit"):
            engine.load_checkpoint(saved)


def test_unsupported_data_is_refused_before_saving(
    nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128), persistent=False)
    model.register_buffer("table", torch.zeros(40, 8))
    with small_engine(nvme, model=model) as engine:
        engine.save_checkpoint(saved, "one")  # without the buffer `odd`
        engine.register_state("much", SimpleNamespace(state_dict=lambda: "x" * 9000))
        monkeypatch.setattr(writer, "MAX_MANIFEST_BYTES", 9000)
        with pytest.raises(ConfigError, match="data other than tensors comes to"):
            engine.save_checkpoint(saved, "two", wait=True)
        model._non_persistent_buffers_set.discard("odd")
        with pytest.raises(
            ConfigError, match=r"buffer 'odd' cannot be saved: it is of torch\.comp"
        ):
            engine.save_checkpoint(saved, "two")
        engine.close(restore=True)
    monkeypatch.setattr(checkpoints, "MAX_ARRAY_BYTES", 1024)
    with pytest.raises(ConfigError, match=r"durable: the buffer 'table' has 1\.25 KiB"):
        infinity.initialize(model, settings(nvme, durable=True))
    monkeypatch.undo()
    assert [path.name for path in nvme.iterdir()] == []


def test_save_is_published_when_prune_fails(
    nvme: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MachineError("it cannot be removed")

    monkeypatch.setattr(writer, "prune", refuse)
    with small_engine(nvme) as engine:
        with pytest.raises(MachineError, match="was saved, but older checkpoints are left"):
            engine.save_checkpoint(saved, "one", keep_last=1, wait=True)
        assert engine.load_checkpoint(saved)[0] == str(saved / "one")
