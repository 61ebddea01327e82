"""`tokenmill bench serve`: put load on a running OpenAI-compatible server and measure its clients' latencies.

The load is completions, or calls for vectors or for scores of documents (`--backend`).
Requests are sent at the times of a renewal process (`--request-rate`, `--burstiness`), with at most
`--max-concurrency` open at once; a request that has to wait for its turn is timed from when it is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import inf, isnan
from typing import Any

import httpx
import msgspec
from rich.progress import Progress

from tokenmill.config.parser import Parser, finite
from tokenmill.config.server_settings import DEFAULT_PORT
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.figures import DISTRIBUTIONS
from tokenmill.lab.bench.outputs import add_output_flags, check_outputs, write_outputs
from tokenmill.lab.bench.plot import Line, Panel
from tokenmill.lab.bench.progress import progress_bar
from tokenmill.lab.bench.report import PERCENTILES, distribution, distribution_of_requests, machine_facts, percentile
from tokenmill.lab.bench.samples import request_samples
from tokenmill.lab.bench.streams import Backend, Stream, run_pooled, run_stream
from tokenmill.lab.bench.workload import (
    Prompt,
    Workload,
    add_workload_flags,
    arrival_times,
    at_least,
    find_profile,
    read_workload,
)
from tokenmill.llm.remote import CONNECT_SECONDS, ServerRefused

WARM_UP_TOKENS = 4


class Load(msgspec.Struct, frozen=True):
    """The load to put on a server: a workload, its rate and its limits.

    Attributes:
        request_rate: per second; infinite: as fast as `max_concurrency` allows.
        variation: coefficient of variation of the times between requests.
        max_concurrency: most requests open at once; None: no limit.
        max_token_id: prompts are drawn from the ids 0 to this.
        fields: sampling parameters of every request.
        backend: kind of request. batch_size: texts of each, where it is for vectors or scores.
    """

    workload: Workload
    request_rate: float
    variation: float
    max_concurrency: int | None
    max_token_id: int
    num_warmups: int
    fields: dict[str, Any]
    backend: Backend = Backend.COMPLETIONS
    batch_size: int = 1


def run(arguments: Sequence[str]) -> int:
    """Measure and print; returns 0.

    Raises:
        TokenMillError: a flag is out of range, no server answers, or it answered no request.
    """
    namespace = make_parser().parse(arguments)
    check_outputs(namespace)
    load = read_load(namespace)
    key = namespace.api_key or os.environ.get("TOKENMILL_API_KEY", "").split(",")[0]
    with progress_bar() as bar:
        model, streams, seconds = asyncio.run(drive(namespace.url, key, namespace.model, load, bar))
    answered = [stream for stream in streams if stream.error is None]
    if not answered:
        raise ServerRefused(f"no request was answered: {streams[0].error}: {streams[0].detail}")
    document = summarize(answered, seconds) | {
        "errors": dict(Counter(stream.error for stream in streams if stream.error is not None)),
        "workload": {
            **msgspec.to_builtins(load.workload),
            "profile": namespace.profile,
            "length_scale": namespace.length_scale,
            # JSON has no infinity: an unlimited rate is null.
            "request_rate": None if load.request_rate == inf else load.request_rate,
            "variation": load.variation,
            "max_concurrency": load.max_concurrency,
            "backend": load.backend.value,
            "batch_size": load.batch_size,
            **load.fields,
        },
        "server": {"url": namespace.url, "model": model},
        "machine": machine_facts(),
    }
    print(_table(document), file=sys.stderr)
    write_outputs(namespace, document, lambda: _panels(answered), request_samples(streams))
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench serve`."""
    parser = Parser("bench serve", "Put load on a running server; the last line is JSON.")
    group = parser.add_argument_group("server")
    url = os.environ.get("TOKENMILL_URL", f"http://127.0.0.1:{DEFAULT_PORT}")
    group.add_argument("--url", "--base-url", default=url, help="server, also as TOKENMILL_URL (default: %(default)s)")
    group.add_argument("--api-key", default=None, help="its key, also as TOKENMILL_API_KEY")
    group.add_argument("--model", default=None, help="name of the model at the server (default: the first it lists)")
    group.add_argument(
        "--backend",
        choices=[one.value for one in Backend],
        default=Backend.COMPLETIONS.value,
        help="completions, vectors (/v1/embeddings) or scores (/v1/rerank) (default: %(default)s)",
    )
    group.add_argument(
        "--random-batch-size",
        type=int,
        default=1,
        metavar="N",
        help="texts of a request for vectors, documents of one for scores (default: 1)",
    )
    add_workload_flags(parser, num_prompts=100, lengths="6:64")
    group = parser.add_argument_group("images, for models that take them")
    group.add_argument(
        "--images", type=int, default=0, metavar="N", help="images of each request, all different (default: 0)"
    )
    group.add_argument("--image-size", default="512x512", metavar="WxH", help="in pixels (default: %(default)s)")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=inf, metavar="X", help="requests per second (default: inf)"
    )
    group.add_argument("--burstiness", type=float, metavar="X", help="shape of the Gamma law of gaps; 1: Poisson")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests open at once (default: no limit)")
    group.add_argument("--temperature", type=finite, default=0.0, metavar="X", help="of every request (default: 0)")
    group.add_argument("--max-token-id", type=int, default=1000, metavar="N", help="prompts are drawn from 0 to this")
    group.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="short requests before, as warm-up (default: 1)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and times (default: 0)")
    add_output_flags(parser)
    return parser


