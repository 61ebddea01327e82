"""Name the files that take long, and how much of them `make test` draws: the tables that tests/tiers.py goes by."""

from __future__ import annotations

from dataclasses import dataclass

# Files by folder, without `test_` and `.py`; `*`: all of the folder and below.
PROCESSES = {
    "agents": "*",
    "cli": "bad_starts completion import_path launch main run serve",
    "clients": "*",
    "engine/loop": "imports",
    "engine/parallel": "native_ranks nodes",
    "engine/parallel/devices": "context drafts engine stages",
    "house": "documents makefile no_torch python_children readme",
    "integration": "*",
    "ipc": "python_child server_registry",
    "model/kernels": "native_workers triton_compiles",
    "model/audio": "server whisper_server",
    "model/vision": "bombs encoder_server ranks server split",
    "model/weights": "hub hub_pull",
    "nixl": "*",
    "ray": "*",
    "routers": "*",
    "serving/models": "model_batches models_api random_requests swaps",
    "serving/proxy": "process",
    "serving/server": (
        "adapters admin agent_session api_servers bad_requests batch_survival batches_api carried chat_api "
        "client_cases completions_api conformance disconnect embeddings encoders end_to_end engines event_loop fleet "
        "hangs infill kv_disk lifecycle llama_cpp_api lost_log media messages_api native not_numbers observed "
        "ollama_api overload poison prompt_fields ranks responses_api responses_of_agents retrieval routing sandboxes "
        "sessions slot_files split split_failures survival thinking_control tls tokenizer_info top unknown_fields"
    ),
    "serving/web": "*",
    "startup/assembly": "engine_process",
    "threats": (
        "amplification browsers control_plane deserialization fuzz identity leaks odd_values owners parameters "
        "reused_rows silence"
    ),
    "tools": "gpu_check",
    "torchless": "*",
}
# Engines with models, transformers as an oracle, interpreted Triton kernels.
SLOW = {
    "cli": "embed estimate",
    "engine/loop": (
        "bad_starts greedy_equality kv_bits kv_matrix memory_fit native_pass partial_hits recall shared_prefix "
        "states_on_disk window_groups"
    ),
    "engine/parallel": "exactness forward slices",
    "engine/parallel/devices": "collective ring",
    "engine/runner": (
        "cuda_graphs device_drafts draft_model drafts fake_gpu fp8_experts grammar_drafts launches not_numbers "
        "on_device torch_calls"
    ),
    "engine/speculation": "bounds eagle_head exactness head_on_disk mutants",
    "house": "requirements",
    "lab/bench": "bench bench_serve quality",
    "llm": "async_llm encoders llm parked_sessions pooling session sleep threads vllm_shapes",
    "model/adapters": "batches native on_device oracle pirate reading",
    "model/attention": "context_devices flashinfer paged",
    "model/audio": "decoding encoder llm whisper",
    "model/kernels": (
        "native_build triton_attention triton_decode_inputs triton_few_rows triton_fp8 triton_fp8_experts "
        "triton_heads triton_kernels triton_matmul triton_norm_and_gate triton_recurrence triton_sampling triton_shapes"
    ),
    "model/models": "config_fields gemma3 gemma4 gpt_oss layers logits native_decoder phi3 recurrent",
    "model/structured": "answers cache custom_grammars lazy_calls lazy_rows masks thinking_budgets timing tool_calls",
    "model/vision": (
        "encoder_outputs experts gemma3 gemma4 gemma4_large images llm native on_device qwen25 qwen25_videos shapes "
        "videos"
    ),
    "model/weights": "checkpoint encoder_gguf gguf quantized_checkpoints stacked_experts",
    "real": "*",
    "startup/assembly": "capabilities warm_up",
    "startup/ranks": "group",
    "startup/sizing": "kv_size",
    "tools": "draw gpu_scripts",
    "train_eagle": "whole",
}

