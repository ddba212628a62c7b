"""Tests of what scripts do besides calling the engine: torch's results, or a clear error."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import MIXED, ON_DISK, Block, batch, small_engine, small_model
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from infinity.errors import ConfigError, InfinityWarning, TrainingError

WIDTH = 16


def inputs(index: int) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(index))


def check_matches_plain_torch(
    tmp_path: Path, build: Callable[[], nn.Module], loss_of: Callable[[Any], Tensor] = lambda x: x,
    placement: dict[str, str] = ON_DISK, **overrides: Any,
) -> None:  # fmt: skip
    """Check that three steps give the losses of plain torch."""
    torch.manual_seed(0)
    model = build()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for index in range(3):
        loss = loss_of(model(inputs(index)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    torch.manual_seed(0)
    with small_engine(tmp_path, placement, build(), gradient_clipping=0.0, **overrides) as engine:
        found = []
        for index in range(3):
            loss = loss_of(engine(inputs(index)))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)


class Blocks(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() if kind else Block(WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# --- modules -------------------------------------------------------------------------------------


class RunningAverage(Block):
    """Block that updates a running average in a buffer through `.data`."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.average)
        self.average.data.mul_(0.5).add_(y.detach().mean((0, 1)))
        return y


def test_buffer_changed_through_data_is_recomputed_correctly(tmp_path: Path) -> None:
    check_matches_plain_torch(
        tmp_path, partial(Blocks, RunningAverage), activations={"checkpoint": "units"}
    )


class PassesParameterInList(Blocks):
    """Model that passes a parameter to its blocks in a list."""

    class Kind(Block):
        def forward(self, x: Tensor, more: list[Tensor] | None = None) -> Tensor:
            assert more is not None
            return super().forward(x + more[0])

    def __init__(self) -> None:
        super().__init__(partial(self.Kind, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, [self.table])
        return x.square().mean()


def test_parameter_passed_to_blocks_in_list(tmp_path: Path) -> None:
    check_matches_plain_torch(tmp_path, PassesParameterInList, activations={"checkpoint": "units"})


@dataclass(slots=True)
class Output:
    x: Tensor
    more: dict[str, Tensor]


class ReturnsParameter(Blocks):
    def forward(self, x: Tensor) -> Output:
        for block in self.blocks:
            x = block(x)
        return Output(x, {"weight": self.blocks[0].up.weight})


def test_parameter_nested_in_model_output(tmp_path: Path) -> None:
    check_matches_plain_torch(
        tmp_path, ReturnsParameter, lambda out: (out.x @ out.more["weight"].T).square().mean()
    )


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


def test_selective_checkpoint_matches_plain_torch(tmp_path: Path) -> None:
    check_matches_plain_torch(tmp_path, Selective, prefetch_units=1)


def test_transformer_encoder_with_nested_tensors_in_eval(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
    plain, mask = nn.TransformerEncoder(layer, 2).eval(), torch.zeros(4, 6, dtype=torch.bool)
    mask[0, 4:] = True
    expected = plain(inputs(0), src_key_padding_mask=mask)
    with small_engine(tmp_path, model=plain) as engine, torch.no_grad():
        engine.eval()
        found = engine(inputs(0), src_key_padding_mask=mask)
    assert torch.allclose(found[~mask], expected[~mask], atol=1e-6)


def test_weight_view_in_attribute_is_rejected(tmp_path: Path) -> None:
    model = Blocks()
    model.transposed = model.blocks[0].up.weight.t()
    with (
        pytest.raises(ConfigError, match=r"'transposed' and 'blocks.0.up.weight' share memory|"
                      r"'blocks.0.up.weight' and 'transposed' share memory"),
        small_engine(tmp_path, model=model),
    ):  # fmt: skip
        pass


def test_embedding_with_max_norm_is_rejected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH, max_norm=1.0))
    with pytest.raises(ConfigError, match="max_norm"), small_engine(tmp_path, model=model):
        pass


@pytest.mark.parametrize("placement", [ON_DISK, MIXED])
def test_module_added_after_init_is_in_state_dict(
    placement: dict[str, str], tmp_path: Path
) -> None:
    model = small_model()
    with small_engine(tmp_path, placement, model) as engine:
        head = nn.Linear(WIDTH, 50, bias=False)
        head.weight = model.embedding.weight
        model.head = head
        engine.backward(engine(batch(0)))
        engine.step()
        state = model.state_dict()
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        assert state["head.weight"].isfinite().all()


def test_saved_state_dict_loads_with_weights_only(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        file = io.BytesIO()
        torch.save({"model": engine.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["model"]
        assert loaded.keys() == engine.state_dict().keys()
        assert torch.equal(loaded["norm.weight"], engine.state_dict()["norm.weight"])


# --- training loops ------------------------------------------------------------------------------


def test_manually_assigned_grad_is_rejected(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        parameter = next(engine.module.parameters())
        engine.backward(engine(batch(0)))
        parameter.grad = torch.zeros(parameter.shape)
        with pytest.raises(TrainingError, match=r"weight' has a .grad[\s\S]*set_gradient"):
            engine.step()
        assert (engine.micro_step, engine.global_steps) == (0, 0)
        engine.backward(engine(batch(0)))
        engine.step()
        assert engine.global_steps == 1


def test_parameter_removed_from_group_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        engine.optimizer.param_groups[0]["params"].pop()
        engine.backward(engine(batch(0)))
        with pytest.raises(TrainingError, match=r"'norm.bias' has a gradient, and is in no group"):
            engine.step()


def test_chunked_logits_sum_ignores_default_dtype(tmp_path: Path) -> None:
    found = []
    for default in (torch.float32, torch.bfloat16):
        model = small_model()
        torch.set_default_dtype(default)
        try:
            with small_engine(tmp_path, model=model, activations={"logits": "chunked"}) as engine:
                found.append(float(engine(batch(0)).detach()))
        finally:
            torch.set_default_dtype(torch.float32)
    assert found[0] == found[1]


def warnings_of(loop: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in caught if w.category is InfinityWarning]


def test_loop_without_updates_warns(tmp_path: Path) -> None:
    with small_engine(tmp_path, gradient_accumulation_steps=4) as engine:

        def never_step() -> None:
            for _ in range(17):
                engine.backward(engine(batch(0)))

        def step_rarely() -> None:
            engine.zero_grad()
            for _ in range(4):
                engine.backward(engine(batch(0)))
            engine.step()

        assert ["16 backwards, and no" in message for message in warnings_of(never_step)] == [True]
        assert ["4 backwards before one" in message for message in warnings_of(step_rarely)] == [
            True
        ]
        assert warnings_of(step_rarely) != []
    other = small_model()
    with small_engine(tmp_path) as engine:

        def backward_other_model() -> None:
            engine.backward(other(batch(0)))
            engine.step()

        assert [
            "step 1 updates nothing" in message for message in warnings_of(backward_other_model)
        ] == [True]


def test_invalid_loss_or_loss_fn_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(TrainingError, match=r"output\.loss"):
            engine.backward({"loss": engine(batch(0))})
        with pytest.raises(TrainingError, match=r"got a Tensor as its loss_fn"):
            engine.train_batch(batch(0), batch(1))
