"""One checkpoint and its oracle for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.audio_checkpoints import load_audio_oracle, make_audio_checkpoint
from tests.whisper_checkpoints import load_whisper_oracle, make_whisper_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_audio_checkpoint(tmp_path_factory.mktemp("qwen2-audio"))


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_audio_oracle(checkpoint)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper_checkpoint(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="session")
def whisper_oracle(whisper: Path) -> transformers.PreTrainedModel:
    return load_whisper_oracle(whisper)
