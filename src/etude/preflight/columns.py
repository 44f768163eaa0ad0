"""The inputs of examples that workflows and evaluators read, as far as their source says."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from etude.config.builder import Builder
from etude.config.nearest import nearest
from etude.core.episode import Example
from etude.core.errors import EtudeError
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
    """The inputs that a function reads of its first argument, an example, itself or in functions of its
    module that it hands the example or its inputs. Nothing where there is no source, or it is Etude's own."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    is_object = not inspect.isroutine(fn)
    called = type(fn).__call__ if is_object else fn
    position = int(is_object or inspect.ismethod(called))
    plain = inspect.unwrap(getattr(called, "__func__", called))
    if not isinstance(plain, FunctionType):
        return []
    reader = _Reader(plain.__module__)
    reader.enter(plain, [position], [])
    return [read for read in reader.reads if read.name not in reader.tried]


class _Reader(ast.NodeVisitor):
    """Goes through a function, and through others of its module that an example is handed to."""

    def __init__(self, module: str) -> None:
        self.reads: list[Read] = []
        self.tried: set[str] = set()
        """Names that the code asks for whether they are there, or sets itself."""
        self._module = module
        self._entered: set[FunctionType] = set()
        self._fn: FunctionType | None = None
        self._first = 0
        self._examples: set[str] = set()
        self._inputs: set[str] = set()
        self._is_certain = True

    def enter(self, fn: FunctionType, examples: Collection[int], inputs: Collection[int]) -> None:
        """Go through a function whose parameters at these positions are an example, and inputs of one."""
        if fn in self._entered or fn.__module__ != self._module or self._module.startswith("etude."):
            return
        self._entered.add(fn)
        try:
            lines, first = inspect.getsourcelines(fn)
            body = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, SyntaxError):
            return
        if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        parameters = [each.arg for each in (*body.args.posonlyargs, *body.args.args)]
        outside = self._fn, self._first, self._examples, self._inputs, self._is_certain
        self._fn, self._first = fn, first
        self._examples = {name for place, name in enumerate(parameters) if place in examples}
        self._inputs = {name for place, name in enumerate(parameters) if place in inputs}
        for statement in body.body:
            self.visit(statement)
        self._fn, self._first, self._examples, self._inputs, self._is_certain = outside

    def visit(self, node: ast.AST) -> None:
        """Know what is not sure to happen."""
        outside = self._is_certain
        self._is_certain = outside and not isinstance(node, _BRANCHES) and not _is_suppressing(node)
        super().visit(node)
        # What may have returned leaves it open whether the rest happens.
        is_open = isinstance(node, ast.If) and any(isinstance(each, ast.Return) for each in ast.walk(node))
        self._is_certain = outside and not is_open

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Know other names for the example and its inputs: `inputs = example.inputs`."""
        self.generic_visit(node)
        if node.value is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        are_inputs, is_example = self._are_inputs(node.value), self._is_example(node.value)
        self._inputs = self._inputs | names if are_inputs else self._inputs - names
        self._examples = self._examples | names if is_example else self._examples - names

    visit_AnnAssign = visit_Assign

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """`example.inputs["question"]`."""
        if self._are_inputs(node.value):
            if isinstance(node.ctx, ast.Load):
                self._add(node.slice, is_certain=self._is_certain)
            elif isinstance(node.slice, ast.Constant):
                self.tried.add(str(node.slice.value))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`"hint" in example.inputs`."""
        is_asked = any(isinstance(each, ast.In | ast.NotIn) for each in node.ops)
        if is_asked and any(map(self._are_inputs, node.comparators)) and isinstance(node.left, ast.Constant):
            self.tried.add(str(node.left.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`example.inputs.get("question")`, and functions that are handed the example."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            if self._are_inputs(node.func.value):
                self._add(node.args[0], is_certain=False)
        elif isinstance(node.func, ast.Name) and self._fn is not None:
            named: Any = self._fn.__globals__.get(node.func.id)
            called = inspect.unwrap(named)
            examples = [place for place, each in enumerate(node.args) if self._is_example(each)]
            inputs = [place for place, each in enumerate(node.args) if self._are_inputs(each)]
            if isinstance(called, FunctionType) and (examples or inputs):
                self.enter(called, examples, inputs)
        self.generic_visit(node)

    def _add(self, name: ast.expr, *, is_certain: bool) -> None:
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and self._fn is not None:
            where = f"{self._fn.__code__.co_filename}:{self._first + name.lineno - 1}"
            self.reads.append(Read(name.value, where, is_certain))

    def _is_example(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._examples

    def _are_inputs(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "inputs" and self._is_example(node.value)
        return isinstance(node, ast.Name) and node.id in self._inputs


def _is_suppressing(node: ast.AST) -> bool:
    """Whether it is `with suppress(…)`."""
    return isinstance(node, ast.With) and any(
        "suppress" in ast.unparse(each.context_expr) for each in node.items
    )
