"""The CUDA platform: one GPU, its memory, streams, events and graphs. The only module that says `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.communicator import Communicator, over_nccl
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.device_arrays import DeviceArrays
from tokenmill.platform.peer_memory import PeerMemory, over_gpus
from tokenmill.platform.protocol import Event, Stream, Tensors


def is_available() -> bool:
    """Return True if this torch has CUDA and the machine has a GPU that it can use."""
    return bool(torch.cuda.is_available())


def cuda_version() -> str:
    """Return the version of CUDA that this torch is built for; "": it is built for CPUs."""
    return torch.version.cuda or ""


class CudaEvent:
    """A CUDA event. The host sleeps while it waits, and leaves the core to the scheduler or to another process."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_past(self) -> bool:
        """Return True if the work before the event is done."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Wait until the work before the event is done."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream and the memory of its graphs.

    Attributes:
        pool: memory of the graphs that are captured here, and only of these, since it ends with the last of them.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.pool: tuple[int, int] | None = None
        self._entered: list[torch.cuda.StreamContext] = []

    def __enter__(self) -> Self:
        context = torch.cuda.stream(self.stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def record(self) -> CudaEvent:
        """Return an event behind the work issued so far."""
        return CudaEvent(self.stream)

    def wait_for(self, event: Event) -> None:
        """Start later work of this stream only after an event of another one."""
        assert isinstance(event, CudaEvent), "an event of another platform"
        self.stream.wait_event(event.event)


class CudaGraph:
    """A CUDA graph and the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Issue the captured work again."""
        self._graph.replay()


class CudaPlatform:
    """One GPU.

    Raises:
        InvalidConfig: this torch has no CUDA, or there is no such GPU.
    """

    name = "cuda"
    is_accelerator = True

    def __init__(self, index: int = 0) -> None:
        if not is_available():
            build = f"torch {torch.__version__} finds no usable GPU" if torch.version.cuda else "torch has no CUDA"
            raise InvalidConfig(f"--device cuda: {build}; use --device cpu")
        if index >= torch.cuda.device_count():
            raise InvalidConfig(f"--device cuda:{index}: there are {torch.cuda.device_count()} GPUs")
        self.device = f"cuda:{index}"
        self.arrays: ArrayLibrary = DeviceArrays(self.device)
        self._properties = torch.cuda.get_device_properties(index)
        self._host = CpuPlatform()
        torch.cuda.set_device(index)

    @property
    def device_name(self) -> str:
        """Name of the GPU, as its maker calls it."""
        return str(self._properties.name)

    def available_bytes(self) -> int:
        """Return the free memory of the GPU in bytes, after torch has given back what it does not use."""
        torch.cuda.empty_cache()
        return self.untouched_bytes()

    def untouched_bytes(self) -> int:
        """Return the free memory of the GPU in bytes; torch keeps all memory that it has held once."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def num_units(self) -> int:
        """Return the number of multiprocessors."""
        return int(self._properties.multi_processor_count)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability, (major, minor)."""
        return int(self._properties.major), int(self._properties.minor)

    def num_threads(self) -> int:
        """Return 1: the host only launches."""
        return 1

    def threads_reason(self) -> str:
        """Return why one thread is enough."""
        return "the host only launches"

    def set_num_threads(self, wanted: int | None = None) -> int:
        """Tell torch how many host threads to use (default: one) and return the number."""
        return self._host.set_num_threads(wanted or self.num_threads())

    def stream(self) -> CudaStream:
        """Return a new stream, behind all work that is issued on the current one."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return CudaStream(stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory, [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, work: Callable[[], Tensors], stream: Stream) -> CudaGraph:
        """Run some work once to warm up, then capture it as a CUDA graph in the stream's pool."""
        assert isinstance(stream, CudaStream), "a stream of another platform"
        # Kernels are compiled and libraries set up on first use, which a capture does not allow.
        with stream:
            work()
        torch.cuda.synchronize(self.device)
        if stream.pool is None:
            stream.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, NCCL's look at its events among it, belongs to no capture.
        with torch.cuda.graph(graph, pool=stream.pool, stream=stream.stream, capture_error_mode="thread_local"):
            outputs = work()
        return CudaGraph(graph, outputs)

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> Communicator:
        """Return a communicator over NCCL."""
        return over_nccl(meeting, rank, size, seconds)

    def peer_memory(self, meeting: Path, rank: int, size: int, num_bytes: int, seconds: float) -> PeerMemory:
        """Return memory that the GPUs of all ranks map."""
        return over_gpus(meeting, rank, size, num_bytes, seconds, self.device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that the memory of the GPU, or of the host, is full."""
        return isinstance(error, torch.cuda.OutOfMemoryError) or self._host.is_out_of_memory(error)

    def synchronize(self) -> None:
        """Wait for all work of the GPU. After an illegal access, for example, every call in this context raises."""
        torch.cuda.synchronize(self.device)
