"""Ranks that share a context have the bits of one rank alone: families of text, lengths, chunks and decodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.engine.parallel import threads
from tests.engine.parallel.test_forward import native_form, needs_native
from tests.engine.parallel.threads import Form, context_ranks
from tests.model.models.test_native_decoder import FORMATS
from tests.paging import Chunks, PagedRequests, in_arrays
from tests.tiers import scaled
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.engine.parallel import context as context_module
from tokenmill.engine.parallel.layout import StepShape
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.context import own_rows
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.host_decoder import HostDecoder
from tokenmill.model.models.host_model import on_host
from tokenmill.model.sharding.shard import check_context
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model

RECURRENT = {"lfm2", "lfm2_moe", "granite_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
TEXT = [family for family in FAMILIES if family not in RECURRENT]
LONGEST = 1300
FLOATS = Form(lambda: TorchKernels("float32", "cpu"), "cpu")
PAGES = LONGEST // 16 + 2


def checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Path:
    sizes = {"hidden_size": 64, "max_position_embeddings": 2048, **shape}  # heads of 16 numbers and more
    return make_checkpoint(folder, family, tokenizer=False, dtype=dtype, **sizes)


def lengths_of(rng: np.random.Generator) -> list[int]:
    """One request at the edge of a KV split, a long one, and some short ones."""
    edge = int(rng.choice([511, 512, 513, 1023, 1024, 1025]))
    return [edge, int(rng.integers(600, LONGEST)), *rng.integers(1, 90, 3).tolist()]


def compare(folder: Path, form: Form, size: int, requests: PagedRequests, schedule: Sequence[Chunks]) -> None:
    """Run the steps on one rank and on several, with some outputs, and look for the same bits."""
    kernels = form.make()
    decoder = load_model(folder, read_architecture(folder), kernels)
    attention = form.attend(decoder, kernels, requests.num_pages)
    alone, rng = on_host(decoder, attention), np.random.default_rng(len(schedule))
    step = StepShape(LONGEST, 8, PAGES)
    with context_ranks(folder, size, form, requests.num_pages, step) as (together, own):
        for chunks in schedule:
            batch = requests.batch(chunks)
            count = len(batch.token_ids)
            kept = np.sort(rng.permutation(count)[: rng.integers(0, min(count, 40) + 1)])
            batch = in_arrays(msgspec.structs.replace(batch, output_indices=torch.from_numpy(kept)))
            want, got = alone.forward(batch, attention), together.forward(batch, own)
            assert np.array_equal(got, want), f"{size} ranks, {chunks}, outputs {kept.tolist()}"
        if len(got):
            assert np.array_equal(together.logits(got), alone.logits(want))
            assert np.array_equal(together.argmax(got), alone.argmax(want))


def random_requests(lengths: Sequence[int], rng: np.random.Generator) -> PagedRequests:
    return PagedRequests([rng.integers(0, 331, length).tolist() for length in lengths], 16, rng)


def few_steps(lengths: Sequence[int], rng: np.random.Generator) -> list[Chunks]:
    """Steps of decodes and of chunks, the long ones at random places: in all less than a page of them."""
    left, schedule = list(lengths), []
    while any(left):
        chosen = [request for request in rng.permutation(len(left)).tolist() if left[request] and rng.random() < 0.8]
        counts = [1 if rng.random() < 0.3 else int(rng.integers(1, min(400, left[request]) + 1)) for request in chosen]
        for request, count in zip(chosen, counts, strict=True):
            left[request] -= count
        if chosen:
            schedule.append(list(zip(chosen, counts, strict=True)))
    return schedule


@needs_native
@pytest.mark.parametrize("family", TEXT)
def test_a_shared_context_has_the_bits_of_one_rank(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, family)
    lengths = lengths_of(rng)
    form = native_form(FORMATS[rng.choice(list(FORMATS))], rng)
    compare(folder, form, 2, random_requests(lengths, rng), few_steps(lengths, rng))


@pytest.mark.parametrize("family", TEXT)
def test_a_shared_context_in_float32_has_the_bits_of_one_rank(
    family: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Every rank makes the same products of the same shapes."""
    lengths = lengths_of(rng)
    folder = checkpoint(tmp_path, family, torch.float32)
    compare(folder, FLOATS, 2, random_requests(lengths, rng), few_steps(lengths, rng))


