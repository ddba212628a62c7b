"""Training loop of `pretrain_gpt.py`: build, initialize the engine, train, measure."""

from __future__ import annotations

import difflib
import json
import math
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import corpus
import presets
import torch
from _plain import DTYPES, bytes_per_parameter, compute_device
from _process import Phase, Signals, peak_rss_bytes
from _ui import Screen, StepLine, answer, comparison, next_steps, seconds

import infinity
from infinity.common.sizes import format_duration
from infinity.config.schema import Config, load_config
from infinity.errors import ConfigError, MachineError, TrainingError

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = Path("scratch")  # in the repository; created, and removed when empty
BITS = 1 / math.log(2)  # per nat; a token is a byte
SLOW_BF16 = 3  # times slower than fp32; halving the bytes is worth no more
SETUP = ("imports", "text", "model", "writing the state")  # stages before training
NUM_WARMUP_STEPS = 2  # before the slots, the order and the optimizer pass are in their steady state


class Run:
    """One call of the example; `started_at_s` is `time.perf_counter()` before torch's import."""

    def __init__(
        self, arguments: Namespace, screen: Screen, signals: Signals, started_at_s: float
    ) -> None:
        self.arguments = arguments
        self.screen = screen
        self.signals = signals
        self.seconds: dict[str, float] = {}  # per stage
        self._lap_s = started_at_s
        self._end_stage("imports")
        self.config = _read_config(arguments)
        self.shape = _shape(arguments)
        context = self.shape.context
        self.text = corpus.one_file(arguments.text) if arguments.text else corpus.standard_library()
        self.text.require(context)
        self._end_stage("text")
        self.micro_batches = self.config.gradient_accumulation_steps
        self.tokens_per_step = self.micro_batches * arguments.micro_batch * context
        self.seed = self.config.seed or 0
        self.device = compute_device()
        self.config = _with_precision(self.config, self.device)
        self.compared = min(arguments.steps, arguments.compare_steps) if arguments.compare else 0

    def _end_stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._lap_s
        self._lap_s = now

    def run(self) -> dict[str, Any]:
        """Train, then take turns with plain PyTorch; print and return the results."""
        folder = _make_default_folder(self.config)
        try:
            result = self._train()
        finally:
            if folder is not None and not any(folder.iterdir()):
                folder.rmdir()
        self.screen.say(next_steps())
        self.screen.say(f"\n{seconds(self.seconds, SETUP)}")
        return result

    def _train(self) -> dict[str, Any]:
        screen, arguments, shape = self.screen, self.arguments, self.shape
        num_parameters = presets.count_parameters(shape)
        screen.say(
            f"{arguments.model}: {num_parameters / 1e6:.1f}M parameters in {self.config.precision},"
            f" {shape.num_layers} layers of width {shape.width}"
        )
        screen.say(self.text.describe())
        model = presets.build(shape, DTYPES[self.config.precision], self.seed)
        self._end_stage("model")
        engine = None
        try:
            engine, _, _, _ = infinity.initialize(
                model=model,
                config=self.config,
                device=self.device,
                progress=screen.progress,
            )
            self._end_stage("writing the state")
            screen.say(engine.plan.describe())
            source = corpus.batches(
                self.text.train, self.seed, arguments.micro_batch, shape.context
            )
            screen.say(
                f"\nTraining: {arguments.steps} steps of {self.tokens_per_step} tokens (bytes of"
                f" text), {shape.context} a sequence"
            )
            first = self._evaluate(engine)
            steps: list[dict[str, Any]] = []
            for _ in range(arguments.steps):
                self._step(engine, source, steps)
            last = self._evaluate(engine)
            self._end_stage("training")
            plan = engine.plan
            result = _summary(steps) | {
                "model": arguments.model,
                "num_parameters": num_parameters,
                "precision": self.config.precision,
                "tokens_per_step": self.tokens_per_step,
                "held_out_bits_per_byte": {"first": first, "last": last},
                "peak_rss_bytes": peak_rss_bytes(),
                "budget_host_bytes": plan.budget["host"],
                "tier_bytes": dict(plan.tier_bytes),
                "disk_parts": dict(plan.memory_by_name()["disk"]),
                "predicted_bytes": dict(plan.predicted_bytes),
                "state_bytes": round(plan.precision.bytes_per_parameter * num_parameters),
                "plain_bytes_per_parameter": bytes_per_parameter(self.config),
                "skipped_steps": engine.skipped_steps,
                "config": {name: e["value"] for name, e in self.config.resolved().items()},
            }
            screen.page(f"Result: {num_parameters / 1e6:.1f}M parameters trained", answer(result))
            result["plain_torch"] = None
            if self.compared:
                result["plain_torch"] = self._beside_plain(engine, source, steps)
                screen.page("Like with like, infinity first", comparison(result["plain_torch"]))
                self._end_stage("comparison")
        finally:
            screen.end_progress()
            self.signals.enter(Phase.CLOSING)
            if engine is not None:
                engine.close()
            self.signals.enter(Phase.RUNNING)
        return result | {"seconds": self.seconds}

    def _step(self, engine: Any, source: Any, steps: list[dict[str, Any]]) -> None:
        """Train one more step and append its facts to `steps`."""
        step, last = len(steps) + 1, self.arguments.steps
        started = time.perf_counter()
        loss = 0.0
        for micro_batch in range(1, self.micro_batches + 1):
            self.signals.check()
            tokens, targets = next(source)
            micro_loss = engine(tokens.to(self.device), targets.to(self.device))
            loss += _finite(micro_loss.item(), step, micro_batch, self.config) / self.micro_batches
            engine.backward(micro_loss)
            engine.step()
        wall_s = time.perf_counter() - started
        report = engine.last_report
        typical_s = statistics.median([*(entry["step_s"] for entry in steps), wall_s])
        if step <= last:
            self.screen.step(
                StepLine(
                    step=step,
                    num_steps=last,
                    loss=loss * BITS,
                    tokens_per_s=self.tokens_per_step / wall_s,
                    wall_s=wall_s,
                    stall_s=report.stall_s,
                    eta_s=typical_s * (last - step),
                    skipped=report.skipped,
                )
            )
        steps.append(
            {
                "loss": loss * BITS,
                "step_s": wall_s,
                "stall_s": dict(report.stall_s),
                "moved": dict(report.moved),
                "mispredictions": report.mispredictions,
            }
        )

    @torch.no_grad()
    def _evaluate(self, engine: Any) -> float:
        """Return the mean bits per byte on the held-out text, always the same sequences."""
        arguments = self.arguments
        total: float = 0.0
        engine.eval()
        for tokens, targets in corpus.held_out_batches(
            self.text.held_out, arguments.eval_batches, arguments.micro_batch, self.shape.context
        ):
            self.signals.check()
            total += engine(tokens.to(self.device), targets.to(self.device)).item()
        engine.train()
        return total / arguments.eval_batches * BITS

    def _beside_plain(self, engine: Any, source: Any, steps: list[dict[str, Any]]) -> Any:
        """Alternate further steps with the first steps of plain PyTorch and compare both.

        A turn is two steps, the second of which is timed: the first includes work left over from
        the side's previous turn, or done during the other side's.
        """
        self.screen.say(
            f"\nComparison: {self.compared} steps of plain PyTorch, all in RAM, in its own process:"
            " same model, seed, data, precision and micro-batches; in turns with as many more of"
            " ours, two at a time, the second of which is timed"
        )
        job = {
            "config": self.config.model_dump(mode="json", exclude_unset=True),
            "text": str(self.arguments.text) if self.arguments.text else None,
            "model": self.arguments.model,
            "context": self.shape.context,
            "micro_batch": self.arguments.micro_batch,
            "seed": self.seed,
            "num_steps": self.compared,
        }
        lines: list[dict[str, Any]] = []
        pairs: list[tuple[float, float]] = []
        with Plain(job) as plain:
            while left := self.compared - len(lines):
                turn = min(left, 2)
                for _ in range(turn):
                    self._step(engine, source, steps)
                lines += plain.steps(turn)
                if turn == 2 or not pairs:
                    pairs.append((steps[-1]["step_s"], lines[-1]["step_s"]))
                    offloaded, baseline = map(format_duration, pairs[-1])
                    self.screen.say(
                        f"turn {len(pairs)}  infinity {offloaded}, plain PyTorch {baseline}"
                    )
        losses = [line["loss"] * BITS for line in lines]
        # Both times of one turn: on a busy machine times of different turns are not comparable.
        offloaded, baseline = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
        return {
            "num_steps": self.compared,
            "turns": len(pairs),
            "step_s": baseline,
            "our_step_s": offloaded,
            "ratio": offloaded / baseline,
            "loss_bits_per_byte": losses,
            "largest_loss_difference": max(
                abs(step["loss"] - plain_loss)
                for step, plain_loss in zip(steps, losses, strict=False)
            ),
            "peak_rss_bytes": lines[-1]["peak_rss_bytes"],
            "our_peak_rss_bytes": peak_rss_bytes(),
        }


