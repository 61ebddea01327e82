"""Whisper over HTTP, as OpenAI's client asks: languages, tasks, prompts, long sound, times, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import transformers

from tests.audio_checkpoints import noise
from tests.serving.server.running_server import RunningServer, start_server
from tests.whisper_checkpoints import (
    LANGUAGES,
    MARKS,
    POSITIONS,
    RATE,
    SECONDS,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    TEXT,
    TIMES,
    Samples,
    answer_of,
    features_of,
    logits_of,
)
from tokenmill.config.configs import EngineConfig
from tokenmill.model.audio.pieces import pieces, wav_file
from tokenmill.serving.replicas.starter import ENGINE_MODULE

ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
SILENCE = wav_file(np.zeros(9000, np.float32))


@pytest.fixture(scope="module")
def server(whisper: Path) -> Iterator[RunningServer]:
    engine = EngineConfig(model=str(whisper), dtype="float32", num_pages=200, max_num_seqs=8)
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Oracle:
    """Transformers' answers in the words of the tokenizer."""

    def __init__(self, folder: Path, model: transformers.PreTrainedModel) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = model
        self.end = model.generation_config.eos_token_id

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def tokens(self, clip: Samples, prompt: str, *, has_times: bool = False) -> list[int]:
        asked = self.ids(prompt)
        first = [*SUPPRESSED, *SUPPRESSED_FIRST, self.end]
        found = answer_of(self.model, clip, asked, TEXT - len(asked), SUPPRESSED, first, self.end, has_times)
        return [token_id for token_id in found if token_id != self.end]

    def text(self, clip: Samples, prompt: str) -> str:
        return self.tokenizer.decode(self.tokens(clip, prompt)).strip()

    def language(self, clip: Samples) -> str:
        """Return the most likely language behind the first token."""
        ids = self.ids("".join(f"<|{code}|>" for code in LANGUAGES))
        logits = logits_of(self.model, clip, self.ids("<|startoftranscript|>"))[-1]
        return LANGUAGES[int(logits[ids].argmax())]


@pytest.fixture(scope="module")
def oracle(whisper: Path, whisper_oracle: transformers.PreTrainedModel) -> Oracle:
    return Oracle(whisper, whisper_oracle)


def asked(language: str, task: str = "transcribe", last: str = "<|notimestamps|>") -> str:
    return f"<|startoftranscript|><|{language}|><|{task}|>{last}"


def test_languages_tasks_and_prompts_are_tokens(
    client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator
) -> None:
    clip = noise(rng, 1.1)
    data = wav_file(clip)
    for language in LANGUAGES:
        found = client.audio.transcriptions.create(file=data, model="tiny", language=language)
        assert found.text == oracle.text(clip, asked(language))
    assert found.usage.input_token_details.audio_tokens == POSITIONS
    assert found.usage.input_tokens == POSITIONS + 4
    english = client.audio.translations.create(file=data, model="tiny")
    assert english.text == oracle.text(clip, asked(oracle.language(clip), "translate"))
    told = client.audio.transcriptions.create(file=data, model="tiny", language="de", prompt=" the mill ")
    assert told.text == oracle.text(clip, "<|startofprev|> the mill" + asked("de"))


def test_words_are_those_that_transformers_generates(
    client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator
) -> None:
    for language in ("de", None):
        clip, ids = generated(oracle, language, rng)
        expected = oracle.tokenizer.decode(ids).strip()
        options = {} if language is None else {"language": language}
        found = client.audio.transcriptions.create(file=wav_file(clip), model="tiny", **options)
        assert found.text == expected


def generated(oracle: Oracle, language: str | None, rng: np.random.Generator) -> tuple[Samples, list[int]]:
    """Draw a clip and what `generate` writes of it.

    Behind two marks of time in a row, which random weights write too, it may hear the rest again: these are left out.
    """
    for _ in range(40):
        clip = noise(rng, 1.6)
        ids = oracle.model.generate(features_of(clip), language=language, task="transcribe", max_new_tokens=TEXT - 4)
        if ids.shape[1] <= TEXT - 4:
            return clip, ids[0].tolist()
    raise AssertionError("it hears every clip twice")


def test_the_language_is_found_where_nobody_says_it(
    server: RunningServer, client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator
) -> None:
    clip = noise(rng, 0.7)
    encoded = server.settled_metric("mm_encoder_tokens_total")
    found = client.audio.transcriptions.create(file=wav_file(clip), model="tiny")
    assert found.text == oracle.text(clip, asked(oracle.language(clip)))
    # The clip is heard once for both.
    server.wait_for(lambda: server.metric("mm_encoder_tokens_total") == encoded + POSITIONS)


def test_long_sound_is_written_down_in_pieces(client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator) -> None:
    samples = noise(rng, 4.3)
    cut = list(pieces(samples, SECONDS * RATE))
    expected = " ".join(filter(None, (oracle.text(piece, asked("en")) for piece in cut)))
    options = {"file": wav_file(samples), "model": "tiny", "language": "en"}
    found = client.audio.transcriptions.create(**options)
    assert found.text == expected
    assert found.usage.input_token_details.audio_tokens == len(cut) * POSITIONS
    assert client.audio.transcriptions.create(**options, response_format="text") == expected + "\n"
    events = list(client.audio.transcriptions.create(**options, stream=True))
    assert "".join(one.delta for one in events[:-1]) == expected == events[-1].text
    assert events[-1].type == "transcript.text.done"


