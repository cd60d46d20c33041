"""The queue discipline: who runs, by memory, and who is next, by priority and fairness. Pure: no I/O, clock or chance.

`choice.order` says which queue to take from, `room.startable` which of the fetched requests start,
`company.admissible` which of them may run beside each other after a fault, `placement.place` what becomes of one that
cannot, `affinity.preferred` who has its prefix, `position.position` how many start before it.
Worker, router, simulator and `status` use the same functions. docs/discipline.md has the rules and their bounds.
"""

__all__ = ["affinity", "choice", "company", "placement", "position", "room", "rounds", "shares"]
