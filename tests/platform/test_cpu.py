"""Memory and cores as told by a /proc and /sys made by the test."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.memory import huge_pages, return_freed_memory
from tokenmill.platform.select import select_platform

GIB = 1 << 30
CGROUP = "sys/fs/cgroup"


def machine(root: Path, available_gib: int = 8, cgroup: str = "0::/", **files: str) -> CpuPlatform:
    """A machine with this much memory; `files` maps paths below the cgroup mount to contents."""
    content = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {available_gib << 20} kB\n"}
    content["proc/self/cgroup"] = cgroup
    content |= {f"{CGROUP}/{name}": text for name, text in files.items()}
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return CpuPlatform(root)


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    assert machine(tmp_path, 8, **{"memory.max": "max", "memory.current": "5"}).available_bytes() == 8 * GIB


def test_a_version_2_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    files = {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}"}
    assert machine(tmp_path, 8, **files).available_bytes() == 2 * GIB


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": str(2 * GIB),
        "a/memory.current": str(GIB),
        "a/b/memory.max": str(6 * GIB),
        "a/b/memory.current": "0",
    }
    assert machine(tmp_path, 8, "0::/a/b", **files).available_bytes() == GIB


def test_a_version_1_limit_counts_and_its_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(2**63 - 4096),
        "memory/memory.usage_in_bytes": str(7 * GIB),
        "memory/job/memory.limit_in_bytes": str(3 * GIB),
        "memory/job/memory.usage_in_bytes": str(GIB),
        "memory/job/memory.stat": f"total_inactive_file {GIB // 2}",
    }
    platform = machine(tmp_path, 8, "4:memory:/job\n3:cpu,cpuacct:/", **files)
    assert platform.available_bytes() == 2 * GIB + GIB // 2


def test_a_path_from_outside_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {"memory.max": str(GIB), "memory.current": "0"}
    assert machine(tmp_path, 8, "0::/host/pods/1", **files).available_bytes() == GIB


def test_an_overdrawn_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "2000"}
    assert machine(tmp_path, 8, **files).available_bytes() == 0


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/", {"cpu.max": "100000 100000"}),
        ("0::/", {"cpu.max": "50000 100000"}),
        ("2:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_quota_of_one_core_allows_one_thread(cgroup: str, files: dict[str, str], tmp_path: Path) -> None:
    platform = machine(tmp_path, 8, cgroup, **files)
    assert platform.num_threads() == 1
    # Other limits may be as low on the machine of this test.
    lowest_of_others = min(len(os.sched_getaffinity(0)), torch.get_num_threads())
    assert platform.threads_reason() == "its CPU quota" or lowest_of_others == 1


def test_without_a_quota_the_threads_are_the_cores_or_fewer(tmp_path: Path) -> None:
    files = {"cpu.max": "max 100000", "cpu/cpu.cfs_quota_us": "-1"}
    threads = machine(tmp_path, 8, "0::/\n2:cpu:/", **files).num_threads()
    assert threads == min(len(os.sched_getaffinity(0)), torch.get_num_threads())


@pytest.mark.slow
def test_omp_num_threads_is_honoured() -> None:
    code = "from tokenmill.platform.select import select_platform; print(select_platform('cpu').set_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("switch", "word"), [("always [madvise] never", "in huge"), ("always madvise [never]", "no huge")]
)
def test_it_says_whether_the_system_gives_huge_pages(switch: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(switch)
    assert word in huge_pages(tmp_path / "enabled")
    assert "no huge" in huge_pages(tmp_path / "missing")


def test_this_machine_has_memory() -> None:
    platform = select_platform("cpu")
    assert (platform.name, platform.device) == ("cpu", "cpu")
    assert 1 << 20 < platform.available_bytes() < 1 << 50


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc's malloc")
def test_freed_memory_goes_back_to_the_system():
    pieces = [b"\1" * 100_000 for _ in range(640)]
    last = pieces.pop()  # malloc gives back by itself what lies behind all that is used
    del pieces
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 32 << 20
    assert len(last) == 100_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
