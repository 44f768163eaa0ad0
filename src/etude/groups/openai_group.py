"""The model group with Neural Interactive Proofs' interface to OpenAI's API and the language-model server."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

from etude.backends.lm_client import LanguageModelClient
from etude.backends.lm_server import LmServerAdapter
from etude.backends.openai_api import TrainingJobNotFoundClientError
from etude.backends.openai_jobs import OpenAiJobs
from etude.core.conversion import TrajectoryCollection
from etude.core.errors import CapabilityError, TrainingError
from etude.groups.shared import JobResult, SharedModelGroup, SharedModelGroupState

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob

OpenAiSharedModelGroupState = SharedModelGroupState

ClientType = Literal["openai", "lm_server", "adapter", "none"]


class OpenAiSharedModelGroup(SharedModelGroup):
    """A group whose jobs go to the OpenAI API, to a language-model server, or to any other adapter."""

    @property
    def training_client_type(self) -> ClientType:
        """The kind of backend that jobs go to: OpenAI, a language-model server, another adapter, or none."""
        adapter = self.jobs.adapter
        if isinstance(adapter, LmServerAdapter):
            return "lm_server"
        if isinstance(adapter, OpenAiJobs):
            return "openai"
        return "adapter" if adapter.capabilities().methods else "none"

    @property
    def language_model_client(self) -> LanguageModelClient:
        """The client that controls the server's engine. Raises CapabilityError if there is no server."""
        if not isinstance(self.jobs.adapter, LmServerAdapter):
            raise CapabilityError(f"group '{self.group_name}' does not train at a language-model server")
        return self.jobs.adapter.server

    @cached_property
    def openai_client(self) -> AsyncOpenAI:
        """The client of the OpenAI API: the adapter's, or one with the key from the environment."""
        if isinstance(self.jobs.adapter, OpenAiJobs):
            return self.jobs.adapter.client
        from openai import AsyncOpenAI

        return AsyncOpenAI()

    async def train(self) -> None:
        """Unload the engine of the language-model server, if its adapter sets `free_engine`."""
        adapter = self.jobs.adapter
        trains = self.is_trainable and not self.settings.dry_run
        if trains and isinstance(adapter, LmServerAdapter) and adapter.adapter_config.free_engine:
            await adapter.put_engine_away()

    async def eval(self) -> None:
        """Make the engine sample from the current model."""
        if isinstance(self.jobs.adapter, LmServerAdapter):
            await self.jobs.adapter.bring_engine_back()
        await super().eval()

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109  # the reference's name
        """Wait until the backend answers. For a language-model server, check its version too.

        Raises TimeoutError after `timeout` seconds, ServerVersionError for another major version.
        """
        if isinstance(self.jobs.adapter, LmServerAdapter):
            await self.jobs.adapter.server.wait_for_ready(timeout)
            await self._take_up()
        else:
            await super().wait_for_ready(timeout)

    async def _submit(self, data: TrajectoryCollection) -> JobResult:
        match self.training_client_type:
            case "openai":
                return await self._make_fine_tune_api_call_openai(data)
            case "lm_server":
                return await self._make_fine_tune_api_call_lm_server(data)
        return await super()._submit(data)

    async def _make_fine_tune_api_call_openai(self, fine_tune_dataset: TrajectoryCollection) -> JobResult:
        """Make the job at OpenAI. Raises CapabilityError for a method that the API does not support."""
        return await self.jobs.submit(fine_tune_dataset)

    async def _make_fine_tune_api_call_lm_server(self, fine_tune_dataset: TrajectoryCollection) -> JobResult:
        """Make the job at the language-model server."""
        return await self.jobs.submit(fine_tune_dataset)

    async def _get_openai_fine_tune_job(self) -> FineTuningJob:
        """Return the job as the OpenAI API reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("openai")

    async def _get_lm_server_fine_tune_job(self) -> FineTuningJob:
        """Return the job as the language-model server reports it. Raises TrainingJobNotFoundClientError."""
        return await self._fine_tune_job("lm_server")

    async def _fine_tune_job(self, client: ClientType) -> FineTuningJob:
        ref, adapter = self._state.fine_tune_job, self.jobs.adapter
        if ref is None:
            raise TrainingJobNotFoundClientError(None)
        if not isinstance(adapter, OpenAiJobs) or self.training_client_type != client:
            raise TrainingError(f"group '{self.group_name}' does not train through '{client}'")
        return await adapter.job(ref)
