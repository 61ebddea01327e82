"""Images on a GPU that does not exist: interpreted Triton kernels, graphs, and a row's shift behind its images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.kernels.gpu import DEVICE
from tests.model.vision.checks import check_gpu, request_of
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.model.vision.spec_reader import read_vision


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
    wanted = [request_of(spec, rng, number, own) for number, own in enumerate(sizes)]
    check_gpu(checkpoint, wanted, **options)
    assert (replays > 0) != bool(options)
