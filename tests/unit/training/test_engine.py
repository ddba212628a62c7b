"""Tests of the engine's contract: calls, counters, clipping, hooks, closing, failures, errors."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    WIDTH,
    SmallModel,
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
from infinity import engine as engine_module
from infinity.errors import (
    ConfigError,
    DoesNotFitError,
    EngineClosedError,
    EngineFailedError,
    InfinityError,
    InfinityWarning,
    ResidencyError,
    TrainingError,
)
from infinity.storage.reservations import PROCESS


class FactorModel(nn.Module):
    """A small model whose loss can be made non-finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = SmallModel()

    def forward(self, tokens: Tensor, factor: float = 1.0) -> Tensor:
        return self.inner(tokens) * factor


def test_initialize_returns_engine_optimizer_loader_and_scheduler(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.stack([batch(i)[0] for i in range(6)]))
    scheduler = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    config = settings(tmp_path, scheduler=scheduler)
    result = infinity.initialize(small_model(), config, training_data=data, batch_size=2)
    engine, optimizer, loader, schedule = result
    with engine:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer is engine.optimizer
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert schedule is engine.lr_scheduler
        for (tokens,) in loader:
            engine.backward(engine(tokens))
            optimizer.step()
        assert engine.global_steps == 3
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    stream = iter([1, 2])
    engine, _, loader, schedule = infinity.initialize(
        small_model(), settings(tmp_path), training_data=stream
    )
    assert loader is stream
    assert schedule is None
    engine.close()


def test_scheduler_stepped_once_per_update(tmp_path: Path) -> None:
    seen = []

    def halve(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    arguments = {"lr_scheduler": halve}
    with small_engine(tmp_path, arguments=arguments, gradient_accumulation_steps=2) as engine:
        for index in range(6):
            train_micro_batch(engine, index)
            seen.append(engine.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3])


def train_micro_batch(engine: infinity.Engine, index: int) -> float:
    loss = engine(batch(index))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_engine_updates_at_accumulation_boundary_only(tmp_path: Path) -> None:
    with small_engine(tmp_path, gradient_accumulation_steps=3) as engine:
        before = masters(engine)
        counts = []
        for index in range(6):
            scaled = engine.backward(engine(batch(index)))
            assert scaled.requires_grad is False
            engine.step()
            counts.append((engine.micro_step, engine.global_steps))
            if index < 2:
                assert same(masters(engine), before)
        assert counts == [(1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
        assert not same(masters(engine), before)


def test_backward_returns_loss_divided_by_steps(tmp_path: Path) -> None:
    with small_engine(tmp_path, gradient_accumulation_steps=4) as engine:
        loss = engine(batch(0))
        assert torch.equal(engine.backward(loss), loss.detach() / 4)


def test_step_without_backward_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        for _ in range(2):
            with pytest.raises(TrainingError, match=r"without a backward[\s\S]*engine\.backward"):
                engine.step()
        engine(batch(0))
        with pytest.raises(TrainingError):
            engine.step()
        assert len(train(engine, 1)) == 1


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), torch.ones(()), 3.0, None])
def test_backward_of_invalid_loss_raises(tmp_path: Path, loss: Any) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(TrainingError, match="scalar loss"):
            engine.backward(loss)
        with torch.no_grad():
            no_grad_loss = engine(batch(0))
        with pytest.raises(TrainingError, match="no_grad"):
            engine.backward(no_grad_loss)


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_non_finite_step_skipped_and_counted(
    tmp_path: Path, placement: dict[str, str], factor: float
) -> None:
    with small_engine(tmp_path, placement, model=FactorModel()) as engine:
        train(engine, 1)
        before = masters(engine)
        engine.backward(engine(batch(1), factor))
        with pytest.warns(InfinityWarning, match="step 2 was skipped: .* first that of 'inner"):
            engine.step()
        assert (engine.global_steps, engine.skipped_steps, engine.micro_step) == (2, 1, 0)
        assert engine.last_report.skipped
        assert not math.isfinite(engine.grad_norm)
        assert same(masters(engine), before)
        train(engine, 1)
        assert engine.global_steps == 3
        assert not same(masters(engine), before)


def test_skipped_step_does_not_affect_later_steps(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DEVICE, model=FactorModel()) as engine:
        losses, expected = train(engine, 3), masters(engine)
    with small_engine(tmp_path, model=FactorModel()) as engine:
        seen = []
        for index in range(3):
            engine.backward(engine(batch(50), math.nan))
            engine.step()
            seen.append(train_micro_batch(engine, index))
        assert seen == losses
        assert same(masters(engine), expected)


