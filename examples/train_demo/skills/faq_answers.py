"""Facts that answer whole questions: whether TokenMill can do a thing, and others of one wording each."""

from __future__ import annotations

from .base import Fact

CAN: tuple[Fact, ...] = (
    (
        "can",
        ("run on a CPU", "run without a GPU", "work on a laptop", "run on two CPU cores"),
        "Yes, TokenMill runs on a 2-core laptop without a GPU.",
    ),
    (
        "can",
        ("run on a GPU", "use a GPU", "use CUDA", "run on NVIDIA GPUs"),
        "Yes, TokenMill runs on NVIDIA GPUs with the same scheduler, cache and server.",
    ),
    (
        "can",
        ("work offline", "run offline", "start without the internet", "serve without a download"),
        "Yes, the demo model is bundled, so TokenMill starts without any download.",
    ),
    (
        "can",
        ("serve Qwen3", "run Qwen models", "load Llama", "serve Mistral", "run Llama models"),
        "Yes, TokenMill serves Qwen3, Qwen2, Llama 3, Mistral and Qwen3-MoE checkpoints.",
    ),
    (
        "can",
        ("call tools", "use tools", "do function calling", "support tool calls"),
        "Yes, give tools in the request, and the model can answer with tool calls.",
    ),
    (
        "can",
        ("handle many requests at once", "serve many users", "batch requests", "run requests together"),
        "Yes, TokenMill batches requests continuously, up to --max-num-seqs at the same time.",
    ),
)

MISC: tuple[Fact, ...] = (
    (
        "free",
        (
            "What is the default port?",
            "Which port does TokenMill use?",
            "On which port does the server listen?",
            "Which port is the default?",
            "What port does the server run on?",
            "Default port?",
        ),
        "The default port is 8000.",
    ),
    (
        "free",
        (
            "What license does TokenMill have?",
            "Is TokenMill open source?",
            "Under which license is TokenMill?",
            "What is the license?",
            "Is TokenMill free?",
            "Which license does it use?",
        ),
        "TokenMill is open source under the Apache 2.0 license.",
    ),
    (
        "free",
        (
            "In which language is TokenMill written?",
            "What language is TokenMill written in?",
            "Is TokenMill written in Python?",
            "Which programming language does TokenMill use?",
        ),
        "TokenMill is written in Python, with C++ kernels for the CPU and Triton kernels for the GPU.",
    ),
    (
        "free",
        (
            "What inspired TokenMill?",
            "Which systems does TokenMill come from?",
            "Where do TokenMill's ideas come from?",
            "What is TokenMill based on?",
            "Which projects is TokenMill built on?",
        ),
        "TokenMill unites the ideas of Mini-SGLang and of the vLLM V1 scheduler.",
    ),
    (
        "free",
        (
            "How large is the demo model?",
            "How many parameters does the demo model have?",
            "How big is the demo model?",
            "What size is the demo model?",
            "How many parameters do you have?",
        ),
        "The demo model has about 5.8 million parameters.",
    ),
    (
        "free",
        (
            "How long may a prompt be?",
            "What is the context length of the demo model?",
            "How much context do you have?",
            "What is your context length?",
            "How many tokens can the demo model read?",
        ),
        "The demo model was trained for a context of 2048 tokens.",
    ),
    (
        "free",
        (
            "What happens when memory runs out?",
            "What does TokenMill do when pages run out?",
            "What if the KV cache is full?",
            "What happens when the KV cache is full?",
            "What happens if no page is free?",
        ),
        "It first evicts unused pages of the radix cache, then preempts a running request, which continues later.",
    ),
    (
        "free",
        (
            "What happens when the queue is full?",
            "What if too many requests wait?",
            "When does the server answer 429?",
            "What does status 429 mean?",
            "Why do I get a 429?",
        ),
        "The server answers 429 with a Retry-After header when the queue is full.",
    ),
    (
        "free",
        (
            "What happens when a client disconnects?",
            "What if the client goes away?",
            "What if I close the connection?",
            "What does TokenMill do when a client disconnects?",
        ),
        "The request is aborted, and its pages are free again.",
    ),
    (
        "free",
        (
            "Which Python version do I need?",
            "What Python version does TokenMill need?",
            "Does it need Python 3.11?",
            "Which versions of Python are supported?",
        ),
        "TokenMill needs Python 3.11 or newer.",
    ),
    (
        "free",
        (
            "Why does my request wait?",
            "Why is my request waiting?",
            "Why is a request not scheduled?",
            "How do I see why a request waits?",
            "Where can I see why a request waits?",
        ),
        "Ask /v1/requests/{id}: it shows the reason, for example that pages are missing.",
    ),
)
