"""From a config file of NVIDIA's NeMo Agent Toolkit to a project of Etude's."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import registry
from etude.config.document import dump, read_document
from etude.config.registry import Kind
from etude.core.errors import RequestError
from etude.integrations.nat.import_blocks import adapter_of, builder_of, eval_of, finetuning_of, trainer_of
from etude.integrations.nat.import_notes import Note, Notes
from etude.integrations.nat.llms import llms_of, run_here, serve_by_art
from etude.store.files import write_new_files

Json = dict[str, Any]

_BLOCKS = (
    "llms",
    "workflow",
    "eval",
    "trajectory_builders",
    "trainer_adapters",
    "trainers",
    "finetuning",
)
_HEAD = "# From {source}, by `etude import-nat`. Every key is explained in the config reference.\n\n"
_WORKFLOW = "agent:play"

_AGENT = '''\
"""The agent and the scores of {source}. Put your own code in; what is here runs and knows little."""

import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    """One run of the agent on one example: for now, the question and the model's answer to it.

    Code that works with an OpenAI client keeps doing so: `client = episode.openai()`.
    """
    reply = await episode.chat([{{"role": "user", "content": str(example.inputs["question"])}}])
    return reply.text
'''

_EVALUATOR = '''

@etude.evaluator
def {name}(example: etude.Example, output: str) -> float:
    """In place of the evaluator {original}: 1.0 for exactly the expected answer."""
    return float(output.strip() == str(example.expected).strip())
'''

_TAKEN = {"play", "etude", "float", "str"}


@dataclass(frozen=True, slots=True)
class Imported:
    """The project that an import makes."""

    config: Json
    agent: str | None
    """The content of agent.py; None where none is needed."""
    notes: list[Note]


def import_nat(path: Path, *, workflow: str | None = None, model: str | None = None) -> Imported:
    """Read a toolkit's config. `workflow` is the agent as `module:function`, where it is written already.

    `model` is a folder or hub name for a model that is to be trained in this process. Raises ConfigError
    when the file cannot be read, RequestError when it has no models.
    """
    registry.load_entry_points()
    notes = Notes(read_document(path))
    if not notes.block("llms"):
        raise RequestError(f"{path} has no `llms`: there is no model to sample from")
    names = function_names(map(str, notes.block("eval", "evaluators")))
    _note_workflow(workflow, notes)
    llms = llms_of(notes)
    folder = path.absolute().parent
    config: Json = {
        "llms": llms,
        "workflow": workflow or _WORKFLOW,
        "eval": eval_of({name: f"agent:{plain}" for name, plain in names.items()}, folder, notes),
        **_components("trajectory_builders", builder_of, notes),
        **_components("trainer_adapters", adapter_of, notes),
        **_components("trainers", trainer_of, notes),
    }
    if notes.block("finetuning"):
        config["finetuning"] = finetuning_of(llms, _runs(notes), folder, notes)
        _fit_target(config, model, notes)
    message = "left out: not part of a config here; what the agent needs of it, it builds itself"
    notes.unmapped((), notes.document.data, _BLOCKS, message)
    agent = agent_file(path.name, names) if workflow is None or names else None
    return Imported(config, agent, sorted(notes.made, key=lambda note: note.line or 0))


def write_project(imported: Imported, source: Path, folder: Path) -> list[Path]:
    """Write config.yml and agent.py into `folder`; what was written.

    Raises RequestError when one of them is there already, StoreError when they cannot be written.
    """
    contents = {"config.yml": _HEAD.format(source=source.name) + dump(imported.config)}
    contents |= {} if imported.agent is None else {"agent.py": imported.agent}
    return write_new_files(folder, contents)


def _components(block: Kind, of: Callable[[str, Notes], Json], notes: Notes) -> Json:
    """A block of components; those of types that are installed for Etude stay as they are."""
    installed = registry.names(block)
    components: Json = {}
    for name in notes.block(block):
        written = notes.block(block, name)
        components[name] = written if written.get("_type") in installed else of(name, notes)
    return {block: components} if components else {}


def _note_workflow(workflow: str | None, notes: Notes) -> None:
    written = notes.document.data.get("workflow")
    kind = written.get("_type") if isinstance(written, dict) else written
    if workflow is None:
        notes.add(
            ("workflow",),
            f"the workflow `{kind}` is code of the toolkit: write it as the function {_WORKFLOW}, which for "
            "now puts the question to the model",
        )


def _runs(notes: Notes) -> int | None:
    """How often the Customizer's trainer collects, in place of `num_epochs`."""
    trainers = notes.block("trainers")
    name = notes.name("finetuning", "trainer") or next(iter(trainers), None)
    data = notes.block("trainers", str(name)) if name in trainers else {}
    if str(data.get("_type")).endswith("nemo_customizer_trainer"):
        return int(notes.number("trainers", str(name), "num_runs") or 1)
    return None


def _fit_target(config: Json, model: str | None, notes: Notes) -> None:
    """Have the model that is trained sampled from where it is trained."""
    llms, finetuning = config["llms"], config["finetuning"]
    adapters = config.get("trainer_adapters", {})
    adapter = adapters.get(notes.name("finetuning", "trainer_adapter") or next(iter(adapters), None))
    name = finetuning.get("target_model") or next(iter(llms))
    if "target_model" not in finetuning and len(llms) > 1:
        finetuning["target_model"] = name
        notes.add(
            ("finetuning",), f"the toolkit does not say which model is trained; taken to be llms.{name}"
        )
    before = llms[name]
    if adapter is not None and adapter["_type"] == "openpipe_art":
        llms[name] = serve_by_art(before, adapter)
        if llms[name]["model_name"] != before["model_name"]:
            notes.add(
                ("llms", name, "model_name"),
                f"became '{llms[name]['model_name']}', the ART server's name for what it trains",
            )
    elif adapter is None or adapter["_type"] == "local":
        llms[name] = run_here(before, model)
        notes.add(
            ("llms", name),
            "became `_type: local`: it is trained here; `--model` says from which folder or name on the hub",
        )


def function_names(names: Iterable[str]) -> dict[str, str]:
    """A Python name for each of the evaluators, no two alike."""
    functions: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not plain.isidentifier() or keyword.iskeyword(plain) or plain in _TAKEN:
            plain = f"evaluator_{plain}"
        while plain in functions.values():
            plain += "_"
        functions[name] = plain
    return functions


def agent_file(source: str, functions: dict[str, str]) -> str:
    """The content of the file. `functions` has a Python name for each evaluator."""
    scores = [_EVALUATOR.format(name=plain, original=ascii(name)) for name, plain in functions.items()]
    return _AGENT.format(source=ascii(source)) + "".join(scores)
