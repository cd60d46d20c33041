"""The worker: pulls what its engine's memory carries to the last token, runs it, writes the answer to the job log."""
