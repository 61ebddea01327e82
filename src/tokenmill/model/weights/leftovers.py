"""Warn, once for each load, of what a checkpoint has or says of itself that the model does not use."""

from __future__ import annotations

import logging

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.weights.checkpoint import CONFIG_NAME, Checkpoint
from tokenmill.model.weights.safetensors_header import StoredTensor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20


def warn_of_leftovers(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Warn of a quantization that the weights lack, and of an output head that the config leaves no place for.

    A stored head that equals the embedding needs no warning; to see that, both are read.

    Raises:
        InvalidCheckpoint: a file cannot be read.
    """
    if checkpoint.scheme.claimed:
        logger.warning(
            "%s has a quantization_config (%s), but no weight is stored so: they are floats, and are run as such",
            checkpoint.folder / CONFIG_NAME,
            checkpoint.scheme.claimed,
        )
    if not architecture.has_head:
        return
    names = architecture.weight_names
    head, table = (checkpoint.tensors.get(WeightKey(role).name(names)) for role in ("head", "embedding"))
    if architecture.tie_embeddings and head is not None and table is not None and not _is_copy(head, table):
        logger.warning(
            "%s: tensor %s is left out: tie_word_embeddings of config.json says that the output head is %s; "
            "set it to false to run the head that is stored",
            head.file,
            head.name,
            table.name,
        )


def _is_copy(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors have the same bytes; read up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with open_regular(one.file) as first, open_regular(other.file) as second:
            first.seek(one.data_start + one.begin)
            second.seek(other.data_start + other.begin)
            left = one.num_bytes
            while left:
                size = min(left, CHUNK_BYTES)
                if first.read(size) != second.read(size):
                    return False
                left -= size
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {one.file}: {error.strerror}") from error
    return True
