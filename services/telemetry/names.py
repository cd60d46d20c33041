"""Every attribute and event name a span may carry.

`messaging.*` and `error.*` are OpenTelemetry semantic conventions `SEMCONV_VERSION`; `gen_ai.*` are the GenAI
conventions, which left that document for one of their own, `GEN_AI_VERSION`. What they have no word for stands under
`headrace.*`. The names are written out so that the process that only starts spans loads no SDK.
"""

from typing import Final

SEMCONV_VERSION: Final = "1.44.0"
GEN_AI_VERSION: Final = "0.1.0"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"

ERROR_TYPE: Final = "error.type"

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds from issuing the request to the first chunk: the span's own time to first token.
`gen_ai.server.time_to_first_token` is the name of a metric, not of an attribute."""
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

HEADRACE_JOB: Final = "headrace.job"
HEADRACE_TENANT: Final = "headrace.tenant"
HEADRACE_POOL: Final = "headrace.pool"
HEADRACE_LANE: Final = "headrace.lane"
HEADRACE_QUEUE: Final = "headrace.queue"
HEADRACE_ATTEMPT: Final = "headrace.attempt"
HEADRACE_DELIVERY_COUNT: Final = "headrace.delivery_count"
"""How often the broker delivered the message, this time included."""
HEADRACE_WORKER: Final = "headrace.worker"
HEADRACE_NEED_TOKENS: Final = "headrace.need_tokens"
HEADRACE_TTFT_S: Final = "headrace.ttft_s"
"""Seconds from acceptance to the first token, waiting and earlier attempts included."""
HEADRACE_OUTCOME: Final = "headrace.outcome"
"""How the work of the span ended: `cancelled`, or the name of the job's terminal event."""
HEADRACE_REASON: Final = "headrace.reason"
HEADRACE_SERVICE: Final = "headrace.service"
"""Resource attribute: the part (router, worker, …), also where `OTEL_SERVICE_NAME` renames the service."""

EVENT_REQUEUED: Final = "headrace.requeued"
"""Span event: the job went back to its queue; carries `HEADRACE_REASON` and `HEADRACE_ATTEMPT`."""
EVENT_FIRST_TOKEN: Final = "headrace.first_token"

OUTCOME_CANCELLED: Final = "cancelled"

OPERATIONS: Final = {"chat": "chat", "completions": "text_completion", "embeddings": "embeddings"}
"""`gen_ai.operation.name` of each op of the ingress subject."""
