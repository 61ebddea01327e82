"""Group the flags of `serve` for its help: the common ones first. What no group names comes last.

Knows names of fields only; a test keeps every name true and in one group.
"""

from __future__ import annotations

COMMON = ("model", "host", "port", "api_key", "served_model_name", "max_model_len", "quantization", "device")
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("common", COMMON),
    (
        "chat: templates, tools, thinking, sampling",
        (
            "chat_template", "tool_call_parser", "enable_auto_tool_choice", "tool_grammar", "reasoning_parser",
            "reasoning_budget", "reasoning_budget_message", "default_chat_template_kwargs",
            "override_generation_config", "volatile_blocks", "structured_outputs_config",
            "max_string_length", "max_logprobs",
        ),
    ),
    (
        "memory and speed",
        (
            "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "num_pages", "page_size",
            "max_num_seqs", "max_num_batched_tokens", "num_threads", "dtype", "quantization_bits", "speculative_config",
            "enable_prefix_caching", "state_memory",
        ),
    ),
    (
        "where the model comes from",
        (
            "tokenizer", "revision", "download_dir", "load_format", "weight_cache", "weight_cache_dir",
            "weight_cache_size",
        ),
    ),
    (
        "KV beyond this engine",
        (
            "kv_disk", "kv_disk_size", "slot_save_path", "kv_host_size", "kv_source", "kv_transfer_config",
            "kv_load_failure_policy", "kv_events_config", "kv_layout",
        ),
    ),
    (
        "adapters",
        (
            "enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_merge",
            "allow_runtime_lora", "lora_dir",
        ),
    ),
    (
        "images and sound",
        (
            "limit_mm_per_prompt", "encoder_budget", "encoder_cache_tokens", "disable_chunked_mm_input",
            "language_model_only",
            "allowed_media_domains", "encoder_store", "encoder_store_size", "encoder_urls", "encoder_api_key",
            "ec_transfer_config", "encoder_only",
        ),
    ),
    (
        "scheduling",
        (
            "scheduling_policy", "batch_policy", "admission", "eviction_policy", "scheduler_cls", "async_scheduling",
            "enable_chunked_prefill", "long_prefill_token_threshold", "disable_hybrid_kv_cache_manager", "seed",
        ),
    ),
    (
        "several engines, ranks and machines",
        (
            "data_parallel_size", "routing_policy", "tensor_parallel_size", "pipeline_parallel_size",
            "context_parallel_size", "enable_expert_parallel", "all_reduce", "nnodes", "node_rank", "master_addr",
            "master_port", "master_secret", "api_server_count", "tokenizer_workers",
        ),
    ),
    (
        "HTTP: addresses, guards, limits, times",
        (
            "uds", "root_path", "ssl_keyfile", "ssl_certfile", "metrics_open", "allowed_origins", "allowed_hosts",
            "max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes_in_flight", "head_timeout", "body_timeout",
            "keep_alive_timeout", "sse_ping", "engine_timeout", "prompt_timeout", "ttl", "shutdown_timeout",
            "max_restarts", "strict_fields", "batch_dir", "batch_max_bytes", "batch_max_files",
            "responses_dir",
        ),
    ),
    (
        "logs and metrics",
        (
            "enable_log_requests", "disable_log_stats", "log_format", "metrics_prefix", "otlp_traces_endpoint",
            "step_log", "script",
        ),
    ),
    (
        "kernels",
        ("kernels", "attention_backend", "enforce_eager", "pdl", "shared_splits", "batch_invariant"),
    ),
)  # fmt: skip
