"""Coverage of the public interface by docstrings: sections, and words to avoid.

    python tools/docstring_coverage.py [--missing] [ROOT]

Prints a Markdown table: per group the callables, those with a docstring, and those with the
sections that their signatures call for. The sources are parsed, never imported, so ROOT may be a
checkout of any revision.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Group -> "module" for all public names of a module, or "module:Name ...". The remaining names of
# `infinity._WHERE` are the group "infinity".
GROUPS = {
    "Engine": ("infinity.engine:Engine",),
    "DeepSpeedEngine": ("infinity.integrations.deepspeed.engine:DeepSpeedEngine",),
    "infinity.integrations.deepspeed": (
        "infinity.integrations.deepspeed.zero:Init GatheredParameters is_zero_param "
        "register_external_parameter unwrap_model_for_generation",
        "infinity.integrations.deepspeed.utils:OnDevice",
        "infinity.integrations.deepspeed.processes:add_config_arguments init_distributed",
        "infinity.integrations.deepspeed.config:translate_deepspeed Translation",
        "infinity.integrations.deepspeed.door:as_deepspeed",
    ),
    "infinity.losses": ("infinity.losses",),
    "Hugging Face": (
        "infinity.integrations.huggingface.trainer:InfinityTrainer",
        "infinity.integrations.huggingface.settings:TrainingArguments",
        "infinity.integrations.huggingface.models:from_config from_pretrained save_pretrained",
    ),
    "Lightning": ("infinity.integrations.lightning:InfinityStrategy",),
    "Device": ("infinity.storage.device:Device",),
    "configuration": ("infinity.config.schema:Config load_config",),
}
# Words to avoid; `tests/project/test_style.py` counts them, too.
MARKERS = re.compile(
    r"\b(whoever|whom|nobody|what is|what it|what was|what a|what an|what the|who|in words|"
    r"by itself|of ours|of torch's|of DeepSpeed's|of theirs|beside|meanwhile|so many|as many|"
    r"as much|told|tells|tell|says|said|gone|let go|alike|put back|given up|give up|as they are|"
    r"others'|words)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Callable:
    """A public function, method or constructor, with its docstring and signature."""

    name: str
    text: str
    parameters: tuple[str, ...]
    returns: bool

    @property
    def has_args(self) -> bool:
        """True if an Args section names every parameter."""
        return all(re.search(rf"^\s+\**{name}(?:\s*\(|:)", self.text, re.M) for name in
                   self.parameters)  # fmt: skip

    @property
    def has_returns(self) -> bool:
        """True if the return value is described, by a section or by the first line."""
        return bool(re.search(r"^\s*(Returns|Yields):$|^(Return|Yield)s? ", self.text, re.M))

    @property
    def has_raises(self) -> bool:
        """True if there is a Raises section."""
        return bool(re.search(r"^\s*Raises:$", self.text, re.M))


def file_of(root: Path, module: str) -> Path:
    """Return the source file of a dotted module."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_callables(root: Path = ROOT) -> dict[str, list[Callable]]:
    """Return the public callables of a checkout by group."""
    places = public_places(root)
    grouped = {name for texts in GROUPS.values() for text in texts
               for name in text.partition(":")[2].split()}  # fmt: skip
    others = tuple(f"{where}:{name}" for name, where in places.items() if name not in grouped)
    groups = {"infinity": others, **GROUPS}
    return {
        group: [one for text in texts for one in callables_of(root, text)]
        for group, texts in groups.items()
    }


def public_places(root: Path) -> dict[str, str]:
    """Return `infinity._WHERE`: the modules of public names."""
    for node in ast.parse((root / "infinity/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE":
            return dict(ast.literal_eval(node.value))
    raise SystemExit(f"{root}: infinity/__init__.py has no _WHERE")


def callables_of(root: Path, text: str) -> Iterator[Callable]:
    """Yield the callables of "module" or "module:Name ...", methods of classes included."""
    module, _, names = text.partition(":")
    tree = ast.parse(file_of(root, module).read_text(encoding="utf-8"))
    wanted = set(names.split())
    for node in tree.body:
        name = getattr(node, "name", "_")
        if name in wanted if wanted else not name.startswith("_"):
            yield from callables_in(node)


def callables_in(node: ast.stmt, prefix: str = "") -> Iterator[Callable]:
    """Yield a function, or a class with its public methods."""
    if isinstance(node, ast.ClassDef):
        text = ast.get_docstring(node) or ""
        made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        users = bool(made) and "Made by `infinity.initialize`" not in text
        yield Callable(prefix + node.name, text, parameters_of(made[0]) if users else (), False)
        for one in node.body:
            if not getattr(one, "name", "_").startswith("_"):
                yield from callables_in(one, f"{prefix}{node.name}.")
    elif isinstance(node, ast.FunctionDef):
        marks = [ast.unparse(one) for one in node.decorator_list]
        if any(mark.endswith((".setter", "overload")) for mark in marks):
            return
        is_property = any(mark.endswith("property") for mark in marks)
        nothing = node.returns is None or ast.unparse(node.returns) in ("None", "Iterator[None]")
        text = ast.get_docstring(node) or ""
        yield Callable(prefix + node.name, text, parameters_of(node), not (is_property or nothing))


def parameters_of(node: ast.stmt) -> tuple[str, ...]:
    """Return the names of a function's parameters, without self, cls and private ones."""
    assert isinstance(node, ast.FunctionDef)
    found = node.args
    every = [*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg]
    names = [one.arg for one in every if one is not None]
    return tuple(name for name in names if name not in ("self", "cls") and name[0] != "_")


def main() -> None:
    """Print the table, and with --missing the callables that lack a section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--missing", action="store_true", help="list what lacks a section")
    options = parser.parse_args()
    groups = public_callables(options.root)
    print("| group | callables | documented | with Args | with Returns | with Raises | markers |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    everything = [one for found in groups.values() for one in found]
    for group, found in {**groups, "all": everything}.items():
        taking, giving = [o for o in found if o.parameters], [o for o in found if o.returns]
        cells = (
            len(found),
            sum(bool(one.text) for one in found),
            f"{sum(one.has_args for one in taking)} of {len(taking)}",
            f"{sum(one.has_returns for one in giving)} of {len(giving)}",
            sum(one.has_raises for one in found),
            sum(bool(MARKERS.search(one.text)) for one in found),
        )
        print(f"| {group} | {' | '.join(map(str, cells))} |")
    for one in everything if options.missing else ():
        lacks = [
            *(["docstring"] if not one.text else []),
            *(["Args"] if not one.has_args else []),
            *(["Returns"] if one.returns and not one.has_returns else []),
            *(["markers"] if MARKERS.search(one.text) else []),
        ]
        if lacks:
            print(f"{one.name}: {', '.join(lacks)}")


if __name__ == "__main__":
    main()
