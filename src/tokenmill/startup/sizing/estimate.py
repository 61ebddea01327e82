"""`estimate`: what a model would take on this machine, from its config and the headers of its weights."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.gguf_names import split_tag
from tokenmill.config.model_files import is_hub_id
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.sizes import size_text
from tokenmill.demo import demo_model_path
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.weights.catalogue import CATALOGUE
from tokenmill.model.weights.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, open_checkpoint, read_architecture
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.hub import fetch, hub_errors
from tokenmill.platform.select import select_platform
from tokenmill.startup.machine.bandwidth import read_bandwidth
from tokenmill.startup.machine.device import choose_threads
from tokenmill.startup.sizing.forms import Form, forms, free_bytes, table
from tokenmill.startup.sizing.kv_size import wanted_context
from tokenmill.startup.sizing.state_size import BYTES_OF, states_text
from tokenmill.startup.sizing.tower_size import TowerMemory


class Target(msgspec.Struct, frozen=True):
    """The memory and bandwidth to estimate for, where they are not this machine's own.

    Attributes:
        memory: bytes for weights and KV; None: as many as are free.
        bandwidth: bytes of memory read per second; None: it is measured.
    """

    memory: int | None = None
    bandwidth: float | None = None


def estimate(config: EngineConfig, target: Target) -> str:
    """Return lines on what the model of a config would take; reads and downloads only JSON files and headers.

    Args:
        config: `model` is a folder, a config.json, a .gguf file or a hub id.

    Raises:
        InvalidCheckpoint: there is no such model, or it is of a kind that is not supported.
        InvalidConfig: flags that do not go together, or with this machine.
    """
    platform = select_platform(config.device)
    model = config.model or str(demo_model_path())
    config = dataclasses.replace(config, model=model, device=platform.device).resolve()
    with opened(config) as (folder, stored):
        architecture = read_architecture(folder)
        wanted_context(config, architecture.max_position)
        weights = architecture.num_parameters() * BYTES_OF[config.dtype]
        num_threads, reason = choose_threads(config, platform, weights)
        choices = forms(config, platform, folder, architecture, num_threads)
    free = free_bytes(config, platform, architecture) if target.memory is None else target.memory
    bandwidth = target.bandwidth or read_bandwidth(platform, num_threads=num_threads)
    is_measured = "measured now" if target.bandwidth is None else "as given"
    return "\n".join(
        [
            f"model    {config.model}: {_model_text(architecture)}{stored}",
            f"machine  {platform.name}, {size_text(free)} {'free' if target.memory is None else 'as given'}; memory is "
            f"read at {bandwidth / 1e9:,.3g} GB/s ({is_measured}), threads: {num_threads} ({reason})",
            "",
            table(choices, architecture, free, bandwidth),
            "",
            _notes(config, architecture)
            + _ranks_text(choices[0])
            + states_text(config, architecture)
            + _tower_text(choices[0].tower),
        ]
    )


def _model_text(architecture: Architecture) -> str:
    mapped = architecture.num_mapped_parameters
    rows = f" ({mapped / 1e6:,.4g} of them read by rows where the file is mapped, not loaded)" if mapped else ""
    return (
        f"{architecture.name}, {architecture.num_parameters() / 1e6:,.4g} million parameters{rows}, a context of "
        f"{architecture.max_position:,}"
    )


def _notes(config: EngineConfig, architecture: Architecture) -> str:
    if not architecture.needs_kv:
        return _encoder_notes(config, architecture)
    is_share = config.num_pages is None and config.kv_cache_memory_bytes is None
    share = f"{config.gpu_memory_utilization:.0%} of what the weights leave (--gpu-memory-utilization)"
    return (
        f"The KV cache is {share if is_share else 'as large as asked for'}; at most {config.max_num_seqs} requests run "
        "at a time (--max-num-seqs).\nA step reads all of the weights once: so fast is one request alone, unless the "
        "weights fit into caches; several share that reading."
    )


def _ranks_text(form: Form) -> str:
    """Return a sentence on ranks that share a context; "": there are none."""
    size = form.config.context_parallel_size
    if size == 1:
        return ""
    own = size_text(form.kv_bytes_per_token / size)
    return (
        f"\nEach of {size} ranks has a part of the KV cache, {own} of a token, and all of the weights "
        "(--context-parallel-size)."
    )


def _encoder_notes(config: EngineConfig, architecture: Architecture) -> str:
    """Return sentences on what a text of a model without KV costs: multiplications and additions, two for each."""
    rows = architecture.vocab_size + (architecture.inputs.num_rows if architecture.inputs is not None else 0)
    blocks = [layer.mlp for layer in architecture.layers if isinstance(layer.mlp, MoeSpec)]
    idle = sum(block.num_idle_parameters(architecture.hidden_size) for block in blocks)
    layers = 2 * (architecture.num_parameters() - rows * architecture.hidden_size - idle)
    longest = wanted_context(config, architecture.max_position)
    seen = [min(longest, one.window or longest) * (2 if one.window else 1) for one in architecture.attentions]
    pairs = zip(architecture.attentions, seen, strict=True)
    scores = sum(4 * one.q_size * min(longest, tokens) for one, tokens in pairs)
    return (
        f"A text is whole in a step of at most {max(config.step_budget, longest):,} tokens (--max-num-batched-tokens) "
        f"and keeps no KV.\nA token costs {layers / 1e6:,.3g} million operations, and in a text of {longest:,} tokens "
        f"{scores / 1e6:,.3g} million more: processors, not memory, decide how many texts there are in a second."
    )


def _tower_text(tower: TowerMemory) -> str:
    """Return a sentence on the tower of images or sound; "": the model has neither."""
    if not tower.weights:
        return ""
    return (
        f"\nOf the weights {size_text(tower.weights)} are {tower.noun}, which only {tower.users} need; "
        f"{size_text(tower.reserved)} are left for what it makes (--encoder-budget, --encoder-cache-tokens)."
    )


@contextmanager
def opened(config: EngineConfig) -> Iterator[tuple[Path, str]]:
    """Provide a folder with the model's config.json, and a clause on its stored weights."""
    path = Path(config.model).expanduser()
    if path.is_file() and path.suffix == ".json":
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
            (Path(folder) / CONFIG_NAME).write_bytes(path.read_bytes())
            yield Path(folder), "; weights unknown: this is a config alone"
    elif not path.exists() and is_hub_id(config.model) and config.model not in CATALOGUE:
        if split_tag(config.model)[1] is not None:
            raise InvalidCheckpoint(
                f"{config.model} is on the hub: pull it first, estimate reads GGUF files that are here"
            )
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
            stored = read_headers(config.model, config.revision, Path(folder))
            yield Path(folder), f"; on the hub: {_stored_text(stored)}"
    else:
        folder_path = fetch(config.model, config.revision, config.download_dir)
        if (folder_path / LINK_NAME).exists():
            kinds = [(tensor.kind, tensor.num_bytes) for tensor in open_gguf(folder_path / LINK_NAME).tensors.values()]
            yield folder_path, f"; stored: {_stored_text(kinds)}"
            return
        has_weights = any((folder_path / name).exists() for name in (SINGLE_NAME, INDEX_NAME))
        tensors = open_checkpoint(folder_path).tensors.values() if has_weights else ()
        stored = [(tensor.dtype, tensor.num_bytes) for tensor in tensors]
        yield folder_path, f"; stored: {_stored_text(stored)}" if stored else ""


def _stored_text(tensors: Iterable[tuple[str, int]]) -> str:
    """Return the bytes of each type, the largest first."""
    sizes: Counter[str] = Counter()
    for dtype, num_bytes in tensors:
        sizes[dtype] += num_bytes
    return " and ".join(f"{size_text(size)} of {dtype}" for dtype, size in sizes.most_common())


def read_headers(model: str, revision: str | None, folder: Path) -> list[tuple[str, int]]:
    """Return type and bytes of each tensor; ask for the first bytes of each file of weights, and no more.

    Args:
        folder: gets the model's config.json.

    Raises:
        InvalidCheckpoint: no such repository, no access, no connection, no safetensors; one sentence.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with hub_errors(model, revision):
        hf_hub_download(model, CONFIG_NAME, revision=revision, local_dir=folder)
        try:
            files = HfApi().get_safetensors_metadata(model, revision=revision).files_metadata
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            raise InvalidCheckpoint(f"the hub's {model} has no weights in safetensors that can be read") from error
    tensors = [tensor for file in files.values() for tensor in file.tensors.values()]
    return [(tensor.dtype, tensor.data_offsets[1] - tensor.data_offsets[0]) for tensor in tensors]
