"""The builder, which builds each component of a config once."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from etude.config import registry
from etude.config.component import ComponentConfig, DatasetConfig
from etude.config.import_path import user_code, where_defined, where_raised
from etude.config.load import parse_components
from etude.config.registry import KINDS, Kind
from etude.config.schema import Config
from etude.core.data_model import name_type
from etude.core.episode import ToolSet, ToolSource
from etude.core.errors import EtudeError, RequestError, StoreError, alternatives
from etude.core.interfaces import Dataset, Engine, Evaluator, Run
from etude.core.json_text import exact_value
from etude.core.keys import content_hash

_LOG = logging.getLogger("etude.config")


class Builder:
    """Builds components on first use, and closes them in reverse order.

    Use it as `async with Builder(config) as builder:`. A component is built once. The generator that made it
    continues after its `yield` when the block is left.
    """

    target: str | None = None
    """The target that components are built for; None if there is one for the whole run."""
    _user = ""
    """The component that uses what is built here. Each component is built with a builder of its own."""

    def __init__(
        self,
        config: Config,
        run: Run | None = None,
        given: Mapping[str, Engine] | None = None,
        wrap_llm: Callable[[str, Engine], Engine] | None = None,
    ) -> None:
        """Set up a builder. The models in `given`, by their names in `llms`, are used and not built.

        `wrap_llm` wraps each model that is built, before anyone gets it.
        """
        self.config = config
        self.run = run
        """The run that components are built for; None outside of a run."""
        self._wrap_llm = wrap_llm
        self._exits = contextlib.AsyncExitStack()
        self._components: dict[str, Any] = {f"llms.{name}": each for name, each in (given or {}).items()}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._awaited: defaultdict[str, list[str]] = defaultdict(list)
        """For each component that is being built, the components that it waits for."""

    async def __aenter__(self) -> Self:
        await self._exits.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._components.clear()
        return await self._exits.__aexit__(kind, error, trace)

    @property
    def checkpoints(self) -> Path:
        """The folder for versions of the trained model. Raises RequestError outside of a run."""
        if self.run is None:
            raise RequestError("training needs a run folder")
        return self.run.checkpoints

    async def get(self, kind: Kind, name: str) -> Any:
        """Return a component by name. Raises RequestError if there is none, or it cannot be built."""
        entries = self.config.section(kind)
        if name not in entries:
            raise RequestError(f"there is no {KINDS[kind].noun} '{name}'" + alternatives(name, entries))
        return await self._build_once(kind, name, entries[name])

    async def get_llm(self, name: str) -> Engine:
        """Return the engine of an entry of `llms`."""
        engine: Engine = await self.get("llms", name)
        return engine

    async def get_tools(self, name: str) -> ToolSet:
        """Return an entry of `tools`."""
        source: ToolSource = await self.get("tools", name)
        return self.config.tools[name].tool_set(name, source, f"tools.{name}")

    async def get_evaluator(self, name: str) -> Evaluator:
        """Return an entry of `eval.evaluators`."""
        evaluator: Evaluator = await self.get("evaluators", name)
        return evaluator

    async def get_trajectory_builder(self, name: str) -> Any:
        """Return an entry of `trajectory_builders`. Raises ConfigError if the config could not be trained."""
        self.config.check_training()
        return await self._get_part("trajectory_builders", name, "TrajectoryBuilder")

    async def get_trainer_adapter(self, name: str) -> Any:
        """Return an entry of `trainer_adapters`."""
        return await self._get_part("trainer_adapters", name, "TrainerAdapter")

    async def get_trainer(self, name: str) -> Any:
        """Return an entry of `trainers`. Its caller binds its builder and adapter."""
        return await self._get_part("trainers", name, "Trainer")

    async def _get_part(self, kind: Kind, name: str, interface: str) -> Any:
        """Return a component by name. Raises EtudeError if it lacks the interface, which is known only by
        name, since it is defined in a higher package, or if the interface's `__init__` was not called."""
        part = await self.get(kind, name)
        if any(base.__name__ == interface for base in type(part).__mro__):
            if not hasattr(part, "run_config"):
                own = type(part).__init__
                raise EtudeError(f"{where_defined(own)}: {own.__qualname__} needs super().__init__(config)")
            return part
        registration = registry.lookup(kind, self.config.section(kind)[name].type_name)
        raise EtudeError(
            f"{where_defined(registration.factory)}: what builds {kind}.{name} yielded {name_type(part)}, "
            f"and an object of a subclass of etude.{interface} is expected"
        )

    async def get_workflow(self) -> Any:
        """Return the agent, an `etude.rollout.workflow.Workflow`. Raises RequestError if there is none."""
        if self.config.workflow is None:
            raise RequestError("the config has no 'workflow'; add your agent: `workflow: my_agent:play`")
        return await self._build_once("workflow", "workflow", self.config.workflow)

    async def get_cluster(self) -> Any:
        """Return the `etude.processes.pool.Cluster` of the `cluster` block; None if there is none."""
        cluster = self.config.cluster
        return None if cluster is None else await self._build_once("cluster", "cluster", cluster)

    async def get_trackers(self) -> list[Any]:
        """Return the `etude.Tracker` of each entry of `report`."""
        trackers = enumerate(self.config.report)
        return [await self._build_once("trackers", str(index), config) for index, config in trackers]

    async def get_dataset(self, source: DatasetConfig | Path | str | None = None) -> Dataset:
        """Return the examples of a dataset config, or of a file; by default `eval.general.dataset`."""
        source = source or self.config.eval.general.dataset
        if source is None:
            raise RequestError("the config has no dataset; add `eval: {general: {dataset: train.jsonl}}`")
        if not isinstance(source, DatasetConfig):
            made: list[DatasetConfig] = parse_components("datasets", {("dataset",): str(source)}, self.config)
            source = made[0]
        # Rows that a program passed as an object are not in the dump.
        live = [id(getattr(source, key)) for key, each in type(source).model_fields.items() if each.exclude]
        name = content_hash([source.type_name, source.model_dump(mode="json", fallback=exact_value), live])
        dataset: Dataset = await self._build_once("datasets", name, source)
        return dataset

    async def _build_once(self, kind: Kind, name: str, config: ComponentConfig, user: str = "") -> Any:
        """Return a component, and build it if it is not built yet. Concurrent callers wait for it.

        Raises RequestError if it waits for the component that needs it, directly or not.
        """
        key, user = f"{kind}.{name}", user or self._user
        if key not in self._components and (path := self._waiting_path(key, user)):
            circle = " -> ".join((*path, key))
            raise RequestError(f"components depend on each other in a circle: {circle}")
        self._awaited[user].append(key)
        try:
            async with self._locks[key]:
                if key not in self._components:
                    self._components[key] = await self._build(key, kind, config)
        finally:
            self._awaited[user].remove(key)
        return self._components[key]

    def _waiting_path(self, waiting: str, awaited: str) -> list[str]:
        """Return the components through which one waits for another, both included; empty if it does not."""
        if waiting == awaited:
            return [awaited]
        paths = (self._waiting_path(each, awaited) for each in self._awaited[waiting])
        return next(([waiting, *path] for path in paths if path), [])

    async def _build(self, key: str, kind: Kind, config: ComponentConfig) -> Any:
        registration = registry.lookup(kind, config.type_name)
        user_builder = copy(self)
        user_builder._user = key
        context = contextlib.asynccontextmanager(registration.factory)(config, user_builder)
        with user_code(EtudeError, f"cannot build {key} (_type: {registration.name})"):
            try:
                component = await context.__aenter__()
            except RuntimeError as error:
                if not isinstance(error.__context__, StopAsyncIteration):
                    raise
                component = None  # The generator ended before a `yield`.
            else:
                self._exits.push_async_exit(partial(_close, context, key))
            if component is None:
                raise EtudeError(f"{where_defined(registration.factory)}: what builds {key} yielded nothing")
            wrap = self._wrap_llm if kind == "llms" else None
            return component if wrap is None else wrap(key.removeprefix("llms."), component)


