"""Tests of importing ZeRO checkpoints: real ones of DeepSpeed 0.19.8, synthetic, and hostile."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import infinity
from infinity.checkpoint.reader import CheckpointReader, join
from infinity.cli.main import app
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.deepspeed.import_checkpoint import import_deepspeed

DATA = Path(__file__).parents[2] / "data/deepspeed"
SHAPES = OrderedDict(
    {"emb": torch.Size([7, 3]), "w": torch.Size([5, 5]), "none": torch.Size([0, 2]),
     "b": torch.Size([3]), "s": torch.Size([])}
)  # fmt: skip
DECAY = ("emb", "w", "none")


def read_tensors(root: Path, tag: str) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors of a checkpoint by "stream/name", and its manifest."""
    found = {}
    with CheckpointReader(root, tag) as reader:
        assert list(reader.verify()) == []
        for stream in {record.stream for record in reader.manifest.files} - {"index"}:
            for name in reader.names(stream):
                facts = reader.facts(stream, name)
                flat = torch.empty(facts.numel, dtype=facts.dtype)
                reader.read_into(stream, name, 0, flat.view(torch.uint8))
                found[f"{stream}/{name}"] = flat.view(facts.shape)
        return found, reader.manifest


def test_import_real_stage_1_and_3_checkpoints_agree(tmp_path: Path) -> None:
    """The model and its training are the same, so the stages differ only in file layout."""
    files = DATA / "z1-fp32/global_step3"
    module = torch.load(files / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    results = {}
    for stage in (1, 3):
        root = tmp_path / f"{stage}"
        result = import_deepspeed(DATA / f"z{stage}-fp32", root, "0.1.0")
        assert (result.stage, result.ranks, result.global_steps) == (stage, 1, 3)
        assert result.path == root / "global_step3"
        assert (root / "latest").read_text() == "global_step3\n"
        results[stage], manifest = read_tensors(root, "global_step3")
        records = {p.name: p for p in manifest.parameters}
        assert records["emb.weight"].aliases == ("head.weight",)
        assert records["emb.weight"].step == 3
        assert not records["l2.weight"].trained
        assert (manifest.precision, manifest.moments) == ("fp32", ("fp32", "fp32"))
        assert manifest.rule == "AdamW"
        assert [b.name for b in manifest.buffers] == ["cnt"]
    for name in ("emb.weight", "l1.weight", "l1.bias", "ln.weight", "ln.bias"):
        assert torch.equal(results[1][f"model/{name}"], module[name])
        assert results[1][f"moment2/{name}"].gt(0).any()
    assert torch.equal(results[1]["frozen/l2.weight"], module["l2.weight"])
    assert torch.equal(results[1]["buffers/cnt"], torch.arange(3.0))
    assert results[1].keys() == results[3].keys()
    for name in results[1]:
        assert torch.allclose(results[1][name], results[3][name], rtol=1e-5, atol=1e-7), name


def test_import_real_bf16_checkpoints_of_two_ranks(tmp_path: Path) -> None:
    """Weights equal those DeepSpeed computed with; residuals hold the extra bits of masters."""
    model = DATA / "z2-bf16-w2/global_step3/mp_rank_00_model_states.pt"
    module = torch.load(model, weights_only=True)["module"]
    results = {}
    for stage in (2, 3):
        result = import_deepspeed(DATA / f"z{stage}-bf16-w2", tmp_path / f"{stage}", "0.1.0")
        assert (result.stage, result.ranks, len(result.moments)) == (stage, 2, 2)
        results[stage], manifest = read_tensors(result.path.parent, "global_step3")
        assert (manifest.precision, manifest.rule) == ("bf16", "AdamW")
        for name in ("emb.weight", "l1.weight", "l1.bias", "ln.weight", "ln.bias"):
            assert torch.equal(results[stage][f"model/{name}"], module[name])
            assert results[stage][f"residual/{name}"].ne(0).any()
        assert torch.equal(results[stage]["frozen/l2.weight"], module["l2.weight"])
    assert results[2].keys() == results[3].keys()
    assert all(torch.equal(value, results[3][name]) for name, value in results[2].items())


# --- synthetic checkpoints of several ranks ----------------------------------------------------


@pytest.fixture(autouse=True)
def _check_fake_modules_removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the fake DeepSpeed modules are removed before anything is read."""
    yield
    assert not fake_modules()


def fake_classes() -> dict[str, type]:
    """Return fake classes that pickle under the names of DeepSpeed classes."""
    by_name = {}
    for path in (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ):
        module, _, name = path.rpartition(".")
        parts = module.split(".")
        for i in range(len(parts)):
            sys.modules.setdefault(".".join(parts[: i + 1]), types.ModuleType(parts[i]))
        base = (int,) if name == "ZeroStageEnum" else ()
        by_name[name] = type(name, base, {"__module__": module})
        setattr(sys.modules[module], name, by_name[name])
    return by_name


def fake_modules() -> list[str]:
    """Return the loaded `deepspeed` modules, without packages that only share the prefix."""
    return [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]


def remove_fake_modules() -> None:
    for name in fake_modules():
        del sys.modules[name]


def random_tensors(seed: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(seed)
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {kind: {n: torch.randn(shape) for n, shape in SHAPES.items()} for kind in kinds}


def write_synthetic(
    directory: Path,
    stage: int,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
    **change: Any,
) -> dict[str, dict[str, Tensor]]:
    """Write files in DeepSpeed's layout, from its definition of partitions; return the values."""
    expected, fakes = random_tensors(stage), fake_classes()
    directory.mkdir(parents=True)
    frozen = torch.arange(7.0).to(dtype)
    groups = [[n for n in SHAPES if n in DECAY], [n for n in SHAPES if n not in DECAY]]
    for rank in range(ranks):
        flats = {
            kind: [partition(expected[kind], g, stage, rank, ranks, gap) for g in groups]
            for kind in expected
        }
        state = {
            i: {"step": torch.tensor(9.0), **{k: flats[k][i] for k in ("exp_avg", "exp_avg_sq")}}
            for i in range(len(groups))
        }
        base = {"state": state, "param_groups": [{"lr": 0.1}] * 2}
        optimizer: dict[str, Any] = {
            "loss_scaler": fakes["LossScaler"](),
            "zero_stage": fakes["ZeroStageEnum"](stage),
            "partition_count": ranks if stage == 3 else [ranks] * 2,
            "slices": fakes["fragment_address"](),
        }
        optimizer["loss_scaler"].cur_scale = 1.0
        if stage == 3:
            optimizer |= {"optimizer_state_dict": base, "fp32_flat_groups": flats["master"]}
        else:
            partitions = [
                unpadded_partition(expected["master"], g, rank, ranks, gap) for g in groups
            ]
            if gap:
                optimizer["param_alignment_paddings"] = [[gap] * len(g) for g in groups]
            optimizer |= {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": partitions,
            }
        optimizer |= change.get("optimizer", {})
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, directory / name)
        if stage < 3 and rank:
            continue
        size = -(-7 // ranks)
        padded = torch.cat([frozen, frozen.new_zeros(size * ranks - 7)])
        module = {n: v.to(dtype) if stage < 3 else torch.empty(0, dtype=dtype)
                  for n, v in expected["master"].items()}  # fmt: skip
        module["fixed"] = frozen if stage < 3 else frozen[:0]
        module["tied"] = module["emb"]
        module["mask"] = torch.tensor([True, False])
        model: dict[str, Any] = {
            "module": OrderedDict(module),
            "buffer_names": ["mask"],
            "param_shapes": [OrderedDict((n, SHAPES[n]) for n in group) for group in groups],
            "frozen_param_shapes": {"fixed": torch.Size([7])},
            "frozen_param_fragments": {"fixed": padded[rank * size :][:size]},
            "shared_params": {"tied": "emb"},
            "global_steps": 11,
            "skipped_steps": 2,
            **change.get("model", {}),
        }
        zero = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, directory / f"{zero}mp_rank_00_model_states.pt")
    remove_fake_modules()
    return expected


