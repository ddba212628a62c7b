"""The optimizer and scheduler sections."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from infinity.config_optimizer import OptimizerConfig
from infinity.integrations.deepspeed.draft import Draft, Verdict

_TYPE = "optimizer.type"
_PARAMS = "optimizer.params"
# Our rule, and what DeepSpeed starts from where it is not what we start from.
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"weight_decay": 0.0}),
    "adamw": ("AdamW", {"weight_decay": 0.0}),
    "lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.999]}),
    "adagrad": ("Adagrad", {}),
    "sgd": ("SGD", {}),
}
_ADAMS = ("adam", "adamw")
_COMPRESSED = "sends compressed gradients between GPUs; there is one process here"
_REFUSED = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "lamb": "needs the norm of each whole parameter, which no kernel here has yet",
    "muadam": "scales rates by width with the mup package, which is not built in",
    "muadamw": "scales rates by width with the mup package, which is not built in",
    "musgd": "scales rates by width with the mup package, which is not built in",
    "muon": "splits parameters between Muon and Adam, which is not built in",
}
# How an optimizer is carried out: nothing here depends on it.
HINTS = ("fused", "foreach", "capturable", "differentiable", "set_grad_none")
_SWITCHES = (
    "torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states",
    "max_grad_norm", *HINTS,
)  # fmt: skip


def optimizer(draft: Draft) -> None:
    """The update rule and what it starts from; `Adam` means AdamW, as there."""
    if draft.client_optimizer:
        for key in [name for name in draft.rows if name.startswith("optimizer.")]:
            text = "not used: initialize(optimizer=...) wins, as there"
            draft.note(key, text, Verdict.ACCEPTED)
        return
    kind = draft.given.get(_TYPE)
    if _TYPE in draft.wrong:
        return  # told
    if kind is None:
        if draft.lenient:
            draft.note(_TYPE, "not given: planned for AdamW")
            _moments(draft, {})
        elif draft.may_infer and _TYPE not in draft.autos:
            draft.note(_TYPE, "not given, nor model_parameters: an engine for inference")
            draft.trains = False
        else:
            example = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
            draft.problem(_TYPE, f"must be given, or initialize(optimizer=...); write {example}")
        return
    name = kind.lower()
    if name not in _BUILT_IN:
        draft.problem(_TYPE, _why_not(kind, draft.below(_PARAMS)))
        return
    _translate(draft, name)


def _translate(draft: Draft, name: str) -> None:
    params = dict(draft.below(_PARAMS))
    rule, start = _BUILT_IN[name]
    decoupled = False
    if name in _ADAMS:
        decoupled = name == "adamw" or params.get("adam_w_mode", True)
        rule = "AdamW" if decoupled else "Adam"
        if params.get("torch_adam") and decoupled:
            start = {"weight_decay": 0.01}  # torch's own default
    told = f"the built-in {rule}"
    if name == "adam":
        told = "AdamW, as there: adam_w_mode is true" if decoupled else "Adam with L2 decay"
    draft.note(_TYPE, told, Verdict.DONE)
    draft.set("optimizer.type", rule, _TYPE)
    takes = OptimizerConfig(type=rule).parameters()  # type: ignore[arg-type]
    own = {"torch_adam", "adam_w_mode", "bias_correction"} if name not in _ADAMS else set()
    known = [*takes, *(switch for switch in _SWITCHES if switch not in own)]
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            text = f"{draft.given[_TYPE]} does not take it; {hint}it takes {', '.join(known)}"
            draft.problem(f"{_PARAMS}.{key}", text)
    for key, value in {**start, **{k: v for k, v in params.items() if k in takes}}.items():
        draft.set(f"optimizer.{key}", value, f"{_PARAMS}.{key}")
    if "lr" not in params and f"{_PARAMS}.lr" in draft.autos:
        if draft.lenient:
            draft.note(f"{_PARAMS}.lr", "auto: a plan does not depend on it")
        else:
            draft.problem(f"{_PARAMS}.lr", "auto, and nobody filled it in; write a number")
    _moments(draft, params)
    _clipping(draft, params)


def _moments(draft: Draft, params: Mapping[str, Any]) -> None:
    """Two switches there make moments bf16."""
    switch = "bf16.bf16_optimizer_states"
    if draft.given.get(switch):
        draft.set("optimizer.moments", "bf16", switch)
    elif params.get("fp32_optimizer_states") is False:
        key = f"{_PARAMS}.fp32_optimizer_states"
        draft.set("optimizer.moments", "bf16", key)
        draft.note(key, "moments are stored in bf16: lossy", Verdict.DONE)


def _clipping(draft: Draft, params: Mapping[str, Any]) -> None:
    """DeepSpeed refuses max_grad_norm here; its meaning is clear."""
    most = params.get("max_grad_norm")
    clipping = draft.given.get("gradient_clipping")
    if most is None:
        return
    if clipping is None:
        draft.set("gradient_clipping", most, f"{_PARAMS}.max_grad_norm")
    elif clipping != most:
        draft.problem(
            f"{_PARAMS}.max_grad_norm",
            f"is {most:g}, but gradient_clipping is {clipping:g}; keep gradient_clipping only",
        )


def _why_not(kind: str, params: Mapping[str, Any]) -> str:
    import torch

    reason = _REFUSED.get(kind.lower())
    names = {name.lower(): name for name in vars(torch.optim) if name[:1].isupper()}
    in_torch = names.get(kind.lower())
    built_in = "AdamW, Adam, Lion, Adagrad, SGD"
    if in_torch is not None and in_torch != "Optimizer":
        given = "".join(f", {name}={value!r}" for name, value in params.items() if name in HINTS
                        or name not in _SWITCHES)  # fmt: skip
        return (
            f"{kind} {reason or 'is not among the built-in rules'} ({built_in}); remove the "
            f"section and write initialize(optimizer=lambda groups: torch.optim.{in_torch}"
            f"(groups{given}))"
        )
    if reason is not None:
        return f"{kind} {reason}; use one of {built_in}"
    known = [*(rule for rule, _ in _BUILT_IN.values()), *names.values()]
    near = difflib.get_close_matches(kind, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind!r} is no optimizer that is known; {hint}built in: {built_in}"


# --- the schedule ----------------------------------------------------------------------------

_SCHEDULE = "scheduler.type"
_STEPS = ("warmup_num_steps", "total_num_steps")


def scheduler(draft: Draft) -> None:
    """DeepSpeed's five schedules, and torch's by name."""
    from infinity.schedules import OURS, known_schedules

    if draft.client_scheduler:
        for key in [name for name in draft.rows if name.startswith("scheduler.")]:
            text = "not used: initialize(lr_scheduler=...) wins, as there"
            draft.note(key, text, Verdict.ACCEPTED)
        return
    kind = draft.given.get(_SCHEDULE)
    if kind is None:
        return
    schedules = known_schedules()
    if kind not in schedules:
        near = difflib.get_close_matches(kind, schedules, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        draft.problem(_SCHEDULE, f"{kind!r} is unknown; {hint}known: {', '.join(schedules)}")
        return
    params = dict(draft.below("scheduler.params"))
    takes = [name for name in inspect.signature(schedules[kind]).parameters if name != "optimizer"]
    ours = kind in {schedule.__name__ for schedule in OURS}
    draft.note(_SCHEDULE, "DeepSpeed's, value for value" if ours else "torch's", Verdict.DONE)
    known = _check_params(draft, kind, params, takes)
    missing = _fill_autos(draft, params, takes)
    if missing and draft.lenient:
        draft.note(_SCHEDULE, f"left out of the plan: {', '.join(missing)} is auto")
        return
    for name in missing:
        draft.problem(
            f"scheduler.params.{name}", "auto, and nobody filled it in; write a number of steps"
        )
    if known and not missing:
        draft.set("scheduler", {"type": kind, "params": params}, _SCHEDULE)


def _check_params(draft: Draft, kind: str, params: Iterable[str], takes: list[str]) -> bool:
    unknown = [name for name in params if name not in takes]
    for name in unknown:
        near = difflib.get_close_matches(name, takes, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        text = f"{kind} does not take it; {hint}it takes {', '.join(takes)}"
        draft.problem(f"scheduler.params.{name}", text)
    return not unknown


def _fill_autos(draft: Draft, params: dict[str, Any], takes: list[str]) -> list[str]:
    """What was "auto": the largest rate is the optimizer's; numbers of steps nobody can guess."""
    prefix = "scheduler.params."
    autos = [name.removeprefix(prefix) for name in sorted(draft.autos) if name.startswith(prefix)]
    lr = draft.given.get(f"{_PARAMS}.lr")
    if "warmup_max_lr" in autos and "warmup_max_lr" in takes and lr is not None:
        params["warmup_max_lr"] = lr
        draft.note(f"{prefix}warmup_max_lr", f"auto: the optimizer's lr, {lr:g}", Verdict.DONE)
    return [name for name in autos if name in _STEPS and name in takes]
