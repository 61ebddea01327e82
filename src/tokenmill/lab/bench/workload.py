"""Draw the requests of a benchmark: prompts of random token ids with drawn lengths, and the times between requests.

Lengths are uniform in a range or follow a traffic profile: log-normal laws fitted to public traces. Everything is a
function of the seed.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
from collections.abc import Iterator
from fractions import Fraction
from math import inf, log

import msgspec

from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.names import did_you_mean

# Of the standard normal law; a profile without a published ln has its deviation from the quantiles.
_Z99 = 2.326


class UniformLengths(msgspec.Struct, frozen=True):
    """A law of lengths: every whole number from `low` to `high` is equally likely."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """Draw one length in tokens."""
        return source.randint(self.low, self.high)


class LogNormalLengths(msgspec.Struct, frozen=True):
    """`mean` and `deviation` of ln(tokens); longer draws are cut at `high`, the longest that the trace is known for."""

    mean: float
    deviation: float
    high: int

    def draw(self, source: random.Random) -> int:
        """Draw one length in tokens, at least 1."""
        return max(1, min(self.high, round(source.lognormvariate(self.mean, self.deviation))))

    def scaled(self, scale: float) -> LogNormalLengths:
        """Return the same law for lengths of `scale` times as many tokens."""
        return LogNormalLengths(self.mean + log(scale), self.deviation, max(1, round(self.high * scale)))


Lengths = UniformLengths | LogNormalLengths


class Profile(msgspec.Struct, frozen=True):
    """The statistics of a public trace.

    Attributes:
        variation: coefficient of variation of the times between arrivals.
    """

    input_len: LogNormalLengths
    output_len: LogNormalLengths
    variation: float


def _from_quantiles(p50: int, p99: int) -> LogNormalLengths:
    return LogNormalLengths(log(p50), log(p99 / p50) / _Z99, p99)


PROFILES = {
    # Azure LLM inference 2023: conversation, code.
    "chat": Profile(LogNormalLengths(6.63, 0.99, 4142), LogNormalLengths(5.02, 0.86, 1000), 1.09),
    "code": Profile(LogNormalLengths(7.00, 1.36, 7436), LogNormalLengths(2.79, 0.85, 251), 13.2),
    # Mooncake: conversation.
    "rag-long": Profile(LogNormalLengths(8.74, 1.20, 85_400), LogNormalLengths(5.34, 1.36, 1118), 3.0),
    # ServeGen: m-small, m-large, deepseek-r1.
    "api-short": Profile(_from_quantiles(40, 1525), _from_quantiles(3, 180), 3.6),
    "general": Profile(_from_quantiles(688, 5850), _from_quantiles(67, 971), 3.45),
    "reasoning": Profile(_from_quantiles(260, 23_612), _from_quantiles(730, 12_584), 2.3),
}


class Prompt(msgspec.Struct, frozen=True):
    """One request: token ids, and the number of output tokens.

    Attributes:
        images: data: URLs, shown before a text.
    """

    token_ids: list[int]
    output_len: int
    images: tuple[str, ...] = ()


class Workload(msgspec.Struct, frozen=True):
    """Requests to draw.

    Attributes:
        prefix_len: tokens that all prompts begin with, in addition to their own.
        num_images: of each request, of `image_size` (width, height) in pixels; no two are alike.
    """

    num_prompts: int
    input_len: Lengths
    output_len: Lengths
    seed: int
    prefix_len: int = 0
    num_images: int = 0
    image_size: tuple[int, int] = (512, 512)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together that a request may have."""
        return self.prefix_len + self.input_len.high + self.output_len.high

    def draw(self, highest_token_id: int, repeat: int = 0) -> list[Prompt]:
        """Draw the requests; each repeat has other ones, so that no prompt is found in the prefix cache."""
        source = random.Random(self.seed + repeat)
        prefix = [source.randint(0, highest_token_id) for _ in range(self.prefix_len)]
        lengths = [self.input_len.draw(source) for _ in range(self.num_prompts)]
        own = [[source.randint(0, highest_token_id) for _ in range(length)] for length in lengths]
        made = [Prompt(prefix + token_ids, self.output_len.draw(source)) for token_ids in own]
        if not self.num_images:
            return made
        return [
            msgspec.structs.replace(one, images=tuple(self._image(source) for _ in range(self.num_images)))
            for one in made
        ]

    def _image(self, source: random.Random) -> str:
        """Return a PNG of coloured tiles."""
        from PIL import Image

        tiles = Image.frombytes("RGB", (8, 8), source.randbytes(3 * 64))
        file = io.BytesIO()
        tiles.resize(self.image_size, Image.Resampling.NEAREST).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def arrival_times(count: int, rate: float, variation: float, seed: int) -> Iterator[float]:
    """Yield the time at which to send each request, in seconds from the start: a Gamma renewal process.

    Args:
        rate: requests per second; infinite: all at once.
        variation: coefficient of variation of the times between arrivals; 1 is a Poisson process.
    """
    source = random.Random(seed)
    shape = variation**-2
    now = 0.0
    for _ in range(count):
        yield now
        now += 0.0 if rate == inf else source.gammavariate(shape, 1 / (rate * shape))


