"""Translation of DeepSpeed configurations: each key is done, accepted with a note, or refused.

>>> translation = translate_deepspeed("ds_config.json")
>>> translation.config                      # infinity.Config
>>> for row in translation.rows: ...        # key, given, verdict, note
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.config.optimizer import SCHEDULES
from infinity.config.schema import BLOCK_MULTIPLE, CHUNK_MULTIPLE, Config, IoConfig, load_config
from infinity.errors import ConfigError, did_you_mean, listed, mistakes
from infinity.integrations.deepspeed.key_table import Key, KeyStatus
from infinity.integrations.deepspeed.keys import (
    BUILT_IN,
    KEYS,
    OPEN,
    REFUSAL_CONDITIONS,
    RENAMED_KEYS,
    SECTIONS,
    Row,
    names_in,
    read_value,
    rows_as_text,
)
from infinity.integrations.deepspeed.source import find_source
from infinity.optim.rules import RULES, decay_variant
from infinity.plan.planner import CHUNK_ELEMENTS

INFINITY_SECTION = "infinity"  # section of a DeepSpeed configuration with infinity's keys


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated DeepSpeed configuration.

    Attributes:
        config: The configuration of this library.
        rows: Treatment of each given key, in the order of the configuration.
        batch_size: Samples of a micro-batch.
        drop_last: Whether a loader drops a last batch that is smaller.
        trains: Whether an optimizer is configured or passed.
    """

    config: Config
    rows: tuple[Row, ...]
    batch_size: int
    drop_last: bool
    trains: bool = True

    def table(self) -> list[dict[str, Any]]:
        """Return the rows as plain data: key, given, verdict, note."""
        return [row.as_dict() for row in self.rows]

    def describe(self) -> str:
        """Return the rows as text: a heading, and one line per row."""
        return rows_as_text(self.table())

    def summary(self) -> str:
        """Return one line: the number of keys in effect, and the keys without effect."""
        idle = [row.key for row in self.rows if row.verdict is KeyStatus.ACCEPTED]
        done = f"{len(self.rows) - len(idle)} keys of the DeepSpeed configuration are in effect"
        return f"{done}; without effect here: {listed(idle, 6) or 'none'}"


def translate_deepspeed(
    source: Any,
    overrides: Iterable[str] = (),
    *,
    fill: Mapping[str, Any] | None = None,
    lenient: bool = False,
    client_optimizer: bool = False,
    client_scheduler: bool = False,
    ranks: int = 1,
) -> Translation:
    """Translate a DeepSpeed configuration.

    Its section ``"infinity"`` may have keys of this library, which take precedence; DeepSpeed
    ignores the section.

    Args:
        source: A mapping, the path of a file, JSON text, or base64 of it.
        overrides: Strings ``"section.key=value"`` with this library's keys, which take precedence
            over everything else.
        fill: Values for keys that are ``"auto"``, by DeepSpeed's dotted names.
        lenient: Accept a configuration that lacks values needed for training only, such as an
            optimizer.
        client_optimizer: `initialize` got an optimizer, which replaces the section.
        client_scheduler: `initialize` got a scheduler, which replaces the section.
        ranks: Number of processes that train.

    Returns:
        The configuration, and the treatment of each key.

    Raises:
        ConfigError: Keys are unknown (the nearest name is given), given twice, contradictory, of
            the wrong kind, or not supported (the alternative is given); all are listed.
    """
    options = {"client_optimizer": client_optimizer, "client_scheduler": client_scheduler}
    translation = find_translation(
        source, overrides, fill=fill or {}, lenient=lenient, ranks=ranks, **options
    )
    if translation is None:
        text = repr(source)
        raise ConfigError(
            f"not a DeepSpeed configuration: {text if len(text) <= 80 else f'{text[:77]}...'}",
            because="none of its keys is DeepSpeed's alone, or it cannot be read",
        )
    return translation


