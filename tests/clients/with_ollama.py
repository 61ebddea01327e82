"""Ask a running server through clients of Ollama; `test_ollama` runs this in an environment of its own.

python with_ollama.py URL MODEL        (knows nothing of TokenMill; fails where an answer is not as asked for)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Literal

import litellm
import ollama
from haystack.dataclasses import ChatMessage as HaystackMessage
from haystack_integrations.components.generators.ollama import OllamaChatGenerator
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.ollama import Ollama as LlamaIndexOllama
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is TokenMill?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


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
    ask_llama_index(url, model, whole)
    ask_haystack(url, model, whole)
    ask_llm(url, model, whole)


def ask_llama_index(url: str, model: str, whole: str) -> None:
    """Let LlamaIndex's Ollama chat, stream, and fill a class."""
    options = {"num_predict": 24}
    chat = LlamaIndexOllama(model=model, base_url=url, temperature=0, additional_kwargs=options, context_window=2048)
    question = [ChatMessage(role="user", content=QUESTION[0]["content"])]
    assert chat.chat(question).message.content == whole
    assert "".join(part.delta or "" for part in chat.stream_chat(question)) == whole
    shaped = LlamaIndexOllama(model=model, base_url=url, temperature=0, additional_kwargs={"num_predict": 60})
    found = shaped.structured_predict(City, PromptTemplate("A city, please."))
    print("llama-index", found)


def ask_haystack(url: str, model: str, whole: str) -> None:
    """Let Haystack's generator answer whole, and in parts."""
    parts: list[str] = []
    options = {"temperature": 0, "num_predict": 24}
    question = [HaystackMessage.from_user(QUESTION[0]["content"])]
    (reply,) = OllamaChatGenerator(model, url, options).run(question)["replies"]
    assert reply.text == whole, reply
    OllamaChatGenerator(model, url, options, streaming_callback=lambda part: parts.append(part.content)).run(question)
    assert "".join(parts) == whole
    print("haystack", reply.meta["usage"])


def ask_llm(url: str, model: str, whole: str) -> None:
    """Let the command `llm` find the models of a server, and ask one."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OLLAMA_HOST": url, "LLM_USER_PATH": folder}
        asked = [sys.executable, "-m", "llm"]
        listed = subprocess.run([*asked, "ollama", "models"], check=True, capture_output=True, text=True, env=env)
        assert model in listed.stdout, listed.stdout
        options = ("-o", "temperature", "0", "-o", "num_predict", "24")
        prompt = [*asked, "-m", f"ollama/{model}", *options, QUESTION[0]["content"]]
        for more in ((), ("--no-stream",)):
            done = subprocess.run([*prompt, *more], check=True, capture_output=True, text=True, env=env)
            assert done.stdout.strip() == whole.strip(), done.stdout
    print("llm", listed.stdout.split()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
