"""Many models behind one address: seconds to the first token of a swapped model, and the memory of an idle server.

    python -m benchmarks.models [--models-dir DIR] [--make 4] [--megabytes 1000] [--models-memory 4GiB] [--rounds 3]

Without `--models-dir` it makes checkpoints of random weights in bfloat16, of so many megabytes each. Each request names
the model that was used longest ago, so that with less memory than models every request swaps. A first round, which
packs weights, is not counted; `--pause` waits before each request, `--cold` drops packed weights from the page cache.
Then the server rests, and the memory of its processes is added up: PSS, anonymous and of mapped files. One line of
JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from tokenmill.demo import demo_model_path

MIB = 1 << 20
REST_SECONDS = 12.0
HIDDEN, HEADS, KV_HEADS, MIDDLE = 2048, 16, 4, 8192
PROMPT = "Once upon a time"
_READY = re.compile(r"models at (http://\S+?),")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models, ask them in turn, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models-dir", help="models that are there already")
    parser.add_argument("--make", type=int, default=4, help="how many to make")
    parser.add_argument("--megabytes", type=int, default=1000, help="of each")
    parser.add_argument("--models-memory", default="4GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each request")
    parser.add_argument("--cold", action="store_true", help="drop packed weights from the page cache before requests")
    args, flags = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tokenmill-models-") as temporary:
        folder = Path(args.models_dir or temporary)
        if args.models_dir is None:
            for number in range(args.make):
                make_model(folder / f"model-{number}", args.megabytes, number)
        cache = Path(temporary) / "packed"
        flags += ["--models-dir", str(folder), "--models-memory", args.models_memory, "--weight-cache-dir", str(cache)]
        with (
            serving(flags, Path(temporary) / "log") as (process, url),
            httpx.Client(base_url=url, timeout=600) as client,
        ):
            names = [card["id"] for card in client.get("/v1/models").json()["data"]]
            seconds: list[float] = []
            for turn in range(args.rounds + 1):
                for name in names:
                    time.sleep(args.pause)
                    if args.cold:
                        drop(cache)
                    found = first_token(client, name)
                    seconds += [found] if turn else []
            states = [card["state"] for card in client.get("/v1/models").json()["data"]]
            loads = sum(samples(client.get("/metrics").text, "model_loads_total"))
            time.sleep(REST_SECONDS)
            memory = memory_of(process.pid)
    print(
        json.dumps(
            {
                "models": len(names),
                "models_memory": args.models_memory,
                "requests": len(seconds),
                "loads": loads,
                "first_token_seconds": round(statistics.median(seconds), 3),
                "slowest_seconds": round(max(seconds), 3),
                "pause": args.pause,
                "cold": args.cold,
                "loaded": states.count("ready"),
                **memory,
            }
        )
    )


def first_token(client: httpx.Client, name: str) -> float:
    """Return the seconds until the first event of an answer."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                assert "error" not in line, line
                return time.perf_counter() - began
    raise AssertionError("a stream without an event")


def samples(text: str, name: str) -> list[float]:
    """Return the values of all samples of a metric."""
    return [float(value) for value in re.findall(rf"^tokenmill:{name}{{.*}} (\S+)$", text, re.MULTILINE)]


@contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve while the block runs; yield the process and its address."""
    command = [sys.executable, "-m", "tokenmill", "serve", "--port", "0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while (found := _READY.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.terminate()
        process.wait()


def memory_of(pid: int) -> dict[str, float]:
    """Return MiB of a process and all below it: in all, their own, and of mapped files (of which weights are)."""
    pids = [pid]
    for parent in pids:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += map(int, listed.read_text().split())
    sums = dict.fromkeys(("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"), 0)
    for one in pids:
        text = Path(f"/proc/{one}/smaps_rollup").read_text()
        for name in sums:
            found = re.search(rf"^{name}: +(\d+) kB", text, re.MULTILINE)
            sums[name] += int(found[1]) << 10 if found else 0
    shown = {"Pss": "pss_mib", "Pss_Anon": "anonymous_mib", "Pss_File": "file_mib", "Pss_Shmem": "shared_mib"}
    return {"processes": len(pids), **{shown[name]: round(size / MIB, 1) for name, size in sums.items()}}


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache, as far as nobody maps them."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def make_model(folder: Path, megabytes: int, seed: int) -> None:
    """Write a Llama checkpoint of random weights in bfloat16, with the demo model's tokenizer."""
    folder.mkdir(parents=True)
    demo = demo_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (demo / name).exists():
            shutil.copy(demo / name, folder / name)
    vocab = json.loads((demo / "config.json").read_text())["vocab_size"]
    head = HIDDEN // HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MIDDLE, HIDDEN),
        "mlp.up_proj": (MIDDLE, HIDDEN),
        "mlp.down_proj": (HIDDEN, MIDDLE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    per_layer = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    num_layers = max(1, round(megabytes * 1_000_000 / per_layer))
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    write_weights(folder / "model.safetensors", shapes, np.random.default_rng(seed))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Write a safetensors file of random bfloat16 numbers."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            scale = np.float32(1.0 if name.endswith("norm.weight") else 0.02)
            numbers = rng.standard_normal(int(np.prod(shape)), dtype=np.float32) * scale
            file.write((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())


if __name__ == "__main__":
    main()
