"""Tests of quantized frozen weights: formats, files, checkpoints and training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.internals import components
from support.models import CASES
from support.quantized import as_bitsandbytes, dynamic, packed, rounded
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor, nn

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError
from infinity.model.quantized import (
    NF4_LEVELS,
    _constants_on,
    dequantize,
    dynamic_levels,
    pack_parts,
    quantize,
)
from infinity.model.weight_files import WeightFiles
from infinity.types import FrozenFormat

WIDE = 256
FORMS = [form for form in FrozenFormat if form.fits((1, 1))]  # formats of matrices
SHAPES = [(64, 64), (3, 5), (33, 65), (130, 100), (1, 192)]


def matrix(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random values with a row of zeros and one large value."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02
    found[0] = 0
    found[-1, -1] = 3
    return found.to(dtype)


def round_trip(value: Tensor, form: FrozenFormat) -> Tensor:
    found = torch.empty_like(value)
    dequantize(packed(value, form), form, found)
    return found


# --- values ----------------------------------------------------------------------------------


def test_levels_match_published_definitions() -> None:
    """NF4: quantiles of a normal distribution, symmetric around 0 and scaled to 1."""
    most = (1 - 1 / 32 + 1 - 1 / 30) / 2
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.5, most, 9, dtype=torch.float64))
    below = -normal.icdf(torch.linspace(0.5, most, 8, dtype=torch.float64))
    expected = torch.cat([below.flip(0)[:-1], above]) / above[-1]
    torch.testing.assert_close(torch.tensor(NF4_LEVELS).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(dynamic_levels(), dynamic(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_values_match_reference_formula(form: FrozenFormat) -> None:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            value = matrix(shape, dtype)
            expected = rounded(value, form)
            torch.testing.assert_close(round_trip(value, form), expected, rtol=1e-5, atol=1e-9)
            if dtype is torch.bfloat16 and form is not FrozenFormat.NF4_DOUBLE:
                assert torch.equal(round_trip(value, form), expected), shape


@pytest.mark.parametrize("form", FrozenFormat)
def test_stack_range_is_contiguous_byte_range(form: FrozenFormat) -> None:
    """Every matrix is encoded separately, in blocks of its own, for all sizes."""
    shapes = [(5, 32, 3), (4, 96, 40)] if form is FrozenFormat.MXFP4 else [(5, 3, 7), (4, 33, 65)]
    for shape in shapes:
        stack = torch.stack([matrix(shape[1:]) * (1 + index) for index in range(shape[0])])
        held = packed(stack, form)
        size = form.nbytes((1, *shape[1:]))
        assert len(held) == form.nbytes(shape) == shape[0] * size
        assert torch.equal(held[size : 3 * size], packed(stack[1:3], form))
        values = round_trip(stack, form)
        assert torch.equal(_value(held[size : 3 * size], form, stack[1:3]), values[1:3])
        if form in (FrozenFormat.MXFP4, FrozenFormat.NF4):  # these represent decoded values exactly
            assert torch.equal(round_trip(values, form), values)
        if form in FORMS:
            alone = torch.cat([packed(one, form) for one in stack])
            assert torch.equal(alone, held)
        torch.testing.assert_close(values, rounded(stack, form), rtol=1e-5, atol=1e-9)


def test_native_formats_match_transformers() -> None:
    """Covers MXFP4 of gpt-oss with every code and non-NaN scale, and FP8 of DeepSeek-V3."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 170, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.arange(3 * 170 * 3).remainder(255).to(torch.uint8).view(3, 170, 3)
    held = pack_parts(FrozenFormat.MXFP4, (3, 96, 170), [blocks, scales])
    codes = torch.randn(256, 384, generator=draw).to(torch.float8_e4m3fn)
    fp8_scales = torch.rand(2, 3, generator=draw)
    held8 = pack_parts(FrozenFormat.FP8, (256, 384), [codes, fp8_scales])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(_value(held, FrozenFormat.MXFP4, expected), expected)
        expected = fp8.Fp8Dequantize(None)._dequantize_one(codes, fp8_scales, dtype)
        assert torch.equal(_value(held8, FrozenFormat.FP8, expected), expected)


@contextmanager
def bf16_meta_defaults() -> Iterator[None]:
    """Set the torch defaults for building a model in bf16 on the meta device."""
    _constants_on.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        _constants_on.cache_clear()