class Plain:
    """Context manager of plain PyTorch in a child process, which runs steps on request.

    The child has its own session: Ctrl-C reaches only the parent, which kills the child.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_plain.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._job = job

    def __enter__(self) -> Plain:
        try:
            self._say(json.dumps(self._job))
            self._hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._child as child:
            child.kill()

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Run `count` further steps; raise `MachineError` if the process ends instead."""
        self._say(str(count))
        return [self._hear() for _ in range(count)]

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it ended: `_hear` raises
            print(line, file=self._child.stdin, flush=True)

    def _hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._child.wait()
        raise MachineError(
            f"the comparison with plain PyTorch ended with code {code}",
            because="it needs 20 bytes of RAM a parameter, beside ours" if code < 0 else None,
            remedy="--no-compare leaves it out",
        )


def _summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the steady steps; a run too short to have any has no moved bytes."""
    steady = steps[NUM_WARMUP_STEPS:]
    timed = steady or steps
    directions = list(steady[0]["moved"]) if steady else []
    return {
        "steps": len(steps),
        "loss_bits_per_byte": [entry["loss"] for entry in steps],
        "step_s": statistics.median(entry["step_s"] for entry in timed),
        "stall_share": {
            direction: statistics.median(
                e["stall_s"].get(direction, 0.0) / e["step_s"] for e in timed
            )
            for direction in timed[0]["stall_s"]
        },
        "moved_bytes": {
            direction: int(statistics.median_low([entry["moved"][direction] for entry in steady]))
            for direction in directions
        },
        "mispredictions": sum(entry["mispredictions"] for entry in steady),
    }


def _finite(loss: float, step: int, micro_batch: int, config: Config) -> float:
    if math.isfinite(loss):
        return loss
    raise TrainingError(
        f"the loss of step {step}, micro-batch {micro_batch} is {loss}",
        because=f"training diverged at a learning rate of {config.optimizer.lr:g}"
        if step > 1
        else "the model or its input is broken: no update has happened yet",
        remedy=f"--set optimizer.lr={config.optimizer.lr / 10:g}" if step > 1 else None,
    )


def _read_config(arguments: Namespace) -> Config:
    overrides = list(arguments.overrides)
    if arguments.nvme_path is not None:
        # JSON is YAML: any path survives the way through an override.
        overrides.append(f"nvme_path={json.dumps(str(arguments.nvme_path))}")
    config = load_config(arguments.config, overrides)
    if config.precision not in DTYPES:
        raise ConfigError(
            f"the precision is {config.precision}",
            because="the model is compared with plain PyTorch without loss scaling",
            remedy=f"--set precision={', or '.join(DTYPES)}",
        )
    if config.nvme_path == (DEFAULT_FOLDER,):
        config = config.model_copy(update={"nvme_path": (REPOSITORY / DEFAULT_FOLDER,)})
    return config


def _with_precision(config: Config, device: torch.device) -> Config:
    """Use bf16 unless the config sets a precision or this processor multiplies fp32 much faster.

    Without bf16 instructions torch's bf16 product can be fifty times slower than its fp32 one.
    """
    if "precision" in config.model_fields_set or device.type != "cpu":
        return config
    slower = _product_s(torch.bfloat16) / _product_s(torch.float32)
    precision = "bf16" if slower < SLOW_BF16 else "fp32"
    return config.model_copy(update={"precision": precision})


def _product_s(dtype: torch.dtype) -> float:
    """Return the seconds of a matrix product as in backward: neither factor transposed."""
    left, right = torch.ones(64, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return min(times)


def _make_default_folder(config: Config) -> Path | None:
    folder = REPOSITORY / DEFAULT_FOLDER
    if config.nvme_path != (folder,):
        return None
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"{folder} cannot be made",
            because=error.strerror,
            remedy="--nvme-path /a/directory/on/a/fast/drive",
        ) from error
    return folder


def _shape(arguments: Namespace) -> presets.Shape:
    if arguments.model not in presets.PRESETS:
        near = difflib.get_close_matches(arguments.model, presets.PRESETS, n=1)
        hint = f"--model {near[0]}" if near else None
        raise ConfigError(
            f"there is no model {arguments.model!r}; known: {', '.join(presets.PRESETS)}",
            remedy=hint,
        )
    return presets.shape_of(arguments.model, arguments.context, arguments.checkpointing)
