"""litellm."""

import litellm
from report import BASE, MODEL, URL, call

ASK = [{"role": "user", "content": "What is a page?"}]
HOW = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": "none", "messages": ASK, "max_tokens": 16}


@call("completion")
def _() -> object:
    return litellm.completion(**HOW).choices[0].message.content


@call("completion, streamed")
def _() -> object:
    return "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**HOW, stream=True))


@call("hosted_vllm/")
def _() -> object:
    return litellm.completion(**HOW | {"model": f"hosted_vllm/{MODEL}"}).choices[0].message.content


@call("anthropic/")
def _() -> object:
    how = HOW | {"model": f"anthropic/{MODEL}", "api_base": URL}
    return litellm.completion(**how).choices[0].message.content


@call("json_schema")
def _() -> object:
    schema = {"type": "object", "properties": {"shared": {"type": "boolean"}}, "required": ["shared"]}
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    return "shared" in litellm.completion(**HOW, response_format=form).choices[0].message.content


@call("embedding")
def _() -> object:
    return litellm.embedding(f"openai/{MODEL}", ["a"], api_base=BASE, api_key="none").data
