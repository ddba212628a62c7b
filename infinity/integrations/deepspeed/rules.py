"""What follows from several keys together: batch sizes, precision, homes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.integrations.deepspeed.draft import Draft, Verdict

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization"
# DeepSpeed's section, and the homes that it decides here.
_OFFLOADED = {"offload_param": "weights", "offload_optimizer": "moments"}
# Names in the fp16 section, and ours.
_LOSS_SCALE = {
    "loss_scale": "value",
    "initial_scale_power": "initial_power",
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min",
}
_HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}
_TIERS = {
    "none": "on the GPU at all times, where there is one; without a GPU the device is the RAM",
    "cpu": "in RAM",
    "nvme": "on disk",
}


def batch(draft: Draft) -> None:
    """train_batch_size = micro-batch x accumulation x 1 process; what is left out is derived.

    DeepSpeed's rules: the total alone is one micro-batch, one of the first two must be given.
    """
    if draft.wrong.intersection(BATCH):
        return  # told; nothing can be derived
    total, micro, steps = (draft.given.get(name) for name in BATCH)
    if total is None and micro is None:
        if not draft.lenient and not draft.autos.intersection(BATCH):
            draft.problem(
                BATCH[0], f"must be given, or {BATCH[1]}: the number of samples of a micro-batch"
            )
            return
        micro = 1
    numbers = _completed(total, micro, steps)
    if numbers[0] != numbers[1] * numbers[2]:  # 0 of something too: the total is above 0
        said = [
            f"{name} {value}" + ("" if name in draft.given else " (derived)")
            for name, value in zip(BATCH, numbers, strict=True)
        ]
        draft.problem(
            BATCH[0],
            f"{said[0]} is not {said[1]} x {said[2]} x 1 process; "
            f"change one of them, or leave {BATCH[2]} out",
        )
        return
    draft.batch_size = numbers[1]
    draft.set("gradient_accumulation_steps", numbers[2], BATCH[2])
    for name, value in zip(BATCH, numbers, strict=True):
        if name in draft.autos:
            draft.note(name, f"auto: {value}, from the others", Verdict.DONE)


def _completed(total: int | None, micro: int | None, steps: int | None) -> tuple[int, int, int]:
    """What was left out, from the rest; the total or the micro-batch is there."""
    if total is None:
        assert micro is not None
        steps = steps or 1
        return micro * steps, micro, steps
    if micro is None:
        steps = steps or 1
        return total, total // steps, steps
    return total, micro, total // micro if steps is None else steps


def precision(draft: Draft) -> None:
    """The bf16 and fp16 sections; neither means fp32, as there."""
    bf16, fp16 = draft.given.get("bf16.enabled"), draft.given.get("fp16.enabled")
    if bf16 and fp16:
        draft.problem("bf16.enabled", "bf16 and fp16 cannot both be enabled; keep one of them")
    if bf16 is None and "bf16.enabled" in draft.autos:
        bf16 = True
        draft.note("bf16.enabled", "auto: nobody filled it in, so bf16", Verdict.DONE)
    chosen = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if chosen == "fp32":
        draft.note("bf16.enabled", "neither bf16 nor fp16 is enabled: fp32, as there", Verdict.DONE)
    draft.set("precision", chosen, "fp16.enabled" if chosen == "fp16" else "bf16.enabled")
    _loss_scale(draft, scaled=chosen == "fp16")
    wanted = draft.given.get("data_types.param_dtype")
    if wanted is not None and wanted != chosen:
        draft.problem(
            "data_types.param_dtype",
            f"is {wanted!r}, but the run computes in {chosen}; leave it out, or enable {wanted}",
        )


def _loss_scale(draft: Draft, *, scaled: bool) -> None:
    """The fp16 section's scale: static where `loss_scale` is above 0, else dynamic."""
    static = draft.given.get("fp16.loss_scale", 0)
    for name, ours in _LOSS_SCALE.items():
        key = f"fp16.{name}"
        if key not in draft.given:
            continue
        if not scaled:
            draft.note(key, "not used: fp16 is not enabled", Verdict.ACCEPTED)
        elif static and name != "loss_scale":
            draft.note(key, f"not used: the scale is {static:g} all the time", Verdict.ACCEPTED)
        else:
            draft.set(f"loss_scale.{ours}", draft.given[key], key)


