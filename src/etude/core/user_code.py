"""Whose code a file is: the user's, or that of Python and of installed packages."""

from __future__ import annotations

import sysconfig

_INSTALLED = ("/site-packages/", "/dist-packages/", "\\site-packages\\", "\\dist-packages\\")
_PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})

_packages: set[str] = set()


def note_user_module(module: str) -> None:
    """Remember that a config, or an installed plug-in, brings this module: its package is the user's."""
    _packages.add(module.partition(".")[0])


def is_user_module(module: str) -> bool:
    """Whether a module's package was brought by a config or a plug-in."""
    return module.partition(".")[0] in _packages


def is_installed(file: str) -> bool:
    """Whether a file came with Python or was installed as a package."""
    return file.startswith((*_PYTHON, "<frozen")) or any(part in file for part in _INSTALLED)
