"""llama-index, with OpenAILike."""

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import BASE, MODEL, call

HOW = {"model": MODEL, "api_base": BASE, "api_key": "none", "max_tokens": 64}
llm = OpenAILike(**HOW, is_chat_model=True, is_function_calling_model=True)


class Verdict(BaseModel):
    """The verdict on whether a page is shared."""

    shared: bool


@call("chat")
def _() -> object:
    return llm.chat([ChatMessage(role="user", content="What is a page?")]).message.content


@call("stream_chat")
def _() -> object:
    return [part.delta for part in llm.stream_chat([ChatMessage(role="user", content="What is a page?")])]


@call("complete")
def _() -> object:
    return OpenAILike(**HOW, is_chat_model=False).complete("TokenMill is").text


@call("structured_predict")
def _() -> object:
    return isinstance(llm.structured_predict(Verdict, PromptTemplate("Is a page shared?")), Verdict)
