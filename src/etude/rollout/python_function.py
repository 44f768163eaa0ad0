"""A Python function as a tool: its description for a model, and calls that fit its annotations."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GenericAlias, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from etude.core.errors import RequestError
from etude.core.message import Tool

if TYPE_CHECKING:
    from griffe import DocstringSection

_HEADING = re.compile(
    r"^((?:keyword |other )?(?:args|arguments|params|parameters)):[ \t]*\n+(?=[ \t]+\S)", re.M | re.I
)
"""griffe takes it for a heading only after a blank line, and before none."""
_DATA = frozenset({"default", "examples", "enum", "const"})
"""The keys of a JSON schema that hold values and no schemas."""


class PythonFunction:
    """A function, method, or other callable that a model may call.

    It is described by pydantic's schema of its signature, with the texts of `Annotated`, of `Field` and of
    the docstring. The same model of its arguments checks those of a call.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Raises RequestError for what is no function, and where an annotation has no JSON schema."""
        if not callable(fn):
            raise RequestError(f"a tool must be a dict or a function, found {fn!r:.80}")
        self.fn, inner = fn, fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        self.name: str = getattr(inner, "__name__", type(inner).__name__)
        routine = inner if inspect.isroutine(inner) else type(inner).__call__
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(routine))
        try:
            self._signature = inspect.signature(fn)
            self._parameters = _parameters(self._signature, fn, inner)
            self._model = _model(self.name, self._parameters)
            schema = self._model.model_json_schema(schema_generator=_Schema)
        except (PydanticUserError, NameError, AttributeError, TypeError, ValueError, SyntaxError) as error:
            raise RequestError(
                f"function '{self.name}' cannot be described as a tool: {error}; annotate its arguments with "
                f"types that JSON has"
            ) from error
        text, descriptions = _read_docstrings(inner)
        described = {"name": self.name, "parameters": self._with_descriptions(_plain(schema), descriptions)}
        if text:
            described["description"] = text
        self.tool: Tool = {"type": "function", "function": described}

    def call(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """The call with these arguments, each of the type that its annotation says.

        Raises pydantic's ValidationError where they do not fit.
        """
        checked = self._model.model_validate(dict(arguments))
        bound = inspect.BoundArguments(self._signature, {})
        for key, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.arguments[parameter.name] = checked.model_extra or {}
                continue
            has_own = parameter.default is not parameter.empty and not isinstance(
                parameter.default, FieldInfo
            )
            if key in checked.model_fields_set or not has_own:
                bound.arguments[parameter.name] = getattr(checked, key)
        bound.apply_defaults()
        return functools.partial(self.fn, *bound.args, **bound.kwargs)

    def _with_descriptions(self, schema: dict[str, Any], descriptions: Mapping[str, str]) -> dict[str, Any]:
        """The schema, with descriptions of the docstring where the signature has none."""
        properties, others = schema.setdefault("properties", {}), schema.pop("additionalProperties")
        # That there are others or none goes without saying.
        others = {} if isinstance(others, bool) else others
        for key, parameter in self._parameters.items():
            said = descriptions.get(parameter.name)
            if parameter.kind is parameter.VAR_KEYWORD:
                others |= {"description": said} if said else {}
                continue
            field = self._model.model_fields[key]
            text = field.description or next(_texts(field.metadata), said)
            if text:
                described = properties[field.validation_alias] | {"description": " ".join(text.split())}
                # In pydantic's order of keys.
                properties[field.validation_alias] = dict(sorted(described.items()))
        return schema | ({"additionalProperties": others} if others else {})


def _parameters(
    signature: inspect.Signature, fn: Callable[..., Any], inner: Callable[..., Any]
) -> dict[str, inspect.Parameter]:
    """The parameters that a model is told of, with evaluated annotations, under names that pydantic takes.

    `inner` is the function without what a `partial` has set; by name, that is not the model's to set. Nor are
    positional arguments of any number and kind.
    """
    parameters = list(signature.parameters.values())
    owner = getattr(inner, "__qualname__", "").rpartition(".")[0]
    is_of_class = inspect.isfunction(inner) and owner.rpartition(".")[2] not in ("", "<locals>")
    if is_of_class and parameters and parameters[0].name == "self":
        raise TypeError("it is a method without its object; hand over the method of an object")
    annotations = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
    hints = get_type_hints(
        SimpleNamespace(__annotations__=annotations), globalns=_names_around(inner), include_extras=True
    )
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    return {
        f"parameter_{number}": each.replace(annotation=hints.get(each.name, Any))
        for number, each in enumerate(parameters)
        if each.name not in fixed and (each.kind is not each.VAR_POSITIONAL or each.name in hints)
    }


def _names_around(inner: Callable[..., Any]) -> dict[str, Any]:
    """The names that annotations of a function or class are made of."""
    if isinstance(inner, type):
        return vars(sys.modules[inner.__module__])
    function = inspect.unwrap(inner if inspect.isroutine(inner) else type(inner).__call__)
    return getattr(getattr(function, "__func__", function), "__globals__", {})


def _model(name: str, parameters: Mapping[str, inspect.Parameter]) -> type[BaseModel]:
    """The model of arguments, whose fields have the names of the parameters as their aliases."""
    fields: dict[str, Any] = {}
    base: dict[str, Any] = {"model_config": ConfigDict(extra="forbid"), "__annotations__": {}}
    for key, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            # Its annotation is that of each value.
            base["model_config"] = ConfigDict(extra="allow")
            base["__annotations__"] = {"__pydantic_extra__": GenericAlias(dict, (str, each.annotation))}
            continue
        annotation, default = each.annotation, each.default
        if each.kind is each.VAR_POSITIONAL:
            annotation, default = GenericAlias(tuple, (annotation, ...)), ()
        infos = (default, *getattr(annotation, "__metadata__", ()))
        alias = next((info.alias for info in infos if isinstance(info, FieldInfo) and info.alias), each.name)
        annotation = Annotated[annotation, Field(alias=alias)]
        # Without one of the parameter's own, the default is that of a `Field` in the annotation.
        fields[key] = annotation if default is each.empty else (annotation, default)
    made: type[BaseModel] = create_model(name, __base__=type(name, (BaseModel,), base), **fields)
    return made


class _Schema(GenerateJsonSchema):
    """Says nothing of defaults that JSON does not have."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _plain(schema: Any) -> Any:
    """A schema without titles, which only cost tokens, and without numbers that JSON does not have."""
    if isinstance(schema, list):
        return [_plain(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            plain[key] = {name: _plain(inner) for name, inner in value.items()}
        elif key in _DATA or isinstance(value, float):
            if _is_json(value):
                plain[key] = value
        elif key != "title":
            plain[key] = _plain(value)
    return plain


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _texts(metadata: Sequence[Any]) -> Iterator[str]:
    """The texts beside a type, as in `Annotated[int, "How many."]` and `Annotated[int, Doc("How many.")]`."""
    for each in metadata:
        text = getattr(each, "documentation", each)
        if isinstance(text, str):
            yield text


def _read_docstrings(inner: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text of a function's docstring, and its descriptions of arguments, each on one line.

    Of Google's style, numpy's and Sphinx's, the one that describes the most arguments is taken. What is
    returned and raised is left out. Of a class or an object, the docstring of its method counts, too.
    """
    from griffe import DocstringSectionKind as Kind

    text, descriptions = "", dict[str, str]()
    for docstring in _docstrings(inner):
        pieces = []
        for section in max(_readings(docstring), key=_known):
            match section.kind:
                case Kind.parameters | Kind.other_parameters:
                    for each in section.value:
                        said = " ".join(each.description.split())
                        descriptions.setdefault(each.name.strip("*`- "), said)
                case Kind.text:
                    pieces.append(section.value)
                case Kind.admonition:
                    pieces.append(f"{section.title}: {section.value.contents}")
                case Kind.examples:
                    pieces += ["Examples:", *(example for _, example in section.value)]
        text = text or " ".join(" ".join(pieces).split())
    return text, descriptions


def _readings(docstring: str) -> Iterator[list[DocstringSection]]:
    """The sections of a docstring, in each style."""
    from griffe import Docstring, parse_google, parse_numpy, parse_sphinx

    spaced = Docstring(_HEADING.sub(r"\n\1:\n", docstring))
    for parse in (parse_google, parse_numpy, parse_sphinx):
        yield parse(spaced, warnings=False)


def _known(sections: Sequence[DocstringSection]) -> tuple[int, int]:
    """How many arguments sections describe, and how many there are of them."""
    told = [each for each in sections if each.kind.value in ("parameters", "other parameters")]
    return sum(len(each.value) for each in told), len(sections)


def _docstrings(inner: Callable[..., Any]) -> list[str]:
    if inspect.isroutine(inner):
        return [inspect.getdoc(inner) or ""]
    if isinstance(inner, type):
        documented = [inner, vars(inner).get("__init__", inner)]
    else:
        documented = [type(inner).__call__, type(inner)]
    return [inspect.cleandoc(each.__doc__ or "") for each in documented]