def test_many_consecutive_non_finite_steps_raise(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with small_engine(tmp_path, model=FactorModel()) as engine:
        with pytest.raises(  # noqa: PT012
            TrainingError, match=r"20 steps in a row .*'inner[\s\S]*view of a weight"
        ):
            for _ in range(30):
                engine.backward(engine(batch(0), math.nan))
                engine.step()
        assert engine.skipped_steps == 20
        assert len([w for w in recwarn if "skipped" in str(w.message)]) == 1
        assert math.isfinite(train_micro_batch(engine, 0))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_grad_norm_and_clip_factor_match_torch(tmp_path: Path, micro_batches: int) -> None:
    plain = small_model()
    for index in range(micro_batches):
        (plain(batch(index)) / micro_batches).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.25))
    more = {"gradient_clipping": 0.25, "gradient_accumulation_steps": micro_batches}
    with small_engine(tmp_path, **more) as engine:
        assert engine.grad_norm is None
        train(engine, 1)
        assert engine.grad_norm == pytest.approx(expected, rel=1e-6)
        assert engine.last_report.clip_factor == pytest.approx(0.25 / (expected + 1e-6), rel=1e-6)
        assert all(p.grad is None for p in engine.module.parameters())


def test_clip_factor_is_one_without_clipping(tmp_path: Path) -> None:
    for clipping in (0, 1e6):
        with small_engine(tmp_path, gradient_clipping=clipping) as engine:
            train(engine, 1)
            assert engine.last_report.clip_factor == 1.0


@pytest.mark.parametrize("clipping", [-1.0, math.nan])
def test_negative_or_nan_clipping_raises_before_step(tmp_path: Path, clipping: float) -> None:
    with small_engine(tmp_path) as engine:
        engine.gradient_clipping = clipping  # would turn gradients round, or not clip them
        engine.backward(engine(batch(0)))
        with pytest.raises(TrainingError, match=f"gradient_clipping is {clipping}"):
            engine.step()
        engine.gradient_clipping = 1.0
        engine.step()
        assert engine.global_steps == 1


def test_training_matches_plain_torch(tmp_path: Path) -> None:
    plain = small_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=False)
    with small_engine(tmp_path) as engine:
        for index in range(4):
            optimizer.zero_grad()
            loss = plain(batch(index))
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            assert train_micro_batch(engine, index) == pytest.approx(float(loss.detach()), rel=1e-4)
        for name, value in masters(engine).items():
            assert torch.allclose(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5), name


# --- user hooks ----------------------------------------------------------------------------------


def test_user_hooks_see_resident_parameters(tmp_path: Path) -> None:
    plain, calls = small_model(), []
    with small_engine(tmp_path) as engine:
        block = engine.module.blocks[1]
        up = block.up

        def before(module: nn.Module, args: Any) -> None:
            assert torch.equal(module.up.weight, plain.blocks[1].up.weight)
            calls.append("before")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            assert module.up.weight.isfinite().all()
            calls.append("after")

        def backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
            assert outputs[0].isfinite().all()
            assert module.up.weight.isfinite().all()
            calls.append("backward")

        def backward_before(module: nn.Module, outputs: Any) -> None:
            calls.append("backward_before")

        seen: list[Tensor] = []
        handles = [
            block.register_forward_pre_hook(before),
            block.register_forward_hook(after),
            block.register_full_backward_hook(backward),
            block.register_full_backward_pre_hook(backward_before),
            up.weight.register_hook(lambda g: seen.append(g.clone())),
        ]
        engine.backward(engine(batch(0)))
        assert calls == ["before", "after", "backward_before", "backward"]
        assert torch.equal(seen[0], engine.gradient(up.weight))
        engine.step()
        for handle in handles:
            handle.remove()
        train(engine, 1)


