"""The gate of adapters: read once, shared, forgotten by least recent use, and fair while there is no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.model.adapters.trained import make_adapter
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.adapters.cache import AdapterCache
from tokenmill.model.adapters.packing import AdapterReader
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.checkpoint import read_architecture

SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", "qwen3", tokenizer=False)
    for number in range(4):
        make_adapter(base, folder / str(number), number)
    return folder


def make_cache(folder: Path, max_count: int) -> tuple[AdapterCache, list[AdapterRef]]:
    """A cache for so many, empty, and the adapters that there are."""
    decoder = Decoder(read_architecture(folder / "base"), TorchKernels("float32", "meta"))
    looking = AdapterCache(AdapterReader(decoder, TorchKernels("float32", "cpu"), 16), 1)
    refs = [looking.look_at(f"a{number}", str(folder / str(number))) for number in range(4)]
    assert looking.num_loaded == 1
    return AdapterCache(AdapterReader(decoder, TorchKernels("float32", "cpu"), 16), max_count), refs


def request(name: str, adapter: AdapterRef | None) -> AddRequest:
    return AddRequest(id=name, prompt_token_ids=[1], params=SamplingParams(), adapter=adapter)


def collect(cache: AdapterCache) -> list[str]:
    """Return the requests that need not wait any longer, once there is one."""
    while not (news := cache.collect(SECONDS)):
        pass
    assert set(news.values()) == {None}
    return list(news)


def test_a_request_without_an_adapter_never_waits(folder: Path) -> None:
    cache, _ = make_cache(folder, 1)
    assert cache.admit(request("x", None)) and cache.name_of("x") is None
    cache.release("x")


def test_what_is_there_is_shared_and_what_nobody_uses_goes_first(folder: Path) -> None:
    cache, (a, b, c, _) = make_cache(folder, 2)
    assert not cache.admit(request("a1", a)) and not cache.admit(request("a2", a))
    assert cache.name_of("a1") == "a0", "it is told while it waits, too"
    assert collect(cache) == ["a1", "a2"] and cache.num_loaded == 1
    assert cache.admit(request("a3", a)) and not cache.admit(request("b1", b))
    assert collect(cache) == ["b1"] and cache.num_loaded == 2
    for name in ("b1", "a1", "a2"):
        cache.release(name)
    assert not cache.admit(request("c1", c)) and collect(cache) == ["c1"]
    assert cache.find(a.digest).digest == a.digest and cache.num_loaded == 2
    with pytest.raises(KeyError):
        cache.find(b.digest)
    cache.close()


def test_while_there_is_no_room_requests_get_in_in_their_order(folder: Path) -> None:
    cache, (a, b, _, _) = make_cache(folder, 1)
    cache.admit(request("a1", a))
    assert collect(cache) == ["a1"]
    assert not cache.admit(request("b1", b)), "a is in use, so b cannot be read"
    assert not cache.admit(request("a2", a)), "it would keep a in use, and b1 from ever getting in"
    assert cache.collect(0.0) == {}
    cache.release("a1")
    assert collect(cache) == ["b1"]
    assert cache.collect(0.0) == {}
    cache.release("b1")
    assert collect(cache) == ["a2"]
    cache.close()


def test_one_that_leaves_while_it_waits_is_never_told_of(folder: Path) -> None:
    cache, (a, b, c, _) = make_cache(folder, 1)
    cache.admit(request("a1", a))
    collect(cache)
    for name, adapter in (("b1", b), ("c1", c)):
        assert not cache.admit(request(name, adapter))
    cache.release("b1")
    cache.release("a1")
    assert collect(cache) == ["c1"]
    cache.close()
