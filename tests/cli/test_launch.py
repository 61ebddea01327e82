"""`tokenmill launch`: what a client is told, and where it may write. `make agents` runs the clients themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.cli.coding_agents import AGENTS, Target
from tokenmill.cli.launch import split
from tokenmill.cli.main import main
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path

KEY = "the-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})
    with start_server(EngineConfig(model=str(folder)), api_key=(KEY,), served_model_name=("mill", "other")) as running:
        yield running


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A program that notes how it was started and ends with code 3."""
    program = tmp_path / "client"
    note = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('started.json', 'w')); sys.exit(3)"
    program.write_text(f"#!{sys.executable}\n{note}\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return program


def started(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    arguments, environment = json.loads((tmp_path / "started.json").read_text())
    return arguments, environment


def launch(server, client, name, *more: str) -> int:
    return main(["launch", name, "--url", server.url, "--api-key", KEY, "--program", str(client), *more])


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_is_told_the_server_and_keeps_to_its_folder(server, client, tmp_path, name):
    assert launch(server, client, name, "--", "-p", "hello") == 3, "the client's own exit code"
    arguments, environment = started(tmp_path)
    assert arguments[-2:] == ["-p", "hello"]
    folder = tmp_path / "home/.cache/tokenmill/launch" / name
    files = {path.name: path.read_text() for path in folder.iterdir()}
    told = "\n".join([*arguments, *environment.values(), *files.values()])
    assert server.url in told and "mill" in told
    assert str(folder) in "\n".join([*arguments, *environment.values()])
    assert KEY not in "\n".join([*arguments, *files.values()]), "a key is in no file and on no command line"
    assert KEY in environment.values()
    assert {path.name for path in tmp_path.iterdir()} == {"client", "home", "started.json"}
    assert [path.relative_to(tmp_path / "home").parts[0] for path in (tmp_path / "home").iterdir()] == [".cache"]


def test_a_model_is_chosen_by_name(server, client, tmp_path, capsys):
    assert launch(server, client, "qwen", "--model", "other", "--folder", str(tmp_path / "own")) == 3
    assert started(tmp_path)[1]["OPENAI_MODEL"] == "other"
    assert (tmp_path / "own/settings.json").is_file()
    assert launch(server, client, "qwen", "--model", "third") == 2
    assert "the server has mill, other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["codex", "--program", "no-such-client"], 2, "npm install -g @openai/codex"),
        (["codex", "--url", "http://127.0.0.1:9", "--program", sys.executable], 1, "no server answers"),
        (["codex", "--url", "unix:/tmp/x", "--program", sys.executable], 2, "--url http://"),
    ],
)
def test_what_is_missing_is_told(arguments, code, sentence, capsys, client):
    assert main(["launch", *arguments]) == code
    assert sentence in capsys.readouterr().err


def test_an_unknown_client_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "emacs"])
    assert "claude" in capsys.readouterr().err


def test_a_server_is_started_for_the_client_and_stopped(client, tmp_path):
    arguments = [
        "launch",
        "claude",
        "--serve",
        str(demo_model_path()),
        "--program",
        str(client),
        "--folder",
        str(tmp_path / "own"),
    ]
    assert main(arguments) == 3
    environment = started(tmp_path)[1]
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "2048"
    assert "READY" in (log := (tmp_path / "own/server.log").read_text()) or "ready in" in log
    assert main(["launch", "claude", "--url", environment["ANTHROPIC_BASE_URL"], "--program", str(client)]) == 1
    assert main([*arguments[:3], str(tmp_path / "no-model"), *arguments[4:]]) == 1


def test_arguments_behind_two_dashes_are_the_clients():
    assert split(["codex", "--url", "x", "--", "exec", "--", "y"]) == (["codex", "--url", "x"], ["exec", "--", "y"])
    assert split(["codex"]) == (["codex"], [])


def test_odd_names_are_quoted():
    target = Target("http://h:1", 'a "b"\\c', 4096, "k", Path("/tmp/x y"))
    for agent in AGENTS.values():
        for text in agent.setting(target).files.values():
            json.loads(text)
    arguments = AGENTS["codex"].setting(target).arguments
    assert 'model="a \\"b\\"\\\\c"' in arguments