def find_translation(source: Any, overrides: Iterable[str] = (), **args: Any) -> Translation | None:
    """Translate a configuration like `translate_deepspeed`; return None if it is not DeepSpeed's.

    With `may_infer=True` the optimizer may be missing: then `trains` is False.
    """
    parsed, draft = find_source(source), _Draft(**args)
    if parsed is None:
        return None
    for name in parsed.repeated:
        draft.problem(name, "given twice in one section")
    section: Any = parsed.raw.get(INFINITY_SECTION, {})
    if not isinstance(section, Mapping):
        draft.problem(
            INFINITY_SECTION, f"should be a section with infinity's keys, got {section!r}"
        )
        section = {}
    # Without an optimizer, transformers leaves a scheduler section of 0 steps: do not read it.
    skipped: tuple[str, ...] = (INFINITY_SECTION,)
    if draft.may_infer and "optimizer" not in parsed.raw:
        skipped = (INFINITY_SECTION, "scheduler")
    for name, value in parsed.raw.items():
        if name not in skipped:
            draft.read("", "", name, value)
    for name, value in list(draft.given.items()):
        if name in KEYS:  # else an argument of a torch optimizer or schedule
            _translate_key(draft, KEYS[name], value)
    for translate in (_batch, _precision, _optimizer, _scheduler, _placement):
        translate(draft)
    config = _validated(draft, section, overrides)
    if draft.problems or config is None:
        raise ConfigError(mistakes(parsed.where, draft.problems))
    rows = tuple(draft.rows.values())
    drop_last = draft.given.get("dataloader_drop_last", False)
    return Translation(config, rows, draft.batch_size, drop_last, draft.trains)


def _validated(
    draft: _Draft, section: Mapping[str, Any], overrides: Iterable[str]
) -> Config | None:
    """Return the validated configuration, or None; problems name the keys as they were given."""
    try:
        return load_config(_merged(draft.config, section), overrides)
    except ConfigError as error:
        head, *problems = error.what.split("\n  - ")
    for problem in problems or [head]:
        name, colon, text = problem.partition(": ")
        if colon and _has_key(section, name):
            draft.problems.append(f"{INFINITY_SECTION}.{problem}")
            continue
        prefix = name if colon else ""
        while prefix and prefix not in draft.set_by:
            prefix = prefix.rpartition(".")[0]
        key = draft.set_by.get(prefix)  # that set this name or a section of it
        if key in draft.rows:
            key = draft.rows[key].key  # as it was written
        renamed = key is not None and key != name
        draft.problems.append(f"{key}: {text} (infinity's {name})" if renamed else problem)
    return None


def _has_key(section: Any, name: str) -> bool:
    """Return whether a section has a dotted name."""
    for key in name.split("."):
        if not isinstance(section, Mapping) or key not in section:
            return False
        section = section[key]
    return True


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        current = merged.get(name)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            value = _merged(current, value)
        merged[name] = value
    return merged


