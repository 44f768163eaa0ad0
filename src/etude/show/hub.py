"""Uploads of exported models to the Hugging Face hub, and downloads of models from a language-model server.

`huggingface_hub` transfers the files. It skips files that are there already, so an interrupted upload resumes
when it is repeated. A commit has all files or none. Of a server, only the address is needed.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from etude.core.errors import BackendError, EtudeError, RequestError, first_line
from etude.core.secrets import keep_secret
from etude.show.exported_model import CARD, Conversion, Kind, convert, plain_name, require_replaceable, usage
from etude.store.files import open_draft
from etude.wire.retries import describe, to_failure

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError


_TOKENS = "a token that may write, from https://huggingface.co/settings/tokens"
_REPLACED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
)
"""Files of an earlier export that must not remain next to other weights. They stay in the history."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository on the hub, or on HF_ENDPOINT. Raises RequestError for a wrong name."""

    name: str
    """`user/name`"""
    public: bool = False
    """Whether anybody may see it. Without this, an already public repository is not written to."""

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise RequestError(f"--push {self.name}: {first_line(error)} Write user/name") from error
        if "/" not in self.name:
            raise RequestError(f"--push {self.name}: write user/name, with your name or an organization's")

    @property
    def visibility(self) -> str:
        """The hub's word for it."""
        return "public" if self.public else "private"

    def require(self) -> None:
        """Check the hub and the repository's visibility; write nothing. Raises RequestError, EtudeError."""
        from huggingface_hub.errors import RepositoryNotFoundError

        api = _api()
        with self._explain_errors(api):
            try:
                stored = api.model_info(self.name)
            except RepositoryNotFoundError:
                return  # The repository is created on upload.
        if stored.private and self.public:
            raise RequestError(
                f"{self.name} is there, and private: make it public in its settings on the hub, or leave out "
                "--public"
            )
        if not stored.private and not self.public:
            raise RequestError(
                f"{self.name} is public: everybody would see the model. Add --public if that is meant, or "
                "name another repository"
            )

    def send(self, folder: Path, message: str) -> str:
        """Upload an exported folder, and create the repository if needed. Return its address.

        Raises EtudeError if the hub cannot be reached or refuses. Repeating the call resumes the upload.
        """
        api = _api()
        with self._explain_errors(api, folder):
            api.create_repo(self.name, private=not self.public, exist_ok=True)
            api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=[*_REPLACED] if any(folder.glob("*.safetensors")) else None,
            )
        return f"{api.endpoint}/{self.name}"

    @contextmanager
    def _explain_errors(self, api: HfApi, folder: Path | None = None) -> Iterator[None]:
        """Turn errors within the block into messages with a remedy. `folder` is kept."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        kept = "" if folder is None else f"; the model is in {folder}, and the same command goes on"
        # From httpx, or another library in other releases of huggingface_hub.
        transport_error = HfHubHTTPError.__bases__[0]
        try:
            yield
        except HfHubHTTPError as error:
            raise EtudeError(self._refusal(error, api.endpoint) + kept) from error
        except OfflineModeIsEnabled as error:
            raise RequestError("HF_HUB_OFFLINE is set, and nothing goes to the hub: unset it") from error
        except ValueError as error:  # The hub checks the card before anything is sent.
            raise RequestError(
                f"{api.endpoint} does not take this: {' '.join(str(error).split())}"
            ) from error
        except (transport_error, OSError, RuntimeError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # The errors above it only say that an upload failed.
                cause = cause.__cause__
            raise EtudeError(f"{api.endpoint} is away, or broke off ({first_line(cause)}){kept}") from error

    def _refusal(self, error: HfHubHTTPError, endpoint: str) -> str:
        status = error.response.status_code
        reason = error.server_message or first_line(error)
        if status == 401:
            return f"{endpoint} does not take the token: set HF_TOKEN to {_TOKENS}"
        if status in (403, 404):
            return (
                f"the token may not write to {self.name} ({reason}): name a repository of your own, or an "
                f"organization's that you may write to, and set HF_TOKEN to {_TOKENS}"
            )
        return f"{endpoint} refused ({status}): {reason}"


def _api() -> HfApi:
    """Return the hub client. Its token is masked in all texts. Raises RequestError without a token."""
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if token is None:
        raise RequestError(f"nobody is logged in to the hub: `hf auth login`, or set HF_TOKEN to {_TOKENS}")
    keep_secret(token)
    return HfApi(token=token)


_SECONDS = 60.0
"""The timeout of a connection. The server may take minutes to write a model."""

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
    """Write a model of the server at `address` into `folder`. Return the files' names. Raises EtudeError."""
    require_replaceable(folder)
    kind: Kind = "gguf" if gguf is not None else "lora" if lora_only else "merged"
    url = f"{address.rstrip('/').removesuffix('/v1')}/export/{quote(model, safe='')}"
    # The export is for publication.
    with open_draft(folder, private=False) as draft:

        def fetch(place: Path) -> None:
            _fetch(url, place, key, lora_only)
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
    """Unpack the archive at `url` into a folder while it downloads."""
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
                status = response.status_code
                failure = to_failure(status, response.headers, response.read())
                raise BackendError(f"GET {url} answered {failure}{_REMEDIES.get(status, '')}")
            _unpack(response, folder)
    except httpx.InvalidURL as error:
        raise BackendError(f"{url} is no address: {error}") from error
    except httpx.RequestError as error:
        raise BackendError(f"GET {url}: {describe(error)}") from error
    except tarfile.TarError as error:
        raise BackendError(
            f"GET {url}: the answer is no archive, or broke off ({error}); try again"
        ) from error


def _unpack(response: httpx.Response, folder: Path) -> None:
    """Unpack only files, each directly into the folder, whatever paths the archive has."""
    pieces = response.iter_raw()
    # tarfile reads on after a short piece, and keeps the rest of a longer one.
    stream: Any = SimpleNamespace(read=lambda size: next(pieces, b""))
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            content = archive.extractfile(entry)
            if content is not None:
                with (folder / Path(entry.name).name).open("wb") as file:
                    shutil.copyfileobj(content, file)
