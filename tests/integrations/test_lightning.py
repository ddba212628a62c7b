"""Tests of `InfinityStrategy` against Lightning's single-device strategy: same data, seed, fp32.

Lightning is not in the development extra; `make test-doors` installs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small import ON_DISK, masters
from torch import Tensor

pytest.importorskip("lightning", reason="Lightning is not installed: make test-doors")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import lightning
import lightning_module as example
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging

from infinity.errors import CheckpointError, ConfigError, InfinityWarning
from infinity.integrations.lightning import InfinityStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


class History(Callback):  # type: ignore[misc]
    """Record metrics after each step and each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.validated: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validated.append(float(trainer.callback_metrics["val_loss"]))


def strategy_on(path: Path, **more: Any) -> InfinityStrategy:
    return InfinityStrategy({"nvme_path": str(path), "placement": ON_DISK, **more})


def run(
    strategy: Any, module: Any = None, *, resume: Any = None, shuffle: bool = True, **changed: Any
) -> tuple[Any, History]:
    history = History()
    callbacks = [history, *changed.pop("callbacks", [])]
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    settings |= {"devices": 1, **changed}
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **settings},
    )  # fmt: skip
    torch.manual_seed(0)
    module = example.Classifier() if module is None else module
    train = example.loader(80, 1, shuffle=shuffle)  # 5 batches: the last window has one
    trainer.fit(module, train, example.loader(32, 2), ckpt_path=resume)
    return trainer, history


def test_fit_matches_lightning(tmp_path: Path) -> None:
    stock, expected = run("auto")
    strategy = strategy_on(tmp_path)
    offloaded, found = run(strategy)
    assert found.rates == expected.rates
    assert found.losses == pytest.approx(expected.losses, rel=2e-5)
    assert found.validated == pytest.approx(expected.validated, rel=2e-5)
    assert (offloaded.global_step, strategy.engine.global_steps) == (stock.global_step,) * 2
    plain = stock.lightning_module.state_dict()
    for name, value in offloaded.lightning_module.state_dict().items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=2e-5)
    assert strategy.engine.counters()["disk_write"] > 0
    strategy.close(restore=True)
    x = torch.randn(3, example.WIDTH)
    torch.testing.assert_close(
        offloaded.lightning_module.eval()(x), stock.lightning_module.eval()(x), rtol=0, atol=1e-4
    )


class Chained(example.Classifier):  # type: ignore[misc]
    """Warm-up, then decay, in a sequential schedule; and clipping that ends after four steps."""

    def configure_optimizers(self) -> dict[str, Any]:
        schedules = torch.optim.lr_scheduler
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        stages = [
            schedules.LinearLR(optimizer, 0.1, total_iters=3),
            schedules.ExponentialLR(optimizer, 0.9),
        ]
        schedule = schedules.SequentialLR(optimizer, stages, [3])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = 0.01 if self.global_step < 4 else 0.0
        self.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")


def test_nested_schedules_and_changing_norm_match_lightning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, expected = run("auto", Chained(), gradient_clip_val=None)
    torch.manual_seed(0)
    strategy = strategy_on(tmp_path)
    _, found = run(strategy, Chained(), gradient_clip_val=None)
    strategy.close()
    assert len(set(found.rates)) > 3
    assert found.rates == expected.rates
    assert found.losses == pytest.approx(expected.losses, rel=2e-5)