# --- reading -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A translation in progress: values by DeepSpeed's keys, the resulting settings, and problems.

    `fill` has values for keys that are "auto". `lenient` allows a missing learning rate and missing
    step counts, which a plan does not need. `may_infer` allows a missing optimizer: then `trains`
    becomes False.
    """

    fill: Mapping[str, Any] = field(default_factory=dict)
    lenient: bool = False
    client_optimizer: bool = False
    client_scheduler: bool = False
    may_infer: bool = False
    ranks: int = 1
    given: dict[str, Any] = field(default_factory=dict)
    source_names: dict[str, str] = field(default_factory=dict)  # key -> its name in the source
    autos: set[str] = field(default_factory=set)
    invalid: set[str] = field(default_factory=set)  # given with an invalid value
    config: dict[str, Any] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)  # infinity's name -> the key that set it
    rows: dict[str, Row] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    batch_size: int = 1
    trains: bool = True

    def set(self, name: str, value: Any, key: str) -> None:
        """Set the infinity setting `name` (dotted), as DeepSpeed's `key` requires."""
        target = self.config
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        self.set_by[name] = key

    def note(self, key: str, text: str, verdict: KeyStatus | None = None) -> None:
        """Set the note of a key's row; create a row for a key that was not given."""
        row = self.rows.get(key) or Row(key, None, KeyStatus.ACCEPTED, "")
        self.rows[key] = replace(row, note=text, verdict=verdict or row.verdict)

    def problem(self, key: str, text: str) -> None:
        """Record an error in a key."""
        self.problems.append(f"{key}: {text}")

    def section_values(self, section: str) -> dict[str, Any]:
        """Return the given values of a section, by their names in it."""
        start = f"{section}."
        return {n.removeprefix(start): v for n, v in self.given.items() if n.startswith(start)}

    def note_replaced_by_argument(self, section: str, argument: str) -> None:
        """Note that an argument of `initialize` replaces a section."""
        for key in [name for name in self.rows if name.startswith(f"{section}.")]:
            self.note(
                key, f"not used: initialize({argument}=...) takes precedence", KeyStatus.ACCEPTED
            )

    def read(self, section: str, section_path: str, name: object, value: Any) -> None:
        """Read one name of a section; `section_path` is the section's name in the source."""
        path = f"{section_path}.{name}" if section_path else str(name)
        if not isinstance(name, str):
            self.problem(path, f'the key is not text; write "{name}"')
            return
        full = f"{section}.{name}" if section else name
        full = RENAMED_KEYS.get(full, full)
        if not section and "." in name and full in KEYS:  # as TRL writes for a reference model
            note = "not used, as in DeepSpeed: it is outside its section"
            self.rows[f'"{name}"'] = Row(f'"{name}"', value, KeyStatus.ACCEPTED, note)
            return
        key = KEYS.get(full)
        if key is None and section in OPEN:
            key = Key(full, "anything", "its default", KeyStatus.DONE, "passed on")
        if key is not None:
            self._read_key(key, path, value)
        elif full in SECTIONS:
            if full == "zero_optimization" and isinstance(value, bool):
                value = {"stage": int(value)}  # format of early DeepSpeed releases
            if isinstance(value, Mapping):
                for inner, inner_value in value.items():
                    self.read(full, path, inner, inner_value)
            elif value is not None:
                self.problem(path, f"should be a section of keys and values, got {value!r}")
        else:
            self.problem(path, _unknown_key(section, name))

    def _read_key(self, key: Key, path: str, value: Any) -> None:
        name = key.name
        shown = "***" if name.endswith("api_key") and value is not None else value
        if value is None:
            self.rows.setdefault(name, Row(path, None, KeyStatus.ACCEPTED, "null: not given"))
            return
        is_auto = isinstance(value, str) and value == "auto"
        if is_auto and name not in self.fill:
            if key.verdict is KeyStatus.ACCEPTED:
                note = key.note
            elif key.verdict is KeyStatus.REFUSED:
                note = "off"
            elif name.startswith(("zero_optimization.", "aio.")):
                note = "left to the plan and infinity's defaults"
            else:
                note = f"as in DeepSpeed, {key.default}"
            self.autos.add(name)
            self.rows[name] = Row(path, shown, KeyStatus.ACCEPTED, f"auto: {note}")
            return
        try:
            read = read_value(key.kind, self.fill[name] if is_auto else value)
        except ValueError as error:
            self.problem(path, f"{error}, got {shown!r}")
            self.invalid.add(name)
            return
        earlier_name = self.source_names.get(name)
        if earlier_name is not None and self.given[name] != read:
            text = f"{shown!r}, but {earlier_name} is {self.given[name]!r}: two names of one key"
            self.problem(path, f"{text}; keep {earlier_name}")
            return
        self.source_names[name], self.given[name] = path, read
        note = f"{key.note} (auto, filled in with {read!r})" if is_auto else key.note
        self.rows[name] = Row(path, shown, key.verdict, note)
        if key.verdict is KeyStatus.REFUSED and REFUSAL_CONDITIONS[key.when](read):
            what = "a section that is on" if isinstance(shown, Mapping) else repr(shown)
            self.problem(path, f"{what} is refused: {key.note}; {key.remedy}")
        elif key.verdict is KeyStatus.REFUSED:
            self.note(name, "off", KeyStatus.ACCEPTED)


