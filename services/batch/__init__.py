"""Many requests from one file: each line answered once, whoever stops in between and goes on later."""

from headrace.batch.files import Files, Upload
from headrace.batch.keeper import BatchKeeper
from headrace.batch.lines import read_requests
from headrace.batch.runner import BatchRunner
from headrace.batch.sweeping import sweep_for_ever
from headrace.batch.window import Window

__all__ = ["BatchKeeper", "BatchRunner", "Files", "Upload", "Window", "read_requests", "sweep_for_ever"]
