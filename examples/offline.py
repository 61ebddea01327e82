"""The engine in this process: no server, no sockets.

python examples/offline.py [MODEL]
"""

import sys

from tokenmill import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else ""  # none: the bundled demo model

with LLM(model, max_num_seqs=16, kv_cache_memory_bytes=64 << 20) as llm:
    # A batch of texts runs together; results come back in order.
    prompts = ["TokenMill is", "A page is", "There was a"]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    for prompt, result in zip(prompts, llm.generate(prompts, greedy), strict=True):
        print(f"{prompt!r} -> {result.outputs[0].text!r} ({result.outputs[0].finish_reason})")

    # A conversation, two answers to it, the same ones every time.
    messages = [{"role": "user", "content": "What is TokenMill?"}]
    (answer,) = llm.chat(messages, SamplingParams(n=2, seed=1, max_tokens=24))
    for output in answer.outputs:
        print(f"answer {output.index}: {output.text!r}")
    print(f"{answer.num_prompt_tokens} prompt tokens, {answer.num_cached_tokens} of them from the prefix cache")

    # An answer as it grows.
    for delta in llm.stream(messages, SamplingParams(temperature=0, max_tokens=24)):
        print(delta.text, end="", flush=True)
    print()
