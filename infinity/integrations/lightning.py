"""Integration with Lightning: `Trainer(strategy=InfinityStrategy({...}))`, on one device.

Only this module imports lightning; `import infinity` does not need it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.config.schema import Config
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, InfinityWarning, TrainingError
from infinity.integrations.deepspeed.arguments import initialize
from infinity.integrations.deepspeed.settings import read_settings
from infinity.model.parameters import freeze
from infinity.optim.from_torch import adopt_scheduler, choose_instance
from infinity.training.load_weights import load_weights

TAG = "engine"  # folder of the engine's checkpoint in a checkpoint directory
LOOP = "lightning.ckpt"  # file with Lightning's state of a run, written last
_PRECISION = {"bf16": "bf16", "16": "fp16", "32": "fp32"}  # by Lightning's "bf16-true", ...


# Callbacks that average weights, by name: some are missing in older releases of Lightning.
_AVERAGING = frozenset(("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"))


def _lightning() -> Any:
    """Import Lightning under the name that the program has imported already, if any."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ConfigError("infinity.lightning needs Lightning", remedy="pip install lightning")


_pl: Any = _lightning()
_Strategy: Any = importlib.import_module(f"{_pl.__name__}.strategies").SingleDeviceStrategy
_Precision: Any = importlib.import_module(f"{_pl.__name__}.plugins.precision").Precision
_optimizers_of: Any = importlib.import_module(
    f"{_pl.__name__}.core.optimizer"
)._init_optimizers_and_lr_schedulers


class EnginePrecision(_Precision):  # type: ignore[misc]
    """Precision plugin that runs backward, clipping and step by the engine."""

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__()
        self.precision = precision
        self.engine: Engine | None = None
        self.clipping = 0.0  # gradient_clipping of the configuration

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *_: Any, **kwargs: Any) -> None:
        """Run the backward pass; Lightning has already divided the loss by the micro-batches."""
        self.require().backward(tensor, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), then the step of the engine."""
        result = closure()
        if result is None and model.automatic_optimization:
            raise TrainingError(
                "training_step() returned None",
                because="a step without a loss would be one without gradients",
                remedy="leave such batches out where they are made",
            )
        self._after_closure(model, optimizer)
        self.require().step(**kwargs)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Set the global norm that the next step clips to; 0 selects that of the configuration."""
        if not clip_val:
            self.require().gradient_clipping = self.clipping
            return
        if gradient_clip_algorithm != "norm":
            raise ConfigError(
                f"gradient_clip_algorithm={str(getattr(gradient_clip_algorithm, 'value', ''))!r}",
                because="gradients are offloaded before the step; the engine clips by their norm",
                remedy='gradient_clip_algorithm="norm"',
            )
        self.require().gradient_clipping = float(clip_val)

    def forward_context(self) -> Any:
        """Return a null context: the engine casts floating inputs to its precision."""
        return nullcontext()

    def require(self) -> Engine:
        """Return the engine; raise `ConfigError` if there is none."""
        if self.engine is None:
            raise ConfigError("there is no engine yet", remedy="call trainer.fit() first")
        return self.engine