def test_torch_defaults_do_not_affect_values() -> None:
    value = matrix((64, 64))
    for form in FORMS:
        held, back = packed(value, form), round_trip(value, form)
        parts = [part.clone() for part in held.split(list(form.parts(value.shape)))]
        found = torch.zeros_like(held)
        with bf16_meta_defaults():
            quantize(value, form, found)
            assert torch.equal(found, held)
            assert torch.equal(_value(found, form, value), back)
            assert torch.equal(pack_parts(form, value.shape, parts), held)


def test_chunk_size_does_not_affect_values(monkeypatch: pytest.MonkeyPatch) -> None:
    value = matrix((130, 256))
    encoded = {form: packed(value, form) for form in FORMS}
    expected = {form: _value(encoded[form], form, value) for form in FORMS}
    stack = torch.randn(2, 64, 1300).bfloat16()
    held = packed(stack, FrozenFormat.MXFP4)
    stack_values = _value(held, FrozenFormat.MXFP4, stack)
    monkeypatch.setattr("infinity.model.quantized.QUANTIZED_CHUNK", 64 * 256)
    assert torch.equal(packed(stack, FrozenFormat.MXFP4), held)
    for form in FORMS:
        assert torch.equal(packed(value, form), encoded[form])
        assert torch.equal(round_trip(value, form), expected[form])
    assert torch.equal(_value(held, FrozenFormat.MXFP4, stack), stack_values)


def _value(held: Tensor, form: FrozenFormat, like: Tensor) -> Tensor:
    found = torch.empty_like(like)
    dequantize(held, form, found)
    return found


def test_bytes_and_values_match_bitsandbytes() -> None:
    bnb: Any = pytest.importorskip("bitsandbytes.functional")
    for shape in ((64, 64), (33, 65), (256, 192)):
        value = matrix(shape)
        codes, state = bnb.quantize_4bit(value, blocksize=64, quant_type="nf4")
        held = packed(value, FrozenFormat.NF4)
        count, scales = FrozenFormat.NF4.parts(shape)
        assert torch.equal(held[:count], codes.view(-1))
        assert torch.equal(held[-scales:].view(torch.float32), state.absmax)
        if shape[1] % 64 == 0:  # the CPU kernel of bitsandbytes decodes other widths incorrectly
            assert torch.equal(
                round_trip(value, FrozenFormat.NF4), bnb.dequantize_4bit(codes, state)
            )
        rows, largest, _ = bnb.int8_vectorwise_quant(value[1:].clone())
        held = packed(value[1:], FrozenFormat.INT8)
        assert torch.equal(held[: rows.numel()], rows.view(-1).view(torch.uint8))
        back = torch.ops.bitsandbytes.int8_vectorwise_dequant(rows, largest).to(value.dtype)
        assert torch.equal(round_trip(value[1:], FrozenFormat.INT8), back)
    assert torch.equal(dynamic_levels(), bnb.create_dynamic_map())


# --- engines (parity/test_axes.py covers placements, ranks and schedules) ------------------------


