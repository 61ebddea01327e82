"""Pack weights once for all engines of the machine and all later starts; see `PackedFile`."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import tokenmill
from tokenmill.config.configs import EngineConfig
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.cache_folder import place_in
from tokenmill.model.weights.fingerprint import SUFFIXES, fingerprint
from tokenmill.model.weights.loader import ModelPlan, Progress
from tokenmill.model.weights.packed_file import Claim, Content, claim, is_memory
from tokenmill.platform.memory import HUGE_PAGE, Arena

logger = logging.getLogger(__name__)

# The code that decides what bytes are packed: a change of it is another content.
CODE = (
    "_native*",
    "model/architecture/*.py",
    "model/kernels/*.py",
    "model/models/*.py",
    "model/quantization/*.py",
    "model/weights/*.py",
    "model/weights/gguf/*.py",
)


class LoadedWeights(msgspec.Struct, frozen=True):
    """A decoder with weights.

    Attributes:
        source: their origin, in words for the start-up screen.
        file_bytes: of them that lie in a file's pages, which the system counts as free: it could read them again.
    """

    decoder: Decoder
    source: str
    file_bytes: int = 0


def load_weights(plan: ModelPlan, folder: Path, config: EngineConfig, progress: Progress) -> LoadedWeights:
    """Map weights packed before, or pack them, where others can map them if there is such a place.

    Args:
        folder: the model's, of which `plan` is.

    Raises:
        InvalidCheckpoint: see `ModelPlan.load`.
    """
    started = time.perf_counter()
    if plan.kernels.name == "native" and plan.reads is not None:
        content = content_of(plan, folder)
        # In memory there is one file, and each rank has weights of its own.
        places = (_in_cache, _in_memory) if plan.shapes.shard.is_alone else (_in_cache,)
        for place in places:
            try:
                path = place(config, content)
                if path is not None:
                    return _share(plan, path, content, progress)
            except OSError as error:
                logger.warning("packed weights are not kept in %s: %s", error.filename, error.strerror)
    decoder = plan.load(progress)
    return LoadedWeights(decoder, f"packed in {time.perf_counter() - started:.1f} s")


def content_of(plan: ModelPlan, folder: Path) -> Content:
    """Return the content that a plan packs: its key is of the model's files, the form, and the code that packs."""
    sizes = list(map(Arena.room, plan.sizes))
    formats, native = getattr(plan.kernels, "formats", None), getattr(plan.kernels, "native", None)
    weighed = "" if plan.importance is None else plan.importance.digest
    form = f"{formats} {getattr(native, 'isa', None)} {sizes} {plan.shapes.shard} {plan.merged} {weighed}"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file()]
    key = fingerprint(folder, form, *_versions(files), *_versions(_code()))
    return Content(key, -(-sum(sizes) // HUGE_PAGE) * HUGE_PAGE)


def _versions(files: list[Path]) -> Iterator[str]:
    """Yield name, size and times of files: a fingerprint's samples may miss a small change, the times do not."""
    for path in files:
        status = path.stat()
        yield f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _code() -> list[Path]:
    return [path for place in tokenmill.__path__ for pattern in CODE for path in sorted(Path(place).glob(pattern))]


def _in_cache(config: EngineConfig, content: Content) -> Path | None:
    return place_in(config.weight_cache_folder, content, config.weight_cache_size) if config.weight_cache else None


def _in_memory(config: EngineConfig, content: Content) -> Path | None:
    return Path(config.weight_memory) if config.weight_memory else None


def _share(plan: ModelPlan, path: Path, content: Content, progress: Progress) -> LoadedWeights:
    """Return the weights as a file has them, packed into it first if it has none."""
    where = "shared memory" if is_memory(path) else "the cache"
    total = sum(read.num_bytes for read in plan.reads or ())
    started, source = time.perf_counter(), f"mapped from {where}"
    native = getattr(plan.kernels, "native", None)
    threads = 1 if native is None else native.threads
    file, found = claim(path, content, lambda: progress(0, total), threads)
    try:
        if found is Claim.OURS:
            file.write(lambda memory: plan.load(progress, Arena(memory)))
            file.lock(fcntl.LOCK_SH)
            source = f"packed into {where} in {time.perf_counter() - started:.1f} s"
        file.touch()
        decoder = plan.place(Arena(file.map()))
    finally:
        file.close()
    return LoadedWeights(decoder, source, 0 if is_memory(path) else content.num_bytes)
