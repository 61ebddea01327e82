"""The bits of KV are those of the releases before, which have left them on disks, or `NUMERICS` has gone up.

The record is what the code made that first had its number; `python -m tests.engine.loop.test_kv_bits` prints anew.
Where bits have changed on purpose, raise `NUMERICS` in the same commit; else something rounds otherwise by mistake.
"""

from __future__ import annotations

import tempfile
from hashlib import blake2b
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.model.kernels.native import ISAS
from tokenmill import LLM, SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.weights.fingerprint import NUMERICS

PROMPT = "The bits of a page that was stored are the bits that are computed today. " * 8
# Formats of weights and KV.
FORMS = [*(("none", kv) for kv in ("auto", "int8", "int8-int4", "int4")), ("int8", "auto"), ("int4", "int4")]
# By version, as every level of instructions but AMX has them.
RECORDS = {
    1: ["764414aa", "f3ffc048", "2a4ac410", "992ad4b9", "1d65467c", "c66fa318"],
    # Weights in int4 are rounded with regard to the errors of those before them.
    2: ["764414aa", "f3ffc048", "2a4ac410", "992ad4b9", "1d65467c", "2dddd1f5"],
    # Heads are rotated before they are rounded to int8.
    3: ["764414aa", "7fd44809", "104eb380", "992ad4b9", "1d65467c", "2dddd1f5"],
}


def bits_of(isa: str, quantization: str, kv_cache_dtype: str, folder: Path) -> str:
    """Return a digest of the KV of a prompt, as an engine of one instruction set leaves it on a disk."""
    form = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    size = {"num_pages": 64, "max_model_len": 512, "max_num_seqs": 2, "num_threads": 1}
    with (
        patch("tokenmill.model.kernels.select.load_kernels", lambda threads: load_kernels(threads, isa)),
        LLM(demo_model_path(), **form, **size, kv_disk=str(folder), kv_disk_size=8 << 20) as llm,
    ):
        llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    (pages,) = folder.glob("*.pages")
    return blake2b(pages.read_bytes(), digest_size=4).hexdigest()


@pytest.mark.parametrize("number", range(len(FORMS)), ids=map("-".join, FORMS))
@pytest.mark.parametrize("isa", ISAS)
def test_earlier_releases_computed_the_same_bits(isa: str, number: int, tmp_path: Path) -> None:
    if isa == "amx":
        pytest.skip("the sums of its tiles have an order of their own")
    assert bits_of(isa, *FORMS[number], tmp_path) == RECORDS[NUMERICS][number], "raise NUMERICS, or mend the rounding"


if __name__ == "__main__":
    found = []
    for form in FORMS:
        with tempfile.TemporaryDirectory() as place:
            found.append(bits_of(ISAS[0], *form, Path(place)))
    print(f"    {NUMERICS}: {found},".replace("'", '"'))