class Adapted(nn.Module):
    """Frozen layer with a trained low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDE, 2, bias=False)
        self.up = nn.Linear(2, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(Adapted() for _ in range(6)))


def make_engine(
    path: Path, placement: dict[str, str] = ON_DISK, **overrides: Any
) -> infinity.Engine:
    options = {"precision": "bf16", "frozen": {"format": "nf4"}, **overrides}
    config = settings(path, placement, **options)
    engine, *_ = infinity.initialize(adapted(), config)
    return engine


def step(engine: infinity.Engine, number: int = 0) -> float:
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(number)).bfloat16()
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def state(engine: infinity.Engine) -> dict[str, Tensor]:
    return dict(engine.state_dict(master=True))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_step_reads_frozen_bytes_quantized(tmp_path: Path) -> None:
    """A step reads the quantized bytes of six blocks in forward and of four in backward."""
    sizes, reads = {}, {}
    for form in ("as_is", "nf4", "int8"):
        with make_engine(tmp_path, frozen={"format": form}, prefetch_units=0) as engine:
            for number in range(4):
                step(engine, number)
            engine.settle()
            plan, report = engine.plan, engine.last_report
            assert report is not None
            assert report.moved == plan.predicted_bytes
            sizes[form] = sum(unit.frozen_bytes for unit in plan.units)
            reads[form] = report.moved["disk_read"]
            assert ("stored and moved as" in plan.describe()) == (form != "as_is")
    count = 6 * WIDE * WIDE
    assert sizes["as_is"] == 2 * count
    assert sizes["nf4"] == 0.5625 * count
    assert count < sizes["int8"] <= 1.07 * count  # padded to pages
    for form in ("nf4", "int8"):
        fetches = 6 * (reads["as_is"] - reads[form]) / (sizes["as_is"] - sizes[form])
        assert fetches == 6 + 4


def test_frozen_values_requantized_only_when_changed(
    tmp_path: Path,
) -> None:
    first = adapted().get_parameter("0.base.weight").detach().bfloat16()
    with make_engine(tmp_path) as engine:
        before, edition = state(engine), components(engine).store.frozen_version
        assert torch.equal(before["0.base.weight"], rounded(first, "nf4"))
        with engine.materialized(engine.module):
            pass
        engine.load_state_dict(before)
        assert components(engine).store.frozen_version == edition
        assert same(state(engine), before)
        other = matrix((WIDE, WIDE))
        with engine.materialized(engine.module), torch.no_grad():
            engine.module.get_parameter("2.base.weight").copy_(other)
        assert torch.equal(engine.state_dict()["2.base.weight"], rounded(other, "nf4"))
        loss = step(engine)
        engine.close(restore=True)
        assert loss == loss
        assert torch.equal(engine.module[2].base.weight, rounded(other, "nf4"))


def test_checkpoint_stores_quantized_bytes(tmp_path: Path) -> None:
    """Frozen files are shared by tags, readable without an engine, and tied to their format."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with make_engine(nvme) as engine:
        step(engine)
        for tag in ("a", "b"):
            engine.save_checkpoint(tmp_path / "checkpoints", tag=tag)
        expected = state(engine)
        after = step(engine, 1)
    files = [tmp_path / "checkpoints" / tag / "frozen.safetensors" for tag in ("a", "b")]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    assert files[0].stat().st_size < 0.6 * 6 * WIDE * WIDE
    with CheckpointReader(tmp_path / "checkpoints", "b") as reader:
        assert list(reader.verify()) == []
        found = {tensor.name: tensor.read() for tensor in reader.outgoing(torch.float32)}
    assert same(found, {name: value.float() for name, value in expected.items()})
    for placement in (ON_DEVICE, ON_DISK):
        with make_engine(nvme, placement) as engine:
            engine.load_checkpoint(tmp_path / "checkpoints", "b")
            assert same(state(engine), expected)
            assert step(engine, 1) == after
    for other in ("int8", "as_is"):
        with make_engine(nvme, frozen={"format": other}) as engine:
            with pytest.raises(CheckpointError, match=r"base\.weight"):
                engine.load_checkpoint(tmp_path / "checkpoints", "b")
            engine.load_checkpoint(tmp_path / "checkpoints", "b", load_optimizer_states=False)
            value = engine.state_dict()["0.base.weight"]
            original = expected["0.base.weight"]
            assert torch.equal(value, original if other == "as_is" else rounded(original, "int8"))


@pytest.mark.parametrize("form", FORMS[1:])  # NF4 re-encodes its values exactly
def test_weights_only_load_does_not_round_again(form: FrozenFormat, tmp_path: Path) -> None:
    """Values are rounded once, also in fp32 and when loaded over another base."""
    options: dict[str, Any] = {"precision": "fp32", "frozen": {"format": form}}
    with make_engine(tmp_path, **options) as engine:
        engine.save_checkpoint(tmp_path / "checkpoints", tag="a")
        expected = state(engine)
        others = {n: torch.randn_like(value) for n, value in state(engine).items()}
        engine.load_state_dict(others)
        engine.load_checkpoint(tmp_path / "checkpoints", "a", load_optimizer_states=False)
        assert same(state(engine), expected)


