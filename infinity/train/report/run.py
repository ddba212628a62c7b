"""Page of a run of `infinity train`, from its directory: `infinity report RUN_DIR`.

Measured values come from metrics.jsonl (see `train/metrics.py`), expected ones from plan.json.
Missing values are omitted, or reported as missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from infinity.common.files import json_lines, read_small
from infinity.common.sizes import format_count, format_duration, format_parameters, format_size
from infinity.errors import CheckpointError, ConfigError, MachineError, first_lines
from infinity.offload.transfers import STALLS
from infinity.train.report.page import ReportPage, Spec, hover, mapping, quantitative, tooltip

PAGE = "report.html"  # in the run's directory
POINTS = 800  # most points of a curve; in longer runs a point is several steps
BARS = 60  # most bars of a chart
_GIB = 2**30
_NO_WAIT = "no wait: compute, and the loop"
_X: Spec = {
    "field": "step",
    "type": "quantitative",
    "title": "step",
    "scale": {"zero": False, "nice": False},
    "axis": {"format": "~s", "tickCount": 5},
}


@dataclass(frozen=True)
class RunFacts:
    """Contents of a run directory; `plan` is empty without plan.json."""

    path: Path
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    lives: list[dict[str, Any]]
    """The "began" record of each start; its "ended" record, if any, is in the member "ended"."""
    unsaved: int
    plan: Mapping[str, Any]
    sample: Mapping[str, Any]
    """Record of the text that the model generated at the end; empty if there is none."""
    config: str
    """Text of config.yaml; empty if there is none."""

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the run as of its last start."""
        return next((x["num_steps"] for x in reversed(self.lives) if "num_steps" in x), None)

    @property
    def ranks(self) -> int:
        """Number of ranks of the last start."""
        return int(self.lives[-1].get("ranks", 1)) if self.lives else 1


def read_run(path: Path) -> RunFacts:
    """Read a run directory; raise `ConfigError` if it holds no run, or `MachineError`."""
    lives: list[dict[str, Any]] = []
    events = ("step", "evaluation", "not saved", "sample")
    records: dict[str, list[dict[str, Any]]] = {event: [] for event in events}
    metrics = path / "metrics.jsonl"
    try:
        for _, record in json_lines(metrics):
            event, step = record.get("event"), record.get("step")
            if not isinstance(step, int):
                continue
            if event == "began":
                lives.append(record)
            elif event == "ended" and lives:
                lives[-1] = lives[-1] | {"ended": record}
            elif isinstance(event, str) and event in records:
                records[event].append(record)
        plan: Any = {}
        with suppress(FileNotFoundError, ValueError, RecursionError):
            plan = json.loads(read_small(path / "plan.json"))
        config = ""
        with suppress(FileNotFoundError, ValueError):
            config = read_small(path / "config.yaml").decode()
        facts = RunFacts(
            path,
            records["step"],
            records["evaluation"],
            lives,
            unsaved=len(records["not saved"]),
            plan=mapping(plan),
            sample=next(reversed(records["sample"]), {}),
            config=config,
        )
        if not (facts.steps or facts.evaluations or lives):
            raise ConfigError(
                f"{path} holds no run: {metrics.name} "
                + ("has no step" if metrics.exists() else "is not there"),
                remedy="infinity report RUN_DIR: what run_dir: of `infinity train` names",
            )
    except NotADirectoryError as error:
        raise ConfigError(
            f"{path} holds no run: it is not a directory",
            remedy="infinity report RUN_DIR: what run_dir: of `infinity train` names",
        ) from error
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be read: {error.strerror}") from error
    return facts


