"""The `storage` block: where a run is backed up while it goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from etude.config.component import CHANGEABLE

_SECRET = re.compile(r"key|secret|token|passw|credential|sas|account_name|connection_string", re.IGNORECASE)
"""Names of options whose values are not written into run folders."""
_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")

_Option = Annotated[Any, CHANGEABLE]


class StorageConfig(BaseModel, extra="forbid", frozen=True):
    """Where the journal and the weights of a run are backed up, and when."""

    address: Annotated[str, CHANGEABLE]
    """The folder that holds runs, one folder each: `s3://bucket/etude`, `gs://…`, `file:///mnt/…`; whatever
    fsspec has a driver for."""
    options: Annotated[dict[str, _Option], CHANGEABLE] = Field(default_factory=dict)
    """Arguments of fsspec's driver. Credentials come from the environment, as the driver reads it, or as
    `${NAME}`."""
    interval: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds from one copy to the next, while there is something new."""
    patience: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds that the run waits for its storage at its beginning and its end."""

    @model_validator(mode="before")
    @classmethod
    def _address_alone(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        if "://" not in address:
            example = (
                f"file://{address}" if address.startswith("/") else "file:///mnt/backup, s3://bucket/etude"
            )
            raise ValueError(f"an address begins with its scheme, as in {example}")
        if _PASSWORD.search(address):
            raise ValueError("no password in an address: give it as an option, `password: ${NAME}`")
        return address.rstrip("/")

    @field_validator("options", mode="before")
    @classmethod
    def _hide_secrets(cls, options: Any) -> Any:
        return _hidden(options) if isinstance(options, Mapping) else options

    def driver_options(self) -> dict[str, Any]:
        """The options as the driver takes them, secrets included."""
        options: dict[str, Any] = _shown(self.options)
        return options


def _hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with secrets as what prints and dumps as asterisks."""

    def hide(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _hidden(value)
        return SecretStr(value) if isinstance(value, str) and _SECRET.search(name) else value

    return {str(name): hide(str(name), value) for name, value in options.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shown(item) for name, item in value.items()}
    return value.get_secret_value() if isinstance(value, SecretStr) else value
