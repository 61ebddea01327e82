"""Run a Gluon kernel's own source on a CPU: a thread for each task, and the barriers and copies of a GPU.

Copies land late, in any order; products read their operands between their call and the wait for them, at either end.
So a stage that is given back or read too early gives wrong numbers, and a barrier that nobody reaches ends the test.
Not here: layouts, fences between kinds of access, and how warps of one task fall behind each other.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

WIDE = 64
WAIT_SECONDS = 20.0


class Barrier:
    """A barrier in shared memory: of a phase, arrivals and bytes are counted."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = self._left = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._left = count

    def count(self, arrivals: int, num_bytes: int) -> None:
        with self._condition:
            self._left -= arrivals
            self._bytes += num_bytes
            assert self._left >= 0, "more arrivals than a phase has"
            if self._left == 0 and self._bytes == 0:
                self._phase, self._left = self._phase ^ 1, self._count
                self._condition.notify_all()

    def wait(self, phase: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._phase != phase, WAIT_SECONDS), "nobody reaches a barrier"


class Memory:
    """Shared memory: rows of `WIDE` numbers, those of the first half of all rows first."""

    def __init__(self, data: torch.Tensor, shape: list[int], is_turned: bool = False) -> None:
        self.data, self.shape, self.dtype = data, shape, data.dtype
        self._is_turned = is_turned

    def index(self, place: Any) -> Memory:
        return Memory(self.data[int(place)], self.shape[1:])

    def permute(self, order: tuple[int, int]) -> Memory:
        assert order == (1, 0)
        return Memory(self.data, self.shape[::-1], True)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        assert dtype == self.dtype
        return Memory(self.data.view(shape[0], shape[2] // WIDE, shape[1], WIDE), shape)

    def load(self, layout: object = None) -> torch.Tensor:
        if self.data.dim() == 1:
            return self.data.clone()
        rows = self.data.transpose(0, 1).flatten(1).clone()
        return rows.T if self._is_turned else rows

    def store(self, value: torch.Tensor) -> None:
        assert list(value.shape) == list(self.shape)
        self.data.copy_(value if self.data.dim() == 1 else value.unflatten(1, (-1, WIDE)).transpose(0, 1))


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, data: torch.Tensor, place: Any = 0) -> None:
        self.data, self.place = data, place

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.place + more)


