"""`tokenmill serve` as people use it: a process with flags, its screen, its end."""

import io
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.eventually import patience
from tests.integration.serving import serve
from tests.serving.server.running_server import free_port
from tokenmill.cli.main import main

SMALL = ("--num-pages", "96", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def server(tiny_model):
    with serve(tiny_model, *SMALL, "--api-key", "the-key") as running:
        yield running


def tokenmill(*arguments: str, **how) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(), **how)


def test_the_start_names_model_capacity_and_address(server):
    server.wait_for(lambda: "ready in" in server.output())
    text = server.output()
    assert "1,536 tokens in 96 pages" in text
    assert "room for 6 requests of the full 256 tokens" in text
    assert f"{server.url}/v1" in text
    assert "the-key" not in text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_command_on_the_screen_streams_an_answer(server):
    server.wait_for(lambda: "\ncurl " in server.output())
    command = next(line for line in server.output().splitlines() if line.startswith("curl "))
    command = command.replace('"stream": true', '"stream": true, "max_tokens": 3')
    environment = {"TOKENMILL_API_KEY": "the-key", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip().endswith("data: [DONE]")


def test_complete_and_chat_reach_it_with_the_key(server):
    flags = ["--url", server.url, "--api-key", "the-key", "--max-tokens", "4", "--temperature", "0"]
    first = tokenmill("complete", "the mill", *flags)
    assert (first.returncode, first.stderr) == (0, "")
    assert tokenmill("complete", "-", *flags, input="the mill").stdout == first.stdout
    chat = tokenmill("chat", *flags, input="one\n/reset\none\n")
    assert chat.returncode == 0
    answers = chat.stdout.rstrip("\n")
    half = len(answers) // 2
    assert answers[:half] == answers[half + 1 :], "the same question after a reset has the same answer"


def test_a_wrong_key_is_one_sentence(server):
    done = tokenmill("complete", "x", "--url", server.url, "--api-key", "wrong")
    assert done.returncode == 1
    assert done.stderr.startswith("tokenmill: the server refuses (401)")
    assert done.stderr.count("\n") == 1


def test_chat_without_a_server_uses_a_model_of_its_own(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/reset\nhi\n/exit\nno more\n"))
    assert main(["chat", "--local", str(tiny_model), "--max-tokens", "3", "--temperature", "0"]) == 0
    answers = capsys.readouterr().out.rstrip("\n")
    half = len(answers) // 2
    assert half > 0
    assert answers[:half] == answers[half + 1 :]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/no/such/folder"], "/no/such/folder: there is nothing at this path"),
        (["{model}", "--num-pages", "1", "--max-model-len", "512"], "--num-pages to"),
        (["{model}", "--port", "{taken}"], "{taken}"),
    ],
)
def test_what_cannot_be_served_ends_with_one_sentence_and_code_2(arguments, part, tiny_model):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        names = {"model": str(tiny_model), "taken": str(holder.getsockname()[1])}
        arguments = [argument.format(**names) for argument in arguments]
        port = [] if "--port" in arguments else ["--port", str(free_port())]
        done = tokenmill("serve", *arguments, *port)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("tokenmill: ")]
    assert len(sentences) == 1
    assert part.format(**names) in sentences[0]


def test_ctrl_c_while_starting_ends_it(tiny_model):
    command = [sys.executable, "-m", "tokenmill", "serve", str(tiny_model), "--port", str(free_port())]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "loading the engine ...\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patience()) in (0, 130)
    assert "Traceback" not in process.stderr.read()
