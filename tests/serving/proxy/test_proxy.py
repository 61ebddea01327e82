"""The proxy between servers that the test plays: what each is asked, and what the client gets of it."""

import asyncio
import json

import httpx
import pytest

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.proxy.app import HOLD, Proxy, decode_body, may_split, prefill_body
from tokenmill.serving.proxy.servers import REST_SECONDS, Servers

PARAMS = {"do_remote_prefill": True, "remote_request_id": "r"}
BODY = {"prompt": "a b c", "max_tokens": 5, "n": 2, "stream": True, "stream_options": {"include_usage": True}}


class World:
    """Servers by their host names; each answers by a function of the request, or cannot be reached."""

    def __init__(self, **servers):
        self.servers = servers
        self.seen: list[tuple[str, str, dict]] = []

    async def handle(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        content = await request.aread()
        body = json.loads(content) if content.startswith(b'{"') else {}
        self.seen.append((host, request.url.raw_path.decode(), body))
        if host not in self.servers:
            raise httpx.ConnectError("nobody there", request=request)
        answer = self.servers[host](request, body)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        stream = answer.stream if isinstance(answer.stream, Broken) else Unread(answer.content)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


class Unread(httpx.AsyncByteStream):
    """A body that comes over a network: only once."""

    def __init__(self, content: bytes):
        self.content = content

    async def __aiter__(self):
        yield self.content


def computes(_request, _body):
    return httpx.Response(200, json={"choices": [], "kv_transfer_params": PARAMS})


def goes_on(_request, _body):
    return httpx.Response(200, content=b"data: one\n\ndata: [DONE]\n\n", headers={"content-type": "text/event-stream"})


def ask(
    world: World,
    path: str = "/v1/completions",
    body=BODY,
    decode=("d",),
    prefill=("p",),
    seconds=5.0,
    config=None,
    **how,
):
    """One request through a proxy."""
    how["headers"] = {"content-type": "application/json"} | how.get("headers", {})

    async def call() -> httpx.Response:
        urls = [[f"http://{name}" for name in names] for names in (prefill, decode)]
        transport = httpx.MockTransport(world.handle)
        proxy = Proxy(Servers(urls[0]), Servers(urls[1]), seconds, config, transport)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app()), base_url="http://proxy")
        async with client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = await client.request(how.pop("method", "POST"), path, content=content, **how)
        await proxy.close()
        return reply

    return asyncio.run(call())


def test_the_prompt_goes_to_one_server_and_the_rest_to_another():
    world = World(p=computes, d=goes_on)
    reply = ask(world, headers={"authorization": "Bearer key", "x-request-id": "mine"})
    assert reply.content == b"data: one\n\ndata: [DONE]\n\n"
    assert reply.headers["content-type"] == "text/event-stream"
    (first, second) = world.seen
    assert first == (
        "p",
        "/v1/completions",
        {"prompt": "a b c", "max_tokens": 1, "stream": False, "kv_transfer_params": HOLD},
    )
    assert second == ("d", "/v1/completions", BODY | {"kv_transfer_params": PARAMS})


def test_headers_reach_both_servers_under_one_id():
    seen = []

    def noting(answer):
        def handle(request, body):
            seen.append((request.headers.get("authorization"), request.headers.get("x-request-id")))
            return answer(request, body)

        return handle

    ask(World(p=noting(computes), d=noting(goes_on)), headers={"authorization": "Bearer key"})
    assert seen[0] == seen[1]
    assert seen[0][0] == "Bearer key" and len(seen[0][1]) == 24


@pytest.mark.parametrize(
    "broken",
    [
        None,
        lambda *_: httpx.Response(500),
        lambda *_: httpx.Response(429, json={"error": {}}),
        lambda *_: httpx.Response(200, json={"choices": []}),
        lambda *_: httpx.Response(200, json={"kv_transfer_params": "text"}),
        lambda *_: httpx.Response(200, content=b"no json"),
        lambda *_: httpx.Response(200, json=[1]),
    ],
)
def test_without_a_prefill_server_the_decode_server_computes_alone(broken):
    world = World(d=goes_on) if broken is None else World(p=broken, d=goes_on)
    assert ask(world).status_code == 200
    assert world.seen[-1] == ("d", "/v1/completions", BODY)


def test_a_prompt_that_takes_too_long_is_left_to_the_decode_server():
    async def slow(*_):
        await asyncio.sleep(30)

    world = World(p=slow, d=goes_on)
    assert ask(world, seconds=0.05).status_code == 200
    assert world.seen[-1] == ("d", "/v1/completions", BODY)


def test_another_server_stands_in_for_a_dead_one():
    world = World(p2=computes, d2=goes_on)
    assert ask(world, prefill=("p1", "p2"), decode=("d1", "d2")).status_code == 200
    assert [host for host, _, _ in world.seen] == ["p1", "p2", "d1", "d2"]
    assert world.seen[-1][2]["kv_transfer_params"] == PARAMS