class Product:
    """A product that may read its operands now or when somebody waits for it."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._result = work() if random.random() < 0.5 else None

    def result(self) -> torch.Tensor:
        if self._result is None:
            self._result = self._work()
        return self._result


class Threads:
    """The parts of the language that a kernel uses, for one program after the other."""

    def __init__(self, num_programs: int) -> None:
        self.program, self.count = 0, num_programs
        self._open = threading.local()
        self._copies: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def namespace(self, module: Any) -> dict[str, Any]:
        """Names for the kernels of a module and what they call, as plain functions."""
        names: dict[str, Any] = {}
        for name, one in vars(module).items():
            function = getattr(one, "fn", None)
            names[name] = FunctionType(function.__code__, names) if isinstance(function, FunctionType) else one
        for name in ("find_group", "first_row"):
            plain = names[name]
            names[name] = lambda *args, plain=plain: torch.as_tensor(plain(*args))
        language = self._language()
        mbarrier = SimpleNamespace(
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, phase: barrier.wait(int(phase)),
            arrive=lambda barrier: barrier.count(1, 0),
            expect=lambda barrier, num_bytes: barrier.count(1, num_bytes),
            MBarrierLayout=lambda: None,
        )
        tma = SimpleNamespace(async_copy_global_to_shared=self._copy)
        names |= {"gl": language, "tl": language, "mbarrier": mbarrier, "tma": tma, "warpgroup_mma": self._product}
        names |= {"warpgroup_mma_wait": self._wait, "fence_async_shared": lambda: None, "barrier": lambda: None}
        names |= {name: one.value for name, one in names.items() if isinstance(one, gl.constexpr)}
        return names

    def _language(self) -> SimpleNamespace:
        def of(value: Any) -> torch.Tensor:
            return torch.as_tensor(value)

        layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
        return SimpleNamespace(
            **dict.fromkeys(layouts, lambda *_: None),
            int64=torch.int64,
            float32=torch.float32,
            tuple=tuple,
            static_range=range,
            program_id=lambda _: self.program,
            num_programs=lambda _: self.count,
            warp_specialize=self._specialize,
            allocate_shared_memory=self._allocate,
            load=_load,
            store=_store,
            arange=lambda begin, end, _: torch.arange(begin, end),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            where=lambda wanted, a, b: torch.where(of(wanted), of(a), of(b)),
            minimum=lambda a, b: torch.minimum(of(a), of(b)),
            maximum=lambda a, b: torch.maximum(of(a), of(b)),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            fma=lambda a, b, c: (a.double() * b + c).float(),
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, _: x,
        )

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda place: barriers[int(place)]) if len(shape) == 2 else barriers[0]
        wide = shape if len(shape) == 2 else [shape[0], shape[2] // WIDE, shape[1], WIDE]
        return Memory(torch.full(wide, torch.nan, dtype=dtype), shape)

    def _specialize(self, tasks: list[Any], warps: list[int], registers: list[int]) -> None:
        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
                assert not getattr(self._open, "products", []), "a product that nobody waits for"
            except BaseException as error:
                self._errors.append(error)

        threads = [threading.Thread(target=run, args=task, daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * WAIT_SECONDS)
        for copy in self._copies:
            copy.join(WAIT_SECONDS)
        self._copies.clear()
        if self._errors:
            raise self._errors[0]

    def _copy(self, source: Any, place: list[Any], barrier: Barrier, target: Memory) -> None:
        row, column = (int(number) for number in place)
        rows, columns = target.shape

        def land() -> None:
            time.sleep(random.random() * 0.002)
            target.store(source.rows[row : row + rows, column : column + columns])
            barrier.count(0, -rows * columns * source.rows.element_size())

        self._copies.append(threading.Thread(target=land, daemon=True))
        self._copies[-1].start()

    def _product(self, a: Any, b: Memory, total: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async

        def work() -> torch.Tensor:
            left = a.load() if isinstance(a, Memory) else a
            return left.float() @ b.load().float() + (total if use_acc else 0)

        product = Product(work)
        self._open.products = [*getattr(self._open, "products", []), product]
        return product

    def _wait(self, left: int, products: list[Product]) -> torch.Tensor:
        # Long enough for a copy to land where it must not yet.
        time.sleep(random.choice((0.0, 0.0, 0.008)))
        still = self._open.products
        for product in still[: len(still) - left]:
            product.result()
        self._open.products = still[len(still) - left :]
        assert products[0] not in self._open.products, "read before it has been waited for"
        return products[0].result()


def _load(pointer: Pointer, wanted: Any = True, other: Any = 0) -> torch.Tensor:
    place, wanted = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(wanted))
    found = pointer.data[torch.where(wanted, place, 0)]
    return torch.where(wanted, found, torch.as_tensor(other, dtype=found.dtype))


def _store(pointer: Pointer, value: torch.Tensor, wanted: torch.Tensor) -> None:
    place, wanted = torch.broadcast_tensors(pointer.place, wanted)
    pointer.data[place[wanted]] = value[wanted]


class Launcher:
    """Stands where a module has its kernel: `kernel[grid](...)` runs the programs one after the other."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._kernel = module, getattr(module, name)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            threads = Threads(grid[0])
            names = threads.namespace(self._module)
            kernel = FunctionType(self._kernel.fn.__code__, names)
            for threads.program in range(grid[0]):
                kernel(*[_argument(one) for one in args], **constants)

        return launch


def _argument(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        size = one.untyped_storage().nbytes() // one.element_size()
        return Pointer(one.as_strided((size,), (1,), 0), one.storage_offset())
    if hasattr(one, "block_shape"):
        rows = one.base.view(one.shape)
        block = SimpleNamespace(shape=one.block_shape)
        return SimpleNamespace(rows=rows, block_type=block, dtype=rows.dtype, layout=one.layout)
    return one
