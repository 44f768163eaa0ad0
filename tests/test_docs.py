"""The documentation is true: links, programs and reference; and the public names are all there."""

import ast
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import ValidationError
from web.figures import PAGES as WITH_FIGURES
from web.figures import render_figures

import etude
from etude.cli.app import app
from etude.config.load import parse_config
from etude.config.registry import Kind, lookup, names
from etude.core.errors import ConfigError
from etude.core.evaluation import EvaluationRunOutput
from tests.cli.projects import scripted_project
from tests.config.reference import render_reference
from tests.forked import programs

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs/", "benchmarks/", "examples/**/", "src/etude/cli/")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))

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


def find_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        language, *orders = match["info"].split() or [""]
        pairs = dict(order.partition("=")[::2] for order in orders)
        yield Block(language, pairs, match["text"], text.count("\n", 0, match.start()) + 1)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@functools.cache
def find_anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


WITH_PROGRAMS = [page for page in PAGES if any("runnable" in block.orders for block in find_blocks(page))]


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for match in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
            address, _, anchor = match["target"].partition("#")
            target = (page.parent / address).resolve() if address else page
            is_anchor = not anchor or target.suffix != ".md" or anchor in find_anchors(target)
            if ":" not in address and not (target.exists() and is_anchor):
                broken.append(f"{page_id(page)}: {match['target']}")
    assert not broken


LONG = {"docs/protocols.md", "docs/data.md", "docs/first-agent.md", "docs/extending.md"}
"""Pages whose programs train, which takes seconds or half a minute."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page_id(page) in LONG else page for page in WITH_PROGRAMS],
    ids=page_id,
)
def test_programs_run(page: Path, tmp_path: Path):
    for block in find_blocks(page):
        write_file(block, page, tmp_path)
        if "shows" in block.orders:
            assert block.text in (tmp_path / block.orders["shows"]).read_text(encoding="utf-8"), block.line
        if "runnable" in block.orders:
            run(make_command(block), tmp_path, f"{page_id(page)}:{block.line}")


def test_the_program_of_the_readme_trains(tmp_path: Path):
    program = next(block.text for block in find_blocks(ROOT / "README.md") if "file" in block.orders)
    changed = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": "tiny",
        "output.strip() == example.expected": "len(output) % 2 == 0",
        "epochs=20": "epochs=1",
    }
    for shown, short in changed.items():
        assert shown in program
        program = program.replace(shown, short)
    row = '{"id": "1", "question": "Which number is larger, 1 or 2?", "answer": "2"}\n'
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(row, encoding="utf-8")
    make_tiny = """from etude.models.tiny import build_policy, build_tokenizer
build_policy(build_tokenizer(["Which number is larger, 1 or 2?"]), seed=0).export("tiny")
"""
    (tmp_path / "my_agent.py").write_text(make_tiny + program, encoding="utf-8")
    run(["python", "my_agent.py"], tmp_path, "README.md")
    assert (tmp_path / "trained" / "model.safetensors").is_file()


def test_keys_of_configs_that_are_shown_are_known():
    shown = [(page, block) for page in PAGES for block in find_blocks(page) if block.language == "yaml"]
    assert len(shown) > 20
    for page, block in shown:
        data = yaml.safe_load(block.text)
        if not isinstance(data, dict):
            continue
        if "dataset" in data:
            data = {"eval": {"general": {"dataset": data.pop("dataset")}}, **data}
        try:
            parse_config(data)
        except ConfigError as error:
            # What a piece lacks, and what it imports from elsewhere, is no fault of it.
            wrong = [line for line in str(error).splitlines() if "is not known" in line or "expected" in line]
            assert not wrong, f"{page_id(page)}:{block.line}"


def write_file(block: Block, page: Path, folder: Path) -> None:
    """Write the block's file, where it is one, after the files of the page that it goes with."""
    if "with" in block.orders:
        other = page.parent / block.orders["with"]
        for needed in find_blocks(other):
            write_file(needed, other, folder)
    if "file" in block.orders:
        path = folder / block.orders["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(before + block.text, encoding="utf-8")


def make_command(block: Block) -> list[str]:
    if block.language == "python":
        return ["python", "-c", block.text]
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    return ["bash", "-ec", "\n".join(lines)]


def run(command: list[str], folder: Path, where: str) -> None:
    path = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path, "COLUMNS": "110"}
    )
    assert result.returncode == 0, f"{where}: {command[-1]}\n{result.stdout}\n{result.stderr}"


