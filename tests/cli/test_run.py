"""`tokenmill run`, `ps`, `stop` and `show`: one server for all who name its model, which leaves when nobody asks."""

import json
import os
import pty
import shutil
import subprocess
import sys
from functools import partial

import pytest

from tests.embedders import make_classifier
from tests.encoder_checkpoints import make_encoder
from tests.eventually import eventually, patience
from tests.whisper_checkpoints import make_whisper_checkpoint
from tokenmill.cli.main import main

GREEDY = ("--temperature", "0", "--max-tokens", "5")


@pytest.fixture
def call(tmp_path):
    """Calls a verb with a runtime folder of its own; whatever it has started ends with the test."""

    def verb(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(120),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "run")},
        )
        assert done.returncode == code, done.stderr
        return done

    yield verb
    verb("stop", "--all")


def servers(call):
    return json.loads(call("ps", "--json").stdout)


def test_a_server_is_started_once_and_answers_all_who_name_its_model(call, tiny_model):
    first = call("run", str(tiny_model), "Hello", *GREEDY)
    assert "starting a server" in first.stderr
    (server,) = servers(call)
    assert (server["models"], server["source"], server["ready"]) == ([tiny_model.name], str(tiny_model), True)
    assert server["memory"] > 10 << 20
    again = call("run", tiny_model.name, "Hello", *GREEDY, "--", "--max-num-seqs", "4")
    assert again.stdout == first.stdout
    assert "these flags change nothing: --max-num-seqs 4" in again.stderr
    assert [one["pid"] for one in servers(call)] == [server["pid"]]
    table = call("ps").stdout.splitlines()
    assert table[0].split() == ["MODEL", "STATE", "ADDRESS", "PID", "MEMORY", "SINCE"]
    assert str(server["pid"]) in table[1]
    assert "stopped" in call("stop", str(tiny_model)).stdout
    assert servers(call) == []


def test_a_server_that_lists_the_model_is_used_whatever_its_file_says(call, tiny_model, tmp_path):
    """As one of many models does, which knows their names better than the file of its start."""
    call("run", str(tiny_model), "Hello", *GREEDY)
    (server,) = servers(call)
    path = tmp_path / "run" / "tokenmill" / f"{server['pid']}.json"
    entry = json.loads(path.read_text()) | {"models": ["many"], "source": str(tiny_model.parent)}
    path.write_text(json.dumps(entry))
    for name in (tiny_model.name, str(tiny_model)):
        assert "starting" not in call("run", name, "Hello", *GREEDY).stderr
    elsewhere = tmp_path / tiny_model.name
    shutil.copytree(tiny_model, elsewhere)
    assert "starting" in call("run", str(elsewhere), "Hello", *GREEDY).stderr


def test_a_url_is_used_if_it_serves_the_model(call, tiny_model):
    call("run", str(tiny_model), "Hello", *GREEDY)
    (server,) = servers(call)
    call("run", tiny_model.name, "Hello", "--url", server["url"], *GREEDY)
    said = call("run", "other", "Hello", "--url", server["url"], *GREEDY, code=2).stderr
    assert "does not serve other" in said


def test_a_server_that_is_asked_nothing_leaves(call, tiny_model):
    call("run", str(tiny_model), "Hello", "--ttl", "5", *GREEDY)
    eventually(lambda: servers(call) == [])


def test_a_start_that_fails_says_why(call, tiny_model):
    said = call("run", str(tiny_model), "Hello", "--", "--num-threads", "100000", code=1).stderr
    assert said.splitlines()[-1].startswith("tokenmill: --num-threads 100000 is too many")


@pytest.mark.parametrize("verb", ["run", "show", "serve", "complete --local"])
def test_a_model_that_is_nowhere_is_named_before_anything_large_is_imported(call, tmp_path, verb):
    more = ["text"] if "complete" in verb else []
    said = call(*verb.split(), str(tmp_path / "none"), *more, code=2).stderr
    assert said.startswith(f"tokenmill: {tmp_path}/none: there is nothing at this path")


def test_stop_wants_a_server_that_runs(call):
    assert "no server of x runs here; running: none" in call("stop", "x", code=2).stderr
    assert "--all" in call("stop", code=2).stderr
    assert call("ps").stdout.startswith("no server of yours runs")


def test_a_model_is_shown_without_being_loaded(call, tiny_model):
    shown = dict(line.split(maxsplit=1) for line in call("show", str(tiny_model)).stdout.splitlines() if line[0] != " ")
    assert shown["family"] == "Qwen3ForCausalLM"
    assert shown["context"] == "512 tokens"
    assert {"parameters", "vocabulary", "stored", "formats", "sampling"} <= set(shown)
    demo = call("show").stdout
    assert "hermes (the template writes calls" in demo
    assert "qwen3 (the template writes <think>)" in demo


@pytest.mark.parametrize(
    ("make", "work"),
    [
        (make_whisper_checkpoint, "speech in, text out: /v1/audio/transcriptions"),
        (partial(make_encoder, family="bert"), "vectors of texts: /v1/embeddings"),
        (partial(make_classifier, num_labels=2), "scores of texts: /v1/rerank"),
    ],
    ids=["whisper", "bert", "classifier"],
)
def test_what_a_model_is_for_is_shown(capsys, tmp_path, make, work):
    make(tmp_path / "model")
    assert main(["show", str(tmp_path / "model")]) == 0
    assert f"for          {work}" in capsys.readouterr().out


def test_top_ends_on_q(call, tiny_model):
    call("run", str(tiny_model), "Hello", *GREEDY)
    (server,) = servers(call)
    own, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "tokenmill", "top", "--url", server["url"], "--interval", "600"]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as top:
            assert os.read(own, 1)
            os.write(own, b"q")
            assert top.wait(patience()) == 0
    finally:
        os.close(own)
        os.close(theirs)
