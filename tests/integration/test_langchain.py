"""langchain's client for OpenAI against the served demo model: each understands what the other sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import BaseModel, Field

from tests.integration.serving import MODEL_NAME, serve
from tests.serving.server.running_server import RunningServer
from tokenmill.demo import demo_model_path

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def model(server: RunningServer) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL_NAME, base_url=f"{server.url}/v1", api_key="none", max_tokens=100, temperature=0.0, max_retries=0
    )


def test_a_message_is_answered_and_streamed_alike(model: ChatOpenAI) -> None:
    from langchain_core.messages import AIMessage

    whole = model.invoke("Hi")
    assert isinstance(whole, AIMessage)
    assert whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in model.stream("Hi")) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_its_class(model: ChatOpenAI, method: str) -> None:
    found = model.with_structured_output(Weather, method=method).invoke("What is the weather in Paris?")
    assert isinstance(found, Weather)


def test_a_bound_tool_is_called_and_its_result_goes_back(model: ChatOpenAI) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    question = HumanMessage("What is the weather in Paris?")
    reply = model.bind_tools([Weather], tool_choice="Weather").invoke([question])
    (call,) = reply.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    result = ToolMessage("12 degrees", tool_call_id=call["id"])
    assert isinstance(model.bind_tools([Weather]).invoke([question, reply, result]), AIMessage)


def test_embeddings_are_vectors_of_length_one(server: RunningServer) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model=MODEL_NAME, base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    first, second = client.embed_documents(["a mill", "a river"])
    assert len(first) == len(second)
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-3)
