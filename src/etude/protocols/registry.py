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
    """Decorate a scenario class, or a function that makes a scenario, to name it in configs.

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
    protocol = _make("protocol", name, PROTOCOLS, arguments)
    if not isinstance(protocol, Protocol):
        raise RequestError(f"protocol '{name}': expected an etude.protocols.Protocol, found {protocol!r:.80}")
    return protocol


def find_scenario(name: str, arguments: Mapping[str, Any]) -> Scenario:
    """A registered scenario, or one that an import path names: a scenario, its class, or its maker.

    Raises RequestError for an unknown name, for arguments that do not fit, and for missing methods.
    """
    scenario: Scenario = _make("scenario", name, _scenarios, arguments)
    lacking = [method for method in _METHODS if not callable(getattr(scenario, method, None))]
    if lacking:
        raise RequestError(f"scenario '{name}' has no method '{lacking[0]}'; it needs {', '.join(_METHODS)}")
    return scenario


def _make(kind: str, name: str, known: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    factory: Any = import_object(name) if is_import_path(name) else known.get(name)
    if factory is None:
        raise RequestError(
            f"there is no {kind} '{name}'" + alternatives(name, known) + ", or module:name of your own"
        )
    if isinstance(factory, Protocol) or (not isinstance(factory, type) and hasattr(factory, "render")):
        if arguments:
            raise RequestError(f"'{name}' is no function, and takes no arguments: {', '.join(arguments)}")
        return factory
    reason = f"'{name}' cannot be made with {dict(arguments)}"
    try:
        inspect.signature(factory).bind(**arguments)
    except ValueError:
        pass  # A callable without a signature.
    except TypeError as error:
        raise RequestError(f"{reason}: {error}{_parameters(factory, arguments)}") from error
    try:
        return factory(**arguments)
    except EtudeError:
        raise
    except Exception as error:
        raise RequestError(f"{reason}: {where_raised(error)}") from error


def _parameters(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The parameters of a factory, with the nearest to the first argument that is not among them."""
    names = [name for name in inspect.signature(factory).parameters if name not in ("args", "kwargs")]
    unknown = next((name for name in arguments if name not in names), None)
    return "" if unknown is None else alternatives(unknown, names, otherwise="it takes no arguments")


def _home(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__name__)}"
