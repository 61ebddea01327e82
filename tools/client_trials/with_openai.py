"""openai, the Python client."""

import openai
from pydantic import BaseModel
from report import BASE, MODEL, call

client = openai.OpenAI(base_url=BASE, api_key="none")
ASK = [{"role": "user", "content": "What is a page?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "today's", "parameters": PARAMETERS}}


class Verdict(BaseModel):
    """The form of the answer."""

    shared: bool


@call("chat")
def _() -> object:
    return client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=16).choices[0].message.content


@call("chat, streamed")
def _() -> object:
    chunks = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    return next(chunk.usage for chunk in chunks if chunk.usage).completion_tokens == 16


@call("tools")
def _() -> object:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required")
    return answer.choices[0].message.tool_calls[0].function.name == "weather"


@call("parse into a class")
def _() -> object:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Verdict)
    return answer.choices[0].message.parsed is not None


@call("completions, logprobs")
def _() -> object:
    answer = client.completions.create(model=MODEL, prompt="TokenMill is", max_tokens=4, logprobs=2)
    return len(answer.choices[0].logprobs.tokens) == 4


@call("responses, streamed")
def _() -> object:
    with client.responses.stream(model=MODEL, input="What is a page?") as stream:
        return list(stream) and stream.get_final_response().output_text


@call("embeddings")
def _() -> object:
    return client.embeddings.create(model=MODEL, input=["a", "b"]).data[1].embedding


@call("models")
def _() -> object:
    return MODEL in [model.id for model in client.models.list()]


@call("an error is its class")
def _() -> object:
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        return error.param == "temperature"
    return False
