"""Facts about using the server: its flags, its routes, and how to do things."""

from __future__ import annotations

from .base import Fact

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
