"""A request that a text worker cannot stomach ends alone, whichever way it does harm; all others are answered."""

import concurrent.futures
import random

import httpx
import pytest

from tests.eventually import patience
from tests.serving.server.hanging_text_worker import CRASHES, HOLDS_THE_LOCK, KILLED, SLEEPS
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

WORKER = "tests.serving.server.hanging_text_worker"
CONVICTED = "the text worker died twice while it prepared this request; it is not tried again"
TEMPLATE = """
{%- macro twice(depth) %}{% if depth %}{{ twice(depth - 1) }}{{ twice(depth - 1) }}{% endif %}{% endmacro %}
{%- macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}
{%- set ns = namespace(text='x') %}
{%- for message in messages %}
    {%- if 'LOOPS' in message.content %}
        {%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
    {%- elif 'CALLS' in message.content %}{{ twice(99) }}
    {%- elif 'DEEP' in message.content %}{{ deeper(0) }}
    {%- elif 'DOUBLES' in message.content %}{% for a in range(99) %}{% set ns.text = ns.text + ns.text %}{% endfor %}
    {%- elif 'PADS' in message.content %}{{ ns.text.ljust(10 ** 12) }}
    {%- endif %}
    {{- message.content }}
{%- endfor %}"""
IN_TEMPLATE = {
    "LOOPS": "more than 0.5 s of CPU",
    "CALLS": "more than 0.5 s of CPU",
    "DEEP": "cannot render",
    "DOUBLES": "more than 64 Mi characters",
    "PADS": "more than 64 Mi characters",
}


def chat(server, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 30}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def ask(server, goods: list[str], bads: list[str], rng: random.Random) -> tuple[list[str], list[httpx.Response]]:
    """Return the outcomes of good and bad chats sent together, in any order."""
    texts = rng.sample(goods + bads, len(goods) + len(bads))
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        replies = dict(zip(texts, pool.map(lambda text: chat(server, text), texts), strict=True))
    return [text_of(replies[text]) for text in goods], [replies[text] for text in bads]


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_a_template_that_never_ends_for_a_message_refuses_that_message(stub_model, rng):
    with start_server(EngineConfig(model=str(stub_model)), chat_template=TEMPLATE, prompt_timeout=0.5) as server:
        goods = [f"good {number} {rng.random()}" for number in range(6)]
        undisturbed = [text_of(chat(server, text)) for text in goods]
        bads = [f"{kind} {rng.random()}" for kind in IN_TEMPLATE]
        texts, refused = ask(server, goods, bads, rng)
        assert texts == undisturbed
        for reply, sentence in zip(refused, IN_TEMPLATE.values(), strict=True):
            assert reply.status_code == 400
            assert sentence in reply.json()["error"]["message"]
        assert server.post("/tokenize", {"messages": [{"role": "user", "content": "CALLS"}]}).status_code == 400
        assert "is started again" not in server.output()
        assert "of CPU for these messages (--prompt-timeout)" in server.output(), "the operator learns of it, too"


def test_many_requests_that_kill_text_workers_end_alone_and_the_server_goes_on(stub_model, rng):
    """With the restarts that a server has by default, and no pause between."""
    with start_server(EngineConfig(model=str(stub_model)), worker_module=WORKER) as server:
        goods = [f"good {number} {rng.random()}" for number in range(25)]
        undisturbed = [text_of(chat(server, text)) for text in goods]
        bads = [f"{rng.choice([KILLED, CRASHES])} {number}" for number in range(5)]
        bads[0] += " " * 5000  # prepared in a thread
        texts, refused = ask(server, goods, bads, rng)
        assert texts == undisturbed
        for reply in refused:
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, CONVICTED)
        lines = [line for line in server.output().splitlines() if "is started again" in line]
        assert sum("is not tried again" in line for line in lines) == len(bads)
        assert len(lines) <= 2 * len(bads), "\n".join(lines)
        tokens = {"prompt": f"{KILLED} once more"}
        reply = server.post("/tokenize", tokens)
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, CONVICTED)
        server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=patience()).status_code == 200)
        server.wait_until_unused()


def test_requests_that_hang_text_workers_end_alone_and_the_log_says_who_killed_them_and_why(stub_model, rng):
    own = {"engine_timeout": 3.0, "max_restarts": 100, "worker_module": WORKER}
    with start_server(EngineConfig(model=str(stub_model)), **own) as server:
        goods = [f"good {number} {rng.random()}" for number in range(6)]
        undisturbed = [text_of(chat(server, text)) for text in goods]
        texts, refused = ask(server, goods, [HOLDS_THE_LOCK, SLEEPS], rng)
        assert texts == undisturbed
        for reply in refused:
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, CONVICTED)
        deaths = [line for line in server.output().splitlines() if "was killed by the watchdog after" in line]
        assert sum("s without an answer while it tokenized request" in line for line in deaths) >= 4
        assert "memory has run out" not in server.output()
        server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=patience()).status_code == 200)
        server.wait_until_unused()
