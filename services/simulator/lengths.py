"""How long prompts and answers are: log-normal distributions after published figures.

Only summary figures are used, no trace is copied:

- conversations: the Azure conversation trace of November 2023 has a median prompt of 1,020 and a median answer of 129
  tokens (Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024, section III);
- code completion: its coding trace has a median prompt of 1,500 and a median answer of 13 tokens (ibid.);
- short chats: ShareGPT has a mean prompt of 161 and a mean answer of 338 tokens (Kwon et al., "Efficient memory
  management for LLM serving with PagedAttention", SOSP 2023, section 6.1).

The spreads are ours, chosen so that both tails look like the published plots: a log-normal with sigma 1 has its 99th
percentile at ten times the median. Published lengths are close to log-normal, not exactly.
"""

import math
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Final

import msgspec

__all__ = ["LENGTHS", "LengthMix", "Lengths", "sampled_limit"]

_LIMITS: Final = (64, 256, 512, 1024, 2048, 4096)
_DEFAULT_LIMIT: Final = 1024


class Lengths(msgspec.Struct, frozen=True):
    """A log-normal number of tokens, cut to [`least`, `most`]."""

    median: float
    sigma: float
    least: int = 1
    most: int = 8192

    @classmethod
    def of_mean(cls, mean: float, sigma: float, least: int = 1, most: int = 8192) -> "Lengths":
        """The distribution with this mean (before the cut): median = mean · exp(−sigma²/2)."""
        return cls(mean * math.exp(-sigma * sigma / 2), sigma, least, most)

    def sample(self, random: Random) -> int:
        """One length."""
        return min(self.most, max(self.least, round(random.lognormvariate(math.log(self.median), self.sigma))))


class LengthMix(msgspec.Struct, frozen=True):
    """Lengths of one kind of traffic."""

    prompt: Lengths
    output: Lengths


LENGTHS: Final[Mapping[str, LengthMix]] = MappingProxyType(
    {
        "conversation": LengthMix(Lengths(1020, 0.9, most=6000), Lengths(129, 0.9, most=1024)),
        "code": LengthMix(Lengths(1500, 0.8, most=6000), Lengths(13, 1.0, most=512)),
        "chat": LengthMix(Lengths.of_mean(161, 1.0, most=2000), Lengths.of_mean(338, 0.8, most=1024)),
        "long": LengthMix(Lengths(9000, 0.3, least=4000, most=16_000), Lengths(300, 0.6, most=1024)),
    }
)
"""By kind of traffic: the three above, and `long` for documents, whose figures are made up."""


def sampled_limit(output_tokens: int, random: Random) -> int:
    """`max_tokens` as clients set it: half of them leave the default of 1,024, half choose a round number that will do.

    An assumption, and one that costs a policy that reserves: most answers end far below their limit.
    """
    enough = next((limit for limit in _LIMITS if limit >= output_tokens), output_tokens)
    return enough if random.random() < 0.5 else max(_DEFAULT_LIMIT, output_tokens)
