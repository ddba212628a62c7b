"""Looking for garbage quickly: all that has been imported makes a collection take a second."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_collections() -> Iterator[None]:
    """Within, garbage is only looked for among what was made within."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
