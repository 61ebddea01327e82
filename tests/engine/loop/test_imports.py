"""Check the packages that an engine needs: not the server's, and on a CPU not a GPU's."""

import subprocess
import sys

SERVERS = {"starlette", "uvicorn", "httpx", "zmq", "prometheus_client", "transformers"}
GPUS = {"triton", "flashinfer"}


def imported(code: str) -> set[str]:
    listing = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{listing}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_offline_engine_imports_nothing_of_the_server_of_a_gpu_or_of_kv_transfer() -> None:
    code = (
        "from tokenmill import LLM, SamplingParams\n"
        "with LLM(max_model_len=64, num_pages=16, max_num_seqs=2) as llm:\n"
        "    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "import sys\n"
        "assert not [name for name in sys.modules if name.startswith('tokenmill.engine.transfer')]"
    )
    assert imported(code) & (SERVERS | GPUS) == set()


def test_an_engine_without_text_needs_a_few_small_wheels() -> None:
    found = imported("import tokenmill.startup.assembly.setup")
    assert {"numpy", "msgspec"} <= found
    others = {"torch", "jinja2", "rich", "huggingface_hub", "llguidance", "safetensors"}
    assert found & (SERVERS | GPUS | others) == set()
