"""What routers and workers know of prefixes: the hashes of a request."""

from typing import Final

from headrace.discipline.affinity import BLOCK_CHARS, MAX_BLOCKS
from headrace.simulator.traces import Arrival

__all__ = ["TOKENS_PER_BLOCK", "hashes_of"]

TOKENS_PER_BLOCK: Final = BLOCK_CHARS // 4
"""A token of English text has about four characters."""


def hashes_of(index: int, arrival: Arrival) -> tuple[str, ...]:
    """What the router's hashes would be: equal for the blocks of a shared prefix, unlike any other after it."""
    num_shared = min(MAX_BLOCKS, arrival.prefix_tokens // TOKENS_PER_BLOCK)
    num_blocks = min(MAX_BLOCKS, arrival.prompt_tokens // TOKENS_PER_BLOCK)
    return tuple(
        f"{arrival.prefix}/{block}" if block < num_shared else f"#{index}/{block}" for block in range(num_blocks)
    )
