"""The CPU platform: memory and cores as the kernel grants them to this process, containers included."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.host_arrays import HostArrays
from tokenmill.platform.immediate import ImmediateStream, RepeatedWork
from tokenmill.platform.protocol import Stream, Tensors

if TYPE_CHECKING:
    from tokenmill.platform.communicator import Communicator
    from tokenmill.platform.peer_memory import PeerMemory

UNLIMITED = 1 << 60


class CpuPlatform:
    """Memory from /proc/meminfo and cgroup limits (v1 and v2), cores from the affinity mask, their threads and quotas.

    Args:
        root: where /proc and /sys are looked for; tests give a folder of their own.
        environment: of the process; OMP_NUM_THREADS limits threads, as it does torch's.
    """

    name = "cpu"
    device = "cpu"
    is_accelerator = False
    arrays: ArrayLibrary = HostArrays()

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        self._root = root
        self._environment = environment
        self._cores: dict[frozenset[int], int] = {}  # by affinity mask, which may be narrowed

    def available_bytes(self) -> int:
        """Return the free and reclaimable memory of the machine, or what the tightest cgroup around us leaves."""
        machine = self._meminfo("MemAvailable:")
        rooms = [limit - used for limit, used in self._memory_limits()]
        return max(0, min([machine, *rooms]))

    def untouched_bytes(self) -> int:
        """Return `available_bytes()`: memory that has been given back is not told apart here."""
        return self.available_bytes()

    def num_threads(self) -> int:
        """Return the cores this process may run on, at most what its cgroup's CPU quota pays for, at least 1.

        Cores that share an execution unit (hyperthreads) count once. OMP_NUM_THREADS is a further limit, as for torch.
        """
        return min(self._thread_limits())[0]

    def threads_reason(self) -> str:
        """Return which limit determines `num_threads()`."""
        return min(self._thread_limits())[1]

    def _thread_limits(self) -> list[tuple[int, str]]:
        limits = [(self._num_cores(), "all cores that this process may use")]
        asked = self._environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if asked.isdigit() and int(asked):
            limits.append((int(asked), "as OMP_NUM_THREADS says"))
        return limits + [(max(1, int(quota)), "its CPU quota") for quota in self._cpu_quotas()]

    def _num_cores(self) -> int:
        """Return the physical cores among those that this process may use."""
        if not hasattr(os, "sched_getaffinity"):
            return os.cpu_count() or 1
        allowed = frozenset(os.sched_getaffinity(0))
        if allowed not in self._cores:
            topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
            siblings = {" ".join(self._lines(topology.format(cpu))) or str(cpu) for cpu in allowed}
            self._cores[allowed] = len(siblings)
        return self._cores[allowed]

    def set_num_threads(self, wanted: int | None = None) -> int:
        """Return how many threads to use (default: `num_threads()`), and tell torch if it is imported by now."""
        threads = wanted or self.num_threads()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(threads)
        return threads

    def num_units(self) -> int:
        """Return the number of cores that run programs side by side."""
        return self.num_threads()

    def capability(self) -> tuple[int, int]:
        """Return (0, 0): a CPU has no generation number."""
        return 0, 0

    def stream(self) -> ImmediateStream:
        """Return a stream whose work is done when it is issued."""
        return ImmediateStream()

    def pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return plain host memory, [num_bytes] uint8."""
        return np.empty(num_bytes, dtype=np.uint8)

    def capture(self, work: Callable[[], Tensors], stream: Stream) -> RepeatedWork:
        """Run some work once, and return a graph that runs it again at each replay."""
        return RepeatedWork(work)

    def synchronize(self) -> None:
        """Do nothing: work is done when it is issued."""

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> Communicator:
        """Return a communicator over gloo, for a stand-in for a GPU; ranks of this platform share memory instead."""
        from tokenmill.platform.communicator import over_gloo

        return over_gloo(meeting, rank, size, seconds)

    def peer_memory(self, meeting: Path, rank: int, size: int, num_bytes: int, seconds: float) -> PeerMemory:
        """Return memory of a file that all ranks map, for a stand-in for GPUs that map each other's."""
        from tokenmill.platform.peer_memory import over_file

        return over_file(meeting, size, num_bytes)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that memory is full; torch has no error class of its own for it."""
        is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
        is_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        return isinstance(error, MemoryError) or is_refused or is_torch

    def _meminfo(self, key: str) -> int:
        for line in self._lines("proc/meminfo"):
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        # No /proc (macOS): the POSIX view, which does not know reclaimable memory.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _memory_limits(self) -> Iterator[tuple[int, int]]:
        """Yield (limit, bytes in use that cannot be reclaimed) of every cgroup around this process that has a limit."""
        for folder in self._cgroups("memory"):
            version2 = self._number(folder / "memory.max")
            limit = version2 or self._number(folder / "memory.limit_in_bytes")
            used = self._number(folder / ("memory.current" if version2 else "memory.usage_in_bytes"))
            # The kernel's "no limit" of version 1 is a number near 2^63.
            if limit is not None and used is not None and limit < UNLIMITED:
                yield limit, max(0, used - self._reclaimable(folder))

    def _reclaimable(self, folder: Path) -> int:
        for line in self._lines(folder / "memory.stat"):
            key, _, value = line.partition(" ")
            if key in ("inactive_file", "total_inactive_file"):
                return int(value)
        return 0

    def _cpu_quotas(self) -> Iterator[float]:
        """Yield the cores that the quota of each cgroup around this process pays for."""
        for folder in self._cgroups("cpu"):
            words = " ".join(self._lines(folder / "cpu.max")).split()
            if len(words) == 2 and words[0].isdigit() and int(words[1]):
                yield max(1.0, int(words[0]) / int(words[1]))
            quota, period = self._number(folder / "cpu.cfs_quota_us"), self._number(folder / "cpu.cfs_period_us")
            if quota and period:
                yield max(1.0, quota / period)

    def _cgroups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's cgroup and of those around it, for one controller.

        Lines of /proc/self/cgroup are `id:controllers:path`; version 2 has no controllers. Inside a container the
        path may not exist below the mount, whose top is then the container's own group.
        """
        for line in self._lines("proc/self/cgroup"):
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and controller not in controllers.split(","):
                continue
            top = self._root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = top / path.lstrip("/")
            for level in (folder, *folder.parents):
                yield level
                if level == top:
                    break

    def _number(self, path: Path) -> int | None:
        words = " ".join(self._lines(path)).split()
        return int(words[0]) if words and words[0].isdigit() else None

    def _lines(self, path: Path | str) -> list[str]:
        try:
            return (self._root / path).read_text().splitlines()
        except OSError:
            return []
