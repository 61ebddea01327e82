"""The runner with a route of its own and a clock of its own: each line is answered once, whatever comes between."""

import asyncio
import random
import sqlite3

import pytest

from tests.serving.batches.desk import CHAT, Desk, run
from tokenmill.core.errors import Conflict, InvalidConfig, NotFound
from tokenmill.serving.batches import runner as module
from tokenmill.serving.batches.batch import WINDOW_SECONDS, QuotaReached, TooManyObjects
from tokenmill.serving.batches.files import IncomingFile
from tokenmill.serving.batches.storage import Storage
from tokenmill.serving.batches.store import BatchStore, Page


def test_every_line_is_answered_once_and_no_more_run_than_may(desk):
    async def work():
        async with desk.started():
            desk.statuses = {"3": [400], "5": [503, 429, 200]}
            names = [str(number) for number in range(200)]
            desk.num_free = 3
            batch_id = await desk.create(*names)
            await desk.wait(lambda: desk.open == desk.num_slots)
            desk.gate.set()
            batch = await desk.end_of(batch_id)
            assert batch.status.value == "completed"
            output, errors = desk.lines(batch.output_file_id), desk.lines(batch.error_file_id)
            assert list(errors) == ["3"]
            assert list(output) == [name for name in names if name != "3"], "in the order of the input"
            assert errors["3"]["response"]["status_code"] == 400
            assert (desk.asked["5"], desk.asked.total()) == (3, 202), "what says nothing about the line is asked again"
            assert desk.most_open == desk.num_slots
            counts, usage = batch.request_counts, batch.usage
            assert (counts.total, counts.completed, counts.failed) == (200, 199, 1)
            assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (398, 199, 597)
            assert desk.runner.lines == {"queued": 0, "running": 0}
            assert desk.runner.ended == {"completed": 199, "failed": 1, "expired": 0, "cancelled": 0}

    run(work())


def test_nothing_is_fed_while_somebody_waits(desk):
    async def work():
        desk.is_busy = True
        async with desk.started():
            batch_id = await desk.create("a", "b")
            await desk.wait(lambda: desk.runner.lines["queued"] == 2)
            for _ in range(20):
                await asyncio.sleep(module.GATE_SECONDS)
            assert desk.asked.total() == 0
            desk.is_busy = False
            assert (await desk.end_of(batch_id)).status.value == "completed"

    run(work())


def test_batches_take_turns(desk):
    async def work():
        desk.num_slots = 1
        desk.num_free = 0
        async with desk.started():
            long = await desk.create(*(f"long {number}" for number in range(100)))
            await desk.wait(lambda: desk.open == 1)
            short = await desk.create("short 0", "short 1")
            await desk.wait(lambda: desk.runner.lines["queued"] == 101)
            for _ in range(20):
                await asyncio.sleep(0.002)  # until its lines stand in the queue, too
            desk.gate.set()
            assert (await desk.end_of(short)).status.value == "completed"
            assert list(desk.asked).index("short 1") < 6, "it did not wait for all of the long one"
            await desk.end_of(long)

    run(work())


