"""Pooling: the layers behind pooled states, and what the other processes must know of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.pooling import PoolingInfo
from tokenmill.core.regular_file import read_regular
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.model.pooling.chain import PoolingChain
from tokenmill.model.pooling.files import read_pooling
from tokenmill.model.pooling.pair_template import INSTRUCTION, check_template, find_template
from tokenmill.model.pooling.spec import PoolingSpec
from tokenmill.model.weights.pooling_weights import PoolingWeights
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory

logger = logging.getLogger(__name__)


class Pooling(Capability):
    """Vectors or scores of a model that is made for them. Of others the states themselves are the vectors."""

    def __init__(self, chain: PoolingChain, info: PoolingInfo) -> None:
        self._chain = chain
        self._info = info

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Read what the checkpoint says of its pooling, and load the layers.

        Raises:
            InvalidCheckpoint: a file is broken or not supported; names it.
            InvalidConfig: the model cannot do what `--task` asks for.
        """
        config, model = assembly.config, assembly.model
        spec = read_pooling(model.folder, config.task)
        if spec is None:
            return None
        for sentence in spec.assumed:
            logger.warning("%s", sentence)
        tokenizer = Path(config.tokenizer or model.folder)
        is_dummy = config.load_format == "dummy"
        chain, size = PoolingWeights(model.folder, model.architecture, tokenizer, is_dummy).load(spec)
        inputs = model.architecture.inputs
        info = _info(spec, size, config, tokenizer)
        info.tells_by_type = inputs is not None and inputs.token_types > 1
        return cls(chain, info)

    def complete(self, runner: ModelRunner, memory: StepMemory) -> None:
        """Let the layers follow the pooled states."""
        runner.pool_with(self._chain)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell what the model is for, and how it is asked."""
        ready.pooling = self._info


def _info(spec: PoolingSpec, size: int, config: EngineConfig, tokenizer: Path) -> PoolingInfo:
    template = _own_template(config.rerank_template) or find_template(spec, tokenizer)
    return PoolingInfo(
        task=spec.task,
        size=size,
        modes=spec.modes,
        includes_prompt=spec.includes_prompt,
        takes_dimensions=spec.takes_dimensions or config.matryoshka,
        dimensions=spec.dimensions,
        prompts=dict(spec.prompts),
        default_prompt=spec.default_prompt,
        template=template,
        instruction=INSTRUCTION if "{instruction}" in template else "",
        labels=spec.labels,
        activation=spec.activation.value if spec.labels else "",
        lowers_case=spec.lowers_case,
    )


def _own_template(given: str | None) -> str:
    """Return the operator's template, which is given itself or by its file; "": none is given.

    Raises:
        InvalidConfig: the file cannot be read, or the text names no query and document.
    """
    if given is None:
        return ""
    if "{" not in given:
        try:
            given = read_regular(Path(given)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"--rerank-template: cannot read {given}: {error}") from error
    check_template(given)
    return given
