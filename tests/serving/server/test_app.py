"""The application without processes: which routes are open, guarded, documented."""

import asyncio
import json
import re

import httpx
import msgspec
import pytest

from tests.serving.frontend.test_text_processor import ready
from tokenmill.config.configs import ServerConfig
from tokenmill.core.messages import GenerateText
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.frontend.open_calls import OpenCalls
from tokenmill.serving.observe.metrics import Metrics
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.health import PartHealth
from tokenmill.serving.replicas.restarts import PartCounts
from tokenmill.serving.server.app import build_app
from tokenmill.serving.server.context import ServerContext, ToolParsers
from tokenmill.serving.server.http.page import page_routes

OPEN = {"/health", "/livez", "/readyz", "/ping", "/version"} | set(page_routes())


def make_context(trouble=None, send=lambda message: None, parsers=None):
    engines = Engines([EngineHandle(0, lambda message: None, [PartHealth("the engine", 30)], answer_seconds=0.01)])
    client = EngineClient([send])
    return ServerContext(
        client=client,
        calls=OpenCalls(client),
        engines=engines,
        ready=ready(),
        metrics=Metrics(engines, PartCounts()),
        model_name="m",
        default_sampling={},
        max_logprobs=20,
        takes_priority=False,
        parsers=parsers or ToolParsers(),
        settings={},
        started=0,
        trouble=lambda: trouble,
    )


def make_app(trouble=None, send=lambda message: None, **config):
    return build_app(make_context(trouble, send), ServerConfig(**config))


@pytest.mark.parametrize("root_path", ["", "/behind"])
def test_metrics_can_be_opened_and_nothing_else_is(root_path):
    app = make_app(api_key=("key",), metrics_open=True, root_path=root_path)
    assert request(app, "GET", "/metrics").status_code == 200
    for method, path in all_routes(app):
        if path not in OPEN | {"/metrics"}:
            answer = request(app, method, path.replace("{", "").replace("}", ""))
            assert answer.status_code == 401, path
    assert request(make_app(api_key=("key",)), "GET", "/metrics").status_code == 401


def test_a_model_with_several_names_is_called_by_any():
    context = msgspec.structs.replace(make_context(), model_names=("m", "other/m"))
    app = build_app(context, ServerConfig())
    assert [card["id"] for card in request(app, "GET", "/v1/models").json()["data"]] == ["m", "other/m"]
    for name, status in (("m", 200), ("other/m", 200), ("another", 404)):
        assert request(app, "GET", f"/v1/models/{name}").status_code == status
    assert request(app, "GET", "/v1/models/other/m").json()["id"] == "other/m"


def request(app, method, path, **how) -> httpx.Response:
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(run())


def all_routes(app):
    return [(method, route.path) for route in app.routes for method in route.methods]


@pytest.fixture(scope="module")
def app():
    return make_app(api_key=("key-one", "key-two"))


def test_every_route_but_the_open_ones_needs_a_key(app):
    routes = all_routes(app)
    assert {"/v1/chat/completions", "/metrics", "/docs", "/openapi.json"} <= {path for _, path in routes}
    for method, path in routes:
        status = request(app, method, path.replace("{model:path}", "m")).status_code
        assert (status == 401) == (path not in OPEN), (method, path, status)


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1//models", "/v1/models/", "/health/../v1/models", "/%68ealth/../v1/models", "/v1%2fmodels",
     "/health//../v1/models", "/HEALTH", "/health%00", "/version/x", "/nothing"],
)  # fmt: skip
def test_odd_paths_are_guarded(app, path):
    assert request(app, "GET", path).status_code == 401


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "Bearer ", "Basic key-one", "key-one", "Bearer key-on", ""]
)
def test_a_wrong_key_is_refused_in_openais_form(app, header):
    reply = request(app, "GET", "/v1/models", headers={"Authorization": header})
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert "key-one" not in reply.text
    assert reply.headers["www-authenticate"] == "Bearer"


