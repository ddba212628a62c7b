"""Access order assumed by a plan before a run has recorded one.

Units are used in module order in forward, and in reverse order in backward, with these exceptions:

- A unit outside the blocks that holds a norm or a head after them (`UnitLayout.at_end`) is used
  again after the blocks. Backward does not use embeddings (`UnitLayout.looked_up`).
- A block that is recomputed, by the engine or by the model, uses its units in forward order at the
  beginning of its backward.
- A block whose slices share ranges of experts runs up to its experts, and then again: in forward,
  in the recomputation, and between the two passes over its ranges in backward. See
  `offload/shared_ranges.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from infinity.config.schema import Recompute
from infinity.plan.access_order import AccessOrder
from infinity.plan.activations import blocks_of
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan


def usual_cycle(plan: Plan, *, backward: bool = True) -> tuple[int, ...]:
    """Return the unit indices in the order in which a micro-batch is expected to use them.

    With `backward` False only those of the forward.
    """
    recompute: Recompute = "all" if plan.model_recomputes else plan.saved.recompute
    cache = plan.facts.known
    key = ("cycle", recompute, plan.shared_stacks, backward)
    if key not in cache:
        accesses, backward_accesses = _cycle(plan.units, recompute, plan.shared_stacks)
        if backward:
            accesses += backward_accesses
        cache[key] = tuple(AccessOrder(accesses).sequence)
    cycle: tuple[int, ...] = cache[key]
    return cycle


def _cycle(
    units: Sequence[UnitLayout], recompute: Recompute, shared: Collection[str]
) -> tuple[list[int], list[int]]:
    """Return the access orders of a forward, and of its backward."""
    forward: list[int] = []
    backward: list[list[int]] = []  # accesses of each block, blocks in forward order
    num_recomputed = len(units) if recompute == "all" else recompute
    for block in sorted(blocks_of(units), key=lambda block: min(unit.index for unit in block)):
        path = [unit.index for unit in block]  # the block's unit, then units inside it
        is_shared = any(unit.is_range and unit.stacks_path in shared for unit in block)
        forward_path = [*path, path[0]] if is_shared else path
        is_recomputed = block[0].is_block and num_recomputed > 0
        num_recomputed -= block[0].is_block
        forward += forward_path
        reversed_path = [] if block[0].looked_up else path[::-1]
        runs_again = is_shared or is_recomputed
        backward.append([*forward_path, *reversed_path] if runs_again else reversed_path)
    at_end = [unit.index for unit in reversed(units) if unit.at_end]
    order = [*at_end[::-1], *(unit for block in reversed(backward) for unit in block)]
    return [*forward, *at_end], order