def add_workload_flags(parser: Parser, num_prompts: int, lengths: str) -> None:
    """Add the flags that `read_workload` reads."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="N", help="requests (default: %(default)s)"
    )
    group.add_argument("--input-len", metavar="LOW:HIGH", help=f"prompt tokens, uniform (default: {lengths})")
    group.add_argument("--output-len", metavar="LOW:HIGH", help=f"output tokens, uniform (default: {lengths})")
    group.add_argument("--prefix-len", type=int, default=0, metavar="N", help="further tokens, the same in all prompts")
    group.add_argument("--profile", metavar="NAME", help=f"lengths as in a trace instead: {', '.join(PROFILES)}")
    group.add_argument("--length-scale", default="1", metavar="X", help="shorten a profile's lengths, e.g. 1/16")
    parser.set_defaults(default_lengths=lengths)


def read_workload(namespace: argparse.Namespace, seed: int) -> Workload:
    """Read the workload that the flags describe.

    Raises:
        InvalidConfig: naming the flag.
    """
    at_least("--num-prompts", namespace.num_prompts, 1)
    at_least("--prefix-len", namespace.prefix_len, 0)
    scale = read_scale(namespace.length_scale)
    if namespace.profile is None:
        if scale != 1:
            raise InvalidConfig("--length-scale needs a --profile")
        input_len, output_len = (
            read_lengths(flag, text or namespace.default_lengths)
            for flag, text in (("--input-len", namespace.input_len), ("--output-len", namespace.output_len))
        )
        return Workload(namespace.num_prompts, input_len, output_len, seed, namespace.prefix_len)
    if namespace.input_len or namespace.output_len:
        raise InvalidConfig("--profile brings lengths of its own; leave out --input-len and --output-len")
    profile = find_profile(namespace.profile)
    return Workload(
        namespace.num_prompts,
        profile.input_len.scaled(scale),
        profile.output_len.scaled(scale),
        seed,
        namespace.prefix_len,
    )


def find_profile(name: str) -> Profile:
    """Return the profile of that name.

    Raises:
        InvalidConfig: there is no such profile.
    """
    if name not in PROFILES:
        raise InvalidConfig(
            f"--profile: unknown profile {name!r}; there are: {', '.join(PROFILES)}{did_you_mean(name, PROFILES)}"
        )
    return PROFILES[name]


def read_lengths(flag: str, text: str) -> UniformLengths:
    """Read `64` or `6:64`.

    Raises:
        InvalidConfig: naming the flag.
    """
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not high)):
        raise InvalidConfig(f"{flag} must be a number or LOW:HIGH, got {text!r}")
    lengths = UniformLengths(int(low), int(high or low))
    if not 1 <= lengths.low <= lengths.high:
        raise InvalidConfig(f"{flag} must rise from at least 1, got {text!r}")
    return lengths


def at_least(flag: str, value: float, least: float) -> None:
    """Refuse a value below `least`.

    Raises:
        InvalidConfig: naming the flag.
    """
    if value < least:
        raise InvalidConfig(f"{flag} must be at least {least}, got {value}")


def read_scale(text: str) -> float:
    """Read `1/16` or `0.5`.

    Raises:
        InvalidConfig: it is not above 0 and at most 1.
    """
    try:
        scale = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        scale = 0.0
    if not 0.0 < scale <= 1.0:
        raise InvalidConfig(f"--length-scale must be above 0 and at most 1, such as 1/16, got {text!r}")
    return scale