class InfinityStrategy(_Strategy):  # type: ignore[misc]
    """Lightning strategy that offloads weights, gradients and optimizer state to an engine.

    The engine is `strategy.engine`, created by `fit`, or for inference by `validate`, `test` and
    `predict`. It stays open afterwards, so that the module can be called and saved. A checkpoint is
    a directory with the checkpoint of the engine and `lightning.ckpt`; a resumed run is bitwise
    equal to an uninterrupted one. With `save_weights_only` it contains safetensors files.

    Args:
        config: A configuration, of this library or DeepSpeed's: a mapping, a path, or a `Config`.
            The Trainer fills in `precision`, `accumulate_grad_batches` and `gradient_clip_val`;
            values set in both must be equal.
        device: Device of computation. Default: that of the Trainer.

    Example:
        >>> strategy = InfinityStrategy({"nvme_path": "/mnt/nvme"})
        >>> trainer = Trainer(strategy=strategy, precision="bf16-true")
    """

    strategy_name = "infinity"
    _precision_plugin = None  # read by the Trainer to see if a plugin was passed
    parallel_devices: Sequence[torch.device] = ()  # set by the Trainer from `devices`

    def __init__(self, config: Any = None, device: torch.device | str | None = None) -> None:
        super().__init__("cpu")
        self._engine_config = {} if config is None else config
        self._device = None if device is None else torch.device(device)
        self._unfreeze: Callable[[], None] | None = None
        self.engine: Engine | None = None
        self._precision = EnginePrecision()

    def close(self, *, restore: bool = False) -> None:
        """Release threads, files and memory. Idempotent.

        Args:
            restore: Materialize the module's parameters in RAM.
        """
        if self.engine is not None:
            self.engine.close(restore=restore)
        if self._unfreeze is not None:
            self._unfreeze()
        self.engine = self._precision.engine = self._unfreeze = None

    # --- the engine ------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """Device of the module."""
        if self._device is not None:
            return self._device
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def precision_plugin(self) -> Any:
        """Precision plugin of the engine."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            self._precision.precision = str(getattr(plugin, "precision", "32-true"))

    def setup_environment(self) -> None:
        """Set up the accelerator.

        Raises:
            ConfigError: The run has several processes or devices.
        """
        ranks = find_ranks()
        ranks.close()
        num_devices = max(ranks.count, len(self.parallel_devices) if self._device is None else 1)
        if num_devices > 1:
            raise ConfigError(
                f"InfinityStrategy is for one device, and this run has {num_devices}",
                remedy="devices=1; for several GPUs a loop of your own under torchrun, or "
                "InfinityTrainer",
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Create the engine of the module, or reuse it for inference.

        Args:
            trainer: The Trainer.

        Raises:
            ConfigError: `configure_optimizers()` returned several optimizers, a callback averages
                weights, or the configuration and the Trainer contradict each other.
        """
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == "fit"
        for callback in trainer.callbacks if is_fit else ():
            if not _AVERAGING.isdisjoint(cls.__name__ for cls in type(callback).__mro__):
                raise ConfigError(
                    f"the callback {type(callback).__name__} is not supported",
                    because="it writes averages into weights that are on another tier",
                    remedy="leave it out, and average strategy.engine.state_dict(master=True) in "
                    "on_train_batch_end",
                )
        if self.engine is not None and (is_fit or self.engine.module is not self.lightning_module):
            self.close(restore=True)
        if self.engine is None:
            self._create_engine(trainer, is_fit)
        self.model = self.engine

    def _create_engine(self, trainer: Any, is_fit: bool) -> None:
        module = self.lightning_module
        for submodule in module.modules():  # metrics have states that only `to` moves
            if submodule is not module and not any(True for _ in submodule.parameters()):
                submodule.to(self.root_device)
        self.optimizers, self.lr_scheduler_configs = _optimizers_of(module) if is_fit else ([], [])
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers() gave {len(self.optimizers)} optimizers",
                remedy="return one, with parameter groups for different settings",
            )
        user_optimizer: Any = self.optimizers[0] if is_fit else None
        settings = read_settings(self._engine_config, batch_size=1, optimizer=user_optimizer)
        config = self._merge_settings(settings.config, trainer)
        groups = optimizer = None
        if user_optimizer is None:
            self._unfreeze = freeze(module.parameters())
        else:
            named = "type" in config.optimizer.model_fields_set
            choice = choose_instance(config, user_optimizer, named=named)
            config, groups, optimizer = choice.config, choice.groups, choice.optimizer
        self.engine, engine_optimizer, *_ = initialize(
            module,
            replace(settings, config=config),
            model_parameters=groups,
            optimizer=optimizer,
            device=self.root_device,
        )
        self._precision.engine = self.engine
        self._precision.clipping = self.engine.gradient_clipping
        for schedule in self.lr_scheduler_configs:
            adopt_scheduler(schedule.scheduler, user_optimizer)
        self.optimizers = [engine_optimizer] if is_fit else []
        module.to(self.root_device)  # parameters do not move; sets `module.device`

    def _merge_settings(self, config: Config, trainer: Any) -> Config:
        """Merge the Trainer's settings into the configuration; conflicts raise `ConfigError`."""
        precision = self._precision.precision.partition("-")[0]
        arguments = {
            "precision": (f"precision={precision!r}", _PRECISION.get(precision), "fp32"),
            "gradient_accumulation_steps": (
                "accumulate_grad_batches", trainer.accumulate_grad_batches, 1,
            ),
            "gradient_clipping": ("gradient_clip_val", float(trainer.gradient_clip_val or 0), 0.0),
        }  # fmt: skip
        update: dict[str, Any] = {"cast_inputs": True}
        for key, (argument, value, default) in arguments.items():
            if value is None:
                raise ConfigError(f"Trainer({argument})", remedy='"bf16-true", "16-true" or 32')
            configured = getattr(config, key)
            if key not in config.model_fields_set:
                update[key] = value
            elif value not in (default, configured):
                raise ConfigError(
                    f"{key} is {configured} in the configuration, {value} by the Trainer "
                    f"({argument})",
                    remedy="set it in one place",
                )
        return config.model_copy(update=update)

    # --- steps -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as a call of the engine.

        Args:
            args: Passed to the module's `training_step`.
            kwargs: Passed to the module's `training_step`.

        Returns:
            The return value of the module's `training_step`.
        """
        loop, module = self.lightning_module.trainer.fit_loop, self.lightning_module
        assert self.engine is not None
        is_last = not module.automatic_optimization or not loop._should_accumulate()
        self.engine.set_gradient_accumulation_boundary(is_last)
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Step the engine after a micro-batch that does not end the accumulation window.

        Args:
            closure_loss: Not used.
        """
        assert self.engine is not None
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def on_validation_start(self) -> None:
        """Discard gradients left by a module with manual optimization, as Lightning does."""
        module = self.lightning_module
        if module.trainer.state.fn == "fit" and not module.automatic_optimization:
            Engine.zero_grad(self._precision.require())

    # --- checkpoints -----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded into the engine."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores optimizer state."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict: weights are in the engine's checkpoint."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dict: optimizer state is in the engine's checkpoint.

        Args:
            optimizer: Not used.
        """
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint directory; return when it is on stable storage.

        Args:
            checkpoint: State of Lightning.
            filepath: Path of the directory; an existing one is replaced.
            storage_options: Passed to Lightning's checkpoint plugin.
        """
        assert self.engine is not None
        folder = Path(filepath)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)  # left by a run that was resumed from an earlier step
        else:
            folder.unlink(missing_ok=True)
        folder.mkdir(parents=True)
        if "optimizer_states" in checkpoint:
            self.engine.save_checkpoint(folder, TAG, save_latest=False, wait=True)
        else:
            self.engine.save_weights(folder)
        self.checkpoint_io.save_checkpoint(checkpoint, folder / LOOP, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the state of the engine, and return that of Lightning.

        Args:
            checkpoint_path: A directory of `save_checkpoint`, or a file of another strategy, whose
                optimizer state is ignored with a warning.
            weights_only: Passed to Lightning's checkpoint plugin.

        Returns:
            The state of Lightning.

        Raises:
            CheckpointError: The checkpoint is incomplete or damaged.
        """
        assert self.engine is not None
        folder = Path(checkpoint_path)
        is_fit = self.lightning_module.trainer.state.fn == "fit"
        if not folder.is_dir():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            if is_fit and checkpoint.get("optimizer_states"):
                warnings.warn(
                    f"{folder} is of another strategy: its weights and loops are loaded, the "
                    "optimizer starts anew",
                    InfinityWarning,
                    stacklevel=2,
                )
            return checkpoint
        if not (folder / LOOP).is_file():
            raise CheckpointError(
                f"{folder} has no {LOOP}", because="it is written last: saving was interrupted"
            )
        if (folder / TAG).is_dir():
            self.engine.load_checkpoint(folder, TAG, load_module_only=not is_fit)
        else:
            load_weights(self.engine, folder)
        return self.checkpoint_io.load_checkpoint(folder / LOOP, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights from a checkpoint of another strategy.

        Weights of this strategy are already loaded by `load_checkpoint`.

        Args:
            checkpoint: The return value of `load_checkpoint`.
            strict: Raise if names are missing or unexpected.
        """
        assert self.engine is not None
        if checkpoint["state_dict"]:
            self.engine.load_state_dict(checkpoint["state_dict"], strict=strict)

    def teardown(self) -> None:
        """Release the plugins of the Trainer. The engine stays alive until `close`."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
