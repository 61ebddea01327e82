"""/v1/files and /v1/batches as OpenAI's client uses them, against a running server."""

import io
import json
import random

import httpx
import openai
import pytest

from tests.eventually import eventually, patience
from tests.serving.server.running_server import start_server
from tests.threats.raw_http import connect, status
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.batches.lines import line_seed
from tokenmill.serving.replicas.starter import ENGINE_MODULE

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
KEYS = ("key-of-one", "key-of-another")
# Lines that would take the model a minute.
NUM_LONG = 400


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "batches"
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=200, max_num_seqs=8)
    limits = {"batch_max_bytes": 1 << 20, "batch_max_files": 200}
    with start_server(engine, ENGINE_MODULE, api_key=KEYS, batch_dir=str(folder), **limits) as running:
        running.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        running.folder = folder
        yield running


@pytest.fixture
def client(server):
    with server.client.with_options(api_key=KEYS[0]) as client:
        yield client


def lines_of(*bodies, url=CHAT) -> bytes:
    lines = [{"custom_id": f"line {n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, lines)).encode()


def upload(client, raw: bytes):
    return client.files.create(file=("in.jsonl", io.BytesIO(raw)), purpose="batch")


def start(client, *bodies, url=CHAT, **fields):
    file = upload(client, lines_of(*bodies, url=url))
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **fields)


def wait_for_end(client, batch, seconds=60.0):
    def ended():
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(ended, lambda: client.batches.retrieve(batch.id), seconds=seconds)


def answers(client, file_id) -> dict:
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def chat(text: str, **fields) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | fields


def test_lines_are_answered_as_their_routes_answer(server, client):
    bodies = [
        chat("one", temperature=0.0),
        chat("two", temperature=1.0, seed=7, n=2, logprobs=True, top_logprobs=2),
        chat("three", temperature=1.0),
        chat("four", stream=True),
        chat("five", temperature=9.0),
        chat("six", top_logprobs=2),
    ]
    batch = start(client, *bodies, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.completion_window) == ("validating", {"a": "b"}, "24h")
    batch = wait_for_end(client, batch)
    assert batch.status == "completed"
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output, errors = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
    assert (*output, *errors) == ("line 0", "line 1", "line 2", "line 3", "line 4", "line 5")
    replies = [line["response"]["body"] for line in output.values()]
    assert batch.usage.total_tokens == sum(reply["usage"]["total_tokens"] for reply in replies)
    bodies[2]["seed"] = line_seed(batch.id, "line 2")
    for reply, body in zip(replies, bodies[:3], strict=True):
        assert reply["choices"] == server.post(CHAT, body).json()["choices"]
    assert errors["line 3"]["response"]["body"]["error"]["param"] == "stream"
    for name, body in (("line 4", bodies[4]), ("line 5", bodies[5])):
        direct = server.post(CHAT, body)
        shown = {"status_code": direct.status_code, "body": direct.json()}
        assert direct.status_code == 400
        assert {key: errors[name]["response"][key] for key in shown} == shown
    assert errors["line 3"]["response"]["request_id"] == errors["line 3"]["id"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (TEXT, {"model": "tiny", "prompt": ["a", [5, 6]], "max_tokens": 4, "temperature": 0.0}),
        (VECTORS, {"model": "tiny", "input": "a text", "encoding_format": "base64"}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 4, "temperature": 0.0}),
    ],
)
def test_every_endpoint_has_batches(server, client, url, body):
    batch = wait_for_end(client, start(client, body, url=url))
    reply = answers(client, batch.output_file_id)["line 0"]["response"]["body"]
    told = {TEXT: "choices", VECTORS: "data"}.get(url, "usage")
    assert reply[told] == server.post(url, body).json()[told]
    usage = reply["usage"]
    assert batch.usage.input_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))


