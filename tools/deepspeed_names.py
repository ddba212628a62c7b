"""Write `infinity/integrations/deepspeed/names.txt`: public names of DeepSpeed, and of parameters.

    pip download deepspeed==0.19.8 --no-deps --no-binary :all: && tar xf deepspeed-*.tar.gz
    python tools/deepspeed_names.py deepspeed-0.19.8 > infinity/integrations/deepspeed/names.txt

Nothing is imported, and names are all that is taken. A line is a module, ending in a colon, or a
name in it: `function(parameters)`, `class Name(parameters)`, `value`, or, indented further, a
method. Of packages come the names that they export, of modules those that they define; dots stand
for parameters that are told elsewhere, or nowhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What is behind these is machinery (kernels, builders, passes): only what the package exports.
INSIDE = (
    "accelerator.", "autotuning.", "compile.", "compression.", "datastates.", "inference.", "io.",
    "launcher.", "linear.", "model_implementations.", "module_inject.", "nvme.", "ops.",
    "runtime.comm.", "runtime.compiler", "runtime.domino.", "runtime.swap_tensor.",
    "runtime.superoffload.", "runtime.zenflow.", "runtime.rollout.", "runtime.tensor_parallel.",
    "runtime.model_checkpointing.", "runtime.data_pipeline.", "runtime.hybrid_engine_graph",
    "compat", "git_version_info", "checkpoint.", "comm.", "env_report", "runtime.keep_in_fp32",
    "runtime.state_dict_factory", "runtime.sparse_tensor", "runtime.weight_quantizer", "pipe.",
    "runtime.python_gc", "runtime.chunked_cross_entropy", "runtime.torch_autocast", "moe.ep",
    "runtime.checkpoint_engine.", "moe.fused", "moe.group", "sequence.",
)  # fmt: skip
# ... but for these, which scripts import.
NAMED = (
    "accelerator.abstract_accelerator", "accelerator.real_accelerator", "checkpoint.utils",
    "checkpoint.ds_to_universal", "comm.comm", "launcher.runner", "ops.adam.cpu_adam",
    "ops.adam.fused_adam", "ops.lamb.fused_lamb", "ops.lion.cpu_lion", "ops.adagrad.cpu_adagrad",
    "ops.op_builder", "pipe", "sequence.layer", "inference.engine", "inference.config",
    "runtime.data_pipeline.data_sampling.indexed_dataset", "linear.config", "compression.compress",
    "runtime.rollout.base", "runtime.sequence_parallel.ulysses_sp", "compression.helper",
)  # fmt: skip
VALUES = ("__version__", "VALID_LR_SCHEDULES", "DEEPSPEED_ENVIRONMENT_NAME")  # of modules too
LEFT_OUT = (
    "autotuning.", "compile.", "datastates", "inference.v2", "inference.q", "io", "nvme", "model_",
    "module_inject.", "ops.compile", "ops.deepspeed4science", "ops.fp_", "ops.op_builder.",
    "ops.triton", "ops.random_ltd", "ops.quantizer", "ops.transformer.", "ops.pin_memory",
    "runtime.activation_checkpointing.offload", "runtime.zero.contiguous", "runtime.zero.muon.orig",
    "runtime.zero.partitioned", "runtime.zero.test", "utils.pin_memory", "utils.static_cache",
)  # fmt: skip
METHODS = {
    "DeepSpeedAccelerator", "DeepSpeedEngine", "FlopsProfiler", "LRRangeTest", "MonitorMaster",
    "RepeatingLoader", "WandbMonitor", "WarmupLR",
}  # fmt: skip


def main(root: Path) -> Iterator[str]:
    """The lines of the table."""
    package = root / "deepspeed"
    for path in sorted(package.rglob("*.py"), key=lambda p: p.with_suffix("").parts):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        is_package = path.name == "__init__.py"
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        if not is_package and name.startswith(INSIDE) and name not in NAMED:
            continue
        if name.startswith(LEFT_OUT) or name.count(".") > 3:
            continue
        lines = list(dict.fromkeys(names_of(path, package, is_package)))
        if lines or is_package:
            yield f"{name}:"
            yield from lines


def names_of(path: Path, package: Path, is_package: bool) -> Iterator[str]:
    """The lines of one module."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.FunctionDef) and public(node.name):
            yield f" {node.name}({parameters(node)})"
        elif isinstance(node, ast.ClassDef) and public(node.name):
            made = next((f for f in functions(node) if f.name == "__init__"), None)
            yield f" class {node.name}({parameters(made) if made else '...'})"
            if node.name in METHODS:
                for method in functions(node):
                    if public(method.name):
                        value = any("property" in ast.unparse(d) for d in method.decorator_list)
                        yield f"  {method.name}" + ("" if value else f"({parameters(method)})")
        elif is_package and isinstance(node, ast.ImportFrom):
            yield from exported(node, path, package)
        elif isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
            wanted = [n for n in names if (is_package and public(n)) or n in VALUES]
            yield from (f" {name}" for name in wanted)


def exported(node: ast.ImportFrom, path: Path, package: Path) -> Iterator[str]:
    """What a package re-exports from modules of its own."""
    if not node.module or not (node.level or node.module.startswith("deepspeed.")):
        return
    base = path.parents[node.level - 1] if node.level else package.parent
    source = base.joinpath(*node.module.split("."))
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    lines = there(source, package) if source.exists() and source != path else ()
    known = {line.split("(")[0].split()[-1]: line for line in lines if not line.startswith("  ")}
    for alias in node.names:
        if alias.name == "*":
            yield from map(briefly, known.values())
        elif public(alias.asname or alias.name):
            line = briefly(known.get(alias.name, f" {alias.name}"))
            yield line.replace(alias.name, alias.asname, 1) if alias.asname else line


def briefly(line: str) -> str:
    """Without parameters, which stand where the name is defined."""
    return f"{line.split('(')[0]}(...)" if "(" in line else line


@cache
def there(source: Path, package: Path) -> tuple[str, ...]:
    """The lines of a module from which others export."""
    return tuple(names_of(source, package, source.name == "__init__.py"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, of its `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Methods of a class."""
    return (one for one in node.body if isinstance(one, ast.FunctionDef))


def parameters(node: ast.FunctionDef) -> str:
    """Their names, in order; `self` is left out."""
    a = node.args
    names = [one.arg for one in [*a.posonlyargs, *a.args] if one.arg not in ("self", "cls")]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    names += [one.arg for one in a.kwonlyargs]
    names += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return " ".join(names)


def public(name: str) -> bool:
    """Whether others may use it."""
    return not name.startswith("_")


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in main(Path(sys.argv[1])))
