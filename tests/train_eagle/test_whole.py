"""The whole script on a tiny random model: every stage runs, and a second run finds all of them done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from examples.train_eagle.__main__ import main
from examples.train_eagle.dialogues import Frame, read
from examples.train_eagle.export import read_checkpoint
from examples.train_eagle.features import Features
from examples.train_eagle.speed import main as measure_speed
from examples.train_eagle.teacher import Teacher
from safetensors.torch import load_file

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tokenmill import LLM

LAYERS, HIDDEN = 6, 32
OPTIONS = (
    *("--tokens", "60", "--streams", "8", "--answer-tokens", "12", "--dialogue-tokens", "200", "--epochs", "2"),
    *("--draft-vocab-size", "40", "--intermediate-size", "16", "--depths", "3", "--drafts", "2", "--threads", "1"),
    *("--save-every", "2", "--batch-tokens", "300", "--held-out", "3"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    result = main(["--model", str(model), "--out", str(folder), *OPTIONS])
    assert result["at_temperature_0.0"]["tokens"] > 0
    return folder


def log_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_last_line_of_the_log_is_the_result(run: Path) -> None:
    last = log_of(run)[-1]
    assert set(last) == {"drafts", "bytes", "at_temperature_0.0", "at_temperature_0.7"}
    greedy = last["at_temperature_0.0"]
    assert isinstance(greedy, dict)
    assert len(greedy["acceptance"]) == 2
    assert 1 <= greedy["tokens_a_step"] <= 3


def test_a_run_that_has_ended_runs_nothing_again(run: Path, model: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "log.jsonl"}
    head, steps = (run / "head" / "model.safetensors").read_bytes(), len(log_of(run))
    result = main(["--model", str(model), "--out", str(run), *OPTIONS])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "log.jsonl"} == before
    assert (run / "head" / "model.safetensors").read_bytes() == head
    assert not any("loss" in entry for entry in log_of(run)[steps:])
    assert result == log_of(run)[-1]


def test_the_head_has_the_tensors_of_vllm_s_form(run: Path) -> None:
    tensors = load_file(run / "head" / "model.safetensors")
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == {*(f"midlayer.{name}" for name in layer), *rest}
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 2 * HIDDEN)
    assert tensors["lm_head.weight"].shape == (40, HIDDEN)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (tensors["d2t"] + torch.arange(40)).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert len(tensors["t2d"]) == VOCAB_SIZE
    read_checkpoint(run / "head")


def test_features_are_those_of_the_model_and_lie_beside_their_tokens(run: Path, model: Path) -> None:
    teacher = Teacher(str(model))
    assert teacher.boundaries == (2, 3, 3)
    dialogues = [dialogue for dialogue in read(run / "text" / "00000.jsonl") if dialogue.answers]
    features = Features([run / "text" / "00000.safetensors"])
    assert features.lengths == [len(dialogue.ids) for dialogue in dialogues]
    for dialogue, row in zip(dialogues, features.rows(), strict=True):
        (hidden,) = teacher.hidden([dialogue.ids])
        assert row.ids.tolist() == dialogue.ids
        assert int(row.is_answer.sum()) == dialogue.num_answer_tokens
        torch.testing.assert_close(row.taps, hidden.taps.bfloat16().float(), rtol=2e-2, atol=2e-2)
        start = dialogue.answers[0][0]
        assert row.best[start - 1] == teacher.best(hidden.final)[start - 1]


def test_every_dialogue_opens_and_answers_as_the_template_says(run: Path, model: Path) -> None:
    dialogues = read(run / "text" / "00000.jsonl")
    assert dialogues
    with LLM(str(model), max_num_seqs=1, max_model_len=64) as llm:
        frame = Frame.of(llm.get_tokenizer())
    for dialogue in dialogues:
        assert dialogue.ids[: len(frame.opening)] == frame.opening
        for start, _ in dialogue.answers:
            assert dialogue.ids[start - len(frame.answer) : start] == frame.answer


def test_the_speed_is_told_beside_that_without_drafts(run: Path, model: Path) -> None:
    limits = ("--held-out", "2", "--max-tokens", "8", "--turns", "1", "--temperatures", "0.7", "--lengths", "2")
    found = measure_speed(["--model", str(model), "--head", str(run / "head"), "--draft", str(model), *limits])
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["without drafts", "suffix", "head, 2", "draft model, 2"]
    assert (rows["without drafts"]["times_plain"], rows["without drafts"]["acceptance"]) == (1, None)
    assert all(row["tokens_s"] > 0 and 1 <= row["tokens_a_step"] <= 3 for row in rows.values())
