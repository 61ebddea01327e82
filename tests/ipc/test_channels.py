"""Drop what comes through a socket and is no message."""

import logging

import pytest
import zmq

from tokenmill.core.messages import AbortRequests, ToEngine
from tokenmill.ipc.channels import Inbox, Outbox, engine_name

ID = b"\xa2\xff\xfe"
NO_MESSAGES = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "cut off": b"\x82\xa4type\xadAbortRequests",
    "an unknown kind": b"\x81\xa4type\xa3abc",
    "a field of another type": b"\x82\xa4type\xadAbortRequests\xa3ids\x01",
    "no UTF-8": b"\x82\xa4type\xadAbortRequests\xa3ids\x91" + ID,
    "too deep": b"\x83\xa4type\xaaAddRequest\xa2id\xa1a\xa1x" + b"\x91" * 100_000,
    "a list of four billion": b"\x82\xa4type\xadAbortRequests\xa3ids\xdd\xff\xff\xff\xff",
    "another format": b'{"type": "AbortRequests", "ids": []}',
}


@pytest.mark.parametrize("raw", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_what_is_no_message_is_dropped_counted_and_logged(raw, tmp_path, caplog):
    context = zmq.Context()
    inbox = Inbox(context, tmp_path, engine_name(0), ToEngine)
    outbox = Outbox(context, tmp_path, engine_name(0))
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{tmp_path}/engine-0.ipc")
    try:
        with caplog.at_level(logging.WARNING):
            stranger.send_multipart([raw, raw])
            while inbox.num_dropped < 2:
                assert inbox.socket.poll(10_000)
                assert inbox.receive() is None
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == 2
        assert logged[0].startswith(f"a message of {len(raw)} bytes to engine-0 is dropped: ")
        outbox.send(AbortRequests(["a"]))
        assert inbox.socket.poll(10_000)
        assert inbox.receive() == AbortRequests(["a"])
        assert inbox.num_dropped == 2
    finally:
        inbox.close()
        context.destroy(linger=0)
