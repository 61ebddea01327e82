"""Run the process of an engine that says in its log when it packs weights."""

import sys
from typing import Any

from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.loader import ModelPlan
from tokenmill.startup.assembly.engine_process import main

PACKS = "this engine packs weights"
load = ModelPlan.load


def loudly(plan: ModelPlan, *arguments: Any) -> Decoder:
    print(PACKS, file=sys.stderr, flush=True)
    return load(plan, *arguments)


if __name__ == "__main__":
    ModelPlan.load = loudly
    sys.exit(main())
