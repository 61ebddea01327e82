"""The sandbox of chat templates: Jinja's sandbox, which isolates them from the server, with a `TemplateBudget`.

Jinja compiles a template to Python. The sandbox counts turns of loops and calls, since only these can run for long,
and measures assigned, returned and collected values, since only these can grow. Plain `+` and `~` are unchanged: their
results are measured when they are used again.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.serving.frontend.template_budget import LARGEST_NUMBER_BITS, TemplateBudget
from tokenmill.serving.frontend.template_growth import FILTERS, METHODS, Growth, formatted, joined

_KEEP = "keep in budget"


class _BudgetContext(Context):
    """The variables of one rendering, with its budget."""

    budget: TemplateBudget

    def derived(self, locals: dict[str, Any] | None = None) -> _BudgetContext:
        """Return the context of a block, which shares the budget."""
        context = super().derived(locals)
        assert isinstance(context, _BudgetContext), "the environment makes no others"
        context.budget = self.budget
        return context


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates written for Hugging Face's renderer. Threads may share it."""

    context_class = _BudgetContext
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters |= {name: _guarded(self.filters[name], growth) for name, growth in FILTERS.items()}
        self.filters["join"] = _guarded_join(self.filters["join"])
        self.filters[_KEEP] = _keep
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], budget: TemplateBudget) -> str:
        """Render a template of this sandbox to text.

        Raises:
            PromptTooCostly, TakesLong: see `TemplateBudget`.
            Exception: any other error of the template.
        """
        context = template.new_context(dict(variables))
        assert isinstance(context, _BudgetContext), "the template is of this sandbox"
        context.budget = budget
        pieces: list[str] = []
        num_characters = 0
        for piece in template.root_render_func(context):
            num_characters += len(piece)
            budget.ask(num_characters)
            pieces.append(piece)
        return "".join(pieces)

    # --- what Jinja calls -------------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        outputs = {id(one): one for node in _collectors(tree) for one in node.find_all(nodes.Output)}
        for output in outputs.values():
            output.nodes = [one if isinstance(one, nodes.TemplateData) else _kept(one) for one in output.nodes]
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_tick(), lineno=loop.lineno))
            if loop.test is not None:  # whose turns may all be passed over
                loop.test = nodes.And(_tick(), loop.test)
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = _kept_if_made(assignment.node)
        for block in tree.find_all(nodes.With):
            block.values = [_kept_if_made(value) for value in block.values]
        tree.set_environment(self)
        return tree

    def tick(self, context: _BudgetContext) -> bool:
        """Count another turn of a loop."""
        context.budget.tick()
        return True

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template within its budget."""
        assert isinstance(context, _BudgetContext), "the environment makes no others"
        budget = context.budget
        budget.tick()
        for one in args:
            budget.keep(one)
        growth = METHODS.get(getattr(obj, "__name__", ""))
        if growth is not None:
            owner = getattr(obj, "__wrapped__", obj)  # where the sandbox has put something around `format`
            if isinstance(owner, BuiltinMethodType):
                if growth is joined:
                    args = (list(args[0]), *args[1:])
                budget.ask(growth(owner.__self__, (*args, *kwargs.values())))
        result = super().call(context, obj, *args, **kwargs)
        budget.keep(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation whose result may be large, within the budget."""
        assert isinstance(context, _BudgetContext), "the environment makes no others"
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_NUMBER_BITS:
                raise OverflowError("a number with too many digits for a template")
        elif operator == "*" and isinstance(left, int):
            context.budget.ask(left * _size(right))
        elif operator == "*" and isinstance(right, int):
            context.budget.ask(right * _size(left))
        elif operator == "%" and isinstance(left, str):
            context.budget.ask(formatted(left, right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Renders `{% generation %}` tags as their content; they mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tick() -> nodes.Expr:
    """Return a node that compiles to `environment.tick(context)`, four times as fast as a template's own call."""
    return nodes.EnvironmentAttribute("tick(context)")


def _collectors(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Yield the nodes that collect output without a call. The result of a macro is measured as a whole."""
    for kind in (nodes.AssignBlock, nodes.FilterBlock):
        yield from tree.find_all(kind)
    for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
        yield from macro.find_all(nodes.For)
    yield from (loop for loop in tree.find_all(nodes.For) if loop.recursive)


def _kept_if_made(value: nodes.Node) -> nodes.Expr:
    """Measure an expression's value if the expression builds one. Results of calls are measured anyway."""
    assert isinstance(value, nodes.Expr), "only expressions have values"
    makers = (nodes.BinExpr, nodes.Concat, nodes.Filter)
    makes = isinstance(value, makers) or any(value.find(kind) is not None for kind in makers)
    return _kept(value) if makes else value


def _kept(value: nodes.Node) -> nodes.Expr:
    return nodes.Filter(value, _KEEP, [], [], None, None, lineno=value.lineno)


@pass_context
def _keep(context: _BudgetContext, value: Any) -> Any:
    context.budget.keep(value)
    return value


def _guarded(function: Callable[..., Any], growth: Growth) -> Callable[..., Any]:
    """Return a filter that refuses results beyond the budget."""
    takes = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def guarded(context: _BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        context.budget.tick()
        context.budget.ask(growth(value, (*args, *kwargs.values())))
        result = (
            function(value, *args, **kwargs) if takes is None else function(context.eval_ctx, value, *args, **kwargs)
        )
        context.budget.keep(result)
        return result

    return guarded


def _guarded_join(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `join` within the budget; its items may come one by one from other filters."""

    @pass_context
    def join(context: _BudgetContext, value: Any, d: Any = "", attribute: Any = None) -> Any:
        items = list(value)
        context.budget.ask(joined(str(d), (items,)))
        text = function(context.eval_ctx, items, d, attribute)
        context.budget.keep(text)
        return text

    return join


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON: jinja2's own filter escapes HTML characters, which a model must see unchanged."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
