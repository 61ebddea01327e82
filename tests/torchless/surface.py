"""Walk through what an `LLM` offers, and print exactly what that brings, as one line of JSON.

    python -m tests.torchless.surface MODEL SCRATCH WALK [WALK ...]

Knows no torch: it runs where none can be imported, and where one can; both must print the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.draft_heads import HeadShape, make_head
from tokenmill import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputs

PIRATE = Path(__file__).parents[2] / "examples" / "pirate"
SCHEMA = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "num_pages": 64,
}
# All that a row may ask of the sampler and of its prompt's report.
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    {"seed": 1},
    {"seed": 2, "top_k": 5},
    {"seed": 3, "top_p": 0.8, "temperature": 1.7},
    {"seed": 4, "min_p": 0.05, "logprobs": 0},
    {"seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
    {"seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    {"seed": 7, "logit_bias": {5: 2.0, 9: -3.0}, "min_tokens": 4, "stop_token_ids": [11]},
    {"seed": 8, "allowed_token_ids": [5, 6, 7, 8], "logprobs": 2},
    {"seed": 9, "bad_words": ["the"], "n": 3},
]
PROMPT = [9, 8, 7, 6] * 5


class Walks:
    """Ways through an `LLM` over one model. Each returns what it brought, as plain data.

    Args:
        scratch: a folder of its own.
    """

    def __init__(self, model: str, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch

    def _open(self, **options: Any) -> LLM:
        where = {"weight_cache_dir": str(self._scratch / "packed"), "download_dir": str(self._scratch / "hub")}
        return LLM(self._model, **OPTIONS | where | options)

    def wishes(self) -> Any:
        """Everything that sampling offers, in one batch whose prompts are cut into chunks."""
        with self._open() as llm:
            return llm.info.kernels, llm.info.attention_backend, _wishes(llm)

    def formats(self) -> Any:
        """The smaller formats of weights and of KV, and weights that an earlier start has packed."""
        found: dict[str, Any] = {}
        for options in (
            {"quantization": "int8"},
            {"quantization": "int4"},
            {"kv_cache_dtype": "int8"},
            {"kv_cache_dtype": "int4"},
        ):
            for start in ("first", "second"):
                with self._open(**options) as llm:
                    found[f"{options} {start}"] = _wishes(llm, WISHES[:3])
        return found

    def grammars(self) -> Any:
        """Outputs that follow a schema, a regex and a choice."""
        shapes = (SCHEMA, StructuredOutputs(regex="[ab]{3,6}"), StructuredOutputs(choice=["yes", "no"]))
        params = [SamplingParams(max_tokens=24, seed=3, structured_outputs=shape) for shape in shapes]
        with self._open() as llm:
            return [each.outputs[0].text for each in llm.generate([PROMPT] * 3, params, use_tqdm=False)]

    def vectors(self) -> Any:
        """Embeddings in both poolings, log-likelihoods, and a search for the most likely continuations."""
        with self._open() as llm:
            pooled = [llm.embed([PROMPT, [4, 5]], use_tqdm=False, pooling=kind) for kind in ("mean", "last")]
            scores = llm.score([PROMPT], use_tqdm=False)
            beams = llm.beam_search([PROMPT[:4]], BeamSearchParams(beam_width=2, max_tokens=4))
            return (
                [[_exact(one.outputs.embedding) for one in each] for each in pooled],
                _exact([one.outputs.score for one in scores]),
                [sequence.tokens for sequence in beams[0].sequences],
            )

    def embedder(self) -> Any:
        """Vectors of a model that is made for them, in its own way of pooling."""
        with self._open() as llm:
            return [_exact(one.outputs.embedding) for one in llm.embed([PROMPT, [4, 5]], use_tqdm=False)]

    def float_embedder(self) -> Any:
        """Vectors of an encoder in float32, of weights that an earlier start has packed too."""
        found = []
        for _ in ("first", "second"):
            with self._open(dtype="float32") as llm:
                found.append([_exact(one.outputs.embedding) for one in llm.embed([PROMPT, [4, 5]], use_tqdm=False)])
        assert found[0] == found[1]
        return found

    def classifier(self) -> Any:
        """Probabilities of a model's labels."""
        with self._open() as llm:
            return [_exact(one.outputs.probs) for one in llm.classify([PROMPT, [4, 5]], use_tqdm=False)]

    def speculation(self) -> Any:
        """Drafts from the text itself, verified and sampled: the tokens are those without drafts."""
        brought = []
        for method in (None, "ngram", "suffix"):
            options = {} if method is None else {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
            with self._open(**options) as llm:
                brought.append(_wishes(llm))
        assert brought[0] == brought[1] == brought[2], "drafts change no token"
        return brought[0]

    def adapters(self) -> Any:
        """Rows with an adapter beside rows without; for the demo model, whose adapter is among the examples."""
        requests = [None, LoRARequest("pirate", 1, str(PIRATE)), None]
        asked = [[{"role": "user", "content": "What is a page?"}]] * 3
        params = SamplingParams(temperature=0.0, max_tokens=20)
        with self._open(enable_lora=True) as llm:
            found = [reply.outputs[0].text for reply in llm.chat(asked, params, use_tqdm=False, lora_request=requests)]
        with self._open(lora_merge=str(PIRATE)) as llm:
            return found, [reply.outputs[0].text for reply in llm.chat(asked, params, use_tqdm=False)]

    def sleep(self) -> Any:
        """Sleep in both depths, with the same tokens before and after."""
        with self._open() as llm:
            before = _wishes(llm, WISHES[:2])
            for level in (1, 2):
                llm.sleep(level)
                llm.wake_up()
                assert _wishes(llm, WISHES[:2]) == before
            return before

    def disk(self) -> Any:
        """KV on disk, which the next engine finds."""
        params, found = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
        folder = self._scratch / "kv"
        for _ in range(2):
            with self._open(kv_disk=str(folder), kv_disk_size=16 << 20) as llm:
                (result,) = llm.generate([PROMPT * 3], params, use_tqdm=False)
                found.append((result.outputs[0].token_ids, result.num_cached_tokens))
        assert found[0][0] == found[1][0]
        assert (found[0][1], found[1][1] > 0) == (0, True), "the second engine finds what the first has stored"
        return found

    def threads(self) -> Any:
        """Steps launched ahead by a thread, several kernel threads, few pages so that requests are preempted."""
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        prompts = [[number, *PROMPT] for number in range(6)]
        with self._open(async_scheduling=True, num_threads=2, num_pages=12) as llm:
            return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]

    def ranks(self) -> Any:
        """Two processes that share each layer, and two that have half of the layers each."""
        found = []
        for flag in ("tensor_parallel_size", "pipeline_parallel_size"):
            with self._open(**{flag: 2}) as llm:
                found.append(_wishes(llm, WISHES[:4]))
        return found

    def draft_model(self) -> Any:
        """A draft model, here the model itself."""
        with self._open(speculative_config={"model": self._model, "num_speculative_tokens": 2}) as llm:
            return _wishes(llm, WISHES[:3])

    def eagle_head(self) -> Any:
        """A random head that takes the model's hidden states, whose drafts change no token."""
        head = make_head(self._scratch / "head", Path(self._model), HeadShape(num_draft_tokens=100), 3)
        found = []
        for options in ({}, {"speculative_config": {"model": str(head), "num_speculative_tokens": 2}}):
            with self._open(**options) as llm:
                found.append(_wishes(llm, WISHES[:3]))
        assert found[0] == found[1], "drafts change no token"
        return found[1]

    def sessions(self) -> Any:
        """Turns of a session, and a stream that is left."""
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        with self._open() as llm:
            with llm.session() as session:
                turns = [session.send(prompt, params).token_ids for prompt in (PROMPT, [3, 4])]
            stream = llm.stream(PROMPT, params)
            first = next(stream).token_ids
            stream.close()
            return turns, first


def _wishes(llm: LLM, wishes: Sequence[dict[str, Any]] = WISHES) -> Any:
    params = [SamplingParams(max_tokens=8, **one) for one in wishes]
    return [_plain(result) for result in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]


def _plain(result: Any) -> Any:
    outputs = [(one.token_ids, one.text, str(one.finish_reason), _logprobs(one.logprobs)) for one in result.outputs]
    return outputs, _logprobs(result.prompt_logprobs)


def _logprobs(positions: Any) -> Any:
    return positions and [
        at and [(token, float(one.logprob).hex(), one.rank) for token, one in at.items()] for at in positions
    ]


def _exact(numbers: Sequence[float]) -> list[str]:
    return [float(number).hex() for number in numbers]


def main() -> None:
    """Take the walks that are named."""
    model, scratch, *names = sys.argv[1:]
    walks = Walks(model, Path(scratch))
    found: dict[str, Any] = {}
    for name in names:
        walk: Callable[[], Any] = getattr(walks, name)
        found[name] = walk()
    print(json.dumps({"has_torch": sys.modules.get("torch") is not None, "found": found}))


if __name__ == "__main__":
    main()
