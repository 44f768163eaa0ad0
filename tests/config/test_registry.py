"""The component registry: each `_type` and the class it stands for; and `package.module:name`."""

import json
import re
import sys
from pathlib import Path

import pytest

import etude
from etude.config import registry
from etude.config.finetuning import TrainerConfig
from etude.config.import_path import import_object, is_import_path, make_importable, where_raised
from etude.config.registry import register_llm, register_trainer
from etude.core.errors import RequestError
from tests.config.conftest import use_empty_registry


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
    assert registry.find_registration("trainers", build) is found
    assert registry.find_registration("llms", build) is None


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
    with pytest.raises(RequestError, match=r"called 'mine': .* acme\.trainers and .* zeta\.trainers"):
        register_trainer(config_type=define("zeta.trainers"))(build)


class Nameless(TrainerConfig):
    """It has no `name=`."""


async def returns(config, builder):
    return config


@pytest.mark.parametrize(
    ("register", "config_type", "factory", "message"),
    [
        (register_llm, define(), build, "MineConfig .*LlmConfig .*a model"),
        (register_trainer, Nameless, build, r'class Nameless\(TrainerConfig, name="…"\)'),
        (register_trainer, define(), returns, "returns .*async generator"),
    ],
)
def test_what_makes_no_component_is_refused_with_its_line(
    empty_registry: None, register, config_type, factory, message: str
):
    where = rf"test_registry\.py:{factory.__code__.co_firstlineno}: "
    with pytest.raises(RequestError, match=f"{where}.*{message}"):
        register(config_type=config_type)(factory)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package `acme-etude` whose entry point is a module of the given text."""

    def install(text: str) -> None:
        info = tmp_path / "acme_etude-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-etude\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[etude.test.components]\nacme = acme_etude\n")
        (tmp_path / "acme_etude.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_etude", raising=False)

    with use_empty_registry("etude.test.components"):
        yield install


ACME = """\
from etude import TrainerConfig, register_trainer

class AcmeConfig(TrainerConfig, name="acme"): ...

@register_trainer(config_type=AcmeConfig)
async def acme(config, builder):
    yield config
"""


def test_installed_packages_are_imported_on_the_first_lookup_and_not_before(install):
    install(ACME)
    assert "acme_etude" not in sys.modules
    assert registry.lookup("trainers", "acme").config_type.__module__ == "acme_etude"
    module = sys.modules.pop("acme_etude")
    assert registry.names("trainers") == ["acme"]
    assert "acme_etude" not in sys.modules
    sys.modules["acme_etude"] = module


@pytest.mark.parametrize(
    ("text", "cause"),
    [("import no_such_module_anywhere\n", "No module named 'no_such_module"), ("exit(3)\n", "SystemExit")],
)
def test_a_broken_package_is_named_every_time(install, text, cause):
    install(text)
    for _ in range(2):
        with pytest.raises(RequestError, match=f"package 'acme-etude' .*{cause}"):
            registry.names("trainers")


def test_what_a_library_raises_is_said_with_the_users_line():
    """Also what Python's own library raises, and what this package does. One never raised has no line."""
    assert where_raised(ValueError("x")) == "ValueError: x"
    for wrong in (lambda: json.loads("{"), lambda: etude.TrainingJobRef(run_id=[], backend="x")):
        with pytest.raises(ValueError) as caught:
            wrong()
        assert re.match(r".*test_registry\.py:\d+: \w+Error: ", where_raised(caught.value))


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("my_agent:play", True),
        ("agents.maths:Solver.run", True),
        ("my_agent", False),
        ("my-agent:play", False),
        ("http://localhost:8000", False),
        ("", False),
    ],
)
def test_the_form(text: str, is_path: bool):
    assert is_import_path(text) is is_path


def test_modules_are_found_in_the_folders_in_their_order(folder: Path):
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        place.mkdir()
        (place / "etude_test_module.py").write_text(f"here = {place.name!r}\nclass A:\n    b = 7\n")
    make_importable(first, second, first)
    assert sys.path[:2] == [str(first), str(second)]
    assert import_object("etude_test_module:here") == "first"
    assert import_object("etude_test_module:A.b") == 7


def test_the_folders_of_the_config_in_use_come_first_also_for_a_module_that_is_loaded(folder: Path):
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "etude_test_agent.py").write_text(f"here = {name!r}\n")
        make_importable(folder / name)
        assert import_object("etude_test_agent:here") == name
        loaded = sys.modules["etude_test_agent"]
        assert import_object("etude_test_agent:here") == name
        assert sys.modules["etude_test_agent"] is loaded


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_agent", r"'my_agent' .*import path; write package.module:name"),
        ("my_agnt:play", r"no module 'my_agnt' in .* packages; .*'my_agent'\?"),
        ("my_agent.py:play", r"no module 'my_agent.py' in .*; did you mean 'my_agent'\?"),
        ("zzz.y:play", r"no module 'zzz' in .* packages$"),
        ("my_agent:pley", r"has no 'pley'; did you mean 'my_agent:play'\?"),
        ("my_agent:zzz", r"has no 'zzz'$"),
        ("broken:f", r"broken.py:2: ValueError: no$"),
        ("wrong:f", r"wrong.py:1: SyntaxError: "),
        ("needs:f", r"needs.py:1: ModuleNotFoundError: No module named 'zzz'$"),
        ("script:f", r"script.py:2: SystemExit: usage: script$"),
        ("silent:f", r"silent.py:1: RuntimeError: no message$"),
        ("busy:f", r"'busy' .* runs etude.resume; .*`if __name__"),
    ],
)
def test_what_cannot_be_imported_is_explained(folder: Path, path: str, message: str):
    (folder / "broken.py").write_text("\nraise ValueError('no\\nmore')\n")
    (folder / "wrong.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import zzz\n")
    (folder / "script.py").write_text("import sys\nsys.exit('usage: script')\n")
    (folder / "silent.py").write_text("raise RuntimeError\n")
    (folder / "busy.py").write_text("import etude\netude.resume('r')\n")
    make_importable(folder)
    with pytest.raises(RequestError, match=message):
        import_object(path)


def test_an_error_of_ours_in_the_users_module_is_told_as_it_is(folder: Path):
    (folder / "agents.py").write_text("from etude import RequestError\nraise RequestError('too long')\n")
    make_importable(folder)
    with pytest.raises(RequestError, match=r"^too long$"):
        import_object("agents:f")