async def _close(component: Any, key: str, *error: Any) -> None:
    """Leave a component's context. Its error undoes no work: it is told, unless it is a StoreError."""
    try:
        await component.__aexit__(*error)
    except StoreError:
        raise
    except Exception as problem:  # noqa: BLE001  user code
        _LOG.warning("closing %s failed: %s", key, where_raised(problem))


class TargetBuilder(Builder):
    """Provides a target's own trajectory builder, adapter and trainer, and the run's models and evaluators.

    `config.finetuning` is the block as if the target were the only one, so a component need not know about
    other targets. Components built here are closed with the run's builder.
    """

    def __init__(self, builder: Builder, target: str) -> None:
        finetuning = builder.config.finetuning.for_target(target)
        super().__init__(builder.config.model_copy(update={"finetuning": finetuning}), builder.run)
        self.target = target
        self._shared = builder
        self._exits = builder._exits

    @property
    def checkpoints(self) -> Path:
        """The folder for this target's versions. Several models never share one."""
        # The name must stay within the parent folder, for any model name.
        name = quote(str(self.config.finetuning.target_model), safe=" +@=")
        folder = super().checkpoints / ("%2E" + name[1:] if name.startswith(".") else name)
        folder.mkdir(0o700, exist_ok=True)
        return folder

    async def _build_once(self, kind: Kind, name: str, config: ComponentConfig, user: str = "") -> Any:
        if kind not in ("trajectory_builders", "trainer_adapters", "trainers"):
            return await self._shared._build_once(kind, name, config, self._user)
        # A copy, because trainers write the target's reward function into the configs.
        return await super()._build_once(kind, name, config.model_copy(deep=True))
