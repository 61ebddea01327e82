"""The official OpenAI client against a running server (`make serve` or `tokenmill serve`).

    python examples/openai_client.py

Another address: OPENAI_BASE_URL=http://host:port/v1. The client is no dependency of TokenMill: pip install openai.
"""

import os

from openai import BadRequestError, OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Say hello to the mill."}]

# Whole answers: two of them, limited in length, with what they cost.
reply = client.chat.completions.create(model=model, messages=messages, n=2, max_tokens=16, seed=7)
for choice in reply.choices:
    print(f"{choice.index}: {choice.message.content!r} ({choice.finish_reason})")
print(f"{reply.usage.prompt_tokens} + {reply.usage.completion_tokens} tokens")

# Streamed, with usage in the last chunk.
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.total_tokens} tokens")

# The same seed draws the same tokens, whatever else the server does meanwhile.
again = [
    client.completions.create(model=model, prompt="There was a", max_tokens=8, seed=5, stop=["."]).choices[0].text
    for _ in range(2)
]
print("the same twice:", again[0] == again[1])

# A mistake is refused by name.
try:
    client.chat.completions.create(model=model, messages=messages, temperature=9)
except BadRequestError as error:
    print("refused:", error.body["message"], "- field:", error.body["param"])
