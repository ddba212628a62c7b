"""Tiny runs of `infinity train`: configurations, random corpora and a recording watcher."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infinity.train.metrics import Result
from infinity.train.run import Run
from infinity.train.settings import load_run_config

TINY = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
}
LENGTH = 16


def write_text(path: Path, num_words: int = 600, seed: int = 0) -> Path:
    generator = random.Random(seed)
    words = [generator.choice(["ab", "ba", "cab", "dä", "eee"]) for _ in range(num_words)]
    path.write_text(" ".join(words) + "\n", encoding="utf-8")
    return path


TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def write_chat(folder: Path, count: int = 40, seed: int = 0) -> dict[str, str]:
    """Write conversations of up to two turns as JSONL; return the settings that use them."""
    generator = random.Random(seed)

    def words() -> str:
        return "".join(generator.choices("abé", k=generator.randint(1, 6)))

    with open(folder / "chat.jsonl", "w", encoding="utf-8") as file:
        for _ in range(count):
            roles = ["user", "assistant"] * generator.randint(1, 2)
            messages = [{"role": role, "content": words()} for role in roles]
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return {
        "data__train": str(folder / "chat.jsonl"),
        "data__chat_template": str(folder / "chat.jinja"),
    }


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings of a run of six steps on a generated text.

    `changes` are dotted names with `__` for dots; None removes an entry.
    """
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    raw: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"config": dict(TINY)},
        "tokenizer": "bytes",
        "data": {"train": str(text), "sequence_length": LENGTH, "held_out": 0.1},
        "training": {
            "steps": 6,
            "micro_batch": 2,
            "evaluate_every": 3,
            "evaluate_windows": 3,
            "checkpoint_every": 2,
        },
        "engine": {
            "precision": "fp32",
            "gradient_accumulation_steps": 2,
            "budget": {"host": "6GiB"},  # a pytest worker may hold 2 GiB
            "optimizer": {"lr": 1e-2},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": "auto", "warmup_num_steps": 2},
            },
        },
    }
    for name, value in changes.items():
        *parents, key = name.split("__")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return raw


class RecordingWatcher:
    """Watcher that records a run; it stops it after `stop_after` steps or raises at `die_after`."""

    def __init__(self, stop_after: int = 0, die_after: int = 0) -> None:
        self.steps: list[SimpleNamespace] = []
        self.evaluations: dict[int, float] = {}
        self.files: list[Path] = []
        self.notes: list[str] = []
        self._stop_after = stop_after
        self._die_after = die_after

    def begin(self, done: int, num_steps: int) -> None:
        self.done = done

    def on_record(self, record: Mapping[str, Any]) -> None:
        if record["event"] == "evaluation":
            self.evaluations[record["step"]] = record["loss"]
        elif record["event"] == "step":
            self.steps.append(SimpleNamespace(**record))
            if self._die_after and record["step"] >= self._die_after:
                raise KeyboardInterrupt

    def note(self, text: str) -> None:
        if text.startswith(("checkpoint: ", "model: ")):
            self.files.append(Path(text.partition(": ")[2]))
        self.notes.append(text)

    @property
    def stopping(self) -> bool:
        return bool(self._stop_after) and len(self.steps) >= self._stop_after


def train(
    raw: dict[str, Any], resume: str = "never", **watch: int
) -> tuple[Result, RecordingWatcher]:
    watcher = RecordingWatcher(**watch)
    with Run(load_run_config(raw), resume) as run:
        run.prepare()
        return run.train(watcher), watcher


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses_of(folder: Path) -> list[tuple[str, int, float]]:
    """Return the logged losses, which must not depend on interruptions."""
    entries = (line for line in metrics_of(folder) if "loss" in line)
    return [(line["event"], line["step"], line["loss"]) for line in entries]
