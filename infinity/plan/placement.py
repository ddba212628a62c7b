"""Search for the placement with the shortest step within the budgets.

[Note: a fixed set]
Access is cyclic, so a fast tier stores a fixed set of (unit, kind): a least-recently-used cache
would never hit. Among equal units the first ones are preferred, because the last ones are still in
slots when backward begins.

[Note: search]
Greedy first: the move that saves the most time per share of a budget is applied to many equal units
at once. Then exchanges: a move that does not fit is made anyway, and other kinds are lowered until
it does. Both use the cost model of the plan (`plan/cost.py`), so a better model gives better
placement. On small models a test compares the result with all possible placements
(`tests/unit/plan/test_placement.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infinity.plan.budget import Limits, budgeted_bytes, excess, fits_no_worse, with_memory
from infinity.plan.cost import movement_cost
from infinity.plan.forecast import FEW
from infinity.plan.plan import Plan, UnitPlacement
from infinity.plan.rates import Rates
from infinity.types import Tier

FIELDS = ("weight", "gradient", "state")
# Weight of busy resources that do not bind: if compute hides all movement, fewer bytes still win.
HIDDEN_SHARE = 1e-3
MANY_UNITS = 7  # from this number of units on, one unit matters little: no exchanges
_TINY = 1e-12


class _Move(NamedTuple):
    """A move of some kinds of equal units to a faster tier, one unit after the other."""

    fields: tuple[str, ...]
    units: tuple[int, ...]
    tier: Tier


def best_placement(plan: Plan, fields: Sequence[str], limits: Limits, rates: Rates) -> Plan:
    """Return `plan` with the tiers of `fields`, which are of `FIELDS`, raised within the budgets.

    If `plan` exceeds a budget itself, the result exceeds it by no more; rejecting it is left to the
    caller.
    """
    search = _PlacementSearch(plan.placements, fields, limits, rates)
    fastest = search.all_fastest(plan)
    if fastest is not None:
        return fastest
    best = search.fill(plan)
    return search.exchanged(best) if len(plan.units) < MANY_UNITS else best


def score(plan: Plan, rates: Rates) -> float:
    """Return the seconds of a step, plus `HIDDEN_SHARE` of the busy seconds of all resources."""
    few = min(plan.micro_batches, FEW)
    few_cost, added_cost = _known_cost(plan, few, rates)
    if few < plan.micro_batches and added_cost is None:
        few = plan.micro_batches
        few_cost, _ = _known_cost(plan, few, rates)
    seconds, busy = few_cost
    if added_cost is not None:
        seconds += (plan.micro_batches - few) * added_cost[0]
        busy += (plan.micro_batches - few) * added_cost[1]
    return seconds + HIDDEN_SHARE * busy


def _known_cost(
    plan: Plan, micro_batches: int, rates: Rates
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Return `movement_cost`, cached for all plans with the same facts."""
    costs, key = plan.facts.costs(rates), (micro_batches, *plan.searched)
    cost: tuple[tuple[float, float], tuple[float, float] | None] | None = costs.get(key)
    if cost is None:
        cost = costs[key] = movement_cost(plan.changed(micro_batches=micro_batches), rates)
    return cost


def placed(
    plan: Plan, fields: Sequence[str], unsharded: bool | None, limits: Limits, rates: Rates
) -> Plan:
    """Return `plan` with the best tiers of `fields` and permanent slots for unsharded units.

    Both compete for memory, so each order is tried; see `with_unsharded_units`. Weights are stored
    in shared RAM if that is possible and faster.
    """
    starts = [with_unsharded_units(plan, unsharded, limits)]
    if fields and not unsharded and starts[0] is not plan:
        starts.insert(0, plan)
    if plan.may_share and not plan.shared:
        for start in list(starts):
            shared = with_memory(start.changed(shared=True), limits)
            if fits_no_worse(shared, start, limits, auto=True):  # several nodes need more RAM
                starts.append(shared)
    candidates = starts
    if fields:
        candidates = [
            with_unsharded_units(best_placement(start, fields, limits, rates), unsharded, limits)
            for start in starts
        ]
    return min(candidates, key=lambda plan: (score(plan, rates), plan.num_moving))


