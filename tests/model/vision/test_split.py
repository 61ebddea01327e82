"""Three kinds of servers for an image: one encodes, one computes the prompt, one decodes; each may die."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np

from tests.model.vision.test_encoder_server import DTYPE, encoder_server, png
from tests.model.vision.test_server import chat_body, url_of
from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import RunningServer, free_port, start_server
from tests.serving.server.split_servers import Split, transfer_config
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE


def encoded(server: RunningServer) -> tuple[float, float]:
    """Tokens that a server has encoded, and those that were encoded elsewhere."""
    return server.metric("mm_encoder_tokens_total"), server.metric("mm_encoder_loaded_tokens_total")


def test_encoder_prompt_and_decode_servers_answer_as_one_and_each_may_die(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    bodies = [chat_body(*[url_of(png(rng)) for _ in range(1 + number % 2)]) for number in range(4)]

    def config(role: str, port: int, **more: object) -> EngineConfig:
        transfer = transfer_config(role, tmp_path, "unix", port)
        fields = {"dtype": DTYPE, "num_pages": 200, "max_num_seqs": 8, "kv_transfer_config": transfer} | more
        return EngineConfig(model=str(checkpoint), **fields)  # type: ignore[arg-type]

    with encoder_server(checkpoint, tmp_path) as (encoder, url):
        port, names = free_port(), {"served_model_name": ("tiny",)}
        with (
            start_server(config("kv_producer", port, encoder_urls=(url,)), ENGINE_MODULE, **names) as prefill,
            start_server(config("kv_consumer", port), ENGINE_MODULE, **names) as decode,
            start_proxy([prefill.url], [decode.url]) as proxy,
        ):

            def answer(body: dict[str, object]) -> tuple[str, int]:
                reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=60)
                assert reply.status_code == 200, reply.text
                usage = reply.json()["usage"]["prompt_tokens_details"]
                return reply.json()["choices"][0]["message"]["content"], usage.get("external_cached_tokens", 0)

            first, num_external = answer(bodies[0])
            assert num_external > 9, "the image's tokens are among those that came from the producer"
            prefill.wait_for(lambda: encoded(prefill) == (0, 9))
            encoder.kill()
            second, num_external = answer(bodies[1])
            assert num_external > 18
            prefill.wait_for(lambda: encoded(prefill) == (18, 9))
            prefill.wait_until_unused()
            assert encoded(decode) == (0, 0), "a decode server encodes nothing"
            Split(prefill, decode, proxy.url, proxy.log).kill_producer()
            third, num_external = answer(bodies[2])
            assert num_external == 0
            decode.wait_for(lambda: encoded(decode)[0] == 9)
            alone = [decode.post("/v1/chat/completions", body | {"cache_salt": "alone"}) for body in bodies[:3]]
            assert [one.json()["choices"][0]["message"]["content"] for one in alone] == [first, second, third]