def test_tensor_hook_can_change_gradient(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        weight = engine.module.norm.weight
        weight.register_hook(lambda gradient: gradient * 0)
        before = engine.state_dict()["norm.weight"]
        engine.backward(engine(batch(0)))
        assert not engine.gradient(weight).any()
        engine.step()
        assert torch.allclose(engine.state_dict()["norm.weight"], before * (1 - 1e-4))


def test_parameter_in_loss_outside_call_correct_or_raises(tmp_path: Path) -> None:
    """An L2 term over a parameter fetched by access gives the right gradient or a clear error."""
    plain = small_model()
    (plain(batch(0)) + plain.blocks[0].up.weight.square().sum()).backward()
    with small_engine(tmp_path, prefetch_units=0) as engine:
        loss = engine(batch(0)) + engine.module.blocks[0].up.weight.square().sum()
        try:
            engine.backward(loss)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            assert engine.micro_step == 0
            return
        grad = engine.gradient(engine.module.blocks[0].up.weight)
        assert torch.allclose(grad, plain.blocks[0].up.weight.grad, atol=1e-6)


def test_module_called_outside_engine_call(tmp_path: Path) -> None:
    plain = small_model()
    with small_engine(tmp_path) as engine:
        with torch.no_grad():
            assert torch.equal(engine.module(batch(0)), plain(batch(0)))
            assert torch.equal(
                engine.module.blocks[1](torch.ones(16)), plain.blocks[1](torch.ones(16))
            )
        with torch.inference_mode():
            assert torch.equal(engine.module(batch(0)), plain(batch(0)))
        train(engine, 2)
        with torch.inference_mode():
            engine.eval()
            assert engine(batch(0)).isfinite()
        engine.train()
        train(engine, 1)


def test_unfreezing_parameter_raises_with_name(tmp_path: Path) -> None:
    model = small_model()
    model.norm.weight.requires_grad_(False)
    with small_engine(tmp_path, model=model) as engine:
        train(engine, 1)
        model.norm.weight.requires_grad_(True)
        with pytest.raises(TrainingError, match=r"'norm\.weight' requires a gradient"):
            engine(batch(0))
        model.norm.weight.requires_grad_(False)
        train(engine, 1)


def test_parameter_missing_in_optimizer_raises_with_cause(tmp_path: Path) -> None:
    model = small_model()
    arguments = {"model_parameters": list(model.blocks.parameters())}
    with small_engine(tmp_path, model=model, arguments=arguments) as engine:
        with pytest.raises(TrainingError, match="no group of the optimizer contains it"):
            engine(batch(0))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("blocks"))
        train(engine, 1)


def test_autocast_cache_disabled_inside_calls_only(tmp_path: Path) -> None:
    seen = []
    with small_engine(tmp_path) as engine:
        handle = engine.module.norm.register_forward_hook(
            lambda *_: seen.append(torch.is_autocast_cache_enabled())
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_cache_enabled()
            loss = engine(batch(0))
            assert torch.is_autocast_cache_enabled()
        engine.backward(loss)
        engine.step()
        handle.remove()
    assert seen == [False]


# --- several engines and closing -----------------------------------------------------------------


def test_two_engines_train_independently(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DEVICE) as engine:
        losses, expected = train(engine, 3), masters(engine)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    first, *_ = infinity.initialize(small_model(), settings(one))
    second, *_ = infinity.initialize(small_model(), settings(two, MIXED))
    with first, second:
        seen = [(train_micro_batch(first, i), train_micro_batch(second, i)) for i in range(3)]
        assert seen == [(loss, loss) for loss in losses]
        assert same(masters(first), expected)
        assert same(masters(second), expected)
    for folder in (one, two):
        folder.rmdir()


def test_second_engine_needs_memory_freed_by_first(
    tmp_path: Path,
) -> None:
    big = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # 8 MiB including optimizer state
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), "device")
    fake, other = FakeAccelerator(), FakeAccelerator()
    limits = {"budget": {"device": "12MiB"}}
    before = PROCESS.total("device")
    first, *_ = infinity.initialize(big, settings(tmp_path, placement, **limits), device=fake)
    assert PROCESS.total("device") > before
    second = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with pytest.raises(DoesNotFitError, match="device"):
        infinity.initialize(second, settings(tmp_path, placement, **limits), device=other)
    assert type(second[0]._parameters) is dict
    first.close()
    assert PROCESS.total("device") == before
    again, *_ = infinity.initialize(
        second, settings(tmp_path, placement, **limits), device=FakeAccelerator()
    )
    again.close()


GELU = nn.GELU()
GELU_AND_DROPOUT = nn.Sequential(nn.GELU(), nn.Dropout(0.0))