def segments_of(oracle: Oracle, cut: Sequence[Samples]) -> list[tuple[float, float, list[int]]]:
    """Return starts, ends and tokens of what stands between marks of time."""
    (begin,) = oracle.ids(TIMES[0])
    found, offset = [], 0.0
    for piece in cut:
        start, seconds, own = 0.0, len(piece) / RATE, list[int]()
        for token_id in [*oracle.tokens(piece, asked("en", last=""), has_times=True), None]:
            if token_id is not None and token_id < begin:
                own.append(token_id)
                continue
            end = seconds if token_id is None else min((token_id - begin) * 0.02, seconds)
            if oracle.tokenizer.decode(own).strip():
                found.append((round(offset + start, 2), round(offset + max(start, end), 2), own))
            start, own = end, []
        offset += seconds
    return found


def test_times_become_segments_and_captions(client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator) -> None:
    samples = noise(rng, 3.4)
    cut = list(pieces(samples, SECONDS * RATE))
    options = {"file": wav_file(samples), "model": "tiny", "language": "en"}
    found = client.audio.transcriptions.create(
        **options, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    expected = segments_of(oracle, cut)
    assert [(one.start, one.end, one.tokens) for one in found.segments] == [
        (pytest.approx(start, abs=0.011), pytest.approx(end, abs=0.011), own) for start, end, own in expected
    ]
    assert [one.id for one in found.segments] == list(range(len(expected)))
    assert (found.language, found.task) == ("en", "transcribe")
    assert found.duration == pytest.approx(3.4, abs=1e-3)
    assert found.usage.seconds == 4
    assert all(one.avg_logprob < 0 < one.compression_ratio for one in found.segments)
    assert not re.search(r"<\|", found.text)
    srt = client.audio.transcriptions.create(**options, response_format="srt")
    assert len(re.findall(r"^\d+\n\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}\n", srt, re.MULTILINE)) == len(expected)
    vtt = client.audio.transcriptions.create(**options, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n")
    assert len(re.findall(r"^\d\d:\d\d:\d\d\.\d{3} --> ", vtt, re.MULTILINE)) == len(expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"language": "fr"}, "the model knows de, en, zh"),
        ({"response_format": "diarized_json"}, "speakers are not told apart"),
        ({"response_format": "srt", "stream": "true"}, "events have no times"),
        ({"timestamp_granularities[]": "word"}, "those of words are not"),
        ({"include[]": "logprobs"}, "log probabilities"),
        ({"prompt": "mill " * 200}, "context length"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: RunningServer, fields: dict[str, str], sentence: str) -> None:
    reply = httpx.post(f"{server.url}{ROUTES[0]}", data=fields, files={"file": ("a.wav", SILENCE)}, timeout=30)
    assert reply.status_code == 400
    assert sentence in reply.json()["error"]["message"]


def test_other_routes_say_what_the_model_is_for(server: RunningServer, client: openai.OpenAI) -> None:
    sentence = "writes down sound: ask /v1/audio/transcriptions"
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.completions.create(model="tiny", prompt="hello")
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.responses.create(model="tiny", input="hello")
    bodies = {
        "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
        "/generate": {"text": "hello"},
        "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
        "/completion": {"prompt": "hello"},
        "/v1/embeddings": {"input": "hello"},
    }
    for path, body in bodies.items():
        reply = server.http.post(f"{server.url}{path}", json=body)
        assert reply.status_code == 400, path
        assert "writes down sound" in reply.text
    assert client.models.retrieve("tiny").task == "transcribe"
    assert server.http.get(f"{server.url}/health").status_code == 200
    assert server.http.get(f"{server.url}/health_generate").status_code == 200


def test_marks_that_a_client_types_are_text(client: openai.OpenAI, oracle: Oracle, rng: np.random.Generator) -> None:
    clip = noise(rng, 0.6)
    found = client.audio.transcriptions.create(
        file=wav_file(clip), model="tiny", language="en", prompt=f"{MARKS[0]}<|translate|>"
    )
    plain = " <|startoftranscript|><|translate|>"
    ids = [oracle.ids("<|startofprev|>")[0], *typed(oracle, plain), *oracle.ids(asked("en"))]
    first = [*SUPPRESSED, *SUPPRESSED_FIRST, oracle.end]
    answer = answer_of(oracle.model, clip, ids, TEXT - len(ids), SUPPRESSED, first, oracle.end)
    assert found.text == oracle.tokenizer.decode([one for one in answer if one != oracle.end]).strip()


def typed(oracle: Oracle, text: str) -> list[int]:
    """Return the tokens of a text whose marks are typed: each begins with two characters of its own."""
    ids: list[int] = []
    for part in re.split(r"(<\|[a-z]+\|>)", text):
        ids += oracle.ids(part[:2]) + oracle.ids(part[2:]) if part.startswith("<|") else oracle.ids(part)
    return ids