def test_without_any_decode_server_the_client_is_told():
    reply = ask(World(p=computes))
    assert reply.status_code == 503
    assert "no decode server can be reached" in reply.json()["error"]["message"]


def test_a_refusal_of_the_decode_server_reaches_the_client():
    world = World(p=computes, d=lambda *_: httpx.Response(400, json={"error": {"message": "no"}}))
    reply = ask(world)
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": "no"}})


def test_what_a_client_says_of_transfers_is_dropped():
    world = World(p=computes, d=goes_on)
    ask(world, body=BODY | {"prompt": ["a", "b"], "kv_transfer_params": {"remote_host": "evil"}})
    assert world.seen == [("d", "/v1/completions", BODY | {"prompt": ["a", "b"]})]


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "body", ["{no", "[]", '{"prompt": NaN}', f'{{"prompt": {DEEP}', b'{"prompt": "\xff"}', b"", '{"a": 1e999}']
)
def test_what_no_server_could_read_reaches_none(body):
    world = World(p=computes, d=goes_on)
    reply = ask(world, body=body if isinstance(body, bytes) else body.encode())
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert world.seen == []


def test_all_other_paths_are_the_decode_servers():
    world = World(p=computes, d=lambda request, _: httpx.Response(207, content=request.method.encode()))
    reply = ask(world, "/v1/models/x%20y?a=1&b=%2F", b"", method="DELETE")
    assert (reply.status_code, reply.content) == (207, b"DELETE")
    assert world.seen == [("d", "/v1/models/x%20y?a=1&b=%2F", {})]


def test_a_body_that_is_too_large_is_refused():
    world = World(p=computes, d=goes_on)
    assert ask(world, body=b" " * (1 << 20), config=ServerConfig(max_body_bytes_in_flight=1 << 19)).status_code == 413
    assert world.seen == []


def failing(_request, _body):
    raise httpx.ReadError("it died")


def busy(_request, _body):
    return httpx.Response(503, json={"error": {"message": "busy"}}, headers={"retry-after": "1"})


class Broken(httpx.AsyncByteStream):
    """A body that breaks off after its parts."""

    def __init__(self, *parts: bytes):
        self.parts = parts

    async def __aiter__(self):
        for part in self.parts:
            yield part
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


def breaks_off(*parts: bytes, kind: str = "text/event-stream"):
    return lambda *_: httpx.Response(200, stream=Broken(*parts), headers={"content-type": kind})