def test_durable_run_resumes_and_rejects_other_format(tmp_path: Path) -> None:
    durable: dict[str, Any] = {"durable": True, "resume": "auto"}
    with make_engine(tmp_path, **durable) as engine:
        step(engine)
        expected = state(engine)
    with make_engine(tmp_path, **durable) as engine:
        assert engine.global_steps == 1
        assert same(state(engine), expected)
        step(engine, 1)
    with pytest.raises(ConfigError, match=r"form of '0\.base\.weight' is nf4 in the stored run"):
        make_engine(tmp_path, durable=True, resume="auto", frozen={"format": "int8"})
    with pytest.raises(
        ConfigError, match=r"form of '0\.base\.weight' is nf4 in the stored run, as_is in this one"
    ):
        make_engine(tmp_path, durable=True, resume="auto", frozen={"format": "nf4", "keep": ["0"]})


@pytest.mark.parametrize("form", [FrozenFormat.NF4, FrozenFormat.NF4_DOUBLE])
def test_bitsandbytes_files_load_without_requantizing(form: FrozenFormat, tmp_path: Path) -> None:
    """The scales are not bf16 values, so rounding to the compute dtype first would change them."""
    tensors, held = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in adapted().state_dict().items():
        if "base" not in name:
            tensors[name] = value
            continue
        held[name] = packed(value, form)
        tensors |= as_bitsandbytes(name, held[name], form, value.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with make_engine(tmp_path) as engine:
        infinity.load_weights(engine, tmp_path)
        with WeightFiles(tmp_path) as files, bf16_meta_defaults():
            assert files.read("0.base.weight").dtype is torch.float32
        step(engine)
        found = engine.state_dict()
        for name, one in held.items():
            expected = torch.empty(WIDE, WIDE)
            dequantize(one, form, expected)
            assert torch.equal(found[name], expected.bfloat16())
            assert not torch.equal(rounded(expected.bfloat16(), "nf4"), expected.bfloat16())
    tensors["0.base.weight.absmax"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'0\.base\.weight' is quantized in a way"):
        WeightFiles(tmp_path)


def test_unquantizable_models_rejected(tmp_path: Path) -> None:
    config = settings(tmp_path, frozen={"format": "nf4"})
    with pytest.raises(ConfigError, match=r"(?s)matrices of nn\.Linear layers are trained.*freeze"):
        infinity.initialize(CASES["gpt"].build(), config)
    with pytest.raises(ConfigError, match=r"no nn\.Linear layer is left"):
        infinity.initialize(adapted(), {**config, "frozen": {"format": "nf4", "keep": ["base", "up",
                            "down"]}})  # fmt: skip
    with pytest.raises(ConfigError, match=r"frozen\.format"):
        infinity.initialize(adapted(), {**config, "frozen": {"format": "fp4"}})


class Stack(nn.Module):
    """Frozen experts whose size is not a multiple of MXFP4 blocks, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 40, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(8))


def test_unsupported_shapes_and_formats_rejected(tmp_path: Path) -> None:
    config = settings(tmp_path, frozen={"format": "mxfp4"})
    with pytest.raises(ConfigError, match=r"'experts' of shape \(2, 40, 8\) cannot.*\n.*32"):
        infinity.initialize(Stack(), config)
    with pytest.raises(ConfigError, match=r"no stack of experts is left to quantize"):
        infinity.initialize(adapted(), config)
    with pytest.raises(ConfigError, match=r"no stack of experts is left to quantize"):
        infinity.initialize(Stack(), {**config, "frozen": {"format": "mxfp4", "keep": ["experts"]}})
    codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    for other in ({"a_scale": torch.ones(64)}, {"a_scale_inv": torch.ones(2, 2)}):
        save_file({"a": codes, **other}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=r"'a' is quantized in a way that is not known.*"):
            WeightFiles(tmp_path / "model.safetensors")
    save_file({"a_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'a' is quantized in a way that is not known.*"):
        WeightFiles(tmp_path / "model.safetensors")


@pytest.mark.parametrize("form", ["nf4_double", "int8"])
def test_quantized_training_matches_unquantized_rounded_values(form: str, tmp_path: Path) -> None:
    """Losses are bitwise those of an engine with the rounded values stored unquantized."""
    losses = []
    for stored_form in (form, "as_is"):
        model = adapted()
        if stored_form == "as_is":
            for layer in model.children():
                weight: Any = layer.get_parameter("base.weight")
                weight.data = round_trip(weight.data.bfloat16(), FrozenFormat(form))
        config = settings(tmp_path, precision="bf16", frozen={"format": stored_form})
        engine, *_ = infinity.initialize(model, config)
        with engine:
            losses.append([step(engine, number) for number in range(3)])
    assert losses[0] == losses[1]
