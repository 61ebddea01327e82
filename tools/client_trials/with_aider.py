"""aider: one message over a file of its own."""

from commands import output
from report import BASE, MODEL, call, scratch

folder = scratch()
HOW = ("--openai-api-base", BASE, "--openai-api-key", "none", "--model", f"openai/{MODEL}", "--no-git", "--yes-always")
HOW += ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-detect-urls", "--map-tokens", "0")
# Else they are kept at the top of the repository that this lies in.
HOW += ("--input-history-file", str(folder / "input"), "--chat-history-file", str(folder / "chat"))


def ask(*how: str) -> object:
    """Return True if aider counts the tokens of an answer, else the end of what it printed."""
    environment = {"HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = output("aider", *HOW, *how, "--message", "Say hello.", **environment)
    if "Tokens:" not in said:
        raise RuntimeError(" ".join(said.split())[-280:])
    return True


@call("ask")
def _() -> object:
    return ask("--edit-format", "ask")


@call("whole files")
def _() -> object:
    return ask("--edit-format", "whole")
