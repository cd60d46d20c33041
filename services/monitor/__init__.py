"""The monitor: watches the workers' heartbeats and says who came, changed, left or was lost."""

from headrace.monitor.monitor import run_monitor

__all__ = ["run_monitor"]
