"""Access to the internal components of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinity.engine import Engine
    from infinity.training.components import EngineComponents


def components(engine: Engine) -> EngineComponents:
    """Return the components of an engine."""
    return engine._components
