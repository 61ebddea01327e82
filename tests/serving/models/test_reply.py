"""A request whose model's server goes away under it is asked again, and refused when that happens too often."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

from tokenmill.serving.models.asked import Asked
from tokenmill.serving.models.errors import ModelDied
from tokenmill.serving.models.reply import Answers
from tokenmill.serving.proxy.relay import OpenReplies


class Parts(httpx.AsyncByteStream):
    """The body of an answer."""

    async def __aiter__(self):
        yield b"{}"


class Server:
    """The server of a model whose client answers, fails, or is closed already: its end is not counted yet."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.num_lost = 0
        self.http = httpx.AsyncClient(transport=httpx.MockTransport(self.reply), base_url="http://model")

    def reply(self, _request: httpx.Request) -> httpx.Response:
        if self.way == "fails":
            raise httpx.ReadError("reset by peer")
        return httpx.Response(200, stream=Parts())

    async def lost(self) -> None:
        self.num_lost += 1


class Service:
    """Gives each claim the next of some servers."""

    def __init__(self, servers: list[Server]) -> None:
        self.catalogue = {"ant": "ant"}
        self.left: list[float | None] = []
        self._servers = iter(servers)

    def claim(self, _entry: str) -> SimpleNamespace:
        async def admitted() -> Server:
            return next(self._servers)

        return SimpleNamespace(admitted=admitted, leave=self.left.append, ticket=SimpleNamespace(model="ant"))


def obtain(servers: list[Server]) -> tuple[int, Service]:
    service = Service(servers)

    async def scenario() -> int:
        for server in servers:
            if server.way == "is closed":
                await server.http.aclose()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        request = Request(scope | {"state": {"request_id": "r"}})
        answers = Answers(service, OpenReplies())
        return (await answers.obtain(request, service.claim("ant"), Asked("ant", b"{}", 5.0))).status_code

    return asyncio.run(scenario()), service


@pytest.mark.parametrize("way", ["fails", "is closed"])
def test_a_request_is_asked_again_when_the_server_of_its_model_is_gone(way):
    servers = [Server(way), Server(way), Server("answers")]
    status, service = obtain(servers)
    assert status == 200
    assert [server.num_lost for server in servers] == [1, 1, 0]
    assert service.left == [5.0] * 3, "each claim is given back"


@pytest.mark.parametrize("way", ["fails", "is closed"])
def test_the_third_server_that_is_lost_under_a_request_ends_it(way):
    with pytest.raises(ModelDied, match="ant has failed"):
        obtain([Server(way), Server(way), Server(way), Server("answers")])
