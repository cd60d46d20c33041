"""Arrival processes: when requests come, as increasing times in seconds, from a given source of randomness."""

from collections.abc import Iterator
from random import Random

import msgspec

__all__ = ["Bursts", "Steps", "modulated", "poisson", "stepped"]


class Bursts(msgspec.Struct, frozen=True):
    """A two-state Markov-modulated Poisson process: calm, then a burst of `factor` times the rate of the calm.

    Both states last exponential times of these means. (Heffes and Lucantoni 1986 introduced it for bursty traffic.)
    """

    factor: float = 10.0
    calm_s: float = 45.0
    burst_s: float = 10.0

    def calm_rate(self, mean_rate: float) -> float:
        """Arrivals a second while calm, for this mean over both states."""
        period_s = self.calm_s + self.burst_s
        return mean_rate * period_s / (self.calm_s + self.factor * self.burst_s)


class Steps(msgspec.Struct, frozen=True):
    """A rate that changes at set times: `parts` are (until second, times the rate), in order of time; then nothing."""

    parts: tuple[tuple[float, float], ...]


def poisson(rate: float, duration_s: float, random: Random) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second before `duration_s`."""
    if rate <= 0:
        return
    time_s = random.expovariate(rate)
    while time_s < duration_s:
        yield time_s
        time_s += random.expovariate(rate)


def modulated(mean_rate: float, bursts: Bursts, duration_s: float, random: Random) -> Iterator[float]:
    """Times of a bursty process with this mean rate; it starts calm. The bursts are the same at every rate."""
    calm_rate = bursts.calm_rate(mean_rate)
    for start_s, length_s, is_burst in list(_phases(bursts, duration_s, random)):
        rate = calm_rate * (bursts.factor if is_burst else 1.0)
        for time_s in poisson(rate, length_s, random):
            yield start_s + time_s


def stepped(rate: float, steps: Steps, duration_s: float, random: Random) -> Iterator[float]:
    """Times of Poisson processes, one after the other, before `duration_s`."""
    start_s = 0.0
    for until_s, factor in steps.parts:
        for time_s in poisson(rate * factor, min(until_s, duration_s) - start_s, random):
            yield start_s + time_s
        start_s = until_s


def _phases(bursts: Bursts, duration_s: float, random: Random) -> Iterator[tuple[float, float, bool]]:
    """Start, length, and whether it is a burst."""
    start_s, is_burst = 0.0, False
    while start_s < duration_s:
        length_s = min(random.expovariate(1 / (bursts.burst_s if is_burst else bursts.calm_s)), duration_s - start_s)
        yield start_s, length_s, is_burst
        start_s, is_burst = start_s + length_s, not is_burst
