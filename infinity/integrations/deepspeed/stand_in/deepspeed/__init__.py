"""`deepspeed`, where it is `infinity.deepspeed`: see infinity/integrations/deepspeed/door.py."""

from __future__ import annotations

import sys
from typing import Any

import infinity.integrations.deepspeed
from infinity.integrations.deepspeed.names import all_modules, why_refused


class _Absent:
    """Raises an error with the replacement of a missing module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise for imports below `deepspeed` that no other finder had.

        `importlib.util.find_spec`, which only asks, gets its None.
        """
        package, _, below = name.partition(".")
        imported = sys._getframe(2).f_globals["__name__"] != "importlib.util"
        if package == "deepspeed" and below and imported:
            raise ModuleNotFoundError(str(why_refused(below)), name=name)


sys.modules["deepspeed"] = infinity.integrations.deepspeed
sys.modules.update({f"deepspeed.{path}": module for path, module in all_modules().items()})
sys.meta_path.append(_Absent())
