"""Small random encoders in the Hugging Face layout, made fresh by the tests that need them, and their oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors

from tests.checkpoints import VOCAB_SIZE, randomize
from tests.serving.frontend.tokenizers_for_tests import word_piece_tokenizer, write_folder

ENCODERS = ("bert", "roberta", "xlm_roberta", "modernbert", "nomic_bert", "gte", "gemma3_text", "jina_v3")

_CLASSES = {
    "bert": ("BertConfig", "BertModel"),
    "roberta": ("RobertaConfig", "RobertaModel"),
    "xlm_roberta": ("XLMRobertaConfig", "XLMRobertaModel"),
    "modernbert": ("ModernBertConfig", "ModernBertModel"),
    "nomic_bert": ("NomicBertConfig", "NomicBertModel"),
    "gte": ("GteConfig", "GteModel"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3TextModel"),
    "jina_v3": ("JinaEmbeddingsV3Config", "JinaEmbeddingsV3Model"),
}

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}

_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "use_bidirectional_attention": True,
    },
    "modernbert": {
        "num_hidden_layers": 5,
        "local_attention": 7,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
    },
}


def make_encoder(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    model_class: str = "",
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Write a small random encoder without a tokenizer, and return its folder (made if needed).

    Args:
        family: one of `ENCODERS`.
        model_class: transformers' class, with a head for instance; "": the family's own, whose weights have no prefix.
        fields: of the family's transformers config.
    """
    transformers.utils.logging.disable_progress_bar()
    config_class, own_class = _CLASSES[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **_FAMILY_SHAPE.get(family, {}), **fields})
    model = getattr(transformers, model_class or own_class)(config)
    randomize(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    return folder


def encoder_architecture_of(family: str) -> str:
    """The name that config.json has for one of `ENCODERS`."""
    return _CLASSES[family][1]


def encoder_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The encoder in transformers: eager attention, eval mode."""
    return transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def hidden_states(oracle: transformers.PreTrainedModel, text: list[int]) -> torch.Tensor:
    """The oracle's last hidden states for a text alone, [tokens, hidden_size]."""
    ids = torch.tensor([text])
    return oracle(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]


def write_word_pieces(folder: Path, pair_types: tuple[int, int] = (0, 0)) -> None:
    """Write a tokenizer of BERT's kind beside a model, with the truncation and the padding that such files have.

    Args:
        pair_types: of the tokens of both texts of a pair.
    """
    tokenizer = word_piece_tokenizer()
    marks = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    first, second = pair_types
    pair = f"[CLS]:{first} $A:{first} [SEP]:{first} $B:{second} [SEP]:{second}"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=marks)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    write_folder(folder, tokenizer)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
