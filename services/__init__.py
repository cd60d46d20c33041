"""Headrace brings LLM requests to GPUs at the rate their memory can take, over NATS JetStream."""

__version__ = "0.1.0"
