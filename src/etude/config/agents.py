"""Names of agents in a config, held against the workflow's own: before anything is built or sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etude.config.component import ComponentConfig
from etude.config.document import KeyPath, dotted
from etude.config.nearest import alternatives
from etude.config.problems import Problems
from etude.config.references import RefersToAgent, marked
from etude.config.schema import Config
from etude.config.slots import Slot
from etude.core.errors import EtudeError

EVERY = "*"


def check_agents(
    config: Config,
    components: Mapping[KeyPath, ComponentConfig],
    problems: Problems,
    in_training: Problems,
) -> None:
    """Note names of agents that the workflow does not have, and targets that none of them samples from.

    What matters to training alone goes into `in_training`: a config may also be evaluated, with another
    protocol than it trains. Nothing is said where the workflow cannot tell who its agents are.
    """
    try:
        agents = config.workflow.agents() if config.workflow is not None else None
    except EtudeError:
        return  # What is wrong with the workflow is told when it is built.
    if agents is None:
        return
    builders = _builders(config)
    for path, component in components.items():
        if path[0] == "trajectory_builders" and path[1] not in builders:
            continue
        noted = in_training if path[0] == "trajectory_builders" else problems
        for key, below, _, name in marked(Slot(type(component)), component, path, RefersToAgent):
            _check((*key, *below), name, agents, noted)
    _check_targets(config, agents, in_training)


def _builders(config: Config) -> set[str | None]:
    """The trajectory builders that training would use."""
    finetuning = config.finetuning
    return {finetuning.trajectory_builder} | {
        target.trajectory_builder for target in finetuning.targets.values()
    }


def _check(path: KeyPath, name: str, agents: Mapping[str, str | None], problems: Problems) -> None:
    if name not in agents:
        problems.add(path, f"{dotted(path)}: the workflow has no agent '{name}'" + alternatives(name, agents))


def _check_targets(config: Config, agents: Mapping[str, str | None], problems: Problems) -> None:
    finetuning = config.finetuning
    shared = finetuning.target_functions if "target_functions" in finetuning.model_fields_set else []
    _check_functions(("finetuning",), shared, agents, problems)
    if not finetuning.targets:
        if finetuning.enabled and finetuning.target_model is not None:
            functions = finetuning.target_functions
            _check_model(("finetuning", "target_model"), finetuning.target_model, functions, agents, problems)
        return
    for name, target in finetuning.targets.items():
        path: KeyPath = ("finetuning", "targets", name)
        functions = target.target_functions or [EVERY]
        if functions != shared:
            _check_functions(path, functions, agents, problems)
        if finetuning.enabled and not target.frozen:
            _check_model(path, str(target.model), functions, agents, problems)


def _check_functions(
    path: KeyPath, functions: Sequence[str], agents: Mapping[str, str | None], problems: Problems
) -> None:
    for number, name in enumerate(functions):
        if name != EVERY:
            _check((*path, "target_functions", number), name, agents, problems)


def _check_model(
    path: KeyPath,
    model: str,
    functions: Sequence[str],
    agents: Mapping[str, str | None],
    problems: Problems,
) -> None:
    """Note a model whose calls are to be trained on, and that no agent that is meant samples from."""
    meant = {agent: used for agent, used in agents.items() if {EVERY, agent} & set(functions)}
    if meant and not any(used in (None, model) for used in meant.values()):
        uses = ", ".join(f"{agent}: {used}" for agent, used in meant.items())
        problems.add(
            path,
            f"{dotted(path)}: no agent samples from '{model}', so that nothing would be trained ({uses}); "
            "name it in 'workflow.policies', or train another model",
        )
