"""Tests of how ranks read transformers' weight files, and how they save peft adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.families import FAMILIES
from support.ranks import make_engine, on_ranks
from support.trainer import make_config, same_bits
from torch import Tensor

from infinity import _initialize
from infinity.distributed.context import DistContext
from infinity.errors import InfinityError
from infinity.integrations.huggingface.build import load_model
from infinity.integrations.huggingface.save import save_pretrained
from infinity.model.weight_files import WeightFiles

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILY = FAMILIES["llama"]


def add_lora(model: Any, modules_to_save: list[str]) -> Any:
    torch.manual_seed(11)
    lora_config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                             modules_to_save=modules_to_save, task_type="CAUSAL_LM")  # fmt: skip
    return peft.get_peft_model(model, lora_config)


def add_expert_lora(model: Any) -> Any:
    torch.manual_seed(11)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora_config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks)
    return peft.get_peft_model(model, lora_config)


def save_adapters(count: int, folder: Path, kind: str) -> dict[str, bytes]:
    """Return the saved files after a step of two batches."""
    nvme = folder / "nvme"
    nvme.mkdir(parents=True)
    config = make_config(("disk", "host", "disk"), gradient_accumulation_steps=2 // count)
    if kind == "llama":
        models = [add_lora(FAMILY.build(), ["lm_head"]) for _ in range(count)]
    else:
        models = [add_expert_lora(FAMILIES[kind].build()) for _ in range(count)]
        config = {**config, "frozen": {"format": "nf4"}}

    def work(ranks: DistContext) -> list[Path]:
        with make_engine(ranks, models[ranks.rank], config, nvme) as engine:
            for batch in FAMILY.batches(2)[ranks.rank :: count]:
                engine.backward(engine(**batch).loss)
                engine.step()
            files = save_pretrained(engine, folder / "saved")
            existing_file = folder / "a file"
            existing_file.touch()
            with pytest.raises((InfinityError, OSError)):
                save_pretrained(engine, existing_file)
            second_save = save_pretrained(engine, folder / "again")
            assert [path.name for path in second_save] == [path.name for path in files]
            return files

    for files in on_ranks(count, work):
        assert [path.name for path in files] == ["adapter_model.safetensors"]
    return {path.name: path.read_bytes() for path in (folder / "saved").iterdir()}


@pytest.mark.parametrize("kind", ["llama with adapters", "experts that are fused"])
def test_transformers_files_are_read_once_across_ranks(
    kind: str, tmp_path: Path, bytes_read: list[int]
) -> None:
    """Also if a tensor of the model is stacked from many of the files' tensors."""
    source = tmp_path / "model"
    if kind == "llama with adapters":
        plain = FAMILY.build()
    else:
        shape = FAMILIES["mixtral"].config()
        shape.hidden_size, shape.intermediate_size = 64, 128
        plain = transformers.MixtralForCausalLM(shape)
    plain.save_pretrained(source)
    models = [load_model(source) for _ in range(2)]
    if kind == "llama with adapters":
        models = [add_lora(model, []) for model in models]
    config = make_config(("host", "host", "host"))
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    bytes_read.clear()

    def work(ranks: DistContext) -> dict[str, Tensor]:
        with make_engine(ranks, models[ranks.rank], config, nvme) as engine:
            return dict(engine.state_dict())

    expected = dict(plain.state_dict())
    for found in on_ranks(2, work):
        if kind != "llama with adapters":  # get_peft_model renames the base weights
            assert found.keys() == expected.keys()
            assert all(same_bits(found[name], expected[name]) for name in expected)
    in_files = sum(f.numel * f.dtype.itemsize for f in WeightFiles(source).facts.values())
    ends = sum(2 * min(p.numel(), _initialize._COMPARED) * p.itemsize for p in plain.parameters())
    assert sum(bytes_read) == in_files + 2 * ends  # both ranks compare both ends of each parameter


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_adapter_files_match_single_rank(kind: str, tmp_path: Path) -> None:
    """Also of expert stacks in 4 bits, of which each rank stores a shard."""
    of_one, of_two = save_adapters(1, tmp_path / "1", kind), save_adapters(2, tmp_path / "2", kind)
    assert of_two == of_one