def test_files_are_shown_listed_and_deleted(server, client):
    raw = lines_of(chat("ü"))
    made = [upload(client, raw + b" " * n) for n in range(3)]
    assert (made[1].bytes, made[1].filename, made[1].purpose, made[1].status) == (
        len(raw) + 1,
        "in.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(made[0].id).content == raw
    assert client.files.retrieve(made[2].id) == made[2]
    newest = [file.id for file in client.files.list(limit=2)]
    assert newest[:3] == [file.id for file in reversed(made)], "the client turns the pages"
    rising = [file.id for file in client.files.list(limit=2, order="asc", after=made[0].id)]
    assert rising == [file.id for file in made[1:]]
    assert not any(file.purpose == "batch" for file in client.files.list(purpose="batch_output"))
    assert client.files.delete(made[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made[0].id)
    short = client.files.create(file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert short.expires_at - short.created_at == 3600
    assert {path.name for path in (server.folder / "files").iterdir()} == {file.id for file in client.files.list()}


def multipart(*parts: tuple[str, bytes], end: bytes = b"--x--\r\n") -> bytes:
    form = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    return (
        b"".join(
            form % (name.encode(), b'; filename="../../etc/passwd"' if name == "file" else b"", value)
            for name, value in parts
        )
        + end
    )


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (multipart(("purpose", b"fine-tune"), ("file", b"x")), 400, "fine-tune"),
        (multipart(("file", b"x")), 400, "purpose is missing"),
        (multipart(("purpose", b"batch")), 400, "file is missing"),
        (multipart(("purpose", b"batch"), ("file", b"x"), ("colour", b"red")), 400, "colour: unknown"),
        (multipart(("purpose", b"batch"), ("file", b"x"), ("file", b"y")), 400, "file was sent twice"),
        (multipart(("purpose", b"b" * 2000), ("file", b"x")), 400, "purpose is too long"),
        (multipart(("purpose", b"batch"), ("file", b"x"), ("expires_after[seconds]", b"1")), 400, "expires_after"),
        (multipart(("purpose", b"batch"), ("file", b"x"), ("expires_after[anchor]", b"now")), 400, "expires_after"),
        (multipart(("purpose", b"batch"), ("file", b"x"), end=b""), 400, "ends before"),
        (multipart(*((f"f{n}", b"") for n in range(50))), 400, "too many fields"),
        (b"--y\r\n", 400, "not valid"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--", 400, "unknown"),
        (multipart(("purpose", b"batch"), ("file", b"x" * (2 << 20))), 507, "--batch-max-bytes"),
    ],
)  # fmt: skip
def test_wrong_uploads_are_refused_and_leave_nothing(server, client, body, code, said):
    before = [file.id for file in client.files.list()]
    reply = server.http.post(
        f"{server.url}/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (code, True), reply.text
    assert [file.id for file in client.files.list()] == before
    assert list((server.folder / "incoming").iterdir()) == []


def test_what_is_no_form_or_too_large_is_refused_before_it_is_read(server):
    assert server.http.post(f"{server.url}/v1/files", json={}).status_code == 415
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {300 << 20}\r\n\r\n"
    with connect(server.url) as connection:
        connection.sendall(head.encode())
        assert status(connection.recv(65536)) == 413


def test_a_name_is_never_a_path(server, client):
    body = multipart(("purpose", b"batch"), ("file", b"x"))
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    file = server.http.post(f"{server.url}/v1/files", content=body, headers=headers).json()
    assert file["filename"] == "../../etc/passwd"
    assert client.files.content(file["id"]).content == b"x"
    for name in ("..%2f..%2fbatches.sqlite3", "%2e%2e", "batches.sqlite3", "lock", "a%00b"):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
            assert server.http.get(server.url + path).status_code == 404


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"input_file_id": "file-none"}, 404, "file_id"),
        ({"input_file_id": "../lock"}, 404, "file_id"),
        ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, 400, None),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after"),
        ({"colour": "red"}, 400, "colour"),
    ],
)
def test_wrong_batches_are_refused_by_name(server, client, change, code, param):
    file = upload(client, lines_of(chat("x")))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
    reply = server.post("/v1/batches", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (code, param), reply.text


def test_wrong_lines_fail_the_batch_and_say_where(client):
    file = upload(client, lines_of(chat("x")) + b"\n" + lines_of(chat("y")) + b"\nno json")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = wait_for_end(client, batch)
    assert (batch.status, batch.failed_at is None, batch.output_file_id) == ("failed", False, None)
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
    ]
    done = wait_for_end(client, start(client, chat("z")))
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.batches.create(input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h")


def test_a_key_sees_only_its_own(server, client):
    batch = wait_for_end(client, start(client, chat("secret")))
    with server.client.with_options(api_key=KEYS[1]) as other:
        assert list(other.files.list()) == list(other.batches.list()) == []
        for call in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.retrieve(batch.output_file_id),
            lambda: other.files.content(batch.input_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert wait_for_end(other, start(other, chat("own"))).status == "completed"
        assert len(list(other.files.list())) == 2
    stored = b"".join(path.read_bytes() for path in server.folder.glob("batches.sqlite3*"))
    assert not any(key.encode() in stored for key in KEYS)


def test_a_batch_runs_beside_others_and_can_be_cancelled(server, client):
    long = chat("tell me all", max_tokens=200, min_tokens=200)
    batch = start(client, *[long] * NUM_LONG)
    server.wait_for(lambda: server.metric("batch_lines", state="running") >= 4)
    for _ in range(3):
        reply = server.post(CHAT, chat("quick", temperature=0.0, max_tokens=2))
        assert reply.status_code == 200
        assert client.batches.retrieve(batch.id).status == "in_progress", "answered while the batch goes on"
    assert server.metric("batch_lines", state="running") <= 4, "half of the rows"
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait_for_end(client, batch)
    assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
    output = answers(client, batch.output_file_id) if batch.output_file_id else {}
    errors = answers(client, batch.error_file_id)
    assert len(output) + len(errors) == NUM_LONG and not output.keys() & errors.keys()
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    server.wait_until_unused()
    server.wait_for(lambda: server.metric("batch_lines", state="queued") == 0)
    server.wait_for(lambda: server.metric("batch_lines_ended_total", outcome="cancelled") == len(errors))
    client.files.delete(batch.input_file_id)


def test_without_a_folder_the_routes_say_how_to_have_them(echo_server):
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/files/x/content"),
    ):
        reply = httpx.request(method, echo_server.url + path, timeout=patience())
        assert (reply.status_code, "--batch-dir" in reply.json()["error"]["message"]) == (404, True)


def test_a_web_page_of_another_origin_uploads_nothing_to_a_server_without_a_key(echo_server):
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    body = multipart(("purpose", b"batch"), ("file", b"x"))
    url = f"{echo_server.url}/v1/files"
    how = {"content": body, "timeout": patience()}
    assert httpx.post(url, headers=form | {"Origin": "http://elsewhere"}, **how).status_code == 403
    assert httpx.post(url, headers=form | {"Host": "elsewhere"}, **how).status_code == 403
    assert httpx.post(url, headers={"Content-Type": "text/plain"}, **how).status_code == 415
    assert httpx.post(f"{echo_server.url}/v1/batches", headers=form, **how).status_code == 415


def test_a_full_disk_is_507_and_leaves_nothing(stub_model, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, room = random.Random(seed), 300_000
    engine = EngineConfig(model=str(stub_model))
    with start_server(engine, batch_dir=str(tmp_path), max_file_bytes=room, tokenizer_workers=0) as server:
        for size in [*(rng.randrange(room + 1, 4 << 20) for _ in range(4)), room - 1]:
            parts = {"file": ("in.jsonl", rng.randbytes(size)), "purpose": (None, "batch")}
            with httpx.Client(timeout=30) as http:
                reply = http.post(f"{server.url}/v1/files", files=parts)
            found = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]
            if size < room:
                assert (reply.status_code, [path.stat().st_size for path in found]) == (200, [size])
                continue
            error = reply.json()["error"]
            assert (reply.status_code, found) == (507, [])
            assert (error["type"], error["message"]) == (
                "insufficient_storage",
                "the server cannot write the file: File too large",
            )
        assert "Traceback" not in server.output()
