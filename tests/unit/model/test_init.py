"""Tests of initial values: `infinity.Init`, meta-device models and remembered values."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CASES
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    SmallModel,
    assert_nothing_left,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from support.trainer import Run, make_config, make_device
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, ResidencyError
from infinity.model.meta_init import InitialValues, remember_values
from infinity.storage.reservations import PROCESS

SMALL = 64  # bytes; low enough to defer nearly every tensor of the small test models
TIERS = ("device", "host", "disk")


def under_init(build: Callable[[], nn.Module], threshold: int = SMALL) -> nn.Module:
    with infinity.Init(threshold_bytes=threshold):
        return build()


class ReinitializedModel(SmallModel):
    """Model re-initialized through `.data` and by rejection sampling, with buffers of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.init.trunc_normal_(block.up.weight, std=0.5, a=-0.6, b=0.6)
            block.down.weight.data.normal_(std=0.02 / math.sqrt(6))
        nn.init.orthogonal_(self.blocks[0].down.weight, gain=0.7)
        with torch.no_grad():
            self.blocks[2].up.weight.mul_(0.5).add_(self.blocks[1].up.weight)
        self.register_buffer("table", torch.arange(0, 96, 2).float() / 96)
        self.register_buffer("mask", torch.ones(12, 12).tril().bool(), persistent=False)
        self.alias = nn.Module()
        self.alias.register_buffer("table", self.table)

    def features(self, tokens: Tensor) -> Tensor:
        return super().features(tokens) * (1 + self.table.sum())


def reinitialized() -> nn.Module:
    torch.manual_seed(3)
    return ReinitializedModel()


def run(path: Path, placement: dict[str, str], model: nn.Module, **overrides: Any) -> Any:
    """Return the values after the initial write, the losses and the values after three steps."""
    with small_engine(path, placement, model, **overrides) as engine:
        before = masters(engine)
        return before, train(engine, 3), masters(engine)


# --- Init -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_init_every_placement_matches_eager_build(tmp_path: Path, precision: str) -> None:
    before, losses, after = run(tmp_path, ON_DEVICE, reinitialized(), precision=precision)
    for weights, moments, gradients in product(TIERS, repeat=3):
        placement = {"weights": weights, "optimizer_state": moments, "gradients": gradients}
        model = under_init(reinitialized)
        assert all(p.is_meta for p in model.parameters())
        found = run(tmp_path, placement, model, precision=precision)
        assert same(found[0], before), placement
        assert found[1] == losses, placement
        assert same(found[2], after), placement


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("name", CASES)
def test_init_every_model_case_matches_eager_build(name: str, device: str) -> None:
    """Cases include frozen 8-bit weights, experts, buffers, tied weights and parameter groups."""
    case = CASES[name]
    results = []
    for build in (case.build, lambda: under_init(case.build)):
        config = make_config(("disk", "host", "disk"), precision="bf16")
        with Run(build(), config, device=make_device(device), groups=case.groups) as run:
            before = run.masters()
            losses = []
            for case_batch in case.batches(3):
                loss = case_batch.call(run.engine)
                run.engine.backward(loss)
                run.engine.step()
                losses.append(loss.item())
            results.append((before, losses, run.masters()))
    (before, losses, after), (before2, losses2, after2) = results
    assert losses2 == losses
    assert same(before2, before)
    assert same(after2, after)


