"""A model of a language-model server as a folder here; of the server, only the address is known."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from etude.core.errors import BackendError
from etude.core.secrets import keep_secret
from etude.export.model import CARD, Conversion, Kind, convert, plain_name, require_replaceable, usage
from etude.store.files import draft_of
from etude.wire.retries import error_text, reason_of

_SECONDS = 60.0
"""For a connection; the server may take minutes to write a model."""

_REMEDIES = {
    401: "; name the variable that has the server's key with --api-key-env",
    404: "; the server lists its models at /v1/models",
}


def export_served(
    address: str,
    model: str,
    folder: Path,
    *,
    key: str | None = None,
    lora_only: bool = False,
    gguf: Conversion | None = None,
) -> list[str]:
    """Write a model of the server at `address` into `folder`, with a card; the names of the files.

    Raises RequestError when `folder` holds something else, BackendError for what the server says or does not
    say, StoreError when the folder cannot be written, EtudeError when llama.cpp does not take the model.
    """
    require_replaceable(folder)
    kind: Kind = "gguf" if gguf is not None else "lora" if lora_only else "merged"
    # It is made to be given away.
    with draft_of(folder, private=False) as draft:

        def fetch(place: Path) -> None:
            _fetch(
                f"{address.rstrip('/').removesuffix('/v1')}/export/{quote(model, safe='')}",
                place,
                key,
                lora_only,
            )
            if gguf is not None:
                shutil.move(place / CARD, draft / CARD)

        name = plain_name(model)
        if gguf is None:
            fetch(draft)
        else:
            convert(fetch, draft, name, gguf).rename(draft / f"{name}.gguf")
        with (draft / CARD).open("a", encoding="utf-8") as card:
            card.write(usage(name, kind))
    return sorted(file.name for file in folder.iterdir())


def _fetch(url: str, folder: Path, key: str | None, lora_only: bool) -> None:
    """Unpack the archive at `url` into a folder, as it comes."""
    headers = {}
    if key:
        keep_secret(key)
        headers["authorization"] = f"Bearer {key}"
    folder.mkdir(parents=True, exist_ok=True)
    timeout = httpx.Timeout(_SECONDS, read=None)
    query = {"lora": "true"} if lora_only else {}
    try:
        with httpx.stream("GET", url, params=query, headers=headers, timeout=timeout) as response:
            if not response.is_success:
                status, problem = response.status_code, _problem(response)
                raise BackendError(f"GET {url} answered {status}: {problem}{_REMEDIES.get(status, '')}")
            _unpack(response, folder)
    except httpx.InvalidURL as error:
        raise BackendError(f"{url} is no address: {error}") from error
    except httpx.RequestError as error:
        raise BackendError(f"GET {url}: {reason_of(error)}") from error
    except tarfile.TarError as error:
        raise BackendError(
            f"GET {url}: the answer is no archive, or broke off ({error}); try again"
        ) from error


def _problem(response: httpx.Response) -> str:
    response.read()
    try:
        return error_text(response.json())
    except ValueError:
        return error_text(response.text)


def _unpack(response: httpx.Response, folder: Path) -> None:
    """Only files, and each directly in the folder, whatever the archive says."""
    stream: Any = _Stream(response.iter_raw())
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            content = archive.extractfile(entry)
            if content is not None:
                with (folder / Path(entry.name).name).open("wb") as file:
                    shutil.copyfileobj(content, file)


class _Stream:
    """A file whose content comes in pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        parts, missing = [self._rest], size - len(self._rest)
        while missing > 0 and (piece := next(self._pieces, b"")):
            parts.append(piece)
            missing -= len(piece)
        whole = b"".join(parts)
        self._rest = whole[size:]
        return whole[:size]
