"""Many tasks on the engine in this process; one changes its mind.

python examples/async_llm.py [MODEL]
"""

import asyncio
import sys

from tokenmill import AsyncLLM, SamplingParams

PROMPTS = ["TokenMill is", "A page is", "There was a", "The mill"]


async def answer(llm: AsyncLLM, prompt: str, number: int) -> None:
    """Show what the model goes on with. Leaving the loop early aborts the request."""
    params = SamplingParams(temperature=0, max_tokens=24)
    async for output in llm.generate(prompt, params, f"request-{number}"):
        has_seen_enough = number == 0 and len(output.outputs[0].token_ids) >= 4
        if output.finished or has_seen_enough:
            print(f"{output.request_id}: {prompt!r} -> {output.outputs[0].text!r}")
            break


async def main(model: str) -> None:
    """Ask for all of them at once: they run together, in the same steps."""
    async with AsyncLLM(model, max_num_seqs=16, kv_cache_memory_bytes=64 << 20) as llm:
        await asyncio.gather(*[answer(llm, prompt, number) for number, prompt in enumerate(PROMPTS)])


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