def write_run_page(path: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `path` to `out`, by default in `path`; return its path.

    Raises:
        CheckpointError: The files hold values that no run writes. `read_run` raises others.
    """
    facts = read_run(path.absolute())
    out = path.absolute() / PAGE if out is None else out
    try:
        page = run_page(facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"plan.json or metrics.jsonl in {path} holds what cannot be: {first_lines(error)}",
            because="it was changed, or is not of a run of `infinity train`",
            remedy="infinity report RUN_DIR: what run_dir: of `infinity train` names",
        ) from error
    page.write(out)
    return out


def run_page(facts: RunFacts) -> ReportPage:
    """Return the page with all sections that the facts allow."""
    page = ReportPage(f"{facts.path.name}: {mapping(facts.plan.get('model')).get('name', 'a run')}")
    for text, look in _status(facts):
        page.say(text, look)
    page.facts(_last_start(facts))
    page.tiles(_key_figures(facts))
    page.datasets["steps"] = _curves(facts)
    page.datasets["evaluations"] = [
        {"step": e["step"], "loss": _number(e.get("loss"))} for e in facts.evaluations
    ]
    page.datasets["starts"] = [{"step": x["step"]} for x in facts.lives[1:]]
    steps_per_point = -(-len(facts.steps) // POINTS)
    mean = f"each point is the mean of {steps_per_point} steps" if steps_per_point > 1 else ""
    _losses(page, facts, mean)
    _rates(page, facts, mean)
    _memory(page, facts)
    _times(page, facts)
    _remedies(page, facts)
    _wear(page, facts)
    if facts.sample:
        page.text(
            "A sample of its text",
            str(facts.sample["text"]),
            f"after step {facts.sample['step']:,}, drawn at a temperature of 0.8; bold: the prompt",
            bold=str(facts.sample["prompt"]),
        )
    if facts.config:
        page.folded("Configuration", facts.config)
    return page


# --- the head ------------------------------------------------------------------------------------


def _status(facts: RunFacts) -> Iterable[tuple[str, str]]:
    """Yield (text, look) of how the run ended, and of problems and notes."""
    done = max((s["step"] for s in facts.steps), default=0)
    of = f" of {facts.num_steps:,}" if facts.num_steps else ""
    ended = facts.lives[-1].get("ended") if facts.lives else None
    if ended is None:
        yield f"{done:,}{of} steps; no end was recorded: it is running, or was killed", "bad"
    elif ended.get("why"):
        yield f"ended after {done:,}{of} steps by an error: {ended['why']}", "bad"
    elif ended.get("stopped_early"):
        yield f"stopped early: {done:,}{of} steps; nothing got better any more", ""
    elif facts.num_steps and done < facts.num_steps:
        yield f"stopped after {done:,}{of} steps; --resume auto goes on", ""
    else:
        yield f"complete: {done:,}{of} steps", ""
    losses = [s.get("loss") for s in facts.steps]
    if broken := sum(loss is not None and _number(loss) is None for loss in losses):
        yield f"the loss of {broken:,} steps is not finite, and not drawn", "bad"
    if facts.unsaved:
        yield f"{facts.unsaved:,} checkpoints were not saved", "bad"
    if skipped := sum(bool(s.get("skipped")) for s in facts.steps):
        yield f"{skipped:,} steps were skipped: their gradients were not finite", ""
    notes = []
    if facts.ranks > 1:
        notes.append(f"{facts.ranks} ranks; memory, waits and bytes are those of the first")
    if len(facts.lives) > 1:
        notes.append(f"started {len(facts.lives)} times: grey lines mark where it resumed")
    model = mapping(facts.plan.get("model"))
    if "parameters" in model:
        notes.insert(0, format_parameters(model["parameters"], model.get("active_parameters")))
    if line := mapping(facts.plan.get("schedule")).get("line"):
        notes.append(str(line))
    if notes:
        yield "; ".join(notes), "soft"


def _last_start(facts: RunFacts) -> Iterable[tuple[str, str]]:
    """Yield (name, value) of the last start; older runs do not record all of them."""
    start = facts.lives[-1] if facts.lives else {}
    if command := start.get("command"):
        yield "command", str(command)
    if time := start.get("time"):
        ended = mapping(start.get("ended")).get("time")
        took = "" if ended is None else f", for {format_duration(ended - time)}"
        yield "started", f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC{took}"
    if machine := ", ".join(str(start[name]) for name in ("host", "device") if name in start):
        yield "machine", machine
    if versions := mapping(start.get("versions")):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _key_figures(facts: RunFacts) -> Iterable[tuple[str, str, str]]:
    """Yield the tiles: (label, number, remark)."""
    losses, held_out = _numbers(facts.steps, "loss"), _numbers(facts.evaluations, "loss")
    if losses:
        last = _number(facts.steps[-1].get("loss"))
        shown = "not finite" if last is None else f"{last:.4f}"
        yield "loss of the last step", shown, f"{losses[0]:.4f} at first"
    if held_out:
        yield "held-out loss", f"{held_out[-1]:.4f}", f"{min(held_out):.4f} at best"
    speeds, times = _numbers(facts.steps, "tokens_per_s"), _numbers(facts.steps, "step_s")
    if speeds:
        yield "tokens/s", f"{median(speeds):,.0f}", "median of steps"
        share = model_flop_share(facts.plan, median(speeds))
        if share is not None:
            yield "MFU", f"{100 * share[0]:.3g} %", share[1]
        yield (
            "time in steps",
            format_duration(math.fsum(times)),
            f"{format_count(len(times))} steps",
        )
    tokens = [s["tokens"] for s in facts.steps if "tokens" in s]
    if tokens:
        yield "tokens", format_count(tokens[-1]), ""
    peaks = _numbers(facts.steps, "memory", "peak")
    if peaks:
        tier, budget = _peak_memory(facts.plan)
        more = f"of {format_size(budget)}, the budget" if budget else ""
        yield f"peak of {tier}", format_size(max(peaks)), more


def model_flop_share(plan: Mapping[str, Any], tokens_per_s: float) -> tuple[float, str] | None:
    """Return the MFU of a rank and a text that names its basis; None if the plan lacks facts.

    MFU is the model's FLOP (`flop_per_token`) over the FLOP rate of matrix products. Recomputation
    and attention products of tokens with tokens are not counted.
    """
    machine, work = mapping(plan.get("machine")), mapping(plan.get("work"))
    name = f"compute.{work.get('precision')}"
    name = name.replace("fp16", "bf16")  # the plan has one rate for both
    rate = mapping(machine.get("rates")).get(name)
    flop = mapping(plan.get("model")).get("flop_per_token")
    if not rate or not flop:
        return None
    ranks = mapping(plan.get("ranks")).get("count", 1)
    sharing_gpus = machine.get("gpus", 1) if machine.get("unified") else 1
    nominal = name in machine.get("nominal", ())
    rate_text = f"{rate / 1e12:,.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} GFLOP/s"
    basis = f"of {rate_text}, {'nominal' if nominal else 'measured'}"
    return flop * tokens_per_s / ranks / (rate / sharing_gpus), basis


# --- curves --------------------------------------------------------------------------------------


def _curves(facts: RunFacts) -> list[dict[str, Any]]:
    """Return rows of at most `POINTS` points: means over steps, and maxima of peaks."""
    rows = []
    written = read = 0.0
    for part in _parts(facts.steps, POINTS):
        read += math.fsum(_numbers(part, "moved", "disk_read"))
        written += math.fsum(_numbers(part, "moved", "disk_write"))
        row = {
            "step": part[-1]["step"],
            "read": read / _GIB,
            "written": written / _GIB,
            "peak": max(_numbers(part, "memory", "peak"), default=None),
            "rss": max(_numbers(part, "memory", "process"), default=None),
        }
        for name in ("peak", "rss"):
            row[name] = None if row[name] is None else row[name] / _GIB
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s"):
            values = _numbers(part, name)
            row[name] = fmean(values) if values else None
        rows.append(row)
    return rows


def _curve(
    page: ReportPage,
    title: str,
    field: str,
    unit: str,
    form: str,
    note: str,
    *more: Spec,
    **scale: Any,
) -> None:
    """Add a chart of one field over steps."""
    tip = tooltip(step=("step", ","), **{field: (unit, form)})
    if len({row[field] for row in page.datasets["steps"]}) == 1:
        scale["zero"] = True  # an axis over a single value has no ticks
    y = quantitative(field, unit, "~s" if form == "~s" else "", scale={"zero": False, **scale})
    line = {"mark": {"type": "line", "strokeWidth": 2, "point": len(page.datasets["steps"]) < 3},
            "encoding": {"x": _X, "y": y}}  # fmt: skip
    layers = [*_start_marks(page), line, *more, hover(_X, tip)]
    page.chart(title, {"data": {"name": "steps"}, "layer": layers}, note)


def _start_marks(page: ReportPage) -> list[Spec]:
    """Return the layer that marks resumed starts, if there are any."""
    if not page.datasets["starts"]:
        return []
    mark = {"type": "rule", "strokeDash": [3, 3], "opacity": 0.5}
    return [{"data": {"name": "starts"}, "mark": mark, "encoding": {"x": _X}}]


def _losses(page: ReportPage, facts: RunFacts, mean: str) -> None:
    y = quantitative("loss", "nats a token", scale={"zero": False})
    layers: list[Spec] = [
        *_start_marks(page),
        {"mark": {"type": "line", "strokeWidth": 1.5},
         "encoding": {"x": _X, "y": y, "color": {"datum": "training"}}},
    ]  # fmt: skip
    if page.datasets["evaluations"]:
        layers.append(
            {"data": {"name": "evaluations"},
             "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 30}},
             "encoding": {"x": _X, "y": y, "color": {"datum": "held out"},
                          "tooltip": tooltip(step=("step", ","), loss=("held-out loss", ".4f"))}}
        )  # fmt: skip
    layers.append(hover(_X, tooltip(step=("step", ","), loss=("loss", ".4f"))))
    page.chart("Loss", {"data": {"name": "steps"}, "layer": layers}, mean)
    norms = _numbers(facts.steps, "grad_norm")
    factors = _numbers(facts.steps, "clip_factor")
    clipped = sum(factor < 1 for factor in factors)
    note = f"clipped in {clipped:,} of {len(factors):,} steps" if factors else ""
    wide = norms and min(norms) > 0 and max(norms) > 50 * min(norms)
    scale = {"type": "log"} if wide else {}
    _curve(page, "Norm of the gradient", "grad_norm", "norm before clipping", "~g", note, **scale)
    _curve(page, "Learning rate", "lr", "learning rate", "~g", "")


def _rates(page: ReportPage, facts: RunFacts, mean: str) -> None:
    notes = [mean] if mean else []
    expected = mapping(facts.plan.get("step")).get("tokens_per_s")
    if expected:
        notes.append(f"the plan expected {expected:,.0f}")
    _curve(page, "Tokens a second", "tokens_per_s", "tokens/s", ",.0f", "; ".join(notes), zero=True)


# --- memory --------------------------------------------------------------------------------------


def _peak_memory(plan: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the name of the memory that `memory.peak` measures, and its budget."""
    unified = mapping(plan.get("machine")).get("unified", True)
    budget = mapping(mapping(plan.get("plan")).get("budget"))
    return ("RAM", budget.get("host")) if unified else ("the device", budget.get("device"))


def _memory(page: ReportPage, facts: RunFacts) -> None:
    """Add a chart of planned tiers with budgets and measured peaks, and one of peaks."""
    planned, (memory_name, budget) = mapping(facts.plan.get("plan")), _peak_memory(facts.plan)
    unified = memory_name == "RAM"
    peaks = _numbers(facts.steps, "memory", "peak")
    process = _numbers(facts.steps, "memory", "process")
    highest = {"RAM": max(peaks if unified else process, default=None),
               "device": None if unified else max(peaks, default=None)}  # fmt: skip
    bars, marks = [], []
    for tier, parts in _planned_memory(facts.plan, unified).items():
        limit = mapping(planned.get("budget")).get("host" if tier == "RAM" else tier)
        peak, used = highest.get(tier), sum(parts.values())
        full = max(limit or 0, used, peak or 0)
        label = f"{tier}, {format_size(full)}"
        bars += [
            {"tier": label, "what": what, "share": nbytes / full, "size": format_size(nbytes)}
            for what, nbytes in parts.items()
        ]
        for kind, nbytes in (("budget", limit), ("measured", peak)):
            if nbytes:
                near = "right" if nbytes > full / 2 else "left"
                marks.append({"tier": label, "share": nbytes / full, "kind": kind, "near": near,
                              "size": format_size(int(nbytes))})  # fmt: skip
    if bars:
        page.datasets["tiers"], page.datasets["marks"] = bars, marks
        title, note = (
            "Memory of each tier",
            "bars: planned; lines: the budget, and the peak measured",
        )
        page.chart(title, _tier_chart(len({bar["tier"] for bar in bars})), note)
    if peaks:
        note = "resident memory of the process" if unified else "the device's allocator"
        rules: list[Spec] = []
        if budget:
            y = {"field": "peak", "type": "quantitative"}
            mark = {"type": "rule", "strokeDash": [6, 3]}
            values = {"values": [{"peak": budget / _GIB}]}
            rules, note = (
                [{"data": values, "mark": mark, "encoding": {"y": y}}],
                f"{note}; dashed: its budget",
            )
        title = f"Peak of {memory_name} in each step"
        _curve(page, title, "peak", "GiB", ".3~f", note, *rules, zero=True)


_PURPOSES = {"process": "process", "weights": "weights", "state": "moments, residual",
             "gradients": "gradients"}  # fmt: skip


def _planned_memory(plan: Mapping[str, Any], unified: bool) -> dict[str, dict[str, int]]:
    """Return bytes by tier and purpose, other purposes as buffers; empty tiers are omitted."""
    tiers: dict[str, dict[str, int]] = {}
    estimated = mapping(plan.get("activations"))
    memory = dict(mapping(mapping(plan.get("plan")).get("memory")))
    if memory:
        key = "host" if unified else estimated.get("tier", "device")
        activations = {"activations": estimated.get("total", 0)}
        memory[key] = {**memory.get(key, {}), **activations}
    for key, parts in memory.items():
        tier = "RAM" if key == "host" or (unified and key == "device") else key
        for purpose, nbytes in parts.items():
            is_activations = purpose == "activations"
            label = (
                "activations, estimated" if is_activations else _PURPOSES.get(purpose, "buffers")
            )
            if nbytes:
                purposes = tiers.setdefault(tier, {})
                purposes[label] = purposes.get(label, 0) + int(nbytes)
    return tiers


def _tier_chart(count: int) -> Spec:
    step = max(70, 150 // count)  # pixels per tier
    axis = {"labelLimit": 90, "labelExpr": "split(datum.label, ', ')"}
    y = {"field": "tier", "type": "nominal", "title": None, "sort": None, "axis": axis}
    x = quantitative("share", None, "%", scale={"domain": [0, 1]})
    tip = tooltip(tier=("tier", ""), what=("what", ""), size=("size", ""))
    bars = {
        "data": {"name": "tiers"},
        "mark": {"type": "bar", "height": {"band": 0.5}},
        "encoding": {"y": y, "x": {**x, "stack": "zero"}, "color": {"field": "what", "sort": None},
                     "tooltip": tip},
    }  # fmt: skip
    tip = tooltip(tier=("tier", ""), kind=("what", ""), size=("size", ""))
    encoding = {"y": y, "x": x, "tooltip": tip}
    lines = {
        "data": {"name": "marks"},
        "mark": {"type": "tick", "thickness": 2, "height": {"band": 0.7}},
        "encoding": encoding,
    }
    text = {
        "data": {"name": "marks"},
        "mark": {"type": "text", "fontSize": 11, "align": {"expr": "datum.near"},
                 "dx": {"expr": "datum.near == 'right' ? -4 : 4"},
                 "dy": {"expr": f"datum.kind == 'budget' ? {-0.34 * step} : {0.36 * step}"}},
        "encoding": {"y": y, "x": x, "text": {"field": "kind"}},
    }  # fmt: skip
    return {"height": step * count, "layer": [bars, lines, text]}


# --- time ----------------------------------------------------------------------------------------


def _wait_times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return mean seconds of a step without waits, and by cause of wait if not negligible."""
    timed = [s for s in steps if _number(s.get("step_s")) is not None]
    if not timed:
        return {}
    waits = {
        cause: fmean(_number(mapping(s.get("stall_s")).get(cause)) or 0.0 for s in timed)
        for cause in STALLS
    }
    mean_s = fmean(s["step_s"] for s in timed)
    no_wait_s = max(mean_s - sum(waits.values()), 0.0)
    return {_NO_WAIT: no_wait_s} | {cause: s for cause, s in waits.items() if s >= 5e-4 * mean_s}


def _times(page: ReportPage, facts: RunFacts) -> None:
    """Add a chart of the time of steps by cause of wait."""
    overall = _wait_times(facts.steps)
    if not overall:
        return
    rows = []
    for part in _parts(facts.steps, BARS):
        waits = _wait_times(part)
        rows += [
            {"step": part[0]["step"], "to": part[-1]["step"] + 1, "what": _label(cause),
             "seconds": waits.get(cause, 0.0)}
            for cause in overall
        ]  # fmt: skip
    page.datasets["times"] = rows
    page.chart(
        "Where a step's time went",
        {
            "data": {"name": "times"},
            "mark": {"type": "bar"},
            "encoding": {
                "x": {**_X, "bin": "binned"}, "x2": {"field": "to"},
                "y": quantitative("seconds", "seconds a step", stack="zero"),
                "color": {"field": "what", "sort": None, "legend": {"columns": 1}},
                "order": {"field": "what", "sort": "ascending"},
                "tooltip": tooltip(step=("from step", ","), what=("what", ""),
                                   seconds=("seconds", ".3~g")),
            },
        },
        "seconds of the training thread; all that is not the first is a wait",
    )  # fmt: skip


def _label(cause: str) -> str:
    return cause if cause == _NO_WAIT else f"wait: {cause.replace('_', ' ')}"


def _remedies(page: ReportPage, facts: RunFacts) -> None:
    """Add tables of waits with remedies, and of predicted gains of changes."""
    overall = _wait_times(facts.steps)
    total = sum(overall.values())
    rows = []
    for cause, seconds in sorted(overall.items(), key=lambda item: -item[1]):
        remedy = ""
        if cause != _NO_WAIT:
            remedy = f"{STALLS[cause].meaning}; helps: {STALLS[cause].remedy}".replace("`", "")
        rows.append((f"{seconds / total:.1%}", _label(cause), remedy))
    if rows:
        waited = 1 - overall[_NO_WAIT] / total
        note = f"a step takes {format_duration(total)}, {waited:.1%} of it waits"
        step = mapping(facts.plan.get("step"))
        if {"seconds", "binds"} <= set(step):
            binds = str(step["binds"]).replace("_", " ")
            note += f"; the plan expected {format_duration(step['seconds'])}, and {binds} to bind"
        page.table("Waits of a step, and remedies", rows, note)
    ways = [
        (
            f"{way['speed_up']:.2f} x",
            way["what"] + ("; another training" if way["changes_batch"] else ""),
            way["how"] or "hardware",
        )
        for way in facts.plan.get("faster") or ()
        if {"speed_up", "what", "changes_batch", "how"} <= set(mapping(way))
    ]
    if ways:
        page.table("Predicted gain of changes", ways, "each planned again; predicted")


def _wear(page: ReportPage, facts: RunFacts) -> None:
    """Add a chart of the bytes that the drives read and wrote."""
    written = math.fsum(_numbers(facts.steps, "moved", "disk_write"))
    read = math.fsum(_numbers(facts.steps, "moved", "disk_read"))
    if not written and not read:
        return
    ranks = f" by each of {facts.ranks} ranks" if facts.ranks > 1 else ""
    note = f"{format_size(int(read))} read and {format_size(int(written))} written{ranks}"
    wear, seconds = mapping(facts.plan.get("wear")), math.fsum(_numbers(facts.steps, "step_s"))
    if written and wear.get("rated_bytes") and seconds:
        share = written * facts.ranks / wear["rated_bytes"]
        days = seconds / share / 86400
        note += (
            f": {100 * share:.2g} % of the {wear['rated_bytes'] / 1e12:,.4g} TB that a drive is "
            f"rated for, which last {days:,.0f} days at this rate"
        )
    tip = tooltip(step=("step", ","), read=("read, GiB", ".3~g"), written=("written, GiB", ".3~g"))
    lines = [
        {"mark": {"type": "line", "strokeWidth": 2},
         "encoding": {"x": _X, "y": quantitative(name, "GiB since the start"),
                      "color": {"datum": name}}}
        for name in ("read", "written")
    ]  # fmt: skip
    layers = [*_start_marks(page), *lines, hover(_X, tip)]
    page.chart("Drives", {"data": {"name": "steps"}, "layer": layers},
               note + "; checkpoints come on top")  # fmt: skip


# --- numbers -------------------------------------------------------------------------------------


def _parts(steps: Sequence[dict[str, Any]], max_parts: int) -> list[Sequence[dict[str, Any]]]:
    """Split steps into at most `max_parts` parts of equal length."""
    steps_per_part = max(-(-len(steps) // max_parts), 1)
    return [steps[first : first + steps_per_part] for first in range(0, len(steps), steps_per_part)]


def _number(value: Any) -> float | None:
    """Return a finite number, else None; metrics have "nan" and "inf" as strings."""
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_finite else None


def _numbers(records: Iterable[Mapping[str, Any]], *keys: str) -> list[float]:
    """Return the finite values of a number, given by nested keys."""
    numbers = []
    for record in records:
        value: Any = record
        for key in keys:
            value = mapping(value).get(key)
        if (number := _number(value)) is not None:
            numbers.append(number)
    return numbers
