"""The threads of the native kernels: right whoever calls, and never waited for where the system does not run them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.model.kernels.native import BEST, kernels
from tokenmill.model.kernels.native_weight import PackedWeight


def packed(threads: int) -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    matrix, x = PackedWeight(kernels(BEST[0], threads), (500, 64)), torch.randn(9, 64).bfloat16()
    weight = torch.randn(500, 64).bfloat16()
    matrix.load_rows(0, weight)
    return matrix, x, x.float() @ weight.float().T


def test_more_threads_than_cores_and_pieces(rng):
    for threads in (3, 8, 300):
        matrix, x, expected = packed(threads)
        for _ in range(50):
            torch.testing.assert_close(matrix.logits(x), expected, rtol=1e-4, atol=1e-4)


def test_callers_at_the_same_time_do_not_mix(rng):
    jobs = [packed(2 + i) for i in range(4)]

    def work(job: tuple[PackedWeight, torch.Tensor, torch.Tensor]) -> bool:
        matrix, x, expected = job
        return all(torch.allclose(matrix.logits(x), expected, rtol=1e-4, atol=1e-4) for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, jobs))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(rng):
    matrix, x, expected = packed(2)
    matrix.logits(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.allclose(matrix.logits(x), expected, rtol=1e-4, atol=1e-4) else 1)
    assert os.waitpid(child, 0)[1] == 0


ONE_CORE = """
import os, time, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.model.kernels.test_native_workers import packed
matrix, x, _ = packed(8)
matrix.logits(x)
start = time.perf_counter()
for _ in range(2000):
    matrix.logits(x)
print(time.perf_counter() - start)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_threads_that_are_not_run_are_not_waited_for():
    """Eight threads on one core: 2,000 small products in a fraction of a second, not in a turn of each thread each."""
    done = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 10