def test_tied_tensors_and_parameter_identity_preserved(tmp_path: Path) -> None:
    model = under_init(reinitialized)
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    with small_engine(tmp_path, MIXED, model) as engine:
        assert model.head.weight is model.embedding.weight
        assert model.table is model.alias.table
        assert model.mask.dtype is torch.bool
        assert not any(b.is_meta for b in model.buffers())
        now = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        assert now == parameters
        train(engine, 1)
        engine.close(restore=True)
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("method", ["Init", "meta"])
def test_lstm_with_weak_weight_references_is_initialized(method: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LSTM(256, 256, batch_first=True))

    torch.manual_seed(3)
    with infinity.Init() if method == "Init" else torch.device("meta"):
        model = build()
    torch.manual_seed(3)
    eager = build()
    engine, *_ = infinity.initialize(model, settings(tmp_path, ON_DISK))
    with engine:
        if method == "Init":
            assert same(dict(engine.state_dict()), dict(eager.state_dict()))
        assert engine(torch.ones(1, 2, 256))[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_init_older_weight_norm_matches_eager_build(tmp_path: Path) -> None:
    """Its hook leaves the product of both factors, with its graph, in an attribute."""

    def build() -> nn.Module:
        model = reinitialized()
        for block in model.blocks:
            nn.utils.weight_norm(block.up)
            nn.utils.weight_norm(block.down, dim=1)
        return model

    expected = run(tmp_path, ON_DEVICE, build())
    found = run(tmp_path, MIXED, under_init(build))
    assert same(found[0], expected[0])
    assert found[1] == expected[1]
    assert same(found[2], expected[2])


def test_init_hooks_removed_after_restore(tmp_path: Path) -> None:
    model = under_init(reinitialized)
    assert any(m._forward_pre_hooks for m in model.modules())
    with small_engine(tmp_path, ON_DISK, model) as engine:
        engine.close(restore=True)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert same(dict(copy.deepcopy(model).state_dict()), dict(model.state_dict()))
    model(batch(0))


def test_init_config_seed_determines_values() -> None:
    torch.manual_seed(8)
    expected = nn.Linear(20, 20)
    torch.manual_seed(1)
    with infinity.Init({"seed": 8}, threshold_bytes=SMALL):
        layer = nn.Linear(20, 20)
    assert torch.equal(InitialValues(layer).value(layer.weight), expected.weight)
    with infinity.Init(infinity.load_config({"seed": 8})):
        real = nn.Linear(20, 20)
    assert torch.equal(real.weight, expected.weight)


def test_mixed_init_meta_and_real_modules_match_eager_build(tmp_path: Path) -> None:
    """One model combines modules of two Inits, of the meta device and real ones."""
    eager = small_model(4)
    model = small_model(4)
    for index, block in enumerate(eager.blocks):
        torch.manual_seed(20 + index)
        block.up.reset_parameters()
    for index in (0, 1):
        torch.manual_seed(20 + index)
        with infinity.Init(threshold_bytes=SMALL):
            model.blocks[index].up = nn.Linear(16, 32)
    torch.manual_seed(22)
    model.blocks[2].up.reset_parameters()
    with torch.device("meta"):
        model.norm = nn.LayerNorm(16)
    assert same(run(tmp_path, ON_DISK, model)[2], run(tmp_path, ON_DEVICE, eager)[2])


def test_deepcopy_inside_init_keeps_deferred_values() -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        return copy.deepcopy(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))

    eager, model = build(), under_init(build)
    origins = InitialValues(model)
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert parameter.is_meta
        assert torch.equal(origins.value(parameter), expected)


def test_init_forward_in_constructor_runs() -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(3, 8, 3)
            with torch.no_grad():
                flat = self.features(torch.zeros(1, 3, 8, 8)).flatten().shape[0]
            self.head = nn.Linear(flat, 4)

    assert under_init(Measured).head.in_features == 8 * 6 * 6


def test_uninitialized_model_rejects_forward_copy_and_pickle() -> None:
    model = under_init(reinitialized)
    with pytest.raises(ResidencyError, match=r"has no values yet[\s\S]*initialize"):
        model(batch(0))
    with pytest.raises(ResidencyError, match=r"cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(ResidencyError, match=r"cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(ResidencyError, match=r"cannot be pickled"):
        torch.save(model, io.BytesIO())


def _cast(model: nn.Module) -> None:
    model.bfloat16()


def _edit(model: nn.Module) -> None:
    nn.init.zeros_(model.blocks[1].up.weight)


def _replace(model: nn.Module) -> None:
    model.blocks[1].up.weight = nn.Parameter(torch.empty(32, 16, device="meta"))


@pytest.mark.parametrize("change", [_cast, _edit, _replace])
def test_changes_after_init_block_rejected(
    tmp_path: Path, change: Callable[[nn.Module], None]
) -> None:
    model = under_init(reinitialized)
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r"changed after infinity\.Init: .*'blocks\.1\.up\."):
        infinity.initialize(model, settings(tmp_path))
    assert all(p is before[n] and p.is_meta == before[n].is_meta for n, p in before.items())
    assert not list(tmp_path.iterdir())


