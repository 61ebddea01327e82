"""Attention on GPU memory, put together from parts, against the reference: mixed batches over poisoned pages."""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest
import torch

from tests.canonical import export, import_
from tests.model.attention.test_backends import POISONS, Case, fill, random_case
from tests.model.kernels.gpu import DEVICE
from tests.paging import PagedRequests, attention_layers, make_attention, name_of
from tokenmill.model.attention.backends.flash import FlashAttention, find_flash
from tokenmill.model.attention.backends.flashinfer import FlashInferAttention
from tokenmill.model.attention.backends.triton import TritonDecodes, TritonPrompts
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.tensor_kv import TokenMajorKV
from tokenmill.model.kernels.heads import RotaryTables


def gathered(memory: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return memory[table.long()].flatten(0, 1)[:length]


def attention_over_pages(q, memory, page_table, query_starts, context_lens, window, scale, sinks=None):
    """Compute what both libraries promise, written out: causal, aligned at the end, keys in pages."""
    output = torch.empty_like(q)
    for request, length in enumerate(context_lens.tolist()):
        start, end = query_starts[request : request + 2].tolist()
        k, v = (gathered(part, page_table[request], length).float() for part in memory)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        positions = torch.arange(length - (end - start), length)[:, None]
        places = torch.arange(length)
        hidden = places > positions
        if window is not None:
            hidden |= places <= positions - window
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, end - start, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return output


def stand_in_for_torch(out, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """`varlen_attn_out` with a table of pages; checks what the library would, its names among it."""
    real = find_flash()
    if real is not None:
        inspect.signature(real).bind(out, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    assert cu_seq_k is None
    assert max_q == (cu_seq_q[1:] - cu_seq_q[:-1]).max()
    assert max_k == options["seqused_k"].max()
    assert options["enable_gqa"] == (q.shape[1] != k.shape[2])
    left, right = options["window_size"]
    assert right == 0
    window = None if left == -1 else left + 1
    lens = options["seqused_k"]
    out.copy_(attention_over_pages(q, (k, v), options["block_table"], cu_seq_q, lens, window, options["scale"]))


class StandInWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`: pages as one list with bounds."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, starts, bounds, pages, last, heads, kv_heads, head_dim, page_size, **options) -> None:
        assert options["causal"]
        self.starts, self.options = starts, options
        counts = (bounds[1:] - bounds[:-1]).tolist()
        self.lengths = (bounds[1:] - bounds[:-1] - 1) * page_size + last
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, part in enumerate(pages.split(counts)):
            self.table[row, : len(part)] = part

    def run(self, q, layer, out) -> None:
        left = self.options["window_left"]
        window = None if left == -1 else left + 1
        scale = self.options["sm_scale"]
        out.copy_(attention_over_pages(q, layer, self.table, self.starts, self.lengths, window, scale))


def implementations(kind: str, case: Case):
    spec = case.spec
    flash = FlashAttention(spec, stand_in_for_torch)
    library = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandInWrapper)
    # A wrapper holds the plan of one part of the batch: each part has its own.
    infer = [FlashInferAttention(spec, case.page_size, name_of(case.dtype), "cpu", library) for _ in range(2)]
    return {
        "triton": (TritonPrompts(), TritonDecodes(spec, 12)),
        "invariant": (TritonPrompts(), TritonPrompts(are_single=bool(case.lengths[0] % 2))),
        "flash": (flash, flash),
        "flashinfer": tuple(infer),
        "flash,triton": (flash, TritonDecodes(spec, 1)),
    }[kind]


def run_both(case: Case, kind: str, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    requests = PagedRequests([[0] * length for length in case.lengths], case.page_size, rng)
    requests.computed = case.computed
    made = (case.spec, requests.num_pages, case.page_size, case.dtype)
    reference = make_attention("reference", *made)
    fill(reference.kv, float(rng.choice(POISONS)), requests, case)
    memory = TokenMajorKV(*made[:3], name_of(case.dtype), DEVICE)
    pages = range(requests.num_pages)
    import_(memory, pages, export(reference.kv, pages))
    paged = PagedAttention(memory, *implementations(kind, case))

    batch = requests.batch(case.chunks)
    spec = case.spec
    qkv = torch.randn(len(batch.token_ids), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    angles, has_rope = torch.randn(max(case.lengths), spec.head_dim // 2), rng.random() < 0.7
    outputs = []
    for backend, device in ((reference, "cpu"), (paged, DEVICE)):
        own = on_device(batch, device)
        plan = backend.plan(own)
        rotary = RotaryTables(angles.cos().to(device), angles.sin().to(device)) if has_rope else None
        layers = attention_layers(spec, rotary, None, case.window)
        outputs.append(torch.stack([backend.forward(qkv.clone().to(device), layer, plan) for layer in layers]).cpu())
    return outputs[0], outputs[1]


def on_device(batch: ForwardBatch, device: str) -> ForwardBatch:
    moved = {
        name: getattr(batch, name).to(device)
        for name in ("token_ids", "positions", "slots", "page_table", "output_indices")
    }
    return ForwardBatch(
        **moved, query_lens=batch.query_lens, context_lens=batch.context_lens, query_starts=batch.query_starts
    )


@pytest.mark.parametrize("kind", ["triton", "invariant", "flash", "flashinfer", "flash,triton"])
def test_every_backend_equals_the_reference_over_poisoned_memory(kind: str, rng: np.random.Generator) -> None:
    if DEVICE != "cpu" and "flash" in kind:
        pytest.skip("the stand-ins for the libraries are for CPUs; tools/gpu_check.py runs the real ones")
    for page_size in (1, 16) if kind == "triton" else (int(rng.choice([1, 2, 4, 16])),):
        case = random_case(rng, page_size)
        case.lengths = [min(length, 70) for length in case.lengths][:4]
        case.chunks = [(request, min(count, case.lengths[request])) for request, count in case.chunks if request < 4]
        # Decodes at the front: what a step of a running engine looks like.
        case.chunks = sorted(case.chunks, key=lambda chunk: chunk[1] > 1 and rng.random() < 0.8)
        want, got = run_both(case, kind, rng)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, case=case: f"{text}\n{case}")


def test_pages_come_back_as_they_went(rng: np.random.Generator) -> None:
    memory = TokenMajorKV(AttentionSpec(2, 4, 2, 8), 6, 4, "float32", "cpu")
    data = torch.randn(2, 2, 3, 4, 2, 8)
    import_(memory, [5, 1, 3], data)
    assert torch.equal(export(memory, [5, 1, 3]), data)
    assert torch.equal(memory.layer(1)[0][5], data[1, 0, 0])
