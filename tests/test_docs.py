"""The documentation is true: its links lead somewhere, its programs run, its reference is up to date.

A fenced block says what is to be done with it after its language:

    ```python file=my_agent.py      the content of a file; a second block of the same name continues it
    ```python file=… with=other.md  the files of that page, in the same folder, are there too
    ```python runnable              run by Python, in the folder with the page's files
    ```console runnable             lines that start with `$ ` are run by the shell there, as one script
    ```python shows=my_agent.py     a part of a file that is there by then

Blocks of a page are taken from top to bottom; one inside an HTML comment is run and not shown. Other blocks
are for reading only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from etude.cli.app import app
from etude.cluster.config import RayConfig
from etude.config import registry
from etude.config.load import parse_config
from etude.config.reference import render_reference
from etude.config.registry import Kind, lookup, names
from etude.core.errors import ConfigError
from tests.forked import program

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    orders: dict[str, str]
    """The attributes after the language: `{"file": "my_agent.py"}`, `{"runnable": ""}`."""
    text: str
    line: int


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        language, *orders = match["info"].split() or [""]
        pairs = dict(order.partition("=")[::2] for order in orders)
        yield Block(language, pairs, match["text"], text.count("\n", 0, match.start()) + 1)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


WITH_PROGRAMS = [page for page in PAGES if any("runnable" in block.orders for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    broken = []
    for match in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        address, _, anchor = match["target"].partition("#")
        if ":" in address:
            continue
        target = (page.parent / address).resolve() if address else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(match["target"])
    assert not broken


def test_there_are_programs_to_run():
    assert {*(f"docs/{name}" for name in OWN_PARTS), "docs/first-agent.md"} <= {
        name_of(page) for page in WITH_PROGRAMS
    }


LONG = {"docs/protocols.md", "docs/from-a-log.md"}
"""Pages whose programs take half a minute: they train."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if name_of(page) in LONG else page for page in WITH_PROGRAMS],
    ids=name_of,
)
def test_programs_run(page: Path, tmp_path: Path):
    for block in blocks_of(page):
        write_file(block, page, tmp_path)
        if "shows" in block.orders:
            assert block.text in (tmp_path / block.orders["shows"]).read_text(encoding="utf-8"), block.line
        if "runnable" in block.orders:
            run(command_of(block), tmp_path, f"{name_of(page)}:{block.line}")


OWN_PARTS = ["extending.md", "own-backend.md", "own-builder.md", "own-trainer.md"]


@pytest.mark.parametrize("name", OWN_PARTS)
def test_own_parts_are_short_and_import_from_etude_alone(name: str):
    programs = [
        block
        for block in blocks_of(ROOT / "docs" / name)
        if block.language == "python" and "file" in block.orders
    ]
    assert programs
    for block in programs:
        assert block.text.count("\n") < 80, block.orders["file"]
        modules = re.findall(r"^(?:from|import) (etude[\w.]*)", block.text, flags=re.MULTILINE)
        assert set(modules) <= {"etude"}


def test_the_page_on_extending_names_every_type_that_is_shipped():
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = {
        row.split("|")[1].strip(): row.split("|")[4] for row in page.splitlines() if row.startswith("| `")
    }
    assert shown.keys() == {"`etude.TrajectoryBuilder`", "`etude.TrainerAdapter`", "`etude.Trainer`"}
    kinds: dict[str, Kind] = {
        "`etude.TrajectoryBuilder`": "trajectory_builders",
        "`etude.TrainerAdapter`": "trainer_adapters",
        "`etude.Trainer`": "trainers",
    }
    for interface, kind in kinds.items():
        shipped = {
            name for name in names(kind) if lookup(kind, name).config_type.__module__.startswith("etude.")
        }
        assert set(re.findall(r"`(\w+)`", shown[interface])) == shipped


