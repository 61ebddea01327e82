"""JSON whose escapes name halves of characters, compared with Python's own decoder, which keeps halves."""

import json
import random

import msgspec
import pytest

from tokenmill.core.json_text import decode_json, whole_characters

# Escapes of halves, alone and in pairs, and what looks like them: text behind an escaped backslash, other escapes.
PIECES = ["\\ud83d", "\\uDE00", "\\udbff\\udfff", "\\ude00\\ud83d", "\\\\", "\\\\ud83d", "\\u4e2d", "\\n", '\\"',
          "ud83d", "a", "水", "😀", " "]  # fmt: skip
NUM_TEXTS = 2000


def test_halves_are_replaced_and_pairs_joined_in_any_text():
    for _ in range(NUM_TEXTS):
        text = '"' + "".join(random.choices(PIECES, k=random.randrange(12))) + '"'
        assert decode_json(text) == decode_json(text.encode()) == whole_characters(json.loads(text)), text


def test_what_is_no_json_stays_so_however_many_halves_it_names():
    for _ in range(NUM_TEXTS // 10):
        text = '{"a": "' + "".join(random.choices(PIECES, k=random.randrange(200))) + '", "b": +1}'
        with pytest.raises(msgspec.DecodeError):
            decode_json(bytearray(text.encode()))
