"""The broker as Headrace uses it: connection, streams, job log, job queue, heartbeats. The only package that imports nats."""
