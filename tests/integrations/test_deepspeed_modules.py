"""Tests of DeepSpeed's module names: zero, utils, ops, runtime, comm and checkpointing."""

from __future__ import annotations

import copy
import importlib
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
from torch import Tensor, nn, optim

import infinity
from infinity import integrations
from infinity.errors import CheckpointError, ConfigError, ResidencyError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from infinity.integrations.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from infinity.integrations.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

PLACEMENTS = {"disk": ON_DISK, "device": ON_DEVICE, "mixed": MIXED}
DEEPSPEED_CHECKPOINTS = Path(__file__).parents[1] / "data" / "deepspeed"


@pytest.mark.parametrize(
    "name",
    [
        "DeepSpeedEngine",
        "OnDevice",
        "add_config_arguments",
        "checkpointing.checkpoint",
        "comm.get_rank",
        "init_distributed",
        "initialize",
        "ops.adam.DeepSpeedCPUAdam",
        "ops.adam.FusedAdam",
        "runtime.dataloader.RepeatingLoader",
        "runtime.engine.DeepSpeedEngine",
        "runtime.lr_schedules.WarmupDecayLR",
        "runtime.zero.offload_config.OffloadStateTypeEnum",
        "utils.log_dist",
        "utils.safe_get_full_grad",
        "utils.set_z3_leaf_modules",
        "zero.GatheredParameters",
        "zero.Init",
        "zero.register_external_parameter",
    ],
)
def test_names_resolve_by_attribute_and_import(name: str) -> None:
    found: Any = deepspeed
    root: Any = infinity  # for `import infinity as deepspeed`
    for part in name.split("."):
        found, root = getattr(found, part), getattr(root, part)
    module, _, last = f"infinity.deepspeed.{name}".rpartition(".")
    assert getattr(importlib.import_module(module), last) is found
    assert root is (infinity.initialize if name == "initialize" else found)


# --- zero --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_full_values_and_edits_persist(
    tmp_path: Path, placement: str, precision: str
) -> None:
    with small_engine(tmp_path, PLACEMENTS[placement], precision=precision) as engine:
        up, norm = engine.module.blocks[1].up.weight, engine.module.norm
        expected = small_model().blocks[1].up.weight.to(up.dtype)
        with deepspeed.zero.GatheredParameters(up, modifier_rank=0):
            assert torch.equal(up, expected)
            with torch.no_grad():
                up.mul_(2)
        with deepspeed.zero.GatheredParameters(norm.parameters(), modifier_rank=None):
            with deepspeed.zero.GatheredParameters([norm.weight, up]), torch.no_grad():
                norm.weight.fill_(3)
            assert bool((norm.weight == 3).all())  # still gathered by the outer context
        with deepspeed.zero.GatheredParameters([up], enabled=False):
            pass
        state = engine.state_dict()
        assert torch.equal(state["blocks.1.up.weight"], expected * 2)
        assert bool((state["norm.weight"] == 3).all())
        train(engine, 1)


def test_gathered_parameters_without_engine_unchanged(tmp_path: Path) -> None:
    plain = nn.Parameter(torch.ones(3))
    with (
        small_engine(tmp_path) as engine,
        deepspeed.zero.GatheredParameters([plain, engine.module.norm.bias]),
    ):
        assert bool((plain == 1).all())
        assert bool((engine.module.norm.bias == 0).all())
        engine.close(restore=True)
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        pass  # the engine is closed
    with torch.device("meta"):
        without_values = nn.Linear(2, 2)
    with pytest.raises(ResidencyError, match="no values yet"):
        deepspeed.zero.GatheredParameters(without_values.parameters()).__enter__()


