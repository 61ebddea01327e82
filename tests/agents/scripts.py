"""The answers of a model that reads a file, edits it, runs a command and ends, for the tools of each coding agent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTE, EDITED, COPY = "note.txt", "bye mill\n", "copied.txt"
BEFORE = "hello mill\n"
LAST = "All done, says the script."
COMMAND = f"cp {NOTE} {COPY}"
PATCH = f"*** Begin Patch\n*** Update File: {NOTE}\n@@\n-hello mill\n+bye mill\n*** End Patch\n"


@dataclass(frozen=True)
class Agent:
    """A coding agent: a tool that it alone has, how it is asked once, and its calls, one a turn."""

    name: str
    tool: str
    arguments: tuple[str, ...]

    def calls(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        path = str(folder / NOTE)
        old, new = BEFORE.strip(), EDITED.strip()
        match self.name:
            case "codex":
                read, edit = ("exec_command", {"cmd": f"cat {NOTE}"}), ("apply_patch", {"input": PATCH})
                return [read, edit, ("exec_command", {"cmd": COMMAND})]
            case "claude":
                edit = ("Edit", {"file_path": path, "old_string": old, "new_string": new})
                return [("Read", {"file_path": path}), edit, ("Bash", {"command": COMMAND, "description": "copy"})]
            case "opencode":
                edit = ("edit", {"filePath": path, "oldString": old, "newString": new})
                return [("read", {"filePath": path}), edit, ("bash", {"command": COMMAND})]
            case _:
                edit = ("edit", {"file_path": path, "old_string": old, "new_string": new})
                run = ("run_shell_command", {"command": COMMAND, "is_background": False, "description": "copy"})
                return [("read_file", {"file_path": path}), edit, run]

    def rows(self, folder: Path) -> list[dict[str, Any]]:
        """Return the rows of a server's script for a project in this folder."""
        texts = [written(name, arguments) for name, arguments in self.calls(folder)]
        return [{"tool": self.tool, "results": number, "text": text} for number, text in enumerate([*texts, LAST])]


# Not every machine has what its sandbox for commands needs.
CODEX = ("exec", "--skip-git-repo-check", "--ephemeral", "--json", "-s", "danger-full-access")
CLAUDE = (
    "--output-format",
    "stream-json",
    "--verbose",
    "--permission-mode",
    "acceptEdits",
    "--allowedTools",
    "Bash Read Edit",
    "-p",
)
AGENTS = (
    Agent("codex", "apply_patch", CODEX),
    Agent("claude", "Agent", CLAUDE),
    Agent("opencode", "webfetch", ("run", "--auto", "--format", "json")),
    Agent("qwen", "read_file", ("-y", "--output-format", "json", "-p")),
)


def written(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the notation of the demo model."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
