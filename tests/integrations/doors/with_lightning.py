"""Script with Lightning's stock DeepSpeedStrategy: fit, validate, save, resume; also without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import lightning_module as example


class OnAnyDevice(DeepSpeedStrategy):
    """DeepSpeedStrategy without its two checks for a GPU."""

    setup_environment = DDPStrategy.setup_environment

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class History(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.validated: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validated.append(float(trainer.callback_metrics["val_loss"]))


def trainer_of(strategy: Any, epochs: int) -> tuple[lightning.Trainer, History]:
    history = History()
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, callbacks=[history],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.5,
        use_distributed_sampler=False,  # it shuffles
    )  # fmt: skip
    return trainer, history


def fit(strategy: Any, epochs: int, resume: Path | None = None) -> tuple[Any, History]:
    trainer, history = trainer_of(strategy, epochs)
    torch.manual_seed(0)
    module = example.Classifier()
    for dropout in (
        submodule for submodule in module.modules() if isinstance(submodule, torch.nn.Dropout)
    ):
        dropout.p = 0.0  # strategies draw different random numbers before the first step
    trainer.fit(module, example.loader(64, 1), example.loader(32, 2), ckpt_path=resume)
    return trainer, history


def main(config: str, folder: Path) -> dict[str, Any]:
    given = json.loads(Path(config).read_text()) | {"zero_allow_untested_optimizer": True}

    def strategy() -> Any:
        return OnAnyDevice(config=json.loads(json.dumps(given)))

    _, plain = fit("auto", 4)
    trainer, uninterrupted = fit(strategy(), 4)
    assert type(trainer.strategy.model).__name__ == "DeepSpeedEngine"
    assert uninterrupted.rates == plain.rates
    for found_values, plain_values in (
        (uninterrupted.losses, plain.losses),
        (uninterrupted.validated, plain.validated),
    ):
        assert len(found_values) == len(plain_values)
        assert all(
            abs(a - b) <= 2e-5 * abs(b) for a, b in zip(found_values, plain_values, strict=True)
        )
    first, _ = fit(strategy(), 2)
    first.save_checkpoint(folder / "two.ckpt")
    _, resumed = fit(strategy(), 4, folder / "two.ckpt")
    assert resumed.losses == uninterrupted.losses[len(uninterrupted.losses) // 2 :]
    trainer.save_checkpoint(folder / "four.ckpt")
    again, _ = trainer_of(strategy(), 4)
    found = again.validate(
        example.Classifier(), example.loader(32, 2), ckpt_path=folder / "four.ckpt", verbose=False
    )
    assert abs(found[0]["val_loss"] - uninterrupted.validated[-1]) < 1e-5, found
    return {"losses": uninterrupted.losses, "validated": uninterrupted.validated}
