"""Outlines walk as modules do, and planning with them does not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config.schema import load_config
from infinity.cutting import cut_model, groups_of
from infinity.model.shapes import (
    FAMILIES,
    Outline,
    Shape,
    build_skeleton,
    is_list,
    is_lookup,
    target_of,
)
from infinity.plan.machine import may_have_gpu

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "num_local_experts": 4, "n_embd": 64, "n_layer": 3,
}  # fmt: skip


class Bag(nn.Module):
    """Any module that an outline may stand for."""


def built(outline: Outline, made: dict[int, nn.Parameter] | None = None) -> nn.Module:
    """The module of an outline, on meta; parameters that are shared stay shared."""
    made = {} if made is None else made
    if is_lookup(outline):
        shape = outline.own["weight"].shape
        module: nn.Module = nn.Embedding(*shape, device="meta")
    else:
        module = nn.ModuleList() if is_list(outline) else Bag()
    for name, shape in outline.own.items():
        found = made.setdefault(id(shape), nn.Parameter(torch.empty(shape.shape, device="meta")))
        module.register_parameter(name, found)
    for name, child in outline.below.items():
        module.add_module(name, built(child, made))
    return module


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_is_cut_like_the_module(family: str, tied: bool) -> None:
    config = SMALL | {"model_type": family, "tie_word_embeddings": tied}
    outline = build_skeleton(config)
    assert isinstance(outline, Outline)
    module = built(outline)
    for walk in ("named_parameters", "named_modules", "named_children"):
        names = [name for name, _ in getattr(module, walk)()]
        assert [name for name, _ in getattr(outline, walk)()] == names
    for ours, theirs in zip(outline.modules(), module.modules(), strict=True):
        own = [tuple(p.shape) for p in theirs.parameters(recurse=False)]
        assert [p.shape for p in ours.parameters(recurse=False)] == own
        assert sum(1 for _ in ours.children()) == sum(1 for _ in theirs.children())
    settings = load_config({})
    cuts = [cut_model(m, settings, groups_of(m, settings), None) for m in (outline, module)]
    assert cuts[0].layouts == cuts[1].layouts
    assert cuts[0].dtype_names == cuts[1].dtype_names
    targets = [target_of("", m, config) for m in (outline, module)]
    assert targets[0].heads == targets[1].heads
    assert targets[0].lookups == targets[1].lookups
    assert targets[0].shares == targets[1].shares


def test_shapes_are_parameters_to_whoever_plans() -> None:
    shape = Shape((3, 5, 7))
    tensor = torch.empty(3, 5, 7)
    assert (shape.numel(), shape.dim(), shape.nbytes) == (105, 3, tensor.nbytes)
    assert f"torch.{shape.dtype}" == str(tensor.dtype)
    with pytest.raises(OverflowError, match="2147483647 x 4294967296"):
        Shape((2**31 - 1, 2**32))


@pytest.mark.skipif(may_have_gpu(), reason="torch must be asked what GPU there is")
def test_planning_for_shapes_does_not_import_torch(tmp_path: Path) -> None:
    """Importing it takes longer than the plan."""
    config = SMALL | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ours.json").write_text(json.dumps({"precision": "bf16", "prefetch_units": 1}))
    ours = f"{tmp_path}/ours.json"
    code = (
        "import sys\n"
        "from infinity.cli.main import app\n"
        "sizes = ['--device', '24GiB', '--host', '64GiB', '--disk', '2TiB']\n"
        f"for words in (['7b'], ['{tmp_path}'], ['{tmp_path}/config.json'],\n"
        f"              ['{ours}', '--model', '1.3b'], ['70b', '--tokens', '32768', '--json']):\n"
        "    app(['plan', *words, *sizes], standalone_mode=False)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("bytes a parameter") >= 4