def test_init_rejects_nesting_meta_device_and_initialize(tmp_path: Path) -> None:
    with infinity.Init():
        with pytest.raises(ConfigError, match="cannot begin here"), infinity.Init():
            pass
        nn.Linear(300, 300)
    with torch.device("meta"), pytest.raises(ConfigError, match="cannot begin here"):
        infinity.Init().__enter__()
    with infinity.Init(threshold_bytes=SMALL):
        model = small_model()
        with pytest.raises(ConfigError, match=r"inside the `with infinity\.Init"):
            infinity.initialize(model, settings(tmp_path))
    assert not nn.Linear(300, 300).weight.is_meta, "nothing stays behind after the block"


def test_init_error_in_block_restores_state_and_allows_reuse() -> None:
    context = infinity.Init(threshold_bytes=SMALL)
    with pytest.raises(TypeError), context:
        nn.Sequential(nn.Linear(40, 40), 1)
    layer = nn.Linear(40, 40)
    assert not layer.weight.is_meta
    assert not layer._forward_pre_hooks
    with context:  # the context can be used again
        layer = nn.Linear(40, 40)
    assert layer.weight.is_meta


def test_init_does_not_affect_other_threads() -> None:
    built: list[nn.Module] = []
    with infinity.Init(threshold_bytes=SMALL):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(40, 40)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta
    built[0](torch.zeros(1, 40))


def test_dropped_model_frees_deferral() -> None:
    model = under_init(reinitialized)
    mark = next(h for m in model.modules() for h in m._forward_pre_hooks.values())
    deferral = weakref.ref(mark.deferral)
    del mark, model
    gc.collect()
    assert deferral() is None


# --- failures ---------------------------------------------------------------------------------


class StopError(Exception):
    pass


def test_failed_initial_write_leaves_model_unchanged(tmp_path: Path) -> None:
    expected = run(tmp_path, ON_DEVICE, reinitialized())
    model = under_init(reinitialized, threshold=1)
    threads, reserved = set(threading.enumerate()), PROCESS.total("host")
    count = 0

    def stop(done: int, total: int, what: str) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise StopError

    with pytest.raises(StopError):
        infinity.initialize(model, settings(tmp_path), progress=stop)
    assert_nothing_left(tmp_path, threads)
    assert PROCESS.total("host") == reserved
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ResidencyError, match="has no values yet"):
        model(batch(0))
    found = run(tmp_path, MIXED, model)
    assert same(found[0], expected[0])
    assert same(found[2], expected[2])


@pytest.mark.parametrize("what", ["hook", "weak reference", "view"])
def test_meta_parameters_with_references_rejected(tmp_path: Path, what: str) -> None:
    model = under_init(reinitialized)
    parameter = model.blocks[0].up.weight
    threads = set(threading.enumerate())
    holder: Any = None  # the reference under test
    if what == "hook":
        parameter.register_hook(lambda gradient: gradient)
    elif what == "weak reference":
        holder = weakref.ref(parameter)
    else:
        holder = parameter.t()
    with pytest.raises(ConfigError, match=r"'blocks\.0\.up\.weight' is on the meta device and"):
        infinity.initialize(model, settings(tmp_path))
    del holder
    assert_nothing_left(tmp_path, threads)
    assert sum(p.is_meta for p in model.parameters()) > 3