def test_gathered_parameters_of_two_engines(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    with small_engine(first) as one, small_engine(second, model=small_model(1)) as two:
        weights = [one.module.norm.weight, two.module.embedding.weight]
        with deepspeed.zero.GatheredParameters(weights):
            assert torch.equal(weights[1], small_model(1).embedding.weight)
            assert bool((weights[0] == 1).all())


def test_gathered_parameters_error_keeps_edits(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        weight = engine.module.norm.weight

        def edit() -> None:
            with deepspeed.zero.GatheredParameters(weight), torch.no_grad():
                weight.fill_(2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            edit()
        assert bool((engine.state_dict()["norm.weight"] == 2).all())
        train(engine, 1)


def test_zero_init_model_equals_plain_build(tmp_path: Path) -> None:
    config = {"train_batch_size": 2, "infinity": {"seed": 5}, "zero_optimization": {"stage": 3}}
    torch.manual_seed(5)
    expected = nn.Linear(600, 500).weight.detach().clone()
    with (
        deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme", pin_memory=True),
        deepspeed.zero.Init(dtype=torch.bfloat16),
    ):
        model = nn.Linear(600, 500)
    assert model.weight.is_meta
    with deepspeed.zero.Init(enabled=False):
        assert not nn.Linear(600, 500).weight.is_meta
    with deepspeed.initialize(model=model, config=settings(tmp_path))[0] as engine:
        assert torch.equal(engine.state_dict()["module.weight"], expected)
    deepspeed.zero.Init(module=nn.Linear(2, 2))
    for name in ("zero_quantized_weights", "mpu"):
        with pytest.raises(ConfigError, match=name):
            deepspeed.zero.Init(**{name: True})


def test_zero_init_accepts_global_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the stock Trainer `from_pretrained` passes the global batch size on every rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Linear(512, 512)
    assert model.weight.is_meta


def test_external_parameter_registration_is_noop(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        module = engine.module
        deepspeed.zero.register_external_parameter(module.norm, module.embedding.weight)
        deepspeed.zero.unregister_external_parameter(module.norm, module.embedding.weight)
        with pytest.raises(ConfigError, match="got int"):
            deepspeed.zero.register_external_parameter(3, module.norm.weight)  # type: ignore[arg-type]


# --- utils: values -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_fp32_param_get_and_set(tmp_path: Path, placement: str, precision: str) -> None:
    with small_engine(tmp_path, PLACEMENTS[placement], precision=precision) as engine:
        train(engine, 2)
        weight = engine.module.blocks[0].down.weight
        expected = engine.state_dict(master=True)["blocks.0.down.weight"]
        found = safe_get_full_fp32_param(weight)
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
        assert torch.equal(safe_get_local_fp32_param(weight), expected)
        new = torch.rand(weight.shape) + 2**-20
        safe_set_full_fp32_param(weight, new)
        assert torch.equal(safe_get_full_fp32_param(weight), new)
        assert torch.equal(engine.state_dict(master=True)["blocks.0.down.weight"], new)
        with pytest.raises(ConfigError, match="shape"):
            safe_set_full_fp32_param(weight, new[0])
        train(engine, 1, first=2)
    with pytest.raises(ConfigError, match="belongs to no engine"):
        safe_get_full_fp32_param(weight)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("precision", "steps"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_full_grad_get_and_set(tmp_path: Path, placement: str, precision: str, steps: int) -> None:
    """Doubled gradients update like a doubled loss."""
    found = []
    more = {"precision": precision, "gradient_accumulation_steps": steps, "gradient_clipping": 0}
    for factor in (2.0, 1.0):
        with small_engine(tmp_path, PLACEMENTS[placement], **more) as engine:
            parameters = list(engine.module.parameters())
            assert safe_get_full_grad(parameters[0]) is None
            for index in range(steps):
                engine.backward(engine(batch(index)) * factor)
                if index == steps - 1 and factor == 1.0:
                    for parameter in parameters:
                        gradient = safe_get_full_grad(parameter)
                        assert gradient is not None
                        assert gradient.dtype is torch.float32
                        safe_set_full_grad(parameter, gradient * 2)
                engine.step()
            assert safe_get_full_grad(parameters[0]) is None
            found.append((engine.grad_norm, masters(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_full_optimizer_state_get_and_set(tmp_path: Path, placement: str, moments: str) -> None:
    optimizer = {"lr": 1e-2, "moments": moments}
    with small_engine(tmp_path, PLACEMENTS[placement], optimizer=optimizer) as engine:
        train(engine, 2)
        weight = engine.module.embedding.weight
        for key in ("exp_avg", "exp_avg_sq"):
            found = safe_get_full_optimizer_state(weight, key)
            assert torch.equal(found, engine.optimizer.read_state(weight)[key])
            others = {n: safe_get_full_optimizer_state(p, key) for n, p in named(engine, weight)}
            new = torch.rand(weight.shape)
            safe_set_full_optimizer_state(weight, new, key)
            got = safe_get_full_optimizer_state(weight, key)
            if moments == "fp32":
                assert torch.equal(got, new)
            else:
                torch.testing.assert_close(got, new, rtol=0.05, atol=0.05)
            for name, parameter in named(engine, weight):  # others are unchanged
                assert torch.equal(safe_get_full_optimizer_state(parameter, key), others[name])
        with pytest.raises(ConfigError, match="one of step, exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(weight, "momentum")
        with pytest.raises(ConfigError, match="one of exp_avg, exp_avg_sq"):
            safe_set_full_optimizer_state(weight, new, "step")
        with pytest.raises(ConfigError, match="shape"):
            safe_set_full_optimizer_state(weight, new[0], "exp_avg")
        train(engine, 1, first=2)


def named(engine: Any, but: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in engine.module.named_parameters() if p is not but]


def test_set_optimizer_state_used_by_next_step(tmp_path: Path) -> None:
    model = small_model()
    with small_engine(tmp_path, optimizer={"lr": 1e-2}, gradient_clipping=0) as engine:
        weight = engine.module.norm.weight
        train(engine, 1)
        momentum = torch.full((16,), 4.0)
        safe_set_full_optimizer_state(weight, momentum, "exp_avg")
        safe_set_full_fp32_param(weight, torch.ones(16))
        second = safe_get_full_optimizer_state(weight, "exp_avg_sq")
        engine.backward(engine(batch(1)))
        gradient = safe_get_full_grad(weight)
        engine.step()
        found = safe_get_full_fp32_param(weight)
    plain = model.norm.weight
    plain.data.fill_(1)
    adam = optim.AdamW([plain], lr=1e-2)
    adam.state[plain] = {"step": torch.tensor(1.0), "exp_avg": momentum, "exp_avg_sq": second}
    plain.grad = gradient
    adam.step()
    torch.testing.assert_close(found, plain.detach())


def test_set_state_of_torch_optimizer_raises(tmp_path: Path) -> None:
    config = settings(tmp_path)
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=small_model(), config=config, optimizer=optim.RMSprop)
    with engine:
        train(engine, 1)
        weight = engine.module.norm.weight
        assert safe_get_full_optimizer_state(weight, "square_avg").shape == (16,)
        with pytest.raises(ConfigError, match="torch optimizers is not accessible"):
            safe_set_full_optimizer_state(weight, torch.ones(16), "square_avg")


# --- utils: modules, logging and communication -------------------------------------------------


def test_z3_leaf_modules_set_get_and_validate() -> None:
    model, utils = small_model(), deepspeed.utils
    assert utils.get_z3_leaf_modules(model) == []
    blocks = list(model.blocks)
    assert utils.set_z3_leaf_modules(model, [type(blocks[0])]) == blocks
    assert utils.get_z3_leaf_modules(model) == blocks
    assert utils.z3_leaf_module(blocks[0]) is True
    assert utils.unset_z3_leaf_modules(model, ["Block"]) == blocks
    assert utils.get_z3_leaf_modules(model) == []
    utils.set_z3_leaf_module(model.norm, True)
    assert utils.get_z3_leaf_modules(model) == [model.norm]
    with pytest.raises(ConfigError, match="this model has Block, Embedding"):
        utils.set_z3_leaf_modules(model, ["Bloc"])
    assert utils.set_z3_leaf_modules(model, ["Bloc"], raise_if_not_found=False) == []
    with pytest.raises(ConfigError, match="a list of classes"):
        utils.set_z3_leaf_modules(model, "Block")  # type: ignore[arg-type]
    assert model(batch(0)).isfinite()


def test_on_device_builds_on_meta() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(4, 4)
    assert (model.weight.is_meta, model.weight.dtype) == (True, torch.bfloat16)
    assert torch.get_default_dtype() is torch.float32
    with deepspeed.OnDevice(enabled=False):
        assert nn.Linear(4, 4).weight.device.type == "cpu"


def test_log_dist_filters_by_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infinity"):
        deepspeed.utils.log_dist("one", ranks=[0])
        deepspeed.utils.log_dist("two", ranks=[3])
        deepspeed.utils.log_dist("three")
    assert [record.message for record in caplog.records] == ["one", "three"]


def test_repeating_loader_restarts() -> None:
    loader = deepspeed.runtime.dataloader.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.runtime.dataloader.RepeatingLoader([]))


def test_comm_single_process_needs_no_group() -> None:
    comm = deepspeed.comm
    comm.init_distributed()
    comm.barrier()
    assert comm.is_initialized()
    assert (comm.get_rank(), comm.get_local_rank(), comm.get_world_size()) == (0, 0, 1)
    sent, got = torch.arange(3.0), torch.zeros(3)
    for names, given in (
        ("all_reduce broadcast", (sent, 0)), ("barrier", ()), ("all_gather", ([got], sent)),
        ("all_gather_into_tensor allgather_fn all_to_all_single", (got, sent)),
        ("reduce_scatter_tensor reduce_scatter_fn", (got, sent)), ("scatter", (got, [sent])),
    ):  # fmt: skip
        for name in names.split():
            assert getattr(comm, name)(*given) is None
            assert torch.equal(got, sent if len(given) > 1 and given[0] is not sent else got), name
            handle = getattr(comm, name)(*given, async_op=True, prof=False)
            assert (handle.wait(), handle.is_completed()) == (True, True)
            got.zero_()
    comm.destroy_process_group()


def test_activation_checkpointing_recomputes_and_validates() -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(None, partition_activations=True)
    assert checkpointing.is_configured()
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * x).sin()

    x = torch.ones(2, requires_grad=True)
    checkpointing.checkpoint(double, x).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(x.grad, 2 * torch.ones(2).cos())
    checkpointing.reset()
    with pytest.raises(ConfigError, match="save_on_cpu"):
        checkpointing.configure(None, checkpoint_in_cpu=True)
    with pytest.raises(ConfigError, match="mpu_"):
        checkpointing.configure(object())


# --- ops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_deepspeed_adam_classes_match_torch_adamw(kind: type[Any]) -> None:
    plain, offloaded = small_model(), small_model()
    optimizers = (
        optim.AdamW(plain.parameters(), 1e-2, weight_decay=0),
        kind(offloaded.parameters(), 1e-2),
    )
    for index in range(3):
        for model, optimizer in zip((plain, offloaded), optimizers, strict=True):
            model(batch(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam, infinity.CPUAdam])
@pytest.mark.parametrize("form", ["instance", "class"])
def test_deepspeed_adam_becomes_built_in_rule(tmp_path: Path, kind: type[Any], form: str) -> None:
    decay = 0.01 if kind is infinity.CPUAdam else 0.0
    with small_engine(tmp_path, optimizer={"lr": 1e-3, "weight_decay": decay}) as engine:
        train(engine, 2)
        expected = masters(engine)
    config = settings(tmp_path)
    del config["optimizer"]
    model = small_model()
    given = kind(model.parameters()) if form == "instance" else kind
    scheduler = None
    if form == "instance":
        scheduler = optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=given, lr_scheduler=scheduler, config=config
    )
    with engine:
        assert engine.plan.rule.name == "AdamW"
        train(engine, 2)
        assert same(masters(engine), expected)
        if scheduler is not None:
            given.param_groups[0]["lr"] = 0.5  # the param group is shared
            assert engine.get_lr() == [0.5]


def test_deepspeed_adam_groups_and_modes(tmp_path: Path) -> None:
    config = settings(tmp_path)
    del config["optimizer"]
    model = small_model()
    groups = [
        {"params": list(model.blocks.parameters()), "weight_decay": 0.5},
        {"params": list(model.norm.parameters()), "lr": 0.25},
    ]
    given = DeepSpeedCPUAdam(groups, adamw_mode=False, fp32_optimizer_states=False)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    with engine:
        assert engine.plan.rule.name == "Adam"
        assert [m.value for m in engine.plan.rule.moments] == ["bf16", "bf16"]
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
        assert engine.get_lr() == [1e-3, 0.25]
    for options, message in (
        ({"bias_correction": False}, "bias_correction=False"),
        ({}, "state already"),
    ):
        model = small_model()
        given = DeepSpeedCPUAdam(model.parameters(), **options)
        if not options:
            model(batch(0)).backward()
            given.step()
        with pytest.raises(ConfigError, match=message):
            deepspeed.initialize(model=model, optimizer=given, config=config)


# --- fp32 weights out of checkpoints -----------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_zero_to_fp32_of_infinity_checkpoint(tmp_path: Path, precision: str) -> None:
    nvme_path, saved = tmp_path / "nvme", tmp_path / "saved"
    nvme_path.mkdir()
    model = small_model()
    model.norm.requires_grad_(False)
    with small_engine(nvme_path, model=model, precision=precision) as engine:
        train(engine, 2)
        expected = masters(engine)
        engine.save_checkpoint(saved, wait=True)
    state = get_fp32_state_dict_from_zero_checkpoint(saved)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, expected[name].float())
    trained = get_fp32_state_dict_from_zero_checkpoint(saved, exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"norm.weight", "norm.bias"}

    fresh = small_model(3)
    assert load_state_dict_from_zero_checkpoint(fresh, saved, tag="global_step2") is fresh
    assert torch.equal(fresh.blocks[0].up.weight, state["blocks.0.up.weight"])
    (file,) = convert_zero_checkpoint_to_fp32_state_dict(saved, tmp_path / "out")[:1]
    assert file.suffix == ".safetensors"
    deepspeed.utils.zero_to_fp32.main([str(saved), str(tmp_path / "main"), "-t", "global_step2"])
    assert [path.name for path in (tmp_path / "main").iterdir()] == [file.name]
    infinity.load_weights(other := small_model(4), tmp_path / "out")
    assert torch.equal(other.embedding.weight, state["head.weight"])
    (file,) = convert_zero_checkpoint_to_fp32_state_dict(
        saved, tmp_path / "bin", safe_serialization=False
    )
    assert torch.load(file, weights_only=True).keys() == state.keys()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no latest checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize(
    "name", sorted(p.name for p in DEEPSPEED_CHECKPOINTS.iterdir() if p.is_dir())
)
def test_zero_to_fp32_of_deepspeed_checkpoint(tmp_path: Path, name: str) -> None:
    """Direct conversion equals importing the checkpoint and converting the import."""
    from infinity.integrations.deepspeed.import_checkpoint import import_deepspeed

    made = import_deepspeed(DEEPSPEED_CHECKPOINTS / name, tmp_path, "0", None)
    expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path, made.path.name)
    found = get_fp32_state_dict_from_zero_checkpoint(DEEPSPEED_CHECKPOINTS / name)
    assert found.keys() == expected.keys()
    assert len(found) > 2
    for key, value in found.items():
        assert value.dtype is expected[key].dtype
        assert torch.equal(value, expected[key])
    fewer = get_fp32_state_dict_from_zero_checkpoint(
        DEEPSPEED_CHECKPOINTS / name, exclude_frozen_parameters=True
    )
    assert fewer.keys() <= found.keys()


# --- an exponential moving average -------------------------------------------------------------


def test_ema_of_offloaded_model_matches_torch(tmp_path: Path) -> None:
    """Check the recipe of docs/migrating-from-deepspeed.md against torch's `AveragedModel`."""
    decay = 0.9
    with small_engine(tmp_path, ON_DISK) as engine:
        average = dict(engine.state_dict(master=True))
        plain = torch.optim.swa_utils.AveragedModel(
            small_model(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        )
        plain.update_parameters(small_model())  # the first call copies
        for step in range(3):
            train(engine, 1, first=step)
            for name, value in engine.state_dict(master=True).items():
                if value.is_floating_point():
                    average[name].lerp_(value, 1 - decay)
            live = copy.deepcopy(small_model())
            live.load_state_dict(dict(engine.state_dict(master=True)))
            plain.update_parameters(live)
        for name, value in plain.module.named_parameters():
            torch.testing.assert_close(average[name], value)
        trained = masters(engine)
        engine.load_state_dict(average)  # evaluate the average, then restore
        with torch.no_grad():
            torch.testing.assert_close(engine(batch(9)), plain.module(batch(9)))
        engine.load_state_dict(trained)
        assert same(masters(engine), trained)


def test_integrations_aliases_are_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(integrations.__file__).parent
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py")]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    compared = [n for n in names if "stand_in" not in n and n not in ("__init__", "lightning")]
    assert {"deepspeed.zero", "huggingface.trainer"} <= set(compared)
    for name in compared:
        one = importlib.import_module(f"infinity.{name}")
        assert one is importlib.import_module(f"infinity.integrations.{name}")
        assert one.__name__ == f"infinity.integrations.{name}"
    assert pickle.loads(b"cinfinity.deepspeed.zero\nInit\n.") is deepspeed.zero.Init
    with pytest.raises(ModuleNotFoundError, match=r"infinity\.huggingface\.nothing"):
        importlib.import_module("infinity.huggingface.nothing")
    monkeypatch.delitem(sys.modules, "infinity.deepspeed.utils.zero_to_fp32")  # for `python -m`
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("infinity.deepspeed.utils.zero_to_fp32", run_name="__main__")
    assert caught.value.code == 0