def homes(draft: Draft) -> None:
    """Offload choices are homes; what is not chosen there is left to the plan."""
    _old_offload(draft, "cpu_offload", "offload_optimizer")
    _old_offload(draft, "cpu_offload_param", "offload_param")
    paths: dict[str, str] = {}  # and the key that named each first
    for section, kind in _OFFLOADED.items():
        prefix = f"{_ZERO}.{section}"
        device = draft.given.get(f"{prefix}.device")
        path = draft.given.get(f"{prefix}.nvme_path")
        if f"{prefix}.nvme_path" in draft.wrong:
            continue  # told
        if device == "nvme" and path is None:
            text = "must be given where device is nvme: a directory on the drive"
            draft.problem(f"{prefix}.nvme_path", text)
        elif device is not None:
            home = _HOMES[device]
            if section == "offload_optimizer":
                home = _by_ratio(draft, prefix, home)
            draft.set(f"homes.{kind}", home, f"{prefix}.device")
            if home == _HOMES[device]:
                draft.note(f"{prefix}.device", f"{kind} rest {_TIERS[device]}", Verdict.DONE)
        elif draft.has_section(prefix):
            draft.note(f"{prefix}.device", f"not given: the plan decides where {kind} rest")
        if path is not None and device in (None, "nvme"):
            for one in path:
                paths.setdefault(one, f"{prefix}.nvme_path")
        elif path is not None:
            draft.note(f"{prefix}.nvme_path", "not used: device is not nvme", Verdict.ACCEPTED)
    _set_paths(draft, paths)


def _set_paths(draft: Draft, paths: Mapping[str, str]) -> None:
    if not paths:
        return
    draft.set("nvme_path", list(paths), next(iter(paths.values())))
    if len(paths) > 1:
        for section in _OFFLOADED:
            key = f"{_ZERO}.{section}.nvme_path"
            if key in draft.given:
                draft.note(key, f"striped over {len(paths)} paths, all state over all of them")


def _by_ratio(draft: Draft, prefix: str, home: str) -> str:
    """`ratio` below 1 leaves a share of the optimizer on the GPU; which units is for the plan."""
    ratio = draft.given.get(f"{prefix}.ratio", 1.0)
    if ratio >= 1.0 or home == "device":
        return home
    if home == "disk":
        draft.note(f"{prefix}.ratio", "not used with nvme, as there", Verdict.ACCEPTED)
        return home
    where = "device" if ratio == 0 else "auto"
    text = "none is offloaded" if ratio == 0 else "the plan decides which units' moments stay"
    draft.note(f"{prefix}.ratio", f"{text} on the GPU; the numbers are the same", Verdict.DONE)
    draft.note(f"{prefix}.device", f"moments: {where}, because of ratio {ratio:g}", Verdict.DONE)
    return where


def _old_offload(draft: Draft, old: str, section: str) -> None:
    """`cpu_offload: true` is `offload_optimizer: {"device": "cpu"}`."""
    if not draft.given.get(f"{_ZERO}.{old}"):
        return
    key = f"{_ZERO}.{section}.device"
    device = draft.given.get(key)
    if device not in (None, "cpu"):
        draft.problem(
            f"{_ZERO}.{old}", f'true means {section} on "cpu", but {key} is {device!r}; remove one'
        )
        return
    draft.given[key] = "cpu"


def prefetch(draft: Draft, value: Any) -> str | None:
    """0 elements ahead is no look-ahead; any other number is the plan's look-ahead in units."""
    if value == 0:
        draft.set("look_ahead", 0, f"{_ZERO}.stage3_prefetch_bucket_size")
        return "nothing is fetched ahead of its use: slow"
    return None