def test_parameter_subclass_and_attributes_preserved(tmp_path: Path) -> None:
    class Special(nn.Parameter):
        pass

    def build() -> nn.Module:
        model = reinitialized()
        model.blocks[0].up.weight = Special(model.blocks[0].up.weight.data)
        model.blocks[0].up.weight.tag = "mine"
        return model

    model = under_init(build)
    parameter = model.blocks[0].up.weight
    with small_engine(tmp_path, ON_DISK, model) as engine:
        assert isinstance(parameter, Special)
        assert parameter.tag == "mine"
        assert parameter.requires_grad
        train(engine, 1)
        assert type(model.blocks[0].up.weight) is Special


# --- plain meta models ------------------------------------------------------------------------


def on_meta(build: Callable[[], nn.Module] = SmallModel) -> nn.Module:
    """Build on the meta device; set the buffer that no initializer covers."""
    with torch.device("meta"):
        model = build()
    if isinstance(model, SmallModel):
        model.offset = torch.tensor(0.5)
    return model


def test_meta_model_initialized_module_by_module(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    state = run(tmp_path, ON_DISK, on_meta(), seed=5)[0]
    bound = 1 / math.sqrt(16)
    for index in range(3):
        weight = state[f"blocks.{index}.up.weight"]
        assert weight.abs().max() <= bound
        assert 0.4 * bound < weight.std() < 0.7 * bound
        assert torch.equal(state[f"blocks.{index}.norm.weight"], torch.ones(16))
    assert not torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])
    assert 0.8 < state["embedding.weight"].std() < 1.2, "the first of tied modules initializes"
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert_nothing_left(tmp_path, threads)


def test_meta_values_depend_only_on_seed_and_name(tmp_path: Path) -> None:
    expected = run(tmp_path, ON_DEVICE, on_meta(), seed=5)
    for placement in (MIXED, ON_DISK):
        torch.manual_seed(99)
        found = run(tmp_path, placement, on_meta(), seed=5)
        assert same(found[0], expected[0])
        assert same(found[2], expected[2])
    cut = run(tmp_path, MIXED, on_meta(), seed=5, arguments={"units": ["norm", "blocks.1"]})
    assert same(cut[0], expected[0])
    assert not same(run(tmp_path, ON_DISK, on_meta(), seed=6)[0], expected[0])
    larger = run(tmp_path, ON_DISK, on_meta(lambda: SmallModel(num_blocks=5)), seed=5)[0]
    assert same({n: larger[n] for n in expected[0]}, expected[0])


