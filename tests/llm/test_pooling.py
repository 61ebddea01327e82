"""Vectors and scores of small random models, against transformers and a plain reference of what follows its states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter, PoolingType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.embedders import Modules, States, add_end, judged, make_classifier, make_embedder, make_judge, pooled, unit
from tests.model.weights.gguf_writer import write_gguf
from tests.seeding import seed_for
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from tokenmill.model.pooling.pair_template import INSTRUCTION, QWEN3

SEED = seed_for(__name__)
TEXTS = ["the quick brown fox", "hello", "the quick brown fox jumps over the lazy dog " * 5, "a mill"]


@contextmanager
def running(folder: Path, dtype: str = "float32", **options: Any) -> Iterator[LLM]:
    """Steps of 32 tokens, so that prompts come in chunks."""
    sizes: dict[str, Any] = {"num_pages": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    with LLM(folder, dtype=dtype, **{**sizes, **options}) as llm:
        yield llm


def vectors(llm: LLM, texts: list[Any], **options: Any) -> list[np.ndarray]:
    return [np.array(one.outputs.embedding) for one in llm.embed(texts, use_tqdm=False, **options)]


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("is_bare", [False, True])
def test_an_embedder_is_what_its_modules_say(tmp_path: Path, is_new: bool, is_bare: bool) -> None:
    modules = Modules(is_new=is_new, is_bare=is_bare)
    folder = make_embedder(tmp_path / "e", modules, seed=SEED)
    states = States(folder)
    wanted = [unit(pooled(states(text), modules.modes or ())) for text in TEXTS]
    with running(folder) as llm:
        assert llm.info.pooling is not None and llm.info.pooling.size == 32
        np.testing.assert_allclose(vectors(llm, TEXTS), wanted, atol=2e-5)
        alone = [vectors(llm, [text])[0] for text in TEXTS]
        np.testing.assert_array_equal(vectors(llm, TEXTS), alone), "bit for bit"
        raw = vectors(llm, TEXTS[:1], normalize=False)[0]
        np.testing.assert_allclose(raw, states(TEXTS[0])[-1], atol=2e-4)
        with pytest.raises(InvalidRequest, match="this model embeds texts: use /v1/embeddings"):
            llm.generate("x")
        with pytest.raises(InvalidRequest, match="have 32 numbers, cannot be shortened"):
            llm.embed("x", dimensions=8)
        with pytest.raises(InvalidRequest, match=r"embeds texts.*no labels"):
            llm.classify("x")
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(scores, [wanted[0] @ one for one in wanted], atol=2e-5)
        ranked = llm.rerank(TEXTS[0], TEXTS, top_n=2, use_tqdm=False)
        assert [one.index for one in ranked] == sorted(range(4), key=lambda index: -scores[index])[:2]
        with pytest.raises(InvalidRequest, match="3 queries and 4 text_2"):
            llm.score(TEXTS[:3], TEXTS)
    with running(folder, "bfloat16") as llm:
        for vector, want in zip(vectors(llm, TEXTS), wanted, strict=True):
            assert vector @ want > 0.999


def test_modes_together_with_dense_layers_prompts_and_limits(tmp_path: Path, rng: Any) -> None:
    numbers = np.random.default_rng(SEED)
    modes = tuple(
        map(
            str,
            rng.choice(["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"], 3, replace=False),
        )
    )
    first = numbers.normal(size=(40, 96)).astype(np.float32) / 8
    second = numbers.normal(size=(24, 40)).astype(np.float32) / 6
    bias = numbers.normal(size=40).astype(np.float32)
    dense: tuple[dict[str, Any], ...] = (
        {
            "in_features": 96,
            "out_features": 40,
            "weight": torch.from_numpy(first),
            "bias_values": torch.from_numpy(bias),
        },
        {
            "in_features": 40,
            "out_features": 24,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "weight": torch.from_numpy(second),
        },
    )
    modules = Modules(
        modes=modes,
        dense=dense,
        include_prompt=False,
        prompts={"query": "find the fox: ", "document": "a text: "},
        default_prompt="document",
        max_seq_length=40,
    )
    folder = make_embedder(tmp_path / "e", modules, seed=SEED)
    states = States(folder)

    def wanted(text: str, name: str) -> np.ndarray:
        prefix = modules.prompts[name]
        skipped = len(states.tokenizer.encode(prefix, add_special_tokens=False).ids)
        found = pooled(states(prefix + text), modes, skipped)
        return second @ np.tanh(first @ found + bias)

    with running(folder, matryoshka=True) as llm:
        assert llm.info.max_model_len == 40
        short = [TEXTS[0], TEXTS[1], TEXTS[3]]
        np.testing.assert_allclose(vectors(llm, short), [unit(wanted(text, "document")) for text in short], atol=2e-5)
        queries = vectors(llm, short, prompt_name="query", dimensions=10)
        np.testing.assert_allclose(queries, [unit(wanted(text, "query")[:10]) for text in short], atol=2e-5)
        scores = [one.outputs.score for one in llm.score(short[0], short, use_tqdm=False)]
        query = unit(wanted(short[0], "query"))
        np.testing.assert_allclose(scores, [query @ unit(wanted(text, "document")) for text in short], atol=2e-5)
        with pytest.raises(InvalidRequest, match=r"input\[1\] has \d+ tokens; the maximum context length is 40"):
            llm.embed(["x", TEXTS[2]])
        with pytest.raises(InvalidRequest, match="no prompt 'passage'; it has query, document"):
            llm.embed("x", prompt_name="passage")
        with pytest.raises(InvalidRequest, match="at most 24, got 25"):
            llm.embed("x", dimensions=25)


@pytest.mark.parametrize("name", ["Gemma3TextModel", "Gemma3ForCausalLM"])
def test_embedding_gemma_sees_both_ways_and_ends_in_two_layers(tmp_path: Path, name: str, rng: Any) -> None:
    first, second = (
        torch.tensor(rng.standard_normal(shape) * 0.2, dtype=torch.float32) for shape in ((80, 32), (32, 80))
    )
    fields = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    dense = tuple(
        {"in_features": one.shape[1], "out_features": one.shape[0], **fields, "weight": one} for one in (first, second)
    )
    prompts = {"query": "the quick | ", "document": "a | "}
    modules = Modules(modes=("mean",), dense=dense, prompts=prompts, is_new=True)
    both = {"use_bidirectional_attention": True, "sliding_window": 12}
    folder = make_embedder(tmp_path / "e", modules, "gemma3", seed=SEED, **both)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    states = States(folder)
    wanted = [
        unit(pooled(states(prompts["query"] + text), ("mean",)) @ first.T.double().numpy() @ second.T.double().numpy())
        for text in TEXTS
    ]
    with running(folder) as llm:
        np.testing.assert_allclose(vectors(llm, TEXTS, prompt_name="query"), wanted, atol=3e-5)
        with pytest.raises(InvalidRequest, match="this model embeds texts"):
            llm.generate("x")


def test_a_text_that_is_cut_loses_its_end_and_keeps_what_the_tokenizer_adds(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "e", seed=SEED)
    states = States(folder)
    ids = states.tokenizer.encode(TEXTS[2]).ids
    with running(folder, max_model_len=48) as llm:
        for count, left in ((-1, 48), (7, 7)):
            (found,) = vectors(llm, [TEXTS[2]], truncate_prompt_tokens=count)
            want = states([*ids[: left - 1], ids[-1]])[-1]
            np.testing.assert_allclose(found, unit(want), atol=2e-5)
        spelled, plain = vectors(llm, [TEXTS[0] + "<|endoftext|>", TEXTS[0]])
        np.testing.assert_array_equal(spelled, plain), "it has its end once"


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "gemma3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_heads_of_decoders_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    folder = make_classifier(tmp_path / "c", num_labels, family, seed=SEED)
    add_end(folder, "<|im_end|>")  # transformers pools none that pads
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with running(folder) as llm:
        found = llm.classify(TEXTS, use_tqdm=False)
        raw = llm.classify(TEXTS, use_activation=False, use_tqdm=False)
        for one, logits in zip(found, raw, strict=True):
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([one.prompt_token_ids])).logits[0]
            np.testing.assert_allclose(logits.outputs.probs, want, atol=2e-5)
            probs = want.sigmoid() if num_labels == 1 else want.softmax(-1)
            np.testing.assert_allclose(one.outputs.probs, probs, atol=2e-5)
            assert one.outputs.label == f"LABEL_{int(want.argmax())}"
        if num_labels == 1:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            for text, one in zip(TEXTS, llm.score("hello", TEXTS, use_tqdm=False), strict=True):
                assert one.prompt_token_ids == tokenizer.encode("hello", text).ids, "as the tokenizer joins them"
                with torch.inference_mode():
                    want = model(input_ids=torch.tensor([one.prompt_token_ids])).logits.sigmoid()
                np.testing.assert_allclose(one.outputs.score, want.item(), atol=2e-5)
            (cut,) = llm.score("hello", [TEXTS[2]], truncate_prompt_tokens=20, use_tqdm=False)
            tokenizer.enable_truncation(20)
            assert cut.prompt_token_ids == tokenizer.encode("hello", TEXTS[2]).ids
        else:
            with pytest.raises(InvalidRequest, match="classifies texts: use /classify; it does not compare"):
                llm.rerank("hello", TEXTS)
        with pytest.raises(InvalidRequest, match="makes no vectors"):
            llm.embed("x")


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda values: values),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda values: values),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
    ],
)
def test_the_activation_is_the_one_that_the_files_name(tmp_path: Path, fields: Any, activation: Any) -> None:
    folder = make_classifier(tmp_path / "c", 3, seed=SEED)
    config = json.loads((folder / "config.json").read_text())
    config |= fields | {"id2label": {"0": "bad", "1": "good", "2": "other"}}
    (folder / "config.json").write_text(json.dumps(config))
    with running(folder) as llm:
        (found,) = llm.classify("hello", use_tqdm=False)
        (raw,) = llm.classify("hello", use_activation=False, use_tqdm=False)
        want = activation(torch.tensor(raw.outputs.probs))
        np.testing.assert_allclose(found.outputs.probs, want, atol=1e-6)
        assert found.outputs.label == ("bad", "good", "other")[int(want.argmax())]


@pytest.mark.parametrize("ties", [False, True])
def test_a_reranker_that_answers_yes_or_no(tmp_path: Path, ties: bool) -> None:
    folder = make_judge(tmp_path / "j", seed=SEED, tie_word_embeddings=ties)
    document = TEXTS[2]

    def text(query: str, found: str, instruction: str = INSTRUCTION) -> str:
        return QWEN3.replace("{instruction}", instruction).replace("{query}", query).replace("{document}", found)

    with running(folder, task="rerank", num_pages=128, max_model_len=500) as llm:
        logits = [one.outputs.score for one in llm.score("{document}?", TEXTS, use_activation=False, use_tqdm=False)]
        wanted = [judged(folder, text("{document}?".replace("{", "<").replace("}", ">"), one)) for one in TEXTS]
        assert not np.allclose(logits, wanted), "braces of a query stay as they are"
        logits = [one.outputs.score for one in llm.score("what", TEXTS, use_activation=False, use_tqdm=False)]
        np.testing.assert_allclose(logits, [judged(folder, text("what", one)) for one in TEXTS], atol=1e-4)
        scores = [one.outputs.score for one in llm.score("what", TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)
        again = llm.score("what", TEXTS[::-1], use_tqdm=False)
        assert all(one.num_cached_tokens > 100 for one in again), "the frame and the query are computed once"
        (own,) = llm.score("what", ["x"], instruction="Say yes", use_activation=False, use_tqdm=False)
        np.testing.assert_allclose(own.outputs.score, judged(folder, text("what", "x", "Say yes")), atol=1e-4)
        with pytest.raises(InvalidRequest, match="scores pairs of texts: use /rerank"):
            llm.generate("x")
        with pytest.raises(InvalidRequest, match=r"text_2\[0\] has \d+ tokens; the maximum context length is 500"):
            llm.score("what", [document * 20])
        (cut,) = llm.score("what", [document * 20], truncate_prompt_tokens=-1, use_tqdm=False)
        frame = llm.get_tokenizer().encode(text("what", ""))
        assert len(frame) < len(cut.prompt_token_ids) <= 500
        shown = llm.get_tokenizer().decode(cut.prompt_token_ids)
        assert shown.startswith(text("what", document)[:300]) and shown.endswith("<think>\n\n</think>\n\n")
        (cut,) = llm.score("what " * 900, ["x"], truncate_prompt_tokens=-1, use_tqdm=False)
        shown = llm.get_tokenizer().decode(cut.prompt_token_ids)
        assert len(cut.prompt_token_ids) <= 500 and shown.endswith("\n<Document>: " + QWEN3.split("{document}")[1])
    with running(folder, task="rerank", rerank_template="{query} and {document}: ") as llm:
        (own,) = llm.score("what", ["x"], use_activation=False, use_tqdm=False)
        np.testing.assert_allclose(own.outputs.score, judged(folder, "what and x: "), atol=1e-4)
        with pytest.raises(InvalidRequest, match="instruction: this model takes none"):
            llm.score("what", ["x"], instruction="Say yes")


def test_a_score_of_tokens_that_files_name(tmp_path: Path) -> None:
    folder = make_judge(tmp_path / "j", seed=SEED)
    with running(folder, task="rerank", num_pages=128) as llm:
        wanted = [one.outputs.score for one in llm.score("what", TEXTS, use_tqdm=False)]
    config = json.loads((folder / "config.json").read_text())
    named = config | {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    (folder / "config.json").write_text(json.dumps(named))
    with running(folder, num_pages=128) as llm:
        assert [one.outputs.score for one in llm.score("what", TEXTS, use_tqdm=False)] == wanted
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_LogitScore").mkdir()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    score = {"true_token_id": ids["yes"], "false_token_id": ids["no"]}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(zip(("", "1_LogitScore"), kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    with running(folder, num_pages=128) as llm:
        assert [one.outputs.score for one in llm.score("what", TEXTS, use_tqdm=False)] == wanted


def test_without_modules_the_assumption_is_said(tmp_path: Path, caplog: Any) -> None:
    folder = make_embedder(tmp_path / "e", Modules(modes=None), seed=SEED)
    with running(folder) as llm:
        assert llm.info.pooling is None, "config.json says that it generates, and nothing says otherwise"
    with running(folder, task="embed") as llm:
        (found,) = vectors(llm, [TEXTS[0]])
        np.testing.assert_allclose(found, unit(States(folder)(TEXTS[0])[-1]), atol=2e-5)
    assert "no modules.json with a Pooling module: last pooling is assumed" in caplog.text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with running(folder) as llm:
        np.testing.assert_array_equal(vectors(llm, [TEXTS[0]])[0], found)
    with (
        pytest.raises(InvalidConfig, match="--task generate: Qwen3Model has no output head"),
        running(folder, task="generate"),
    ):
        pass
    with pytest.raises(InvalidConfig, match="--task rerank: Qwen3Model has no head"), running(folder, task="rerank"):
        pass


def test_unknown_modules_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "e", seed=SEED)
    listed = json.loads((folder / "modules.json").read_text())

    def refused(match: str, **files: Any) -> None:
        copy = shutil.copytree(folder, tmp_path / "copy")
        for name, content in files.items():
            path = copy / name.replace("__", "/").replace("_json", ".json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(InvalidCheckpoint, match=match), running(copy):
            pass
        shutil.rmtree(copy)

    odd = {"idx": 1, "name": "1", "path": "1_X", "type": "sentence_transformers.models.CNN"}
    refused("the module sentence_transformers.models.CNN is not supported", modules_json=[listed[0], odd])
    refused("leads out of the folder", modules_json=[{**odd, "path": "../x"}])
    refused("Pooling stands behind Normalize", modules_json=[listed[0], listed[2], listed[1]])
    refused("is not a list of modules", modules_json="{}")
    refused("pooling_mode 'first' is not supported", **{"1_Pooling__config_json": {"pooling_mode": "first"}})
    refused("max_seq_length must be at least 1", sentence_bert_config_json={"max_seq_length": 0})
    refused("SparseEncoder", config_sentence_transformers_json={"model_type": "SparseEncoder"})
    dense = {**odd, "type": "sentence_transformers.models.Dense"}
    fields = {"in_features": 32, "out_features": 8, "activation_function": "builtins.eval"}
    refused("activation_function 'builtins.eval'", modules_json=[*listed[:2], dense], **{"1_X__config_json": fields})
    (folder / "1_X").mkdir()
    save_file(
        {"linear.weight": torch.zeros(8, 31), "linear.bias": torch.zeros(8)}, folder / "1_X" / "model.safetensors"
    )
    fields = {"in_features": 32, "out_features": 8}
    refused(r"linear has shape \[8, 31\]", modules_json=[*listed[:2], dense], **{"1_X__config_json": fields})
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"odd.weight": torch.zeros(2)}, folder / "model.safetensors")
    refused("tensor model.odd.weight has no place")


def test_gguf_files_of_embedders_and_rerankers(tmp_path: Path) -> None:
    judge = make_judge(tmp_path / "j", seed=SEED, tie_word_embeddings=True)
    end = Tokenizer.from_file(str(judge / "tokenizer.json")).token_to_id("<|endoftext|>")

    def as_embedder(writer: GGUFWriter) -> None:
        writer.add_pooling_type(PoolingType.LAST)
        writer.add_eos_token_id(end)
        writer.add_add_eos_token(True)

    path = write_gguf(judge, "qwen3", add=as_embedder)
    states = States(judge)
    ids = [*states.tokenizer.encode(TEXTS[0]).ids, end]
    with running(path.rename(tmp_path / "embedder.gguf")) as llm:
        assert llm.info.pooling is not None
        (found,) = llm.embed(TEXTS[0], use_tqdm=False)
        assert found.prompt_token_ids == ids
        np.testing.assert_allclose(found.outputs.embedding, unit(states(ids)[-1]), atol=2e-5)

    head = np.random.default_rng(SEED).normal(size=(2, 32)).astype(np.float32)

    def as_reranker(writer: GGUFWriter) -> None:
        writer.add_pooling_type(PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_tensor("cls.output.weight", head)
        writer.add_chat_template([{"name": "rerank", "template": "{query} or {document}?"}])

    with running(write_gguf(judge, "qwen3", add=as_reranker).rename(tmp_path / "reranker.gguf")) as llm:
        scores = [one.outputs.score for one in llm.score("what", TEXTS, use_activation=False, use_tqdm=False)]
        last = [states(f"what or {text}?")[-1] for text in TEXTS]
        np.testing.assert_allclose(scores, [(head[0] - head[1]) @ one for one in last], atol=1e-4)
