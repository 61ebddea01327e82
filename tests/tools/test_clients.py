"""The trials of clients: each has its program, and the table tells what works and what does not."""

import ast

import pytest
from tools.clients import BEGIN, CLIENTS, END, TRIALS, Trial, table, with_table

from tests.house.source_tree import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()


def test_every_program_belongs_to_a_client():
    assert {path.name for path in TRIALS.glob("with_*")} == {client.program for client in CLIENTS}


@pytest.mark.parametrize("path", sorted(TRIALS.glob("*.py")), ids=lambda path: path.name)
def test_programs_parse(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_page_has_a_row_for_every_client():
    shown = PAGE.partition(BEGIN)[2].partition(END)[0]
    for client in CLIENTS:
        assert f"| {client.name} | " in shown


def test_the_table_tells_what_works_and_why_the_rest_does_not():
    trials = [
        Trial(CLIENTS[0], "1.0", {"chat": "", "tools": "BadRequestError: `x` is unknown"}),
        Trial(CLIENTS[1], "2.0", {"chat": ""}),
    ]
    text = table(trials, "2026-11-22")
    assert f"| {CLIENTS[0].name} | 1.0 | chat | tools |" in text
    assert f"| {CLIENTS[1].name} | 2.0 | chat | - |" in text
    assert f"- {CLIENTS[0].name}, tools: `BadRequestError: 'x' is unknown`" in text
    page = with_table(f"head\n{BEGIN}\nold\n{END}\ntail\n", text)
    assert page == f"head\n{BEGIN}\n{text}{END}\ntail\n"
