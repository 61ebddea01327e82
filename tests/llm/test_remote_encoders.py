"""Encoders that are not in transformers in one process: means of the states that the formulas of their code give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.encoder_checkpoints import write_word_pieces
from tests.llm.test_encoders import TEXTS, ids_of, vectors
from tests.remote_encoders import REMOTE_ENCODERS, RemoteOracle, make_remote_encoder
from tokenmill import LLM
from tokenmill.model.kernels.native import load_kernels

FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype": "float32"}, 1 - 1e-6),
    "bfloat16": ({"dtype": "bfloat16"}, 0.9995),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, 0.999),
}

JINA_SHAPE = {"hidden_size": 64, "num_attention_heads": 4}
SHAPES = {"nomic_moe": {"n_embd": 64, "n_head": 4, "n_inner": 96}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", REMOTE_ENCODERS)
def test_vectors_are_the_means_of_the_formulas_states(family: str, form: str, tmp_path: Path) -> None:
    if form == "int8" and load_kernels(1) is None:
        pytest.skip("the native kernels are not built here")
    options, least = FORMS[form]
    folder = make_remote_encoder(tmp_path, family, seed=1, **SHAPES.get(family, JINA_SHAPE))
    write_word_pieces(folder)
    oracle = RemoteOracle(folder)
    with LLM(str(folder), **options) as llm:
        together = vectors(llm, TEXTS)
        for text, found in zip(TEXTS, together, strict=True):
            mean = oracle.states(ids_of(folder, text)).mean(0)
            assert torch.cosine_similarity(mean, torch.from_numpy(found), dim=0) > least
            assert (vectors(llm, [text])[0] == found).all()
