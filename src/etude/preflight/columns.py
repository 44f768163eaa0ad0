"""The inputs of examples that workflows and evaluators read, as far as their source says."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from etude.config.builder import Builder
from etude.config.nearest import nearest
from etude.core.errors import EtudeError
from etude.core.example import Example
from etude.preflight.finding import Findings

_BRANCHES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.Try, ast.For, ast.AsyncFor, ast.While),
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.comprehension),
)
"""In these it is not sure that something is read, or that its error is not caught."""


@dataclass(frozen=True, slots=True)
class Read:
    """An input that is read by its name."""

    name: str
    where: str
    """`file:line`."""
    is_certain: bool
    """Whether every call reads it, and raises where an example does not have it."""


async def check_inputs(
    builder: Builder, agent: Any, datasets: Mapping[str, Sequence[Example]], findings: Findings
) -> None:
    """Whether the examples of each dataset have the inputs that the agent and the evaluators read."""
    functions = {"workflow": agent}
    for name in builder.config.eval.evaluators:
        with suppress(EtudeError):  # Which is a finding already.
            functions[f"evaluator {name}"] = getattr(await builder.get_evaluator(name), "fn", None)
    for what, fn in functions.items():
        for kind, examples in datasets.items():
            if callable(fn) and examples:
                place = what if kind == "examples" else f"{what} on {kind}"
                _check_reads(place, inputs_read(fn), examples, findings)


def _check_reads(what: str, reads: Sequence[Read], examples: Sequence[Example], findings: Findings) -> None:
    names, count = sorted({name for example in examples for name in example.inputs}), len(examples)
    # Of several reads of an input, one that is certain counts.
    for read in {read.name: read for read in sorted(reads, key=lambda read: read.is_certain)}.values():
        lacking = sum(read.name not in example.inputs for example in examples)
        if not lacking:
            continue
        text = f"{read.where} reads example.inputs[{read.name!r}], which {lacking} of {count} examples lack"
        if lacking < count:
            if read.is_certain:
                findings.warn(what, text)
            continue
        meant = nearest(read.name, names)
        hint = f"; did you mean {meant!r}?" if meant else ""
        have_answers = any(example.expected is not None for example in examples)
        answer = ". Their answer is `example.expected`" if have_answers else ""
        text += f". Their inputs: {', '.join(names) or 'none'}{hint}{answer}"
        (findings.fail if read.is_certain else findings.warn)(what, text)


def inputs_read(fn: Callable[..., Any]) -> list[Read]:
    """The inputs that a function reads of its first argument, an example, as `example.inputs["name"]`.

    Not those that it asks for with `in`, or sets itself; nothing where there is no source, or it is ours.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    is_object = not inspect.isroutine(fn)
    called = type(fn).__call__ if is_object else fn
    position = int(is_object or inspect.ismethod(called))
    plain = inspect.unwrap(getattr(called, "__func__", called))
    if not isinstance(plain, FunctionType) or plain.__module__.startswith("etude."):
        return []
    try:
        lines, first = inspect.getsourcelines(plain)
        [function] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, SyntaxError):
        return []
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    parameters = [*function.args.posonlyargs, *function.args.args]
    if len(parameters) <= position:
        return []
    inputs, reads, tried = f"{parameters[position].arg}.inputs", list[Read](), set[str]()
    for node, is_certain in _all_in(function):
        if isinstance(node, ast.Compare) and inputs in map(ast.unparse, node.comparators):
            tried.add(str(getattr(node.left, "value", "")))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == inputs:
            name = getattr(node.slice, "value", None)
            if not isinstance(node.ctx, ast.Load):
                tried.add(str(name))
            elif isinstance(name, str):
                where = f"{plain.__code__.co_filename}:{first + node.lineno - 1}"
                reads.append(Read(name, where, is_certain))
    return [read for read in reads if read.name not in tried]


def _all_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.AST, bool]]:
    """Each part of a function's body, and whether every call comes to it."""

    def inside(node: ast.AST, is_certain: bool) -> Iterator[tuple[ast.AST, bool]]:
        is_suppressing = isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0])
        is_certain = is_certain and not isinstance(node, _BRANCHES) and not is_suppressing
        yield node, is_certain
        for child in ast.iter_child_nodes(node):
            yield from inside(child, is_certain)

    is_certain = True
    for statement in function.body:
        yield from inside(statement, is_certain)
        # What may have returned leaves it open whether the rest happens.
        may_return = isinstance(statement, ast.If) and any(
            isinstance(each, ast.Return) for each in ast.walk(statement)
        )
        is_certain = is_certain and not may_return
