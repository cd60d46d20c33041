"""The broker as Headrace uses it: connection, streams, log, queue, heartbeats. The only package that imports nats."""
