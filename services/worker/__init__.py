"""The worker: pulls what its engine's memory carries to the last token, runs it, and writes the answer to the job log."""
