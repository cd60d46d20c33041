"""The queue discipline and its rivals in virtual time: no broker, no clock, the same result for the same seed.

A trace of arrivals is played to a cluster of simulated engines under a policy, and what came out is reported.
"""

__all__: list[str] = []
