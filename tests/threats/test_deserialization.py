"""THREATS row A: bytes that are no message end no process, whichever socket they come through."""

import zmq

from tests.checkpoints import make_checkpoint
from tests.ipc.test_channels import NO_MESSAGES
from tests.serving.server.running_server import start_server
from tests.threats.bystander import Bystander
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

# The name of each, and its label in the metrics: a single engine has no number there.
INBOXES = {"api": "api", "engine-0": "engine", "worker-0": "worker-0", "worker-1": "worker-1"}


def test_garbage_on_every_internal_socket_ends_nothing(tmp_path):
    engine = EngineConfig(model=str(make_checkpoint(tmp_path / "tiny", "qwen3")), num_pages=64)
    with (
        start_server(engine, ENGINE_MODULE, tokenizer_workers=2) as server,
        Bystander(server.url, "none") as bystander,
        zmq.Context() as context,
    ):
        children = server.children()
        (folder,) = server.private.iterdir()
        for name in INBOXES:
            with context.socket(zmq.PUSH) as stranger:
                stranger.connect(f"ipc://{folder}/{name}.ipc")
                for raw in NO_MESSAGES.values():
                    stranger.send(raw)
        for name, label in INBOXES.items():
            server.wait_for(
                lambda label=label: server.metric("messages_dropped_total", inbox=label) == len(NO_MESSAGES)
            )
            assert server.output().count(f" to {name} is dropped: ") == len(NO_MESSAGES)
        asked = len(bystander.answers)
        server.wait_for(lambda: len(bystander.answers) > asked + 4)
        assert server.children() == children
        assert server.http.get(f"{server.url}/health").status_code == 200
