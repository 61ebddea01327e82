"""Check the fields of a config, each and together, before anything is started."""

from __future__ import annotations

import dataclasses
import math
import re

from tokenmill.config.engine_settings import EngineSettings
from tokenmill.config.fields import adapter_modules, sampling_overrides, template_defaults
from tokenmill.config.kv_transfer import parse_kv_transfer_config
from tokenmill.config.server_settings import ServerSettings
from tokenmill.config.speculation import parse_config
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sampling_params import MAX_LOGPROBS


def check_engine(config: EngineSettings) -> None:
    """Check the fields of an engine, as far as they do not depend on its device or its model.

    Raises:
        InvalidConfig: naming the flags and what to change.
    """
    _check_finite(config)
    _check_positive(config, "page_size", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "nnodes")
    _check_positive(config, "context_parallel_size")
    _check_ranks(config)
    if config.page_size > 256 or config.page_size & (config.page_size - 1):
        raise InvalidConfig(f"--page-size must be a power of two up to 256, got {config.page_size}")
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < config.max_num_seqs:
        raise InvalidConfig(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}): every running request takes a token of each step"
        )
    for name in ("long_prefill_token_threshold", "max_string_length"):
        if (getattr(config, name) or 0) < 0:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be 0 (off) or more")
    for name in (
        "max_model_len",
        "num_pages",
        "kv_cache_memory_bytes",
        "state_memory",
        "num_threads",
        "max_num_batched_tokens",
        "weight_cache_size",
        "kv_disk_size",
        "kv_host_size",
        "encoder_store_size",
    ):
        if getattr(config, name) is not None:
            _check_positive(config, name)
    if not 4.5 <= config.quantization_bits <= 8.5:
        raise InvalidConfig(f"--quantization-bits must be from 4.5 to 8.5, got {config.quantization_bits:g}")
    parse_kv_transfer_config(config.kv_transfer_config)
    if config.has_kv_sources and not config.enable_prefix_caching:
        raise InvalidConfig("KV from elsewhere needs the prefix cache: leave out --no-enable-prefix-caching")
    _check_adapters(config)
    config.kv_events()
    parse_config(config.speculative_config)
    config.media_limits()
    config.encoder_outputs()


def check_server(config: ServerSettings) -> None:
    """Check the fields of a server.

    Raises:
        InvalidConfig: naming the flag and what to change.
    """
    if not 0 <= config.port <= 65535:
        raise InvalidConfig(f"--port must be between 0 and 65535, got {config.port}")
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be 0 or more, got {value}")
    _check_positive(config, "max_body_bytes_in_flight", "data_parallel_size", "api_server_count")
    _check_positive(config, "batch_max_bytes", "batch_max_files")
    if config.models_memory is not None:
        _check_positive(config, "models_memory")
    if config.api_key_models is not None and config.models_dir is None and config.models is None:
        raise InvalidConfig("--api-key-models is of several models: it needs --models-dir or --models")
    _check_times(config)
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", config.metrics_prefix):
        raise InvalidConfig(f"--metrics-prefix must be a word of lower-case letters, got {config.metrics_prefix!r}")
    if config.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]", config.otlp_traces_endpoint):
        raise InvalidConfig("--otlp-traces-endpoint must be a URL, e.g. http://127.0.0.1:4318/v1/traces")
    if not 0 <= config.max_logprobs <= MAX_LOGPROBS:
        raise InvalidConfig(f"--max-logprobs must be between 0 and {MAX_LOGPROBS}, got {config.max_logprobs}")
    if config.tool_call_parser == "openai" and config.reasoning_parser not in (None, "openai_gptoss"):
        raise InvalidConfig("--tool-call-parser openai needs --reasoning-parser openai_gptoss: the format marks both")
    if config.enable_auto_tool_choice and config.tool_call_parser == "none":
        raise InvalidConfig("--enable-auto-tool-choice needs a parser of calls: leave out --tool-call-parser none")
    _check_pairs(config)
    sampling_overrides(config.override_generation_config)
    template_defaults(config.default_chat_template_kwargs)
    if config.uds == "":
        raise InvalidConfig("--uds needs a path")
    least = 1 if config.api_server_count > 1 else 0
    if config.tokenizer_workers < least:
        beside = " beside --api-server-count" if least else ""
        raise InvalidConfig(f"--tokenizer-workers must be {least} or more{beside}")


def _check_ranks(config: EngineSettings) -> None:
    if config.context_parallel_size > 1 and config.num_ranks > config.context_parallel_size:
        raise InvalidConfig(
            f"--context-parallel-size {config.context_parallel_size}: ranks that share a context have the whole model "
            "each; leave out --tensor-parallel-size and --pipeline-parallel-size (vLLM counts decode context among "
            "its tensor ranks)"
        )
    if config.tensor_parallel_size == 1 and config.enable_expert_parallel:
        raise InvalidConfig("--enable-expert-parallel spreads experts over ranks: it needs --tensor-parallel-size")
    if config.pipeline_parallel_size % config.nnodes:
        raise InvalidConfig(
            f"--nnodes {config.nnodes}: --pipeline-parallel-size must be a multiple of it; the ranks of a stage share "
            "memory, so a machine has whole stages"
        )
    if not 0 <= config.node_rank < config.nnodes:
        raise InvalidConfig(f"--node-rank must be below --nnodes ({config.nnodes}), got {config.node_rank}")
    if config.nnodes > 1 and not config.master_secret:
        raise InvalidConfig("--nnodes needs --master-secret FILE: the machines prove to each other that they know it")
    if config.num_ranks > 1 and config.kv_host_size:
        raise InvalidConfig("--kv-host-size needs an engine of one rank")
    if config.context_parallel_size > 1 and config.has_kv_sources:
        raise InvalidConfig("--context-parallel-size: ranks that share one KV have no --kv-disk; leave one of them out")
    if config.nnodes > 1 and config.has_kv_sources:
        raise InvalidConfig("--nnodes: KV goes to and from engines whose ranks share a machine; leave out --kv-disk")


def _check_pairs(config: ServerSettings) -> None:
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise InvalidConfig("--ssl-keyfile and --ssl-certfile go together")
    if config.allow_runtime_lora != (config.lora_dir is not None):
        raise InvalidConfig("--allow-runtime-lora and --lora-dir go together")
    if config.allow_runtime_lora and config.api_server_count > 1:
        raise InvalidConfig("--allow-runtime-lora needs one process that serves HTTP: each keeps names of its own")


def _check_adapters(config: EngineSettings) -> None:
    adapter_modules(config.lora_modules)
    if not config.enable_lora:
        if config.lora_modules:
            raise InvalidConfig("--lora-modules needs --enable-lora")
        return
    _check_positive(config, "max_loras", "max_lora_rank")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise InvalidConfig(f"--max-cpu-loras must be at least --max-loras ({config.max_loras})")


def _check_times(config: ServerSettings) -> None:
    _check_finite(config)
    for name in (
        "engine_timeout",
        "prompt_timeout",
        "head_timeout",
        "body_timeout",
        "keep_alive_timeout",
        "models_wait",
    ):
        seconds = getattr(config, name)
        if seconds <= 0:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be more than 0 seconds, got {seconds}")
    for name in ("shutdown_timeout", "sse_ping", "ttl", "models_ttl"):
        if getattr(config, name) < 0:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be 0 seconds or more, got {getattr(config, name)}")


def _check_finite(config: EngineSettings | ServerSettings) -> None:
    """Refuse NaN, which slips through range checks, and infinity, which no clock reaches."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidConfig(f"--{field.name.replace('_', '-')} must be a finite number, got {value}")


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be at least 1, got {value}")