def read_load(namespace: argparse.Namespace) -> Load:
    """Read the load that the flags describe.

    Raises:
        InvalidConfig: naming the flag.
    """
    workload = _with_images(read_workload(namespace, namespace.seed), namespace.images, namespace.image_size)
    if isnan(namespace.request_rate) or namespace.request_rate <= 0:
        raise InvalidConfig(f"--request-rate must be above 0, got {namespace.request_rate}")
    if namespace.burstiness is None:
        variation = 1.0 if namespace.profile is None else find_profile(namespace.profile).variation
    elif 0 < namespace.burstiness < inf:
        variation = namespace.burstiness**-0.5
    else:
        raise InvalidConfig(f"--burstiness must be above 0, got {namespace.burstiness}")
    if namespace.max_concurrency is not None:
        at_least("--max-concurrency", namespace.max_concurrency, 1)
    at_least("--max-token-id", namespace.max_token_id, 0)
    at_least("--num-warmups", namespace.num_warmups, 0)
    at_least("--random-batch-size", namespace.random_batch_size, 1)
    backend = Backend(namespace.backend)
    if backend is Backend.COMPLETIONS and namespace.random_batch_size > 1:
        raise InvalidConfig("--random-batch-size is for --backend openai-embeddings and vllm-rerank")
    if backend is not Backend.COMPLETIONS and namespace.images:
        raise InvalidConfig(f"--images: --backend {backend.value} takes texts alone")
    return Load(
        workload,
        namespace.request_rate,
        variation,
        namespace.max_concurrency,
        namespace.max_token_id,
        namespace.num_warmups,
        {"temperature": namespace.temperature} if backend is Backend.COMPLETIONS else {},
        backend,
        namespace.random_batch_size,
    )


def _with_images(workload: Workload, count: int, size: str) -> Workload:
    at_least("--images", count, 0)
    width, _, height = size.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= 8192 and 0 < int(height) <= 8192):
        raise InvalidConfig(f"--image-size takes 512x512 and so on, got {size!r}")
    if count and importlib.util.find_spec("PIL") is None:
        raise InvalidConfig("--images needs Pillow: pip install 'tokenmill[vision]'")
    return msgspec.structs.replace(workload, num_images=count, image_size=(int(width), int(height)))


def summarize(answered: Sequence[Stream], seconds: float) -> dict[str, Any]:
    """Summarize the complete answers; times in seconds."""
    given = [one.num_prompt_tokens for one in answered]
    own = [len(stream.prompt.token_ids) for stream in answered]
    input_tokens = sum(own if said is None else said for own, said in zip(own, given, strict=True))
    output_tokens = sum(stream.num_tokens for stream in answered)
    per_token = [stream.seconds_per_token for stream in answered]
    return {
        "benchmark": "serve",
        "completed": len(answered),
        "seconds": seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": len(answered) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (input_tokens + output_tokens) / seconds,
        "ttft_seconds": distribution_of_requests([stream.ttft for stream in answered]),
        "inter_token_seconds": distribution([gap for stream in answered for gap in stream.gaps]),
        "time_per_output_token_seconds": distribution_of_requests([value for value in per_token if value is not None]),
        "e2e_seconds": distribution_of_requests([stream.arrivals[-1] - stream.sent for stream in answered]),
    }


