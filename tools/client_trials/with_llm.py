"""llm, the command: our server as a model of `extra-openai-models.yaml`."""

import json

from commands import output
from report import BASE, MODEL, call, scratch

home = scratch()
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: mill\n  model_name: {MODEL}\n  api_base: {BASE}\n  supports_schema: true\n  supports_tools: true\n"
)
HOW = {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}


@call("a prompt, streamed")
def _() -> object:
    return output("llm", "-m", "mill", "-o", "max_tokens", "24", "What is a page?", **HOW).strip()


@call("a prompt, at once")
def _() -> object:
    return output("llm", "-m", "mill", "--no-stream", "-o", "max_tokens", "24", "What is a page?", **HOW).strip()


@call("a schema")
def _() -> object:
    return json.loads(output("llm", "-m", "mill", "--schema", "shared bool", "Is a page shared?", **HOW))
