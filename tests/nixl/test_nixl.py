"""KV over NIXL between two processes of this machine; skipped where `make nixl` has not installed it."""

import importlib.util

import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.transfer.remote.pair import running_pair, same_pages, soon, storing, zero_pages
from tests.serving.server.split_servers import (
    PARSERS,
    body_of,
    choices,
    computed_prompt,
    fresh_prompt,
    num_cached,
    start_split,
)
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.remote.channel import TransferError
from tokenmill.engine.transfer.remote.client import PageClient
from tokenmill.engine.transfer.remote.messages import Handle

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")),
    reason="`make nixl` installs what this needs",
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module", params=["unix", "tcp"])
def split(request, checkpoint, tmp_path_factory):
    """`unix`, `tcp`: how they talk; pages travel over NIXL."""
    folder = tmp_path_factory.mktemp("split")
    how = {"connector": "NixlConnector", "server": PARSERS, "lease_seconds": 10.0}
    with start_split(checkpoint, folder, request.param, **how) as running:
        yield running


def test_streams_over_nixl_are_those_of_one_engine(split):
    split.check_streams(32)


def test_all_full_pages_come_over_nixl(split):
    split.check_pages(body_of(fresh_prompt(300), n=2, logprobs=1, temperature=0.8, seed=3), 288)


def test_a_producer_that_dies_costs_nothing_but_time(checkpoint, tmp_path):
    with start_split(checkpoint, tmp_path, "tcp", connector="NixlConnector", fetch_seconds=3.0) as split:
        prompt = fresh_prompt()
        params = computed_prompt(split.prefill, prompt)
        split.kill_producer()
        reply = split.decode.post("/v1/completions", body_of(prompt, kv_transfer_params=params))
        assert num_cached(reply) == 0
        assert choices(reply) == choices(split.decode.post("/v1/completions", body_of(prompt, cache_salt="own")))
        split.decode.wait_until_unused()


def test_pages_arrive_as_they_were_and_damage_is_found_out(tmp_path):
    from tokenmill.engine.transfer.remote.nixl_transport import NixlAgent, NixlReceiver, NixlSender

    rng, handle = np.random.default_rng(7), Handle("engine-1", "r", "n")
    agents = NixlAgent(), NixlAgent()
    with running_pair(rng, "nixl", tmp_path) as pair:
        size = pair.memory.page_bytes
        pair.server._producer.senders["nixl"] = lambda: NixlSender(size, agents[0])

        def make(page_bytes, offer, channel, deadline):
            return NixlReceiver(page_bytes, offer, channel, deadline, agents[1])

        secret = pair.server._producer.secret
        client = PageClient(pair.server.address, secret, pair.format, "nixl", make)
        pages, tokens = [9, 3, 30, 1, 0], np.arange(5 * 16, dtype=np.int32)
        pair.grant(handle, pages, tokens)
        ours, taken = zero_pages(pair.parts, 5), []
        memory = HostPages(ours)
        client.fetch(pair.ask(handle, tokens, 0, 5), storing(memory, [0, 1, 2, 3, 4], taken), soon())
        assert taken == [0, 1, 2, 3, 4] and same_pages(pair.parts, pages, ours, taken)
        honest = pair.memory.copy_out
        wrong = lambda some, data: [value ^ 1 for value in honest(some, data)]  # noqa: E731
        msgspec.structs.force_setattr(pair.server._producer, "copy_out", wrong)
        with pytest.raises(TransferError, match="page 0 is not what it was"):
            client.fetch(pair.ask(handle, tokens, 0, 5), storing(memory, [0, 1, 2, 3, 4]), soon())
        client.close()
