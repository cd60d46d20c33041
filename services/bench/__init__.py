"""Measurements of a whole deployment of its own: real broker, real processes, the simulated engine."""

__all__: list[str] = []
