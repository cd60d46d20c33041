"""The host agent: keeps replicas of models running on one machine, agreed with other hosts by leases alone."""

from headrace.host.agent import HostOptions, run_host

__all__ = ["HostOptions", "run_host"]
