"""Fairness between tenants: Jain's index of what each got against its fair share."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from headrace.simulator.requests import Request

__all__ = ["WINDOW_S", "fair_shares", "jain_index"]

WINDOW_S: Final = 10.0


def jain_index(requests: Sequence[Request], *, weights: Mapping[str, float]) -> float | None:
    """Mean of Jain's index over the windows of 10 s in which not all could be served; None with one tenant.

    In each window, x is the tokens (prompt and answer) of a tenant's requests that started, over its fair share: the
    weighted max-min share of all that started, given what it had waiting. The index is (Σx)² / (n · Σx²): 1 if all
    got their share, 1/n if one got everything (Jain, Chiu, Hawe, DEC-TR-301, 1984). 1 if nobody ever had to wait.
    """
    tenants = sorted({request.arrival.tenant for request in requests})
    if len(tenants) < 2:
        return None
    asked: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    served: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for request in requests:
        assert request.started_s is not None
        tokens = request.arrival.prompt_tokens + request.arrival.output_tokens
        asked[int(request.arrival.time_s // WINDOW_S)][request.arrival.tenant] += tokens
        served[int(request.started_s // WINDOW_S)][request.arrival.tenant] += tokens
    waiting = dict.fromkeys(tenants, 0)
    indexes = []
    for window in range(max(served) + 1):
        demand = {tenant: waiting[tenant] + asked[window][tenant] for tenant in tenants}
        got = {tenant: served[window][tenant] for tenant in tenants}
        waiting = {tenant: demand[tenant] - got[tenant] for tenant in tenants}
        wanting = [tenant for tenant in tenants if demand[tenant]]
        if len(wanting) > 1 and any(waiting.values()) and any(got.values()):
            shares = fair_shares(demand, sum(got.values()), weights)
            indexes.append(_jain([got[tenant] / shares[tenant] for tenant in wanting]))
    return sum(indexes) / len(indexes) if indexes else 1.0


def fair_shares(demand: Mapping[str, int], total: float, weights: Mapping[str, float]) -> dict[str, float]:
    """The weighted max-min shares of `total`: nobody gets more than it asks for, the rest goes by weight."""
    shares: dict[str, float] = {}
    left = total
    hungry = sorted(
        (tenant for tenant in demand if demand[tenant]), key=lambda tenant: demand[tenant] / weights.get(tenant, 1.0)
    )
    weight = sum(weights.get(tenant, 1.0) for tenant in hungry)
    for tenant in hungry:
        own = weights.get(tenant, 1.0)
        shares[tenant] = min(float(demand[tenant]), left * own / weight)
        left -= shares[tenant]
        weight -= own
    return shares


def _jain(values: Sequence[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
