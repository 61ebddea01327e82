"""Check the choice of an attention backend, its reasons and its refusals, on an imagined GPU."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.runner.fake_platform import FakePlatform
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.attention import registry
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.backend_rows import BACKENDS
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.registry import AttentionChoice, choose_attention
from tokenmill.platform.cpu import CpuPlatform

SPEC = AttentionSpec(1, 4, 2, 16)


class Native:
    """Stands for the native kernels."""

    isa = "avx2"


def on_cpu(name: str, dtype: str = "bfloat16", **wanted: Any) -> AttentionChoice:
    return choose_attention(name, AttentionConfig(SPEC, 16, dtype, CpuPlatform(), **wanted))


def on_gpu(name: str, dtype: str = "bfloat16", **wanted: Any) -> AttentionChoice:
    return choose_attention(name, AttentionConfig(SPEC, 16, dtype, FakePlatform(), **wanted))


class TestOnCpus:
    def test_auto_takes_the_native_one_where_it_serves(self) -> None:
        choice = on_cpu("auto", native=Native())
        assert (choice.name, choice.reason) == ("native", "packed KV, avx2")
        assert on_cpu("native", native=Native()).reason == "packed KV, avx2"

    def test_auto_says_why_it_is_not_native(self) -> None:
        choice = on_cpu("auto", "float32")
        assert choice.name == "cpu"
        assert choice.reason == "batched torch: the native attention is for bfloat16, not float32"
        assert on_cpu("auto").reason == "batched torch: the model does not run on native kernels"

    def test_what_is_asked_for_is_taken(self) -> None:
        for name in ("reference", "cpu"):
            choice = on_cpu(name, native=Native())
            assert (choice.name, choice.reason) == (name, "asked for")

    @pytest.mark.parametrize("name", ["flashy", "triton", "cpu,reference", "cpu,"])
    def test_an_unknown_backend_is_refused_with_the_choices(self, name: str) -> None:
        with pytest.raises(InvalidConfig, match=f"{name} is unknown on cpu; choose auto, one of native, cpu"):
            on_cpu(name)

    @pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int8-int4"])
    def test_fewer_bits_need_the_native_one(self, kv_dtype: str) -> None:
        assert on_cpu("auto", kv_dtype=kv_dtype, native=Native()).name == "native"
        for name, obstacle in (("auto", "does not run on native kernels"), ("cpu", "does not run on native kernels")):
            with pytest.raises(InvalidConfig, match=f"--kv-cache-dtype needs the native attention: .* {obstacle}"):
                on_cpu(name, kv_dtype=kv_dtype)
        with pytest.raises(InvalidConfig, match="needs the native attention: another backend is asked for"):
            on_cpu("cpu", kv_dtype=kv_dtype, native=Native())

    def test_what_does_not_suit_the_native_one_is_said(self) -> None:
        native = next(row for row in BACKENDS if row.name == "native")
        config = AttentionConfig(SPEC, 16, "bfloat16", CpuPlatform(), native=Native())
        assert native.why_not(config) is None
        assert "bfloat16, not float32" in str(native.why_not(msgspec.structs.replace(config, dtype="float32")))
        assert native.why_not(msgspec.structs.replace(config, page_size=1)) is None
        for head_dim in (24, 1024):
            spec = msgspec.structs.replace(SPEC, head_dim=head_dim)
            assert f"up to 512, not {head_dim}" in str(native.why_not(msgspec.structs.replace(config, spec=spec)))


class TestOnGpus:
    def test_without_flash_triton_is_taken_and_the_reason_told(self) -> None:
        choice = on_gpu("auto")
        assert choice.name == "triton"
        assert "flash attention" in choice.reason

    @pytest.mark.parametrize(
        ("capability", "able", "taken", "reason"),
        [
            ((8, 0), ("hopper", "flash"), "flashinfer", "FlashInfer"),
            ((9, 0), ("hopper", "flash"), "hopper,flashinfer", "its own kernel for Hopper; FlashInfer for decodes"),
            ((9, 0), ("flash",), "flash,flashinfer", "torch's flash attention: it is off; FlashInfer for decodes"),
            ((9, 0), (), "triton,flashinfer", "its own kernels: it is off: it is off; FlashInfer for decodes"),
            ((10, 0), ("hopper", "flash"), "flashinfer", "FlashInfer"),
        ],
    )
    def test_auto_asks_the_architecture(
        self,
        capability: tuple[int, int],
        able: tuple[str, ...],
        taken: str,
        reason: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(FakePlatform, "capability", lambda self: capability)
        obstacles = {name: None if name in able else "it is off" for name in ("hopper", "flash")} | {"flashinfer": None}
        rows = [
            msgspec.structs.replace(row, package=None, obstacle=lambda config, said=obstacles[row.name]: said)
            if row.name in obstacles
            else row
            for row in BACKENDS
        ]
        monkeypatch.setattr(registry, "BACKENDS", rows)
        choice = on_gpu("auto")
        assert (choice.name, choice.reason) == (taken, reason)

    def test_prompts_on_hopper_have_a_kernel_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton", reason="triton is not installed")
        monkeypatch.setattr(FakePlatform, "capability", lambda self: (9, 0))
        spec = msgspec.structs.replace(SPEC, head_dim=128)
        choice = choose_attention("auto", AttentionConfig(spec, 16, "bfloat16", FakePlatform()))
        assert choice.name == "hopper,triton"
        whole = choose_attention("auto", AttentionConfig(spec, 16, "float32", FakePlatform()))
        single = choose_attention("auto", AttentionConfig(spec, 16, "bfloat16", FakePlatform(), is_invariant=True))
        assert (whole.name, single.name) == ("triton", "triton")
        with pytest.raises(InvalidConfig, match="heads of 128 or 256"):
            on_gpu("hopper")

    def test_a_hybrid_names_prompts_first(self) -> None:
        choice = on_gpu("triton,triton", "float32")
        assert (choice.name, choice.reason) == ("triton", "asked for")

    @pytest.mark.parametrize("name", ["cpu", "flash,", "triton,triton,triton", "hybrid"])
    def test_unknown_names_are_refused(self, name: str) -> None:
        with pytest.raises(InvalidConfig, match="is unknown on fake"):
            on_gpu(name)

    def test_what_cannot_serve_says_why(self) -> None:
        with pytest.raises(InvalidConfig, match=r"--attention-backend flash: .* bfloat16 and float16, not float32"):
            on_gpu("flash", "float32")
        with pytest.raises(InvalidConfig, match="the flashinfer attention needs flashinfer, which is not"):
            on_gpu("triton,flashinfer")
        for kv_dtype in ("int8", "int4", "int8-int4"):
            with pytest.raises(InvalidConfig, match=f"--kv-cache-dtype {kv_dtype} is for CPUs"):
                on_gpu("auto", kv_dtype=kv_dtype)
        with pytest.raises(InvalidConfig, match="--kv-layout page-first is for CPUs"):
            on_gpu("auto", is_page_first=True)

    def test_the_invariant_mode_takes_one_way_for_every_token(self) -> None:
        choice = on_gpu("auto", is_invariant=True)
        assert choice.name == "triton"
        with pytest.raises(InvalidConfig, match="--batch-invariant runs on attention backend triton, not flash"):
            on_gpu("flash", is_invariant=True)

    def test_graphs_hold_the_decodes_of_a_hybrid(self) -> None:
        pytest.importorskip("triton", reason="triton is not installed")
        for name in ("triton", "triton,triton"):
            attention = on_gpu(name, "float32").make(5)
            captured = attention.in_graphs()
            assert captured.kv is attention.kv
            assert captured._decodes is captured._prompts is attention._decodes
            assert not captured.before_replay(np.ones(3, dtype=np.int32)), "its plans serve every length"
