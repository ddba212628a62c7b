"""Tests of compiled blocks: one graph per block class, and equal bits in every placement.

The compiler's eager backends trace and guard as Inductor does and compute as torch does, so they
must give torch's bits. Inductor fuses and rounds differently; it is compared with itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import components
from support.models import Batch, Case
from support.trainer import Run, make_config, make_device, train, train_reference
from torch import Tensor, nn

from infinity.errors import ConfigError, TrainingError

dynamo = pytest.importorskip("torch._dynamo")
WIDTH = 16
ON_DISK = ("disk", "disk", "disk")


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, block_class: Any = Mixer, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block_class() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(index: int) -> Batch:
    return Batch((torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)),))


CASE = Case("stack", lambda _: Stack(), batch)


@pytest.fixture(autouse=True)
def reset_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    # The compiler uses tqdm, whose monitor starts a thread.
    progress_bar = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(progress_bar, "monitor_interval", 0)
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def train_compiled(
    device: str, backend: str, activations: dict[str, Any], placement: tuple[str, str, str]
) -> tuple[Any, list[int]]:
    """Run four steps; return the results, and the number of graphs after each step."""
    config = make_config(placement, activations=activations, prefetch_units=0)
    graphs = []
    with Run(CASE.build(), config, device=make_device(device)) as run:
        engine = run.engine
        assert not components(engine).forwards.num_compiled
        components(engine).forwards.compile_units(backend=backend)
        assert components(engine).forwards.num_compiled == 4
        losses = []
        for index in range(4):
            loss = CASE.batch(index).call(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
        assert engine.last_report is not None
        assert engine.last_report.moved == engine.forecast()
        assert engine.last_report.mispredictions == 0
        return (losses, run.masters()), graphs


OFFLOAD = {"checkpoint": "units", "offload": "disk", "tokens": 4, "min_bytes": 1}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "activations", [{}, OFFLOAD, {"slices": 2}], ids=["plain", "checkpoint", "sliced"]
)
def test_compiled_blocks_match_torch_with_one_graph(
    activations: dict[str, Any], backend: str
) -> None:
    uncompiled = {"activations": activations}
    expected = train(CASE.build(), CASE.batches(4), make_config(**uncompiled), device="cpu")
    for device in ("cpu", "fake"):
        (losses, masters), graphs = train_compiled(device, backend, activations, ON_DISK)
        assert losses == expected.losses
        assert all(torch.equal(masters[name], v) for name, v in expected.masters.items())
        assert graphs == [1, 1, 1, 1], "one graph for all blocks, steps and devices"
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.big  # a minute with a cold cache
def test_inductor_is_bitwise_equal_across_placements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inductor = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(inductor, "compile_threads", 1)  # a pool would outlive the test
    try:
        torch.compile(lambda t: t + 1, backend="inductor")(torch.ones(2))
    except Exception as error:  # no working C++ compiler
        pytest.skip(f"inductor does not work here: {str(error).splitlines()[0]}")
    dynamo.reset()
    dynamo.utils.counters.clear()
    plain = train_reference(CASE.build(), CASE.batches(4), make_config())
    resident, _ = train_compiled("cpu", "inductor", {}, ("device", "device", "device"))
    offloaded, graphs = train_compiled("fake", "inductor", {}, ON_DISK)
    assert offloaded[0] == resident[0]
    assert all(torch.equal(offloaded[1][name], v) for name, v in resident[1].items())
    assert graphs == [1, 1, 1, 1]
    assert offloaded[0] == pytest.approx(plain.losses, rel=1e-5)


def test_compile_option_applies_to_training_only(tmp_path: Path) -> None:
    with Run(CASE.build(), make_config(compile=True), device="cpu") as run:
        assert components(run.engine).forwards.num_compiled == 4
        run.engine.eval()
        with torch.no_grad():
            CASE.batch(0).call(run.engine)
        assert dynamo.utils.counters["stats"]["unique_graphs"] == 0
        original_forward = type(run.model.blocks[0]).forward
    assert run.model.blocks[0].forward.__func__ is original_forward


class GraphBreaking(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:  # depends on data: causes a graph break
            return x
        return super().forward(x)


class TwoExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.experts[1](x)


def test_uncompilable_block_error_names_block() -> None:
    x = torch.randn(4, WIDTH)
    with Run(Stack(GraphBreaking), make_config(ON_DISK), device="cpu") as run:
        components(run.engine).forwards.compile_units(backend="eager")
        with pytest.raises(TrainingError, match=r"'blocks.0' cannot be compiled"):
            run.engine(x)
        assert torch.isfinite(run.model.blocks[0].up.weight).all(), (
            "fetched on access after the error"
        )
    with Run(Stack(TwoExperts), make_config(ON_DISK), device="cpu") as run:
        with pytest.raises(ConfigError, match="no block that can be compiled"):
            components(run.engine).forwards.compile_units(backend="eager")
        with pytest.raises(ConfigError, match="CUDA graphs"):
            components(run.engine).forwards.compile_units(mode="reduce-overhead")
