"""Tests of JSON files with valid checksums and invalid values: only InfinityErrors are raised.

Each value of a document is replaced by values of other types and ranges and the checksum is
updated, as by somebody who edits the file. Reading it raises an InfinityError, or succeeds.
"""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.durable import PLACEMENTS, durable_engine, equal, gated, state_of, step
from support.runs import settings, train
from support.small import batch
from typer.testing import CliRunner

from infinity.checkpoint.commits import COMMIT_NAMES
from infinity.checkpoint.durable_runs import find_run, read_run
from infinity.checkpoint.plain import decode
from infinity.cli.main import app
from infinity.common.checksummed_json import first_sealed, seal, unseal
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.train.best import Best
from infinity.train.metrics import LastStep, Metrics
from infinity.train.windows import BatchIterator
from infinity.training.run_state import RunState

INVALID_VALUES: list[Any] = [
    None, True, -1, 0, 2**62, 2**70, 0.5, 1e308, "", "x", "\ud800", "\0", [], {}, [[]], [-1],
    {"a": {}}, {"$tensor": 0},
]  # fmt: skip
FACTS = ("ranks", "precision", "rule", "moments", "gradient_itemsize", "units")
Document = dict[str, Any]


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values; of a list, the first and the last item."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from value_paths(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in sorted({0, len(value) - 1}):
            yield from value_paths(value[index], (*path, index))