@pytest.mark.parametrize("first", [failing, busy, breaks_off(), breaks_off(b'{"choices"', kind="application/json")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_decode_server_answers_where_one_fails_before_its_first_byte(first, path):
    world = World(p=computes, d1=first, d2=goes_on)
    reply = ask(world, path, decode=("d1", "d2"))
    assert (reply.status_code, reply.content) == (200, b"data: one\n\ndata: [DONE]\n\n")
    assert [host for host, _, _ in world.seen] == ["p", "d1", "d2"]
    assert world.seen[1][2]["kv_transfer_params"] == PARAMS
    assert "kv_transfer_params" not in world.seen[2][2], "the first may have fetched the pages"


def test_what_ends_two_servers_is_given_to_no_third():
    world = World(p=computes, d1=failing, d2=failing, d3=goes_on)
    reply = ask(world, decode=("d1", "d2", "d3"))
    assert (reply.status_code, reply.json()["error"]["type"]) == (502, "proxy_error")
    assert [host for host, _, _ in world.seen] == ["p", "d1", "d2"]


def test_where_all_are_busy_the_client_reads_so():
    reply = ask(World(p=computes, d1=busy, d2=busy), decode=("d1", "d2"))
    assert (reply.status_code, reply.json()["error"]["message"], reply.headers["retry-after"]) == (503, "busy", "1")


@pytest.mark.parametrize(("method", "hosts"), [("GET", ["d1", "d2"]), ("POST", ["d1"]), ("DELETE", ["d1"])])
def test_what_may_change_something_is_asked_once(method, hosts):
    world = World(d1=failing, d2=goes_on)
    reply = ask(world, "/pause", b"", decode=("d1", "d2"), method=method)
    assert (reply.status_code == 200) == (len(hosts) == 2)
    assert [host for host, _, _ in world.seen] == hosts


def test_another_prefill_server_computes_where_one_fails():
    for first in (failing, busy, lambda *_: httpx.Response(500)):
        world = World(p1=first, p2=computes, d=goes_on)
        assert ask(world, prefill=("p1", "p2")).status_code == 200
        assert [host for host, _, _ in world.seen] == ["p1", "p2", "d"]
        assert world.seen[-1][2]["kv_transfer_params"] == PARAMS


EVENT = b'data: {"choices":[]}\n\n'


@pytest.mark.parametrize(
    ("path", "kind", "last"),
    [
        ("/v1/completions", b"proxy_error", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: error\ndata: {"error":{"type":"api_error"', b"\n\n"),
        ("/v1/responses", b'event: error\ndata: {"type":"error"', b"\n\n"),
    ],
)
@pytest.mark.parametrize("parts", [(EVENT,), (EVENT, EVENT[:9]), (EVENT[:-1], EVENT[-1:] + EVENT[:-1])])
def test_a_stream_that_breaks_off_ends_with_an_error(path, kind, last, parts):
    """Wherever it breaks off: of whole events, and of none else."""
    reply = ask(World(p=computes, d=breaks_off(*parts)), path, decode=("d",))
    assert reply.status_code == 200
    assert reply.content.startswith(EVENT) and reply.content.endswith(last)
    told = reply.content.removeprefix(EVENT)
    assert kind in told and EVENT[:9] not in told.replace(b'data: {"error"', b"").replace(b'data: {"type"', b"")
    for event in reply.content.split(b"\n\n")[:-1]:
        data = event.rpartition(b"data: ")[2]
        assert data == b"[DONE]" or json.loads(data)


def test_pages_of_others_are_refused_and_the_own_ones_chat():
    """The servers behind know nothing of the proxy's page, and would refuse what it sends."""
    world = World(p=computes, d=goes_on)
    assert ask(world, headers={"origin": "http://evil.example"}).status_code == 403
    assert ask(world, headers={"content-type": "text/plain"}).status_code == 415
    assert world.seen == []
    headers = []

    def noting(request, body):
        headers.append(dict(request.headers))
        return goes_on(request, body)

    assert ask(World(p=noting, d=noting), headers={"origin": "http://proxy"}).status_code == 200
    assert len(headers) == 2 and not any("origin" in one for one in headers)


def test_with_keys_of_its_own_it_asks_for_them_and_shows_its_page():
    world, config = World(p=computes, d=goes_on), ServerConfig(api_key=("k",))
    assert ask(world, config=config).status_code == 401
    assert world.seen == []
    assert ask(world, config=config, headers={"authorization": "Bearer k"}).status_code == 200
    for path in ("/", "/docs", "/health"):
        assert ask(world, path, b"", config=config, method="GET").status_code == 200


def test_a_body_that_is_not_read_here_goes_on_as_it_comes():
    seen = []

    def noting(request, _body):
        seen.append((request.headers.get("content-length"), request.content))
        return httpx.Response(200)

    form = {"content-type": "multipart/form-data; boundary=x"}
    assert ask(World(d=noting), "/v1/files", b"x" * 1000, headers=form).status_code == 200
    assert seen == [("1000", b"x" * 1000)]


def test_a_client_that_leaves_ends_its_prompt():
    async def check() -> None:
        ended = asyncio.Event()
        asked = asyncio.Event()

        async def slow(*_):
            asked.set()
            try:
                await asyncio.sleep(30)
            finally:
                ended.set()

        world = World(p=slow, d=goes_on)
        proxy = Proxy(Servers(["http://p"]), Servers(["http://d"]), transport=httpx.MockTransport(world.handle))
        body = json.dumps(BODY).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asked.wait()
            return {"type": "http.disconnect"}

        async def send(_message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        scope["headers"] = [(b"host", b"proxy"), (b"content-type", b"application/json")]
        await asyncio.wait_for(proxy.app()(scope | {"http_version": "1.1", "scheme": "http"}, receive, send), 20)
        await asyncio.wait_for(ended.wait(), 20)
        await proxy.close()
        assert [host for host, _, _ in world.seen] == ["p"]

    asyncio.run(check())


def test_a_prompt_of_several_or_one_that_is_told_of_is_not_split():
    assert may_split({"prompt": "a"}) and may_split({"prompt": [1, 2]}) and may_split({"messages": []})
    assert not may_split({"prompt": ["a"]}) and not may_split({"prompt": [[1]]}) and not may_split({})
    assert not may_split({"prompt": "a", "echo": True})
    assert not may_split({"messages": [], "prompt_logprobs": 0})


def test_what_the_prompt_depends_on_reaches_the_prefill_server():
    """Tools and template variables are part of the prompt, and tool_choice says whether tools are."""
    body = {"messages": [1], "tools": [2], "tool_choice": "none", "chat_template_kwargs": {"a": 1}, "cache_salt": "s"}
    assert prefill_body(body | {"stop": "x", "min_tokens": 9, "max_completion_tokens": 7}) == body | {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": HOLD,
    }
    assert decode_body(body | {"kv_transfer_params": 1}, None) == body


def test_servers_take_turns_and_rest_after_a_failure():
    now = [0.0]
    servers = Servers(["http://a/", "http://b"], lambda: now[0])
    first = servers.in_turn()[0]
    assert first.url == "http://a"
    with servers.serving(first):
        assert servers.in_turn()[0].url == "http://b"
    servers.failed(first)
    assert [server.url for server in servers.fit()] == ["http://b"]
    assert [server.url for server in servers.in_turn()] == ["http://b", "http://a"]
    now[0] = REST_SECONDS
    assert len(servers.fit()) == 2
