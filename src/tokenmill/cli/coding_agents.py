"""Coding agents that `tokenmill launch` starts: what each is told, so that it talks to a server and keeps to a folder.

A function for each client returns its environment, the arguments before the user's own, and the files of its folder.
Switches against telemetry and update checks are set where a client has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

# In the environment of a client. Most clients want a key, also where the server has none.
KEY_VARIABLE = "TOKENMILL_API_KEY"


class Target(msgspec.Struct, frozen=True):
    """The server, its model with its context in tokens, and the folder of the client."""

    url: str
    model: str
    context: int
    key: str
    folder: Path

    @property
    def base(self) -> str:
        """The address below which OpenAI's routes are."""
        return f"{self.url}/v1"


class Setting(msgspec.Struct, frozen=True):
    """The environment and arguments of a client, and `files`: names in its folder, and their text."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = msgspec.field(default_factory=dict)


class CodingAgent(msgspec.Struct, frozen=True):
    """A client: its program, what installs it, and what it is told."""

    program: str
    install: str
    setting: Callable[[Target], Setting]


def claude(to: Target) -> Setting:
    """Claude Code, over /v1/messages."""
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    off = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
    environment = {
        "CLAUDE_CONFIG_DIR": str(to.folder),
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        "ANTHROPIC_API_KEY": "",
        "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(to.context),
        # A line that changes with each call, at the beginning of the prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Setting(environment | dict.fromkeys(models, to.model) | dict.fromkeys(off, "1"))


def codex(to: Target) -> Setting:
    """Codex, over /v1/responses."""
    provider = f"name = 'TokenMill', base_url = {_text(to.base)}, env_key = '{KEY_VARIABLE}', wire_api = 'responses'"
    options = {
        "model": _text(to.model),
        "model_provider": "'tokenmill'",
        "model_providers.tokenmill": f"{{{provider}}}",
        "model_catalog_json": _text(str(to.folder / "models.json")),
        "check_for_update_on_startup": "false",
        "analytics.enabled": "false",
        "feedback.enabled": "false",
    }
    arguments = tuple(word for name, value in options.items() for word in ("-c", f"{name}={value}"))
    catalog = json.dumps({"models": [_codex_model(to)]}, indent=1)
    return Setting({"CODEX_HOME": str(to.folder), KEY_VARIABLE: to.key}, arguments, {"models.json": catalog})


def _codex_model(to: Target) -> dict[str, object]:
    """Return what Codex wants to know of a model; without it, it guesses, and has no apply_patch."""
    return {
        "slug": to.model,
        "display_name": to.model,
        "context_window": to.context,
        "shell_type": "default",
        "apply_patch_tool_type": "freeform",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "input_modalities": ["text"],
        "base_instructions": "",
        "support_verbosity": False,
        "supports_parallel_tool_calls": True,
        "supports_reasoning_summaries": False,
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
    }


def opencode(to: Target) -> Setting:
    """Run opencode, over /v1/chat/completions."""
    limit = {"context": to.context, "output": min(8192, to.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "TokenMill",
        "options": {"baseURL": to.base, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {to.model: {"name": to.model, "limit": limit}},
    }
    model = f"tokenmill/{to.model}"
    config = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {"tokenmill": provider},
        "model": model,
        "small_model": model,
    }
    folders = {f"XDG_{kind}_HOME": str(to.folder / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    environment = {
        "OPENCODE_CONFIG": str(to.folder / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        # It installs a package for its plug-ins.
        "NPM_CONFIG_CACHE": str(to.folder / "npm"),
        KEY_VARIABLE: to.key,
    }
    return Setting(environment | folders, files={"opencode.json": json.dumps(config, indent=1)})


def qwen(to: Target) -> Setting:
    """Qwen Code, over /v1/chat/completions."""
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    environment = {
        "QWEN_HOME": str(to.folder),
        "OPENAI_BASE_URL": to.base,
        "OPENAI_API_KEY": to.key,
        "OPENAI_MODEL": to.model,
    }
    return Setting(environment, ("--auth-type", "openai"), {"settings.json": json.dumps(settings, indent=1)})


def aider(to: Target) -> Setting:
    """Run aider, over /v1/chat/completions; it also reads and writes files beside the code that it edits."""
    arguments = (
        "--model",
        f"openai/{to.model}",
        "--analytics-disable",
        "--no-check-update",
        "--no-show-model-warnings",
    )
    environment = {
        "HOME": str(to.folder),
        "OPENAI_API_BASE": to.base,
        "OPENAI_API_KEY": to.key,
        # The prices of hosted models would be read from the net.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Setting(environment, arguments)


def _text(value: str) -> str:
    """Return a string as TOML writes it; JSON's way is legal TOML, but for the escapes of rare characters."""
    return json.dumps(value, ensure_ascii=False)


AGENTS: Mapping[str, CodingAgent] = {
    "claude": CodingAgent("claude", "npm install -g @anthropic-ai/claude-code", claude),
    "codex": CodingAgent("codex", "npm install -g @openai/codex", codex),
    "opencode": CodingAgent("opencode", "npm install -g opencode-ai", opencode),
    "qwen": CodingAgent("qwen", "npm install -g @qwen-code/qwen-code", qwen),
    "aider": CodingAgent("aider", "pip install aider-chat", aider),
}
