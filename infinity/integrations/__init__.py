"""Integrations: DeepSpeed's API, Hugging Face's Trainer, Lightning.

`infinity.deepspeed`, `infinity.huggingface` and `infinity.lightning` are aliases of its modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_PUBLIC = ("deepspeed", "huggingface", "lightning")


def _aliased_name(name: str) -> str:
    return f"{__name__}.{name.removeprefix('infinity.')}"


class _Alias(MetaPathFinder, Loader):
    """Import hook that makes `infinity.NAME` an alias of the module `infinity.integrations.NAME`.

    `deepspeed.NAME` is an alias too if `import deepspeed` has imported `infinity.deepspeed`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top_level, _, submodule = name.partition(".")
        if top_level == "deepspeed":
            package = sys.modules.get(f"{__name__}.deepspeed")
            is_alias = bool(submodule) and sys.modules.get(top_level) is package is not None
        else:
            is_alias = top_level == "infinity" and submodule.partition(".")[0] in _PUBLIC
        if not is_alias:
            return None
        spec = find_spec(_aliased_name(name))
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(name, self, origin=spec.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module in `sys.modules` by the aliased one."""
        sys.modules[module.__name__] = import_module(_aliased_name(module.__name__))

    def get_code(self, name: str) -> CodeType | None:
        """Return the code object of the aliased module, for `python -m`."""
        spec = find_spec(_aliased_name(name))
        # The loader of an editable install may be no `InspectLoader`.
        get_code = getattr(spec and spec.loader, "get_code", None)
        code: CodeType | None = get_code and get_code(_aliased_name(name))
        return code


sys.meta_path.insert(0, _Alias())  # first: the default finders would import a second copy
