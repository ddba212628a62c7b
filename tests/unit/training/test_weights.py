"""Tests of saving and loading the weights of a model, for any placement."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import forked, process_memory
from support.models import CASES
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    small_engine,
    small_model,
    train,
)
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, DoesNotFitError, MachineError, ResidencyError

PLACEMENTS = {"disk": ON_DISK, "mixed": MIXED, "device": ON_DEVICE}
every_placement = pytest.mark.parametrize(
    "placement", list(PLACEMENTS.values()), ids=list(PLACEMENTS)
)
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@contextmanager
def engine_in(folder: Path, *args: Any, seed: int = 0, **kwargs: Any) -> Iterator[Engine]:
    """Yield a small engine whose nvme_path is a new subdirectory of `folder`."""
    nvme = folder / f"nvme{len(list(folder.iterdir()))}"
    nvme.mkdir()
    kwargs.setdefault("model", small_model(seed))
    with small_engine(nvme, *args, **kwargs) as engine:
        yield engine


def values(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.state_dict().items())


def read_saved(files: list[Path]) -> dict[str, Tensor]:
    """Return the tensors that the safetensors library reads from the files."""
    shards = [load_file(f) for f in files if f.suffix == ".safetensors"]
    return {name: tensor.clone() for shard in shards for name, tensor in shard.items()}


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items() if name not in names}


def write(path: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: t.detach().contiguous() for name, t in state.items()}, path)
    return path


# --- save and load ---------------------------------------------------------------------------


@every_placement
@every_precision
def test_saved_weights_load_bit_for_bit(
    tmp_path: Path, placement: dict[str, str], precision: str
) -> None:
    out = tmp_path / "out"
    with engine_in(tmp_path, placement, precision=precision) as engine:
        train(engine, 2)
        engine.module.offset.fill_(0.75)
        files = engine.save_weights(out)
        expected, loss = values(engine), engine(batch(9)).detach()
    assert files == [out / "model.safetensors"]
    for other in PLACEMENTS.values():
        with engine_in(tmp_path, other, seed=5, precision=precision) as engine:
            result = infinity.load_weights(engine, out)
            assert same(values(engine), expected)
            assert torch.equal(engine(batch(9)).detach(), loss)
            assert result.loaded
            assert set(result.loaded) == set(expected)
            assert (result.missing, result.unexpected) == ((), ())
            train(engine, 1)
    plain = small_model(seed=6)
    infinity.load_weights(plain, out)
    assert all(torch.equal(v, expected[n].float()) for n, v in plain.state_dict().items())


@every_placement
def test_saved_masters_load_bit_for_bit(tmp_path: Path, placement: dict[str, str]) -> None:
    with engine_in(tmp_path, placement, precision="bf16") as engine:
        train(engine, 3)
        expected = masters(engine)
        engine.save_weights(tmp_path / "out", torch.float32)
    assert {t.dtype for t in read_saved([tmp_path / "out/model.safetensors"]).values()} == {
        torch.float32
    }
    for other in PLACEMENTS.values():
        with engine_in(tmp_path, other, seed=5, precision="bf16") as engine:
            infinity.load_weights(engine, tmp_path / "out")
            assert same(masters(engine), expected)


@pytest.mark.parametrize(("max_shard", "num_files"), [("5GiB", 1), ("8KiB", 3), (1, 19)])
def test_shards_readable_by_safetensors(
    tmp_path: Path, max_shard: int | str, num_files: int
) -> None:
    out = tmp_path / "out"
    with engine_in(tmp_path) as engine:
        files = engine.save_weights(out, max_shard=max_shard)
        state = values(engine)
    shards = [f for f in files if f.suffix == ".safetensors"]
    assert len(shards) >= num_files
    assert sorted(f.name for f in out.iterdir()) == sorted(f.name for f in files)
    assert same(read_saved(files), without(state, "head.weight")), "tied weights are stored once"
    if len(shards) > 1:
        assert max(f.stat().st_size for f in shards) < 12 << 10
        index = json.loads((out / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
    for source in (out, files[-1]):
        plain = small_model(seed=3)
        infinity.load_weights(plain, source)
        assert same(dict(plain.state_dict()), state)


@pytest.mark.parametrize(("dtype", "expected"), [
    (None, torch.bfloat16), ("bf16", torch.bfloat16), (torch.float16, torch.float16),
    ("fp16", torch.float16), ("fp32", torch.float32),
])  # fmt: skip
def test_save_weights_dtypes(tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    with engine_in(tmp_path, precision="bf16") as engine:
        train(engine, 1)
        state = read_saved(engine.save_weights(tmp_path / "out", dtype))
        assert state.pop("offset").dtype is torch.float32, "buffers keep their dtype"
        expected_state = without(masters(engine), "head.weight", "offset")
        if expected is torch.bfloat16:
            expected_state = without(values(engine), "head.weight", "offset")
        assert same(state, {n: t.to(expected) for n, t in expected_state.items()}), "rounded once"


def test_invalid_dtypes_and_shard_sizes_rejected(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        for dtype in ("int8", torch.int8, "", 0, torch.float64):
            with pytest.raises(ConfigError, match="cannot be saved as"):
                engine.save_weights(tmp_path / "out", dtype)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is not a size"):
            engine.save_weights(tmp_path / "out", max_shard="many")
        assert not (tmp_path / "out").exists()
        with torch.no_grad(), engine.materialized(engine.module.norm):
            engine.module.norm.weight[3] = 1e6
        with pytest.raises(ConfigError, match=r"'norm.weight' holds 1e\+06, which is beyond"):
            engine.save_weights(tmp_path / "out", "fp16")
        assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["frozen", "routed", "buffered"])
@every_precision
def test_frozen_routed_and_buffered_models_round_trip(
    tmp_path: Path, name: str, precision: str
) -> None:
    case = CASES[name]
    with engine_in(tmp_path, model=case.build(), precision=precision) as engine:
        for one in case.batches(2):
            engine.backward(one.call(engine))
            engine.step()
        expected = masters(engine)
        files = engine.save_weights(tmp_path / "out", "fp32", max_shard="4KiB")
        other_dtypes = {n: t.dtype for n, t in values(engine).items() if not t.is_floating_point()}
    state = read_saved(files)
    assert {n: state[n].dtype for n in other_dtypes} == other_dtypes
    assert all(torch.equal(state[n], t.to(state[n].dtype)) for n, t in expected.items())
    with engine_in(tmp_path, model=case.build(seed=4), precision=precision) as engine:
        infinity.load_weights(engine, tmp_path / "out")
        assert same(masters(engine), expected)


def test_saving_weights_does_not_affect_training(tmp_path: Path) -> None:
    with engine_in(tmp_path, precision="bf16", gradient_accumulation_steps=2) as engine:
        expected = [*train(engine, 2), *train(engine, 1, 10)]
        end = masters(engine)
    slow = {"io": {"slow_bytes_per_s": 20_000_000}}
    (tmp_path / "file").write_text("")
    with engine_in(tmp_path, precision="bf16", gradient_accumulation_steps=2, **slow) as engine:
        losses = train(engine, 2)
        engine.save_weights(tmp_path / "out")  # an update is pending
        with pytest.raises(MachineError, match="cannot be saved"):
            engine.save_weights(tmp_path / "file")
        loss = engine(batch(10))
        with pytest.raises(MachineError):
            engine.save_weights(tmp_path / "file" / "below")
        engine.save_weights(tmp_path / "out", "fp32")  # a graph and its saved weights are alive
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        engine.save_weights(tmp_path / "out", "fp16")
        engine.backward(loss := engine(batch(11)))
        engine.step()
        assert [*losses, float(loss.detach())] == expected
        assert same(masters(engine), end)


def test_full_disk_leaves_engine_and_files_unchanged(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    out = tmp_path / "out"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(out)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        with engine_in(tmp_path, precision="bf16") as engine:
            files = engine.save_weights(out)
            first = read_saved(files)
            train(engine, 1)
            with pytest.raises(DoesNotFitError, match="the weights need"):
                engine.save_weights(out, "fp32")
            assert same(read_saved(files), first)
            assert len(train(engine, 1)) == 1
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_save_and_load_refused_while_materialized_or_closed(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        files = engine.save_weights(tmp_path / "out")
        with engine.materialized(engine.module.norm):
            with pytest.raises(ResidencyError, match="lent out"):
                engine.save_weights(tmp_path / "out")
            with pytest.raises(ResidencyError, match="lent out"):
                infinity.load_weights(engine, files[0])
        with pytest.raises(ConfigError, match=r"load_weights\(engine"):
            infinity.load_weights(engine.module, files[0])
        with pytest.raises(ConfigError, match=r"load_weights\(engine"):
            infinity.load_weights(nn.Sequential(engine.module.blocks), files[0])
        with pytest.raises(ConfigError, match="an engine or a module, got dict"):
            infinity.load_weights({}, files[0])  # type: ignore[arg-type]
    for act in (engine.save_weights, lambda p: infinity.load_weights(engine, p)):
        with pytest.raises(infinity.InfinityError, match="closed"):
            act(tmp_path / "out")


# --- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "routed"])
def test_units_read_and_written_once(tmp_path: Path, name: str) -> None:
    """`routed` has experts inside blocks, so model order and unit order differ."""
    with engine_in(tmp_path, model=CASES[name].build(), precision="bf16") as engine:
        weights = sum(unit.slot_bytes for unit in engine.plan.units)
        residuals = sum(2 * unit.numel for unit in engine.plan.units)

        def bytes_moved(act: Callable[[], Any]) -> tuple[int, int]:
            before = engine.counters()
            act()
            after = engine.counters()
            return tuple(after[k] - before[k] for k in ("disk_read", "disk_write"))  # type: ignore[return-value]

        out = tmp_path / "out"
        assert bytes_moved(lambda: engine.save_weights(out, max_shard="2KiB")) == (weights, 0)
        assert bytes_moved(lambda: engine.save_weights(out, "fp32")) == (weights + residuals, 0)
        changed = {n: t * 1.01 for n, t in read_saved([out / "model.safetensors"]).items()}
        write(out / "model.safetensors", changed)
        both = weights + residuals
        assert bytes_moved(lambda: infinity.load_weights(engine, out)) == (both, both)
        assert bytes_moved(lambda: infinity.load_weights(engine, out)) == (both, 0), (
            "nothing is new"
        )
        engine.load_state_dict(small := values(engine))
        assert bytes_moved(lambda: engine.load_state_dict(small)) == (both, 0)


UNITS, SLOT = 6, 12.0  # number of units; MiB of a unit's weights, and of its residuals


def peaks(folder: str, dtypes: list[str | None]) -> list[float]:
    """Return the peaks in MiB of a save and a load per dtype, and of a load into a plain module."""
    process_memory.count_held()
    torch.set_num_threads(1)

    def peak_of(act: Callable[[], Any]) -> float:
        peak = process_memory.Peak()
        act()
        return peak.grown / 2**20

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 3072), nn.Linear(3072, 1024)) for _ in range(UNITS))
        )

    config = {
        "nvme_path": f"{folder}/nvme",
        "precision": "bf16",
        "cpu": {"num_threads": 1},
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "host"},
        "optimizer": {"type": "SGD", "lr": 0.1},  # no moments: less to write
    }
    out, found = Path(folder) / "out", []
    with infinity.initialize(build(), config)[0] as engine:
        for dtype in dtypes:
            found.append(peak_of(partial(engine.save_weights, out, dtype, max_shard="40MB")))
            found.append(peak_of(lambda: infinity.load_weights(engine, out)))
    plain = build()
    return [*found, peak_of(lambda: infinity.load_weights(plain, out))]


@process_memory.needs_peak
@pytest.mark.parametrize(
    "dtypes", [["fp32"], pytest.param([None, "fp32", "fp16"], marks=pytest.mark.big)], ids=str
)
def test_save_and_load_memory_bounded(tmp_path: Path, dtypes: list[str | None]) -> None:
    (tmp_path / "nvme").mkdir()
    found = forked.call(peaks, str(tmp_path), dtypes)
    # MiB of a save and of a load: a unit's weights, its residuals, the largest tensor as stored in
    # the file or in fp32, and the conversion of 2**20 values: 9 bytes each, 5 to fp16.
    bounds = {
        None: (SLOT + 6, 2 * SLOT + 6 + 9),
        "fp32": (2 * SLOT + 12, 2 * SLOT + 12 + 9),
        "fp16": (2 * SLOT + 12 + 5, 2 * SLOT + 6 + 9),
    }
    expected = [bound for dtype in dtypes for bound in bounds[dtype]]
    expected.append({"fp32": 12, "fp16": 6}[dtypes[-1]])
    for peak, bound in zip(found, expected, strict=True):
        assert peak < bound + process_memory.SMALL_BYTES / 2**20, found
    assert 2 * max(found) < UNITS * 2 * SLOT, "a master of the model is larger than any of it"


# --- matching names and shapes ---------------------------------------------------------------


def changed_state(seed: int = 8) -> dict[str, Tensor]:
    return {**dict(small_model(seed).state_dict()), "offset": torch.tensor(2.5)}


def targets(folder: Path) -> Iterator[tuple[Any, Callable[[], dict[str, Tensor]]]]:
    """Yield an engine and a plain module, each with a function that returns its fp32 values."""
    with engine_in(folder, precision="bf16") as engine:
        yield engine, lambda: masters(engine)
    plain = small_model()
    yield plain, lambda: {n: t.clone() for n, t in plain.state_dict().items()}


@pytest.mark.parametrize("dropped", ["head.weight", "embedding.weight", None])
def test_one_name_of_tied_weights_suffices(tmp_path: Path, dropped: str | None) -> None:
    state = changed_state()
    file = write(tmp_path / "w.safetensors", without(state, dropped or ""))
    for target, read_values in targets(tmp_path):
        result = infinity.load_weights(target, file)
        assert same(read_values(), state)
        assert {"head.weight", "embedding.weight"} <= set(result.loaded)


def test_differing_tied_weights_rejected(tmp_path: Path) -> None:
    state = without(changed_state())
    state["head.weight"][-1, -1] += 1
    file = write(tmp_path / "w.safetensors", state)
    for target, read_values in targets(tmp_path):
        before = read_values()
        for strict in (True, False):
            with pytest.raises(ConfigError, match=r"embedding.*head.* differ in the file"):
                infinity.load_weights(target, file, strict=strict)
        assert same(read_values(), before)
        infinity.load_weights(target, file, rename=lambda n: None if n == "head.weight" else n)
        assert same(read_values(), changed_state())


def test_load_error_lists_everything_that_does_not_fit(tmp_path: Path) -> None:
    state = without(changed_state(), "blocks.0.up.weight", "blocks.1.down.bias", "offset")
    extra = {f"extra.{i}": torch.zeros(2) for i in range(30)}
    state |= extra | {"norm.weight": torch.zeros(3), "norm.bias": torch.zeros(16).to(torch.int8)}
    file = write(tmp_path / "w.safetensors", state)
    for target, read_values in targets(tmp_path):
        before = read_values()
        with pytest.raises(ConfigError) as caught:
            infinity.load_weights(target, file)
        text = str(caught.value)
        assert "3 missing: 'blocks.0.up.weight', 'blocks.1.down.bias', 'offset'" in text
        assert "30 unexpected" in text
        assert all(f"'{name}'" in text for name in extra)
        assert "'norm.weight' has shape (3,), not (16,)" in text
        assert "'norm.bias' holds int8" in text
        with pytest.raises(ConfigError) as caught:
            infinity.load_weights(target, file, strict=False)
        assert "missing" not in str(caught.value)
        assert "'norm.weight' has shape" in str(caught.value)
        assert "'norm.bias' holds int8" in str(caught.value)
        assert same(read_values(), before)


def test_non_strict_load_reports_names(tmp_path: Path) -> None:
    some = {"norm.weight": torch.full((16,), 3.0), "head.weight": torch.ones(50, 16)}
    file = write(tmp_path / "w.safetensors", some | {"extra": torch.ones(1)})
    for target, read_values in targets(tmp_path):
        expected = read_values() | some | {"embedding.weight": torch.ones(50, 16)}
        result = infinity.load_weights(target, file, strict=False)
        assert same(read_values(), expected)
        assert set(result.loaded) == {"norm.weight", "embedding.weight", "head.weight"}
        assert result.unexpected == ("extra",)
        assert set(result.missing) == expected.keys() - set(result.loaded)
        with pytest.raises(ConfigError, match="does not fit the model"):
            infinity.load_weights(target, file, strict=False, rename=lambda n: f"x.{n}")


@pytest.mark.parametrize(("to_file_name", "remedy"), [
    (lambda n: f"model.{n}", "'' + name.removeprefix('model.')"),
    (lambda n: n.replace("blocks.", "transformer.h."), "'blocks.' + name.removeprefix('tra"),
])  # fmt: skip
def test_renamed_prefix_error_suggests_rename(
    tmp_path: Path, to_file_name: Callable[[str], str], remedy: str
) -> None:
    state = changed_state()
    file = write(
        tmp_path / "w.safetensors",
        {to_file_name(n): t for n, t in without(state, "head.weight").items()},
    )
    for target, read_values in targets(tmp_path):
        with pytest.raises(ConfigError) as caught:
            infinity.load_weights(target, file)
        assert remedy in str(caught.value)
        assert "missing:" not in str(caught.value), "explained names are not listed"
        model_names = {to_file_name(n): n for n in state}
        infinity.load_weights(
            target, file, rename=lambda n, model_names=model_names: model_names[n]
        )
        assert same(read_values(), state)


def test_missing_name_error_suggests_nearest(tmp_path: Path) -> None:
    state = changed_state()
    state["blocks.1.upp_weight"] = state.pop("blocks.1.up.weight")
    file = write(tmp_path / "w.safetensors", without(state, "head.weight"))
    with pytest.raises(ConfigError, match=r"'blocks.1.up.weight' may be 'blocks.1.upp_weight'"):
        infinity.load_weights(small_model(), file)


def test_invalid_rename_results_rejected(tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors", without(changed_state(), "head.weight"))
    for answer, match in ((7, "returned 7"), ("norm.weight", "rename makes 'norm.weight' of both")):
        with pytest.raises(ConfigError, match=match):
            infinity.load_weights(small_model(), file, rename=lambda n, a=answer: a)
    with pytest.raises(ConfigError, match="does not fit"):
        infinity.load_weights(small_model(), file, rename=lambda n: None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_precision
def test_float_weights_converted_once(tmp_path: Path, dtype: torch.dtype, precision: str) -> None:
    state = {n: (t * 1.7).to(dtype) for n, t in changed_state().items() if n != "head.weight"}
    file = write(tmp_path / "w.safetensors", state)
    with engine_in(tmp_path, precision=precision) as engine:
        infinity.load_weights(engine, file)
        # Loading bf16 weights equal to the current ones keeps their residuals.
        keeps_residuals = dtype is torch.bfloat16 and precision == "bf16"
        found = without(values(engine) if keeps_residuals else masters(engine), "head.weight")
        assert all(torch.equal(t, state[n].to(t.dtype)) for n, t in found.items())


def test_unchanged_bf16_values_keep_residuals(tmp_path: Path) -> None:
    with engine_in(tmp_path, precision="bf16") as engine:
        train(engine, 2)
        before = masters(engine)
        state = read_saved(engine.save_weights(tmp_path / "out"))
        infinity.load_weights(engine, tmp_path / "out")
        assert same(masters(engine), before)
        state["norm.weight"][0] = 5.0
        infinity.load_weights(engine, write(tmp_path / "w.safetensors", state))
        after = masters(engine)
        assert after["norm.weight"][0] == 5.0
        after["norm.weight"][0] = before["norm.weight"][0]
        assert same(after, before)


def test_truncated_file_error_gives_progress(tmp_path: Path) -> None:
    """Truncated after its header was checked; with a mapped file the process would be killed."""
    for target, read_values in targets(tmp_path):
        file = write(tmp_path / "w.safetensors", without(changed_state(), "head.weight"))

        def truncate(name: str, file: Path = file) -> str:
            os.truncate(file, 8000)
            return name

        with pytest.raises(MachineError, match=r"w\.safetensors ends after .* were loaded before"):
            infinity.load_weights(target, file, rename=truncate)
        file = write(tmp_path / "w.safetensors", without(changed_state(), "head.weight"))
        infinity.load_weights(target, file)
        assert same(read_values(), changed_state())


# --- modules on the meta device --------------------------------------------------------------


def open_files(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    found = [os.readlink(link) for link in links if os.path.exists(link)]
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("build", ["meta", "Init"])
@every_precision
def test_meta_module_filled_by_initialize(tmp_path: Path, build: str, precision: str) -> None:
    state = changed_state()
    out = tmp_path / "out"
    out.mkdir()
    write(out / "model.safetensors", without(state, "embedding.weight"))
    with torch.device("meta") if build == "meta" else infinity.Init(threshold_bytes=64):
        model = small_model()
    bad = write(tmp_path / "bad.safetensors", without(state) | {"norm.bias": torch.ones(2)})
    with pytest.raises(ConfigError, match="has shape"):
        infinity.load_weights(model, bad)
    assert not open_files(tmp_path)
    infinity.load_weights(model, out)
    assert open_files(out)
    with engine_in(tmp_path, model=model, precision=precision) as engine:
        assert same(masters(engine), state)
        assert not open_files(out), "closed once everything is read"
        train(engine, 1)


def test_unused_meta_module_closes_files(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors", without(changed_state(), "head.weight"))
    with torch.device("meta"):
        model = small_model()
    infinity.load_weights(model, tmp_path / "w.safetensors")
    del model
    assert not open_files(tmp_path)