def with_unsharded_units(plan: Plan, unsharded: bool | None, limits: Limits) -> Plan:
    """Return `plan` with permanent slots for the units that fit, if there are several ranks.

    Weights of these units are gathered once after an update, and not at every fetch. Units that are
    never updated come first. With `unsharded` True all units get a slot, even if they do not fit;
    with False none does.
    """
    units = [u for u in plan.units if u.slot_bytes and plan.ranks > 1 and unsharded is not False]
    units.sort(key=lambda u: (u.numel > 0, u.index))
    low, high, best = 0, len(units), plan
    while low < high:
        middle = high if unsharded else (low + high + 1) // 2
        full_units = frozenset(unit.index for unit in units[:middle])
        changed = with_memory(plan.changed(unsharded=full_units), limits)
        if unsharded or fits_no_worse(changed, plan, limits, auto=True):
            low, best = middle, changed
        else:
            high = middle - 1
    return best


class _PlacementSearch:
    def __init__(
        self, start: tuple[UnitPlacement, ...], fields: Sequence[str], limits: Limits, rates: Rates
    ) -> None:
        self.start = start
        self.fields = tuple(fields)
        self.limits = limits
        self.rates = rates

    def all_fastest(self, plan: Plan) -> Plan | None:
        """Return the plan with all `fields` on the device; None if it does not fit.

        None also if the device is separate and cannot run the update.
        """
        if not (plan.unified or plan.device_kernels):
            return None
        tiers: dict[str, Tier] = dict.fromkeys(self.fields, Tier.DEVICE)
        changed = self._with_placements(plan, [p._replace(**tiers) for p in plan.placements])
        return None if excess(changed, self.limits, auto=True) else changed

    def fill(self, plan: Plan) -> Plan:
        """Return the plan after greedy moves, by time saved per share of the budgets."""
        while True:
            best: tuple[float, _Move] | None = None
            current = self.score(plan)
            for move in self._moves(plan):
                changed = self._with_move(plan, move, 1)
                if not self._fits(changed, plan):
                    continue
                gain = current - self.score(changed)
                if gain <= _TINY:
                    continue
                worth = gain / (self._budget_share(plan, changed) + _TINY)
                if best is None or worth > best[0] * (1 + 1e-9):
                    best = (worth, move)
            if best is None:
                return plan
            plan = self._with_most_units(plan, best[1])

    def exchanged(self, plan: Plan) -> Plan:
        """Return the plan after exchanges, as long as one makes the step shorter.

        An exchange makes a move that does not fit, and lowers other kinds until it does.
        """
        improved = True
        while improved:
            improved = False
            for move in self._moves(plan):
                first_unit_move = move._replace(units=move.units[:1])
                fitting = self._lowering_others(plan, first_unit_move)
                if fitting is None:
                    continue
                candidate = self.fill(fitting)
                if self.score(candidate) < self.score(plan) - _TINY:
                    plan, improved = candidate, True
                    break
        return plan

    def _lowering_others(self, plan: Plan, move: _Move) -> Plan | None:
        """Return `plan` after a move, other kinds lowered until it fits; None if it never does.

        The kind with the least time lost per freed byte is lowered first. If no single kind frees
        any bytes, the one that adds the fewest is lowered: the first kind on disk needs buffers.
        """
        changed = self._with_move(plan, move, 1)
        while not self._fits(changed, plan):
            over = self._excess_bytes(changed)
            best: tuple[tuple[bool, float], Plan] | None = None
            for lowered in self._lowered(changed, move):
                freed = over - self._excess_bytes(lowered)
                worth = True, float(-freed)
                if freed > 0:
                    loss = max(self.score(lowered) - self.score(changed), 0.0)
                    worth = False, loss / freed
                if best is None or worth < best[0]:
                    best = worth, lowered
            if best is None:
                return None
            changed = best[1]
        return changed

    # --- moves -------------------------------------------------------------------------------

    def _moves(self, plan: Plan) -> Iterator[_Move]:
        """Yield the moves to faster tiers, first units first.

        If the device is separate, also those of all fields of a unit to the device together.
        """
        for group in plan.unit_groups:
            num_raisable = 0
            for field in self.fields:
                now = group.placement.of_field(field)
                num_raisable += now.is_below(Tier.DEVICE)
                if now.is_below(Tier.DEVICE):
                    yield _Move((field,), group.units, Tier.DEVICE)
                # A unified device needs no second copy of weights.
                if now.is_below(Tier.HOST) and not (plan.unified and field == "weight"):
                    yield _Move((field,), group.units, Tier.HOST)
            if not plan.unified and num_raisable > 1:
                yield _Move(self.fields, group.units, Tier.DEVICE)

    def _lowered(self, plan: Plan, raised: _Move) -> Iterator[Plan]:
        """Yield the plan with one kind of one unit moved off a full tier, except those of `raised`.

        Equal units with the same placement are tried once.
        """
        full = set(excess(plan, self.limits, auto=True))
        if plan.unified and Tier.HOST in full:
            full.add(Tier.DEVICE)
        seen: set[tuple[object, ...]] = set()
        for unit in reversed(plan.units):  # the last of equal units was raised last
            placement = plan.placements[unit.index]
            for field in self.fields:
                key = (unit.numel, unit.frozen_bytes, field, placement)
                is_raised = unit.index in raised.units and field in raised.fields
                if key in seen or is_raised or placement.of_field(field) not in full:
                    continue
                seen.add(key)
                lowest = self.start[unit.index].of_field(field)
                for tier in dict.fromkeys((lowest, lowest if plan.unified else Tier.HOST)):
                    if tier.is_below(placement.of_field(field)) and not tier.is_below(lowest):
                        tiers: dict[str, Tier] = {field: tier}
                        changed = list(plan.placements)
                        changed[unit.index] = placement._replace(**tiers)
                        yield self._with_placements(plan, changed)

    def _with_move(self, plan: Plan, move: _Move, count: int) -> Plan:
        placements = list(plan.placements)
        tiers: dict[str, Tier] = dict.fromkeys(move.fields, move.tier)
        raised = placements[move.units[0]]._replace(**tiers)  # all units have the same placement
        for index in move.units[:count]:
            placements[index] = raised
        return self._with_placements(plan, placements)

    def _with_placements(self, plan: Plan, placements: Sequence[UnitPlacement]) -> Plan:
        return with_memory(plan.changed(placements=tuple(placements)), self.limits)

    def _with_most_units(self, plan: Plan, move: _Move) -> Plan:
        """Return the plan with the move made for the largest number of units that fits and pays.

        One unit is known to fit. Binary search: memory grows with the number, except for buffers.
        """
        low, high = 1, len(move.units)
        best = self._with_move(plan, move, 1)
        while low < high:
            middle = (low + high + 1) // 2
            candidate = self._with_move(plan, move, middle)
            if self._fits(candidate, plan) and self.score(candidate) < self.score(best):
                low, best = middle, candidate
            else:
                high = middle - 1
        return best

    # --- judging -----------------------------------------------------------------------------

    def score(self, plan: Plan) -> float:
        return score(plan, self.rates)

    def _fits(self, changed: Plan, before: Plan) -> bool:
        return fits_no_worse(changed, before, self.limits, auto=True)

    def _excess_bytes(self, plan: Plan) -> int:
        return sum(excess(plan, self.limits, auto=True).values())

    def _budget_share(self, plan: Plan, changed: Plan) -> float:
        """Return the additional share of the budgets that a change needs."""
        price = 0.0
        used_before, used_after = budgeted_bytes(plan), budgeted_bytes(changed)
        for tier, limit in ((Tier.DEVICE, self.limits.device), (Tier.HOST, self.limits.host)):
            if limit:
                price += max(used_after[tier] - used_before[tier], 0) / limit
        return price
