"""The store against an obvious model: what it holds, who sees it, and that all of it survives the process."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tests.tiers import scaled
from tokenmill.core.errors import Conflict, InvalidConfig, InvalidRequest, NotFound
from tokenmill.serving.batches.batch import FILE_SECONDS, INPUT, Batch, BatchStatus, File, LineFault, new_id
from tokenmill.serving.batches.lines import InputLines, LineEnd, LinePlace, Outcome
from tokenmill.serving.batches.store import BatchStore, Page

owners = st.sampled_from(["", "key one", "key two"])
ENDS = {"in_progress": "expired", "finalizing": "completed", "cancelling": "cancelled"}


class StoreMachine(RuleBasedStateMachine):
    """`files`: id -> (owner, object); `states`: batch -> (owner, status, input); `lines`: -> {line: outcome}."""

    files = Bundle("files")
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = BatchStore(self.folder / "db")
        self.now = 1000
        self.kept: dict[str, tuple[str, File]] = {}
        self.states: dict[str, tuple[str, str, str]] = {}
        self.lines: dict[str, dict[int, str | None]] = {}
        self.counts: dict[str, tuple[int, int, int]] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=files, owner=owners, seconds=st.integers(1, 50), size=st.integers(0, 9))
    def upload(self, owner, seconds, size):
        file = File(
            id=new_id("file-"),
            bytes=size,
            created_at=self.now,
            filename="f",
            purpose=INPUT,
            expires_at=self.now + seconds,
        )
        self.store.add_file(owner, file)
        self.kept[file.id] = owner, file
        return file.id

    @rule(target=batches, file_id=files, owner=owners)
    def create(self, file_id, owner):
        batch = Batch(
            id=new_id("batch_"), endpoint="/v1/e", input_file_id=file_id, created_at=self.now, expires_at=9999
        )
        if self.kept.get(file_id, (None,))[0] == owner:
            self.store.add_batch(owner, batch, FILE_SECONDS)
            self.states[batch.id] = owner, "validating", file_id
            self.counts[batch.id] = 0, 0, 0
        else:
            with pytest.raises(NotFound):
                self.store.add_batch(owner, batch, FILE_SECONDS)
        return batch.id

    @rule(target=batches, owner=owners, count=st.integers(1, 6))
    def start(self, owner, count):
        """A batch whose lines are checked: most of what can happen needs one."""
        batch_id = self.create(self.upload(owner, 20, 3), owner)
        self.begin(batch_id, count)
        return batch_id

    def move_model(self, batch_id: str, status: str) -> None:
        owner, _, file_id = self.states[batch_id]
        self.states[batch_id] = owner, status, file_id

    def status(self, batch_id: str) -> str:
        return self.states[batch_id][1] if batch_id in self.states else "missing"

    @rule(batch_id=batches, count=st.integers(0, 6))
    def begin(self, batch_id, count):
        if self.status(batch_id) == "missing":
            return
        faults = [] if count else [LineFault("empty_file", "no lines")]
        places = [LinePlace(number, f"id {number}", number * 10, 10) for number in range(1, count + 1)]
        self.store.begin_batch(batch_id, InputLines(places, faults, "m"), self.now)
        if self.status(batch_id) == "validating":
            self.move_model(batch_id, "in_progress" if count else "failed")
            self.lines[batch_id] = dict.fromkeys(range(1, count + 1))
            self.counts[batch_id] = count, 0, 0

    @rule(batch_id=batches, status=st.sampled_from(["finalizing", "cancelling"]))
    def move(self, batch_id, status):
        if self.status(batch_id) == "missing":
            return
        moved = self.store.move(batch_id, BatchStatus(status), self.now)
        legal = {"finalizing": {"in_progress"}, "cancelling": {"validating", "in_progress"}}[status]
        if self.status(batch_id) in legal:
            self.move_model(batch_id, status)
        assert moved.status.value == self.status(batch_id)

    @rule(
        batch_id=batches,
        ends=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([Outcome.COMPLETED, Outcome.FAILED]))),
    )
    def record(self, batch_id, ends):
        """Lines that there are and that there are not, some of them twice, or long since recorded."""
        if self.status(batch_id) == "missing":
            return
        self.store.record(batch_id, [LineEnd(line, "", outcome, outcome.value.encode()) for line, outcome in ends])
        lines = self.lines.get(batch_id, {})
        for line, outcome in ends:
            if line in lines and lines[line] is None:
                lines[line] = outcome.value
                total, good, bad = self.counts[batch_id]
                self.counts[batch_id] = total, good + (outcome is Outcome.COMPLETED), bad + (outcome is Outcome.FAILED)

    @rule(batch_id=batches, has_output=st.booleans())
    def end(self, batch_id, has_output):
        if self.status(batch_id) not in ENDS:
            return
        file = File(id=new_id("file-"), bytes=4, created_at=self.now, filename="o", purpose="batch_output")
        ended = self.store.end_batch(batch_id, file if has_output else None, None, self.now)
        self.move_model(batch_id, ENDS[self.status(batch_id)])
        self.lines.pop(batch_id, None)
        assert (ended.output_file_id, ended.error_file_id) == (file.id if has_output else None, None)
        if has_output:
            file.expires_at = self.now + FILE_SECONDS
            self.kept[file.id] = self.states[batch_id][0], file

    @rule(batch_id=batches, owner=owners, is_own=st.booleans())
    def remove_input(self, batch_id, owner, is_own):
        if batch_id in self.states:
            whose, _, file_id = self.states[batch_id]
            self.remove(file_id, whose if is_own else owner)

    @rule(file_id=files, owner=owners)
    def remove(self, file_id, owner):
        if self.kept.get(file_id, (None,))[0] != owner:
            with pytest.raises(NotFound):
                self.store.remove_file(owner, file_id)
        elif file_id in self.needed():
            with pytest.raises(Conflict):
                self.store.remove_file(owner, file_id)
        else:
            self.store.remove_file(owner, file_id)
            del self.kept[file_id]

    def needed(self) -> set[str]:
        return {file_id for _, status, file_id in self.states.values() if not BatchStatus(status).is_final}

    @rule(seconds=st.integers(0, 40))
    def pass_time(self, seconds):
        self.now += seconds
        due = {name for name, (_, file) in self.kept.items() if file.expires_at <= self.now} - self.needed()
        assert set(self.store.remove_expired(self.now)) == due
        for name in due:
            del self.kept[name]

    @rule()
    def start_again(self):
        self.store.close()
        self.store = BatchStore(self.folder / "db")

    @rule(owner=owners, limit=st.integers(1, 4), is_rising=st.booleans())
    def list_all(self, owner, limit, is_rising):
        """Page by page everything of the owner comes, in order, and nothing else."""
        for fetch, known in (
            (self.store.files, [name for name, (whose, _) in self.kept.items() if whose == owner]),
            (self.store.batches, [name for name, (whose, _, _) in self.states.items() if whose == owner]),
        ):
            found, after, has_more = [], None, True
            while has_more:
                page, has_more = fetch(owner, Page(after, limit, is_rising))
                assert len(page) == limit or not has_more
                found += [one.id for one in page]
                after = found[-1] if found else None
            assert found == (known if is_rising else known[::-1])

    @invariant()
    def agrees(self):
        assert self.store.room_taken() == (len(self.kept), sum(file.bytes for _, file in self.kept.values()))
        assert self.store.file_ids() == set(self.kept)
        assert {one.id for one in self.store.open_batches()} == {
            name for name, (_, status, _) in self.states.items() if not BatchStatus(status).is_final
        }
        for name, (owner, file) in self.kept.items():
            assert self.store.file(owner, name) == file
        num_unanswered = 0
        for name, (owner, status, _) in self.states.items():
            batch = self.store.batch(owner, name)
            counts = batch.request_counts
            assert batch.status.value == status
            assert (counts.total, counts.completed, counts.failed) == self.counts[name]
            with pytest.raises(NotFound):
                self.store.batch(owner + "x", name)
            lines = self.lines.get(name, {})
            assert [place.number for place in self.store.queued(name, 0, 99)] == [
                n for n, end in lines.items() if not end
            ]
            ended = self.store.ended_lines(name, 0, 99)
            assert {end.number: end.outcome and end.outcome.value for end in ended} == lines
            assert all(end.answer == end.outcome.value.encode() for end in ended if end.outcome)
            num_unanswered += sum(end is None for end in lines.values())
        assert self.store.num_unanswered() == num_unanswered


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=scaled(30), stateful_step_count=25, deadline=None)


def test_only_inputs_are_inputs(tmp_path):
    store = BatchStore(tmp_path / "db")
    store.add_file("", File(id="file-1", bytes=1, created_at=1, filename="", purpose="batch_output"))
    with pytest.raises(InvalidRequest, match="purpose must be batch"):
        store.add_batch("", Batch(id="b", endpoint="", input_file_id="file-1", created_at=1, expires_at=2), 1)


def test_what_is_committed_is_on_the_disk_and_nobody_elses_business(tmp_path):
    store = BatchStore(tmp_path / "db")
    settings = [store._db.execute(f"pragma {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2], "2: FULL"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_what_is_no_database_of_this_version_is_refused(tmp_path):
    BatchStore(tmp_path / "db")._db.execute("pragma user_version=99")
    (tmp_path / "text").write_text("no database, but a long text" * 99)
    for name in ("db", "text", "missing/db"):
        with pytest.raises(InvalidConfig, match="--batch-dir"):
            BatchStore(tmp_path / name)