@needs_native
@pytest.mark.parametrize("size", [2, 3, 4])
def test_decodes_of_long_contexts_are_shared_by_pieces(size: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """Alone and a few at a time, at the edges of splits; requests that share pages have their keys read once."""
    folder = checkpoint(tmp_path, "qwen3", num_attention_heads=8, num_key_value_heads=1)
    prefix = rng.integers(0, 331, 1100).tolist()
    requests = PagedRequests([prefix + rng.integers(0, 331, 40).tolist() for _ in range(5)], 16, rng)
    shared = 1100 // 16
    for request in range(1, 5):
        requests.pages[request][:shared] = requests.pages[0][:shared]
    schedule: list[Chunks] = [[(0, 509)], *[[(0, 1)] for _ in range(6)], [(0, 585)]]
    compare_shared = [[(request, 1) for request in range(5)], [(1, 2), (3, 1), (4, 3)], [(0, 20), (2, 3), (4, 1)]]
    form = Form(native_form(FORMATS["bf16"], rng).make, "native", torch.int8 if size == 3 else None)
    for request in range(1, 5):
        requests.computed[request] = shared * 16
    compare(folder, form, size, requests, [*schedule, *compare_shared, *compare_shared])


@needs_native
def test_a_pass_of_a_call_a_kernel_has_the_bits_of_one_rank(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, "qwen3_moe")
    lengths = lengths_of(rng)

    def host(decoder: Any, attention: Any) -> HostDecoder:
        return HostDecoder(decoder)

    with patch.object(threads, "on_host", host), patch(f"{__name__}.on_host", host):
        compare(folder, native_form(FORMATS["bf16"], rng), 2, random_requests(lengths, rng), few_steps(lengths, rng))


@needs_native
def test_tiles_stay_whole_where_partial_results_have_no_room(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, "qwen3")
    requests = random_requests([1200], rng)
    with patch.object(context_module, "PARTIAL_NUMBERS", 16):
        compare(folder, native_form(FORMATS["bf16"], rng), 2, requests, [[(0, 1190)], *[[(0, 1)] for _ in range(10)]])


def test_rows_of_all_ranks_are_those_of_the_step_and_see_what_they_saw(rng: np.random.Generator) -> None:
    for _ in range(scaled(60)):
        size, lengths = int(rng.integers(2, 6)), rng.integers(1, 300, int(rng.integers(1, 9))).tolist()
        requests = random_requests(lengths, rng)
        chunks = [(request, int(rng.integers(1, length + 1))) for request, length in enumerate(lengths)]
        batch = in_arrays(requests.batch(chunks))
        count = len(batch.token_ids)
        kept = np.sort(rng.permutation(count)[: rng.integers(0, count + 1)])
        batch = msgspec.structs.replace(batch, output_indices=kept)
        parts = [own_rows(batch, rank, size) for rank in range(size)]
        assert sorted(row for own, _ in parts for row in rows_of(own)) == sorted(rows_of(batch))
        outputs = {}
        for own, places in parts:
            outputs |= dict(zip(places.tolist(), own.slots[own.output_indices].tolist(), strict=True))
        assert [outputs[place] for place in range(len(kept))] == batch.slots[kept].tolist()
        pairs = [slot for own, _ in parts for slot in np.unique(own.slots // 2).tolist()]
        assert len(pairs) == len(set(pairs)), "two ranks write values that lie side by side"
        sizes = [len(own.token_ids) for own, _ in parts]
        assert max(sizes) - min(sizes) <= 6


def rows_of(batch: ForwardBatch) -> list[tuple[int, ...]]:
    """Each token with its id, position, slot, first page and the last position that it sees."""
    rows = []
    for request, (start, end) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        for token in range(start, end):
            seen = int(batch.context_lens[request]) - (end - 1 - token)
            pages = tuple(batch.page_table[request, : -(-seen // 16)].tolist())
            rows.append(
                (int(batch.token_ids[token]), int(batch.positions[token]), int(batch.slots[token]), seen, *pages)
            )
    return rows


@pytest.mark.parametrize(
    ("family", "size", "sentence"),
    [
        ("lfm2", 2, "a model with recurrent states has no context to share"),
        ("qwen3", 65, "at most 64 ranks share a context"),
    ],
)
def test_models_without_a_context_to_share_are_refused(family: str, size: int, sentence: str, tmp_path: Path) -> None:
    architecture = read_architecture(make_checkpoint(tmp_path, family, tokenizer=False))
    with pytest.raises(InvalidConfig, match=f"--context-parallel-size {size}: {sentence}"):
        check_context(architecture, size)


@needs_native
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the other rank ends, too
def test_a_rank_that_gives_up_ends_the_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint(tmp_path, "qwen3")
    requests = random_requests([700], rng)
    form = native_form(FORMATS["bf16"], rng)
    with context_ranks(folder, 2, form, requests.num_pages, StepShape(LONGEST, 8, PAGES)) as (together, own):
        memory = together._memory
        batch = in_arrays(requests.batch([(0, 690)]))
        with (
            patch.object(memory, "post", lambda command: memory.give_up("it is tired")),
            pytest.raises(EngineFailed, match="it is tired"),
        ):
            together.forward(batch, own)