def test_the_program_of_the_readme_fits_its_config(tmp_path: Path):
    for block in blocks_of(ROOT / "README.md"):
        if "file" in block.orders:
            (tmp_path / block.orders["file"]).write_text(block.text, encoding="utf-8")
    row = '{"id": "1", "question": "What is 1 + 1?", "answer": "2"}\n'
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(row, encoding="utf-8")
    make_tiny = """if True:
        from pathlib import Path
        from etude.models.tiny import build_policy, build_tokenizer
        build_policy(build_tokenizer(["What is 1 + 1?"]), seed=0).export(Path("tiny"))"""
    run(["python", "-c", make_tiny], tmp_path, "README.md")
    run(["bash", "-ec", "etude check config.yml -o llms.policy.model=tiny"], tmp_path, "README.md")


def fragments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Pieces of configs that are shown: where, and what."""
    for page in PAGES:
        for block in blocks_of(page):
            data = yaml.safe_load(block.text) if block.language == "yaml" else None
            if isinstance(data, dict):
                yield f"{name_of(page)}:{block.line}", data


@pytest.mark.parametrize("where, data", [pytest.param(*one, id=one[0]) for one in fragments()])
def test_keys_of_configs_that_are_shown_are_known(where: str, data: dict[str, Any]):
    if "dataset" in data:
        data = {"eval": {"general": {"dataset": data.pop("dataset")}}, **data}
    try:
        parse_config(data)
    except ConfigError as error:
        # What a piece lacks, and what it imports from elsewhere, is no fault of it.
        wrong = [line for line in str(error).splitlines() if "is not known" in line or "expected" in line]
        assert not wrong


def write_file(block: Block, page: Path, folder: Path) -> None:
    """Write the block's file, where it is one, after those of the page that it goes with."""
    if "with" in block.orders:
        other = page.parent / block.orders["with"]
        for needed in blocks_of(other):
            write_file(needed, other, folder)
    if "file" in block.orders:
        path = folder / block.orders["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(before + block.text, encoding="utf-8")


def command_of(block: Block) -> list[str]:
    if block.language == "python":
        return ["python", "-c", block.text]
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    return ["bash", "-ec", "\n".join(lines)]


def run(command: list[str], folder: Path, where: str) -> None:
    path = os.pathsep.join([str(program()), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path, "COLUMNS": "110"}
    )
    assert result.returncode == 0, f"{where}: {command[-1]}\n{result.stdout}\n{result.stderr}"


def test_the_config_reference_is_up_to_date():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == render_reference(), "docs/config.md is out of date; type: make docs"


def test_nothing_says_to_install_what_is_not_published():
    """Where Etude came from, `etude.core.errors` knows; pages install from a checkout."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    files = [*pages, *(ROOT / "docs" / "manifests").iterdir(), *(ROOT / "src").rglob("*.py")]
    saying = [name_of(file) for file in files if re.search(r"pip install '?etude\b", file.read_text())]
    assert saying == []


def test_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for page in PAGES
        for group in re.findall(r"'\.\[([\w,-]+)\]'", page.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert {"local", "server", "ray"} <= named <= {*project["optional-dependencies"]}


def test_the_python_that_the_readme_asks_for_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {oldest} or newer" in (ROOT / name).read_text(encoding="utf-8")


def test_commands_that_are_shown_exist_with_their_options():
    """Of each line `$ etude …` on a page."""
    known = dict(commands(typer.main.get_command(app)))
    wrong = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        for line in re.findall(r"^\$ (etude .*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            words = shlex.split(line.rstrip("\\"), comments=True)
            words = words[: words.index("--")] if "--" in words else words
            if words[1] in ("COMMAND", "--help", "--version"):
                continue
            name = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known), None)
            own = (
                {option for each in known[name].params for option in each.opts + each.secondary_opts}
                if name
                else set()
            )
            of_all = {"--help", "--version", "--debug", "--log-level"}
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            if name is None or options - own - of_all:
                wrong.append(f"{name_of(page)}: {line}")
    assert not wrong


def test_what_is_said_to_be_lacking_is_not_there():
    """The README says what several machines and GPUs were tested with, and how fast a whole step is."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "learners" in RayConfig.model_fields  # Training over several machines.
    assert "does not have: training" not in readme and "[several machines](docs/cluster.md)" in readme
    steps = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split("### A whole step")[1]
    claim = readme.split("**A whole step")[1].split("\n\n")[0]
    figures = re.findall(r"(\d[\d.]*) s\b|TRL takes ([\d.]*\d)|against ([\d.]*\d)|TRL's (\d+)", claim)
    numbers = ["".join(each) for each in figures]
    assert len(numbers) >= 6
    assert {*numbers} <= {*re.findall(r"[\d.]*\d", steps)}


@pytest.mark.parametrize(
    ("kind", "page"),
    [("trackers", "trackers.md"), ("trainer_adapters", "backends.md"), ("trajectory_builders", "methods.md")],
)
def test_a_page_names_every_type_that_ships(kind: Kind, page: str):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shipped = {
        name for name in names(kind) if lookup(kind, name).config_type.__module__.startswith("etude.")
    } - {
        "live"  # Of a program's own objects.
    }
    assert {name for name in shipped if not re.search(rf"\b{re.escape(name)}\b", text)} == set()


def test_the_make_targets_that_are_named_exist():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    for page in PAGES:
        named = re.findall(
            r"(?:`|\$ )make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        assert set(named) <= targets, name_of(page)


def test_no_page_names_a_place_of_one_machine():
    for page in PAGES:
        found = re.findall(r"(?<![\w.])/(?:home|root|work|Users)/\S*", page.read_text(encoding="utf-8"))
        assert not found, name_of(page)


def commands(group: Any, name: str = "etude") -> Iterator[tuple[str, Any]]:
    """All commands of the program, by the words that one types."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def test_the_page_of_the_command_line_has_every_command_and_option():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    missing = []
    for name, command in commands(typer.main.get_command(app)):
        options = [option for parameter in command.params for option in parameter.opts if option[:2] == "--"]
        missing += [f"{name} {option}" for option in options if f"`{option}" not in page]
        missing += [name] if f"`{name}" not in page and f"# {name}\n" not in page else []
    assert not missing


def table_rows(page: Path) -> Iterator[list[str]]:
    """The tables of a page, outside of fenced blocks: their lines, as they stand together."""
    rows: list[str] = []
    for line in [*_FENCE.sub("", page.read_text(encoding="utf-8")).splitlines(), ""]:
        if line.lstrip().startswith("|"):
            rows.append(line.strip())
        elif rows:
            yield rows
            rows = []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_whole(page: Path):
    """A heading, a rule, and rows with as many cells; nothing has come off a table."""
    for rows in table_rows(page):
        assert len(rows) > 1 and re.fullmatch(r"\|(:?-+:?\|)+", rows[1].replace(" ", "")), rows[0]
        assert all(row.endswith("|") for row in rows), rows[0]
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert set(cells) == {cells[0]}, [row for row, n in zip(rows, cells, strict=True) if n != cells[0]]


def test_the_page_on_extending_lists_what_ships():
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for interface, kind in (
        ("TrajectoryBuilder", "trajectory_builders"),
        ("TrainerAdapter", "trainer_adapters"),
        ("Trainer", "trainers"),
    ):
        (row,) = re.findall(rf"^\| `etude\.{interface}` \|.*$", page, flags=re.MULTILINE)
        shipped = {
            name
            for name in registry.names(kind)
            if registry.lookup(kind, name).config_type.__module__.partition(".")[0] == "etude"
        }
        assert set(re.findall(r"`(\w+)`", row.split("|")[4])) == shipped


def test_the_time_of_the_demo_is_the_same_everywhere():
    told = (
        "The calculator takes 28 to 31 s on two idle cores; the first run on such a machine took 73 s, and "
        "one on a busy machine 199 s."
    )
    help_text = typer.main.get_command(app).commands["demo"].help  # type: ignore[attr-defined]
    pages = [ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "examples" / "calculator" / "README.md"]
    for text in (help_text, *(page.read_text(encoding="utf-8") for page in pages)):
        assert told in " ".join(text.split())