def _unknown_key(section: str, name: str) -> str:
    if not section and name in Config.model_fields:
        return (
            "one of infinity's keys, among DeepSpeed's; write "
            f'"{INFINITY_SECTION}": {{"{name}": ...}}, or leave out the others'
        )
    prefix = f"{section}." if section else ""
    known = names_in(section)
    # The name may exist, but in another section.
    exact = [full for full in (*SECTIONS, *KEYS) if full.rpartition(".")[2] == name]
    hint = f"did you mean {exact[0]!r}?" if exact else did_you_mean(name, known, prefix).strip()
    if hint:
        return f"unknown key; {hint}"
    return f"unknown key; known {f'in {section}' if section else 'at the top'}: {', '.join(known)}"


# --- translation of single keys ------------------------------------------------------------------

_ZERO = "zero_optimization"
_SCALE = "loss_scale."  # infinity's section that fp16 sets, if it is enabled
_NO_LIVE_BOUND = 10**9  # DeepSpeed's default; this value or more is no bound
_STAGES = (
    "only state that offload_* names or that does not fit leaves the GPU; ranks shard all state",
    "the stage has no effect: ranks shard all state, as in stage 3",
    "the stage has no effect: ranks shard all state, as in stage 3",
    "offload works at any stage",
)


def _translate_key(draft: _Draft, key: Key, value: Any) -> None:
    if key.native_key and not key.native_key.startswith(_SCALE):
        draft.set(key.native_key, value, key.name)
    elif key.name in _TRANSLATORS:
        try:
            note = _TRANSLATORS[key.name](draft, key.name, value)
        except ValueError as error:
            draft.problem(draft.rows[key.name].key, f"{error}, got {value!r}")
        else:
            if note is not None:
                draft.note(key.name, note)


def _stage(draft: _Draft, key: str, value: int) -> str:
    if value >= len(_STAGES):
        raise ValueError("should be 0, 1, 2 or 3")
    return f"stage {value}: {_STAGES[value]}"


