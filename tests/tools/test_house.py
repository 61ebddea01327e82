"""The facts of the house are measured right; `make lint` sees that what was reached is kept."""

import importlib.util

import pytest

from tools import house


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ({"a": {"b"}, "b": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, {"a", "b", "c"}),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}, "e": set()}, {"a", "b", "c", "d"}),
    ],
)
def test_circles_are_found(arrows, found):
    assert house.circles(arrows) == found


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("core.request", "core"),
        ("engine.kv.radix_tree", "engine/kv"),
        ("engine.scheduler.resources.state_slots", "engine/scheduler"),
        ("engine", "engine"),
        ("ray", ""),
        ("", ""),
    ],
)
def test_a_module_stands_in_one_room(module, room):
    assert house.room_of(module) == room


def test_imports_of_type_checkers_and_functions_count():
    names = house.imports()
    assert "llm.llm" in names[""]
    assert ":torch" in names["engine.runner.staging"]
    assert "startup.assembly.setup" in names["startup.assembly.engine_process"]


def test_a_fact_is_lost_only_after_it_was_reached():
    assert house.Fact("x", 3, 2).is_lost
    assert not house.Fact("x", 2, 2).is_lost
    assert not house.Fact("x", 3, 2, is_reached=False).is_lost


def test_addresses_that_users_write_are_there():
    assert importlib.util.find_spec("tokenmill.ray") is not None
