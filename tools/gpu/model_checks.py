"""Models beside plain decoders on the device: encoders, states kept in other memory, and the server in front of all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.gpu.engines import generate, running

from tokenmill.core.messages import AddRequest
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine

ENCODER = "encoder-"
ENCODERS = ("bert", "modernbert", "nomic_bert", "gemma3_text")
KEPT = "kept-states-"
RECURRENT = ("lfm2", "granite_hybrid")
STORED = "stored-"
# As files of these publishers' layouts have them: unpacked to floats on a GPU.
LAYOUTS = ("gptq 4", "awq")
WINDOWS = "windows-"
WINDOWED = ("gemma3", "gpt_oss", "gemma4")
SERVER = "server"
SOUND = "sound"
EMBEDDINGS = "embeddings"
MODELS = (
    SERVER,
    *(WINDOWS + family for family in WINDOWED),
    *(ENCODER + family for family in ENCODERS),
    *(KEPT + family for family in RECURRENT),
    *(STORED + layout.replace(" ", "-") for layout in LAYOUTS),
    SOUND,
    EMBEDDINGS,
)
# Two answers in float32, of products in another order.
CLOSE = 1e-4
SERVER_SECONDS = 120
KV_BYTES = 16 << 20


def model_names() -> list[str]:
    """The checks that can run with what is installed."""
    return [] if importlib.util.find_spec("transformers") is None else list(MODELS)


class ModelChecks:
    """The checks, by name; each raises AssertionError with what differed.

    Args:
        seed: of texts and weights; the report tells it.
    """

    def __init__(self, platform: Any, folder: Path, seed: int) -> None:
        self._platform = platform
        self._folder = folder
        self._seed = seed
        self._rng = random.Random(seed)

    def work_of(self, name: str) -> Callable[[], None]:
        """Return the work of one of `model_names`."""
        if name.startswith(ENCODER):
            return partial(self._encoder, name.removeprefix(ENCODER))
        if name.startswith(KEPT):
            return partial(self._kept_states, name.removeprefix(KEPT))
        if name.startswith(WINDOWS):
            return partial(self._windows, name.removeprefix(WINDOWS))
        if name.startswith(STORED):
            return partial(self._stored, name.removeprefix(STORED).replace("-", " "))
        return {SERVER: self._server, SOUND: self._sound, EMBEDDINGS: self._embeddings}[name]

    def _encoder(self, family: str) -> None:
        from tests.encoder_checkpoints import make_encoder

        model = make_encoder(self._folder / family, family, seed=self._seed)
        self._same_vectors(model, (PoolMode.CLS, PoolMode.MEAN))

    def _embeddings(self) -> None:
        """Vectors of a model that also generates, as Qwen3-Embedding has them: its last token's, and means."""
        from tests.checkpoints import make_checkpoint

        model = make_checkpoint(self._folder / "qwen3", "qwen3", seed=self._seed)
        self._same_vectors(model, (PoolMode.LAST,))
        self._same_vectors(model, (PoolMode.MEAN, PoolMode.WEIGHTED))

    def _same_vectors(self, model: Path, modes: tuple[PoolMode, ...]) -> None:
        params = PoolingParams(modes=modes)
        wanted = [self._text(length, params) for length in (1, 5, 62, 17, 33, 60, 2, 40)]
        limits = {"max_num_seqs": 5, "max_num_batched_tokens": 150, "page_size": 16, "num_pages": 60}
        limits["max_model_len"] = 62
        found = []
        for platform in (None, self._platform):
            with running(model, platform, dtype="float32", num_threads=1, **limits) as engine:
                found.append(_vectors(engine, wanted))
        apart = [float(np.abs(one - other).max()) for one, other in zip(*found, strict=True)]
        assert max(apart) < CLOSE, f"vectors are apart by {apart}"

    def _text(self, length: int, pooling: PoolingParams) -> AddRequest:
        ids = [self._rng.randrange(6, 250) for _ in range(length)]
        params = SamplingParams(max_tokens=1)
        name = f"text {self._rng.random()}"
        return AddRequest(id=name, prompt_token_ids=ids, params=params, pooling=pooling, needs_no_output=True)

    def _kept_states(self, family: str) -> None:
        """A conversation goes on in the next engine, from the disk, and in this one, from the host's memory."""
        from tests.checkpoints import make_checkpoint

        model = make_checkpoint(self._folder / family, family, seed=self._seed)
        params = [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)]
        first = [self._rng.randrange(3, 250) for _ in range(150)]
        limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 512, "max_num_batched_tokens": 64}
        limits |= {"page_size": 16, "num_pages": 40, "dtype": "float32", "num_threads": 1}
        with running(model, None, **limits) as engine:
            (answer,) = generate(engine, [first], params)
            second = [*first, *answer, *(self._rng.randrange(3, 250) for _ in range(9))]
            want = answer, generate(engine, [second], params)[0]
        for tier in ({"kv_disk": str(self._folder / "kv"), "kv_disk_size": KV_BYTES}, {"kv_host_size": KV_BYTES}):
            loaded = 0
            with running(model, self._platform, **limits, **tier) as engine:
                got = generate(engine, [first], params)[0]
                if "kv_host_size" in tier:
                    engine.reset_prefix_cache()
                    others = [[self._rng.randrange(3, 250) for _ in range(300)] for _ in range(4)]
                    for other in others:  # what they need pushes the first out
                        generate(engine, [other], params)
                    got = got, generate(engine, [second], params)[0]
                    loaded = engine.stats().num_loaded_tokens
            if "kv_disk" in tier:
                with running(model, self._platform, **limits, **tier) as engine:
                    got = got, generate(engine, [second], params)[0]
                    loaded = engine.stats().num_loaded_tokens
            assert got == want, f"{tier}: {got}, not {want}"
            assert loaded, f"nothing came back of {tier}"

    def _windows(self, family: str) -> None:
        """Pages behind windows are given up, and what lies in free ones is not read: with no numbers in them, too."""
        from tests.checkpoints import make_checkpoint

        sizes = {} if family == "gemma3" else {"sliding_window": 24}
        model = make_checkpoint(self._folder / family, family, seed=self._seed, **sizes)
        lengths = (150, 7, 90, 33, 64)
        prompts = [[self._rng.randrange(3, 250) for _ in range(length)] for length in lengths]
        prompts.append([*prompts[0][:100], 5, 6])
        params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)] * len(prompts)
        limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 200}
        limits |= {"page_size": 4, "num_pages": 140, "dtype": "float32", "num_threads": 1}
        with running(model, None, **limits) as engine:
            want = generate(engine, prompts, params)
        with running(model, self._platform, **limits) as engine:
            _poison(engine)
            got = generate(engine, prompts, params)
        assert got == want, f"{got}, not {want}"

    def _stored(self, layout: str) -> None:
        from tests.model.weights.test_quantized_checkpoints import quantized

        model = self._folder / "stored"
        quantized(model, layout, np.random.default_rng(self._seed))
        prompts = [[self._rng.randrange(3, 250) for _ in range(length)] for length in (40, 1, 17)]
        params = [SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)] * len(prompts)
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16, "num_pages": 40}
        limits |= {"max_model_len": 128, "dtype": "float32"}
        # Two GPUs share it, where there are two.
        shared = [{"tensor_parallel_size": 2}] if torch.cuda.device_count() > 1 else []
        ways: list[tuple[Any, dict[str, int]]] = [(None, {}), *((self._platform, ranks) for ranks in ({}, *shared))]
        found = []
        for platform, ranks in ways:
            with running(model, platform, **limits, num_threads=1, **ranks) as engine:
                found.append(generate(engine, prompts, params))
            assert found[-1] == found[0], f"{ranks}: {found[-1]}, not {found[0]}"

    def _sound(self) -> None:
        from tests.audio_checkpoints import RATE, make_audio_checkpoint, noise

        from tokenmill.core.media import MediaInput, MediaSpan, content_digest, with_surrogates
        from tokenmill.model.audio.spec import num_tokens, read_audio

        model, rng = make_audio_checkpoint(self._folder / "sound", self._seed), np.random.default_rng(self._seed)
        spec = read_audio(model)
        assert spec is not None, "a checkpoint with an encoder of sound"
        wanted = []
        for number, seconds in enumerate((0.5, 1.3)):
            clip = noise(rng, seconds, RATE)
            count, ids = num_tokens(len(clip)), [self._rng.randrange(3, 200) for _ in range(4)]
            span = MediaSpan(len(ids), count, content_digest(clip.tobytes(), 0, 0, ""), 0, 0, spec.token_id)
            media = [MediaInput(span, clip.tobytes())]
            ids = with_surrogates([*ids, *[spec.token_id] * count, 7, 8], media)
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            wanted.append(AddRequest(id=str(number), prompt_token_ids=ids, params=params, media=media))
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16, "num_pages": 60}
        limits |= {"max_model_len": 128, "dtype": "float32"}
        found = []
        for platform in (None, self._platform):
            with running(model, platform, **limits, num_threads=1) as engine:
                found.append(_outputs(engine, wanted))
        assert found[0] == found[1], f"{found[1]}, not {found[0]}"

    def _server(self) -> None:
        """`tokenmill serve`, whose engine is a fork of a process that must not have touched the device."""
        device = "cpu" if self._platform.name != "cuda" else "cuda"
        with serving(self._folder, "--device", device) as ask:
            chat = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}], "max_tokens": 8}
            reply = ask("/v1/chat/completions", {"model": "tokenmill-demo", **chat})
            assert reply["usage"]["completion_tokens"], reply
            reply = ask("/v1/embeddings", {"model": "tokenmill-demo", "input": ["one", "two"]})
            assert len(reply["data"]) == 2, reply


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Callable[[str, Any], Any]]:
    """A server on a port of its own; what it says goes to a file, which an error tells the end of."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "tokenmill", "serve", "--port", str(port), *arguments]

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as reply:
            text = reply.read()
            return json.loads(text) if text else None

    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))
        try:
            _wait_for(ask, process, log)
            yield ask
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(ask: Callable[[str], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SERVER_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            ask("/health")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the server is not there: {log.read_text()[-2000:]}")


def _poison(engine: Engine) -> None:
    """Before each step write NaN to every page of the window group that nobody has, and to page 0."""
    from tokenmill.engine.runner.executor import InlineExecutor
    from tokenmill.engine.scheduler.resources.windows import Windows

    windows = engine.scheduler.resource(Windows)
    assert windows is not None, "no pages are given up"
    assert isinstance(engine.executor, InlineExecutor), "steps are issued by this thread"
    runner, pool = engine.executor.runner, windows.pages.pool
    start = runner.start

    def poisoned(plan: Any, previous: Any) -> Any:
        free = [0, *(page for page in range(1, pool.num_pages) if pool._is_free[page])]
        attention: Any = runner._attention
        with runner._transport:
            for backend, is_windowed in zip(attention.backends, attention._are_windowed, strict=True):
                for tensor in backend.kv.tensors if is_windowed else ():
                    tensor[:, free] = float("nan")
        return start(plan, previous)

    runner.start = poisoned  # type: ignore[method-assign]


def _outputs(engine: Engine, wanted: list[AddRequest]) -> list[list[int]]:
    found: dict[str, list[int]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
    return list(found.values())


def _vectors(engine: Engine, wanted: list[AddRequest]) -> list[np.ndarray]:
    found: dict[str, bytes] = {}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            assert output.embedding is not None, "a text gives a vector"
            found[output.id] = output.embedding
    return [np.frombuffer(found[request.id], "<f4") for request in wanted]
