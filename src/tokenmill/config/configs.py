"""Configuration: frozen dataclasses whose field metadata is the one source of flags, environment names and config keys.

Nothing below this module reads the environment, and nothing changes a config in place: `resolve()` returns a new one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.config.checks import check_engine, check_server
from tokenmill.config.fields import KVEventsConfig, StructuredOutputsConfig, flag
from tokenmill.config.vision import VisionConfig
from tokenmill.core.errors import InvalidConfig

DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
# What they stand for, where that is not the same word.
_DTYPE_NAMES = {"auto": "bfloat16", "half": "float16", "float": "float32"}
# Formats that checkpoints are stored in: naming one is a check, not a wish.
STORED_FORMATS = ("awq", "gptq", "compressed-tensors", "mxfp4", "gguf")
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
# Entry points of policies that are not ours; `engine/scheduler/policies.py` finds them.
POLICY_PLUGINS = "tokenmill.policies"
# What names no parser, where a model would have one.
NO_PARSER = "none"
REASONING_PARSERS = ("qwen3", "deepseek_r1", "granite", "gemma4", "openai_gptoss")
ROUTING_POLICIES = ("cost", "fewest")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(VisionConfig):
    """The settings of the engine process. A field left at None is decided by `resolve` or by the engine at start."""

    model: str = flag("", "checkpoint folder or hub id (none: the bundled demo model)", aliases=("--model-path",))
    tokenizer: str | None = flag(None, "folder with another tokenizer")
    revision: str | None = flag(None, "revision of the hub repository")
    download_dir: str | None = flag(None, "where hub files are kept")
    load_format: str = flag(
        "auto",
        "auto: by the files; dummy: random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    weight_cache: bool = flag(True, "keep packed weights in files that every engine and later start maps (CPUs)")
    weight_cache_dir: str | None = flag(None, "where they are kept (auto: ~/.cache/tokenmill/weights)")
    weight_cache_size: int | None = flag(
        None, "bytes of them that are kept, e.g. 20GiB (auto: a fifth of the free disk, 64 GiB at most)", size=True
    )
    # Where engines of one server share packed weights without a cache: a descriptor that their parent holds.
    weight_memory: str = ""
    dtype: str = flag(
        "auto", "type of weights and activations (auto: bfloat16; half: float16; float: float32)", choices=DTYPES
    )
    device: str = flag("auto", "where the model runs: auto (a GPU if there is one), cpu, cuda, or cuda:1 and so on")
    max_model_len: int | None = flag(
        None,
        "context in tokens, e.g. 32k; auto: what the model and the KV cache allow",
        aliases=("--context-length",),
        size=True,
    )
    page_size: int = flag(16, "token slots in a KV page", aliases=("--block-size",))
    num_pages: int | None = flag(None, "KV pages, instead of a share of memory", aliases=("--num-gpu-blocks-override",))
    kv_cache_memory_bytes: int | None = flag(None, "memory for KV, e.g. 4GiB, instead of a share", size=True)
    state_memory: int | None = flag(
        None,
        "memory for recurrent states, of requests and of prefixes, e.g. 2GiB (auto: up to half of what KV may use)",
        size=True,
    )
    gpu_memory_utilization: float | None = flag(
        None,
        "share of the free memory that KV may use (auto: 0.92 of a GPU's; 0.4 of a machine's, which others use too)",
        aliases=("--mem-fraction-static",),
    )
    max_num_seqs: int = flag(256, "requests that run at the same time", aliases=("--max-running-requests",))
    max_num_batched_tokens: int | None = flag(
        None,
        "tokens in a step (auto: 8192 on a GPU, 512 on a CPU, where a step of more takes long and is no faster)",
        aliases=("--chunked-prefill-size",),
        size=True,
    )
    long_prefill_token_threshold: int = flag(0, "tokens of one prompt in a step; 0: no cap of its own", size=True)
    enable_prefix_caching: bool = flag(True, "share the KV of equal prompt prefixes")
    disable_hybrid_kv_cache_manager: bool = flag(
        False, "keep all pages of layers with a sliding window, as those of the others, whatever lies behind the window"
    )
    enable_chunked_prefill: bool = flag(True, "split prompts that exceed the budget of a step")
    scheduling_policy: str = flag(
        "fair",
        "who is served next: tenants in turn (fair), by arrival, or by priority and in turn; a tenant is an API key "
        "where there are several, else a call",
        choices=("fair", "fcfs", "priority"),
        plugins=POLICY_PLUGINS,
    )
    batch_policy: str = flag(
        "mixed", "what may share a step", choices=("mixed", "prefill-first"), plugins=POLICY_PLUGINS
    )
    admission: str = flag(
        "whole-prompt",
        "pages a request must find to begin: those of its prompt, of its first chunk, or of its whole output too",
        choices=("whole-prompt", "optimistic", "reserve"),
        plugins=POLICY_PLUGINS,
    )
    async_scheduling: bool | None = flag(None, "schedule the next step while one runs (auto: on a GPU)")
    kernels: str = flag(
        "auto", "what models compute with besides attention", choices=("auto", "torch", "native", "triton")
    )
    attention_backend: str = flag(
        "auto",
        "attention: reference, cpu or native; on a GPU triton, flash, flashinfer, or two as flash,triton: for prompts "
        "and for decodes",
    )
    quantization: str = flag(
        "none",
        "make the weights smaller at load: int8 or int4 (CPUs, native kernels), fp8 (GPUs); others only say how the "
        "checkpoint is stored",
        aliases=("-q",),
        choices=("none", "int8", "int4", "fp8", *STORED_FORMATS),
    )
    kv_cache_dtype: str = flag(
        "auto", "type of the KV cache; auto: the model's; int8: CPUs, native attention", choices=("auto", "int8")
    )
    enforce_eager: bool = flag(False, "capture no CUDA graphs")
    pdl: bool = flag(
        True, "on a GPU, let a kernel begin while the one in front ends; off: to find what a fault comes from"
    )
    shared_splits: bool = flag(True, "on a GPU, read the keys that decodes share once for all of them; off: likewise")
    batch_invariant: bool = flag(False, "on a GPU, a request's tokens do not depend on its batch (slower)")
    num_threads: int | None = flag(None, "CPU threads of a step, of each rank (auto: the cores this process may use)")
    tensor_parallel_size: int = flag(
        1, "processes that share the model, each a part of every layer (CPUs)", aliases=("-tp", "--tp", "--tp-size")
    )
    pipeline_parallel_size: int = flag(
        1, "stages that share the model's layers, each of as many ranks (CPUs)", aliases=("-pp", "--pp", "--pp-size")
    )
    nnodes: int = flag(1, "machines that share the stages; the first one serves")
    node_rank: int = flag(0, "which of the machines this is; all but 0 wait for the first one")
    master_addr: str = flag("127.0.0.1", "where the first machine is found by the others")
    master_port: int = flag(29501, "and at which port; engine N of several at this one + N")
    master_secret: str = flag("", "file with the secret that the machines share")
    enable_expert_parallel: bool = flag(False, "whole experts on each rank; so it is on CPUs in any case")
    kv_events_config: str | None = flag(
        None, "JSON: publish what the prefix cache stores and evicts, as vLLM does", json=True
    )
    kv_disk: str | None = flag(None, "folder in which KV is stored, to be found again after a restart")
    kv_disk_size: int | None = flag(
        None, "bytes that it may take, e.g. 50GiB (auto: a fifth of the free disk, 50 GiB at most)", size=True
    )
    kv_host_size: int | None = flag(None, "bytes of the host's memory for KV that a GPU has no room for", size=True)
    kv_source: tuple[str, ...] = flag(
        (), "further source of KV: an entry point of tokenmill.kv_sources or module:name; may be repeated", repeat=True
    )
    kv_transfer_config: str | None = flag(
        None, "JSON: give KV to other engines, or get it from them, as vLLM does", json=True
    )
    kv_load_failure_policy: str = flag(
        "recompute", "what becomes of a request whose KV cannot be loaded", choices=("recompute", "fail")
    )
    structured_outputs_config: str | None = flag(
        None, "JSON: limits of the grammars that outputs must match", json=True
    )
    speculative_config: str | None = flag(
        None,
        "draft tokens that steps verify: suffix, ngram or auto, or JSON with vLLM's names (draft_model needs a model)",
        aliases=("-sc",),
        json=True,
    )
    max_string_length: int | None = flag(
        None,
        "characters of a string in JSON answers whose schema does not say how many; 0: any number (auto: 0; of the "
        "demo model 80)",
    )
    enable_lora: bool = flag(False, "let requests name adapters (LoRA) in the form of PEFT (CPUs)")
    lora_modules: tuple[str, ...] = flag((), "adapter to serve: name=folder; may be repeated", repeat=True)
    max_loras: int = flag(8, "adapters in a step at most", aliases=("--max-loras-per-batch",))
    max_lora_rank: int = flag(64, "rank of an adapter at most")
    max_cpu_loras: int | None = flag(
        None, "adapters in memory (auto: 4 * --max-loras)", aliases=("--max-loaded-loras",)
    )
    lora_merge: str | None = flag(None, "folder of an adapter that is folded into the weights")
    step_log: str | None = flag(None, "write every step to this file; `tokenmill replay` reads it")
    seed: int = flag(0, "seed of requests that bring none")
    # No flag: the engine's index, and how many share the machine.
    replica: tuple[int, int] = (0, 1)
    # No flags: which rank of the engine this is; the file by which ranks find each other, "": rank 0 starts them; and
    # how many seconds they wait for each other.
    rank: int = 0
    rendezvous: str = ""
    rank_timeout: float = 60.0

    @property
    def num_ranks(self) -> int:
        """Number of processes of an engine, on all machines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_steps_ahead(self) -> int:
        """Number of steps that may be launched at a time."""
        return max(self.pipeline_parallel_size, 2 if self.async_scheduling else 1)

    @property
    def num_ranks_here(self) -> int:
        """Number of an engine's processes on one machine."""
        return self.num_ranks // self.nnodes

    def resolve(self) -> EngineConfig:
        """Check the fields against each other and fill in those that do not depend on the model.

        Raises:
            InvalidConfig: naming the flags and what to change.
        """
        check_engine(self)
        is_gpu = self.device.startswith("cuda")
        utilization, overlap, budget = self.gpu_memory_utilization, self.async_scheduling, self.max_num_batched_tokens
        # What the device `auto` is, only the engine knows: it resolves once more.
        if utilization is None and self.device != "auto":
            utilization = 0.92 if is_gpu else 0.4
        if overlap is None and self.device != "auto":
            overlap = is_gpu
        if budget is None and self.device != "auto":
            budget = max(self.max_num_seqs, 8192 if is_gpu else 512 if self.enable_chunked_prefill else 2048)
        if utilization is not None and not 0.0 < utilization <= 1.0:
            raise InvalidConfig(f"--gpu-memory-utilization must be in (0, 1], got {utilization}")
        return dataclasses.replace(
            self,
            dtype=_DTYPE_NAMES.get(self.dtype, self.dtype),
            gpu_memory_utilization=utilization,
            async_scheduling=overlap,
            max_num_batched_tokens=budget,
        )

    @property
    def weight_cache_folder(self) -> Path:
        """The folder of packed weights."""
        return Path(self.weight_cache_dir or "~/.cache/tokenmill/weights").expanduser()

    @property
    def step_budget(self) -> int:
        """`max_num_batched_tokens`, once the device is known."""
        assert self.max_num_batched_tokens is not None, "a config that has been resolved for its device"
        return self.max_num_batched_tokens

    def kv_events(self) -> KVEventsConfig | None:
        """Return the settings for publishing KV events; None: events are not published.

        Raises:
            InvalidConfig: the JSON is broken or has an unknown field.
        """
        if self.kv_events_config is None:
            return None
        try:
            config = msgspec.json.decode(self.kv_events_config, type=KVEventsConfig)
        except msgspec.DecodeError as error:
            raise InvalidConfig(f"--kv-events-config: {error}") from error
        return config if config.enable_kv_cache_events and config.publisher == "zmq" else None

    def structured_outputs(self) -> StructuredOutputsConfig:
        """Return the settings for constrained outputs.

        Raises:
            InvalidConfig: the JSON is broken, has an unknown field, or a limit that is not above 0.
        """
        try:
            config = msgspec.json.decode(self.structured_outputs_config or "{}", type=StructuredOutputsConfig)
        except msgspec.DecodeError as error:
            raise InvalidConfig(f"--structured-outputs-config: {error}") from error
        if min(config.compile_seconds, config.compile_bytes, config.cache_bytes) <= 0:
            raise InvalidConfig("--structured-outputs-config: every limit must be above 0")
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of the API process, besides the engine's config."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(DEFAULT_PORT, "port to listen on")
    uds: str | None = flag(None, "listen on this unix socket instead")
    api_key: tuple[str, ...] = flag((), "require this key; may be repeated", repeat=True)
    metrics_open: bool = flag(False, "answer /metrics without a key, for scrapers that have none")
    served_model_name: tuple[str, ...] = flag(
        (), "names of the model in the API, of which replies bear the first; may be repeated", repeat=True
    )
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
    reasoning_parser: str | None = flag(
        None, "how the model marks its thinking (auto: found by its template)", choices=(*REASONING_PARSERS, NO_PARSER)
    )
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
    batch_max_files: int = flag(10_000, "files that there may be, of inputs and outputs")
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
    shutdown_timeout: float = flag(3.0, "seconds that open streams get to end after Ctrl-C")
    strict_fields: bool = flag(
        False, "refuse fields that are not known, instead of leaving them out and naming them in x-tokenmill-ignored"
    )
    enable_log_requests: bool = flag(False, "log every request")
    disable_log_stats: bool = flag(False, "do not log throughput every ten seconds")
    log_format: str = flag("text", "lines as text, or as JSON objects", choices=("text", "json"))
    metrics_prefix: str = flag("tokenmill", "show the metrics under this prefix too; `vllm` for its dashboards")
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector: a span for each request (OTLP/HTTP)"
    )

    def resolve(self) -> ServerConfig:
        """Check the fields.

        Raises:
            InvalidConfig: naming the flag and what to change.
        """
        check_server(self)
        return self
