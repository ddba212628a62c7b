"""How much an engine takes at a time: micro-batches, windows, samples."""

from __future__ import annotations

from infinity.engine_facts import EngineFacts
from infinity.errors import ConfigError, TrainingError
from infinity.training.window import Window


class EngineBatch(EngineFacts):
    """Sizes of batches: of a micro-batch in samples, of a window in micro-batches."""

    _window: Window
    _micro_batch_size: int = 1

    def train_batch_size(self) -> int:
        """Samples of an update: micro-batch x accumulation steps."""
        return self._micro_batch_size * self._window.length

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch, as the configuration or `initialize(batch_size=...)` says."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update, unless a boundary is set by hand."""
        return self._window.length

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of an update, samples of a micro-batch, micro-batches of an update."""
        return self.train_batch_size(), self._micro_batch_size, self._window.length

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples an update, by another number of micro-batches.

        Between updates only. Raises `ConfigError` where it is no multiple of the micro-batch, or
        where gradients rest in 16 bits, which cannot hold sums.
        """
        steps, rest = divmod(train_batch_size, self._micro_batch_size)
        if rest or steps < 1:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is no multiple of the micro-batch of "
                f"{self._micro_batch_size} samples",
                remedy=f"{max(steps, 1) * self._micro_batch_size}, or "
                "set_train_micro_batch_size() first",
            )
        self.set_gradient_accumulation_steps(steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Another number of micro-batches an update; as `set_train_batch_size`.

        Predictions of the plan stay those of the configuration.
        """
        self._check_usable()
        self._end_users_backward()
        progress = self._stepper.progress
        if progress.micro_step or progress.backwards:
            raise TrainingError(
                f"the window of {self._window.length} micro-batches has begun: "
                f"{progress.micro_step} are behind us",
                remedy="change it right after the step() that updates, or zero_grad() first",
            )
        self._set_micro_batches(steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples a micro-batch, for counting; loaders stay as they are."""
        if type(micro_batch_size) is not int or micro_batch_size < 1:
            raise ConfigError(f"a micro-batch of {micro_batch_size!r} samples", remedy="1 or more")
        self._micro_batch_size = micro_batch_size

    def _set_micro_batches(self, steps: int) -> None:
        self._window.set_length(steps)
        self._parts.hooks.divisor = steps

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` since the run began."""
        return self._stepper.progress.micro_batches

    @property
    def global_samples(self) -> int:
        """Samples of all windows that are over, those of skipped steps too."""
        return self._stepper.progress.samples
