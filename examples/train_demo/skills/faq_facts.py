"""The facts about TokenMill that the demo model knows: one answer each, and the ways to name the subject.

A fact is ``(frames, subjects, answer)``: the frames (see ``faq.py``) fit the kind of fact, the subjects are the
names by which people ask for it.
"""

from __future__ import annotations

Fact = tuple[str, tuple[str, ...], str]

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

FLAGS: tuple[Fact, ...] = (
    ("flag", ("--max-num-seqs", "max-num-seqs"), "--max-num-seqs sets how many requests may run at the same time."),
    (
        "flag",
        ("--max-num-batched-tokens", "max-num-batched-tokens"),
        "--max-num-batched-tokens sets the token budget of one step.",
    ),
    (
        "flag",
        ("--max-model-len", "max-model-len", "--context-length"),
        "--max-model-len sets the longest context of a request, for example 32k or auto.",
    ),
    ("flag", ("--page-size", "page-size", "--block-size"), "--page-size sets how many tokens fit into one KV page."),
    ("flag", ("--num-pages", "num-pages"), "--num-pages sets the number of KV pages instead of measuring free memory."),
    ("flag", ("--port", "port"), "--port sets the port of the server. The default is 8000."),
    ("flag", ("--host", "host"), "--host sets the address that the server listens on."),
    (
        "flag",
        ("--api-key", "api-key"),
        "--api-key guards the server: clients must then send that key. It can be given several times.",
    ),
    ("flag", ("--dtype", "dtype"), "--dtype sets the number format of the weights, such as bfloat16 or float32."),
    (
        "flag",
        ("--batch-policy", "batch-policy"),
        "--batch-policy is mixed or prefill-first. Mixed runs prefill and decode in one step.",
    ),
    (
        "flag",
        ("--scheduling-policy", "scheduling-policy"),
        "--scheduling-policy is fcfs or priority: by arrival, or by the priority of each request.",
    ),
    (
        "flag",
        ("--admission", "admission flag"),
        "--admission is optimistic or reserve. Reserve holds pages for the full output, so it never preempts.",
    ),
    (
        "flag",
        ("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "--enable-prefix-caching turns the radix cache on, and --no-enable-prefix-caching turns it off.",
    ),
    (
        "flag",
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "--enable-chunked-prefill lets long prompts run in pieces over several steps.",
    ),
    (
        "flag",
        ("--long-prefill-token-threshold", "long-prefill-token-threshold"),
        "--long-prefill-token-threshold caps how many tokens of one long prompt run in a step.",
    ),
    (
        "flag",
        ("--tokenizer-workers", "tokenizer-workers"),
        "--tokenizer-workers sets the number of tokenizer processes. With 0 they run inside the API process.",
    ),
    (
        "flag",
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        "--gpu-memory-utilization sets the share of GPU memory to use. The default is 0.92.",
    ),
    (
        "flag",
        ("--attention-backend", "attention-backend"),
        "--attention-backend picks the code that computes attention. The default is auto.",
    ),
    ("flag", ("--served-model-name", "served-model-name"), "--served-model-name sets the model name that clients see."),
    ("flag", ("--seed", "the seed flag"), "--seed sets the seed of sampling, so that runs can be repeated."),
    (
        "flag",
        ("--tool-call-parser", "tool-call-parser"),
        "--tool-call-parser picks how tool calls are read from the text, such as hermes.",
    ),
    (
        "flag",
        ("--reasoning-parser", "reasoning-parser"),
        "--reasoning-parser picks how thinking is split from the answer, such as qwen3.",
    ),
    (
        "flag",
        ("--speculative-config", "speculative-config"),
        "--speculative-config sets up speculative decoding, with a drafter and the number of draft tokens.",
    ),
    (
        "flag",
        ("--max-num-queued-reqs", "max-num-queued-reqs"),
        "--max-num-queued-reqs limits the waiting requests. When the queue is full the server answers 429.",
    ),
)

ROUTES: tuple[Fact, ...] = (
    (
        "route",
        ("/health", "the /health endpoint"),
        "/health says whether the engine makes progress. It answers 503 when the engine is dead or stuck.",
    ),
    ("route", ("/metrics", "the /metrics endpoint"), "/metrics gives the numbers of the server in Prometheus format."),
    (
        "route",
        ("/v1/chat/completions", "the chat completions endpoint", "chat completions"),
        "/v1/chat/completions takes a list of messages and returns the assistant's reply, streamed or whole.",
    ),
    (
        "route",
        ("/v1/completions", "the completions endpoint"),
        "/v1/completions takes a plain prompt and returns its continuation.",
    ),
    ("route", ("/v1/models", "the models endpoint"), "/v1/models lists the models that the server offers."),
    ("route", ("/tokenize", "the /tokenize endpoint"), "/tokenize turns text into token ids."),
    ("route", ("/detokenize", "the /detokenize endpoint"), "/detokenize turns token ids back into text."),
    ("route", ("/v1/embeddings", "the embeddings endpoint"), "/v1/embeddings returns a vector for each input text."),
    (
        "route",
        ("/reset_prefix_cache", "the /reset_prefix_cache endpoint"),
        "/reset_prefix_cache empties the radix cache. It refuses while requests run.",
    ),
    ("route", ("/version", "the /version endpoint"), "/version returns the version of TokenMill."),
    (
        "route",
        ("/v1/requests/{id}", "the requests endpoint"),
        "/v1/requests/{id} shows the live state of a request and why it waits.",
    ),
    ("route", ("/docs", "the /docs page"), "/docs shows the interactive description of the API."),
)

HOWTO: tuple[Fact, ...] = (
    (
        "how",
        ("start the server", "start TokenMill", "run the server", "serve a model", "launch TokenMill", "run TokenMill"),
        "Run make serve, or tokenmill serve with a model. Without a model it serves the demo model on port 8000.",
    ),
    ("how", ("run the tests", "test TokenMill", "start the test suite", "test the project"), "Run make test."),
    (
        "how",
        ("install TokenMill", "install it", "set up TokenMill", "get TokenMill installed"),
        "Run pip install . in the project folder. It installs the tokenmill command.",
    ),
    (
        "how",
        (
            "serve another model",
            "use my own model",
            "serve my own checkpoint",
            "choose another model",
            "load a different model",
        ),
        "Run make serve MODEL=path, or tokenmill serve with the path of a Hugging Face folder.",
    ),
    (
        "how",
        ("change the port", "use another port", "serve on another port", "set the port"),
        "Use make serve PORT=8001, or the flag --port.",
    ),
    (
        "how",
        ("chat in the terminal", "talk to the model in a terminal", "open a chat in the shell"),
        "Run tokenmill chat. It streams replies in the terminal, and /reset starts over.",
    ),
    (
        "how",
        ("use TokenMill from Python", "generate offline", "use it without a server", "run it inside Python"),
        "Use from tokenmill import LLM, SamplingParams and call LLM(model).generate(prompts, params).",
    ),
    (
        "how",
        ("connect an OpenAI client", "use the openai package", "use the OpenAI API", "connect my client"),
        "Set the base URL of the client to http://localhost:8000/v1 and use any key.",
    ),
    (
        "how",
        ("turn off the prefix cache", "disable prefix caching", "switch off the radix cache"),
        "Start the server with --no-enable-prefix-caching.",
    ),
    (
        "how",
        ("get the same output twice", "make output repeatable", "get reproducible output"),
        "Set temperature to 0, or give the request a seed.",
    ),
    (
        "how",
        ("stream a reply", "get a streamed answer", "turn on streaming", "stream tokens"),
        "Set stream to true in the request. The reply then comes as server-sent events.",
    ),
    (
        "how",
        ("get JSON output", "force JSON", "make the model answer in JSON", "get a JSON answer"),
        "Set response_format to json_object or to a json_schema in the request.",
    ),
    (
        "how",
        ("process a file of prompts", "run a batch of prompts", "generate from a JSONL file"),
        "Run tokenmill generate. It reads and writes JSONL and resumes after an interruption.",
    ),
    (
        "how",
        ("benchmark TokenMill", "measure throughput", "measure the speed", "run a benchmark"),
        "Run tokenmill bench throughput, tokenmill bench latency or tokenmill bench serve.",
    ),
    (
        "how",
        ("protect the server", "require a key", "set an API key", "secure the server"),
        "Start the server with --api-key and a secret. Clients must then send it.",
    ),
    (
        "how",
        ("turn on thinking", "make the model think", "enable thinking", "switch thinking on"),
        "Set enable_thinking to true in chat_template_kwargs, or ask the model to think first.",
    ),
)

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

FACTS: tuple[Fact, ...] = CONCEPTS + FLAGS + ROUTES + HOWTO + CAN + MISC
