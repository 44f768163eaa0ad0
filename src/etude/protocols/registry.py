"""Protocols and scenarios by the names that a config has for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from etude.config.import_path import import_object, is_import_path, where_raised
from etude.config.nearest import alternatives
from etude.core.errors import EtudeError, RequestError
from etude.protocols.named import PROTOCOLS
from etude.protocols.protocol import Protocol
from etude.protocols.scenario import Scenario

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])

_METHODS = ("render", "parse", "truth", "stance")
_scenarios: dict[str, Callable[..., Scenario]] = {}


def register_scenario(name: str) -> Callable[[FactoryT], FactoryT]:
    """Decorate a scenario class, or a function that makes a scenario, to be named in configs.

    Raises RequestError when another module has the name.
    """

    def register(factory: FactoryT) -> FactoryT:
        known = _scenarios.get(name)
        if known is not None and _home(known) != _home(factory):
            raise RequestError(f"two scenarios are called '{name}': {_home(known)} and {_home(factory)}")
        _scenarios[name] = factory
        return factory

    return register


def find_protocol(name: str, arguments: Mapping[str, Any]) -> Protocol:
    """A named protocol, or one that an import path names: a Protocol, or a function that makes one.

    Raises RequestError for an unknown name and for arguments that do not fit.
    """
    found: Any = import_object(name) if is_import_path(name) else PROTOCOLS.get(name)
    if found is None:
        raise RequestError(
            f"there is no protocol '{name}'" + alternatives(name, PROTOCOLS) + ", or module:name of your own"
        )
    made = _made(name, found, arguments)
    if not isinstance(made, Protocol):
        raise RequestError(f"protocol '{name}': expected an etude.protocols.Protocol, found {made!r:.80}")
    return made


def find_scenario(name: str, arguments: Mapping[str, Any]) -> Scenario:
    """A registered scenario, or one that an import path names: a scenario, its class, or its maker.

    Raises RequestError for an unknown name, for arguments that do not fit, and for missing methods.
    """
    found: Any = import_object(name) if is_import_path(name) else _scenarios.get(name)
    if found is None:
        raise RequestError(
            f"there is no scenario '{name}'" + alternatives(name, _scenarios) + ", or module:name of your own"
        )
    made: Scenario = _made(name, found, arguments)
    lacking = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if lacking:
        raise RequestError(f"scenario '{name}' has no method '{lacking[0]}'; it needs {', '.join(_METHODS)}")
    return made


def _made(name: str, found: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(found, Protocol) or (not isinstance(found, type) and hasattr(found, "render")):
        if arguments:
            raise RequestError(f"'{name}' is no function, and takes no arguments: {', '.join(arguments)}")
        return found
    try:
        inspect.signature(found).bind(**arguments)
    except ValueError:
        pass  # A callable that does not say what it takes.
    except TypeError as error:
        raise RequestError(
            f"'{name}' cannot be made with {dict(arguments)}: {error}{_known(found, arguments)}"
        ) from error
    try:
        return found(**arguments)
    except EtudeError:
        raise
    except Exception as error:
        raise RequestError(
            f"'{name}' cannot be made with {dict(arguments)}: {where_raised(error)}"
        ) from error


def _known(found: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The parameters that there are, with the nearest to the first that is not known."""
    names = [known for known in inspect.signature(found).parameters if known not in ("args", "kwargs")]
    unknown = next((name for name in arguments if name not in names), None)
    return "" if unknown is None else alternatives(unknown, names, otherwise="it takes no arguments")


def _home(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__name__)}"
