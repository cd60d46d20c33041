"""All findings about a deployment: pure, from the facts alone."""

from headrace.doctor.facts import Facts
from headrace.doctor.finding import Finding, ordered
from headrace.doctor.judge_broker import judge_broker
from headrace.doctor.judge_clocks import judge_clocks
from headrace.doctor.judge_config import judge_config
from headrace.doctor.judge_parts import judge_parts
from headrace.doctor.judge_queues import judge_queues
from headrace.doctor.judge_replicas import judge_replicas
from headrace.doctor.judge_streams import judge_streams
from headrace.doctor.judge_workers import judge_workers

__all__ = ["judge"]


def judge(facts: Facts) -> list[Finding]:
    """What is found, worst first. What is not known is said once, and judged no further."""
    findings = [*judge_broker(facts), *judge_clocks(facts), *judge_parts(facts), *judge_streams(facts)]
    if facts.has_jetstream and facts.is_provisioned:
        findings += [*judge_workers(facts), *judge_replicas(facts), *judge_queues(facts), *judge_config(facts)]
    return ordered(findings)