def _sub_group(draft: _Draft, key: str, value: int) -> str | None:
    if value >= CHUNK_ELEMENTS:
        return None
    chunk = max(value // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
    draft.set("chunk_size", chunk, key)
    return f"chunk_size {chunk} elements"


def _prefetch(draft: _Draft, key: str, value: int) -> str | None:
    """Disable prefetching for 0 elements; any other number leaves the prefetch to the plan."""
    if value:
        return None
    draft.set("prefetch_units", 0, key)
    return "no prefetch: slow"


def _max_live(draft: _Draft, key: str, value: int) -> str | None:
    if value >= _NO_LIVE_BOUND:
        return None
    draft.set("hints.live_parameters", value, key)
    return f"hints.live_parameters {value:,}: a shorter prefetch, 1 unit at least"


def _pinned(draft: _Draft, key: str, value: bool) -> str | None:
    return None if value else f"no effect: {KEYS[key].note} where the system allows it"


def _quantized_frozen(draft: _Draft, key: str, value: bool) -> str | None:
    if not value:
        return "frozen weights are stored unquantized"
    draft.set("frozen.format", "int8", key)
    return None


def _cpu_checkpointing(draft: _Draft, key: str, value: bool) -> str | None:
    if not value:
        return "tensors saved for backward stay on the device"
    draft.set("activations.offload", "host", key)
    return None


def _block_size(draft: _Draft, key: str, value: int) -> None:
    if value % BLOCK_MULTIPLE:
        least = max(value // BLOCK_MULTIPLE, 1) * BLOCK_MULTIPLE
        raise ValueError(f"should be a multiple of {BLOCK_MULTIPLE} bytes; write {least}")
    draft.set("io.block_size", value, key)


def _allreduce_op(draft: _Draft, key: str, value: str) -> None:
    if value == "sum" and draft.ranks > 1:
        raise ValueError(f'is the mean over {draft.ranks} ranks; write "mean", and a larger loss')


def _threads(draft: _Draft, key: str, value: int) -> None:
    draft.set("io.num_threads", max(value, IoConfig().num_threads), key)


# Translation of values for keys without `Key.native_key`. A function may return a note for this
# value; it raises `ValueError` if the value is invalid.
_TRANSLATORS: dict[str, Callable[[_Draft, str, Any], str | None]] = {
    "bf16.check_grad_overflow": lambda draft, key, value: (
        None if value else "always on: a step whose gradients are not finite is skipped"
    ),
    f"{_ZERO}.stage": _stage,
    f"{_ZERO}.sub_group_size": _sub_group,
    f"{_ZERO}.stage3_prefetch_bucket_size": _prefetch,
    f"{_ZERO}.stage3_max_live_parameters": _max_live,
    f"{_ZERO}.offload_param.pin_memory": _pinned,
    f"{_ZERO}.offload_optimizer.pin_memory": _pinned,
    f"{_ZERO}.zero_quantized_nontrainable_weights": _quantized_frozen,
    "activation_checkpointing.cpu_checkpointing": _cpu_checkpointing,
    "gradient_allreduce_op": _allreduce_op,
    "aio.block_size": _block_size,
    "aio.intra_op_parallelism": _threads,
}

# --- translation of combined keys ----------------------------------------------------------------

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(draft: _Draft) -> None:
    """Check that train_batch_size = micro-batch x accumulation x processes; derive missing factors.

    As in DeepSpeed, one of the first two must be given; the total alone means 1 accumulation step.
    """
    if draft.invalid.intersection(_BATCH):
        return  # already reported; nothing can be derived
    total, micro, steps = (draft.given.get(name) for name in _BATCH)
    has_default = draft.lenient or draft.autos.intersection(_BATCH)
    if total is None and micro is None and not has_default:
        text = f"must be given, or {_BATCH[1]}: the number of samples of a micro-batch"
        draft.problem(_BATCH[0], text)
        return
    ranks = draft.ranks
    if total is None:
        micro, steps = micro or 1, steps or 1
        total = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = total // (steps * ranks)
    elif steps is None:
        steps = total // (micro * ranks)
    sizes = (total, micro, steps)
    if total != micro * steps * ranks:  # also if a derived factor is 0: the total is above 0
        described = [
            f"{name} {value}" + ("" if name in draft.given else " (derived)")
            for name, value in zip(_BATCH, sizes, strict=True)
        ]
        count, remainder = divmod(total, micro * steps or total + 1)
        hint = f"; they are right for {count} processes" if count > 1 and not remainder else ""
        draft.problem(
            _BATCH[0],
            f"{described[0]} is not {described[1]} x {described[2]} x {ranks} process"
            f"{'es' if ranks > 1 else ''}; change one of them, or leave {_BATCH[2]} out{hint}",
        )
        return
    draft.batch_size = micro
    draft.set("gradient_accumulation_steps", steps, _BATCH[2])
    for name, value in zip(_BATCH, sizes, strict=True):
        if name in draft.autos:
            draft.note(name, f"auto: {value}, from the others", KeyStatus.DONE)


def _precision(draft: _Draft) -> None:
    """Translate the sections bf16, fp16 and torch_autocast; neither bf16 nor fp16 means fp32."""
    bf16, fp16 = draft.given.get("bf16.enabled"), draft.given.get("fp16.enabled")
    if bf16 and fp16:
        draft.problem("bf16.enabled", "bf16 and fp16 cannot both be enabled; keep one of them")
    if bf16 is None and "bf16.enabled" in draft.autos:
        bf16 = True
        draft.note("bf16.enabled", "auto was not resolved: bf16", KeyStatus.DONE)
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if precision == "fp32":
        text = "neither bf16 nor fp16 is enabled: fp32, as in DeepSpeed"
        draft.note("bf16.enabled", text, KeyStatus.DONE)
    draft.set("precision", precision, "fp16.enabled" if precision == "fp16" else "bf16.enabled")
    if draft.given.get(f"{precision}.auto_cast"):
        draft.set("cast_inputs", True, f"{precision}.auto_cast")
    enabled, dtype = "torch_autocast.enabled", draft.given.get("torch_autocast.dtype", "bfloat16")
    if draft.given.get(enabled) and "bf" not in dtype:
        text = f'{dtype} needs loss scaling; write "fp16": {{"enabled": true}}, or "bfloat16"'
        draft.problem("torch_autocast.dtype", text)
    elif draft.given.get(enabled) and precision != "fp32":
        draft.problem(enabled, f"true, and {precision}.enabled too; keep one of them")
    elif draft.given.get(enabled):
        draft.set("autocast", True, enabled)
    static_scale = draft.given.get("fp16.loss_scale", 0)  # 0: dynamic
    for key in KEYS.values():
        if key.name not in draft.given or not key.native_key.startswith(_SCALE):
            continue
        if precision != "fp16":
            draft.note(key.name, "not used: fp16 is not enabled", KeyStatus.ACCEPTED)
        elif static_scale and key.name != "fp16.loss_scale":
            text = f"not used: the scale is constant, {static_scale:g}"
            draft.note(key.name, text, KeyStatus.ACCEPTED)
        else:
            draft.set(key.native_key, draft.given[key.name], key.name)
    dtype = draft.given.get("data_types.param_dtype")
    if dtype is not None and dtype != precision:
        text = f"is {dtype!r}, but the run computes in {precision}; leave it out, or enable {dtype}"
        draft.problem("data_types.param_dtype", text)


# DeepSpeed's section -> kind of state whose placement it sets, and the section's earlier key.
_OFFLOADED = {
    "offload_param": ("weights", "cpu_offload_param"),
    "offload_optimizer": ("optimizer_state", "cpu_offload"),
}
_TIERS = {
    "none": ("device", "on the GPU; without a GPU in RAM"),
    "cpu": ("host", "in RAM"),
    "nvme": ("disk", "on disk"),
}  # fmt: skip


def _placement(draft: _Draft) -> None:
    """Translate the offload sections to placements; the plan decides the others."""
    for section, (_, old) in reversed(_OFFLOADED.items()):
        key = f"{_ZERO}.{section}.device"
        if draft.given.get(f"{_ZERO}.{old}"):  # true is {"device": "cpu"}
            device = draft.given.setdefault(key, "cpu")
            if device != "cpu":
                text = f'true means {section} on "cpu", but {key} is {device!r}; remove one'
                draft.problem(f"{_ZERO}.{old}", text)
    paths: dict[str, str] = {}  # path -> the first key that has it
    for section, (kind, _) in _OFFLOADED.items():
        device_key, path_key = f"{_ZERO}.{section}.device", f"{_ZERO}.{section}.nvme_path"
        device, path = draft.given.get(device_key), draft.given.get(path_key)
        if path_key in draft.invalid:
            continue  # already reported
        if device == "nvme" and path is None:
            text = "must be given where device is nvme: a directory on the drive"
            draft.problem(path_key, text)
        elif device is not None:
            tier, location = _TIERS[device]
            draft.note(device_key, f"{kind.replace('_', ' ')}: {location}", KeyStatus.DONE)
            if section == "offload_optimizer":
                tier = _tier_for_ratio(draft, tier)
            draft.set(f"placement.{kind}", tier, device_key)
        elif any(n.startswith(f"{_ZERO}.{section}.") for n in (*draft.given, *draft.autos)):
            draft.note(device_key, f"not given: the plan places the {kind.replace('_', ' ')}")
        if path is not None and device in (None, "nvme"):
            for directory in path:
                paths.setdefault(directory, path_key)
        elif path is not None:
            draft.note(path_key, "not used: device is not nvme", KeyStatus.ACCEPTED)
    if paths:
        draft.set("nvme_path", list(paths), next(iter(paths.values())))
    for section in _OFFLOADED if len(paths) > 1 else ():
        if (key := f"{_ZERO}.{section}.nvme_path") in draft.given:
            draft.note(key, f"striped over {len(paths)} paths, all state over all of them")


def _tier_for_ratio(draft: _Draft, tier: str) -> str:
    """Return the tier of optimizer state; a `ratio` below 1 lets the plan choose by unit."""
    key = f"{_ZERO}.offload_optimizer.ratio"
    ratio = draft.given.get(key, 1.0)
    if ratio >= 1.0 or tier == "device":
        return tier
    if tier == "disk":
        draft.note(key, "not used with nvme, as in DeepSpeed", KeyStatus.ACCEPTED)
        return tier
    placement = "device" if ratio == 0 else "auto"
    text = "none is offloaded" if ratio == 0 else "the plan decides which units' moments stay"
    draft.note(key, f"{text} on the GPU; the numbers are the same", KeyStatus.DONE)
    device = f"{_ZERO}.offload_optimizer.device"
    draft.note(device, f"optimizer state: {placement}, because of ratio {ratio:g}", KeyStatus.DONE)
    return placement


# --- the optimizer -------------------------------------------------------------------------------

_TYPE, _PARAMS = "optimizer.type", "optimizer.params"
_RULES = ", ".join(BUILT_IN.values())
_COMPRESSED = "sends compressed gradients between GPUs, which is not built in"
_SCALED = "scales rates by width with the mup package, which is not built in"
_NOT_BUILT_IN = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _COMPRESSED),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _SCALED),
    "lamb": "needs the norm of each full parameter, which no kernel has; remove the section and "
    "pass an implementation in torch: initialize(optimizer=pytorch_optimizer.Lamb)",
}
# Implementation choices of torch's optimizers, without effect here.
_HINTS = ("fused", "foreach", "capturable", "differentiable", "set_grad_none")
_NS_METHOD = (
    "matrices are orthogonalized by Newton-Schulz in bf16, as in torch.optim.Muon (ns_method "
    "standard); DeepSpeed's default, gram, multiplies smaller matrices and rounds differently"
)
_ADAM_ONLY = ("torch_adam", "adam_w_mode", "bias_correction")
_SWITCHES = (*_ADAM_ONLY, "amsgrad", "fp32_optimizer_states", "max_grad_norm", *_HINTS)


