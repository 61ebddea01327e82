"""Facts about the concepts of the engine, and about TokenMill itself."""

from __future__ import annotations

from .base import Fact

CONCEPTS: tuple[Fact, ...] = (
    (
        "what",
        ("TokenMill", "Token Mill", "tokenmill", "this project", "the TokenMill engine"),
        "TokenMill is an LLM inference and serving engine in Python. It runs on a laptop CPU and on a big "
        "GPU, and it is "
        "small enough to read in an afternoon.",
    ),
    (
        "what",
        ("a radix cache", "the radix cache", "radix cache", "the radix tree", "a radix tree", "radix caching"),
        "A radix cache keeps the KV pages of earlier prompts in a tree keyed by their tokens. A new request "
        "that starts "
        "with the same tokens reuses those pages instead of computing them again.",
    ),
    (
        "what",
        ("prefix caching", "the prefix cache", "a prefix cache", "prefix reuse"),
        "Prefix caching reuses the KV of a prompt's beginning when an earlier request had the same tokens. TokenMill "
        "does it with a radix cache.",
    ),
    (
        "what",
        ("preemption", "preempting a request", "a preempted request", "request preemption"),
        "Preemption takes the pages of a running request away when memory runs out. The request goes back "
        "to the head of "
        "the queue and is computed again later, with the same tokens.",
    ),
    (
        "what",
        ("chunked prefill", "a prefill chunk", "prefill chunking", "splitting a prefill"),
        "Chunked prefill runs a long prompt in pieces over several steps, so that other requests keep "
        "getting tokens in "
        "between.",
    ),
    (
        "what",
        ("the KV cache", "a KV cache", "KV cache", "KV memory"),
        "The KV cache holds the keys and values of all tokens seen so far, so that each new token needs only one pass "
        "over itself. TokenMill stores it in pages.",
    ),
    (
        "what",
        ("a page", "a KV page", "a cache page", "the page in TokenMill"),
        "A page is a fixed number of token slots in the KV cache. It is the unit of allocation, sharing and eviction.",
    ),
    (
        "what",
        ("the page table", "a page table", "page tables"),
        "The page table maps each running request and page number to a page of the KV cache. Every running "
        "request owns "
        "one row of it.",
    ),
    (
        "what",
        ("the token table", "a token table"),
        "The token table holds token ids on the device, so that a sampled token feeds the next step without a trip to "
        "the host.",
    ),
    (
        "what",
        ("a step", "an engine step", "one step of the engine", "a scheduler step"),
        "A step is one pass of the model over a plan of requests. The scheduler makes the plan, the runner "
        "runs it, and "
        "the results are committed.",
    ),
    (
        "what",
        ("the scheduler", "TokenMill's scheduler", "scheduling in TokenMill"),
        "The scheduler decides which requests run in each step and how many tokens of each. There is no prefill phase "
        "and no decode phase, only a token budget.",
    ),
    (
        "what",
        ("the token budget", "a token budget", "the budget of a step"),
        "The token budget is the most tokens that one step may run over all requests. It is set with "
        "--max-num-batched-tokens.",
    ),
    (
        "what",
        ("overlap scheduling", "async scheduling", "asynchronous scheduling", "overlap"),
        "Overlap scheduling plans and launches the next step while the current one still runs, so that the "
        "device never "
        "waits for the scheduler.",
    ),
    (
        "what",
        ("continuous batching", "a continuous batch", "batching in TokenMill"),
        "Continuous batching lets requests join and leave the batch at every step, so that no request waits for the "
        "slowest one.",
    ),
    (
        "what",
        ("speculative decoding", "speculation", "a speculative decoder"),
        "Speculative decoding lets a cheap drafter propose several tokens, which the model verifies in one step. The "
        "output stays the same, it only comes faster.",
    ),
    (
        "what",
        ("a draft token", "draft tokens", "a drafted token"),
        "A draft token is a token proposed by speculation that the model has not verified yet.",
    ),
    (
        "what",
        ("the draft model", "a draft model", "demo-draft", "the drafter"),
        "The draft model is a sibling of the demo model with about one million parameters and the same tokenizer. It "
        "proposes tokens for speculative decoding.",
    ),
    (
        "what",
        ("the demo model", "a demo model", "the bundled model", "TokenMill's demo model"),
        "The demo model is a small Qwen3 model bundled with TokenMill. It was trained by the project on text that the "
        "project generated itself.",
    ),
    (
        "what",
        ("structured output", "structured outputs", "guided decoding", "constrained output"),
        "Structured output makes the model answer in a given form, such as a JSON schema, a regex or a grammar. Tokens "
        "that would break the form are masked out.",
    ),
    (
        "what",
        ("tool calling", "a tool call", "function calling", "tool use"),
        "Tool calling lets the model answer with a call of a function that the client described. The client "
        "runs it and "
        "sends the result back as a tool message.",
    ),
    (
        "what",
        ("eviction", "cache eviction", "evicting pages", "page eviction"),
        "Eviction frees the least recently used pages of the radix cache that no running request needs.",
    ),
    (
        "what",
        ("admission", "request admission", "admitting a request"),
        "Admission is the moment when a waiting request gets a row and pages and starts to run. It can be "
        "optimistic or "
        "reserve.",
    ),
    (
        "what",
        ("a request", "a request in TokenMill", "one request"),
        "A request is one sequence to generate. Asking for n=3 makes three requests of one group.",
    ),
    (
        "what",
        ("the engine", "the engine process", "TokenMill's engine loop"),
        "The engine is the process that runs the loop: receive, schedule, launch, commit and publish.",
    ),
    (
        "what",
        ("the frontend", "the API process", "TokenMill's frontend"),
        "The frontend is the side that speaks HTTP and turns text into tokens and back. It knows no torch.",
    ),
    (
        "what",
        ("the runner", "the model runner", "TokenMill's runner"),
        "The runner executes a plan on the device: it builds the inputs, runs the model and samples the next tokens.",
    ),
    (
        "what",
        ("greedy decoding", "greedy sampling", "temperature 0", "temperature zero"),
        "Greedy decoding always takes the most likely token. Set temperature to 0 to get it.",
    ),
    (
        "what",
        ("temperature", "the temperature", "the temperature parameter", "sampling temperature"),
        "Temperature sets how random sampling is. 0 always takes the most likely token, higher values vary "
        "more, and the "
        "limit is 2.",
    ),
    (
        "what",
        ("top_p", "top p", "nucleus sampling", "the top_p parameter"),
        "top_p keeps only the most likely tokens whose chances add up to p, and samples among them.",
    ),
    (
        "what",
        ("top_k", "top k", "the top_k parameter", "top-k sampling"),
        "top_k keeps only the k most likely tokens and samples among them.",
    ),
    (
        "what",
        ("min_p", "min p", "the min_p parameter"),
        "min_p drops every token whose chance is less than p times the chance of the most likely token.",
    ),
    (
        "what",
        ("max_tokens", "the max_tokens parameter", "max tokens"),
        "max_tokens is the most tokens that a reply may have. The reply then ends with the finish reason length.",
    ),
    (
        "what",
        ("cache_salt", "a cache salt", "the cache_salt field", "the cache salt"),
        "cache_salt separates tenants: requests with different salts never share pages of the prefix cache.",
    ),
    (
        "what",
        ("a CUDA graph", "CUDA graphs", "graph capture"),
        "A CUDA graph records the work of a decode step once and replays it, which saves launch time on a GPU.",
    ),
    (
        "what",
        ("tensor parallelism", "tensor parallel", "TP"),
        "Tensor parallelism splits every layer over several devices. Set it with --tensor-parallel-size.",
    ),
    (
        "what",
        ("quantization", "int8 quantization", "weight quantization"),
        "Quantization stores weights in fewer bits, such as int8 or int4, so that a model is smaller and "
        "faster. Set it "
        "with --quantization.",
    ),
    (
        "what",
        ("a finish reason", "the finish_reason", "finish_reason", "the finish reason"),
        "The finish reason says why a reply ended: stop, length, tool_calls or abort.",
    ),
    (
        "what",
        ("an attention backend", "the attention backend", "attention backends"),
        "An attention backend is the code that computes attention over the paged cache. TokenMill picks one "
        "by platform "
        "and says which and why.",
    ),
    (
        "what",
        ("a stop string", "stop strings", "the stop parameter", "stop sequences"),
        "A stop string ends the reply as soon as it appears. A request may have up to four of them.",
    ),
    (
        "what",
        ("streaming", "a streamed reply", "the stream option"),
        "Streaming sends the reply piece by piece while it is made. Set stream to true in the request.",
    ),
)
