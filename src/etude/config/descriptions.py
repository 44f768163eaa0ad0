"""The meanings of a config's keys: the docstrings below them, read from the source when somebody asks."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel


@cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The description of each field that has one: that of its `Field(...)`, or else its docstring.

    pydantic reads docstrings too (`use_attribute_docstrings`), for each class as it is made: a third of the
    CPU time in which all configs are imported, in every command. Where there is no source there are none.
    """
    classes = [cls for cls in reversed(model.__mro__) if issubclass(cls, BaseModel) and cls is not BaseModel]
    found = {name: text for cls in classes for name, text in _docstrings(cls).items()}
    given = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {name: text for name, text in (found | given).items() if name in model.model_fields}


@cache
def _docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields that a class itself declares."""
    try:
        [tree] = ast.parse(dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # TypeError: of a class whose module is not loaded.
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(below.value.value, str)
    }
