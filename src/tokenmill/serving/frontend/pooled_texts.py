"""Decide what a model gets for texts to embed, to compare or to classify, and read the answers; for server and `LLM`.

An embedder compares by the cosine of two vectors, a reranker reads both texts of a pair at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.core.errors import InvalidRequest, WrongTask
from tokenmill.core.pooling import (
    MEAN_ONLY,
    Cut,
    PooledTexts,
    PoolingInfo,
    PoolingParams,
    PoolingTask,
    PoolInput,
    PoolMode,
)
from tokenmill.core.sampling_params import SamplingParams

MAX_INPUTS = 2048  # as OpenAI
# A pooled request draws one token, which is not used.
POOLED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_QUERY = ("query", "search_query", "retrieval.query")
# Names of prompts for texts that are looked through; sentence-transformers takes the first that there is.
_DOCUMENT = ("document", "passage", "corpus", "search_document", "retrieval.passage")


def text_inputs(given: str | Sequence[str | int | list[int]], param: str) -> list[PoolInput]:
    """Return the inputs of a field: a text, token ids, or a list of either.

    Raises:
        InvalidRequest: naming `param`.
    """
    if isinstance(given, str):
        return [PoolInput(given)]
    token_ids = [item for item in given if isinstance(item, int)]
    if token_ids and len(token_ids) == len(given):
        return [PoolInput(token_ids=token_ids)]
    if token_ids or not given:
        raise InvalidRequest(f"{param} must be a string, a list of token ids, or a list of those, not empty", param)
    check_count(len(given), param)
    texts = (item for item in given if not isinstance(item, int))
    return [PoolInput(item) if isinstance(item, str) else PoolInput(token_ids=item) for item in texts]


def check_count(count: int, param: str) -> None:
    """Refuse a call without texts, or with more than it may bring.

    Raises:
        InvalidRequest: naming `param`.
    """
    if not count:
        raise InvalidRequest(f"{param} is empty: at least one text is needed", param)
    if count > MAX_INPUTS:
        raise InvalidRequest(f"{param}: {count} texts in one request; at most {MAX_INPUTS}", param)


def texts_of(
    info: PoolingInfo | None,
    inputs: list[PoolInput],
    prompt_name: str | None = None,
    purpose: str | None = None,
    cut: Cut | None = None,
    limit: int | None = None,
) -> PooledTexts:
    """Return inputs with everything that a model wants for them.

    Args:
        info: None: of a model that generates.
        prompt_name, purpose: see `prefix_of`.
    """
    if info is None:
        prefix_of(None, prompt_name, purpose)
        return PooledTexts(inputs=inputs, cut=cut, limit=limit)
    return PooledTexts(
        inputs=inputs,
        prefix=prefix_of(info, prompt_name, purpose),
        includes_prefix=info.includes_prompt,
        cut=cut,
        limit=limit,
        lowers_case=info.lowers_case,
    )


def truncation(count: int | None, side: str | None = None) -> tuple[Cut | None, int | None]:
    """Return side and limit of `truncate_prompt_tokens` and `truncation_side`.

    Raises:
        InvalidRequest: the count is 0.
    """
    if count == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more", "truncate_prompt_tokens")
    if count is None:
        return None, None
    return Cut.LEFT if side == "left" else Cut.RIGHT, None if count == -1 else count


def embedding_params(
    info: PoolingInfo | None,
    modes: tuple[PoolMode, ...] | None = None,
    dimensions: int | None = None,
    normalizes: bool | None = None,
) -> PoolingParams:
    """Return the parameters of vectors.

    Args:
        info: None: of a model that generates. modes: instead of the model's.

    Raises:
        InvalidRequest: the model makes no vectors, or none of that size.
    """
    if info is not None and info.task is not PoolingTask.EMBED:
        raise WrongTask(f"{info.purpose}; it makes no vectors", "model")
    if dimensions is not None and (info is None or dimensions != info.size):
        _check_dimensions(info, dimensions)
    return PoolingParams(
        modes=modes or (MEAN_ONLY if info is None else info.modes),
        dimensions=dimensions or 0,
        normalizes=normalizes is not False,
    )


def _check_dimensions(info: PoolingInfo | None, dimensions: int) -> None:
    if info is None or not info.takes_dimensions:
        whole = "" if info is None else f", which have {info.size} numbers,"
        raise InvalidRequest(
            f"dimensions: this model's vectors{whole} cannot be shortened (--matryoshka lets them)", "dimensions"
        )
    if info.dimensions and dimensions not in info.dimensions:
        sizes = ", ".join(map(str, info.dimensions))
        raise InvalidRequest(f"dimensions must be one of {sizes}, got {dimensions}", "dimensions")
    if dimensions > info.size:
        raise InvalidRequest(f"dimensions must be at most {info.size}, got {dimensions}", "dimensions")


def prefix_of(info: PoolingInfo | None, prompt_name: str | None, purpose: str | None) -> str:
    """Return the prompt that stands before a text.

    Args:
        prompt_name: of the model's prompts. purpose: what the text is, e.g. `query` or `search_document`: the model's
            prompt for it is taken if it has one.

    Raises:
        InvalidRequest: the model has no prompt of this name.
    """
    prompts = {} if info is None else info.prompts
    if prompt_name is not None:
        if prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequest(f"prompt_name: the model has no prompt {prompt_name!r}; it has {known}", "prompt_name")
        return prompts[prompt_name]
    if purpose is not None:
        names = _QUERY if purpose in _QUERY else _DOCUMENT if purpose in _DOCUMENT else ()
        found = next((prompts[name] for name in (purpose, *names) if name in prompts), None)
        if found is not None:
            return found
    return prompts.get("" if info is None else info.default_prompt, "")


def classifying_params(info: PoolingInfo | None, activates: bool | None = None) -> PoolingParams:
    """Return the parameters of scores for labels.

    Raises:
        InvalidRequest: the model has no labels.
    """
    if info is None or info.task is not PoolingTask.CLASSIFY:
        raise WrongTask(f"{_purpose(info)}; it has no labels", "model")
    return PoolingParams(modes=info.modes, activates=activates is not False)


def comparing_params(info: PoolingInfo | None, activates: bool | None = None) -> PoolingParams:
    """Return the parameters of a comparison: of scores of pairs, or of the vectors that are compared.

    Raises:
        InvalidRequest: the model was not made to compare texts.
    """
    if info is not None and info.task is PoolingTask.EMBED:
        return embedding_params(info)
    if info is None or not info.is_reranker:
        raise WrongTask(f"{_purpose(info)}; it does not compare texts", "model")
    return PoolingParams(modes=info.modes, activates=activates is not False)


def _purpose(info: PoolingInfo | None) -> str:
    if info is None:
        return "this model generates text: use /v1/chat/completions or /v1/completions"
    return info.purpose


def compared_texts(
    info: PoolingInfo,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None = None,
    cut: Cut | None = None,
    limit: int | None = None,
    param: str = "documents",
) -> list[PooledTexts]:
    """Return the texts of a comparison of each query with its document, or of the only query with every one.

    Raises:
        InvalidRequest: the numbers of both do not fit, or the model takes no instruction.
    """
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"{len(queries)} queries and {len(documents)} {param}: as many of both, or one query", param
        )
    if instruction is not None and "{instruction}" not in info.template:
        raise InvalidRequest("instruction: this model takes none", "instruction")
    if info.task is PoolingTask.EMBED:
        asked = texts_of(info, [PoolInput(one) for one in queries], None, "query", cut, limit)
        asked.param = "query"
        looked_through = texts_of(info, [PoolInput(one) for one in documents], None, "document", cut, limit)
        looked_through.param = param
        return [asked, looked_through]
    each = list(queries) * len(documents) if len(queries) == 1 else queries
    pairs = [PoolInput(query, second=document) for query, document in zip(each, documents, strict=True)]
    return [
        PooledTexts(
            inputs=pairs,
            template=info.template,
            instruction=instruction or info.instruction,
            cut=cut,
            limit=limit,
            lowers_case=info.lowers_case,
            param=param,
        )
    ]


def compared_scores(info: PoolingInfo, num_documents: int, answers: Sequence[bytes]) -> list[float]:
    """Return the score of each document from the answers to `compared_texts`, in their order.

    Args:
        answers: vectors or scores, float32, little-endian.
    """
    rows = [np.frombuffer(answer, "<f4").astype(np.float64) for answer in answers]
    if info.task is not PoolingTask.EMBED:
        return [float(np.float32(row[0])) for row in rows]
    queries, documents = rows[: len(rows) - num_documents], rows[len(rows) - num_documents :]
    each = queries * num_documents if len(queries) == 1 else queries
    return [float(query @ document) for query, document in zip(each, documents, strict=True)]
