"""An engine that says in its log when it packs weights: `tests.server.packing_engine` as the process of an engine."""

import sys
from typing import Any

from tokenmill.engine.process import main
from tokenmill.models.decoder import Decoder
from tokenmill.weights.loader import ModelPlan

PACKS = "this engine packs weights"
load = ModelPlan.load


def loudly(plan: ModelPlan, *arguments: Any) -> Decoder:
    print(PACKS, file=sys.stderr, flush=True)
    return load(plan, *arguments)


if __name__ == "__main__":
    ModelPlan.load = loudly
    sys.exit(main())