async def drive(url: str, key: str, model: str | None, load: Load, bar: Progress) -> tuple[str, list[Stream], float]:
    """Send the load; returns the model's name, all streams in the order of their prompts, and their total seconds."""
    async with httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        # An answer may take as long as it takes; only connecting is timed.
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None),
    ) as client:
        model = model or await _first_model(client, url)
        # Drawn apart, so that the prefix cache does not know the prompts that are measured.
        for prompt in load.workload.draw(load.max_token_id, repeat=-1)[: load.num_warmups]:
            short = Prompt(prompt.token_ids, min(prompt.output_len, WARM_UP_TOKENS))
            stream = await _ask(client, model, [short], load)
            if stream.error is not None:
                raise ServerRefused(f"the server at {url} does not answer: {stream.error}: {stream.detail}")
        start = time.monotonic()
        streams = await _send_all(client, model, load, bar)
        return model, streams, time.monotonic() - start


async def _ask(client: httpx.AsyncClient, model: str, prompts: Sequence[Prompt], load: Load) -> Stream:
    """Send one request: a prompt, or a batch of texts."""
    if load.backend is Backend.COMPLETIONS:
        return await run_stream(client, model, prompts[0], load.fields)
    return await run_pooled(client, model, prompts, load.backend)


async def _send_all(client: httpx.AsyncClient, model: str, load: Load, bar: Progress) -> list[Stream]:
    drawn, size = load.workload.draw(load.max_token_id), load.batch_size
    prompts = [drawn[first : first + size] for first in range(0, len(drawn), size)]
    times = arrival_times(len(prompts), load.request_rate, load.variation, load.workload.seed)
    turns = asyncio.Semaphore(load.max_concurrency or len(prompts))
    task = bar.add_task("requests", total=len(prompts), rate="")
    start = time.monotonic()
    tokens = errors = 0

    async def send(prompt: Sequence[Prompt]) -> Stream:
        nonlocal tokens, errors
        async with turns:
            stream = await _ask(client, model, prompt, load)
        tokens += stream.num_tokens or stream.num_prompt_tokens or 0
        errors += stream.error is not None
        rate = f"{tokens / (time.monotonic() - start):.1f} tokens/s"
        bar.update(task, advance=1, rate=f"{rate}, {errors} errors" if errors else rate)
        return stream

    async with asyncio.TaskGroup() as group:
        sending = []
        for prompt, at in zip(prompts, times, strict=True):
            await asyncio.sleep(start + at - time.monotonic())
            sending.append(group.create_task(send(prompt)))
    return [task.result() for task in sending]


async def _first_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.ConnectError:
        raise ServerRefused(f"no server answers at {url}; start one with: tokenmill serve") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ServerRefused(f"{url}/v1/models gives no model: {error}") from None


def _table(document: dict[str, Any]) -> str:
    kind = "output" if document["output_tokens"] else "total"
    head = (
        f"{document['completed']} answers, {sum(document['errors'].values())} errors in {document['seconds']:.1f} s: "
        f"{document[f'{kind}_tokens_per_second']:.1f} {'output ' if kind == 'output' else ''}tokens/s"
    )
    rows = [head, f"{'ms':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for name in DISTRIBUTIONS:
        figures = document[f"{name}_seconds"]
        if figures is not None:
            rows.append(f"{name:<24}" + "".join(f"{figures[one] * 1e3:10.1f}" for one in ("mean", "p50", "p90", "p99")))
    return "\n".join([*rows, *(f"{count} x {kind}" for kind, count in document["errors"].items())])


def _panels(answered: Sequence[Stream]) -> list[Panel]:
    """Return panels of the share of samples up to each value, with percentiles marked; skips empty ones."""
    per_token = [stream.seconds_per_token for stream in answered]
    sampled = {
        "time to first token": [stream.ttft for stream in answered],
        "time per output token": [value for value in per_token if value is not None],
        "time between pieces": [gap for stream in answered for gap in stream.gaps],
    }
    return [_shares(title, [seconds * 1e3 for seconds in samples]) for title, samples in sampled.items() if samples]


def _shares(title: str, samples: Sequence[float]) -> Panel:
    ordered, count = sorted(samples), len(samples)
    line = Line(f"{count} samples", ordered, [(place + 1) / count for place in range(count)])
    found = {percent: percentile(samples, percent) for percent in PERCENTILES}
    marks = {f"p{percent}: {value:.4g} ms": value for percent, value in found.items()}
    return Panel(title, "milliseconds", "share of samples up to this", [line], marks)