def test_checkpoint_of_other_strategy_resets_optimizer(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    run("auto", max_epochs=1, callbacks=[checkpoints], enable_checkpointing=True)
    strategy = strategy_on(tmp_path)
    with pytest.warns(InfinityWarning, match="the optimizer starts anew"):
        trainer, _ = run(strategy, resume=tmp_path / "last.ckpt", max_epochs=2)
    strategy.close()
    assert trainer.global_step == 6


def test_resumed_run_bitwise_equal(tmp_path: Path) -> None:
    def settings(out: Path) -> dict[str, Any]:
        checkpoints = ModelCheckpoint(out, save_last=True, save_top_k=-1, monitor="val_loss")
        return {"callbacks": [checkpoints], "enable_checkpointing": True}

    through = strategy_on(tmp_path)
    _, expected = run(through, **settings(tmp_path / "a"))
    expected_masters = masters(through.engine)
    through.close()
    short = strategy_on(tmp_path)
    run(short, max_epochs=2, **settings(tmp_path / "b"))
    short.close()
    again = strategy_on(tmp_path)
    trainer, found = run(again, resume=tmp_path / "b" / "last.ckpt", **settings(tmp_path / "b"))
    assert found.losses == expected.losses[-len(found.losses) :]
    assert len(found.losses) == 5
    for name, value in masters(again.engine).items():
        assert torch.equal(value, expected_masters[name]), name
    tested = trainer.test(ckpt_path="best", dataloaders=example.loader(32, 2))
    assert tested[0]["val_loss"] == pytest.approx(min(expected.validated[1:]), rel=1e-6)
    again.close()
    (tmp_path / "b" / "last.ckpt" / "lightning.ckpt").unlink()
    with pytest.raises(CheckpointError, match="written last"):
        run(strategy_on(tmp_path), resume=tmp_path / "b" / "last.ckpt")


def test_validate_before_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, plain = example.Classifier(), example.Classifier()
    plain.load_state_dict(module.state_dict())
    strategy = strategy_on(tmp_path)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet}
    trainer = lightning.Trainer(strategy=strategy, **settings)
    found = trainer.validate(module, example.loader(32, 2))
    assert found == [
        pytest.approx(lightning.Trainer(**settings).validate(plain, example.loader(32, 2))[0])
    ]
    assert strategy.engine.plan.tier_bytes
    trainer.fit(module, example.loader(32, 1), example.loader(32, 2))
    assert strategy.engine.global_steps == 2
    assert all(parameter.requires_grad for parameter in module.parameters())
    weights = tmp_path / "weights.ckpt"
    trainer.save_checkpoint(weights, weights_only=True)
    assert {file.suffix for file in weights.iterdir()} == {".safetensors", ".ckpt"}
    strategy.close()


class ByHand(example.Classifier):  # type: ignore[misc]
    """Manual optimization with a step every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, index) / 2)
        if index % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_matches_lightning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = ByHand()
    torch.manual_seed(0)
    offloaded = ByHand()
    by_hand = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    _, expected = run("auto", stock, **by_hand)
    strategy = strategy_on(tmp_path, gradient_accumulation_steps=2)
    _, found = run(strategy, offloaded, **by_hand)
    assert found.losses == pytest.approx(expected.losses, rel=2e-5)
    strategy.close()


@pytest.mark.parametrize(
    ("config", "changed", "words"),
    [
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping is 1.0 in the conf.*0.5 by the Tr"),
        ({"precision": "fp32"}, {"precision": "bf16-true"}, "precision is fp32"),
        ({}, {"precision": "64-true"}, "Trainer.precision='64'"),
        ({}, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        ({"optimizer": {"type": "SGD"}}, {}, "two optimizers"),
        ({}, {"devices": 2}, "for one device, and this run has 2"),
        ({}, {"callbacks": [StochasticWeightAveraging(1e-2)]}, "StochasticWeightA.* not supported"),
    ],
)
def test_unsupported_settings_raise(
    tmp_path: Path, config: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(strategy_on(tmp_path, **config), **changed)


def test_device_of_trainer() -> None:
    strategy = InfinityStrategy()
    assert strategy.root_device == torch.device("cpu")
    strategy.parallel_devices = [torch.device("cuda", 1)]  # as the Trainer sets it for devices=[1]
    assert strategy.root_device == torch.device("cuda", 1)
    assert InfinityStrategy(device="cpu").root_device == torch.device("cpu")


def test_example_fits_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ["lightning_module.py", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*script, "--epochs", "1"])
    example.main()
    assert "disk" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*script, "--epochs", "2", "--resume"])
    example.main()
    assert "val_loss" in capsys.readouterr().out
    assert (tmp_path / "out" / "last.ckpt" / "lightning.ckpt").is_file()
