"""The CUDA platform: one GPU, its memory, streams, events and graphs. The only module that says `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.communicator import Communicator, over_nccl
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.protocol import Event, Stream, Tensors


def is_available() -> bool:
    """Whether this torch has CUDA, and the machine a GPU that it can use."""
    return bool(torch.cuda.is_available())


class CudaEvent:
    """See `Event`. The host sleeps while it waits: the core is the scheduler's, or another process's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_past(self) -> bool:
        """See `Event.is_past`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Event.wait`."""
        self.event.synchronize()


class CudaStream:
    """See `Stream`.

    Attributes:
        pool: memory of the graphs that are captured here; of no others, since it ends with the last of them.
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
        """See `Stream.record`."""
        return CudaEvent(self.stream)

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""
        assert isinstance(event, CudaEvent), "an event of another platform"
        self.stream.wait_event(event.event)


class CudaGraph:
    """See `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._graph.replay()


class CudaPlatform:
    """See `Platform`.

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
        self._properties = torch.cuda.get_device_properties(index)
        self._host = CpuPlatform()
        torch.cuda.set_device(index)

    @property
    def device_name(self) -> str:
        """As its maker calls it."""
        return str(self._properties.name)

    def available_bytes(self) -> int:
        """Free memory of the GPU, without what torch holds and does not use."""
        torch.cuda.empty_cache()
        return self.untouched_bytes()

    def untouched_bytes(self) -> int:
        """See `Platform.untouched_bytes`: torch keeps what it has held once."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def num_units(self) -> int:
        """Multiprocessors."""
        return int(self._properties.multi_processor_count)

    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return int(self._properties.major), int(self._properties.minor)

    def num_threads(self) -> int:
        """The host only launches: one thread."""
        return 1

    def threads_reason(self) -> str:
        """See `num_threads`."""
        return "the host only launches"

    def set_num_threads(self, wanted: int | None = None) -> int:
        """See `Platform.set_num_threads`."""
        return self._host.set_num_threads(wanted or self.num_threads())

    def stream(self) -> CudaStream:
        """See `Platform.stream`."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return CudaStream(stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Platform.pinned`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, work: Callable[[], Tensors], stream: Stream) -> CudaGraph:
        """See `Platform.capture`."""
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
        """See `Platform.communicator`: NCCL."""
        return over_nccl(meeting, rank, size, seconds)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See `Platform.is_out_of_memory`."""
        return isinstance(error, torch.cuda.OutOfMemoryError) or self._host.is_out_of_memory(error)

    def synchronize(self) -> None:
        """See `Platform.synchronize`. An illegal access, say, leaves a context in which every call raises."""
        torch.cuda.synchronize(self.device)
