"""The disk below files and batches is full at any byte: nothing partial stays, and all goes on when there is room."""

import contextlib
import random

from tests.full_disk import contents, room_for
from tests.serving.batches.desk import run
from tokenmill.serving.batches.batch import QuotaReached
from tokenmill.serving.batches.service import BatchLimits


def test_at_any_byte_a_full_disk_refuses_an_upload_and_leaves_nothing_of_it(desk):
    """The body may find room and the database none, too."""

    async def work():
        desk.limits = BatchLimits(1 << 30, 500)
        async with desk.started():
            kept = await desk.upload("a", "b")
            for _ in range(20):
                names = [str(number) for number in range(rng.choice((1, 100, 30_000)))]
                before = bodies(desk.folder)
                file_id = None
                with room_for(rng.randrange(1 << rng.randrange(1, 22))), contextlib.suppress(QuotaReached):
                    file_id = await desk.upload(*names)
                after = bodies(desk.folder)
                assert set(after) - set(before) == ({f"files/{file_id}"} if file_id else set())
                if file_id:
                    assert after[f"files/{file_id}"].count(b"\n") == len(names)
            assert await desk.upload("room again")
            assert (await desk.service.file("", kept)).id == kept

    rng = seeded()
    run(work())


def test_at_any_byte_a_full_disk_stops_a_batch_until_there_is_room(desk, caplog):
    async def work():
        for room in (0, *(rng.randrange(1 << rng.randrange(1, 17)) for _ in range(6))):
            caplog.clear()
            async with desk.started():
                desk.gate.clear()
                desk.num_free = desk.asked.total()
                names = [f"{room} {number}" for number in range(100)]
                batch_id = await desk.create(*names)
                await desk.wait(lambda: desk.open == desk.num_slots)
                with room_for(room):
                    desk.gate.set()
                    await desk.wait(lambda batch_id=batch_id: caplog.text or batch_id not in desk.runner._jobs)
                batch = await desk.end_of(batch_id)
                assert (batch.status.value, batch.request_counts.completed) == ("completed", 100)
                assert list(desk.lines(batch.output_file_id)) == names
                assert set(bodies(desk.folder)) == {f"files/{one}" for one in desk.storage.store.file_ids()}

    rng = seeded()
    run(work())


def bodies(folder) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if "/" in name}


def seeded() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)
