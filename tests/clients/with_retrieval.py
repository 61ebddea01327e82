"""Ask a running server of an embedder through clients; `test_retrieval` runs this in an environment of its own.

python with_retrieval.py URL MODEL        (knows nothing of TokenMill; fails where a vector or an order is another)
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import openai

TEXTS = ["a cat", "do not, he's here.", "one two three four five"]
Vectors = list[list[float]]


def langchain(url: str, model: str) -> Vectors:
    """LangChain's OpenAI embeddings, which would send another tokenizer's ids if they were let."""
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model=model, check_embedding_ctx_length=False)
    return client.embed_documents(TEXTS)


def llama_index(url: str, model: str) -> Vectors:
    """LlamaIndex's client for servers that are like OpenAI's."""
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    client = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none")
    return client.get_text_embedding_batch(TEXTS)


def haystack(url: str, model: str) -> Vectors:
    """Haystack's embedder of documents."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    client = OpenAIDocumentEmbedder(api_base_url=f"{url}/v1", api_key=Secret.from_token("none"), model=model)
    documents = client.run([Document(content=text) for text in TEXTS])["documents"]
    return [document.embedding for document in documents]


def mem0(url: str, model: str) -> Vectors:
    """mem0's embedder, which asks for the dimensions that it was told."""
    from mem0.configs.embeddings.base import BaseEmbedderConfig
    from mem0.embeddings.openai import OpenAIEmbedding

    size = len(_openai(url, model)[0])
    config = BaseEmbedderConfig(model=model, api_key="none", openai_base_url=f"{url}/v1", embedding_dims=size)
    client = OpenAIEmbedding(config)
    return [client.embed(text, "add") for text in TEXTS]


def _openai(url: str, model: str) -> Vectors:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return [one.embedding for one in client.embeddings.create(model=model, input=TEXTS).data]


def rerank(url: str, model: str, vectors: Vectors) -> None:
    """LangChain's reranker by Cohere's client: the order and the scores are those of the cosines."""
    from langchain_cohere import CohereRerank

    client = CohereRerank(base_url=url, cohere_api_key="none", model=model, top_n=len(TEXTS))
    found = client.rerank(documents=TEXTS, query=TEXTS[0])
    cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert [one["index"] for one in found] == sorted(range(len(TEXTS)), key=lambda index: -cosines[index]), found
    for one in found:
        assert abs(one["relevance_score"] - cosines[one["index"]]) < 1e-4, (one, cosines)


CLIENTS: tuple[Callable[[str, str], Vectors], ...] = (langchain, llama_index, haystack, mem0)


def main(url: str, model: str) -> None:
    """Compare each client's vectors with those of OpenAI's own."""
    wanted = _openai(url, model)
    for client in CLIENTS:
        for ours, theirs in zip(wanted, client(url, model), strict=True):
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6, client.__name__
        print(client.__name__, "vectors")
    rerank(url, model, wanted)
    print("langchain rerank")


if __name__ == "__main__":
    main(*sys.argv[1:])