def test_what_is_killed_again_and_again_answers_each_line_once(desk):
    """Each start is stopped at a random moment, without what was answered since the last commit being kept."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def work():
        names = [str(number) for number in range(150)]
        async with desk.started():
            batch_id = await desk.create(*names)
        for _ in range(8):
            async with desk.started():
                await asyncio.sleep(rng.uniform(0.0, 0.04))
                for ends in desk.runner._ends.values():
                    ends.clear()  # as if the process had been killed: these are not on the disk
        async with desk.started():
            batch = await desk.end_of(batch_id)
            assert batch.status.value == "completed"
            assert list(desk.lines(batch.output_file_id)) == names
            assert set(desk.asked) == set(names)
            assert {path.name for path in (desk.folder / "files").iterdir()} == desk.storage.store.file_ids()

    run(work())


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_cancelled_batch_keeps_its_answers_and_names_what_was_not_run(desk, is_started_again):
    async def work():
        names = [str(number) for number in range(40)]
        async with desk.started():
            desk.num_free = 5
            batch_id = await desk.create(*names)
            await desk.wait(lambda: desk.runner.ended["completed"] > 1 and desk.open == desk.num_slots)
            await desk.service.cancel("", batch_id)
            if not is_started_again:
                batch = await desk.end_of(batch_id)
        if is_started_again:
            async with desk.started():
                batch = await desk.end_of(batch_id)
        assert batch.status.value == "cancelled"
        assert batch.cancelling_at and batch.cancelled_at
        output, errors = desk.lines(batch.output_file_id), desk.lines(batch.error_file_id)
        assert sorted([*output, *errors], key=int) == names
        assert 1 < len(output) < 40
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
        assert desk.open == 0
        async with desk.started():
            desk.gate.set()
            done = await desk.end_of(await desk.create("a"))
            with pytest.raises(Conflict, match="completed cannot"):
                await desk.service.cancel("", done.id)
            assert (await desk.service.cancel("", batch_id)).status.value == "cancelled", "once more changes nothing"

    run(work())


def test_a_batch_that_expires_keeps_its_answers_and_names_what_was_not_run(desk):
    async def work():
        async with desk.started():
            desk.num_free = 5
            batch_id = await desk.create(*(str(number) for number in range(40)))
            await desk.wait(lambda: desk.runner.ended["completed"] > 1 and desk.open == desk.num_slots)
            desk.now += WINDOW_SECONDS - 5
            await asyncio.sleep(0.05)
            assert (await desk.service.batch("", batch_id)).status.value == "in_progress"
            desk.now += 5
            batch = await desk.end_of(batch_id)
            assert (batch.status.value, batch.expired_at) == ("expired", int(desk.now))
            output, errors = desk.lines(batch.output_file_id), desk.lines(batch.error_file_id)
            assert len(output) + len(errors) == 40 and not output.keys() & errors.keys()
            assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}

    run(work())


def test_a_batch_of_wrong_lines_fails_with_what_is_wrong(desk):
    async def work():
        async with desk.started():
            batch = await desk.end_of(await desk.create("a", "b", "a"))
            assert (batch.status.value, batch.output_file_id) == ("failed", None)
            assert [(fault.line, fault.code) for fault in batch.errors.data] == [(3, "duplicate_custom_id")]
            assert desk.asked.total() == 0

    run(work())


def test_a_full_disk_stops_the_feeding_and_loses_nothing(desk, monkeypatch):
    async def work():
        record, is_full = BatchStore.record, True

        def record_or_fail(store, *arguments):
            if is_full:
                raise sqlite3.OperationalError("database or disk is full")
            record(store, *arguments)

        monkeypatch.setattr(BatchStore, "record", record_or_fail)
        async with desk.started():
            desk.num_free = 20  # however late the first write fails
            names = [str(number) for number in range(100)]
            batch_id = await desk.create(*names)
            await desk.wait(lambda: desk.runner._cannot_write)
            desk.gate.set()
            await desk.wait(lambda: desk.open == 0)
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert desk.asked.total() < 100, "what cannot be kept is not computed"
            is_full = False
            batch = await desk.end_of(batch_id)
            assert list(desk.lines(batch.output_file_id)) == names

    run(work())


def test_files_of_one_owner_are_not_there_for_another(desk):
    async def work():
        async with desk.started():
            desk.num_free = 0
            batch_id = await desk.create("a", owner="one")
            file_id = (await desk.service.batch("one", batch_id)).input_file_id
            for call in (
                desk.service.file("two", file_id),
                desk.service.delete_file("two", file_id),
                desk.service.create("two", CHAT, file_id, None, None),
                desk.service.batch("two", batch_id),
                desk.service.cancel("", batch_id),
            ):
                with pytest.raises(NotFound):
                    await call
            assert await desk.service.files("two", Page(), None) == ([], False)
            assert await desk.service.batches("two", Page()) == ([], False)
            with pytest.raises(Conflict, match="cancel it first"):
                await desk.service.delete_file("one", file_id)
            desk.gate.set()
            batch = await desk.end_of(batch_id, "one")
            await desk.service.delete_file("one", file_id)
            with pytest.raises(NotFound):
                await desk.service.file("two", batch.output_file_id)
            assert not desk.storage.files.body(file_id).exists()

    run(work())


def test_files_are_kept_as_long_as_they_should_be_and_as_a_batch_needs_them(desk):
    async def work():
        async with desk.started():
            short = await desk.upload("a", seconds=3600)
            needed = await desk.upload("b", seconds=3600)
            desk.num_free = 0
            batch = await desk.service.create("", CHAT, needed, None, 7200)
            await desk.wait(lambda: desk.open == 1)
            desk.now += 3600
            assert [file.id for file in (await desk.service.files("", Page(), None))[0]] == [needed]
            assert not desk.storage.files.body(short).exists()
            desk.gate.set()
            batch = await desk.end_of(batch.id)
            with pytest.raises(NotFound):
                await desk.service.file("", needed)
            assert (await desk.service.file("", batch.output_file_id)).expires_at == int(desk.now) + 7200
            desk.now += 7200
            assert await desk.service.files("", Page(), None) == ([], False)

    run(work())


def test_bytes_and_files_have_quotas(tmp_path):
    async def work():
        desk = Desk(tmp_path / "b", max_bytes=300, max_files=3)
        async with desk.started():
            first = await desk.upload("a", "b")
            with pytest.raises(QuotaReached, match="--batch-max-bytes"):
                await desk.upload(*"abcdefgh")
            at_once = await desk.service.begin_file()
            desk.service.write_file(at_once, b"x" * 150)
            with pytest.raises(QuotaReached):
                await desk.upload("a", "b", "c")
            await desk.service.drop_file(at_once)
            await desk.service.delete_file("", first)
            for _ in range(3):
                await desk.upload("a")
            with pytest.raises(TooManyObjects, match="--batch-max-files"):
                await desk.upload()
            assert not list((desk.folder / "incoming").iterdir())

    run(work())


def test_a_file_is_there_as_a_whole_or_not_at_all(desk, monkeypatch):
    async def work():
        async with desk.started():
            incoming = await desk.service.begin_file()
            desk.service.write_file(incoming, b"half")
            (desk.folder / "files" / "file-unknown").write_bytes(b"its entry never came")
            monkeypatch.setattr(IncomingFile, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(QuotaReached, match="No space left"):
                desk.service.write_file(incoming, b"more")
        assert list((desk.folder / "incoming").iterdir())
        async with desk.started():
            assert not list((desk.folder / "incoming").iterdir())
            assert not list((desk.folder / "files").iterdir())

    run(work())


def test_a_folder_has_one_server(desk):
    async def work():
        async with desk.started():
            with pytest.raises(InvalidConfig, match="another server uses"):
                Storage(desk.folder)
        async with desk.started():
            pass
        with pytest.raises(InvalidConfig, match="cannot be used"):
            Storage(desk.folder / "lock" / "below")

    run(work())
