"""Sixteen conversations at once over plain HTTP, without a client library: they share steps, and a common prefix.

python examples/many_clients.py [URL]
"""

import asyncio
import json
import sys
import time

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
SYSTEM = {"role": "system", "content": "You are the miller. You answer in one short sentence."}


async def ask(client: httpx.AsyncClient, number: int) -> tuple[float, int]:
    """Stream one answer; returns seconds to the first text and the number of chunks."""
    start, first, chunks = time.perf_counter(), 0.0, 0
    body = {
        "messages": [SYSTEM, {"role": "user", "content": f"What is {number} plus {number}?"}],
        "max_tokens": 16,
        "stream": True,
    }
    async with client.stream("POST", f"{URL}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                first = first or time.perf_counter() - start
                chunks += 1
    return first, chunks


async def main() -> None:
    """Ask all at once, and report."""
    async with httpx.AsyncClient(timeout=None) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, number) for number in range(16)))
        seconds = time.perf_counter() - start
    slowest = max(first for first, _ in answers)
    chunks = sum(count for _, count in answers)
    print(f"16 answers, {chunks} chunks in {seconds:.2f} s; the slowest first text came after {slowest:.2f} s")


asyncio.run(main())
