import random

import pytest

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.parse import parse_size, settings
from tokenmill.core.errors import InvalidConfig

BY_NAME = {setting.name: setting for cls in (EngineConfig, ServerConfig) for setting in settings(cls)}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2048", 2048),
        ("32k", 32768),
        ("32K", 32768),
        ("4GiB", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("1.5k", 1536),
        ("2 MiB", 2 * 2**20),
        ("1t", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


def test_every_whole_size_is_read_back():
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(200):
        power, number = draw.randrange(5), draw.randrange(10**6)
        text = f"{number}{['', 'k', 'M', 'G', 'T'][power]}"
        assert parse_size(text) == number * 1024**power, f"seed {seed}: {text}"


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1.5", "1e3", "4 G i B", "four", "0.3k", "1kk", "nan", "1b1", "9" * 400, "²k", "٣"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidConfig):
        parse_size(text)


def test_auto_leaves_the_decision_open_for_numbers_and_switches_but_not_for_texts():
    assert BY_NAME["max_model_len"].read("auto") is None
    assert BY_NAME["async_scheduling"].read("Auto") is None
    assert BY_NAME["dtype"].read("auto") == "auto"
    assert BY_NAME["root_path"].read("auto") == "auto"
    with pytest.raises(InvalidConfig, match="'auto' is not an integer"):
        BY_NAME["port"].read("auto")


def test_a_wrong_choice_is_answered_with_the_nearest():
    with pytest.raises(InvalidConfig, match="did you mean float32"):
        BY_NAME["dtype"].read("float31")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("Off", False), ("false", False)])
def test_switches(text, value):
    assert BY_NAME["enable_prefix_caching"].read(text) is value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", 8001, 8001),
        ("max_model_len", "32k", 32768),
        ("max_model_len", 4096, 4096),
        ("max_model_len", None, None),
        ("enable_prefix_caching", False, False),
        ("gpu_memory_utilization", 0.5, 0.5),
        ("gpu_memory_utilization", 1, 1.0),
        ("api_key", ["a", "b,c"], ("a", "b,c")),
        ("root_path", 7, "7"),
        ("served_model_name", 7, ("7",)),
        ("limit_mm_per_prompt", {"image": 4}, '{"image": 4}'),
    ],
)
def test_typed_values_of_a_file(name, value, expected):
    assert BY_NAME[name].convert_value(value) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", True), ("port", [1]), ("port", None), ("port", 1.5), ("dtype", "int3"), ("host", {"a": 1})],
)
def test_values_of_a_wrong_type_are_refused(name, value):
    with pytest.raises(InvalidConfig):
        BY_NAME[name].convert_value(value)
