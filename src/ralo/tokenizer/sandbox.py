"""Jinja for templates that nobody has read: no way out of the sandbox, and a bound on work, time and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import wraps
from string import Formatter
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 27  # bytes of text and lists made, template text passed and loop bodies entered, over one rendering
SECONDS = 5.0
LONGEST_ITERATOR = 100_000  # the sandbox's own limit on range()

# Filters, then text methods, whose result can be far longer than what goes in.
GROWING = frozenset(("batch", "indent", "slice", "tojson", "wordwrap")) | frozenset(
    ("center", "expandtabs", "join", "ljust", "replace", "rjust", "zfill")
)


class Generation(Extension):
    """{% generation %} marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Meter(NodeTransformer):
    """Makes every loop and macro body pay on entry, and every `~` on what it makes."""

    def visit_For(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        texts = [data.data for data in node.find_all(nodes.TemplateData)]
        texts += [const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)]
        pay = metered("spend", [nodes.Const(1 + sum(map(len, texts)))])
        node.body.insert(0, nodes.ExprStmt(pay).set_lineno(node.lineno))
        return cast(nodes.Node, node)

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return metered("join_texts", node.nodes).set_lineno(node.lineno)


def metered(method: str, args: list[nodes.Expr]) -> nodes.Call:
    """A call of the sandbox's own method, by a path that no template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


class Names(Namespace):
    """namespace() without names that Python itself gives a meaning to."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        refuse_underscores(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_underscores({name: value})
        Namespace.__setitem__(self, name, value)


def refuse_underscores(names: dict[str, Any]) -> None:
    if any(str(name).startswith("_") for name in names):
        raise SecurityError("a namespace holds no names that start with an underscore")


class Sandbox(ImmutableSandboxedEnvironment):
    """Good for one rendering: what it does is counted against one budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self.left = WORK
        self.deadline = time.monotonic() + SECONDS
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            finalize=self.count_output,
        )
        self.filters = {name: self.bounded(name, function) for name, function in self.filters.items()}
        self.filters["format"] = percent_format
        del self.globals["lipsum"]
        self.globals["namespace"] = Names
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def metered_code(self, source: str) -> Any:
        """The template compiled, with its loops, macros and concatenations counted."""
        return self.compile(Meter().visit(self.parse(source)))

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("the template does too much work")

    def count_output(self, value: Any) -> Any:
        self.spend(size(value))
        return value

    def join_texts(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.spend(sum(map(len, texts)))
        return "".join(texts)

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps Jinja's marks on the function
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(name, [*args, *kwargs.values()])
            result = function(*args, **kwargs)
            self.spend(size(result))
            return result

        return call

    def check(self, name: str, operands: list[Any]) -> None:
        """Refuses, before it is made, a result that may be too long."""
        if name in GROWING:
            *_, second, first = sorted([1, size(operands[0]), *map(extent, operands[1:])])
            if first * second > self.left:
                raise SecurityError(f"the template asks too much of {name}")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            __self.check(__obj.__name__, [owner, *args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        __self.spend(size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            refuse_wide(percent_specs(left))
        elif operator == "+":
            self.spend(size(left) + size(right))
        elif operator == "*" and (size(left) or size(right)):
            self.spend(size(left) * extent(right) + size(right) * extent(left))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise SecurityError("the template computes with huge numbers")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            refuse_wide(brace_specs(value.__self__))
        return wrapped

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"the template may not read {attribute!r} of a {type(obj).__name__}")


def size(value: Any) -> int:
    """About the bytes of a text or a collection, which is what it costs to make."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple | dict) else 0


def extent(value: Any) -> int:
    """How many times longer a value can make a result: a number by its worth, the rest by their length."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str | list | tuple | dict):
        return len(value)
    return LONGEST_ITERATOR if hasattr(value, "__iter__") else 1


def percent_format(pattern: Any, *args: Any, **kwargs: Any) -> str:
    refuse_wide(percent_specs(str(pattern)))
    return str(pattern) % (kwargs or args)


def percent_specs(pattern: str) -> list[str]:
    return re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", pattern)


def brace_specs(pattern: str) -> list[str]:
    return [spec or "" for _, _, spec, _ in Formatter().parse(pattern)]


def refuse_wide(specs: Iterable[str]) -> None:
    """A width of five digits or more makes megabytes of padding; one that is itself a field can hide such a width."""
    if any(re.search(r"\d{5}|[*{]", spec) for spec in specs):
        raise SecurityError("the template formats with a huge width")
