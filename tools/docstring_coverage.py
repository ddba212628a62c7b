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
# A line in place of entries for arguments, in signatures that follow DeepSpeed's.
COMPATIBLE = re.compile(
    r"\bother\s+arguments\s+are\s+accepted\s+for\s+compatibility\s+and\s+have\s+no\s+effect\."
    r"|\barguments\s+are\s+DeepSpeed's\.",
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
        """True if an Args section names every parameter, or a line stands for the rest."""
        if COMPATIBLE.search(self.text):
            return True
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
        group: [callable_ for text in texts for callable_ in callables_of(root, text)]
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
        constructors = [member for member in node.body if getattr(member, "name", "") == "__init__"]
        is_documented = bool(constructors) and "Made by `infinity.initialize`" not in text
        parameters = parameters_of(constructors[0]) if is_documented else ()
        yield Callable(prefix + node.name, text, parameters, False)
        for member in node.body:
            if not getattr(member, "name", "_").startswith("_"):
                yield from callables_in(member, f"{prefix}{node.name}.")
    elif isinstance(node, ast.FunctionDef):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(decorator.endswith((".setter", "overload")) for decorator in decorators):
            return
        is_property = any(decorator.endswith("property") for decorator in decorators)
        annotation = "None" if node.returns is None else ast.unparse(node.returns)
        returns_nothing = annotation in ("None", "Iterator[None]")
        text = ast.get_docstring(node) or ""
        yield Callable(
            prefix + node.name, text, parameters_of(node), not (is_property or returns_nothing)
        )


def parameters_of(node: ast.stmt) -> tuple[str, ...]:
    """Return the names of a function's parameters, without self, cls and private ones."""
    assert isinstance(node, ast.FunctionDef)
    args = node.args
    parameters = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    names = [parameter.arg for parameter in parameters if parameter is not None]
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
    all_entries = [entry for entries in groups.values() for entry in entries]
    for group, entries in {**groups, "all": all_entries}.items():
        with_parameters = [entry for entry in entries if entry.parameters]
        with_returns = [entry for entry in entries if entry.returns]
        cells = (
            len(entries),
            sum(bool(entry.text) for entry in entries),
            f"{sum(entry.has_args for entry in with_parameters)} of {len(with_parameters)}",
            f"{sum(entry.has_returns for entry in with_returns)} of {len(with_returns)}",
            sum(entry.has_raises for entry in entries),
            sum(bool(MARKERS.search(entry.text)) for entry in entries),
        )
        print(f"| {group} | {' | '.join(map(str, cells))} |")
    for entry in all_entries if options.missing else ():
        missing = [
            *(["docstring"] if not entry.text else []),
            *(["Args"] if not entry.has_args else []),
            *(["Returns"] if entry.returns and not entry.has_returns else []),
            *(["markers"] if MARKERS.search(entry.text) else []),
        ]
        if missing:
            print(f"{entry.name}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
