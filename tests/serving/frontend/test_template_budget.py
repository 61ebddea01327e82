"""No template takes more than its budget, whatever it does; and honest ones do not notice that there is one."""

# ruff: noqa: E501 - templates are easier to read in one line

import random
import threading
import time

import pytest

from tests.serving.frontend.test_chat_template import QWEN_LIKE
from tokenmill.core.errors import InvalidRequest, PromptTooCostly
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.template_budget import LARGEST_CHARACTERS, MOST_CHARACTERS, TakesLong, TemplateBudget

USER = [{"role": "user", "content": "hi"}]
HUGE = LARGEST_CHARACTERS * 3
# None of these ends, or not within a day. X, Y and Z are drawn.
ENDLESS = {
    "loops": "{% for a in range(X) %}{% for b in range(Y) %}{% for c in range(Z) %}{% endfor %}{% endfor %}{% endfor %}",
    "passed over": "{% for a in range(X) %}{% for b in range(Y) if b < 0 %}{% endfor %}{% endfor %}",
    "extended": "{% for a in range(X) %}{% for b in range(Y) %}{{ loop.index and '' }}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "callers": "{% macro m(n) %}{% if n %}{{ caller() }}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}{% endcall %}"
    "{% endif %}{% endmacro %}{% call m(99) %}{% endcall %}",
    "recursive": "{% for a in [99] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}{% endfor %}",
    "methods": "{% for a in range(X) %}{% set _ = 'x y'.split() %}{% for b in range(Y) %}{% endfor %}{% endfor %}",
}
GROWING = {
    "plus": "{% set n = namespace(s='xy') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='xy') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "lists": "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "filters": "{% set n = namespace(s='\"') %}{% for a in range(99) %}{% set n.s = n.s | tojson %}{% endfor %}",
    "blocks": "{% set n = namespace(s='xy') %}{% for a in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "arguments": "{% macro m(s) %}{{ m(s + s) }}{% endmacro %}{{ m('xy') }}",
    "results": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}{{ 'x' * 1000000 }}{% endif %}{% endmacro %}"
    "{{ m(9) }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
    "put together": "{% set s = 'x' * 9999999 %}{% macro m() %}{% for a in range(99999) %}{{ s }}{% endfor %}{% endmacro %}"
    "{{ m() }}",
    "kept": "{% set n = namespace(s=[]) %}{% set s = 'x' * 9999999 %}{% for a in range(9999) %}"
    "{% set n.s = n.s + [s * 1] %}{% set t = s ~ a %}{% endfor %}",
}
AT_ONCE = [
    "'x' * N", "N * 'x'", "['x'] * N", "'x'.ljust(N)", "'x'.rjust(N)", "'x'.center(N)", "'1'.zfill(N)",
    "'\\t'.expandtabs(N)", "'x' | center(N)", "'x' | indent(N)", "'a\\nb' | indent(width=N)", "[1] | batch(N, 'x') | list",
    "[1] | slice(N) | list", "'{:>N}'.format(1)", "'{:{w}}'.format(1, w=N)", "'{a:>N}'.format_map({'a': 1})", "'%Nd' % 1",
    "'%*d' % (N, 1)", "'%Nd' | format(1)", "('x' * 9999).replace('x', 'y' * 99999)",
    "('x' * 9999) | replace('x', 'y' * 99999)", "','.join(['x' * 99999] * 9999)", "(['x' * 99999] * 9999) | join(',')",
    "(['x' * 99999] * 9999) | map('upper') | join", "('x' * 9999).translate({120: 'y' * 99999})", "[1] | tojson(indent=N)",
    "(1).to_bytes(N)",
]  # fmt: skip


def render(source: str, budget: TemplateBudget) -> str:
    return ChatTemplate(source).render(USER, budget=budget)


@pytest.fixture(scope="module")
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_does_not_end_is_stopped(kind, rng):
    source = ENDLESS[kind]
    for letter in "XYZ":
        source = source.replace(letter, str(rng.randrange(50_000, 100_000)))
    with pytest.raises(PromptTooCostly, match=r"more than 0.05 s of CPU .*--prompt-timeout"):
        render(source, TemplateBudget(0.05))
    with pytest.raises(TakesLong):
        render(source, TemplateBudget(0.05, is_hurried=True))


@pytest.mark.parametrize("kind", GROWING)
def test_what_grows_is_stopped(kind):
    with pytest.raises(PromptTooCostly, match="Mi characters"):
        render(GROWING[kind], TemplateBudget())


@pytest.mark.parametrize("expression", AT_ONCE)
def test_what_is_huge_at_once_is_not_begun(expression, rng):
    number = rng.randrange(HUGE, 1 << 62)
    source = expression.replace("N", str(HUGE if "{" in expression or "%" in expression else number))
    with pytest.raises(PromptTooCostly, match="64 Mi characters"):
        render("{{ (" + source + ") | length }}", TemplateBudget())


@pytest.mark.parametrize("source", ["{{ 9 ** N }}", "{{ (2 ** 60000) * (2 ** 60000) }}", "{{ m(0) }}"])
def test_numbers_and_recursion_have_an_end(source):
    macro = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}"
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(macro + source.replace("N", str(10**9)), TemplateBudget())


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_clock_is_that_of_the_thread():
    """The work of another thread meanwhile costs a rendering nothing."""
    budget = TemplateBudget(0.1)
    other = threading.Thread(target=work, args=(0.3,))
    other.start()
    other.join()
    budget.tick()
    work(0.11)
    with pytest.raises(PromptTooCostly):
        budget.tick()


def test_many_small_things_are_counted_together():
    budget = TemplateBudget()
    text = "x" * (LARGEST_CHARACTERS // 4)
    for _ in range(MOST_CHARACTERS // len(text)):
        budget.keep(text)
    with pytest.raises(PromptTooCostly):
        budget.keep("x")


def test_honest_templates_do_not_notice():
    """As Jinja's own sandbox renders them, in what the budget looks at: loops, calls, assignments, filters, blocks."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (
        "{% macro tag(name) %}<{{ name }}>{% for _ in [1] %}{{ caller() }}{% endfor %}</{{ name }}>{% endmacro %}"
        "{% for m in messages if m.role != 'x' %}{% call tag(m.role) %}{{ m.content | trim | upper }}{% endcall %}"
        "{% set parts = m.content.split('e') %}{{ parts | join('-') }}{{ '-'.join(parts | map('title')) }}"
        "{{ loop.index % 2 }}{{ loop.index * 3 }}{{ 2 ** loop.index }}{{ '%s-%05d' % (m.role, 7) }}{{ 'a' * 3 }}"
        "{% set t %}{{ m.content }}!{% endset %}{{ t | replace('l', 'LL') }}{{ t | indent(4, true) }}{{ t | center(30) }}"
        "{% with u = t + '?' %}{{ u.replace('h', 'j') ~ u | length }}{% endwith %}{{ '{:>8}'.format(m.role) }}"
        "{% for b in m.content | batch(3, '.') %}{{ b | join }}{% endfor %}{{ m.content | slice(2) | list }}"
        "{% filter upper %}f{{ m.content }}{% endfilter %}{{ '%s' | format(m.role) }}{% if loop.last %}{% break %}{% endif %}"
        "{% endfor %}{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [{"role": "user", "content": " hello there\nyou "}, {"role": "assistant", "content": "he <said> hel"}]
    expected = plain.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages, budget=TemplateBudget(60)) == expected
    assert ChatTemplate(QWEN_LIKE).render(messages, budget=TemplateBudget(60)).startswith("<user>")
