"""Python functions as tools."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from etude.config.component import ToolsConfig
from etude.config.import_path import import_object
from etude.config.registry import register_tools
from etude.core.errors import RequestError, words_of
from etude.core.message import Tool
from etude.core.threads import call_in_thread
from etude.core.tools import ToolResult, ToolSource
from etude.rollout.python_function import PythonFunction
from etude.store.plain import plain

if TYPE_CHECKING:
    from etude.config.builder import Builder


class FunctionTools:
    """Tools that are Python functions, sync or async. Their schemas are of annotations and docstrings.

    What a function raises is the tool's error, which the model is told. Sync functions run in threads, at the
    same time as others. Raises RequestError for a function that cannot be described, and two of one name.
    """

    forgets = False
    """A function's memory is a matter of the program."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        made = [PythonFunction(fn) for fn in functions]
        self.tools: tuple[Tool, ...] = tuple(function.tool for function in made)
        self._functions = {function.name: function for function in made}
        for name, count in Counter(function.name for function in made).items():
            if count > 1:
                raise RequestError(f"two of the functions are called '{name}'; a tool's name must be its own")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[FunctionTools]:
        """The same functions for every episode."""
        yield self

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a function with arguments that fit its annotations."""
        function = self._functions[name]
        try:
            made = function.call(arguments)
            value = await (made() if function.is_async else call_in_thread(made))
            if inspect.isawaitable(value):
                value = await value
            text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
            )
            return ToolResult(f"error: {problems}", is_error=True)
        except Exception as error:  # noqa: BLE001  the user's function: its error is the tool's answer
            return ToolResult(f"error: {words_of(error)}", is_error=True)
        return ToolResult(text)

    async def log(self) -> str:
        """Functions have no log of their own."""
        return ""


class FunctionToolsConfig(ToolsConfig, name="functions"):
    """Python functions as tools, described by their annotations and docstrings."""

    functions: list[str] = Field(min_length=1)
    """`package.module:name` of each function."""


@register_tools(config_type=FunctionToolsConfig)
async def function_tools(config: FunctionToolsConfig, builder: Builder) -> AsyncIterator[ToolSource]:
    """Raises RequestError when a function is not found or cannot be described."""
    yield FunctionTools([import_object(path) for path in config.functions])