def test_any_of_the_keys_opens(app):
    for key in ("key-one", "key-two"):
        assert request(app, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert request(app, "GET", "/v1/models", headers={"Authorization": "bearer  key-one "}).status_code == 200


@pytest.mark.parametrize("num_keys", [0, 1, 2])
def test_tenants_are_keys_where_there_are_several_and_else_calls(num_keys):
    sent = []
    keys = ("key-one", "key-two")[:num_keys]
    app = make_app(send=sent.append, api_key=keys)
    body = {"prompt": ["a", "b"], "timeout": 0.01}
    for key in (*keys, *keys) if keys else ("none", "none"):
        reply = request(app, "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 408, reply.text
    tenants = [message.tenant for message in sent if isinstance(message, GenerateText)]
    assert tenants[0::2] == tenants[1::2], "the prompts of a call are of one tenant"
    of_calls = tenants[0::2]
    assert len(set(of_calls)) == (2 if num_keys == 2 else len(of_calls))
    if num_keys == 2:
        assert of_calls[:2] == of_calls[2:]
    assert not any(key in tenant for key in keys for tenant in tenants), "no key travels"


def test_without_keys_all_is_open():
    assert request(make_app(), "GET", "/v1/models").status_code == 200


def test_behind_a_proxy_prefix_the_same_routes_are_open():
    app = make_app(api_key=("k",), root_path="/proxy")
    assert request(app, "GET", "/proxy/health").status_code == 200
    assert request(app, "GET", "/proxy/v1/models").status_code == 401
    assert request(app, "GET", "/proxy/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_a_cors_preflight_passes_without_a_key():
    app = make_app(api_key=("k",), allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    reply = request(app, "OPTIONS", "/v1/chat/completions", headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert request(app, "POST", "/v1/chat/completions", headers=headers).status_code == 401


def test_the_documentation_shows_every_field_of_a_body():
    document = request(make_app(), "GET", "/openapi.json").json()
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "min_p", "cache_salt", "chat_template_kwargs"} <= set(fields)
    assert not {"prediction", "best_of"} & set(fields), "what is not supported is not offered"
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


def test_what_watches_a_server_may_ask_with_its_own_methods():
    for method, path in (("HEAD", "/health"), ("HEAD", "/ping"), ("HEAD", "/version"), ("POST", "/ping")):
        reply = request(make_app(), method, path)
        assert (reply.status_code, reply.headers.get("x-request-id") is not None) == (200, True), (method, path)
        assert request(make_app(trouble="it hangs"), method, path).status_code == (200 if path == "/version" else 503)


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models/", "///v1///models//"])
def test_slashes_too_many_change_nothing(path):
    plain = request(make_app(), "GET", "/v1/models").json()
    assert request(make_app(), "GET", "http://test" + path).json() == plain
    assert request(make_app(root_path="/proxy"), "GET", "http://test/proxy/" + path).json() == plain
    for root in ("/proxy/", "//proxy//"):
        assert request(make_app(root_path="/proxy"), "GET", "http://test" + root).status_code == 200


def test_what_answers_get_answers_head_without_a_body():
    app = make_app()
    methods = {method: {path for other, path in all_routes(app) if other == method} for method in ("GET", "HEAD")}
    assert methods["GET"] <= methods["HEAD"]
    for path in ("/v1/models", "/metrics", "/docs", "/health", "/livez", "/openapi.json", "/api/tags", "/nothing"):
        get, head = request(app, "GET", path), request(app, "HEAD", path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers.get("content-type") == get.headers.get("content-type"), path


def test_kubernetes_restarts_only_what_does_not_answer():
    app = make_app(trouble="it hangs", api_key=("k",))
    assert request(app, "GET", "/livez").status_code == 200
    assert request(app, "GET", "/readyz").status_code == 503
    assert request(make_app(), "GET", "/readyz").status_code == 200


def test_health_is_503_in_trouble():
    assert request(make_app(), "GET", "/health").status_code == 200
    reply = request(make_app(trouble="the engine hangs"), "GET", "/health")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the engine hangs")