def test_meta_values_without_seed_follow_torch_seed(tmp_path: Path) -> None:
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(tmp_path, ON_DISK, on_meta())[0])
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_initial_values_do_not_advance_generator() -> None:
    model = on_meta()
    origins = InitialValues(model, seed=1)
    before = torch.get_rng_state()
    origins.check()
    origins.value(model.blocks[0].up.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_real_values_among_meta_tensors_preserved(tmp_path: Path) -> None:
    """Also within one module, and below ancestors that initialize all their descendants."""
    model = on_meta(lambda: nn.Transformer(16, 2, 1, 1, 32))
    real = torch.full((32, 16), 7.0)
    layer = model.encoder.layers[0]
    layer.linear1.weight = nn.Parameter(real.clone())
    origins = InitialValues(model, seed=2)
    origins.check()
    values = {name: origins.value(p) for name, p in model.named_parameters()}
    assert torch.equal(layer.linear1.weight, real)
    assert values["encoder.layers.0.linear1.weight"] is layer.linear1.weight
    assert values["encoder.layers.0.linear1.bias"].abs().max() <= 0.25
    assert torch.count_nonzero(values["encoder.layers.0.self_attn.in_proj_bias"]) == 0
    assert torch.count_nonzero(values["encoder.layers.0.self_attn.out_proj.bias"]) == 0, (
        "nn.MultiheadAttention initializes its child"
    )
    bound = math.sqrt(6 / (16 + 32))  # nn.Transformer applies Xavier to all its descendants
    assert 0.8 * bound < values["encoder.layers.0.linear2.weight"].abs().max() <= bound


class Pretrained(nn.Module):
    """Model with `_init_weights` as in Hugging Face's PreTrainedModel."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(40, 16, padding_idx=2)
        self.h = nn.ModuleList(Attention() for _ in range(2))
        self.scale = nn.Parameter(torch.empty(16))
        self.rotary = Rotary()
        self.plain = nn.BatchNorm1d(16)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, Pretrained):
            nn.init.constant_(module.scale, 3.0)
        elif isinstance(module, Rotary):
            module.inverse.copy_(torch.arange(8.0))
            module.counts.copy_(torch.arange(8))
        for name, parameter in module.named_parameters():
            if name == "c_proj.weight":  # as in GPT-2, initialized by the block
                parameter.data.normal_(mean=0.0, std=2.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(16, 48)
        self.c_proj = nn.Linear(16, 16)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(8.0), persistent=False)
        self.register_buffer("counts", torch.arange(8), persistent=False)


def test_meta_model_with_init_weights_of_hugging_face() -> None:
    model = on_meta(Pretrained)
    origins = InitialValues(model, seed=3)
    origins.check()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = {name: origins.value(tensor) for name, tensor in tensors}
    assert not any(v.is_meta or v.isnan().any() for v in values.values())
    assert 0.01 < values["h.0.c_attn.weight"].std() < 0.03
    assert torch.count_nonzero(values["h.1.c_attn.bias"]) == 0
    assert 1.5 < values["h.0.c_proj.weight"].std() < 2.5
    assert not torch.equal(values["h.0.c_proj.weight"], values["h.1.c_proj.weight"])
    assert torch.count_nonzero(values["wte.weight"][2]) == 0
    assert torch.equal(values["scale"], torch.full((16,), 3.0))
    assert torch.equal(values["rotary.inverse"], torch.arange(8.0))
    assert torch.equal(values["rotary.counts"], torch.arange(8))
    assert torch.equal(values["plain.running_var"], torch.ones(16)), "no word of it in the family"
    assert torch.equal(values["plain.num_batches_tracked"], torch.tensor(0))
    assert all(t.is_meta for _, t in tensors), "the model itself is as it was"
    again = InitialValues(model, seed=3)
    for name, tensor in reversed(tensors):
        assert torch.equal(again.value(tensor), values[name]), name


class PartlyInitialized(nn.Module):
    """Model with tensors not or only partly initialized, and some set to likely sentinel values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.zeros(3))
        self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
        self.inner = Inner()
        self.register_buffer("table", torch.zeros(5, dtype=torch.bool), persistent=False)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.partial = nn.Parameter(torch.zeros(6))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("ones", torch.zeros(4, dtype=torch.uint8))
        self.register_buffer("none", torch.zeros(4, dtype=torch.int64))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.partial[:3] = 1
            self.zeros.zero_()
            self.ones.fill_(1)


def test_tensors_without_initializer_all_listed(tmp_path: Path) -> None:
    model = on_meta(PartlyInitialized)
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(model, settings(tmp_path))
    text = str(caught.value)
    assert "5 tensor(s)" in text
    for name in ("'bare'", "'codes'", "'inner.partial'", "'table'", "'inner.none'"):
        assert name in text
    for name in ("linear", "inner.zeros", "inner.ones"):
        assert name not in text
    assert "with infinity.Init(): model = Build()" in text
    assert_nothing_left(tmp_path, threads)
    assert all(p.is_meta for p in model.parameters())


def test_failing_initializer_error_names_module() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            raise RuntimeError("no luck")

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Broken()))
    with pytest.raises(ConfigError, match=r"'1\.weight'[\s\S]*module '1'.*no luck[\s\S]*Init\(\)"):
        InitialValues(model, 1).check()


# --- remembered values ------------------------------------------------------------------------


def _builds() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    yield "init", lambda: under_init(reinitialized)
    yield "meta", lambda: on_meta(ReinitializedModel)
    yield "real", lambda: small_model(9)


