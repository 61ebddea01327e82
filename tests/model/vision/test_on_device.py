"""Images on a GPU that does not exist: interpreted Triton kernels, graphs, and a row's shift behind its images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tokenmill.config.configs import EngineConfig
from tokenmill.core.media import MediaInput, MediaSpan, content_digest, with_surrogates
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.startup.assembly.setup import build_engine

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 80, "page_size": 4}
SMALL |= {"max_model_len": 64, "dtype": "float32", "num_threads": 1, "device": "cpu"}


def request(spec: VisionSpec, rng: np.random.Generator, name: int, sizes: list[tuple[int, int]]) -> AddRequest:
    """Text and images in turns; a size is in merged patches, rows and columns."""
    ids: list[int] = rng.integers(0, 200, int(rng.integers(1, 6))).tolist()
    media = []
    for rows, columns in sizes:
        pixels = rng.integers(0, 256, (1, 32 * rows, 32 * columns, 3), dtype=np.uint8).tobytes()
        digest = content_digest(pixels, 32 * rows, 32 * columns, "")
        span = MediaSpan(len(ids) + 1, rows * columns, digest, 2 * rows, 2 * columns, spec.image_token_id)
        media.append(MediaInput(span, pixels))
        ids += [spec.start_token_id, *[spec.image_token_id] * span.length, spec.end_token_id]
        ids += rng.integers(0, 200, int(rng.integers(1, 6))).tolist()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
    return AddRequest(id=str(name), prompt_token_ids=with_surrogates(ids, media), params=params, media=media)


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_an_engine_tells_what_one_on_a_cpu_tells(
    options: dict[str, Any], checkpoint: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = 0

    def replay(graphs: DecodeGraphs, inputs: Any, starts: Any = None, original: Any = DecodeGraphs.run) -> Any:
        nonlocal replays
        replays += 1
        return original(graphs, inputs, starts)

    monkeypatch.setattr(DecodeGraphs, "run", replay)
    spec = read_vision(checkpoint)
    assert spec is not None
    sizes = [[(3, 3)], [], [(2, 2), (1, 4)], [(3, 2)], []]
    wanted = [request(spec, rng, number, own) for number, own in enumerate(sizes)]
    config = EngineConfig(model=str(checkpoint), **SMALL, **options).resolve()
    told_by = []
    for platform in (None, FakePlatform()):
        engine = build_engine(config, platform=platform).engine
        try:
            first, again = run(engine, wanted), run(engine, wanted[:1])  # from the caches
            told_by.append([told(first[one.id]) for one in wanted] + [told(again["0"])])
        finally:
            engine.close()
    assert_same(*told_by, is_exact=False)
    assert (replays > 0) != bool(options)
