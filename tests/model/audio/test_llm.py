"""`LLM.chat` with sound on a random Qwen2-Audio: transformers' tokens, however prompts are cut, shared or preempted."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers

from tests.audio_checkpoints import RATE, Samples, answer_of, features_of, noise
from tests.model.vision.test_llm import encoder_of, tokens
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.lab.simulate.replay import replay
from tokenmill.model.audio.pieces import wav_file

NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, dtype="float32", num_pages=200) as llm:
        yield llm


def chat(*parts: str | Samples) -> list[dict[str, object]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "audio", "audio": (part, RATE)}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_answers_are_those_of_transformers(
    llm: LLM, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    first, second = noise(rng, 0.9), noise(rng, 2.0)
    chats = [chat(first, "hello"), chat("two: ", first, " and ", second, "?"), chat("no sound")]
    heard = [[first], [first, second], []]
    for output, clips in zip(llm.chat(chats, GREEDY), heard, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, clips, NUM_TOKENS)


@torch.no_grad()
def test_logprobs_are_those_of_transformers(
    llm: LLM, oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    clip = noise(rng, 1.3)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    (output,) = llm.chat(chat(clip, "what is it"), params)
    ids = torch.tensor([output.prompt_token_ids + tokens(output)])
    logits = oracle(ids, attention_mask=torch.ones_like(ids), **features_of([clip])).logits[0, -NUM_TOKENS - 1 : -1]
    expected = logits.log_softmax(-1)
    for step, token_id in enumerate(tokens(output)):
        found = output.outputs[0].logprobs[step][token_id].logprob
        assert found == pytest.approx(float(expected[step, token_id]), abs=1e-4)


def test_the_same_clip_again_is_not_encoded_and_another_of_its_length_is_no_hit(
    llm: LLM, rng: np.random.Generator
) -> None:
    clip, other = noise(rng, 1.0), noise(rng, 1.0)
    encoder = encoder_of(llm)
    (before,) = llm.chat(chat(clip, "a question"), GREEDY)
    encoded = encoder.num_encoded
    (again,) = llm.chat(chat(clip, "a question"), GREEDY)
    assert encoder.num_encoded == encoded
    assert again.num_cached_tokens > 25
    assert tokens(again) == tokens(before)
    (different,) = llm.chat(chat(other, "a question"), GREEDY)
    assert encoder.num_encoded == encoded + 25
    assert different.num_cached_tokens < 48


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 4, "encoder_budget": 25},
        {"max_num_batched_tokens": 32, "max_num_seqs": 4, "disable_chunked_mm_input": True, "page_size": 4},
        # Too few pages for all at once, and room for the outputs of one clip: preempted, evicted, encoded again.
        {
            "num_pages": 28,
            "page_size": 4,
            "max_model_len": 108,
            "admission": "optimistic",
            "encoder_cache_tokens": 26,
            "encoder_budget": 26,
        },
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"attention_backend": "reference"},
    ],
)
def test_answers_do_not_depend_on_how_prompts_are_cut_or_kept(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, options: dict[str, object]
) -> None:
    clips = [noise(rng, 1.0), noise(rng, 0.5), noise(rng, 0.77)]
    heard = [[one] for one in clips] + [[clips[1], clips[0]]]
    with LLM(checkpoint, **{"dtype": "float32", "num_pages": 100} | options) as llm:
        outputs = llm.chat([chat(*those, "hello") for those in heard], GREEDY)
    for output, those in zip(outputs, heard, strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, those, NUM_TOKENS)


def test_bfloat16_runs_on_the_native_kernels_with_the_bits_of_any_cut(
    checkpoint: Path, rng: np.random.Generator
) -> None:
    clip = noise(rng, 1.0)
    answers = []
    for options in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}):
        with LLM(checkpoint, dtype="bfloat16", num_pages=100, **options) as llm:
            (output,) = llm.chat(chat(clip, "hello"), SamplingParams(max_tokens=4, temperature=0, logprobs=2))
            answers.append((tokens(output), output.outputs[0].logprobs))
    assert answers[0] == answers[1]


def test_a_clip_comes_in_every_form(llm: LLM, rng: np.random.Generator, tmp_path: Path) -> None:
    clip = noise(rng, 0.6)
    (expected,) = llm.chat(chat(clip, "hello"), GREEDY)
    soundfile.write(tmp_path / "clip.wav", clip, RATE, subtype="FLOAT")
    data = base64.b64encode(wav_file(clip)).decode()
    forms = [
        {"type": "audio", "audio": str(tmp_path / "clip.wav")},
        {"type": "audio", "audio": tmp_path / "clip.wav"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio", "audio_url": f"data:audio/wav;base64,{data}"},
    ]
    for form in forms:
        (found,) = llm.chat([{"role": "user", "content": [form, {"type": "text", "text": "hello"}]}], GREEDY)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert tokens(found) == tokens(expected)


def test_typed_placeholders_are_plain_text(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    (output,) = llm.chat(chat("<|audio_bos|><|AUDIO|> hello"), GREEDY)
    assert oracle.config.audio_token_id not in output.prompt_token_ids
    assert "<|AUDIO|>" in llm.get_tokenizer().decode(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}, "nothing is fetched"),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "audio_url", "audio_url": 7}, "audio_url must be"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio must be an object with data"),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "not base64"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "cannot be decoded"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "no images and no videos"),
        ({"type": "audio"}, "a clip is"),
        ({"type": "audio", "audio": ([0.0], None)}, "mono samples and their rate"),
        ({"type": "audio", "audio": "/nowhere.wav"}, "cannot read the sound"),
        ({"type": "audio", "audio": (np.zeros(33000, np.float32), RATE)}, "more than 2 s"),
        ({"type": "audio", "audio": (np.zeros(100, np.float32), RATE)}, "too short"),
    ],
)
def test_what_is_no_clip_is_refused_by_name(llm: LLM, part: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)


def test_limits_of_clips(llm: LLM, checkpoint: Path) -> None:
    short = np.zeros(2000, np.float32)
    with pytest.raises(InvalidRequest, match="9 clips of sound; at most 8"):
        llm.chat(chat(*[short] * 9), GREEDY)
    sentence = "a clip of sound of 25 tokens cannot be encoded"
    options = {"dtype": "float32", "num_pages": 50, "encoder_budget": 20}
    with LLM(checkpoint, **options) as small, pytest.raises(InvalidRequest, match=sentence):
        small.chat(chat(np.zeros(16000, np.float32)), GREEDY)


@pytest.mark.parametrize(
    "options", [{"enable_lora": True}, {"context_parallel_size": 2}, {"speculative_config": "ngram"}]
)
def test_what_such_models_do_not_have_yet_is_refused_at_start(checkpoint: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="takes sound, and models that do cannot have it yet"):
        LLM(checkpoint, **{"dtype": "float32", "num_pages": 50} | options)


def test_a_log_with_sound_is_replayed_without_the_model(
    checkpoint: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    clips = [noise(rng, 0.5) for _ in range(3)]
    options = {"num_pages": 28, "page_size": 4, "max_num_seqs": 3, "encoder_cache_tokens": 26, "max_model_len": 100}
    log = tmp_path / "log"
    with LLM(checkpoint, dtype="float32", max_num_batched_tokens=16, step_log=str(log), **options) as llm:
        llm.chat([chat(clips[number % 3], f"{number} so", clips[number % 2]) for number in range(6)], GREEDY)
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans > 10