def mutations(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield the document with one value replaced or removed, for each value."""
    rng = random.Random(0)
    for path in value_paths(document):
        for value in (rng.choice(INVALID_VALUES), KeyError):
            mutated = copy.deepcopy(document)
            inner: Any = mutated
            for key in path[:-1]:
                inner = inner[key]
            if value is KeyError:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield f"{'.'.join(map(str, path))}: {value!r}", mutated


def check_mutations(files: list[Path], read: Callable[[], Any], *keys: str, every: int = 1) -> None:
    """Call `read` with each `every`-th mutation of the identical `files`, then with none."""
    before = files[0].read_bytes()
    document = unseal(first_sealed(before))
    selected = {name: document[name] for name in keys or document}
    refused = 0
    for what, values in list(mutations(selected))[::every]:
        with suppress(ConfigError):  # not representable in JSON
            data = seal(document | values)
            for file in files:
                file.write_bytes(data)
            try:
                read()
            except InfinityError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{files[0].name} with {what}") from error
    assert refused
    for file in files:
        file.write_bytes(before)
    read()


def command(*arguments: str) -> int:
    """Run a command; return its exit code, or raise InfinityError if it printed an error."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        assert "error: " in result.stderr
        raise InfinityError(result.stderr)
    return result.exit_code


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a durable run."""
    root = tmp_path_factory.mktemp("durable")
    options: dict[str, Any] = {"placement": PLACEMENTS["moments in RAM"], "commit_every": 1}
    with durable_engine(root, gated(), **options) as engine:
        step(engine)
        step(engine)
    (directory,) = root.iterdir()
    return directory


@pytest.mark.parametrize("names", [("run.json",), ("plan.json",), COMMIT_NAMES], ids="+".join)
def test_durable_files_with_invalid_values_raise_infinity_errors(
    durable: Path, names: tuple[str, ...]
) -> None:
    facts = read_run(durable).facts
    known_facts = {name: facts[name] for name in FACTS}

    def read() -> None:
        find_run([durable.parent], "auto", known_facts)
        command("checkpoint", "inspect", str(durable))

    check_mutations([durable / name for name in names], read)


def same_shape_pair(document: Document) -> tuple[Document, Document]:
    """Return two trained parameters of the same shape."""
    trained_segments = [s for unit in document["units"] for s in unit["segments"] if s["trained"]]
    return next(
        pair for pair in combinations(trained_segments, 2) if pair[0]["shape"] == pair[1]["shape"]
    )


def swap_names(document: Document) -> None:
    one, two = same_shape_pair(document)
    one["name"], two["name"] = two["name"], one["name"]


def swap_offsets(document: Document) -> None:
    one, two = next(
        two
        for unit in document["units"]
        for two in combinations([s for s in unit["segments"] if s["trained"]], 2)
        if two[0]["numel"] == two[1]["numel"]
    )
    one["offset"], two["offset"] = two["offset"], one["offset"]


def swap_units(document: Document) -> None:
    document["units"].reverse()


def rename(document: Document) -> None:
    same_shape_pair(document)[0]["name"] = "other"


def cut_chunks(document: Document) -> None:
    document["chunk_elements"] *= 2


@pytest.mark.parametrize("shift", [swap_names, swap_offsets, swap_units, rename, cut_chunks])
def test_plan_of_another_state_is_refused(durable: Path, shift: Callable[[Document], None]) -> None:
    """The plan is valid on its own, but would assign bytes to the wrong parameters."""
    path = durable / "plan.json"
    before = path.read_bytes()
    document = unseal(before)
    shift(document)
    path.write_bytes(seal(document))
    try:
        for verb, *args in (["inspect"], ["verify"], ["export", str(durable.parent / "out")]):
            result = CliRunner().invoke(app, ["checkpoint", verb, str(durable), *args])
            assert result.exit_code == 5, result.stderr
            output = " ".join((result.stdout + result.stderr).split())
            assert "plan.json is not the plan of the state" in output
    finally:
        path.write_bytes(before)
    assert command("checkpoint", "inspect", str(durable)) == 0


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.big)])
def test_manifest_with_invalid_values_is_refused_or_loads(tmp_path: Path, every: int) -> None:
    """A manifest that is not refused loads the same state, and the next step can be trained."""
    options = {
        "durable": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    with durable_engine(tmp_path, gated(), **options) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(engine)
        engine.save_checkpoint(tmp_path / "saved", "one", wait=True)
        saved = state_of(engine)

        def read() -> None:
            engine.load_checkpoint(tmp_path / "saved", "one")
            assert equal(state_of(engine), saved)
            engine.backward(engine(batch(0)))
            engine.step()

        manifest = tmp_path / "saved" / "one" / "manifest.json"
        check_mutations([manifest], read, "run", "client_state", "plan", "config", every=every)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of `infinity train`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.yaml").write_text(json.dumps(settings(folder, training__steps=2)))
    command("train", str(folder / "run.yaml"))
    return folder


def test_run_record_with_invalid_values_is_refused(trained: Path) -> None:
    raw = settings(trained, training__steps=2)
    path = trained / "run" / "run.json"
    before = path.read_bytes()
    for paths in ([1], "x", {}):  # invalid nvme_path of a durable run
        path.write_bytes(seal(unseal(before) | {"durable": True, "nvme_path": paths}))
        with pytest.raises(CheckpointError, match=r"run\.json is damaged.*: nvme_path"):
            train(raw, "auto")
    path.write_bytes(before)
    check_mutations([path], lambda: train(raw, "auto"))


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
def test_report_of_invalid_values_raises_only_infinity_errors(trained: Path, name: str) -> None:
    path = trained / "run" / name
    before = path.read_bytes()
    lines = list(map(json.loads, before.splitlines() if name == "metrics.jsonl" else [before]))
    kinds = {line.get("event"): number for number, line in enumerate(lines)}
    for number in kinds.values():
        for what, values in list(mutations(lines[number]))[::3]:
            texts = map(json.dumps, [*lines[:number], values, *lines[number + 1 :]])
            path.write_text("".join(f"{text}\n" for text in texts))
            try:
                command("report", str(trained / "run"))
            except InfinityError:
                pass
            except Exception as error:
                raise AssertionError(f"{name} with {what}") from error
    path.write_bytes(before)
    assert command("report", str(trained / "run")) == 0


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/proc/self", __file__])
def test_report_of_path_without_run_is_refused(path: str) -> None:
    result = CliRunner().invoke(app, ["report", path])
    assert result.exit_code == 2
    assert "holds no run" in result.stderr


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_report_does_not_hang_on_pipe_or_endless_device(
    tmp_path: Path, trained: Path, name: str, kind: str
) -> None:
    for other in ("plan.json", "metrics.jsonl"):
        (tmp_path / other).write_bytes((trained / "run" / other).read_bytes())
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with suppress(InfinityError):
        command("report", str(tmp_path))
    assert name == "plan.json" or not (tmp_path / "report.html").exists()


def test_registered_state_is_validated_on_load(tmp_path: Path) -> None:
    """Each value that `infinity train` registers with the run state is replaced or removed."""
    train(settings(tmp_path, training__steps=2, training__evaluate_every=1), stop_after=1)
    (manifest,) = tmp_path.glob("run/checkpoints/*/manifest.json")
    saved = decode(unseal(first_sealed(manifest.read_bytes()))["run"])["registered"]
    assert set(saved) == {"windows", "last_step", "evaluations"}
    batches = SimpleNamespace(_identity=lambda: {k: v for k, v in saved["windows"].items()
                                              if k != "taken"})  # fmt: skip
    metrics: Any = SimpleNamespace(last_step=0, write=lambda record: record)

    def load_registered(name: str, state: Any) -> None:
        run_state: Any = RunState.__new__(RunState)
        run_state._registered, run_state._loaded = {}, {name: state}
        if name == "evaluations":
            run_state.register(name, best := Best(of=saved[name]["of"]))
            best.on_evaluation(2, 1.0)
        elif name == "last_step":
            run_state.register(name, last := LastStep())
            Metrics.catch_up(metrics, last)
        else:
            load_batches = partial(BatchIterator.load_state_dict, batches)
            run_state.register(name, SimpleNamespace(load_state_dict=load_batches))
            assert batches.taken >= 0

    refused = 0
    for name, state in saved.items():
        load_registered(name, state)
        for what, values in mutations(state):
            try:
                load_registered(name, values)
            except CheckpointError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} with {what}") from error
    assert refused > 10
