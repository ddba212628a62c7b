"""Train an unchanged LightningModule with InfinityStrategy: fit, validate, save and resume.

Meant for one GPU with less memory than the model needs, and a fast drive; runs on any CPU in
seconds, with all state on disk as a demonstration. `--resume` continues an interrupted run bit for
bit.

    pip install lightning
    python examples/lightning_module.py [--epochs 3] [--out DIR [--resume]]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from infinity.lightning import InfinityStrategy

WIDTH, CLASSES = 32, 8


class Classifier(lightning.LightningModule):
    """Residual blocks, without any code for offloading."""

    def __init__(self, depth: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                          nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (samples, CLASSES) of points (samples, WIDTH)."""
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self(x).float(), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the loss and the accuracy of a batch."""
        x, y = batch
        logits = self(x).float()
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"], eps=1e-5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def loader(count: int, seed: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return random points, labelled by the largest of their first coordinates."""
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :CLASSES].argmax(1)), batch_size=16, shuffle=shuffle)


def main() -> None:
    """Fit, print the plan, and test the best checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where checkpoints go; default: a temporary one")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        strategy = InfinityStrategy(
            {
                "nvme_path": scratch,
                "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
            }
        )
        out = arguments.out or Path(scratch) / "run"
        checkpoints = ModelCheckpoint(out, monitor="val_loss", save_last=True)
        trainer = lightning.Trainer(
            strategy=strategy, max_epochs=arguments.epochs, gradient_clip_val=1.0,
            callbacks=[checkpoints], accumulate_grad_batches=2, logger=False,
            enable_progress_bar=False, devices=1,
            precision="bf16-true" if torch.cuda.is_available() else 32,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Classifier()
        last = str(out / "last.ckpt") if arguments.resume else None
        trainer.fit(model, loader(512, 1, shuffle=True), loader(128, 2), ckpt_path=last)
        assert strategy.engine is not None
        print(strategy.engine.plan.describe())
        trainer.test(model, loader(128, 3), ckpt_path="best")
        strategy.engine.save_weights(out / "weights")
        strategy.close()


if __name__ == "__main__":
    main()
