"""Index and search texts with txtai, whose vectors a running server gives; `test_retrieval` runs this.

python with_txtai.py URL MODEL PACKAGES        (PACKAGES: the folder that torch and transformers are imported from)
"""

from __future__ import annotations

import sys

import numpy as np
import openai

TEXTS = ["a cat", "do not, he's here.", "one two three four five"]


def main(url: str, model: str, packages: str) -> None:
    """Index the texts by LiteLLM; each is its own nearest one, with the vectors of OpenAI's client."""
    sys.path.append(packages)
    from txtai import Embeddings

    there = {"api_base": f"{url}/v1", "api_key": "none"}
    index = Embeddings(path=f"openai/{model}", method="litellm", vectors=there)
    index.index(TEXTS)
    assert [index.search(text, 1)[0][0] for text in TEXTS] == [0, 1, 2]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    wanted = [one.embedding for one in client.embeddings.create(model=model, input=TEXTS).data]
    found = index.batchtransform(TEXTS)
    assert np.allclose(found, wanted, atol=1e-5), (found, wanted)
    print("txtai", len(found), "vectors")


if __name__ == "__main__":
    main(*sys.argv[1:])
