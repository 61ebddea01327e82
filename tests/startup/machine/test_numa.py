"""Choose the cores of engines, on machines that are made of files."""

import os

import pytest

from tokenmill.startup.machine.device import nodes_of, numa_nodes


def write(root, **lists: str) -> None:
    for name, cores in lists.items():
        folder = root / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")


@pytest.fixture
def all_allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)), raising=False)


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path, all_allowed):
    write(tmp_path, node10="20-21", node2="4,6-7", node0="0-1", node3="", node4="64-127")
    assert numa_nodes(tmp_path) == [{0, 1}, {4, 6, 7}, {20, 21}], "without memory of its own, or not ours: no node"


def test_a_machine_that_says_nothing_is_one_node(tmp_path, all_allowed):
    assert numa_nodes(tmp_path) == [set(range(24))]


@pytest.mark.parametrize(
    ("num_nodes", "count", "expected"),
    [
        (2, 2, [{0}, {1}]),
        (4, 2, [{0, 1}, {2, 3}]),
        (2, 4, [{0}, {0}, {1}, {1}]),
        (1, 2, [{0}, {0}]),
        (2, 3, [{0, 1}] * 3),
        (3, 2, [{0, 1, 2}] * 2),
    ],
)
def test_engines_keep_to_whole_nodes_where_that_comes_out_even(num_nodes, count, expected):
    nodes = [{node} for node in range(num_nodes)]
    assert [nodes_of(index, count, nodes) for index in range(count)] == expected
