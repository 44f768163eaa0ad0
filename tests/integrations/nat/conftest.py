"""Projects of the toolkit's."""

import pytest

from tests.cli.conftest import base
from tests.integrations.nat.toolkit import Project, make_base, make_site, program

__all__ = ["base"]


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    program()
    folder = tmp_path_factory.mktemp("nat")
    return make_site(folder / "site"), make_base(folder / "base")


@pytest.fixture
def project(parts, tmp_path):
    site, base = parts
    made = Project(tmp_path, site, base)
    made.configure()
    return made
