"""`ServerSettings`: the fields of the API process's config, each a flag; see `checks` for what they may be."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config.fields import flag

DEFAULT_PORT = 8000
TOOL_CALL_PARSERS = (
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "lfm2",
    "granite",
    "phi4_mini_json",
    "gemma4",
    "openai",
)
# Names no parser, where a model would have one.
NO_PARSER = "none"
REASONING_PARSERS = ("qwen3", "deepseek_r1", "granite", "gemma4", "openai_gptoss")
ROUTING_POLICIES = ("cost", "fewest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The fields of `ServerConfig`."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(DEFAULT_PORT, "port to listen on")
    uds: str | None = flag(None, "listen on this unix socket instead")
    # No flag: it serves one of several models, and only the server in front of them reaches its socket.
    is_behind: bool = False
    api_key: tuple[str, ...] = flag((), "require this key; may be repeated", repeat=True)
    api_key_models: str | None = flag(
        None, "TOML file of further API keys, each with those of several models that it may use"
    )
    metrics_open: bool = flag(False, "answer /metrics without a key, for scrapers")
    served_model_name: tuple[str, ...] = flag(
        (), "names of the model in the API, of which replies bear the first; may be repeated", repeat=True
    )
    encoder_only: bool = flag(False, "load the encoder of images or sound alone, for servers with --encoder-urls")
    root_path: str = flag("", "path prefix when behind a proxy")
    allowed_origins: tuple[str, ...] = flag((), "CORS origins that browsers may call from", repeat=True)
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "host that images may be fetched from, by http or https, perhaps with its port; may be repeated",
        repeat=True,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (), "names that clients may call the server by, besides those of the loopback, where no key is set", repeat=True
    )
    tokenizer_workers: int = flag(
        1, "processes for tokenizing and detokenizing, of each that serves HTTP; 0: inside it"
    )
    api_server_count: int = flag(
        1, "processes that serve HTTP on one socket, each with text workers of its own", aliases=("-asc",)
    )
    data_parallel_size: int = flag(1, "engines, which share cores, GPUs and memory", aliases=("-dp", "--dp"))
    routing_policy: str = flag(
        "cost", "how an engine is chosen: least cost, or fewest requests", choices=ROUTING_POLICIES
    )
    chat_template: str | None = flag(None, "file with a chat template, or the template itself")
    tool_call_parser: str | None = flag(
        None,
        "how the model writes calls of tools (auto: found by its template)",
        choices=(*TOOL_CALL_PARSERS, NO_PARSER),
    )
    enable_auto_tool_choice: bool | None = flag(
        None, "let the model decide whether to call tools (auto: if it is known how it writes calls)"
    )
    tool_grammar: str = flag(
        "on", "keep calls that the model decides on to the schemas of their tools", choices=("on", "off")
    )
    volatile_blocks: str = flag(
        "move",
        "move blocks that agents change with each call behind the stable part of a prompt, or keep them in place",
        choices=("move", "keep"),
    )
    reasoning_parser: str | None = flag(
        None, "how the model marks its thinking (auto: found by its template)", choices=(*REASONING_PARSERS, NO_PARSER)
    )
    reasoning_budget: int | None = flag(None, "tokens of thinking at most, where a chat does not say")
    reasoning_budget_message: str = flag(
        "\n\nI have thought long enough and answer now.\n",
        "what the model reads at the end of its thinking where the budget is used up",
    )
    default_chat_template_kwargs: str | None = flag(
        None, "variables of the chat template where a request gives none, as JSON", json=True
    )
    override_generation_config: tuple[str, ...] = flag(
        (),
        "sampling parameters where a request gives none, as JSON, over those of the model; may be repeated",
        repeat=True,
        json=True,
    )
    models_dir: str | None = flag(None, "serve every model below this folder, each loaded when a request names it")
    models: str | None = flag(None, "TOML file of models and presets, with --models-dir or without")
    models_memory: int | None = flag(
        None, "memory for all models that are loaded at a time (auto: three quarters of what is free)", size=True
    )
    models_ttl: float = flag(0.0, "seconds without a request after which a model is unloaded; 0: when room is needed")
    models_wait: float = flag(600.0, "seconds that a request waits for its model at most")
    allow_runtime_lora: bool = flag(False, "load and unload adapters while the server runs, from --lora-dir")
    lora_dir: str | None = flag(None, "folder of the adapters that may be loaded while the server runs")
    max_num_queued_reqs: int | None = flag(None, "requests that may wait for a row; more are answered 429")
    max_num_queued_tokens: int | None = flag(
        None, "prompt tokens, by a guess from their bytes, that may wait; more are answered 429", size=True
    )
    max_body_bytes_in_flight: int = flag(
        256 << 20, "memory for bodies that are still coming, all together; what exceeds it is answered 503", size=True
    )
    batch_dir: str | None = flag(None, "keep files and batches in this folder: /v1/files and /v1/batches")
    batch_max_bytes: int = flag(10 << 30, "bytes that files of batches may take together", size=True)
    batch_max_files: int = flag(10_000, "files of batches at most, inputs and outputs together")
    responses_dir: str | None = flag(None, "keep stored responses in this folder: they outlive the server")
    max_logprobs: int = flag(20, "logprobs a request may ask for at most")
    ssl_keyfile: str | None = flag(None, "TLS key")
    ssl_certfile: str | None = flag(None, "TLS certificate")
    head_timeout: float = flag(10.0, "seconds in which the head of a request must be complete")
    body_timeout: float = flag(
        30.0, "seconds in which the body of a request must come, and one more for each 16 KiB that have"
    )
    keep_alive_timeout: float = flag(
        75.0, "seconds that a connection may be idle between requests", aliases=("--timeout-keep-alive",)
    )
    sse_ping: float = flag(15.0, "seconds of silence after which a stream gets a sign of life; 0: never")
    engine_timeout: float = flag(
        30.0, "seconds that a step, or what a text worker does at a time, may take before /health says 503"
    )
    prompt_timeout: float = flag(
        2.0, "seconds of CPU that the chat template may take for the messages of one request, per MiB of them"
    )
    max_restarts: int = flag(
        2, "how often in a minute an engine or a text worker that dies or hangs is started again; 0: the server ends"
    )
    ttl: float = flag(0.0, "seconds without a request after which the server ends; 0: never")
    shutdown_timeout: float = flag(3.0, "seconds that open streams get to end after Ctrl-C")
    strict_fields: bool = flag(
        False, "refuse fields that are not known, instead of leaving them out and naming them in x-tokenmill-ignored"
    )
    script: str | None = flag(None, "for tests of clients: a file of answers that chats are held to, see agents.md")
    enable_log_requests: bool = flag(False, "log every request")
    disable_log_stats: bool = flag(False, "do not log throughput every ten seconds")
    log_format: str = flag("text", "lines as text, or as JSON objects", choices=("text", "json"))
    metrics_prefix: str = flag("tokenmill", "show the metrics under this prefix too; `vllm` for its dashboards")
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector: a span for each request (OTLP/HTTP)"
    )
