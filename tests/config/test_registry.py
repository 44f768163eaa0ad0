"""The component registry: each `_type` and the class it stands for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etude.config import registry
from etude.config.finetuning import TrainerConfig
from etude.config.registry import register_llm, register_trainer
from etude.core.errors import RequestError


def define(module: str = __name__, name: str = "mine") -> type[TrainerConfig]:
    """A trainer config class as a module would define it when it is imported."""

    class MineConfig(TrainerConfig, name=name):
        """Mine."""

    MineConfig.__module__ = module
    MineConfig.__qualname__ = "MineConfig"
    return MineConfig


async def build(config, builder):
    yield config


def test_a_decorated_generator_is_found_by_kind_and_name(empty_registry: None):
    config_type = define()
    assert register_trainer(config_type=config_type)(build) is build
    found = registry.lookup("trainers", "mine")
    assert (found.config_type, found.factory) == (config_type, build)
    assert registry.names("trainers") == ["mine"]
    assert registry.names("llms") == []
    assert registry.of_object("trainers", build) is found
    assert registry.of_object("llms", build) is None


def test_a_module_that_is_imported_again_takes_its_own_place(empty_registry: None):
    register_trainer(config_type=define())(build)
    again = define()
    register_trainer(config_type=again)(build)
    assert registry.lookup("trainers", "mine").config_type is again


def test_a_script_and_the_module_of_the_same_file_are_the_same(
    empty_registry: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    register_trainer(config_type=define("__main__"))(build)
    register_trainer(config_type=define(__name__))(build)


def test_two_classes_of_one_name_are_an_error_that_names_both_modules(empty_registry: None):
    register_trainer(config_type=define("acme.trainers"))(build)
    with pytest.raises(RequestError) as raised:
        register_trainer(config_type=define("zeta.trainers"))(build)
    assert str(raised.value) == (
        "two trainer types are called 'mine': MineConfig of module acme.trainers and MineConfig "
        "of module zeta.trainers. Rename one of them"
    )


def test_a_class_of_another_kind_is_refused_when_it_is_used(empty_registry: None):
    register_llm(config_type=define())(build)  # type: ignore[arg-type]
    where = rf"test_registry\.py:{build.__code__.co_firstlineno}: "
    with pytest.raises(RequestError, match=where + "MineConfig must inherit from LlmConfig to be a model"):
        registry.lookup("llms", "mine")


def test_a_class_without_a_name_is_refused_when_it_is_used(empty_registry: None):
    class Nameless(TrainerConfig):
        """It has no `name=`."""

    register_trainer(config_type=Nameless)(build)
    found = registry.of_object("trainers", build)
    assert found is not None
    with pytest.raises(RequestError, match=r'class Nameless\(TrainerConfig, name="…"\)'):
        registry.lookup("trainers", found.name)


async def returns(config, builder):
    return config


async def takes_too_little(config):
    yield config


@pytest.mark.parametrize(
    ("factory", "fault"),
    [
        (returns, "returns must be an async generator"),
        (takes_too_little, r"takes_too_little is called with \(config, builder\): too many positional"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_with_its_line_when_it_is_used(
    empty_registry: None, factory, fault: str
):
    assert register_trainer(config_type=define())(factory) is factory
    with pytest.raises(RequestError, match=rf"test_registry\.py:{factory.__code__.co_firstlineno}: {fault}"):
        registry.lookup("trainers", "mine")


def test_an_unknown_type_is_answered_with_the_nearest(empty_registry: None):
    with pytest.raises(RequestError, match=r"there is no trainer type 'x'\. Allowed: none is registered"):
        registry.lookup("trainers", "x")
    register_trainer(config_type=define())(build)
    with pytest.raises(RequestError, match=r"'mien'; did you mean 'mine'\? Allowed: mine"):
        registry.lookup("trainers", "mien")
    with pytest.raises(RequestError, match="'mine' is registered as trainer, not as model"):
        registry.lookup("llms", "mine")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package `acme-etude` whose entry point is a module of the given text."""

    def install(text: str) -> None:
        info = tmp_path / "acme_etude-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-etude\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[etude.test.components]\nacme = acme_etude\n")
        (tmp_path / "acme_etude.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_etude", raising=False)

    with registry.isolated(entry_points="etude.test.components"):
        yield install


ACME = """\
from etude import TrainerConfig, register_trainer

class AcmeConfig(TrainerConfig, name="acme"): ...

@register_trainer(config_type=AcmeConfig)
async def acme(config, builder):
    yield config
"""


def test_installed_packages_are_imported_on_the_first_lookup_and_not_before(installed):
    installed(ACME)
    assert "acme_etude" not in sys.modules
    assert registry.lookup("trainers", "acme").config_type.__module__ == "acme_etude"
    module = sys.modules.pop("acme_etude")
    assert registry.names("trainers") == ["acme"]
    assert "acme_etude" not in sys.modules
    sys.modules["acme_etude"] = module


def test_a_broken_package_is_named_every_time(installed):
    installed("import no_such_module_anywhere\n")
    for _ in range(2):
        with pytest.raises(RequestError) as raised:
            registry.names("trainers")
        assert str(raised.value) == (
            "the components of the installed package 'acme-etude' cannot be loaded: importing acme_etude "
            "raised ModuleNotFoundError: No module named 'no_such_module_anywhere'. "
            "Fix or uninstall that package"
        )
