"""Ask a running server through clients of Ollama; `test_ollama` runs this in an environment of its own.

python with_ollama.py URL MODEL        (knows nothing of TokenMill; fails where an answer is not as asked for)
"""

from __future__ import annotations

import json
import sys

import litellm
import ollama
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

QUESTION = [{"role": "user", "content": "What is TokenMill?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@tool
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"sunny in {city}"


def main(url: str, model: str) -> None:
    """Let each client generate, stream, and call a tool."""
    client = ollama.Client(host=url)
    whole = client.chat(model, QUESTION, options={"temperature": 0, "num_predict": 24}).message.content
    assert whole, "no answer"
    print("ollama", whole)
    chat = ChatOllama(model=model, base_url=url, temperature=0, num_predict=24)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(QUESTION[0]["content"]))
    assert streamed == whole, (streamed, whole)
    answer = chat.invoke(QUESTION[0]["content"])
    assert (answer.content, answer.usage_metadata["output_tokens"] > 0) == (whole, True)
    print("langchain", answer.usage_metadata)
    shaped = ChatOllama(model=model, base_url=url, format=SCHEMA, temperature=0, num_predict=60)
    assert json.loads(str(shaped.invoke("A city, please.").content))["city"] in ("Paris", "Rome")
    called = chat.bind_tools([weather]).invoke("What is the weather in Paris?")
    assert all(call["name"] == "weather" for call in called.tool_calls)
    print("langchain calls", called.tool_calls)
    made = litellm.completion(
        model=f"ollama_chat/{model}", messages=QUESTION, api_base=url, temperature=0, max_tokens=24
    )
    assert made.choices[0].message.content == whole, made
    parts = litellm.completion(
        model=f"ollama_chat/{model}", messages=QUESTION, api_base=url, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    print("litellm", made.usage)


if __name__ == "__main__":
    main(*sys.argv[1:])
