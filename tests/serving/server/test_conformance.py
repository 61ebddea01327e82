"""The server against its own description: schemathesis makes requests from /openapi.json, right and wrong ones."""

import re

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error

from tests.serving.server.test_app import all_routes, make_app
from tests.tiers import scaled
from tokenmill.serving.server.http.page import page_routes

# These stop the engine, or wait for it.
LEFT_OUT = {"/live", "/pause", "/health_generate"}


@pytest.fixture(scope="module")
def document(echo_server):
    return echo_server.http.get(f"{echo_server.url}/openapi.json").json()


def test_every_route_is_described_and_only_those():
    app = make_app()
    described = {(method.upper(), path) for path, methods in app.document["paths"].items() for method in methods}
    there = {(method, re.sub(r":path", "", path)) for method, path in all_routes(app)}
    gets = {path for method, path in there if method == "GET"}
    heads = {("HEAD", path) for path in gets}
    assert there - described == {("GET", path) for path in page_routes()} | {("GET", "/openapi.json")} | heads
    assert described <= there


def test_the_description_is_whole(document):
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            declared = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path)), path
            assert operation["responses"]["4XX"]
            assert operation["description"], path
    assert {"ChatBody", "TextBody", "EmbeddingBody", "MessagesBody", "ResponsesBody", "ErrorBody"} <= set(schemas)


def test_no_request_makes_a_server_error(echo_server, document):
    schema = schemathesis.openapi.from_dict(document)
    seen = set()

    @hypothesis.settings(
        max_examples=scaled(7), deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    def check(case):
        seen.add((case.method, case.path))
        case.call_and_validate(base_url=echo_server.url, checks=[not_a_server_error], timeout=30)

    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path not in LEFT_OUT:
            hypothesis.given(case=operation.as_strategy())(check)()
    assert len(seen) > 20
    assert echo_server.http.get(f"{echo_server.url}/health").status_code == 200
    assert "Traceback" not in echo_server.output(), echo_server.output()[-3000:]