def _optimizer(draft: _Draft) -> None:
    """Translate the optimizer and its parameters; `Adam` means AdamW, as in DeepSpeed."""
    kind = draft.given.get(_TYPE)
    if draft.client_optimizer:
        draft.note_replaced_by_argument("optimizer", "optimizer")
    elif kind is not None and kind.lower() in BUILT_IN:
        _built_in(draft, kind)
    elif kind is not None:
        draft.problem(_TYPE, _unsupported_optimizer(kind, draft.section_values(_PARAMS)))
    elif _TYPE in draft.invalid:
        return  # already reported
    elif draft.lenient:
        draft.note(_TYPE, "not given: planned for AdamW")
        _moments(draft, {})
    elif draft.may_infer and _TYPE not in draft.autos:
        draft.note(_TYPE, "not given, nor model_parameters: an engine for inference")
        draft.trains = False
    else:
        example = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
        draft.problem(_TYPE, f"must be given, or initialize(optimizer=...); write {example}")


def _built_in(draft: _Draft, kind: str) -> None:
    params = draft.section_values(_PARAMS)
    base_rule = rule = BUILT_IN[kind.lower()]
    initial = RULES[base_rule].deepspeed or {}
    description = f"the built-in {rule}"
    is_adam = RULES[base_rule].decoupled is not None
    if RULES[base_rule].decoupled is False:  # DeepSpeed's "Adam" is AdamW by default
        decoupled = bool(params.get("adam_w_mode", True))
        rule = decay_variant(base_rule, decoupled=decoupled)
        reason = ", as in DeepSpeed: adam_w_mode is true" if decoupled else " with L2 decay"
        description = f"{rule}{reason}"
    rule_defaults = RULES[rule].defaults()
    if params.get("torch_adam") and RULES[rule].decoupled:
        initial = {"weight_decay": rule_defaults["weight_decay"]}  # torch's own default
    if rule == "Muon" and params.get("ns_method") != "standard":
        description += f"; {_NS_METHOD}"
        if "ns_method" in params:
            draft.note(f"{_PARAMS}.ns_method", f"not used: {_NS_METHOD}", KeyStatus.ACCEPTED)
    draft.note(_TYPE, description, KeyStatus.DONE)
    draft.set("optimizer.type", rule, _TYPE)
    keys = RULES[rule].deepspeed_keys or {name: (name,) for name in rule_defaults}
    accepted = [*keys, *(s for s in _SWITCHES if is_adam or s not in _ADAM_ONLY)]
    for key in params:
        if key not in accepted:
            hint = did_you_mean(key, accepted)
            text = f"{kind} does not take it; {hint}it takes {', '.join(accepted)}"
            draft.problem(f"{_PARAMS}.{key}", text)
    values = {name: (value, name) for name, value in initial.items()}
    for key in filter(params.__contains__, keys):
        values |= dict.fromkeys(keys[key], (params[key], key))
    for name, (value, key) in values.items():
        draft.set(f"optimizer.{name}", value, f"{_PARAMS}.{key}")
    if "lr" not in params and f"{_PARAMS}.lr" in draft.autos:
        if draft.lenient:
            draft.note(f"{_PARAMS}.lr", "auto: a plan does not depend on it")
        else:
            draft.problem(f"{_PARAMS}.lr", "auto was not resolved; write a number")
    _moments(draft, params)
    # DeepSpeed refuses max_grad_norm here; its meaning is clear.
    norm, clipping = params.get("max_grad_norm"), draft.given.get("gradient_clipping")
    if norm is not None and clipping is None:
        draft.set("gradient_clipping", norm, f"{_PARAMS}.max_grad_norm")
    elif norm is not None and clipping != norm:
        text = f"is {norm:g}, but gradient_clipping is {clipping:g}; keep gradient_clipping only"
        draft.problem(f"{_PARAMS}.max_grad_norm", text)


