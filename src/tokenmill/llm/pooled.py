"""The methods of `LLM` whose answers are vectors and scores: `embed`, `score`, `rerank`, `classify`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PooledTexts, PoolingInfo, PoolingParams, PoolInput, PoolMode
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm import arguments
from tokenmill.llm.arguments import Prompts
from tokenmill.llm.local_engine import Inbox, LocalEngine
from tokenmill.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    RerankOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tokenmill.serving.frontend.pooled_texts import (
    POOLED,
    classifying_params,
    compared_scores,
    compared_texts,
    comparing_params,
    embedding_params,
    texts_of,
    truncation,
)

Pooling = Literal["mean", "last"]


@arguments.checked_names
class PooledMethods:
    """The methods themselves; a class that has them has an engine, and runs what they start."""

    info: EngineReady
    _local: LocalEngine
    _run: Callable[..., list[RequestOutput]]
    _wait: Callable[..., None]

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool = True,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt.

        Args:
            pooling: the mean of the last layer's states after the final norm, or the state of the last token; None: as
                the model is made for, and the mean of one that generates.
            dimensions: numbers of a vector, of a model whose vectors may be cut.
            normalize: give vectors length 1.
            prompt_name: the model's prompt to put before each text; None: its default one.
            truncate_prompt_tokens: cut longer prompts to as many tokens; -1: to what the model takes.

        Raises:
            InvalidRequest: as `generate`, or the model makes no such vectors.
            TokenMillError: a prompt failed.
        """
        info = self.info.pooling
        params = embedding_params(info, pool_modes(pooling), dimensions, normalize)
        inputs = [pool_input(prompt) for prompt in arguments.split(prompts, int)]
        texts = texts_of(info, inputs, prompt_name, None, *truncation(truncate_prompt_tokens))
        return [one.answered(one.vector()) for one in self._pooled([texts], params, use_tqdm)]

    def submit_embedding(
        self, prompt: Any, *, dimensions: int | None = None, normalize: bool = True, prompt_name: str | None = None
    ) -> RequestOutput:
        """Add a prompt to those that `step` advances; its result gets a vector, as of `embed`.

        Raises:
            InvalidRequest: as `embed`.
        """
        info = self.info.pooling
        params = embedding_params(info, None, dimensions, normalize)
        message, (output,) = pooled_message(texts_of(info, [pool_input(prompt)], prompt_name), params)
        self._local.start(message, output)
        return output

    def score(
        self,
        prompts: Prompts,
        text_2: str | Sequence[str] | None = None,
        *,
        use_tqdm: bool = True,
        instruction: str | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `text_2` answers the text of `prompts` beside it, or the only one.

        By a reranker, or by the cosine of two vectors. Without `text_2`: the log-likelihood of each prompt, of all its
        tokens but the first, by a model that generates.

        Args:
            instruction: what the model judges by, where its template has a place for that.
            use_activation: false: a reranker's logits.

        Raises:
            InvalidRequest: as `generate`, or the model does not do this.
            TokenMillError: a prompt failed.
        """
        info = self.info.pooling
        if text_2 is None:
            if info is not None:
                raise InvalidRequest(f"text_2 is missing: {info.purpose}", "text_2")
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            found = self._run(arguments.split(prompts, int), params, use_tqdm, is_score=True)
            return [one.answered(one.log_likelihood()) for one in found]
        if info is None:
            raise InvalidRequest("a model that generates gives the log-likelihood of a prompt: leave it out", "text_2")
        pooling = comparing_params(info, use_activation)
        first, second = arguments.split(prompts, int), arguments.split(text_2, int)
        if not all(isinstance(one, str) for one in (*first, *second)):
            raise InvalidRequest("only texts are compared", "prompts")
        cut, limit = truncation(truncate_prompt_tokens)
        groups = compared_texts(info, first, second, instruction, cut, limit, "text_2")
        found = self._pooled(groups, pooling, use_tqdm)
        scores = self._scores(info, len(second), found)
        return [
            one.answered(ScoringOutput(score))
            for one, score in zip(found[len(found) - len(second) :], scores, strict=True)
        ]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Return the documents that answer a query best, best first; equals in their order.

        Args:
            top_n: at most as many; None: all.

        Raises:
            InvalidRequest, TokenMillError: as `score`.
        """
        found = self.score(
            query,
            list(documents),
            use_tqdm=use_tqdm,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        ranked = [RerankOutput(index, one.outputs.score, documents[index]) for index, one in enumerate(found)]
        return sorted(ranked, key=lambda one: -one.relevance_score)[:top_n]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool = True,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each of the model's labels for each prompt.

        Raises:
            InvalidRequest: as `generate`, or the model has no labels.
            TokenMillError: a prompt failed.
        """
        info = self.info.pooling
        params = classifying_params(info, use_activation)
        assert info is not None, "others have no labels"
        inputs = [pool_input(prompt) for prompt in arguments.split(prompts, int)]
        texts = texts_of(info, inputs, None, None, *truncation(truncate_prompt_tokens))
        found = self._pooled([texts], params, use_tqdm)
        return [one.answered(ClassificationOutput.of(one.vector().embedding, info.labels)) for one in found]

    def _scores(self, info: PoolingInfo, count: int, found: Sequence[RequestOutput]) -> list[float]:
        for one in found:
            one.check()
        return compared_scores(info, count, [one.embedding or b"" for one in found])

    def _pooled(self, groups: Sequence[PooledTexts], params: PoolingParams, use_tqdm: bool) -> list[RequestOutput]:
        """Run all texts; return the result of each."""
        inbox, outputs = Inbox(), list[RequestOutput]()
        try:
            for texts in groups:
                message, own = pooled_message(texts, params)
                outputs += own
                self._local.start_texts(message, own, inbox)
            self._wait(outputs, inbox, use_tqdm)
        finally:
            self._local.abort(outputs)
        return outputs


def pooled_message(texts: PooledTexts, params: PoolingParams) -> tuple[GenerateText, list[RequestOutput]]:
    """Return the message that starts the requests of texts, and a result for each that fills up."""
    ids = [uuid.uuid4().hex for _ in texts.inputs]
    message = GenerateText(ids=ids, params=POOLED, texts=texts, pooling=params, needs_no_output=True)
    shown = [one.text if one.token_ids is None else None for one in texts.inputs]
    return message, [
        RequestOutput(one, [], [CompletionOutput(0)], [one], text) for one, text in zip(ids, shown, strict=True)
    ]


def pool_modes(pooling: str | None) -> tuple[PoolMode, ...] | None:
    """Return the modes of an argument; None: the model's own.

    Raises:
        InvalidRequest: it is neither mean nor last.
    """
    if pooling not in (None, "mean", "last"):
        raise InvalidRequest(f"pooling must be mean or last, got {pooling!r}", "pooling")
    return None if pooling is None else (PoolMode(pooling),)


def pool_input(prompt: Any) -> PoolInput:
    """Return a prompt as an input.

    Raises:
        InvalidRequest: it is not a text or token ids.
    """
    fields = arguments.prompt_fields(prompt)
    if "messages" in fields:
        raise InvalidRequest("a conversation is not a text: give its text", "prompt")
    return PoolInput(fields.get("text", ""), fields.get("token_ids"))
