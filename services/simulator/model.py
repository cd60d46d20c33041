"""What one engine can do: a roofline of compute and memory bandwidth, and the load that it makes of a trace."""

from collections.abc import Sequence

import msgspec

from headrace.schemas.openai import num_kv_tokens_needed
from headrace.simulator.traces import Arrival

__all__ = ["EngineModel", "seconds_per_request"]


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and speed of one engine.

    A step computes the next token of each decoding request and a part of the prompts that are being read (continuous
    batching with chunked prefill, as vLLM V1 schedules), and takes

        max(weights_s, (decoding + prompt tokens) · token_s) + context tokens of the decoding · context_token_s

    Below the ridge of the roofline a step costs the reading of the weights, above it the arithmetic; the attention's
    reading of the KV cache comes on top (Pope et al., "Efficiently scaling transformer inference", MLSys 2023, section
    2; the quadratic part of long prompts is left out). The defaults are an 8-billion-parameter model with grouped
    query attention, weights in 8 bits, on a card of 24 GB and 1 TB/s: 8 GB of weights take 8 ms, 128 KiB of KV per
    token 0.13 µs, 16 GFLOP per token at 130 TFLOPS in effect 0.125 ms (so 8,000 prompt tokens a second), and 8 GiB
    of KV cache hold 65,536 tokens.
    """

    kv_tokens: int = 65_536
    block_size: int = 16
    max_concurrency: int = 64
    max_step_tokens: int = 2048
    weights_s: float = 0.008
    token_s: float = 0.000125
    context_token_s: float = 0.13e-6

    def step_s(self, num_decoding: int, num_prompt_tokens: int, num_context_tokens: int) -> float:
        """Duration of one step."""
        compute_s = (num_decoding + num_prompt_tokens) * self.token_s
        return max(self.weights_s, compute_s) + num_context_tokens * self.context_token_s

    def need_tokens(self, arrival: Arrival) -> int:
        """KV tokens the request can come to hold, by the rule that admission uses."""
        return num_kv_tokens_needed(arrival.prompt_tokens, arrival.max_tokens, 1, self.block_size)


def seconds_per_request(model: EngineModel, arrivals: Sequence[Arrival]) -> float:
    """Seconds of one engine per request if everything went ideally: the measure of a load of 1.

    Ideal: all shared prefixes cached, batches as large as slots and the memory really used allow, no gaps. No policy
    reaches it, so each saturates below a load of 1.
    """
    num = len(arrivals)
    prompt = sum(each.prompt_tokens for each in arrivals) / num
    fresh = prompt - sum(each.prefix_tokens for each in arrivals) / num
    output = sum(each.output_tokens for each in arrivals) / num
    context = (
        sum((each.prompt_tokens + each.output_tokens / 2) * each.output_tokens for each in arrivals) / num / output
    )
    private = context - (prompt - fresh)
    batch = max(1.0, min(model.max_concurrency, model.kv_tokens / max(private, 1.0)))
    per_token_s = max(model.weights_s / batch, model.token_s) + context * model.context_token_s
    return fresh * model.token_s + output * per_token_s
