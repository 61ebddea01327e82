"""`EngineSettings`: the fields of an engine's config, each a flag, and what follows from them alone.

They are not checked against each other here: see `checks`, and `EngineConfig.resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.config.fields import KVEventsConfig, StructuredOutputsConfig, flag
from tokenmill.config.vision import VisionConfig
from tokenmill.core.errors import InvalidConfig

DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
# Formats that checkpoints are stored in: naming one is a check, not a wish.
STORED_FORMATS = ("awq", "gptq", "compressed-tensors", "mxfp4", "gguf")
# Entry points of policies that are not ours; `engine/scheduler/policies.py` finds them.
POLICY_PLUGINS = "tokenmill.policies"
# Entry points of whole schedulers; `engine/scheduler/scheduler.py` finds them.
SCHEDULER_PLUGINS = "tokenmill.schedulers"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(VisionConfig):
    """The fields of `EngineConfig`; one left at None is decided when it is resolved, or by the engine at start."""

    model: str = flag("", "checkpoint folder or hub id (default: the bundled demo model)", aliases=("--model-path",))
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
    # No flag: bytes for KV that a server of several models has counted for this one, taken as they are used.
    kv_share_bytes: int | None = None
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
    task: str = flag(
        "auto",
        "what the model is for: auto, by its files; generate; embed: vectors of a model that also generates; "
        "rerank: scores of one that answers yes or no",
        choices=("auto", "generate", "embed", "rerank"),
    )
    matryoshka: bool = flag(False, "vectors may be cut (`dimensions`), whatever config.json says")
    truncate_inputs: str = flag(
        "off",
        "side on which texts to embed, score or classify lose what is too long; off: they are refused",
        choices=("off", "right", "left"),
    )
    rerank_template: str | None = flag(
        None, "text of a query and a document for a reranker, with {query}, {document} and {instruction}, or its file"
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
    long_prefill_token_threshold: int = flag(
        0, "tokens of one prompt in a step at most; 0: only the budget of the step limits them", size=True
    )
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
        "mixed",
        "which requests may share a step",
        choices=("mixed", "decode-first", "prefill-first"),
        plugins=POLICY_PLUGINS,
    )
    admission: str = flag(
        "whole-prompt",
        "pages a request must find to begin: those of its prompt, of its first chunk, or of its whole output too",
        choices=("whole-prompt", "optimistic", "reserve"),
        plugins=POLICY_PLUGINS,
    )
    eviction_policy: str = flag(
        "lru",
        "what the prefix cache gives up first: the least recently used, the least often used, what no request has "
        "found, or what costs least to compute again",
        choices=("lru", "lfu", "slru", "cost"),
        aliases=("--radix-eviction-policy",),
        plugins=POLICY_PLUGINS,
    )
    scheduler_cls: str = flag(
        "", "a scheduler of your own, an entry point of tokenmill.schedulers or module:Class, instead of ours"
    )
    async_scheduling: bool | None = flag(None, "schedule the next step while one runs (auto: on a GPU)")
    kernels: str = flag("auto", "kernels of everything but attention", choices=("auto", "torch", "native", "triton"))
    attention_backend: str = flag(
        "auto",
        "attention: reference, cpu or native; on a GPU triton, flash, flashinfer, hopper, or two as flash,triton: for "
        "prompts and for decodes",
    )
    quantization: str = flag(
        "none",
        "make the weights smaller at load: int8 or int4 (CPUs, native kernels), fp8 (GPUs); others only say how the "
        "checkpoint is stored",
        aliases=("-q",),
        choices=("none", "int8", "int4", "fp8", *STORED_FORMATS),
    )
    quantization_bits: float = flag(
        6.0, "of int4: bits a weight takes on the average, 4.5 to 8.5; they go to the matrices that need them most"
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of the KV cache; auto: the model's; int8, int4, or int8-int4 for keys and values: CPUs, native attention",
        choices=("auto", "int8", "int4", "int8-int4"),
    )
    kv_layout: str = flag(
        "layer-first",
        "order of KV memory; page-first: all layers of a page together, for transfer and tiers (CPUs)",
        choices=("layer-first", "page-first"),
    )
    enforce_eager: bool = flag(False, "capture no CUDA graphs")
    pdl: bool = flag(True, "on a GPU, let a kernel begin while the one in front ends; off: to locate a fault")
    shared_splits: bool = flag(
        True, "on a GPU, read the keys that decodes share once for all of them; off: to locate a fault"
    )
    batch_invariant: bool = flag(False, "on a GPU, a request's tokens do not depend on its batch (slower)")
    num_threads: int | None = flag(None, "CPU threads of a step, of each rank (auto: the cores this process may use)")
    tensor_parallel_size: int = flag(
        1, "processes that share the model, each a part of every layer", aliases=("-tp", "--tp", "--tp-size")
    )
    pipeline_parallel_size: int = flag(
        1, "stages that share the model's layers, each of as many ranks", aliases=("-pp", "--pp", "--pp-size")
    )
    context_parallel_size: int = flag(
        1,
        "processes that share the context: the attention and the KV cache of each request",
        aliases=("-cp", "-dcp", "--decode-context-parallel-size", "-pcp", "--prefill-context-parallel-size"),
    )
    all_reduce: str = flag(
        "nccl",
        "how GPUs that share layers add up: by NCCL, or up to a MiB in one launch that reads all GPUs' memory",
        choices=("nccl", "one-shot"),
    )
    nnodes: int = flag(1, "machines that share the stages; the first one serves")
    node_rank: int = flag(0, "number of this machine, from 0; all others wait for machine 0")
    master_addr: str = flag("127.0.0.1", "address of the first machine, for the others")
    master_port: int = flag(29501, "port of the first machine; engine N of several uses this port + N")
    master_secret: str = flag("", "file with the secret that the machines share")
    enable_expert_parallel: bool = flag(False, "whole experts on each rank; so it is on CPUs in any case")
    kv_events_config: str | None = flag(
        None, "JSON: publish what the prefix cache stores and evicts, as vLLM does", json=True
    )
    kv_disk: str | None = flag(None, "folder in which KV is stored; it survives restarts")
    kv_disk_size: int | None = flag(
        None, "bytes that it may take, e.g. 50GiB (auto: a fifth of the free disk, 50 GiB at most)", size=True
    )
    slot_save_path: str | None = flag(
        None, "folder in which POST /slots/N?action=save keeps conversations with their KV, as llama.cpp does"
    )
    kv_host_size: int | None = flag(None, "bytes of the host's memory for KV that a GPU has no room for", size=True)
    kv_source: tuple[str, ...] = flag(
        (), "further source of KV: an entry point of tokenmill.kv_sources or module:name; may be repeated", repeat=True
    )
    kv_transfer_config: str | None = flag(
        None, "JSON: give KV to other engines, or get it from them, as vLLM does", json=True
    )
    kv_load_failure_policy: str = flag(
        "recompute", "what to do with a request whose KV cannot be loaded", choices=("recompute", "fail")
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
    seed: int = flag(0, "seed for requests without one")
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
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def has_kv_sources(self) -> bool:
        """True if KV may come from elsewhere, or go there."""
        outside = self.kv_source or self.kv_transfer_config
        return bool(self.kv_disk or self.slot_save_path or self.kv_host_size or outside)

    @property
    def num_steps_ahead(self) -> int:
        """Number of steps that may be launched at a time."""
        return max(self.pipeline_parallel_size, 2 if self.async_scheduling else 1)

    @property
    def num_ranks_here(self) -> int:
        """Number of an engine's processes on one machine."""
        return self.num_ranks // self.nnodes

    @property
    def weight_form(self) -> str:
        """Name of the form that weights have in memory."""
        return f"int4:{self.quantization_bits:g}" if self.quantization == "int4" else self.quantization

    @property
    def weight_cache_folder(self) -> Path:
        """The folder of packed weights."""
        return Path(self.weight_cache_dir or "~/.cache/tokenmill/weights").expanduser()

    @property
    def vocabulary_folder(self) -> Path | None:
        """The folder of mapped vocabularies, inside that of packed weights; None: nothing is kept."""
        return self.weight_cache_folder / "vocabularies" if self.weight_cache else None

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
