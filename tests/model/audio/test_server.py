"""Sound over HTTP: clips in chats, and the routes that write it down, as OpenAI's client asks for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.audio_checkpoints import RATE, noise
from tests.serving.server.running_server import RunningServer, start_server
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.model.audio.pieces import pieces, wav_file
from tokenmill.model.audio.spec import num_tokens
from tokenmill.serving.replicas.starter import ENGINE_MODULE

ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
SILENCE = wav_file(np.zeros(9000, np.float32))
RECOGNIZE = "Detect the language and recognize the speech:"


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    engine = EngineConfig(model=str(checkpoint), dtype="float32", num_pages=200, max_num_seqs=8, max_model_len=256)
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def answers(checkpoint: Path, clips: list[np.ndarray], question: str) -> list[str]:
    """Return the text that an engine without a server writes for each clip."""
    chats = [
        [{"role": "user", "content": [{"type": "audio", "audio": (clip, RATE)}, {"type": "text", "text": question}]}]
        for clip in clips
    ]
    with LLM(checkpoint, dtype="float32", num_pages=200, max_model_len=256) as llm:
        return [one.outputs[0].text.strip() for one in llm.chat(chats, SamplingParams(max_tokens=None, temperature=0))]


def test_a_chat_hears_a_clip(server: RunningServer, client: openai.OpenAI, rng: np.random.Generator) -> None:
    data = base64.b64encode(wav_file(noise(rng, 1.0))).decode()
    clip = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    ask = [{"role": "user", "content": [clip, {"type": "text", "text": "hello"}]}]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    first = client.chat.completions.create(messages=ask, **options)
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    ask[0]["content"][0] = url
    again = client.chat.completions.create(messages=ask, **options)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 16
    server.wait_for(lambda: server.metric("mm_encoder_tokens_total") >= 25)


def test_responses_hear_a_clip_and_messages_refuse_it(
    server: RunningServer, client: openai.OpenAI, rng: np.random.Generator
) -> None:
    data = base64.b64encode(wav_file(noise(rng, 1.0))).decode()
    clip = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    limits = {"model": "tiny", "temperature": 0}
    ask = [{"role": "user", "content": [clip, {"type": "text", "text": "hello"}]}]
    chat = client.chat.completions.create(messages=ask, max_tokens=6, **limits)
    parts = [clip, {"type": "input_text", "text": "hello"}]
    found = client.responses.create(input=[{"role": "user", "content": parts}], max_output_tokens=6, **limits)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    behind = client.responses.create(input="and then?", previous_response_id=found.id, max_output_tokens=6, **limits)
    assert behind.usage.input_tokens > found.usage.input_tokens + found.usage.output_tokens
    assert behind.usage.input_tokens_details.cached_tokens > 16  # the clip is still there
    for broken in ({"type": "input_audio"}, {"type": "input_audio", "input_audio": {"format": "wav"}}):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].content\[0\].input_audio"):
            client.responses.create(input=[{"role": "user", "content": [broken]}], **limits)
    blocks = [{"type": "text", "text": "hear"}, {"type": "audio", "source": {"type": "base64", "data": data}}]
    for content in (blocks, [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **limits}
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            refusal = server.post(route, body)
            assert refusal.status_code == 400
            assert "this API has no blocks of sound" in refusal.json()["error"]["message"]


def test_long_sound_is_written_down_in_pieces(
    client: openai.OpenAI, checkpoint: Path, rng: np.random.Generator
) -> None:
    samples = noise(rng, 4.3)
    expected = " ".join(filter(None, answers(checkpoint, list(pieces(samples, 2 * RATE)), RECOGNIZE)))
    data = wav_file(samples)
    found = client.audio.transcriptions.create(file=("a.wav", data), model="tiny")
    assert found.text == expected
    assert found.usage.type == "tokens"
    assert found.usage.input_token_details.audio_tokens == sum(
        num_tokens(len(one)) for one in pieces(samples, 2 * RATE)
    )
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert client.audio.transcriptions.create(file=data, model="tiny", response_format="text") == expected + "\n"
    events = list(client.audio.transcriptions.create(file=data, model="tiny", stream=True))
    assert [one.type for one in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert "".join(one.delta for one in events[:-1]) == expected == events[-1].text
    assert events[-1].type == "transcript.text.done"
    assert events[-1].usage.total_tokens == found.usage.total_tokens


def test_languages_and_translations_have_sentences_of_their_own(
    client: openai.OpenAI, checkpoint: Path, rng: np.random.Generator
) -> None:
    clip = noise(rng, 0.8)
    buffer = io.BytesIO()
    soundfile.write(buffer, clip, RATE, format="FLAC", subtype="PCM_24")
    heard, _ = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32")
    (spoken,) = answers(checkpoint, [heard], f"{RECOGNIZE} <|en|>")
    found = client.audio.transcriptions.create(file=("a.flac", buffer.getvalue()), model="tiny", language="en")
    assert found.text == spoken
    (english,) = answers(checkpoint, [heard], "Detect the language and translate the speech into English:")
    assert client.audio.translations.create(file=("a.flac", buffer.getvalue()), model="tiny").text == english


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "data", "sentence"),
    [
        ({"response_format": "srt"}, SILENCE, "response_format srt needs times"),
        ({"response_format": "verbose_json"}, SILENCE, "verbose_json needs times"),
        ({"response_format": "vtt"}, SILENCE, "vtt needs times"),
        ({"response_format": "yaml"}, SILENCE, "response_format"),
        ({"prompt": "Mills"}, SILENCE, "prompt is not supported"),
        ({"temperature": "3"}, SILENCE, "temperature"),
        ({"colour": "red"}, SILENCE, "colour"),
        ({"model": "gpt"}, SILENCE, "does not exist"),
        ({}, b"nothing", "cannot be decoded"),
        ({}, wav_file(np.full(9000, np.nan, np.float32)), "not numbers"),
        ({}, wav_file(np.zeros(9, np.float32)), "too short"),
        ({}, None, "file is missing"),
    ],
)
def test_what_cannot_be_written_down_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, str], data: bytes | None, sentence: str
) -> None:
    files = {"file": ("a.wav", data)} if data is not None else {"temperature": (None, "0")}
    reply = httpx.post(f"{server.url}{path}", data=fields, files=files, timeout=30)
    assert reply.status_code in (400, 404)
    message = reply.json()["error"]["message"]
    assert sentence in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp_granularities[]", "word"),
        ("include[]", "logprobs"),
        ("language", "English"),
        ("chunking_strategy", "x"),
    ],
)
def test_fields_of_transcriptions_that_are_not_supported(server: RunningServer, field: str, value: str) -> None:
    files = {"file": ("a.wav", wav_file(np.zeros(9000, np.float32)))}
    reply = httpx.post(
        f"{server.url}{ROUTES[0]}",
        timeout=30,
        data={field: [value, value] if field.endswith("[]") else value},
        files=files,
    )
    assert reply.status_code == 400
    assert field.removesuffix("[]") in reply.json()["error"]["message"]


def test_json_and_large_files_are_refused(server: RunningServer) -> None:
    for path in ROUTES:
        assert server.http.post(f"{server.url}{path}", json={}).status_code == 415
    reply = httpx.post(f"{server.url}{ROUTES[0]}", timeout=30, files={"file": ("a.wav", bytes(26 << 20))})
    assert reply.status_code == 413


def test_the_description_names_forms_and_fields(server: RunningServer) -> None:
    document = json.loads(server.http.get(f"{server.url}/openapi.json").content)
    for path, form in zip(ROUTES, ("TranscriptionForm", "TranslationForm"), strict=True):
        (kind,) = document["paths"][path]["post"]["requestBody"]["content"].items()
        assert kind[0] == "multipart/form-data"
        assert kind[1]["schema"]["$ref"].endswith(form)
    fields = document["components"]["schemas"]["TranscriptionForm"]["properties"]
    assert {"file", "model", "language", "prompt", "response_format", "temperature", "stream"} <= fields.keys()
    assert {"timestamp_granularities[]", "include[]", "chunking_strategy"} <= fields.keys()
