"""Arrays on their way to a device: what arrives is what was sent, and memory in use is not written again."""

from __future__ import annotations

import numpy as np
import torch

from tests.engine.runner.fake_platform import FakePlatform
from tokenmill.engine.runner.staging import NUM_SLOTS, Staging
from tokenmill.platform.arrays import address


def random_arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    kinds = (np.int64, np.int32, np.float64, np.float32)
    return {
        f"array {number}": (rng.random(rng.integers(0, 4, rng.integers(1, 3))) * 100).astype(kinds[number % 4])
        for number in range(int(rng.integers(1, 7)))
    }


def test_what_arrives_is_what_was_sent_for_as_many_steps_as_there_are_slots(rng: np.random.Generator) -> None:
    platform = FakePlatform()
    compute = platform.stream()
    staging, sent = Staging(platform, compute), []
    for _ in range(10):
        arrays = random_arrays(rng)
        if rng.random() < 0.3:
            arrays["large"] = rng.integers(0, 9, 20_000)
        sent.append((arrays, staging.send(arrays)))
        staging.finish_step()
        for own, tensors in sent[-NUM_SLOTS:]:
            for name, values in own.items():
                assert torch.equal(tensors[name], torch.from_numpy(values)), name
                assert tensors[name].data_ptr() % 8 == 0


def test_a_step_starts_behind_its_copies_and_a_slot_is_filled_behind_its_step() -> None:
    platform = FakePlatform()
    compute = platform.stream()
    staging = Staging(platform, compute)
    finished = []
    for step in range(3 * NUM_SLOTS):
        staging.send({"a": np.arange(3)})
        copied = platform.events[-1]
        assert copied.stream is not compute
        assert compute.waited_for[-1] is copied
        # The host waits for the step that used the slot before, and for no other.
        assert platform.host_waits == finished[: max(0, step - NUM_SLOTS + 1)]
        finished.append(staging.finish_step())


def test_results_come_back_to_memory_of_their_own_step() -> None:
    staging = Staging(platform := FakePlatform(), platform.stream())
    kept = []
    for step in range(NUM_SLOTS):
        staging.send({})
        kept += staging.fetch(torch.tensor([step, step + 1]))
        staging.finish_step()
    assert [values.tolist() for values in kept] == [[step, step + 1] for step in range(NUM_SLOTS)]


def test_results_of_a_step_come_back_in_one_copy(rng: np.random.Generator) -> None:
    staging = Staging(platform := FakePlatform(), platform.stream())
    for size in (3, 9, 3000):
        staging.send({})
        sent = [
            torch.from_numpy(rng.integers(-9, 9, size)),
            torch.from_numpy(rng.random((size, 5))),
            torch.from_numpy(rng.integers(0, 9, (size, 4))).t(),
            torch.empty(0, dtype=torch.int64),
        ]
        came = staging.fetch(*sent)
        staging.finish_step()
        # In one piece of memory, one behind the other.
        starts = np.cumsum([0, *(array.nbytes for array in came[:-2])])
        assert [address(array) - address(came[0]) for array in came[:-1]] == starts.tolist()
        for want, got in zip(sent, came, strict=True):
            assert got.dtype == want.numpy().dtype
            assert np.array_equal(got, want.numpy())


def test_what_is_fetched_later_lies_behind_and_leaves_what_came_before() -> None:
    staging = Staging(platform := FakePlatform(), platform.stream())
    staging.send({})
    sizes = (3, 7000, 2, 20_000, 1)  # past the smallest memory, twice
    kept = [staging.fetch(torch.arange(size) + size)[0] for size in sizes]
    staging.finish_step()
    assert [values.tolist() for values in kept] == [list(range(size, 2 * size)) for size in sizes]
    assert address(kept[2]) - address(kept[1]) == kept[1].nbytes
    staging.send({})
    staging.fetch(torch.arange(5))
    assert [values.tolist() for values in kept] == [list(range(size, 2 * size)) for size in sizes]


def test_memory_grows_by_doubling_and_is_kept() -> None:
    platform = FakePlatform()
    staging = Staging(platform, platform.stream())
    for size in (10, 100_000, 90_000, 130_000):
        for _ in range(NUM_SLOTS):
            staging.send({"a": np.zeros(size, dtype=np.uint8)})
            staging.finish_step()
    assert platform.pinned_sizes == [1 << 16] * NUM_SLOTS + [1 << 17] * NUM_SLOTS
