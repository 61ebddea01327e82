"""Prompts of gaps, written out by hand for the marks of each family."""

import random

import pytest
from tokenizers import Tokenizer as Backend

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer
from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.infill import SPELLINGS, ContextFile, Infill, Mark
from tokenmill.core.messages import GenerateText
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.frontend.attempt import ANY_TIME
from tokenmill.serving.frontend.infill_prompt import InfillPrompt
from tokenmill.serving.frontend.library_backend import LibraryBackend
from tokenmill.serving.frontend.prompt_encoder import PromptEncoder
from tokenmill.serving.frontend.prompt_processor import PreparedPrompt, PromptProcessor
from tokenmill.serving.frontend.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
GAP = Infill("def add(a, b):\n    ", "\n\nprint(add(1, 2))", "return")
FILES = [ContextFile("old.py", "x = 1"), ContextFile("naïve.py", "")]


def tokenizer_with(*marks: str, **config: str) -> Tokenizer:
    backend: Backend = byte_level_tokenizer()
    backend.add_special_tokens(list(marks))
    return Tokenizer(LibraryBackend(backend, None), config=config)


def prompt_text(tokenizer: Tokenizer, infill: Infill) -> str:
    """The prompt as its tokens spell it."""
    ids = InfillPrompt(tokenizer, tokenizer.vocab_size).encode(infill, lambda text: tokenizer.encode(text, False))
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("number", range(8))
def test_the_marks_of_every_family_stand_around_the_texts(number):
    prefix, suffix, middle = (SPELLINGS[mark][number] for mark in (Mark.PREFIX, Mark.SUFFIX, Mark.MIDDLE))
    tokenizer = tokenizer_with(prefix, suffix, middle)
    expected = f"{prefix}{GAP.prefix}{suffix}{GAP.suffix}{middle}{GAP.start}"
    assert prompt_text(tokenizer, GAP) == expected
    # Without marks for files, their texts come first.
    assert prompt_text(tokenizer, Infill("a", "b", files=FILES)) == f"x = 1{prefix}a{suffix}b{middle}"


def test_files_stand_between_marks_of_their_own():
    expected = (
        "<|repo_name|>repository\n<|file_sep|>old.py\nx = 1<|file_sep|>naïve.py\n<|file_sep|>current\n"
        "<|fim_prefix|>a<|fim_suffix|><|fim_middle|>"
    )
    assert prompt_text(tokenizer_with(*random.sample(QWEN, len(QWEN))), Infill("a", "", files=FILES)) == expected


def test_marks_that_the_checkpoint_names_come_before_usual_ones():
    own = {f"fim_{mark}_token": f"<{mark}>" for mark in ("prefix", "suffix", "middle")}
    assert prompt_text(tokenizer_with(*QWEN, *own.values(), **own), Infill("a", "b")) == "<prefix>a<suffix>b<middle>"


@pytest.mark.parametrize("missing", range(3))
def test_a_vocabulary_without_a_mark_is_refused_by_name(missing):
    tokenizer = tokenizer_with(*(mark for i, mark in enumerate(QWEN) if i != missing))
    with pytest.raises(InvalidRequest, match=f"marks the {('prefix', 'suffix', 'middle')[missing]};") as caught:
        prompt_text(tokenizer, GAP)
    assert caught.value.param == "suffix"


def test_marks_beyond_the_models_vocabulary_are_not_there():
    tokenizer = tokenizer_with(*QWEN)
    first = min(tokenizer.token_id(mark) for mark in QWEN)
    assert InfillPrompt(tokenizer, first).ids == {}


def message(infill: Infill, **fields) -> GenerateText:
    return GenerateText(ids=["a"], infill=infill, **{"params": SamplingParams(stop_token_ids=(5,))} | fields)


def test_a_filling_ends_at_any_mark_unless_ends_are_ignored():
    tokenizer = tokenizer_with(*QWEN)
    marks = [tokenizer.token_id(mark) for mark in QWEN]
    processor = PromptProcessor(tokenizer, None, any_whitespace=False, max_string_length=100)
    prepared = processor.prepare(message(GAP))
    assert isinstance(prepared, PreparedPrompt)
    assert prepared.params.stop_token_ids == (5, *sorted(marks))
    ignored = processor.prepare(message(GAP, params=SamplingParams(ignore_eos=True)))
    assert isinstance(ignored, PreparedPrompt)
    assert ignored.params.stop_token_ids == ()


def test_a_gap_is_not_cut_and_must_fit():
    encoder = PromptEncoder(tokenizer_with(*QWEN), None)
    encoder.max_model_len = 50
    with pytest.raises(InvalidRequest, match="cannot be cut"):
        encoder.prompt(message(GAP, truncate_prompt_tokens=4), ANY_TIME)
    for long in (GAP.suffix * 5, GAP.suffix * 10_000):
        with pytest.raises(PromptTooLong):
            encoder.prompt(message(Infill("a", long)), ANY_TIME)
