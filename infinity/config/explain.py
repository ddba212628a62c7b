"""Messages for errors of a configuration: keys, closest names, and the given values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from infinity.errors import did_you_mean, mistakes

# pydantic's names for members of a union.
_UNION_MEMBER = re.compile(r"literal\[.*\]|(constrained-)?int|bool|str")
# Synonyms of values: the first of these that the key accepts is suggested.
_SYNONYMS = {
    "gpu": ("device",),
    "cuda": ("device",),
    "cpu": ("host",),
    "ram": ("host", "cpu"),
    "nvme": ("disk",),
    "ssd": ("disk",),
    "half": ("fp16",),
    "float16": ("fp16",),
    "bfloat16": ("bf16",),
    "float32": ("fp32",),
}


def explain(
    schema: type[BaseModel], where: str, error: ValidationError, foreign: Sequence[str] = ()
) -> str:
    """Return one message that lists every violation of `schema` by its dotted name.

    `foreign` are the top-level keys that belong to a DeepSpeed configuration.
    """
    problems = []
    if foreign:
        names, verb = ", ".join(foreign), "is" if len(foreign) == 1 else "are"
        problems.append(
            f"{names} {verb} from a DeepSpeed configuration; initialize() and `infinity plan` take "
            'such a file, with our keys in its section "infinity"'
        )
    problems_by_key: dict[tuple[int | str, ...], list[str]] = {}
    for detail in error.errors(include_url=False):
        # Reported above; a default factory fails only if the value it depends on does.
        is_foreign = detail["type"] == "extra_forbidden" and detail["loc"][0] in foreign
        if not is_foreign and detail["type"] != "default_factory_not_called":
            if detail["loc"] and _UNION_MEMBER.fullmatch(str(detail["loc"][-1])):
                detail["loc"] = detail["loc"][:-1]
            problems_by_key.setdefault(detail["loc"], []).append(_problem(schema, detail))
    for *others, last in problems_by_key.values():  # the errors of all members of a union
        choices = [problem.rpartition(", got ")[0] for problem in others]
        choices.append(last.partition(": should be ")[2] if others else last)
        problems.append(" or ".join(choices))
    return mistakes(where, problems)


def _problem(schema: type[BaseModel], detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    given = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(schema, detail["loc"])
        case "value_error":
            return f"{name}: {detail['ctx']['error']}"
        case "missing":
            return f"{name}: must be given"
        case "model_type":
            return f"{name}: is a section of keys and values, got {given!r}"
        case "literal_error":
            expected = detail["ctx"]["expected"]
            choices = [word.strip("',") for word in expected.split() if word.startswith("'")]
            near = [word for word in _SYNONYMS.get(str(given).lower(), ()) if word in choices]
            hint = did_you_mean((near or [str(given)])[0], choices)
            return f"{name}: should be {expected}, got {given!r}; {hint}".rstrip("; ")
        case _:
            message = detail["msg"].removeprefix("Input ")
            return f"{name}: {message[:1].lower()}{message[1:]}, got {given!r}"


def _unknown_key(schema: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    *parents, key = (str(part) for part in loc)
    section = schema
    for name in parents:
        section = _section_of(section.model_fields[name].annotation) or section
    fields = list(section.model_fields)
    prefix = "".join(f"{parent}." for parent in parents)
    # The key may belong to another section.
    same_name = (name for name in _leaf_names(schema) if name.rpartition(".")[2] == key)
    hint = did_you_mean(key, fields, prefix)
    hint = hint or "".join(f"did you mean {name!r}? " for name in list(same_name)[:1])
    return f"{prefix}{key}: unknown key; {hint}valid here: {', '.join(fields)}"


def _section_of(annotation: object) -> type[BaseModel] | None:
    candidates: tuple[object, ...] = (annotation, *get_args(annotation))
    for candidate in candidates:
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _leaf_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        subsection = _section_of(field.annotation)
        if subsection is None:
            yield prefix + name
        else:
            yield from _leaf_names(subsection, f"{prefix}{name}.")
