"""Check what the documents say: links lead somewhere, flags and routes exist, marked commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.house.documents import commands, documents, snippets
from tests.house.source_tree import ROOT
from tests.integration.serving import serve
from tests.tiers import some
from tokenmill.cli.main import VERBS
from tokenmill.cli.serve import make_parser
from tokenmill.demo import demo_model_path

SERVING = (ROOT / "docs" / "serving.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SMALL = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "32MiB")


@pytest.fixture(scope="module")
def server():
    """A server with the demo model."""
    with serve(demo_model_path(), "--max-model-len", "512", "--served-model-name", "tokenmill-demo", *SMALL) as running:
        yield running


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    # The `tokenmill` of the interpreter that runs this test.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def run_snippet(snippet, folder: Path, url: str = "") -> str:
    text = snippet.text.replace("http://127.0.0.1:8000", url or "http://127.0.0.1:1")
    program = [sys.executable, "-c"] if snippet.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    (folder / "examples").symlink_to(ROOT / "examples")
    return run([*program, text], folder, TOKENMILL_URL=url)


def test_each_kind_of_snippet_is_there():
    """README's have kinds of their own, see test_readme.py."""
    kinds = {snippet.kind for snippet in snippets() if snippet.document != "README.md"}
    assert kinds == {"", "plain", "offline", "server"}


@pytest.mark.parametrize("snippet", some([*snippets("plain"), *snippets("offline")], 2), ids=str)
def test_a_command_of_the_documents_runs(snippet, tmp_path):
    assert run_snippet(snippet, tmp_path).strip() or (tmp_path / "answers.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("snippet", some(snippets("server"), 3), ids=str)
def test_a_command_of_the_documents_runs_against_a_server(snippet, tmp_path, server):
    assert run_snippet(snippet, tmp_path, server.url).strip()


@pytest.mark.parametrize("name", some(EXAMPLES, 1))
def test_an_example_runs(name, tmp_path, server):
    arguments = [server.url] if name == "many_clients.py" else []
    output = run(
        [sys.executable, str(ROOT / "examples" / name), *arguments], tmp_path, OPENAI_BASE_URL=server.url + "/v1"
    )
    expected = {
        "offline.py": "answer 1:",
        "async_llm.py": "request-3: 'The mill' ->",
        "openai_client.py": "the same twice: True\nrefused: temperature",
        "many_clients.py": "16 answers",
        "prefill_first.py": "2 answers; the second:",
        "round_robin.py": "the long prompt came first; in this order they ended: [1, 0]",
        "shortest_first.py": "the long prompt came first and ended last: [1, 2, 3, 0]",
    }
    assert expected[name] in output


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        place, _, anchor = target.partition("#")
        file = path if not place else path.parent / place
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], target


def test_commands_of_the_documents_name_verbs_and_flags_that_exist():
    import importlib

    seen = 0
    for snippet, words in commands("tokenmill"):
        if words[0].startswith("-"):
            continue
        assert words[0] in VERBS, f"{snippet}: {words}"
        verb = importlib.import_module(f"tokenmill.cli.{words[0]}")
        shared = ("core/sampling_params", "cli/model_access", "cli/simulation_flags", "config/engine_settings")
        shared += ("config/server_settings",)
        homes = [Path(verb.__file__), *(ROOT / "src/tokenmill" / f"{name}.py" for name in shared)]
        homes += (ROOT / "src/tokenmill/lab/bench").glob("*.py") if words[0] == "bench" else []
        source = "".join(path.read_text() for path in homes)
        # Behind `--` stand the arguments of another program.
        for word in words[1 : words.index("--") if "--" in words else None]:
            if word.startswith("--") and word != "--help":
                name = word[2:].split("=")[0]
                assert name in source or name.replace("-", "_") in source, f"{snippet}: {word}"
                seen += 1
    assert seen > 10


def test_make_commands_of_the_documents_name_targets_that_exist():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = {words[0] for _, words in commands("make")}
    assert {"serve", "chat"} <= used <= set(targets)


def test_every_flag_of_serve_is_documented_and_no_other():
    flags = {flag for flag in make_parser()._option_string_actions if flag.startswith("--")}
    flags -= {flag for flag in flags if flag.startswith("--no-") and "--" + flag[5:] in flags}
    named = set(re.findall(r"`(--[a-z][a-z-]*)", SERVING)) - {"--no-"}
    assert named == flags - {"--help"}


def test_every_route_is_documented():
    from tokenmill.serving.server import app as server_app
    from tokenmill.serving.server.http.application import Application

    class Anything:
        def __getattr__(self, name):
            return lambda *_: None

    app = Application("", "")
    server_app._add_routes(app, Anything())
    for route in app.routes:
        assert re.sub(r"\{.*?\}", "{id}", route.path) in SERVING, route.path


def test_every_field_is_documented():
    from tokenmill.serving.server.openai.chat import ChatBody
    from tokenmill.serving.server.openai.completions import TextBody
    from tokenmill.serving.server.openai.fields import UNSUPPORTED

    plain = {"model", "messages", "prompt", "user", "metadata", "service_tier", "safety_identifier"}
    plain |= {"prompt_cache_key", "prompt_cache_retention", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
    for body in (ChatBody, TextBody):
        for field in msgspec.structs.fields(body):
            if field.name not in plain and field.name not in UNSUPPORTED:
                assert f"`{field.name}`" in SERVING, field.name


def test_the_architecture_lists_every_package():
    source = ROOT / "src" / "tokenmill"
    inner = [*source.glob("*/__init__.py"), *source.glob("*/*/__init__.py")]
    packages = {f"{path.parent.relative_to(source)}/" for path in inner}
    listed, folder = set(), ""
    for indent, name in re.findall(r"^(  |    )(\w+/) ", ARCHITECTURE, re.MULTILINE):
        folder = name if indent == "  " else folder
        listed.add(name if indent == "  " else folder + name)
    assert packages <= listed
    for name in listed:
        assert (source / name).exists(), name


def test_the_license_is_the_one_that_the_project_declares():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
