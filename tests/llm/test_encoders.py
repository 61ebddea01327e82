"""Encoders in one process: their vectors, and what they refuse by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.encoder_checkpoints import encoder_oracle, hidden_states, make_encoder, write_word_pieces
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig, InvalidRequest, TokenMillError

TEXTS = ["a cat", "x", "do not, he's here. " * 3, "a cat", "one two three four five"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder(tmp_path_factory.mktemp("models"), "bert", hidden_size=64, num_attention_heads=4)
    write_word_pieces(folder)
    return folder


def ids_of(folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(text).ids


def vectors(llm: LLM, prompts: list[Any]) -> list[np.ndarray]:
    return [np.array(output.outputs.embedding, np.float32) for output in llm.embed(prompts, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_the_means_of_transformers_states(encoder: Path, dtype: str) -> None:
    llm, oracle = LLM(str(encoder), dtype=dtype), encoder_oracle(encoder)
    for text, found in zip(TEXTS, vectors(llm, TEXTS), strict=True):
        mean = hidden_states(oracle, ids_of(encoder, text)).mean(0)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)
        likeness = torch.cosine_similarity(mean, torch.from_numpy(found), dim=0)
        assert likeness > (1 - 1e-6 if dtype == "float32" else 0.999)


def test_a_text_has_the_same_vector_alone_and_among_others(encoder: Path) -> None:
    llm = LLM(str(encoder), max_num_seqs=3)
    prompts = [[1 + (7 * i + j) % 60 for j in range(1 + 5 * i)] for i in range(12)]
    for prompt, found in zip(prompts, vectors(llm, prompts), strict=True):
        assert np.array_equal(vectors(llm, [prompt])[0], found)


def test_a_text_may_fill_the_positions_and_no_more(encoder: Path) -> None:
    llm = LLM(str(encoder), max_num_batched_tokens=16, max_num_seqs=2)
    assert len(vectors(llm, [[5] * 64, [5] * 64, [6]])) == 3
    with pytest.raises(InvalidRequest, match="64 tokens"):
        llm.embed([[5] * 65], use_tqdm=False)


def test_it_refuses_to_generate(encoder: Path) -> None:
    llm = LLM(str(encoder))
    with pytest.raises(InvalidRequest, match="this model embeds texts: use /v1/embeddings"):
        llm.generate(["a cat"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(vectors(llm, ["a cat"])) == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("enable_lora", True),
        ("speculative_config", "ngram"),
        ("kv_disk", "somewhere"),
        ("kv_cache_dtype", "int8"),
    ],
)
def test_what_encoders_lack_is_refused_by_name(encoder: Path, flag: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="encoder"):
        LLM(str(encoder), **{flag: str(tmp_path) if flag == "kv_disk" else value})


@pytest.mark.processes
@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_and_stages_are_refused_by_name(encoder: Path, flag: str) -> None:
    with pytest.raises(InvalidConfig, match="an encoder runs in one process"):
        LLM(str(encoder), **{flag: 2})


def test_an_id_outside_the_vocabulary_is_refused_and_the_engine_goes_on(encoder: Path) -> None:
    llm = LLM(str(encoder), dtype="float32")
    with pytest.raises(TokenMillError):
        llm.embed([[400]], use_tqdm=False)
    assert len(vectors(llm, ["a cat"])) == 1


CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm_roberta": "XLMRobertaForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
    "nomic_bert": "NomicBertForSequenceClassification",
    "gte": "GteForSequenceClassification",
    "jina_v3": "JinaEmbeddingsV3ForSequenceClassification",
}


@torch.inference_mode()
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_labels_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family, model_class=CLASSIFIERS[family], num_labels=3)
    write_word_pieces(folder)
    oracle = getattr(transformers, CLASSIFIERS[family]).from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[5, 17, 33, 8, 9, 11], [7], [40, 41, 42, 43] * 6]
    with LLM(str(folder), dtype="float32") as llm:
        found = llm.classify(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, found, strict=True):
        wanted = oracle(torch.tensor([prompt])).logits.softmax(-1)[0]
        np.testing.assert_allclose(output.outputs.probs, wanted, atol=2e-5)


PAIRS = [("a cat", "a dog"), ("do not", "he's here. " * 6), ("x", "x"), ("one two three", "a")]


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-5), ("bfloat16", 0.03)])
def test_pairs_are_told_apart_by_types_as_in_transformers(tmp_path: Path, dtype: str, most: float) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    folder = make_encoder(tmp_path, "bert", model_class=CLASSIFIERS["bert"], num_labels=1, **shape)
    write_word_pieces(folder, pair_types=(0, 1))
    oracle = transformers.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with LLM(str(folder), dtype=dtype, max_num_seqs=3) as llm:
        found = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False, use_activation=False)
        for (query, document), output in zip(PAIRS, found, strict=True):
            ids = tokenizer.encode(query, document)
            types = torch.tensor([ids.type_ids])
            wanted = oracle(torch.tensor([ids.ids]), token_type_ids=types).logits[0, 0]
            untold = oracle(torch.tensor([ids.ids])).logits[0, 0]
            assert dtype != "float32" or abs(wanted - untold) > 10 * most, "types change the score"
            assert output.outputs.score == pytest.approx(float(wanted), abs=most)
            (alone,) = llm.score(query, [document], use_tqdm=False, use_activation=False)
            assert alone.outputs.score == output.outputs.score, "bit for bit, whichever rows had pairs before"
        one_text = llm.classify([ids_of(folder, "a cat")], use_tqdm=False, use_activation=False)[0].outputs.probs
        without = oracle(torch.tensor([ids_of(folder, "a cat")])).logits[0]
        np.testing.assert_allclose(one_text, without, atol=most)


def test_a_tokenizer_that_mixes_types_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert", model_class=CLASSIFIERS["bert"], num_labels=1)
    write_word_pieces(folder, pair_types=(1, 0))
    with LLM(str(folder), dtype="float32") as llm, pytest.raises(InvalidRequest, match="mixes the types"):
        llm.score("a cat", ["a dog"], use_tqdm=False)