def _moments(draft: _Draft, params: Mapping[str, Any]) -> None:
    """Translate DeepSpeed's two switches for bf16 moments."""
    switch, key = "bf16.bf16_optimizer_states", f"{_PARAMS}.fp32_optimizer_states"
    if draft.given.get(switch):
        draft.set("optimizer.moments", "bf16", switch)
    elif params.get("fp32_optimizer_states") is False:
        draft.set("optimizer.moments", "bf16", key)
        draft.note(key, "moments are stored in bf16: lossy", KeyStatus.DONE)


def _unsupported_optimizer(kind: str, params: Mapping[str, Any]) -> str:
    import torch

    reason = _NOT_BUILT_IN.get(kind.lower())
    names = {name.lower(): name for name in vars(torch.optim) if name[:1].isupper()}
    torch_name = names.get(kind.lower())
    if torch_name is not None and torch_name != "Optimizer":
        arguments = {n: v for n, v in params.items() if n in _HINTS or n not in _SWITCHES}
        given = "".join(f", {name}={value!r}" for name, value in arguments.items())
        return (
            f"{kind} {reason or 'is not among the built-in rules'} ({_RULES}); remove the "
            f"section and write initialize(optimizer=lambda groups: torch.optim.{torch_name}"
            f"(groups{given}))"
        )
    if reason is not None:
        return f"{kind} {reason}; or use one of {_RULES}"
    hint = did_you_mean(kind, [*BUILT_IN.values(), *names.values()])
    return f"{kind!r} is not a known optimizer; {hint}built in: {_RULES}"