def partition(
    tensors: dict[str, Tensor], group: list[str], stage: int, rank: int, ranks: int, gap: int
) -> Tensor:
    if stage == 3:
        flats = []
        for name in group:
            flat = tensors[name].reshape(-1)
            size = -(-flat.numel() // ranks)
            padded = torch.cat([flat, torch.zeros(size * ranks - flat.numel())])
            flats.append(padded[rank * size : (rank + 1) * size])
        return torch.cat(flats)
    flat = torch.cat([nn.functional.pad(tensors[name].reshape(-1), (0, gap)) for name in group])
    align = 2 * ranks
    flat = torch.cat([flat, torch.zeros(-flat.numel() % align)])
    return flat.view(ranks, -1)[rank].clone()


def unpadded_partition(
    tensors: dict[str, Tensor], group: list[str], rank: int, ranks: int, gap: int
) -> Tensor:
    """Return the partition without padding, which is at the end of the last rank."""
    total = sum(prod(SHAPES[name]) + gap for name in group)
    padded = partition(tensors, group, 1, rank, ranks, gap)
    return padded[: max(total - rank * padded.numel(), 0)].clone()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_import_synthetic_checkpoint_is_bitwise_equal(
    tmp_path: Path, stage: int, ranks: int, dtype: torch.dtype
) -> None:
    expected = write_synthetic(tmp_path / "ds/t", stage, ranks, dtype)
    result = import_deepspeed(tmp_path / "ds", tmp_path / "out", "0.1.0", "t")
    assert (result.ranks, result.moments) == (ranks, ("exp_avg", "exp_avg_sq"))
    found, manifest = read_tensors(tmp_path / "out", "t")
    for name, master in expected["master"].items():
        weight = found[f"model/{name}"]
        assert weight.dtype is dtype
        if dtype is torch.bfloat16:
            weight = join(weight.reshape(-1), found[f"residual/{name}"].reshape(-1))
        elif dtype is torch.float16:
            assert torch.equal(weight, master.to(dtype))
            weight = found[f"master/{name}"]
        assert torch.equal(weight.view(master.shape), master)
        assert torch.equal(found[f"moment1/{name}"], expected["exp_avg"][name])
        assert torch.equal(found[f"moment2/{name}"], expected["exp_avg_sq"][name])
    assert torch.equal(found["frozen/fixed"], torch.arange(7.0).to(dtype))
    assert torch.equal(found["buffers/mask"], torch.tensor([True, False]))
    precisions = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    assert manifest.precision == precisions[dtype]
    assert manifest.global_steps == 11
    assert {p.step for p in manifest.parameters if p.trained} == {9}
    assert next(p.aliases for p in manifest.parameters if p.name == "emb") == ("tied",)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_import_skips_alignment_padding(tmp_path: Path, ranks: int) -> None:
    expected = write_synthetic(tmp_path / "t", 2, ranks, torch.float32, gap=3)
    import_deepspeed(tmp_path / "t", tmp_path / "out", "0.1.0")
    found, _ = read_tensors(tmp_path / "out", "t")
    for name, master in expected["master"].items():
        assert torch.equal(found[f"model/{name}"], master)
        assert torch.equal(found[f"moment2/{name}"], expected["exp_avg_sq"][name])


def test_import_without_moments_keeps_weights(tmp_path: Path) -> None:
    empty = {"state": {}, "param_groups": []}
    write_synthetic(tmp_path / "t", 2, 2, optimizer={"base_optimizer_state": empty})
    result = import_deepspeed(tmp_path / "t", tmp_path / "out", "0.1.0")
    assert result.moments == ()
    found, manifest = read_tensors(tmp_path / "out", "t")
    assert not any(key.startswith("moment") for key in found)
    assert {p.step for p in manifest.parameters if p.trained} == {9}  # of 11, 2 were skipped


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("universal", [False, True])
def test_load_deepspeed_checkpoint_error_names_import_command(
    tmp_path: Path, universal: bool
) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "checkpoint": {"load_universal": universal},
    }
    root = DATA / "z1-fp32"
    if universal:  # DeepSpeed looks for this name, not for `latest`
        root = tmp_path
        (root / "latest_universal").write_text("t")
        (root / "t/zero").mkdir(parents=True)
    with infinity.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
        for tag in (None, "t") if universal else (None,):
            with pytest.raises(CheckpointError, match=r"wrote\n.*import-deepspeed .* OUT"):
                engine.load_checkpoint(root, tag)


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def import_failure(directory: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_deepspeed(directory, out, "0.1.0")
    assert not out.exists()
    return str(caught.value)


def test_import_does_not_execute_pickled_code(tmp_path: Path) -> None:
    target = tmp_path / "made by a checkpoint"
    changes: list[dict[str, Any]] = [
        {"optimizer": {"x": Evil(target)}},
        {"model": {"x": [Evil(target)]}},
    ]
    for change in changes:
        write_synthetic(tmp_path / "t", 1, 1, **change)
        fake_classes()  # as if DeepSpeed were installed: its classes could be found
        text = import_failure(tmp_path / "t", tmp_path / "out")
        remove_fake_modules()
        assert "cannot be read without running code" in text
        assert not target.exists()
        shutil.rmtree(tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer": {"zero_stage": 4}}, "stage is 4"),
        ({"optimizer": {"zero_stage": "1"}}, "stage is '1'"),
        ({"optimizer": {"partition_count": [3, 3]}}, "3"),
        ({"optimizer": {"single_partition_of_fp32_groups": [torch.ones(2), torch.ones(2)]}},
         "'emb' has 21 elements, but the files have 4"),
        ({"optimizer": {"single_partition_of_fp32_groups": [torch.ones(99), torch.ones(9)]}},
         "elements, but the files have 3"),
        ({"optimizer": {"single_partition_of_fp32_groups": "x"}}, "no list of flat tensors"),
        ({"model": {"param_shapes": "x"}}, "param_shapes is no list"),
        ({"model": {"module": 1}}, "no tensors under 'module'"),
        ({"model": {"shared_params": {"tied": "nobody"}}}, "tied to 'nobody'"),
        ({"model": {"global_steps": -1}}, "global_steps is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_import_invalid_fields_are_refused(tmp_path: Path, change: Any, text: str) -> None:
    write_synthetic(tmp_path / "t", 1, 2, **change)
    assert text in import_failure(tmp_path / "t", tmp_path / "out")


def test_import_missing_or_damaged_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_synthetic(tmp_path / "t", 3, 3)
    middle = tmp_path / "t/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = middle.read_bytes()
    middle.unlink()
    assert "ranks are missing" in import_failure(tmp_path / "t", out)
    for damaged in (b"", data[:-100], b"x" * 1000, pickle.dumps({"a": 1})):
        middle.write_bytes(damaged)
        assert str(middle) in import_failure(tmp_path / "t", out)
    middle.write_bytes(data)
    (tmp_path / "t/zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(data)
    assert "model-parallel" in import_failure(tmp_path / "t", out)
    (tmp_path / "t/zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    (tmp_path / "t/layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    assert "experts" in import_failure(tmp_path / "t", out)
    with pytest.raises(ConfigError, match="is not a directory"):
        import_deepspeed(tmp_path / "nowhere", out, "0.1.0")
    with pytest.raises(ConfigError, match="is not a plain name"):
        import_deepspeed(tmp_path, out, "0.1.0", "../t")


def test_import_command_reports_result(tmp_path: Path) -> None:
    arguments = ["checkpoint", "import-deepspeed", str(DATA / "z3-fp32"), str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "6 parameters of step 3 with Adam's moments, from ZeRO 3 of 1 rank(s)" in result.stdout
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 5
    assert "exists already" in again.stderr
    assert "Traceback" not in again.stderr
