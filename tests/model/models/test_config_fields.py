"""Every field of a config.json, changed once: it changes what it changes in transformers, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.checkpoints import FAMILIES, load_oracle, make_checkpoint
from tests.encoder_checkpoints import ENCODERS, encoder_oracle, hidden_states, make_encoder
from tests.model.models.test_encoders import states_of
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tokenmill.core.errors import InvalidCheckpoint

# What training, generation and files go by; `model_type` names transformers' class, ours is in `architectures`.
INERT = {
    *("architectures", "model_type", "transformers_version", "dtype", "use_cache", "initializer_range"),
    *("attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp", "output_router_logits"),
    *("router_aux_loss_coef", "cache_implementation"),
    "tie_word_embeddings",  # where a head is stored all the same, transformers 5 takes it, and versions before did not
}
MAKES_AN_ENCODER = {"use_bidirectional_attention"}  # which has vectors, and no logits
# Of encoders: training, and the heads that are left out. A BERT's padding has no part in its positions.
INERT_OF_ENCODERS = {
    *INERT,
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "id2label", "label2id"),
    *("embedding_dropout", "mlp_dropout", "classifier_activation", "classifier_bias", "classifier_pooling"),
    *("decoder_bias", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index", "cls_token_id"),
    *("sep_token_id", "initializer_cutoff_factor"),
}
FOLLOWED_BY_ENCODERS = {
    "modernbert": {"norm_eps", "num_attention_heads", "hidden_activation", "local_attention", "layer_types"},
    "gemma3_text": {"rms_norm_eps", "query_pre_attn_scalar", "layer_types", "use_bidirectional_attention"},
    **{name: {"layer_norm_eps", "num_attention_heads", "hidden_act"} for name in ("bert", "roberta", "xlm_roberta")},
    # A head of Nomic's has its size in a field, too: another number of heads does not fit it.
    "nomic_bert": {"layer_norm_eps", "hidden_act", "rope_parameters"},
    **{name: {"layer_norm_eps", "num_attention_heads", "hidden_act", "rope_parameters"} for name in ("gte", "jina_v3")},
}
EPS = {"modernbert": {"norm_eps": 1e-2}, "gemma3_text": {"rms_norm_eps": 1e-2}}
LENGTH = 30


def changes(value: Any) -> list[Any]:
    """Other values of a field."""
    if isinstance(value, dict):
        inner = [{**value, key: one} for key, old in value.items() for one in changes(old)]
        return [{**value, "rope_type": "linear", "factor": 3.0}, *inner] if "rope_type" in value else inner
    if isinstance(value, list):
        return [[*value[1:], value[0]]] if value else []
    if value is None:
        return [True, 7, 0.9]
    if isinstance(value, str):
        return ["silu", "gelu_pytorch_tanh", "relu"]
    return [not value] if isinstance(value, bool) else [1.7 * value, *([value + 1] if isinstance(value, int) else [])]


def ours(folder: Path, sequence: list[int], rng: np.random.Generator) -> torch.Tensor:
    decoder, requests = load(folder), PagedRequests([sequence], 16, rng)
    attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (found,) = requests.run(decoder, attention, [[(0, LENGTH)]])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_changes_what_it_changes_in_transformers(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False, seed=int(rng.integers(2**31)))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    sequence = rng.integers(0, 331, LENGTH).tolist()
    plain, followed = ours(folder, sequence, rng), set()
    for field in config.keys() - INERT - MAKES_AN_ENCODER:
        for value in changes(config[field]):
            path.write_text(json.dumps({**config, field: value}))
            try:
                found = ours(folder, sequence, rng)
            except InvalidCheckpoint:
                continue
            try:
                with torch.inference_mode():
                    expected = load_oracle(folder)(torch.tensor([sequence])).logits[0]
            except StrictDataclassError:
                continue  # of a type that no such field has; ours does not look at what is switched off
            print(f"{field}={value!r}")
            assert_close(found, expected, relative=1e-3)  # fifty models each: one of them may be ill-conditioned
            followed |= {field} if not torch.equal(found, plain) else set()
    print(f"{family}: followed {sorted(followed)}")
    assert {"norm_eps" if family.startswith("lfm2") else "rms_norm_eps", "rope_parameters"} <= followed


@pytest.mark.parametrize("family", ENCODERS)
def test_a_field_of_an_encoder_changes_what_it_changes_in_transformers(
    family: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_encoder(tmp_path, family, seed=int(rng.integers(2**31)), **EPS.get(family, {"layer_norm_eps": 1e-2}))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = rng.integers(0, 331, LENGTH).tolist()
    (plain,), followed = states_of(load(folder), [text], "reference", rng), set()
    inert = INERT_OF_ENCODERS - ({"pad_token_id"} if "roberta" in family else set())
    for field in config.keys() - inert:
        for value in [*changes(config[field]), *([4, 1] if field == "num_attention_heads" else [])]:
            path.write_text(json.dumps({**config, field: value}))
            try:
                (found,) = states_of(load(folder), [text], "reference", rng)
            except InvalidCheckpoint:
                continue
            try:
                expected = hidden_states(encoder_oracle(folder), text)
            except StrictDataclassError:
                continue
            print(f"{field}={value!r}")
            assert_close(found, expected, relative=1e-3)
            followed |= {field} if not torch.equal(found, plain) else set()
    print(f"{family}: followed {sorted(followed)}")
    assert followed >= FOLLOWED_BY_ENCODERS[family]
