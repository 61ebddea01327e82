"""`StoredOutputs`: the encoder outputs of an engine in a store outside, as tensors.

Loads happen in the step that needs them, saves on a thread of their own. A load that fails is told to the engine and
costs an encoding; a save that fails ends the saves.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue

import numpy as np
import torch

from tokenmill.core.media import MediaInput
from tokenmill.engine.transfer.output_files import OutputStore, output_name, pack, unpack

logger = logging.getLogger(__name__)

# Outputs that wait to be written; more are not saved: whatever is slow then, steps are not.
MOST_SAVES = 64
CLOSE_SECONDS = 2.0


class StoredOutputs:
    """The outputs of one encoder in a store.

    Args:
        whose: names the encoder; see `output_name`.
        dtype: of its outputs.
        loads, saves: the parts that this engine takes.
    """

    def __init__(
        self, store: OutputStore, whose: str, dtype: torch.dtype, loads: bool = True, saves: bool = True
    ) -> None:
        self._store = store
        self._whose = whose
        self._dtype = str(dtype).removeprefix("torch.")
        self._loads = loads
        self._saves = saves
        self._failed: SimpleQueue[str] = SimpleQueue()
        self._writer = ThreadPoolExecutor(1, "encoder-outputs")
        self._writes: set[Future[None]] = set()

    def has(self, digest: str) -> bool:
        """Return True if the output of a content can be loaded, as far as is known without reading it."""
        return self._loads and self._store.has(output_name(self._whose, digest))

    def take_failed(self) -> list[str]:
        """Return the digests whose loads have failed since the last call."""
        failed = []
        while True:
            try:
                failed.append(self._failed.get_nowait())
            except Empty:
                return failed

    def put(self, one: MediaInput, packed: bytes) -> bool:
        """Keep an output that was made elsewhere; return False if it is not that of this content by this encoder."""
        name = output_name(self._whose, one.span.digest)
        if self._unpacked(name, one.span.length, packed) is None:
            return False
        try:
            self._store.write(name, packed)
        except OSError as error:
            logger.warning("an encoder output cannot be kept: %s", error.strerror or error)
            return False
        return True

    def load(self, one: MediaInput) -> torch.Tensor | None:
        """Return the output of a content, [n, levels, hidden_size] on the host; None: it is gone or damaged."""
        name = output_name(self._whose, one.span.digest)
        data = self._store.read(name)
        output = None if data is None else self._unpacked(name, one.span.length, data)
        if output is None:
            self._failed.put(one.span.digest)
            if data is not None:
                logger.warning("encoder output %s is damaged: it is made again", name)
                self._store.remove(name)
        return output

    def _unpacked(self, name: str, length: int, data: bytes | bytearray) -> torch.Tensor | None:
        found = unpack(name, data)
        if found is None or found[0].dtype != self._dtype or found[0].shape[:1] != (length,):
            return None
        numbers = torch.from_numpy(np.frombuffer(found[1], np.uint8).copy())
        return numbers.view(getattr(torch, self._dtype)).view(found[0].shape)

    def save(self, one: MediaInput, output: torch.Tensor) -> None:
        """Write an output on the thread for that, unless it is there, or too many wait."""
        self._writes = {write for write in self._writes if not write.done()}
        if self._saves and len(self._writes) < MOST_SAVES:
            self._writes.add(self._writer.submit(self._write, one.span.digest, output))

    def _write(self, digest: str, output: torch.Tensor) -> None:
        name = output_name(self._whose, digest)
        if not self._saves or self._store.has(name):
            return
        try:
            self._store.write(name, packed_output(name, output))
        except OSError as error:
            logger.warning("encoder outputs are not stored any more: %s", error.strerror or error)
            self._saves = False

    def close(self) -> None:
        """Write what was offered, as far as there is time, and drop the rest."""
        wait(self._writes, CLOSE_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)


def packed_output(name: str, output: torch.Tensor) -> bytes:
    """Return an output as it lies in a store."""
    numbers = output.detach().cpu().contiguous()
    raw = memoryview(numbers.view(torch.uint8).flatten().numpy())
    return pack(name, str(numbers.dtype).removeprefix("torch."), tuple(numbers.shape), raw)


def encoder_dtype(name: str) -> torch.dtype:
    """Return the type that a config calls by its name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
