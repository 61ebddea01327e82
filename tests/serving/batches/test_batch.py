"""The states of a batch: what may follow what, and that clients can read it."""

import itertools

import msgspec
import pytest
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject

from tokenmill.serving.batches.batch import ENDPOINTS, Batch, BatchStatus, File, new_id

LEGAL = {
    ("validating", "failed"), ("validating", "in_progress"), ("validating", "cancelling"),
    ("in_progress", "finalizing"), ("in_progress", "expired"), ("in_progress", "cancelling"),
    ("finalizing", "completed"), ("cancelling", "cancelled"),
}  # fmt: skip
FINAL = {"failed", "completed", "expired", "cancelled"}


def make_batch(status: BatchStatus = BatchStatus.VALIDATING) -> Batch:
    return Batch(
        id=new_id("batch_"), endpoint=ENDPOINTS[0], input_file_id="file-1", created_at=5, expires_at=9, status=status
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(BatchStatus, BatchStatus)))
def test_only_legal_changes_are_made_and_their_time_is_noted(before, after):
    batch = make_batch(before)
    if (before.value, after.value) in LEGAL:
        batch.move_to(after, 7.9)
        assert (batch.status, getattr(batch, f"{after.value}_at")) == (after, 7)
    else:
        with pytest.raises(AssertionError, match="is not legal"):
            batch.move_to(after, 7.9)
        assert batch.status is before


def test_nothing_follows_a_final_state_and_every_other_one_leads_to_one():
    assert {status.value for status in BatchStatus if status.is_final} == FINAL
    reached = {*FINAL}
    for _ in BatchStatus:
        reached |= {before for before, after in LEGAL if after in reached}
    assert reached == {status.value for status in BatchStatus}


@pytest.mark.parametrize(
    ("made", "theirs"),
    [
        (make_batch(), OpenAIBatch),
        (File(id="file-1", bytes=3, created_at=1, filename="a", purpose="batch"), FileObject),
    ],
)
def test_objects_are_those_of_openai(made, theirs):
    read = theirs.model_validate_json(msgspec.json.encode(made), strict=True)
    assert read.model_extra in (None, {}), "no field of our own"
    assert {name for name, field in theirs.model_fields.items() if field.is_required()} <= set(
        msgspec.to_builtins(made)
    )


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
         "completion_tokens_details": {"reasoning_tokens": 1}},
        {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_tokens_details": {"cached_tokens": 2},
         "output_tokens_details": {"reasoning_tokens": 1}},
    ],
)  # fmt: skip
def test_usage_is_added_up_in_the_words_of_either_api(usage):
    batch = make_batch()
    batch.usage.add(usage)
    batch.usage.add(usage)
    batch.usage.add({"prompt_tokens": 5, "total_tokens": 5})  # an embedding
    assert msgspec.to_builtins(batch.usage) == {
        "input_tokens": 11, "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 19,
    }  # fmt: skip
