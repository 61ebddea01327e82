"""The loop of a text worker tells what takes long beside it."""

import threading
from pathlib import Path
from types import SimpleNamespace

import zmq

from tokenmill.core.text_queries import EncodeText
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.serving.frontend.media_prompts import has_media
from tokenmill.serving.frontend.text_processor import Routed
from tokenmill.serving.frontend.worker import HUGE_BYTES, LONG_BYTES, PREPARE_PATIENCE, WorkerLoop
from tokenmill.serving.replicas.work_page import WorkPage


class StuckProcessor:
    """Prepares nothing before it is let go."""

    def __init__(self):
        self.begun, self.let_go = threading.Semaphore(0), threading.Event()

    def prepare(self, message, attempt):
        self.begun.release()
        self.let_go.wait()

    def start(self, message, prepared):
        return Routed()


def test_a_text_that_is_prepared_in_a_thread_shows_in_the_beats(tmp_path):
    heartbeat = Heartbeat(zmq.Context.instance(), Path(), SimpleNamespace(name="worker-0", num_dropped=0), timeout=30)
    processor = StuckProcessor()
    loop = WorkerLoop("worker-0", processor, (None, None, None), heartbeat, WorkPage(tmp_path / "page"), 2.0)
    try:
        assert heartbeat.beat().job == ""
        for size in (LONG_BYTES + 1, HUGE_BYTES + 1):
            loop.handle_message(EncodeText(id="a", text="long"), size)
            assert processor.begun.acquire(timeout=10)
            assert heartbeat.beat().limit == 30 * PREPARE_PATIENCE
        assert heartbeat.beat().job == "a long text", "it has waited for longer"
    finally:
        processor.let_go.set()
        loop.close()


def test_an_image_is_decoded_in_a_thread_however_short_its_message_is(tmp_path):
    heartbeat = Heartbeat(zmq.Context.instance(), Path(), SimpleNamespace(name="worker-0", num_dropped=0), timeout=30)
    processor = StuckProcessor()
    loop = WorkerLoop("worker-0", processor, (None, None, None), heartbeat, WorkPage(tmp_path / "page"), 2.0)
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    try:
        loop.handle_message(EncodeText(id="a", messages=[{"role": "user", "content": parts}]), 100)
        assert processor.begun.acquire(timeout=10)
    finally:
        processor.let_go.set()
        loop.close()


def test_only_parts_that_are_not_text_are_media():
    text = {"role": "user", "content": "image_url"}
    parts = {"role": "user", "content": [{"type": "text", "text": "image_url"}]}
    assert not has_media([text, parts, {"role": "assistant", "content": None}, {"role": "tool"}])
    assert not has_media(None)
    for kind in ("image_url", "image", "video"):
        assert has_media([text, {"role": "user", "content": [*parts["content"], {"type": kind}]}])
