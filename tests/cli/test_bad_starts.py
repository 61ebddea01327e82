"""Starts that ended in a crash, a traceback or never: each is one sentence and exit code 2."""

import os
import resource
import shutil
import subprocess
import sys

import pytest

from tests.eventually import patience
from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.topology import Topology
from tokenmill.serving.server.process.start_checks import check_start


def serve(*arguments: str, descriptors: int = 0, **environment: str) -> tuple[int, str]:
    """`tokenmill serve ARGUMENTS`; returns the exit code and what it wrote."""

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(120),
        env=os.environ | environment,
        preexec_fn=limit,
    )
    return done.returncode, done.stdout + done.stderr


def sentence(code: int, output: str) -> str:
    assert code == 2, output
    assert "Traceback" not in output
    assert "loading weights" not in output
    lines = [line for line in output.splitlines() if line.startswith("tokenmill: ")]
    assert len(lines) == 1, output
    return lines[0]


def test_too_many_threads(tiny_model):
    assert "--num-threads 100000 is too many" in sentence(*serve(str(tiny_model), "--num-threads", "100000"))


@pytest.mark.parametrize("flags", [("--num-pages", "1000000000000"), ("--kv-cache-memory-bytes", "1000000GiB")])
def test_kv_beyond_memory(tiny_model, flags):
    said = sentence(*serve(str(tiny_model), *flags))
    assert "of memory and" in said
    assert f"what fits: {flags[0]} " in said


def test_a_pipe_as_weights(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert f"cannot read {folder}/model.safetensors: it is not a regular file" in sentence(*serve(str(folder)))


def test_a_chat_template_that_does_not_compile(tiny_model, tmp_path):
    (tmp_path / "t").write_text("{% if %}")
    code, output = serve(str(tiny_model), "--chat-template", str(tmp_path / "t"))
    assert f"--chat-template {tmp_path}/t: the chat template does not compile: " in sentence(code, output)
    assert "loading the engine" not in output, "nothing has been started"


def test_a_chat_template_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("none", "No such file or directory"), ("pipe", "it is not a regular file")):
        config = ServerConfig(chat_template=str(tmp_path / name))
        with pytest.raises(InvalidConfig, match=f"--chat-template: cannot read {tmp_path}/{name}: {reason}"):
            check_start(config, Topology())


@pytest.mark.parametrize("name", ["none", "file", "broken"])
def test_a_folder_of_adapters_that_is_none(tiny_model, tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    flags = ["--enable-lora", "--allow-runtime-lora", "--lora-dir", str(tmp_path / name)]
    code, output = serve(str(tiny_model), *flags)
    assert f"--lora-dir {tmp_path}/{name}: there is no such folder" in sentence(code, output)
    assert "loading the engine" not in output, "nothing has been started"


def test_a_folder_for_sockets_whose_name_is_too_long(tiny_model, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    said = sentence(*serve(str(tiny_model), TMPDIR=str(folder)))
    assert "a socket's path at most 107: set TMPDIR" in said
    assert list(folder.iterdir()) == []


def test_too_few_descriptors(tiny_model):
    said = sentence(*serve(str(tiny_model), "--tokenizer-workers", "4", descriptors=80))
    assert "may open 80 files and needs 96 at least" in said