@pytest.mark.parametrize("build", [b for _, b in _builds()], ids=[n for n, _ in _builds()])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_remembered_values_read_once_at_initial_write(
    tmp_path: Path, build: Callable[[], nn.Module], precision: str
) -> None:
    source = reinitialized()
    given = {n: t.detach() for n, t in source.state_dict().items() if n != "alias.table"}
    given["mask"] = source.mask
    model = build()
    known = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    known |= {n for n, _ in model.named_buffers()}
    given = {n: t for n, t in given.items() if n in known and n != "embedding.weight"}
    read_names: list[str] = []

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            read_names.append(name)
            return given[name].double() if given[name].is_floating_point() else given[name]

        return read

    remember_values(model, {name: reader(name) for name in given})
    assert read_names == []
    with small_engine(tmp_path, MIXED, model, precision=precision) as engine:
        found = masters(engine)
        assert sorted(read_names) == sorted(given), "each is read once"
        assert all(torch.equal(found[n], given[n]) for n in given if n in found)
        assert found["offset"].dtype is torch.float32
        train(engine, 1)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_remembered_values_override_only_named_tensors(tmp_path: Path) -> None:
    expected = run(tmp_path, ON_DEVICE, reinitialized())[0]
    model = under_init(reinitialized)
    remember_values(model, {"norm.bias": lambda: torch.full((16,), 9.0)})
    remember_values(model, {"norm.bias": lambda: torch.full((16,), 2.0, dtype=torch.float16)})
    remember_values(model.blocks[1], {"up.weight": lambda: torch.ones(32, 16)})
    found = run(tmp_path, ON_DISK, model)[0]
    expected["norm.bias"] = torch.full((16,), 2.0)
    expected["blocks.1.up.weight"] = torch.ones(32, 16)
    assert same(found, expected)


def test_remembered_values_replace_missing_initializers(tmp_path: Path) -> None:
    model = on_meta(PartlyInitialized)
    values = {n: torch.ones_like(t, device="cpu") for n, t in model.named_parameters()}
    values |= {n: torch.ones_like(t, device="cpu") for n, t in model.named_buffers()}
    del values["linear.bias"]
    remember_values(model, {n: (lambda t=t: t) for n, t in values.items()})
    with small_engine(tmp_path, ON_DISK, model) as engine:
        found = masters(engine)
    assert all(torch.equal(found[n], values[n]) for n in values if n in found)
    assert found["linear.bias"].abs().max() <= 0.5


def test_remembered_values_with_wrong_name_or_shape_rejected(tmp_path: Path) -> None:
    model = under_init(reinitialized, threshold=1)
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"no 'bloks\.1', 'x'"):
        remember_values(model, {"bloks.1": lambda: torch.ones(1), "x": lambda: torch.ones(1)})
    remember_values(model, {"blocks.1.up.weight": lambda: torch.ones(16, 32)})
    with pytest.raises(ConfigError, match=r"'blocks\.1\.up\.weight' has shape \(16, 32\)"):
        infinity.initialize(model, settings(tmp_path))
    assert_nothing_left(tmp_path, threads)
    remember_values(model, {"blocks.1.up.weight": lambda: torch.ones(32, 16)})
    with small_engine(tmp_path, ON_DISK, model) as engine:
        assert torch.equal(masters(engine)["blocks.1.up.weight"], torch.ones(32, 16))


# --- optimizers of torch ----------------------------------------------------------------------


def test_torch_optimizer_accepts_deferred_parameters(tmp_path: Path) -> None:
    for make in (
        lambda model: torch.optim.Adamax(model.parameters(), lr=1e-2),
        lambda model: torch.optim.Adamax,
    ):
        results = []
        for model in (reinitialized(), under_init(reinitialized)):
            given = settings(tmp_path)
            del given["optimizer"]
            engine, *_ = infinity.initialize(model, given, optimizer=make(model))
            train(engine, 2)
            results.append(masters(engine))
            engine.close()
        assert same(*results)