# --- the schedule --------------------------------------------------------------------------------

_SCHEDULE = "scheduler.type"


def _scheduler(draft: _Draft) -> None:
    """Translate DeepSpeed's schedules, and torch's by name; `SchedulerConfig` checks parameters."""
    if draft.client_scheduler:
        draft.note_replaced_by_argument("scheduler", "lr_scheduler")
        return
    kind, section = draft.given.get(_SCHEDULE), "scheduler.params"
    if kind is None:
        return
    source = "DeepSpeed's, value for value" if kind in SCHEDULES else "torch's"
    draft.note(_SCHEDULE, source, KeyStatus.DONE)
    # Of the keys that are "auto", warmup_max_lr is the optimizer's lr; step counts must be given.
    params = draft.section_values(section)
    autos = [name for name in SCHEDULES.get(kind, ()) if f"{section}.{name}" in draft.autos]
    lr = draft.given.get(f"{_PARAMS}.lr")
    if "warmup_max_lr" in autos and lr is not None:
        params["warmup_max_lr"] = lr
        draft.note(f"{section}.warmup_max_lr", f"auto: the optimizer's lr, {lr:g}", KeyStatus.DONE)
    missing = sorted({"warmup_num_steps", "total_num_steps"}.intersection(autos))
    if missing and draft.lenient:
        draft.note(_SCHEDULE, f"left out of the plan: {', '.join(missing)} is auto")
        return
    for name in missing:
        draft.problem(f"{section}.{name}", "auto was not resolved; write a number of steps")
    if not missing and not any(name.startswith(section) for name in draft.invalid):
        draft.set(_SCHEDULE, kind, _SCHEDULE)
        draft.set(section, params, section)
