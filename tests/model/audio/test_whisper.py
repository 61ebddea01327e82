"""`LLM.chat` on a random Whisper: transformers' tokens, however clips are cut, kept, shared, preempted or aborted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.audio_checkpoints import noise
from tests.model.vision.test_llm import encoder_of, tokens
from tests.whisper_checkpoints import (
    POSITIONS,
    RATE,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    TEXT,
    Samples,
    answer_of,
    load_whisper_oracle,
    logits_of,
    make_whisper_checkpoint,
)
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from tokenmill.lab.simulate.replay import replay
from tokenmill.model.audio.encoder import load_encoder
from tokenmill.model.audio.spec import read_audio
from tokenmill.model.audio.transcription import read_transcription
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.weights.checkpoint import read_architecture

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
ASKED = {"decoder_prompt": "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"}


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[LLM]:
    with LLM(whisper, dtype="float32", num_pages=200) as llm:
        yield llm


def chat(clip: Samples, before: str = "") -> list[dict[str, object]]:
    parts = [{"type": "audio", "audio": (clip, RATE)}, {"type": "text", "text": before}]
    return [{"role": "user", "content": parts}]


def ask(llm: LLM, clips: Sequence[Samples], params: SamplingParams = GREEDY, before: str = "") -> list:
    return llm.chat([chat(clip, before) for clip in clips], params, chat_template_kwargs=ASKED)


def test_embeddings_are_those_of_transformers(
    whisper: Path, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    spec = read_audio(whisper)
    assert spec is not None
    encoder = load_encoder(whisper, spec, TorchKernels("float32", "cpu"))
    extractor = transformers.WhisperFeatureExtractor(feature_size=spec.num_bins, chunk_length=2)
    for seconds in (0.01, 0.7, 2.0):
        clip = noise(rng, seconds)
        features = extractor(clip, sampling_rate=RATE, return_tensors="pt")["input_features"]
        with torch.no_grad():
            expected = whisper_oracle.model.encoder(features).last_hidden_state[0]
        torch.testing.assert_close(encoder.encode(torch.from_numpy(clip)), expected, rtol=0, atol=2e-5)


def test_answers_and_logprobs_are_those_of_transformers(
    llm: LLM, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    clips = [noise(rng, 0.9), noise(rng, 2.0), noise(rng, 0.05)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    for clip, output in zip(clips, ask(llm, clips, params, "a mill"), strict=True):
        text, found = output.prompt_token_ids[POSITIONS:], tokens(output)
        assert found == answer_of(whisper_oracle, clip, text, NUM_TOKENS)
        expected = logits_of(whisper_oracle, clip, [*text, *found]).log_softmax(-1)[len(text) - 1 :]
        for step, token_id in enumerate(found):
            assert output.outputs[0].logprobs[step][token_id].logprob == pytest.approx(
                float(expected[step, token_id]), abs=1e-4
            )


def test_prompts_have_what_was_said_before_and_nobody_types_marks(llm: LLM, rng: np.random.Generator) -> None:
    (output,) = ask(llm, [noise(rng, 0.5)], before=" <|translate|> mill ")
    tokenizer = llm.get_tokenizer()
    text = output.prompt_token_ids[POSITIONS:]
    shown = "<|startofprev|> <|translate|> mill" + ASKED["decoder_prompt"]
    assert tokenizer.decode(text, skip_special_tokens=False) == shown
    (translate,) = tokenizer.encode("<|translate|>", add_special_tokens=False)
    assert translate not in text
    assert len(set(output.prompt_token_ids[:POSITIONS])) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_batched_tokens": 128, "max_num_seqs": 4, "disable_chunked_mm_input": True, "page_size": 4},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"attention_backend": "reference", "max_num_batched_tokens": 50, "max_num_seqs": 4},
        {"kv_layout": "page-first", "max_num_batched_tokens": 33, "max_num_seqs": 3},
    ],
)
def test_answers_do_not_depend_on_how_clips_are_cut_or_kept(
    whisper: Path, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator, options: dict[str, object]
) -> None:
    clips = [noise(rng, seconds) for seconds in (1.0, 0.5, 1.77)]
    heard = [*clips, clips[0]]
    with LLM(whisper, **{"dtype": "float32", "num_pages": 100} | options) as llm:
        outputs = ask(llm, heard)
    for output, clip in zip(outputs, heard, strict=True):
        text = output.prompt_token_ids[POSITIONS:]
        assert tokens(output) == answer_of(whisper_oracle, clip, text, NUM_TOKENS)


@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 0.1), ("int8", 0.2), ("int4", 1.0)])
def test_other_formats_run_on_torchs_attention_near_transformers(
    whisper: Path, rng: np.random.Generator, quantization: str, tolerance: float
) -> None:
    oracle, clip = load_whisper_oracle(whisper), noise(rng, 1.0)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(whisper, dtype="bfloat16", num_pages=100, quantization=quantization) as llm:
        (output,) = ask(llm, [clip], params)
    text, found = output.prompt_token_ids[POSITIONS:], tokens(output)
    expected = logits_of(oracle, clip, [*text, *found]).log_softmax(-1)[len(text) - 1 :]
    for step, token_id in enumerate(found):
        logprob = output.outputs[0].logprobs[step][token_id].logprob
        assert logprob == pytest.approx(float(expected[step, token_id]), abs=tolerance)
        assert logprob > float(expected[step].max()) - tolerance


def test_the_same_clip_again_is_neither_encoded_nor_computed(llm: LLM, rng: np.random.Generator) -> None:
    clip, other = noise(rng, 1.0), noise(rng, 1.0)
    (before,) = ask(llm, [clip])
    encoded = encoder_of(llm).num_encoded
    (again,) = ask(llm, [clip])
    assert encoder_of(llm).num_encoded == encoded
    assert again.num_cached_tokens >= POSITIONS - 16
    assert tokens(again) == tokens(before)
    (different,) = ask(llm, [other])
    assert encoder_of(llm).num_encoded == encoded + POSITIONS
    assert different.num_cached_tokens == 0


@pytest.mark.parametrize("caches", [True, False])
def test_preempted_requests_go_on_with_the_same_words(
    whisper: Path, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator, caches: bool
) -> None:
    clips, count = [noise(rng, seconds) for seconds in (1.0, 0.5, 1.9)], 40
    # Room for the clips of two, and not for all that they write.
    options = {"num_pages": 60, "page_size": 4, "max_model_len": 150, "encoder_cache_tokens": POSITIONS}
    options |= {"admission": "optimistic", "encoder_budget": POSITIONS, "enable_prefix_caching": caches}
    with LLM(whisper, dtype="float32", **options) as llm:
        outputs = ask(llm, clips, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        assert llm.stats().num_preemptions > 0
    for output, clip in zip(outputs, clips, strict=True):
        assert tokens(output) == answer_of(whisper_oracle, clip, output.prompt_token_ids[POSITIONS:], count)


def test_an_abort_amid_a_clip_leaves_the_others_alone(
    whisper: Path, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    first, second, third = noise(rng, 1.0), noise(rng, 1.5), noise(rng, 0.3)
    with LLM(whisper, dtype="float32", num_pages=60, max_num_batched_tokens=30, max_num_seqs=4) as llm:
        submitted = [llm.submit(chat(clip), GREEDY, template_options=ASKED) for clip in (first, second, third)]
        llm.step()
        llm.step()
        (cut,) = (one for one in llm._local.engine.requests.values() if 0 < one.num_computed_tokens < POSITIONS)
        gone = next(output for output in submitted if cut.id in output.request_ids)
        llm.abort([gone])
        while not all(output.finished for output in submitted):
            llm.step()
        (again,) = ask(llm, [[first, second, third][submitted.index(gone)]])
        assert llm.stats().num_rows_used == llm.stats().num_pages_pinned == 0
    clips = [first, second, third]
    for output, clip in zip([*submitted, again], [*clips, clips[submitted.index(gone)]], strict=True):
        if output is not gone:
            text = output.prompt_token_ids[POSITIONS:]
            assert tokens(output) == answer_of(whisper_oracle, clip, text, NUM_TOKENS)


def test_suppressed_tokens_never_come_and_some_not_first(
    llm: LLM, whisper: Path, whisper_oracle: transformers.PreTrainedModel, rng: np.random.Generator
) -> None:
    clip, spec = noise(rng, 0.8), read_audio(whisper)
    assert spec is not None
    known = read_transcription(whisper, spec)
    assert known is not None
    assert (known.suppressed, known.suppressed_first[:-1]) == (SUPPRESSED, SUPPRESSED_FIRST)
    (free,) = ask(llm, [clip])
    first, *others = dict.fromkeys([*tokens(free), *range(200, 210)])
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, bad_word_ids=((others[0],),), first_bad_ids=(first,)
    )
    (output,) = ask(llm, [clip], params)
    expected = answer_of(whisper_oracle, clip, free.prompt_token_ids[POSITIONS:], NUM_TOKENS, others[:1], [first])
    assert tokens(output) == expected
    assert expected[0] != first


def test_prompts_without_a_clip_say_what_the_model_is_for(llm: LLM, rng: np.random.Generator) -> None:
    for prompt in ("hello", [5, 6, 7]):
        with pytest.raises(InvalidRequest, match="writes down sound"):
            llm.generate([prompt], GREEDY)
    for clips in ((), (noise(rng, 0.2), noise(rng, 0.3))):
        parts = [{"type": "audio", "audio": (clip, RATE)} for clip in clips]
        with pytest.raises(InvalidRequest, match=f"{len(clips)} clips of sound; this model writes down one"):
            llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "so"}]}], GREEDY)
    with pytest.raises(InvalidRequest, match="sessions are for texts"):
        llm.session()
    with pytest.raises(InvalidRequest, match="more than 2 s"):
        ask(llm, [np.zeros(33_000, np.float32)])


def test_a_text_ends_with_the_context(llm: LLM, rng: np.random.Generator) -> None:
    (output,) = ask(llm, [noise(rng, 0.4)], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(tokens(output)) == POSITIONS + TEXT


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enable_lora": True}, "takes sound, and models that do cannot have it yet"),
        ({"tensor_parallel_size": 2}, "runs in one process"),
        ({"language_model_only": True}, "writes down sound, and has no use without it"),
        ({"max_model_len": POSITIONS}, "a clip takes 100 tokens of the context, and its text at most 60"),
        ({"attention_backend": "native", "dtype": "bfloat16"}, "stores no clips of sound"),
    ],
)
def test_what_whisper_does_not_have_is_refused_at_start(
    whisper: Path, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLM(whisper, **{"dtype": "float32", "num_pages": 50} | options)


def test_files_that_do_not_say_how_to_ask_are_refused(whisper: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whisper, folder)
    spec = read_audio(folder)
    assert spec is not None
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text())
    for change, sentence in (({"lang_to_id": {}}, "no lang_to_id"), ({"lang_to_id": 7}, "lang_to_id")):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(InvalidCheckpoint, match=sentence):
            read_transcription(folder, spec)
    path.write_text(json.dumps(fields | {"is_multilingual": False}))
    english = read_transcription(folder, spec)
    assert english is not None
    assert english.prompt("en", "transcribe") == "<|startoftranscript|><|notimestamps|>"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"scale_embedding": True}))
    with pytest.raises(InvalidCheckpoint, match="scale_embedding"):
        LLM(folder, dtype="float32", num_pages=50)


def test_a_log_is_replayed_without_the_model(whisper: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    clips = [noise(rng, 0.5) for _ in range(3)]
    options = {"num_pages": 70, "page_size": 4, "max_num_seqs": 3, "encoder_cache_tokens": 100, "max_model_len": 120}
    log = tmp_path / "log"
    with LLM(whisper, dtype="float32", max_num_batched_tokens=48, step_log=str(log), **options) as llm:
        ask(llm, [clips[number % 3] for number in range(6)])
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans > 10


def test_another_checkpoint_gives_other_words(whisper: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    clip = noise(rng, 1.0)
    folder = make_whisper_checkpoint(tmp_path, seed=int(rng.integers(1, 1 << 20)), is_multilingual=False)
    with LLM(folder, dtype="float32", num_pages=100) as llm:
        (output,) = ask(llm, [clip])
    text = output.prompt_token_ids[POSITIONS:]
    assert tokens(output) == answer_of(load_whisper_oracle(folder), clip, text, NUM_TOKENS)


def test_another_engine_finds_what_the_encoder_has_made(
    whisper: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    clip, found = noise(rng, 1.0), []
    for encoded in (POSITIONS, 0):
        with LLM(whisper, dtype="float32", num_pages=100, encoder_store=str(tmp_path / "outputs")) as llm:
            found.append(tokens(ask(llm, [clip])[0]))
            assert encoder_of(llm).num_encoded == encoded
    assert found[0] == found[1]


def test_parameters_are_counted_as_transformers_does(
    whisper: Path, whisper_oracle: transformers.PreTrainedModel
) -> None:
    decoder = whisper_oracle.model.decoder
    assert read_architecture(whisper).num_parameters() == sum(one.numel() for one in decoder.parameters())
