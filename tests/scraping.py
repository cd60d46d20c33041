"""A scrape of a monitor, as Prometheus reads it."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Scrape", "scrape"]


class Scrape:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in self.families
            for sample in family.samples
        }

    @property
    def whole(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """The same summed over all processes. Parts that share a process have one place, which may be that of any."""
        summed: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for (name, labels), value in self.samples.items():
            key = name, frozenset(each for each in labels if each[0] not in ("service", "process"))
            summed[key] = summed.get(key, 0.0) + value
        return summed

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels."""
        wanted = set(labels.items())
        return sum(value for (each, has), value in self.samples.items() if each == name and wanted <= has)

    def values(self, label: str) -> set[str]:
        """Every value of a label."""
        return {dict(labels)[label] for _, labels in self.samples if label in dict(labels)}


async def scrape(port: int) -> Scrape:
    """Read `/metrics` of the monitor on this port of loopback."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return Scrape(text)
