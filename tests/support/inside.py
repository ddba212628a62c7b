"""The inside of an engine, for tests that look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinity.engine import Engine
    from infinity.training.components import EngineComponents


def components(engine: Engine) -> EngineComponents:
    """Return the components that an engine is made of."""
    return engine._components
