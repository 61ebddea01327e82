"""Draws requests for any route from its description: right ones, and right ones in which something is odd."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

JSON = "application/json"
MIB = 1 << 20

MESSAGE = {"role": "user", "content": "hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
# A beginning for each route whose description leaves open what is in its lists.
RIGHT: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [MESSAGE], "max_tokens": 2, "stream": True},
        {"messages": [PARTS, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL], "max_tokens": 2},
        {"messages": [MESSAGE], "max_tokens": 2, "chat_template_kwargs": {"x": [1]}, "stop": ["a"]},
    ],
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1, "logit_bias": {"1": 2}},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "stop_token_ids": [1], "bad_words": ["x"]},
    ],
    "/v1/responses": [
        {"input": [MESSAGE], "max_output_tokens": 2, "metadata": {"a": "b"}},
        {"input": "hello", "max_output_tokens": 2, "background": True, "tools": [{"type": "function", "name": "f"}]},
        {
            "input": [{"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x", "namespace": "n"}],
            "max_output_tokens": 2, "include": ["x"], "top_logprobs": 0, "tool_choice": {"type": "custom", "name": "p"},
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
                {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
            ],
        },
    ],
    "/v1/messages": [
        {"model": "m", "max_tokens": 2, "messages": [PARTS], "system": "be brief", "stop_sequences": ["x"]},
        {
            "model": "m", "max_tokens": 2, "tools": [{"name": "f", "input_schema": {}}],
            "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}],
        },
    ],
    "/v1/messages/count_tokens": [{"model": "m", "messages": [MESSAGE]}],
    "/v1/responses/input_tokens": [{"input": [{"type": "message", **MESSAGE}], "truncation": "auto"}],
    "/v1/embeddings": [{"input": ["hello", "you"]}, {"input": [[1, 2]], "encoding_format": "base64"}],
    "/rerank": [{"query": "hello", "documents": ["a", {"text": "b"}]}, {"query": "hello", "texts": ["a"], "top_n": 1}],
    "/score": [{"text_1": "hello", "text_2": ["a", "b"]}, {"queries": ["a", "b"], "items": ["a", "b"]}],
    "/classify": [{"input": ["hello", "you"]}, {"input": [[1, 2]]}],
    "/pooling": [{"input": "hello", "task": "embed"}],
    "/embed": [{"inputs": ["hello", "you"], "truncate": True, "truncation_direction": "Left"}],
    "/predict": [{"inputs": [["hello"], ["you"]]}, {"inputs": ["a", "b"], "raw_scores": True}],
    "/generate": [{"text": "hello", "sampling_params": {"max_new_tokens": 2}}, {"input_ids": [[1, 2], [3]]}],
    "/infill": [{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "x"}]}],
    "/tokenize": [{"messages": [MESSAGE]}, {"prompt": "hello"}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/abort_requests": [{"request_ids": ["x"]}],
    "/v1/sessions": [{"kind": "text", "idle_timeout": 5}, {}],
    "/v1/batches": [{"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}],
}  # fmt: skip


class Literal(str):
    """Stands in a body as it is."""

    __slots__ = ()


ODD = [
    None, True, False, 0, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 1e308, -0.0, "", "\0", "\ud800", "😀" * 3,
    "x" * 300, "{}", [], {}, [[]], [None], {"": None}, "NaN", "../../etc/passwd", "http://127.0.0.1/x", "data:,",
    *map(Literal, ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "1." + "0" * 999, "01", "+1", "'x'", "/**/1")),
    *map(Literal, ('"\\ud800"', '"\\udfff\\ud800"', "[" * 70 + "]" * 70)),
    *map(Literal, ('{"a":' * 2000 + "1" + "}" * 2000, "[" * 100_000)),
]  # fmt: skip
SIMPLE = {
    "integer": [0, 1, 2, 7], "number": [0.0, 0.5, 1.0], "string": ["x", "hello there", ""], "boolean": [True, False],
    "null": [None],
}  # fmt: skip
# What huge lists and texts are made of.
ELEMENTS = ["[]", "{}", "0", "123456", "1.2345678901234567", '"x"', '"\\n"', "null", '{"a":0}', "[[]]",
            '{"type":"text","text":"x"}', '{"role":"user","content":"x"}', '{"type":"image"}', '["x"]', "[1,2]",
            '{"type":"function","function":{"name":"f","arguments":"{}"}}',
            '{"role":"assistant","tool_calls":[]}']  # fmt: skip
UNITS = ["a", "the mill ", "水", "a水", "😀", "\\n", "a\\n", "\\u4e2d", "\\\\", "1,2,[{", '\\"', "\\ud800"]
NAMES = ["0", "1", "x", "%C2%B2", "%D9%A1", "9" * 5000, "-1", "%00", "%0A", "..%2f..", "%F0%9F%98%80", "%FF",
         "a" * 3000, "*"]  # fmt: skip
TYPES = [JSON, "application/json; charset=utf-16", "text/plain", "multipart/form-data", "multipart/form-data; boundary",
         "", "application/x-www-form-urlencoded", "application/json, text/html"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OddRequest:
    """One request, and words for what it is."""

    method: str
    path: str
    what: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def dumped(value: Any) -> bytes:
    """JSON, with literals as they are; a lone surrogate is escaped."""
    if isinstance(value, Literal):
        return value.encode()
    if isinstance(value, dict):
        return b"{" + b",".join(dumped(str(name)) + b":" + dumped(inner) for name, inner in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dumped, value)) + b"]"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return b'"' + "".join(f"\\u{ord(one):04x}" for one in value).encode() + b'"'


class OddRequests:
    """Draws them; the same seed and description give the same ones."""

    def __init__(self, document: dict[str, Any], rng: random.Random, max_bytes: int, left_out: frozenset[str]) -> None:
        """
        Args:
            document: of OpenAPI.
            max_bytes: of a huge body.
            left_out: paths that are not asked.
        """
        self._schemas = document["components"]["schemas"]
        self._rng = rng
        self._max_bytes = max_bytes
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if path not in left_out
        ]
        # Bodies are what most can go wrong with.
        self._weights = [8 if "requestBody" in operation else 1 for _, _, operation in self._operations]

    def draw(self) -> OddRequest:
        """The next."""
        rng = self._rng
        method, path, operation = rng.choices(self._operations, self._weights)[0]
        url = "".join(rng.choice(NAMES) if part.startswith("{") else part for part in _split(path)) + self._query(
            operation
        )
        content = operation.get("requestBody", {}).get("content", {})
        kind = next(iter(content), "")
        if kind != JSON:
            return OddRequest(method, url, f"{method} {path}", *self._upload(kind))
        value = self._value(content[kind]["schema"], 0)
        if path in RIGHT and rng.random() < 0.7:
            value = msgspec.json.decode(msgspec.json.encode(rng.choice(RIGHT[path])))
        what = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            value, change = self._changed(value)
            what.append(change)
        raw, change = self._damaged(dumped(value)[: self._max_bytes])
        headers = {"Content-Type": JSON if rng.random() < 0.95 else rng.choice(TYPES)}
        return OddRequest(method, url, f"{method} {path}: {', '.join([*what, change])}", raw, headers)

    def _query(self, operation: dict[str, Any]) -> str:
        names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
        given = [(name, self._rng.choice(["1", "true", "nan", "-1", "9" * 400, "%00", "x"])) for name in names]
        drawn = [f"{name}={value}" for name, value in given if self._rng.random() < 0.3]
        return "?" + "&".join(drawn) if drawn else ""

    def _upload(self, kind: str) -> tuple[bytes, dict[str, str]]:
        if not kind:
            return b"", {}
        rng = self._rng
        names = ["file", "purpose", "expires_after", "expires_after[seconds]", "expires_after[anchor]", "x[", "]"]
        parts = [
            f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name in rng.sample(names, rng.randrange(1, 5))
            for value in rng.sample(["batch", "3600", "{}", "nan"], 1)
        ]
        return "".join([*parts, rng.choice(["--x--\r\n", "--x", ""])]).encode(), {"Content-Type": f"{kind}; boundary=x"}

    def _value(self, schema: dict[str, Any] | bool, depth: int) -> Any:
        """Draw a value that a schema describes."""
        rng = self._rng
        if isinstance(schema, bool):  # any value, or none
            schema = {"type": "string"}
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rsplit("/", 1)[1]], depth)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(rng.choice(options), depth)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object":
            required, fields = schema.get("required", ()), schema.get("properties", {})
            drawn = [name for name in fields if name in required or rng.random() < 2 / (2 + len(fields))]
            return {name: self._value(fields[name], depth + 1) for name in drawn}
        if kind == "array":
            count = rng.randrange(3) if depth < 4 else 0
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(count)]
        return copy.deepcopy(rng.choice(SIMPLE.get(kind, [None, 1, "x", [], {}])))

    def _changed(self, value: Any) -> tuple[Any, str]:
        """A value with something odd at a place within it."""
        rng = self._rng
        places = list(_places(value))
        if not places:
            return copy.deepcopy(rng.choice(ODD)), "another value"
        holder, name = rng.choice(places)
        kind = rng.randrange(40)
        if kind < 2:
            holder[name], what = self._huge()
        elif kind < 6 and isinstance(holder, dict):
            del holder[name]
            what = f"no {name}"
        elif kind < 10 and isinstance(holder, dict):
            holder[rng.choice(["unknown", "", "\ud800", "x" * 300, "__class__"])] = copy.deepcopy(rng.choice(ODD))
            what = "another field"
        elif kind < 14:
            holder[name] = [holder[name]] * rng.choice((1, 2, 5, 300))
            what = f"{name} as a list"
        elif kind < 18:
            holder[name] = {"type": holder[name], "value": holder[name]}
            what = f"{name} as an object"
        else:
            odd = copy.deepcopy(rng.choice(ODD))
            holder[name] = odd
            what = f"{name}={str(odd)[:20]!r}"
        return value, what

    def _huge(self) -> tuple[Literal, str]:
        rng = self._rng
        size = int(rng.choice((0.02, 0.1, 0.5, 0.99)) * self._max_bytes)
        if rng.random() < 0.4:
            unit = rng.choice(UNITS)
            return Literal('"' + unit * (size // len(unit.encode())) + '"'), f"{size} bytes of {unit!r}"
        if rng.random() < 0.2:
            return Literal("{" + ",".join(f'"{i}":0' for i in range(size // 10)) + "}"), f"{size // 10} keys"
        one = rng.choice(ELEMENTS)
        count = size // (len(one) + 1)
        return Literal("[" + ",".join([one] * count) + "]"), f"{count} times {one}"

    def _damaged(self, raw: bytes) -> tuple[bytes, str]:
        rng = self._rng
        place = rng.randrange(len(raw))
        damages = {
            "cut off": lambda: raw[:place],
            "a byte changed": lambda: raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :],
            "twice": lambda: raw + raw[:MIB],
            "with a mark of byte order": lambda: b"\xef\xbb\xbf" + raw,
            "fields twice": lambda: b"{" + raw[1:-1][:MIB] + b"," + raw[1:],
            "in UTF-16": lambda: raw[:MIB].decode("utf-8", "replace").encode("utf-16"),
        }
        if rng.random() < 0.8:
            return raw, "whole"
        what = rng.choice(list(damages))
        return damages[what](), what


def _split(path: str) -> list[str]:
    return path.replace("{", "\0{").replace("}", "}\0").split("\0")


def _places(value: Any) -> Any:
    """Return the places in a value where something can be put: the holder, and the key or the index there."""
    if isinstance(value, dict | list):
        for name in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, name
            yield from _places(value[name])