GENERATED = {page: functools.partial(render_figures, page) for page in WITH_FIGURES}


@pytest.mark.parametrize(("page", "render"), [("docs/config.md", render_reference), *GENERATED.items()])
def test_a_generated_page_is_up_to_date(page: str, render: Callable[[], str]):
    written = (ROOT / page).read_text(encoding="utf-8")
    assert written == render(), f"{page} is out of date; type: make docs"


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
            parameters = known[name].params if name else []
            own = {option for each in parameters for option in each.opts + each.secondary_opts}
            of_all = {"--help", "--version", "--debug"}
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            if name is None or options - own - of_all:
                wrong.append(f"{page_id(page)}: {line}")
    assert not wrong


PAGE_OF = {"trackers": "operating.md", "trainer_adapters": "backends.md", "trajectory_builders": "methods.md"}


@pytest.mark.parametrize(("kind", "page"), PAGE_OF.items())
def test_a_page_names_every_type_that_ships(kind: Kind, page: str):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shipped = {name for name in names(kind) if lookup(kind, name).config_type.__module__.startswith("etude.")}
    shipped -= {"live"}  # Of a program's own objects.
    assert {name for name in shipped if not re.search(rf"\b{re.escape(name)}\b", text)} == set()


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


def test_every_promise_is_shown_by_tests_that_there_are():
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    promises, _, _ = page.partition("\n## What went")
    rows = re.findall(r"^\| (?!promise ).*$", promises, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        links = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)(?:#(\w+))?\)", row)
        assert links, f"no test is named for: {row[:80]}"
        for file, name in links:
            nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            defined = {getattr(node, "name", None) for node in nodes}
            assert not name or name in defined, f"{file} has no {name}"


def test_what_type_checkers_see_is_what_there_is_and_what_the_page_of_names_has():
    statements = ast.parse(Path(etude.__file__).read_text()).body
    guarded = next(each for each in statements if isinstance(each, ast.If))
    page, seen = (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), {}
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            (alias,) = node.names
            assert alias.asname == alias.name, "a name that is imported by itself is not public to checkers"
            seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
            entry = f"- [`etude.{alias.name}`](../src/{node.module.replace('.', '/')}.py)\n"
            assert entry in page or ("_async" in alias.name and f"`{alias.name}`" in page)
    assert {*seen, "__version__"} == set(etude.__all__) == set(etude.__all__) & {*dir(etude)}
    assert all(getattr(etude, name) is value for name, value in seen.items())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'etude' has no attribute 'nothing'"):
        etude.nothing  # noqa: B018


def test_every_name_of_the_pages_of_the_toolkit_of_neural_interactive_proofs_and_of_art_is_there():
    names = (ROOT / "tests" / "reference_names.txt").read_text(encoding="utf-8").split()
    assert len(names) == 28 and {*names} - {*etude.__all__} == set()


@pytest.mark.parametrize("interface", [etude.Trainer, etude.TrainerAdapter, etude.TrajectoryBuilder])
def test_the_interfaces_cannot_be_made_as_they_are(interface):
    with pytest.raises(TypeError, match="abstract"):
        interface(None)


def test_the_finetuning_block_starts_with_the_toolkits_defaults():
    block = etude.FinetuneConfig()
    assert (block.enabled, block.num_epochs, block.target_functions) == (False, 1, ["<workflow>"])
    learning = block.curriculum_learning
    assert (learning.initial_percentile, learning.increment_percentile) == (0.3, 0.2)
    assert (learning.expansion_interval, learning.min_reward_diff, learning.sort_ascending) == (5, 0.1, False)
    with pytest.raises(ValidationError):
        etude.FinetuneConfig(num_epochs=0)


async def test_an_evaluation_by_the_toolkits_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripted_project(tmp_path)
    held_out = etude.EvaluationRunConfig(config_file="config.yml")
    own = (("finetuning.seed", "3"), ("report", "tests.show.tracker_parts:note"))
    mine = etude.EvaluationRunConfig(config_file="config.yml", dataset="train.jsonl", reps=2, override=own)
    for config, examples, episodes in ((held_out, 6, 6), (mine, 8, 16)):
        output = await etude.EvaluationRun(config).run_and_evaluate()
        assert isinstance(output, EvaluationRunOutput)
        items = output.eval_input.eval_input_items
        assert (len({item.id for item in items}), len(items)) == (examples, episodes)
        assert len(output.scores()["correct"]) == episodes
    assert (tmp_path / "noted.txt").read_text(encoding="utf-8") == "evaluation\n"
