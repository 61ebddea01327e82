"""A name for a model as it is computed here: the same for every engine that makes the same KV of the same tokens."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from tokenmill.core.regular_file import open_regular

# The version of the numbers that are computed. It goes up with each change after which the same files and tokens give
# other bits on any processor: in kernels, the order of a decoder's operations, quantizers or the preparation of images.
# Nothing else of a release makes what earlier ones have stored worthless; tests/engine/loop/test_kv_bits.py watches it.
NUMERICS = 3
SUFFIXES = (".json", ".safetensors", ".gguf")
# A change of weights changes them nearly everywhere, so samples of a file tell it from another, in milliseconds.
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


def fingerprint(model: Path, *forms: str) -> str:
    """Return the fingerprint of a model: 32 hexadecimal digits.

    Args:
        model: a checkpoint folder or a single file.
        forms: names of the forms of weights and KV in memory.
    """
    digest = blake2b("/".join((str(NUMERICS), *forms)).encode(), digest_size=16)
    files = (
        [model]
        if model.is_file()
        else sorted(path for path in model.iterdir() if path.suffix in SUFFIXES and path.is_file())
    )
    for path in files:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            digest.update(f"\n{path.name} {size}\n".encode())
            step = max(SAMPLE_BYTES, size // NUM_SAMPLES)
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