# Of each test of these files, how many of its parametrized cases `make test` draws; `file::test`: of that test;
# `file::*`: how many tests of the file it draws. All of them run in `make nightly`.
DRAWN = {
    "cli": {"bad_starts": 2, "bad_starts::*": 5, "main": 3, "serve": 2},
    "engine/loop": {
        "greedy_equality": 4,
        "partial_hits": 3,
        "recall": 2,
        "shared_prefix": 2,
        "window_groups": 2,
        "window_groups::test_tokens_are_those_of_whole_pages_in_float32": 1,
    },
    "engine/scheduler": {
        **dict.fromkeys(("adapter_slots", "drafts", "late_samples"), 1),
        "fair::test_one_big_call_does_not_make_a_tiny_one_wait_and_loses_little": 2,
        "state_copies::test_one_row_runs_no_token_twice": 1,
        "state_copies::test_several_rows_come_to_an_end_and_nobody_yields_to_itself": 1,
        "state_copies::test_the_same_prompt_again_never_yields_to_itself": 12,
    },
    "engine/parallel": {"exactness": 1, "slices": 1},
    "engine/parallel/devices": {"collective": 3, "context": 1, "drafts": 1, "engine": 1, "ring": 3, "stages": 1},
    "engine/runner": {
        "device_drafts": 1,
        **dict.fromkeys(("draft_model", "drafts", "grammar_drafts", "not_numbers", "on_device"), 2),
        "drafts::test_nor_on_a_device": 1,
        "grammar_drafts::test_nor_on_a_device": 1,
        "not_numbers::test_on_a_device_too": 1,
        "on_device::test_families_with_parts_of_their_own": 1,
        "on_device::test_recurrent_states_run_on_in_graphs": 1,
    },
    "integration": {"langchain": 1, "many_clients": 1, "tools": 1},
    "llm": {"pooling": 3, "pooling::test_the_activation_is_the_one_that_the_files_name": 1},
    "ipc": {"sandbox": 2, "sandbox::test_however_many_idle_processes_are_lost_the_next_job_is_done": 1},
    "model/adapters": {"batches": 1, "batches::*": 2, "native": 1, "on_device": 1, "oracle": 2},
    "model/attention": {"context_devices": 1, "flashinfer": 1},
    "model/kernels": {"triton_attention": 2, "triton_recurrence": 2, "triton_sampling": 1},
    "model/models": {
        "config_fields": 5,
        "recurrent": 2,
        "recurrent::test_a_session_goes_on_from_its_state": 1,
        "recurrent::test_native_bits_do_not_depend_on_steps_states_and_preemptions": 1,
    },
    "model/structured": {"answers": 1, "cache": 2, "custom_grammars": 5, "thinking_budgets::*": 3},
    "model/sampling": {"distribution": 6},
    "model/vision": {"llm": 2, "native": 1, "on_device": 1},
    "model/weights": {"hub": 1},
    "serving/frontend": {"template_budget": 4},
    "serving/proxy": {"process": 1},
    "serving/server": {
        **dict.fromkeys(("api_servers", "engines", "event_loop", "hangs", "lifecycle", "lost_log", "sandboxes"), 1),
        **dict.fromkeys(("split", "survival"), 1),
        **dict.fromkeys(("client_cases", "disconnect"), 2),
        **dict.fromkeys(("sessions::*", "thinking_control::*"), 5),
        "lifecycle::*": 7,
    },
    "serving/web": {"browser": 3},
    "startup/assembly": {"warm_up": 1},
    "torchless": {"commands": 1, "offline": 2, "server": 1},
    "startup/ranks": {"group": 1},
    "threats": {
        **dict.fromkeys(("amplification", "browsers", "identity", "silence"), 1),
        "large_bodies": 5,
        "reused_rows": 3,
    },
}


@dataclass(frozen=True, slots=True)
class Pool:
    """Files whose tests start engines to show one kind of thing: `make test` draws `count` of them all together."""

    count: int
    files: str


POOLS = {
    "parts that die or hang": Pool(
        14,
        "engine/parallel/nodes serving/proxy/process serving/server/agent_session serving/server/batch_survival "
        "serving/server/fleet serving/server/hangs serving/server/kv_disk serving/server/lost_log "
        "serving/server/poison serving/server/ranks serving/server/split_failures serving/server/survival "
        "startup/ranks/group",
    ),
    "devices, interpreted": Pool(
        9,
        "engine/parallel/devices/drafts engine/parallel/devices/engine engine/parallel/devices/stages "
        "engine/runner/fake_gpu engine/runner/on_device model/adapters/on_device model/vision/on_device "
        "tools/gpu_check tools/gpu_scripts",
    ),
    "servers of several parts": Pool(
        12, "serving/server/api_servers serving/server/engines serving/server/routing serving/server/split"
    ),
    "slow attacks": Pool(
        12, "integration/traps model/vision/bombs serving/server/sandboxes threats/amplification threats/silence"
    ),
    "pages in a browser": Pool(
        16,
        "serving/web/answers serving/web/browser serving/web/documents serving/web/everybody serving/web/images "
        "serving/web/kept serving/web/languages serving/web/live serving/web/live_route serving/web/models "
        "serving/web/pdf serving/web/reading serving/web/texts serving/web/voice",
    ),
}
