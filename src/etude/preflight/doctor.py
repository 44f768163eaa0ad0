"""The state of the installation and the machine: the first look when something does not work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from etude.core.errors import MissingExtraError, install_command
from etude.inference.local import require_local_extra
from etude.models.memory import available_memory, shown_bytes, total_memory
from etude.preflight.finding import Findings

_PACKAGE = Path(__file__).parents[1]

EXTRAS = {
    "local": "models that run and train in this process",
    "bnb": "local models with a base of four bits (`quantization: 4bit`), on CUDA",
    "data": "Parquet and Hugging Face datasets",
    "plots": "pictures of a run's rewards",
}

_LITTLE_DISK = 2e9
_LITTLE_MEMORY = 1e9
"""Loading torch and a tiny model takes some 0.5 GB."""
_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
"""With 1, torch computes on the CPU what Apple's GPUs cannot."""
_KEYS = ("OPENAI_API_KEY", "HF_TOKEN")


def examine(folder: Path) -> Findings:
    """Look at Python, packages, extras, device, threads, memory and the disk of `folder`."""
    findings = Findings()
    findings.ok("etude", f"{importlib.metadata.version('etude')} in {Path(__file__).parents[1]}")
    findings.ok("python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    problems = list(conflicts("etude"))
    for problem in problems:
        findings.fail("packages", problem)
    if not problems:
        findings.ok("packages", f"all versions fit together{_untested()}")
    for extra, use in EXTRAS.items():
        _extra(extra, use, findings)
    _backends(findings)
    _torch(findings)
    _memory(findings)
    _disk(folder, findings)
    findings.ok("sqlite", sqlite3.sqlite_version)
    keys = [name for name in _KEYS if os.environ.get(name)]
    findings.ok("keys in the environment", ", ".join(keys) or f"none of {', '.join(_KEYS)}")
    return findings


def can_try_loop(findings: Findings) -> bool:
    """Whether a model can be trained in this process; if not, that is a finding."""
    try:
        require_local_extra()
    except MissingExtraError as error:
        findings.warn("loop", f"not tried: {error}")
        return False
    return True


def conflicts(name: str) -> Iterator[str]:
    """Each requirement of a package, or of what it needs, that is missing or of a wrong version."""
    waiting, seen = [name], {name}
    while waiting:
        package = waiting.pop()
        for requirement in _requirements(package):
            version = installed(requirement.name)
            if version is None:
                yield f"{package} needs {requirement}, and it is not installed: pip install '{requirement}'"
            elif not requirement.specifier.contains(version, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                yield f"{package} needs {wanted}, and {version} is installed: pip install '{wanted}'"
            if version is not None and requirement.name not in seen:
                seen.add(requirement.name)
                waiting.append(requirement.name)


def _untested() -> str:
    """Which packages are not of the releases that the tests have passed with, after a semicolon."""
    tested = dict(_tested_releases())
    names = {requirement.name for extra in ("", *EXTRAS) for requirement in _requirements("etude", extra)}
    releases = {name: version for name in sorted(names) if (version := installed(name)) is not None}
    others = [
        f"{name} {version} ({tested[name.lower()]})"
        for name, version in releases.items()
        if tested.get(name.lower(), version) not in (version, Version(version).public)
    ]
    return f"; not of the releases that were tested: {', '.join(others)}" if others else ""


def _tested_releases() -> Iterator[tuple[str, str]]:
    """Of constraints.txt, which is part of the package, or lies beside `src`."""
    for folder in (_PACKAGE, _PACKAGE.parents[1]):
        if (folder / "constraints.txt").is_file():
            for line in (folder / "constraints.txt").read_text(encoding="utf-8").splitlines():
                name, equals, version = line.partition("==")
                if equals and not line.startswith("#"):
                    yield name.strip().lower(), version.strip()
            return


def _extra(extra: str, use: str, findings: Findings) -> None:
    what = f"extra '{extra}'"
    missing, wrong = [], []
    for requirement in _requirements("etude", extra):
        version = installed(requirement.name)
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} in place of {requirement.specifier}")
    install = install_command(extra)
    if wrong:
        findings.fail(what, f"{', '.join(wrong)}; {install}")
    elif missing:
        findings.warn(what, f"not installed ({', '.join(missing)}); for {use}: {install}")
    else:
        findings.ok(what, f"installed: {use}")


def _backends(findings: Findings) -> None:
    """Where training could happen."""
    extra = "" if installed("torch") else " (needs the extra 'local')"
    key = "" if os.environ.get("OPENAI_API_KEY") else " (needs OPENAI_API_KEY)"
    address = os.environ.get("OPENAI_BASE_URL")
    where = f"; OPENAI_BASE_URL sends models without a base_url to {address}" if address else ""
    backends = f"local{extra}, lm_server and openpipe_art (servers of yours), openai{key}{where}"
    findings.ok("training backends", backends)


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """The requirements of a package on this machine; of an extra, only those that it adds."""

    def is_needed(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    requirements = map(Requirement, importlib.metadata.requires(package) or ())
    if not extra:
        return [each for each in requirements if is_needed(each, "")]
    return [each for each in requirements if is_needed(each, extra) and not is_needed(each, "")]


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(findings: Findings) -> None:
    if installed("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        findings.fail("torch", f"is installed and cannot be imported: {error}; install it again")
        return
    from etude.models.device import choose_device, multiplies_bfloat16, usable_cores

    device = choose_device()
    name = f" ({torch.cuda.get_device_name()})" if device.type == "cuda" else ""
    threads, cores = os.environ.get("OMP_NUM_THREADS"), usable_cores()
    taken = f"{threads} (OMP_NUM_THREADS)" if threads else "1 for small models and all for others"
    findings.ok("torch", f"{torch.__version__}, device {device.type}{name}")
    if device.type == "cpu":
        bfloat16 = "multiplied fast: models of 10 M parameters or more are loaded in it (`dtype`)"
        findings.ok("bfloat16", bfloat16 if multiplies_bfloat16() else "not multiplied by this CPU")
    if device.type == "mps":
        if os.environ.get(_FALLBACK) == "1":
            findings.ok("MPS", f"operations that it does not have run on the CPU ({_FALLBACK}=1)")
        else:
            advice = f"to have them run on the CPU: export {_FALLBACK}=1"
            findings.warn("MPS", f"operations that it does not have are errors; {advice}")
    findings.ok("threads", f"{cores} cores, of which torch takes {taken}; OMP_NUM_THREADS sets it")


def _memory(findings: Findings) -> None:
    total, free = total_memory(), available_memory()
    if free is not None and free < _LITTLE_MEMORY:
        findings.warn(
            "memory", f"only {shown_bytes(free)} free; end other programs, or take a larger machine"
        )
    elif total is not None and free is not None:
        findings.ok("memory", f"{shown_bytes(free)} free of {shown_bytes(total)}")


def _disk(folder: Path, findings: Findings) -> None:
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < _LITTLE_DISK:
        advice = "free some, or name another folder with --output-dir"
        findings.warn("disk", f"only {shown_bytes(free)} free in {folder.absolute()}; {advice}")
    else:
        findings.ok("disk", f"{shown_bytes(free)} free in {folder.absolute()}")
