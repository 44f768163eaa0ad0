"""`etude serve MODEL`: the language-model server."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from etude.cli.command import option
from etude.cli.console import say, warn
from etude.core.errors import RequestError, require_extra
from etude.core.secrets import keep_secret
from etude.server.settings import ServerSettings, server_settings


def serve(**options: Any) -> None:
    """Serve and train a model behind OpenAI's API. Runs until Ctrl-C or SIGTERM."""
    from etude.engines.local import require_local_extra
    from etude.models.source import local_path, locate

    require_local_extra()
    for module in ("prometheus_client", "python_multipart"):
        require_extra(module, "the server", "server")
    folder = local_path(options["model"])
    options["name"] = options["name"] or (options["model"] if folder is None else folder.resolve().name)
    options["log_level"] = logging.root.level
    if (variable := options.pop("api_key_env")) is not None:
        options["api_key"] = os.environ.get(variable)
        if not options["api_key"]:
            raise RequestError(f"the environment variable {variable} is not set or empty; put the key there")
        keep_secret(options["api_key"])
    settings = server_settings(**options)
    locate(settings.model)
    if (cluster := settings.cluster) is not None:
        # In the main thread, Ray would take over SIGTERM.
        with ThreadPoolExecutor(1) as thread:
            has = thread.submit(cluster.check, Path.cwd() if settings.algorithms else None)
            warn(f"✓ cluster: {has.result()}")
    # Imported last, because it loads torch: errors in the options appear without that wait.
    from etude.server.serve import serve as run

    text = "serving {name} at {address}/v1; {address}/docs lists what it answers. Ctrl-C stops it."
    run(settings, lambda address: say(text.format(name=settings.name, address=address)))


def _signature() -> Signature:
    """Return the command's options: the settings', and the name of the key's variable."""
    hints, found = get_type_hints(ServerSettings, include_extras=True), []
    for each in fields(ServerSettings):
        if each.name in ("log_level", "api_key"):
            continue
        hint = hints[each.name]
        if each.default == ():  # Typer takes a tuple for several values at once.
            hint = Annotated[list[str], *hint.__metadata__]
        default = Parameter.empty if each.default is MISSING else each.default
        found.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    key = Annotated[str | None, option("Environment variable with the key that clients must have.")]
    return Signature([*found, Parameter("api_key_env", Parameter.KEYWORD_ONLY, default=None, annotation=key)])


serve.__signature__ = _signature()  # type: ignore[attr-defined]
