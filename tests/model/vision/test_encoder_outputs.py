"""Encoder outputs that engines share through a folder: the bits of those made here, whatever becomes of the files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.audio_checkpoints import make_audio_checkpoint, noise
from tests.model.audio.test_llm import chat as audio_chat
from tests.model.vision.test_llm import GREEDY, chat, encoder_of, picture, tokens
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.loop.gates import Gates
from tokenmill.engine.transfer.encoder_gate import EncoderGate
from tokenmill.lab.simulate.replay import replay
from tokenmill.llm.outputs import RequestOutput
from tokenmill.startup.assembly.encoder_alone import load_encoder_alone

WITH_LOGPROBS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)


def open_llm(checkpoint: Path, folder: Path, **more: object) -> LLM:
    options = {"dtype": "bfloat16", "num_pages": 100, "encoder_store": str(folder)}
    return LLM(checkpoint, **{**options, **more})  # type: ignore[arg-type]


def answers(outputs: list[RequestOutput]) -> list[object]:
    return [(tokens(output), output.outputs[0].logprobs) for output in outputs]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.output"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_second_engine_encodes_nothing_and_has_the_same_bits(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator, dtype: str
) -> None:
    chats = [chat(picture(rng, 96, 96), "hello"), chat("two: ", picture(rng, 64, 96), picture(rng, 96, 64))]
    with LLM(checkpoint, dtype=dtype, num_pages=100) as llm:
        expected = answers(llm.chat(chats, WITH_LOGPROBS))
    with open_llm(checkpoint, tmp_path, dtype=dtype) as llm:
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        num_encoded = encoder_of(llm).num_encoded
    assert num_encoded == 9 + 6 + 6
    assert len(files(tmp_path)) == 3
    with open_llm(checkpoint, tmp_path, dtype=dtype) as llm:
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        encoder = encoder_of(llm)
        assert (encoder.num_encoded, encoder.num_loaded, encoder.num_failed_loads) == (0, num_encoded, 0)


def test_sound_is_shared_as_images_are(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, rng: np.random.Generator
) -> None:
    audio = make_audio_checkpoint(tmp_path_factory.mktemp("qwen2-audio"))
    chats = [audio_chat(noise(rng, 1.0), "hello")]
    with open_llm(audio, tmp_path) as llm:
        expected = answers(llm.chat(chats, WITH_LOGPROBS))
        assert encoder_of(llm).num_encoded == 25
    with open_llm(audio, tmp_path) as llm:
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        assert encoder_of(llm).num_encoded == 0


@pytest.mark.parametrize("harm", ["damaged", "cut", "empty", "other", "a folder", "lost"])
def test_what_cannot_be_loaded_is_encoded_here(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator, harm: str
) -> None:
    chats = [chat(picture(rng, 96, 96), "hello"), chat(picture(rng, 64, 64), "you")]
    with open_llm(checkpoint, tmp_path) as llm:
        expected = answers(llm.chat(chats, WITH_LOGPROBS))
    first, second = files(tmp_path)
    with open_llm(checkpoint, tmp_path) as llm:
        spoil(first, second, harm, rng)
        if harm == "lost":
            lose_when_found(llm, tmp_path)
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        assert encoder_of(llm).num_failed_loads == (2 if harm == "other" else 1)
    # What was damaged is written again, and good.
    if harm != "a folder":
        with open_llm(checkpoint, tmp_path) as llm:
            assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
            assert encoder_of(llm).num_failed_loads == 0


def spoil(first: Path, second: Path, harm: str, rng: np.random.Generator) -> None:
    data = bytearray(first.read_bytes())
    match harm:
        case "damaged":
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            first.write_bytes(data)
        case "cut":
            first.write_bytes(data[: int(rng.integers(1, len(data)))])
        case "empty":
            first.write_bytes(b"")
        case "other":
            first.write_bytes(second.read_bytes())
            second.write_bytes(data)
        case "a folder":
            first.unlink()
            first.mkdir()


def lose_when_found(llm: LLM, folder: Path) -> None:
    """Empty the folder between the lookup of a request and its step."""
    gates = llm._local.engine.extension(Gates)
    assert gates is not None
    gate = next(gate for gate in gates._gates if isinstance(gate, EncoderGate))
    admit = gate.admit

    def admit_and_lose(message: object) -> bool:
        is_open = admit(message)  # type: ignore[arg-type]
        for path in files(folder):
            os.rename(path, path.with_suffix(".lost"))
        return is_open

    gate.admit = admit_and_lose  # type: ignore[method-assign]


def test_a_log_of_loads_is_replayed_without_store_and_model(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    pictures = [picture(rng, 64, 96) for _ in range(3)]
    chats = [chat(f"{number}", pictures[number % 3]) for number in range(6)]
    store, log = tmp_path / "store", tmp_path / "log"
    with open_llm(checkpoint, store) as llm:
        llm.chat(chats, GREEDY)
    with open_llm(checkpoint, store, step_log=str(log), max_num_seqs=2, encoder_cache_tokens=6) as llm:
        llm.chat(chats, GREEDY)
        assert encoder_of(llm).num_encoded == 0
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans > 3


def test_other_weights_and_other_types_find_nothing(checkpoint: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    chats = [chat(picture(rng, 64, 64), "hello")]
    other = shutil.copytree(checkpoint, tmp_path / "other")
    (path,) = other.glob("*.safetensors")
    save_file({name: weight * 1.01 for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})
    store = tmp_path / "store"
    for model, dtype in ((checkpoint, "bfloat16"), (other, "bfloat16"), (checkpoint, "float32")):
        with open_llm(model, store, dtype=dtype) as llm:
            llm.chat(chats, GREEDY)
            assert encoder_of(llm).num_encoded == 4
    assert len(files(store)) == 3


def test_roles_of_vllm(checkpoint: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    chats = [chat(picture(rng, 64, 64), "hello")]

    def encoded(role: str) -> int:
        config = (
            f'{{"ec_connector": "ECExampleConnector", "ec_role": "{role}", '
            f'"ec_connector_extra_config": {{"shared_storage_path": "{tmp_path}"}}}}'
        )
        with LLM(checkpoint, dtype="bfloat16", num_pages=100, ec_transfer_config=config) as llm:
            llm.chat(chats, GREEDY)
            return encoder_of(llm).num_encoded

    assert encoded("ec_consumer") == 4
    assert not files(tmp_path)
    assert encoded("ec_producer") == 4
    assert encoded("ec_producer") == 4
    assert encoded("ec_consumer") == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"encoder_store": "/proc/nowhere"}, "encoder outputs cannot be kept in /proc/nowhere"),
        ({"encoder_urls": ("ftp://host",)}, "a server is http://HOST:PORT"),
        ({"ec_transfer_config": '{"ec_connector": "ECCPUConnector", "ec_role": "ec_both"}'}, "the only ec_connector"),
        ({"ec_transfer_config": '{"ec_connector": "ECExampleConnector"}'}, "ec_role"),
        ({"encoder_store": "/tmp/x", "encoder_store_size": 0}, "--encoder-store-size"),
    ],
)
def test_bad_settings_are_refused(checkpoint: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        LLM(checkpoint, dtype="float32", num_pages=50, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["encoder_store", "encoder_urls", "ec_transfer_config"])
def test_a_model_of_text_refuses_them(flag: str, tmp_path: Path) -> None:
    config = '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}'
    value = {"encoder_store": str(tmp_path), "encoder_urls": ("http://127.0.0.1:1",), "ec_transfer_config": config}
    with pytest.raises(InvalidConfig, match=f"--{flag.replace('_', '-')}: .* takes neither images nor sound"):
        LLM(num_pages=50, **{flag: value[flag]})


def test_an_encoder_alone_refuses_what_it_has_no_use_for(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--encoder-only: .* takes neither images nor sound"):
        load_encoder_alone(EngineConfig())
    with pytest.raises(InvalidConfig, match="--encoder-only keeps no outputs"):
        load_encoder_alone(EngineConfig(model=str(checkpoint), encoder_store=str(tmp_path)))
