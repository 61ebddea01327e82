"""aider: one message over a file of its own."""

from commands import output
from report import BASE, MODEL, call, scratch

folder = scratch()
HOW = ("--openai-api-base", BASE, "--openai-api-key", "none", "--model", f"openai/{MODEL}", "--no-git", "--yes-always")
HOW += ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-detect-urls", "--map-tokens", "0")


def ask(*how: str) -> object:
    """What aider printed, if the server answered it."""
    said = output("aider", *HOW, *how, "--message", "Say hello.", HOME=str(folder), AIDER_CHAT_HISTORY_FILE="/dev/null")
    for sign in ("Error", "exceeds", "BadRequest"):
        if sign in said:
            raise RuntimeError(" ".join(said[said.index(sign) :].split()))
    return "Tokens:" in said


@call("ask")
def _() -> object:
    return ask("--edit-format", "ask")


@call("whole files")
def _() -> object:
    return ask("--edit-format", "whole")
