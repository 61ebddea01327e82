"""Count what graphs of Qwen3-0.6B launch, on the fake GPU.

    python -m tests.engine.runner.fake_gpu_launches FOLDER

A line of JSON for each size: requests, and launches by name, of kernels and of torch's operations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

from tools.gpu.folders import QWEN3_0_6B, write_config

from tests.engine.runner.fake_gpu import SEEN
from tests.engine.runner.fake_gpu_engines import SMALL, on_fake_gpu
from tests.engine.runner.fake_gpu_platform import FakeGpu
from tokenmill.config.configs import EngineConfig
from tokenmill.engine.runner import cuda_graphs
from tokenmill.startup.assembly.setup import build_engine

SIZES = (1, 8, 64, 256)
LIMITS = {**SMALL, "max_num_seqs": max(SIZES), "max_model_len": 4096, "page_size": 16, "num_pages": 400}
LIMITS["max_num_batched_tokens"] = 512


def main() -> None:
    """Capture every size."""
    folder = write_config(Path(sys.argv[1]) / "Qwen3-0.6B", QWEN3_0_6B)
    with on_fake_gpu() as stack:
        stack.enter_context(patch.object(cuda_graphs, "ladder", lambda most: list(SIZES)))
        config = EngineConfig(model=str(folder), **LIMITS).resolve()
        build_engine(config, platform=FakeGpu()).engine.close()
    # The largest is captured first, and once by itself before the KV cache is sized.
    for size, launches in zip(SIZES, SEEN.captures[::-1], strict=False):
        print(json.dumps({"size": size, "launches": launches}), flush=True)


if __name__ == "__main__":
    main()
