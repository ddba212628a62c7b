"""Structural rules of the package as functions of a source tree; `test_house.py` applies them.

A rule takes a tree, `{"infinity/plan/plan.py": text}`, and returns a list of violations. It parses
and never imports, so it also works for files whose dependencies are missing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping

Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]

# Packages and modules, the lowest layer first: each imports only from lower layers and from itself.
# Imports under `if TYPE_CHECKING:` count too; only the top layer imports the package root.
LAYERS: tuple[set[str], ...] = (
    {"errors", "types", "_version", "_aio", "_adam"},
    {"common.crc32c", "losses", "optim.rules"},
    {"common"},
    {"distributed", "profiling"},
    {"config"},
    {"plan"},
    {"model"},
    {"optim"},
    {"storage"},
    {"distributed.shared_memory", "profiling.memory_watch", "offload.transfers"},
    {"profiling.step_report"},
    {"profiling.step_tracer"},
    {"offload", "profiling.rate_cache", "profiling.processor_rates"},
    {"profiling.link_rates"},
    {"profiling.calibration"},
    {"checkpoint"},
    {"training"},
    {"engine"},
    {"_initialize", "training.load_weights"},
    # Layers above this line are the core, those below are integrations and applications.
    {"integrations"},
    {"integrations.deepspeed"},
    {"integrations.huggingface", "integrations.lightning"},
    {"train", "swap_benchmark"},
    {"cli"},
    {"__init__", "__main__"},
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
NATIVE = {
    "_aio": {"common.crc32c", "storage", "checkpoint", "swap_benchmark", "cli"},
    "_adam": {"optim", "cli"},
}
DATA_ASSIGNER = "infinity/model/parameters.py"
PRIVATE_TORCH = "infinity/model/torch_private.py"
MAX_FILE_LINES = 700  # without docstrings
MAX_FUNCTION_LINES = 80  # without the docstring
MAX_LINE_LENGTH = 100
NAMED_FILE = re.compile(r"`(?!tests/|tools/|examples/)((?:\w+/)*\w+\.py)`")
BANNED_WORDS = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")


def package_of(module: str) -> str:
    """Return the longest prefix of a dotted module that LAYERS names, else its package.

    Names are relative to `infinity`; the root package is `__init__`.
    """
    name = package = module.partition(".")[2] or "__init__"
    while package not in LAYER_OF and "." in package:
        package = package.rpartition(".")[0]
    return package if package in LAYER_OF else name.split(".")[0]


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported_modules(path: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    package = (
        module_of(path) if path.endswith("/__init__.py") else module_of(path).rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:  # a module of a package, or a name of a module
                full = f"{origin}.{alias.name}"
                yield node.lineno, full if full in modules and origin != "infinity" else origin


def layering(sources: Sources) -> list[str]:
    modules = {module_of(path) for path in sources}
    violations = []
    for path, text in sources.items():
        package = package_of(module_of(path))
        if package not in LAYER_OF:
            violations.append(f"{path}: the package {package!r} is not in LAYERS")
            continue
        for line, module in imported_modules(path, ast.parse(text), modules):
            imported = package_of(module)
            if module.split(".")[0] != "infinity" or imported == package:
                continue
            is_below = LAYER_OF.get(imported, len(LAYERS)) < LAYER_OF[package]
            if not is_below or package not in NATIVE.get(imported, {package}):
                violations.append(f"{path}:{line}: {package} may not import {imported} ({module})")
    return violations


def no_import_cycles(sources: Sources) -> list[str]:
    """Import cycles, including imports inside functions and under TYPE_CHECKING."""
    paths = {module_of(path): path for path in sources}
    imports_of = {
        name: {
            module
            for _, module in imported_modules(path, ast.parse(sources[path]), set(paths))
            if module in paths and module != name
        }
        for name, path in paths.items()
    }
    while leaves := [
        name for name, imported in imports_of.items() if not imported & imports_of.keys()
    ]:
        for name in leaves:
            del imports_of[name]
    reached = set().union(*imports_of.values()) if imports_of else set()
    cycle = sorted(paths[name] for name in imports_of if name in reached)
    return [f"an import cycle goes through some of {cycle}"] if cycle else []


def one_file_assigns_data(sources: Sources) -> list[str]:
    violations = []
    for path, text in sources.items():
        if path == DATA_ASSIGNER:
            continue
        for node in ast.walk(ast.parse(text)):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign | ast.Delete):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
                targets = [node.target]
            elif isinstance(node, ast.withitem) and node.optional_vars:
                targets = [node.optional_vars]
            for target in targets:
                if any(is_data_target(node_part) for node_part in ast.walk(target)):
                    violations.append(f"{path}:{target.lineno}: assigns .data")
            if isinstance(node, ast.Call) and sets_data(node):
                violations.append(f"{path}:{node.lineno}: sets 'data' by name")
    return violations


def is_data_target(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "data":
        return False
    return isinstance(node.ctx, ast.Store | ast.Del)


def sets_data(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    values = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return name in ("setattr", "__setattr__") and "data" in values


def no_print(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno}: prints"
        for path, text in sources.items()
        if not path.startswith("infinity/cli/")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]


def no_record_stream(sources: Sources) -> list[str]:
    """Memory of a copy is held until an event; record_stream would leave its reuse to torch."""
    return [
        f"{path}:{number}: record_stream"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if "record_stream" in line
    ]


def modules_documented(sources: Sources) -> list[str]:
    """Every module has a docstring; public callables are checked by tools/docstring_coverage.py."""
    return [
        f"{path}: the module has no docstring"
        for path, text in sources.items()
        if not ast.get_docstring(ast.parse(text))
    ]


def exports_exist(sources: Sources) -> list[str]:
    text = sources.get("infinity/__init__.py", "")
    bound: set[str] = set()
    exported: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Dict):  # modules of public names that are imported on first use
            bound |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            exported = ast.literal_eval(node.value)
    return [f"infinity/__init__.py: __all__ names {name!r}" for name in set(exported) - bound]


def size_limits(sources: Sources) -> list[str]:
    violations = []
    for path, text in sources.items():
        lines, tree = text.splitlines(), ast.parse(text)
        count = len(lines) - sum(map(docstring_lines, ast.walk(tree)))
        if count > MAX_FILE_LINES:
            violations.append(f"{path}: {count} lines, more than {MAX_FILE_LINES}")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_LENGTH:
                violations.append(
                    f"{path}:{number}: {len(line)} columns, more than {MAX_LINE_LENGTH}"
                )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
                if length > MAX_FUNCTION_LINES:
                    violations.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return violations


def docstring_lines(node: ast.AST) -> int:
    """Return the number of docstring lines of a module, class or function; 0 for other nodes."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if not isinstance(node, kinds) or ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def private_torch_in_one_file(sources: Sources) -> list[str]:
    violations = []
    for path, text in sources.items():
        if path == PRIVATE_TORCH:
            continue
        tree = ast.parse(text)
        imported = list(imported_names(tree))
        aliases = {short: full for _, short, full in imported}
        used = [(line, full) for line, _, full in imported]
        for node in ast.walk(tree):
            # `torch._C.x` contains `torch._C`; report only the innermost private name.
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                head, _, rest = ast.unparse(node).partition(".")
                if not any(map(is_private, rest.split(".")[:-1])):
                    used.append((node.lineno, f"{aliases.get(head, head)}.{rest}"))
        for line, name in used:
            head, *rest_parts = name.split(".")
            if head == "torch" and any(map(is_private, rest_parts)):
                violations.append(f"{path}:{line}: {name} is private to torch")
    return violations


def is_private(name: str) -> bool:
    return re.match(r"_(?!_)", name) is not None


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, local name, full dotted name) of every absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                short = alias.asname or alias.name.split(".")[0]
                yield node.lineno, short, alias.name if alias.asname else short
                if not alias.asname and "." in alias.name:
                    yield node.lineno, alias.name, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def named_files_exist(sources: Sources) -> list[str]:
    """Python files of the package named in docstrings and comments exist."""
    existing = {path.removeprefix("infinity/") for path in sources}
    existing |= {path.split("/")[-1] for path in sources}
    return [
        f"{path}:{number}: there is no {name}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for name in NAMED_FILE.findall(line)
        if name.removeprefix("infinity/") not in existing
    ]


def no_leftovers(sources: Sources) -> list[str]:
    return [
        f"{path}:{token.start[0]}: {match[0]}"
        for path, text in sources.items()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if (match := BANNED_WORDS.search(token.string))
    ]
