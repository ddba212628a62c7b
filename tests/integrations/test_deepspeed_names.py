"""All of DeepSpeed's public names: they work, with its parameters, or say what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.names import all_modules, look_up, table

Engine = deepspeed.DeepSpeedEngine
# Made by `initialize`, or by engines: scripts only compare with them.
NOT_BUILT = {"DeepSpeedEngine", "DeepSpeedOptimizer", "ZeROOptimizer", "DeepSpeedConfigError",
             "ZeRORuntimeException"}  # fmt: skip
OF_TORCH = {"LRRangeTest.step", "LRRangeTest.load_state_dict", "WarmupLR.step"}  # torch's schedules
NAMES = [(m, n) for m, names in table().items() for n in names if "." not in n]
METHODS = [(m, n) for m, names in table().items() for n in names if "." in n]


def words_of(line: str) -> list[str] | None:
    """The parameters in a line of the table; None where there, or here, are none."""
    _, paren, rest = line.partition("(")
    return None if not paren or rest == "...)" else rest.removesuffix(")").split()


def is_refused(found: Any) -> bool:
    return type(found).__name__ == "Refused" or "is not here" in str(getattr(found, "__doc__", ""))


def differences(found: Any, wanted: list[str]) -> list[str]:
    """Parameters of DeepSpeed's that one of ours does not have in that place."""
    ours = list(inspect.signature(found).parameters.values())
    names = [p.name for p in ours if p.name != "self"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in ours)
    named = [name for name in wanted if not name.startswith("*")]
    logged = [name for name in named if name in ("prof", "log_name", "debug")]  # by name only
    placed = [name for name in named if name not in logged]
    apart = [name for place, name in enumerate(placed) if names[place : place + 1] != [name]]
    return [] if takes_any else apart + [name for name in logged if name not in names]


def test_every_name_is_there_and_has_deepspeeds_parameters() -> None:
    broken, served = [], 0
    for module, name in NAMES:
        found = getattr(all_modules()[module] if module else deepspeed, name)
        if is_refused(found):
            with pytest.raises(ConfigError, match=f"{name} is not here(.|\n)*try: "):
                found()
            continue
        served += 1
        wanted = words_of(table()[module][name])
        own = getattr(found, "__module__", "").startswith("infinity")
        if wanted is not None and own and name not in NOT_BUILT and callable(found):
            broken += [f"{module}.{name}: {one}" for one in differences(found, wanted)]
    assert not broken, "\n".join(broken)
    assert served > 200, served


def test_every_module_is_found_by_attribute() -> None:
    functions = {"utils.z3_leaf_module", "utils.torch"}  # a function by that name, and torch itself
    for path, module in all_modules().items():
        found: Any = deepspeed
        for part in path.split("."):
            found = getattr(found, part)
        assert found is module or path in functions, path


def test_methods_have_deepspeeds_parameters_or_say_what_to_write() -> None:
    broken = []
    without = {"DeepSpeedEngine": object.__new__(Engine), "DeepSpeedAccelerator": get_accelerator()}
    for module, path in METHODS:
        owner, _, name = path.partition(".")
        kind = look_up(module, owner)
        found = getattr(kind, name, None)
        wanted = words_of(table()[module][path])
        if found is None:
            with pytest.raises(ConfigError, match=f"{name} is not here(.|\n)*try: "):
                getattr(without[owner], name)()
        elif wanted is not None and inspect.isroutine(found) and path not in OF_TORCH:
            broken += [f"{path}: {one}" for one in differences(found, wanted)]
    assert not broken, "\n".join(broken)
