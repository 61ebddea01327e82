"""Real coding agents against a real server: one turn each, of four answers. `make agents` installs them.

The model has random weights and a long context; a script holds its answers to calls of the agent's tools.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.scripts import AGENTS, BEFORE, COPY, EDITED, LAST, NOTE
from tests.integration.serving import serve
from tokenmill.demo import demo_model_path

PROGRAMS = Path(os.environ.get("AGENTS_BIN") or Path(sys.prefix, "agents", "node_modules", ".bin"))
SECONDS = 240
pytestmark = [
    pytest.mark.skipif(not (PROGRAMS / "codex").exists(), reason="`make agents` installs what this needs"),
    pytest.mark.timeout(3 * SECONDS),
]
# One layer, so that prompts of 40,000 tokens take seconds.
SMALL = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
SMALL |= {"intermediate_size": 64, "max_position_embeddings": 262144, "max_window_layers": 1}


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A folder with a project for each agent."""
    root = tmp_path_factory.mktemp("projects")
    for agent in AGENTS:
        (root / agent.name).mkdir()
        (root / agent.name / NOTE).write_text(BEFORE)
    return root


@pytest.fixture(scope="module")
def scripted(tmp_path_factory, projects):
    folder = tmp_path_factory.mktemp("models") / "scripted"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | SMALL
    (folder / "config.json").write_text(json.dumps(config))
    rows = [row for agent in AGENTS for row in agent.rows(projects / agent.name)]
    script = folder / "script.json"
    # Titles and the like are asked for without tools.
    script.write_text(json.dumps([*rows, {"text": "A title"}]))
    flags = ("--load-format", "dummy", "--max-model-len", "auto", "--max-num-seqs", "4", "--script", str(script))
    with serve(folder, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def demo():
    with serve(demo_model_path(), "--max-model-len", "auto", "--max-num-seqs", "4") as running:
        yield running


def launched(agent, server, project: Path, home: Path, seconds: float = SECONDS) -> tuple[int | None, str]:
    """Run an agent once in a project, as `tokenmill launch` starts it; return its exit code, None without an end in
    time, and its output. Nothing but this machine can be reached."""
    home.mkdir()
    nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    environment = {"PATH": f"{PROGRAMS}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb", **nowhere}
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    command = [sys.executable, "-m", "tokenmill", "launch", agent.name, "--url", server.url]
    command += ["--folder", str(home.with_name("folder")), "--", *agent.arguments, "Do what the script says."]
    log = home.with_name("output")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode, log.read_text()
    finally:
        # Agents leave helpers behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_file_is_read_and_edited_and_a_command_is_run(agent, scripted, projects, tmp_path):
    project, home = projects / agent.name, tmp_path / "home"
    code, output = launched(agent, scripted, project, home)
    assert code == 0, output
    assert LAST in output
    assert (project / NOTE).read_text() == EDITED, output
    assert (project / COPY).read_text() == EDITED, output
    assert list(home.iterdir()) == [], "it keeps to its folder"
    scripted.wait_until_unused()
    assert "Traceback" not in scripted.output()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_context_that_is_too_short_is_told(agent, demo, tmp_path):
    """Prompts of agents take five to twenty times the demo model's context. opencode shortens and asks for ever."""
    project = tmp_path / "project"
    project.mkdir()
    code, output = launched(agent, demo, project, tmp_path / "home", 45 if agent.name == "opencode" else SECONDS)
    # The server's sentence, or Codex's own for the same code.
    assert "maximum context length is 2048 tokens" in output or "model's context window" in output.replace("\\", "")
    assert code != 0
    demo.wait_until_unused()
    assert "Traceback" not in demo.output()
