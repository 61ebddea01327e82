"""Conversations as files over HTTP: llama.cpp's actions on slots, and `tokenmill session`, between two servers."""

import dataclasses
import os
import random
import shutil
import signal

import pytest

from tests.seeding import seed_for
from tests.serving.server.running_server import start_server
from tokenmill.cli import session
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE

SEED = seed_for(__name__)
PROMPT_TOKENS = 400


@pytest.mark.timeout(300)
def test_a_conversation_goes_on_in_another_server(tiny_checkpoint, tmp_path, capsys):
    rng = random.Random(SEED)
    prompt = [rng.randrange(300) for _ in range(PROMPT_TOKENS)]
    first = EngineConfig(
        model=str(tiny_checkpoint), dtype="bfloat16", num_pages=64, max_num_seqs=2, slot_save_path=str(tmp_path / "one")
    )
    with start_server(first, ENGINE_MODULE, served_model_name=("tiny",)) as server:
        empty = server.post("/slots/0?action=save", {"filename": "talk.bin"})
        assert (empty.status_code, empty.json()["error"]["message"]) == (
            400,
            "slot 0 is empty: it takes the next conversation",
        )
        turn = server.post("/v1/completions", body(prompt)).json()
        longer = [*prompt, *turn["choices"][0]["token_ids"], *(rng.randrange(300) for _ in range(5))]
        assert session.run(["save", "talk.bin", "--url", server.url]) == 0
        assert "the KV of 416 tokens is in talk.bin" in capsys.readouterr().out
        undisturbed = server.post("/v1/completions", body(longer)).json()
        saved = server.post("/slots/0?action=save", {"filename": "more.bin"}).json()
        assert {"id_slot", "filename", "n_saved", "n_written", "timings"} == set(saved)
        assert saved["n_written"] == (tmp_path / "one" / "more.bin").stat().st_size
        for name in ("../talk.bin", "/etc/passwd", ".hidden", ""):
            assert server.post("/slots/0?action=restore", {"filename": name}).status_code == 400
        for pid in (server.process.pid, *server.children().values()):
            os.kill(pid, signal.SIGKILL)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = dataclasses.replace(first, slot_save_path=str(tmp_path / "two"))
    with start_server(second, ENGINE_MODULE, served_model_name=("tiny",)) as server:
        restored = server.post("/slots/1?action=restore", {"filename": "talk.bin"}).json()
        assert restored["n_restored"] == 416
        assert set(restored) == {"id_slot", "filename", "n_restored", "n_read", "timings"}
        again = server.post("/v1/completions", body(longer)).json()
        assert again["usage"]["prompt_tokens_details"]["external_cached_tokens"] == 416
        assert again["choices"] == undisturbed["choices"], f"seed {SEED}"
        erased = server.post("/slots/1?action=erase").json()
        assert erased == {"id_slot": 1, "n_erased": len(longer) + 20}
        assert server.post("/slots/1?action=save", {"filename": "x"}).status_code == 400
        assert server.post("/slots/7?action=erase").status_code == 400
        assert server.post("/slots/1?action=restore").status_code == 400
        assert server.post("/slots/one?action=erase").status_code == 404


def body(prompt):
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 2, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
