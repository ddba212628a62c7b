"""Tests of `infinity report`: numbers of the page, escaping, and no external resources."""

from __future__ import annotations

import html
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import losses_of, metrics_of, settings, train
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.errors import ConfigError, MachineError
from infinity.train.report.run import POINTS, model_flop_share, read_run, run_page, write_run_page

PLAN = {
    "model": {"name": "tiny", "parameters": 1000, "flop_per_token": 5e6},
    "machine": {"unified": True, "gpus": 1, "rates": {"compute.fp32": 1e9}, "nominal": []},
    "work": {"precision": "fp32"},
    "plan": {
        "memory": {"device": {"slots": 100}, "host": {"process": 500}, "disk": {"weights": 0}},
        "budget": {"device": None, "host": 1000, "disk": 10**6},
    },
    "activations": {"total": 50, "tier": "host"},
    "step": {"seconds": 0.1, "tokens_per_s": 640.0, "binds": "compute"},
    "wear": {"rated_bytes": 10**6},
    "faster": [
        {"what": "a <second> drive", "how": "nvme_path", "speed_up": 1.5, "changes_batch": False}
    ],
}


def run_cli(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, found.stdout, found.stderr


def data_of(page: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def write_run(folder: Path, *records: dict[str, Any], plan: Any = None) -> Path:
    """Write a run directory with these metrics and plan."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "tokens": 64 * number, "loss": 4.0 - number / 8,
        "lr": 1e-3, "grad_norm": 1.5, "clip_factor": 0.5, "skipped": False, "step_s": 0.5,
        "tokens_per_s": 128.0, "stall_s": {"disk_read": 0.125, "update": 0.0},
        "moved": {"disk_read": 4096, "disk_write": 1024}, "memory": {"peak": 800},
    } | more  # fmt: skip


def test_report_page_contains_numbers_of_metrics(tmp_path: Path) -> None:
    """The run is stopped and resumed; the page is self-contained."""
    pytest.importorskip("vl_convert")
    train(settings(tmp_path), stop_after=2)
    train(settings(tmp_path), resume="auto")
    code, out, err = run_cli("report", str(tmp_path / "run"))
    assert (code, out, err) == (0, f"{tmp_path}/run/report.html\n", "")
    page = (tmp_path / "run" / "report.html").read_text()
    rows, records = data_of(page)["datasets"], metrics_of(tmp_path)
    steps = [record for record in records if record["event"] == "step"]
    for name in ("step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s"):
        assert [row[name] for row in rows["steps"]] == [record[name] for record in steps], name
    evaluations = [r for r in records if r["event"] == "evaluation"]
    assert [e["loss"] for e in rows["evaluations"]] == [e["loss"] for e in evaluations]
    assert rows["starts"] == [{"step": 2}]  # drawn as a grey line
    assert "complete: 6 of 6 steps" in page
    assert "started 2 times" in page
    # Scripts of the chart library contain URLs.
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?:|src=|@import|url\(", markup)
    assert "default-src 'none'" in markup  # the browser would block requests


def test_report_states_how_run_ended(tmp_path: Path) -> None:
    began = {"event": "began", "step": 0, "num_steps": 3, "ranks": 2}
    ends = {
        "complete: 3 of 3": (3, {"why": None}),
        "stopped after 2 of 3": (2, {"why": None}),
        "stopped early: 2 of 3": (2, {"why": None, "stopped_early": True}),
        "ended after 2 of 3 steps by an error: the drive failed": (2, {"why": "the drive failed"}),
        "is running, or was killed": (2, None),
    }
    for text, (done, end) in ends.items():
        ended = [] if end is None else [{"event": "ended", "step": done, **end}]
        steps = [step(number) for number in range(1, done + 1)]
        head = " ".join(run_page(read_run(write_run(tmp_path / "r", began, *steps, *ended))).head)
        assert text in head
        assert "2 ranks" in head


def test_metrics_record_why_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path), die_after=2)
    assert metrics_of(tmp_path)[-1]["why"] == "it was stopped in a step"
    began = metrics_of(tmp_path)[0]
    assert {key: began[key] for key in ("event", "step", "ranks", "num_steps")} == {
        "event": "began", "step": 0, "ranks": 1, "num_steps": 6
    }  # fmt: skip
    assert began["host"] == platform.node()
    assert began["versions"]["torch"] == torch.__version__


def test_report_shows_command_and_versions_if_recorded(tmp_path: Path) -> None:
    versions = {"infinity": "1", "torch": "2"}
    more = {"command": "infinity train a&b.yaml", "host": "h", "device": "d", "versions": versions}
    began = {"event": "began", "step": 0, "time": 60.0}
    folder = write_run(tmp_path / "r", began | more, step(1))
    (folder / "config.yaml").write_text("run_dir: <r>")
    page = run_page(read_run(folder))
    (facts,) = [text for text in page.head if text.startswith("<dl>")]
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", facts) == [
        ("command", "infinity train a&amp;b.yaml"), ("started", "1970-01-01 00:01 UTC"),
        ("machine", "h, d"), ("versions", "infinity 1, torch 2"),
    ]  # fmt: skip
    assert "<pre>run_dir: &lt;r&gt;</pre>" in page.figures[-1]
    older = run_page(read_run(write_run(tmp_path / "older", step(1))))
    assert not any("<dl>" in text for text in older.head)
    assert not any("<pre>" in text for text in older.figures)


def test_sample_is_generated_without_changing_losses(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    train(settings(tmp_path / "plain", training__steps=2))
    raw = settings(tmp_path, training__steps=2, training__sample="ab <ba> ")
    train(raw)
    (sample,) = [r for r in metrics_of(tmp_path) if r["event"] == "sample"]
    assert (sample["step"], sample["prompt"]) == (2, "ab <ba> ")
    assert sample["text"]
    page = run_page(read_run(tmp_path / "run"))
    bold, text = "ab &lt;ba&gt; ", html.escape(sample["text"])
    assert any(f"<pre><b>{bold}</b>{text}</pre>" in figure for figure in page.figures)
    for folder in (tmp_path, tmp_path / "plain"):
        train(settings(folder, training__steps=4), resume="auto")
    assert losses_of(tmp_path) == losses_of(tmp_path / "plain")


def test_report_waits_memory_wear_and_mfu(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "r", step(1), step(2), plan=PLAN)))
    assert {(r["what"], r["seconds"]) for r in page.datasets["times"]} == {
        ("no wait: compute, and the loop", 0.375), ("wait: disk read", 0.125)
    }  # fmt: skip
    bars = {(bar["what"], bar["share"]) for bar in page.datasets["tiers"]}
    assert bars == {("process", 0.5), ("buffers", 0.1), ("activations, estimated", 0.05)}
    marks = {(mark["kind"], mark["share"]) for mark in page.datasets["marks"]}
    assert marks == {("budget", 1.0), ("measured", 0.8)}  # no marks for empty or absent tiers
    assert [row["written"] * 2**30 for row in page.datasets["steps"]] == [1024, 2048]
    assert model_flop_share(PLAN, 128.0) == (0.64, "of 1 GFLOP/s, measured")
    figures = " ".join(page.figures)
    assert "25.0%" in figures
    assert "0.2 % of the 1e-06 TB" in figures
    assert "a &lt;second&gt; drive" in figures


def test_report_of_long_run_averages_and_flags_non_finite(tmp_path: Path) -> None:
    steps = [step(number) for number in range(1, 2 * POINTS + 1)]
    steps[-1]["loss"] = "nan"
    page = run_page(read_run(write_run(tmp_path / "r", *steps)))
    rows = page.datasets["steps"]
    assert len(rows) == POINTS
    assert rows[0]["loss"] == (steps[0]["loss"] + steps[1]["loss"]) / 2
    assert rows[-1]["loss"] == steps[-2]["loss"]
    assert any("loss of 1 steps is not finite" in text for text in page.head)
    assert any("loss of the last step</small><b>not finite" in text for text in page.head)
    assert not page.datasets.get("tiers")  # without a plan there are no tiers


def test_report_of_directory_without_run_is_refused(tmp_path: Path) -> None:
    code, out, err = run_cli("report", str(tmp_path))
    assert (code, out) == (2, "")
    assert "holds no run" in err
    assert "Traceback" not in err
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00 no lines\n[1]\n{}\n")
    with pytest.raises(ConfigError, match="has no step"):
        read_run(tmp_path)
    assert run_cli("report", str(tmp_path / "metrics.jsonl"))[0] != 1
    assert run_cli("report", str(tmp_path / "nowhere"))[0] == 2


def test_report_escapes_error_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File names may be any bytes, which Python decodes to lone surrogates."""
    monkeypatch.setattr("infinity.train.report.page._library", str)
    why = "/data/\udcff</script><b>$body is gone"
    began, ended = {"event": "began", "step": 0}, {"event": "ended", "step": 0, "why": why}
    folder = write_run(tmp_path / "a<b>$title", began, ended)
    text = write_run_page(folder).read_text("utf-8")
    assert "/data/\\udcff&lt;/script&gt;&lt;b&gt;$body is gone" in text
    assert "<title>a&lt;b&gt;$title: a run</title>" in text
    assert "<b>" not in text


def test_report_without_vl_convert_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.train.report import page

    page._library.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MachineError, match="report"):
        run_page(read_run(write_run(tmp_path / "r", step(1)))).write(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