class SharesActivations(nn.Module):
    """Model whose activations are those of all models of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.act, self.tail = GELU, GELU_AND_DROPOUT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.tail(self.act(layer(x)))
        return x.sum()


def test_modules_without_state_may_be_shared_with_other_models(tmp_path: Path) -> None:
    x = torch.ones(2, 8)
    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        path.mkdir()
    with small_engine(paths[0], model=SharesActivations()) as first:
        copy.deepcopy(SharesActivations().act)
        with small_engine(paths[1], model=SharesActivations()) as second:
            for engine in (first, second):
                engine.backward(engine(x))
                engine.step()
        first.backward(first(x))
        first.step()
    plain = SharesActivations()
    assert len(plain.state_dict()) == len(copy.deepcopy(plain).state_dict()) == 4
    assert plain.double()(x.double()).isfinite()


def test_parameter_added_to_module_without_state_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path, model=SharesActivations()) as engine:
        act = engine.module.act
        engine.backward(engine(torch.ones(2, 8)))
        act.scale = nn.Parameter(torch.ones(1))
        with pytest.raises(ResidencyError, match=r"'act' becomes a .* with 1 parameters"):
            engine.step()
        del act.scale
        engine.step()
        assert engine.global_steps == 1


def test_model_of_another_engine_rejected(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        for module in (engine.module, nn.Sequential(engine.module.blocks[0])):
            with pytest.raises(ConfigError, match="owned by another engine"):
                infinity.initialize(module, settings(tmp_path))
        other = nn.Linear(WIDTH, WIDTH)
        other.weight = engine.module.norm.weight
        with pytest.raises(ConfigError, match="'weight' is owned by another engine"):
            infinity.initialize(other, settings(tmp_path))
        train(engine, 1)


def test_unsupported_models_rejected(tmp_path: Path) -> None:
    """Each would silently train incorrectly or fail in the first step."""
    stale, shared, lazy, scripted = (small_model() for _ in range(4))
    stale.norm.register_buffer("copy", stale.blocks[0].up.weight.data[1:])
    shared.blocks[1].up.weight = nn.Parameter(shared.blocks[0].up.weight.data)
    lazy.extra = nn.LazyLinear(4)
    scripted.blocks[1] = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    models = {
        "'blocks.0.up.weight' and 'norm.copy' share memory": stale,
        "'blocks.0.up.weight' and 'blocks.1.up.weight' share memory": shared,
        "'extra.weight' has no shape yet": lazy,
        "'blocks.1' is a TorchScript module": scripted,
        "'model' is torch's DataParallel": nn.DataParallel(small_model()),
        "'model' is torch's OptimizedModule": torch.compile(small_model()),
    }
    for expected, model in models.items():
        with pytest.raises(ConfigError, match=expected):
            infinity.initialize(model, settings(tmp_path))
    shared.blocks[1].up.weight.requires_grad_(False)
    shared.blocks[0].up.weight.requires_grad_(False)  # frozen weights may share memory
    infinity.initialize(shared, settings(tmp_path))[0].close()


def test_restore_moves_buffers_to_weights_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.device] = []
    with small_engine(tmp_path) as engine:
        monkeypatch.setattr(
            engine_module, "move_buffers", lambda module, device, value: moved.append(device)
        )
        engine.close(restore=True)
    assert moved == [torch.device("cpu")]


def test_closed_engine_refuses_calls(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        loss = engine(batch(0))
        engine.close()
        engine.close()
        engine.close(restore=True)
        calls: Iterator[Any] = iter(
            [
                lambda: engine(batch(0)),
                lambda: engine.backward(loss),
                engine.step,
                engine.optimizer.step,
                engine.state_dict,
                lambda: engine.load_state_dict({}),
                lambda: engine.materialized(engine.module),
                lambda: engine.gradient(engine.module.norm.weight),
                engine.settle,
            ]
        )
        for call in calls:
            with pytest.raises(EngineClosedError):
                call()
        assert engine.global_steps == 0


def test_dropped_engine_removes_scratch(tmp_path: Path) -> None:
    engine = fault_injection.initialize(small_model(), settings(tmp_path))[0]
    engine(batch(0))
    assert list(tmp_path.iterdir())
    del engine
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_with_block_closes_on_exception(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(small_model(), settings(tmp_path))
    with pytest.raises(ValueError, match="mine"), engine:
        raise ValueError("mine")
    assert not list(tmp_path.iterdir())


def test_failed_update_fails_all_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(tmp_path) as engine:
        train(engine, 1)
        engine.settle()
        transfers = components(engine).transfers
        loss = engine(batch(1))
        engine.backward(loss)
        components(engine).gradients.settle()

        def failing_write(pieces: Any, **options: Any) -> Any:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(transfers, "write", failing_write)
        calls = [
            lambda: engine(batch(2)),
            lambda: engine.state_dict(),
            lambda: engine.module.state_dict(),
            lambda: engine.load_state_dict({}),
            lambda: engine.materialized(engine.module.norm).__enter__(),
            engine.settle,
            engine.step,
        ]
        engine.step()
        for call in [*calls, *calls]:
            with pytest.raises(EngineFailedError, match="Input/output error") as caught:
                call()
            assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineFailedError):
            engine.close(restore=True)
        engine.close()


# --- rejected input ------------------------------------------------------------------------------


def test_incomplete_launcher_environment_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but RANK[\s\S]*torchrun"):
        infinity.initialize(small_model(), settings(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "1")
    infinity.initialize(small_model(), settings(tmp_path))[0].close()


def test_meta_model_with_unset_buffer_rejected(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = SmallModel()
    with pytest.raises(ConfigError, match=r"1 tensor\(s\) on the meta device .*'offset'"):
        infinity.initialize(model, settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_sparse_gradient_raises(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8, sparse=True)
            self.out = nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.table(tokens)).square().mean()

    with small_engine(tmp_path, model=Sparse()) as engine:
        loss = engine(batch(0))
        with pytest.raises(TrainingError, match=r"'table\.weight' is sparse[\s\S]*sparse=False"):
            engine.backward(loss)
        assert engine.micro_step == 0


def test_function_transforms_raise(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        module = engine.module
        x = torch.ones(3, 16)
        with pytest.raises(ResidencyError, match=r"torch\.func"):
            torch.func.grad(lambda value: module.blocks[0](value).sum())(x)
        with pytest.raises(ResidencyError, match=r"torch\.func"):
            torch.func.vmap(module.blocks[0])(x)
        weights = {k: v for k, v in engine.state_dict().items() if k != "head.weight"}
        with pytest.raises(ResidencyError, match=r"torch\.func|functional_call"):
            torch.func.functional_call(module, weights, (batch(0),))
        train(engine, 2)


def test_initialize_arguments_validated(tmp_path: Path) -> None:
    model = small_model()
    foreign = nn.Parameter(torch.ones(3))
    parameter = next(model.parameters())
    with pytest.raises(ConfigError, match=r"the model does not have.*\n.*\n.*that you pass$"):
        infinity.initialize(model, settings(tmp_path), model_parameters=[foreign])
    with pytest.raises(ConfigError, match="put both into one module"):
        infinity.initialize(model, settings(tmp_path), model_parameters=[parameter, foreign])
    with pytest.raises(ConfigError, match="no parameter for the optimizer"):
        infinity.initialize(model, settings(tmp_path), model_parameters=[])
    with pytest.raises(ConfigError, match=r"'embedding\.weight' has dtype torch\.float64"):
        infinity.initialize(small_model().double(), settings(tmp_path))
    mixed = small_model()
    mixed.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    remedy = r"the frozen parameter 'codes' has dtype[\s\S]*if p\.requires_grad\]"
    with pytest.raises(ConfigError, match=remedy):
        infinity.initialize(mixed, settings(tmp_path), model_parameters=mixed.parameters())
    with pytest.raises(ConfigError, match="Module"):
        infinity.initialize([1, 2], settings(tmp_path))  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([foreign]), 1)
    with pytest.raises(ConfigError, match="another optimizer"):
        infinity.initialize(model, settings(tmp_path), lr_scheduler=scheduler)
    assert not list(tmp_path.iterdir())
    assert model(batch(0)).isfinite()


def test_param_groups_keep_their_options(tmp_path: Path) -> None:
    model = small_model()
    groups = [
        {"params": list(model.blocks.parameters()), "lr": 0.0, "weight_decay": 0.0},
        {"params": list(model.norm.parameters()), "lr": 0.1},
    ]
    with small_engine(tmp_path, model=model, arguments={"model_parameters": groups}) as engine:
        model.embedding.weight.requires_grad_(False)
        before = masters(engine)
        train(engine, 1)
        after = masters(engine)
        changed = {k for k in before if not torch.equal(before[k], after[k])}
        assert changed == {"norm.weight", "norm.bias"}
        with pytest.raises(InfinityError):
            engine.optimizer.step(lambda: 0)
