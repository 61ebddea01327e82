"""langchain-openai."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from report import BASE, MODEL, call

model = ChatOpenAI(base_url=BASE, api_key="none", model=MODEL, max_tokens=64)


class Verdict(BaseModel):
    """The form of the answer."""

    shared: bool


@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@call("invoke")
def _() -> object:
    return model.invoke("What is a page?").content


@call("stream")
def _() -> object:
    return "".join(chunk.content for chunk in model.stream("What is a page?"))


@call("batch")
def _() -> object:
    return len(model.batch(["What is a page?", "Why?"])) == 2


@call("with_structured_output")
def _() -> object:
    return isinstance(model.with_structured_output(Verdict).invoke("Is a page shared?"), Verdict)


@call("bind_tools")
def _() -> object:
    return model.bind_tools([double], tool_choice="double").invoke("Double 4.").tool_calls[0]["name"] == "double"


@call("embeddings of texts")
def _() -> object:
    embeddings = OpenAIEmbeddings(base_url=BASE, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    return embeddings.embed_documents(["a", "b"])
