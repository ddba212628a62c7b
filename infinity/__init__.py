"""An offload-first training engine for one machine.

>>> engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="run.yaml")
>>> for x, y in data:
...     loss = engine(x, y)
...     engine.backward(loss)
...     engine.step()
>>> engine.close()
"""

from __future__ import annotations

from importlib import metadata as _metadata


def _check_ours() -> str:
    """The version of our distribution; another package also installs the name `infinity`."""
    try:
        return _metadata.version("torch-infinity")
    except _metadata.PackageNotFoundError:
        raise ImportError(
            f"the package imported as 'infinity' from {__file__} is not installed as "
            "'torch-infinity'; run `make setup`, or `pip install -e .` in a virtual environment "
            "of its own (the distributions 'infinity' and 'infinity-sdk' use the same import name)"
        ) from None


__version__ = _check_ours()

from infinity.config import Config, load_config  # noqa: E402
from infinity.engine import Engine  # noqa: E402
from infinity.errors import InfinityError  # noqa: E402
from infinity.initialize import initialize  # noqa: E402
from infinity.training.report import StepReport  # noqa: E402

__all__ = [
    "Config",
    "Engine",
    "InfinityError",
    "StepReport",
    "__version__",
    "initialize",
    "load_config",
]
