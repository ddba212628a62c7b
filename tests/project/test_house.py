"""Tests that the package follows `house_rules.py`, and that each rule detects bad examples."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from house_rules import (
    DATA_ASSIGNER,
    MAX_FILE_LINES,
    MAX_LINE_LENGTH,
    PRIVATE_TORCH,
    Rule,
    exports_exist,
    layering,
    modules_documented,
    named_files_exist,
    no_import_cycles,
    no_leftovers,
    no_print,
    no_record_stream,
    one_file_assigns_data,
    private_torch_in_one_file,
    size_limits,
)
from mutants.run import existing_tests, read_mutants

import infinity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _each_file_is_parsed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", cache(ast.parse))
        yield


@cache
def sources_below(*folders: str) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


LONG_FUNCTION = '"""M."""\ndef f():\n    """D."""\n' + "    x = 1\n" * 80
UNFINISHED = "TO" + "DO"

# For each rule: small source trees that break it, and one that does not.
RULES: dict[Rule, tuple[list[dict[str, str]], dict[str, str]]] = {
    layering: (
        [
            {"infinity/errors.py": "from infinity.common.sizes import parse_size"},
            {"infinity/common/sizes.py": "import infinity.config.schema"},
            {"infinity/plan/a.py": "from infinity.storage import disk"},
            {"infinity/plan/a.py": "from ..storage.disk import Disk"},
            {"infinity/plan/__init__.py": "from ..model import units"},
            {"infinity/plan/a.py": "def f():\n    import infinity.model.units"},
            {"infinity/plan/a.py": "if TYPE_CHECKING:\n    from infinity.storage.disk import Disk"},
            {"infinity/model/a.py": "import infinity._aio as _aio"},
            {"infinity/training/a.py": "from infinity._aio import Engine"},
            {"infinity/storage/a.py": "from infinity import _aio"},
            {"infinity/training/a.py": "from infinity.engine import Engine"},
            {"infinity/engine.py": "import infinity"},
            {"infinity/cli/main.py": "from infinity import __version__"},
            {"infinity/attic.py": ""},
            {"infinity/engine.py": "from infinity.deepspeed.config import translate_deepspeed"},
            {"infinity/training/step.py": "from infinity.train.metrics import Metrics"},
        ],
        {
            "infinity/errors.py": "import os, torch.infinity",
            "infinity/plan/a.py": "from infinity.plan.b import c\nfrom . import b",
            "infinity/storage/a.py": "import infinity._aio as _aio\nfrom ..plan.a import b",
            "infinity/optim/a.py": "import infinity._adam as _adam",
            "infinity/cli/main.py": "from infinity._initialize import initialize",
        },
    ),
    no_import_cycles: (
        [
            {"infinity/a.py": "import infinity.b", "infinity/b.py": "from infinity.a import f"},
            {
                "infinity/p/a.py": "from infinity.p import b",
                "infinity/p/b.py": "def f():\n    import infinity.c",
                "infinity/c.py": "if TYPE_CHECKING:\n    from infinity.p.a import A",
            },
        ],
        {"infinity/a.py": "from infinity.b import c", "infinity/b.py": "import os"},
    ),
    one_file_assigns_data: (
        [
            {"infinity/a.py": "p.data = x"},
            {"infinity/a.py": "p.grad, q.data = x"},
            {"infinity/a.py": "p.data += x"},
            {"infinity/a.py": "p.data: int = x"},
            {"infinity/a.py": "for p.data in x: pass"},
            {"infinity/a.py": "with x as p.data: pass"},
            {"infinity/a.py": "del p.data"},
            {"infinity/a.py": "setattr(p, 'data', x)"},
            {"infinity/a.py": "object.__setattr__(p, 'data', x)"},
        ],
        {DATA_ASSIGNER: "p.data = x", "infinity/a.py": "y = p.data\np.data.x = 1\nq.data[0] = 1"},
    ),
    no_print: (
        [{"infinity/a.py": "def f():\n    print(1)"}],
        {"infinity/cli/a.py": "print(1)", "infinity/a.py": "x.print(1)  # print()"},
    ),
    no_record_stream: (
        [
            {"infinity/a.py": "x.record_stream(stream)"},
            {"infinity/a.py": "let = x.record_stream"},
            {"infinity/a.py": "getattr(x, 'record_stream')(stream)"},
        ],
        {"infinity/a.py": "stream.record_event()  # a stream's record"},
    ),
    modules_documented: (
        [{"infinity/a.py": ""}, {"infinity/a.py": "import b"}],
        {"infinity/a.py": '"""M."""'},
    ),
    exports_exist: (
        [{"infinity/__init__.py": "from infinity.a import b\n__all__ = ['b', 'c']"}],
        {"infinity/__init__.py": "from infinity.a import b as c\nd = 1\n__all__ = ['c', 'd']"},
    ),
    size_limits: (
        [
            {"infinity/a.py": "\n" * (MAX_FILE_LINES + 1)},
            {"infinity/a.py": "#" * (MAX_LINE_LENGTH + 1)},
            {"infinity/a.py": LONG_FUNCTION},
        ],
        {"infinity/a.py": "#" * MAX_LINE_LENGTH + "\n" * (MAX_FILE_LINES - 1)},
    ),
    private_torch_in_one_file: (
        [
            {"infinity/a.py": "x = torch._C._autograd"},
            {"infinity/a.py": "x = torch.autograd.graph._top"},
            {"infinity/a.py": "import torch._dynamo"},
            {"infinity/a.py": "from torch import _C"},
            {"infinity/a.py": "from torch._C import x"},
            {"infinity/a.py": "import torch.nn.functional as F\nF._verify(x)"},
            {"infinity/a.py": "from torch import autograd\nautograd._x._y(z)"},
        ],
        {
            PRIVATE_TORCH: "import torch._C",
            "infinity/a.py": "from torch import nn\nx = torch.__version__\n"
            "y = self._torch.x\nself.torch._x = 1",
        },
    ),
    named_files_exist: (
        [
            {"infinity/a.py": "# see `b.py`"},
            {"infinity/a.py": '"""See `plan/a.py`."""'},
        ],
        {"infinity/plan/b.py": "# see `plan/b.py`, `b.py`, `infinity/plan/b.py`, `tests/a.py`"},
    ),
    no_leftovers: (
        [
            {"infinity/a.py": f"x = 1  # {UNFINISHED}: later"},
            {"infinity/a.py": f"x = '{UNFINISHED}'"},
        ],
        {"infinity/a.py": f"x = 1  # {UNFINISHED}S {UNFINISHED.lower()}"},
    ),
}


def name_of(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_package_follows_rule(rule: Rule) -> None:
    if rule is one_file_assigns_data and not (ROOT / DATA_ASSIGNER).exists():
        pytest.skip(f"{DATA_ASSIGNER}, the one file that assigns .data, does not exist yet")
    violations = rule(sources_below("infinity"))
    assert not violations, "\n  ".join([f"{name_of(rule)}:", *violations])


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_rule_detects_violations(rule: Rule) -> None:
    bad_trees, good_tree = RULES[rule]
    for tree in bad_trees:
        assert len(rule(tree)) == 1, f"not noticed, or more than once: {tree} -> {rule(tree)}"
    assert rule(good_tree) == []


def test_data_assigner_file_assigns_data() -> None:
    path = ROOT / DATA_ASSIGNER
    if not path.exists():
        pytest.skip(f"{DATA_ASSIGNER}, the one file that assigns .data, does not exist yet")
    assert one_file_assigns_data({"infinity/elsewhere.py": path.read_text(encoding="utf-8")})


def test_stub_lists_every_public_name() -> None:
    tree = ast.parse((ROOT / "infinity/__init__.pyi").read_text(encoding="utf-8"))
    exported = {
        a.asname for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names
    }
    assert exported - {"deepspeed"} == {*infinity._WHERE, "__version__"}
    assert set(infinity.__all__) <= exported


def test_package_sources_are_found() -> None:
    sources = sources_below("infinity")
    assert {"infinity/__init__.py", "infinity/errors.py"} <= set(sources)


def test_tests_and_tools_have_no_leftovers() -> None:
    assert no_leftovers(sources_below("tests", "tools", "examples")) == []


def test_constraints_do_not_pin_torch_dependencies() -> None:
    """Builds of torch need different releases of the CUDA libraries, so pins would conflict."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if not line.startswith("#")}
    assert "numpy" in pinned
    torch_dependencies = ("nvidia-", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "triton")
    assert not [name for name in pinned if name == "torch" or name.startswith(torch_dependencies)]


def test_mutants_apply_and_name_existing_tests() -> None:
    mutants = read_mutants()  # raises if one does not apply
    assert len(mutants) > 100
    assert [m.name for m in mutants if existing_tests(m.tests) != m.tests] == []
