"""Read the arrivals of requests from traces: Mooncake's JSONL, Azure's CSV and step logs.

Traces have no texts. If one has hashes of blocks, the ids of a block's tokens spell its hash in digits of base
`vocab_size`, so that prompts share a prefix exactly where their hashes are the same. Outputs are in no hash: the part
of an answer that a later prompt repeats is another block, and is computed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.errors import TokenMillError
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import IntArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.step_log import Added, Extended, RecordedInput, read_log
from tokenmill.lab.simulate.policies import arrivals_of, tokens_of

# Tokens of a block in Mooncake's traces.
BLOCK_SIZE = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Arrival(msgspec.Struct, frozen=True):
    """A request of a trace.

    Attributes:
        seconds: from the trace's start.
        token_ids: its prompt, [n] int32.
        tenant: takes turns with other tenants; if the trace names none, each request is a tenant of its own.
    """

    seconds: float
    token_ids: IntArray
    num_output_tokens: int
    tenant: str
    priority: int = 0


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for reading a trace.

    Attributes:
        block_size: tokens of a block that has a hash.
        scale: factor for all lengths, including those of blocks; at most 1.
        speed: times between arrivals are divided by it.
        limit: most requests to read; 0: all.
    """

    vocab_size: int
    block_size: int = BLOCK_SIZE
    scale: float = 1.0
    speed: float = 1.0
    limit: int = 0


class _MooncakeLine(msgspec.Struct):
    """A line with the field names of the published traces; `tenant` and `priority` are ours."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    tenant: str = ""
    priority: int = 0


def read_trace(path: Path, options: TraceOptions) -> list[Arrival]:
    """Read the arrivals of a file in any of the formats, by time.

    Raises:
        TokenMillError: the file cannot be read, or a line of it breaks its format.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise TokenMillError(f"cannot read {path}: {error.strerror}") from error
    if start.startswith(b'{"time"'):
        read = _read_server_log
    elif start.startswith(b"{"):
        read = _read_mooncake
    elif start.startswith(AZURE_COLUMNS[0].encode()):
        read = _read_azure
    else:
        read = _read_step_log
    arrivals = sorted(read(path, options), key=lambda one: one.seconds)
    if not arrivals:
        raise TokenMillError(f"{path} has no requests")
    return at_speed(arrivals[: options.limit or None], options.speed)


def at_speed(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """Return arrivals from 0 on, with the times between them divided by `speed`."""
    first = arrivals[0].seconds
    return [msgspec.structs.replace(one, seconds=(one.seconds - first) / speed) for one in arrivals]


def as_inputs(arrivals: Iterable[Arrival]) -> Iterator[tuple[float, RecordedInput]]:
    """Yield the inputs of engines: requests that end after their number of tokens. An id is a place in the trace."""
    for number, arrival in enumerate(arrivals):
        message = AddRequest(
            id=str(number),
            prompt_token_ids=arrival.token_ids.tolist(),
            params=SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True),
            tenant=arrival.tenant,
            priority=arrival.priority,
        )
        yield arrival.seconds, Added(message, "waiting")


def block_tokens(blocks: Sequence[int], length: int, block_size: int, vocab_size: int) -> IntArray:
    """Return the ids of a prompt, [length] int32: token i of a block is digit i, repeating the digits from the first.

    If there are fewer blocks than the length needs, the rest continues the last one.

    Args:
        blocks: the numbers of its blocks, at least 0; at least one block.
    """
    numbers = np.array(blocks, np.int64)
    num_digits = 1
    while vocab_size**num_digits <= (1 << 62):
        num_digits += 1
    digits = numbers[:, None] // vocab_size ** np.arange(num_digits, dtype=object) % vocab_size
    places = np.arange(length)
    rows = np.minimum(places // block_size, len(blocks) - 1)
    token_ids: IntArray = digits.astype(np.int32)[rows, places % block_size % num_digits]
    return token_ids


def _read_mooncake(path: Path, options: TraceOptions) -> Iterator[Arrival]:
    block_size = max(1, round(options.block_size * options.scale))
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TokenMillError(f"{path}, line {number + 1}: {error}") from error
        if one.input_length < 1 or one.output_length < 0 or min(one.hash_ids, default=0) < 0:
            raise TokenMillError(f"{path}, line {number + 1}: lengths and hashes must not be below 1 and 0")
        length = _scaled(one.input_length, options.scale)
        # Without hashes, a prompt has nothing in common with another: its number stands above those of all hashes.
        token_ids = block_tokens(one.hash_ids or [(1 << 61) + number], length, block_size, options.vocab_size)
        output = _scaled(one.output_length, options.scale)
        yield Arrival(one.timestamp / 1000, token_ids, output, one.tenant or str(number), one.priority)


class _LogLine(msgspec.Struct):
    """The fields of a line of `serve --enable-log-requests --log-format json` on a request that has ended."""

    event: str
    time: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def _read_server_log(path: Path, options: TraceOptions) -> Iterator[Arrival]:
    """Read requests by arrival: each line was written at its request's end. Requests without tokens are left out."""
    decoder = msgspec.json.Decoder(_LogLine)
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            one = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # a line of another part of the server, or one that was cut off
        if one.event == "request" and one.prompt_tokens > 0 and one.completion_tokens > 0:
            length = _scaled(one.prompt_tokens, options.scale)
            token_ids = block_tokens([number], length, length, options.vocab_size)
            output = _scaled(one.completion_tokens, options.scale)
            yield Arrival(one.time - one.seconds, token_ids, output, str(number))


def _read_azure(path: Path, options: TraceOptions) -> Iterator[Arrival]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                at, *lengths = (row[column] for column in AZURE_COLUMNS)
                seconds = datetime.fromisoformat(at).timestamp()
                num_input, num_output = (int(length) for length in lengths)
            except (KeyError, TypeError, ValueError) as error:
                raise TokenMillError(f"{path}, line {number + 2}: not {', '.join(AZURE_COLUMNS)}: {error}") from error
            length = _scaled(num_input, options.scale)
            token_ids = block_tokens([number], length, length, options.vocab_size)
            yield Arrival(seconds, token_ids, _scaled(num_output, options.scale), str(number))


def _read_step_log(path: Path, options: TraceOptions) -> Iterator[Arrival]:
    """Read requests with the number of tokens that each got; those without tokens are left out."""
    if options.scale != 1.0:
        raise TokenMillError(f"{path} is a step log: its lengths cannot be scaled")
    header, stored = read_log(path)
    if header.vocab_size > options.vocab_size:
        raise TokenMillError(f"{path} is of a model with {header.vocab_size} tokens, this one has {options.vocab_size}")
    records = list(stored)
    last: dict[str, int] = {}
    for request_id, place in (key for key, _ in tokens_of(records)):
        last[request_id] = max(place, last.get(request_id, 0))
    inputs, _ = arrivals_of(records)
    for seconds, arrived in inputs:
        if isinstance(arrived, Extended):
            raise TokenMillError(f"{path} has sessions of several turns: simulate it with --step-model recorded")
        if isinstance(arrived, Added) and arrived.message.id in last:
            message = arrived.message
            prompt = np.array(message.prompt_token_ids + message.output_token_ids, np.int32)
            num_output = last[message.id] - len(prompt) + 1
            yield Arrival(seconds, prompt, max(1, num_output), message.tenant or message.id, message.priority)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
