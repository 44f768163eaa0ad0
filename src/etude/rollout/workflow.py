"""The workflow: the user's agent code, or a ready agent that answers a prompt and calls tools."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, overload

from pydantic import Field

from etude.config.component import CHANGEABLE, LlmRef, ReferenceTo, WorkflowConfig
from etude.config.import_path import import_object, order_by_name, where_defined
from etude.config.registry import config_factory, register_workflow
from etude.core.episode import Example, ToolSet
from etude.core.errors import RequestError
from etude.core.message import Message
from etude.rollout.episode import Episode

_PARAMETERS = ("example", "episode")


@dataclass(frozen=True)
class Workflow:
    """Agent code: a sync or async function of an example and an episode that returns the output.

    A sync function runs in a thread, with a `SyncEpisode`.
    """

    name: str
    fn: Callable[..., Any]
    timeout: float | None = None
    """Seconds that an episode may take; None leaves this to the config."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    tool_sets: tuple[ToolSet, ...] = ()
    """Tools in addition to the config's. `etude check` opens them."""

    def check(self, *, complete: bool = False) -> None:
        """Raise RequestError if the function cannot be called with an example and an episode.

        This is not checked at creation, so a wrong function does not stop its module from being imported.
        Missing further arguments are only known once the config has given its own (`complete`).
        """
        if not callable(self.fn) or isinstance(self.fn, type):
            raise RequestError(
                f"a workflow must be a function of an example and an episode, found {self.fn!r:.80}"
            )
        signature = inspect.signature(self.fn)
        try:
            (signature.bind if complete else signature.bind_partial)(None, None, **self.arguments)
            order_by_name(signature, _PARAMETERS)
        except TypeError as error:
            expected = ", ".join(("example", "episode", *self.arguments))
            raise RequestError(
                f"{self.where}: workflow '{self.name}' is called with ({expected}), "
                f"but takes {signature}: {error}"
            ) from error

    def start(self, example: Any, episode: Any) -> Any:
        """Call the function with the example, the episode and the arguments, in the order of its names."""
        values = {"example": example, "episode": episode}
        return self.fn(*(values[name] for name in self._order), **self.arguments)

    @functools.cached_property
    def _order(self) -> tuple[str, ...]:
        return order_by_name(inspect.signature(self.fn), _PARAMETERS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been decorated."""
        return self.fn(*args, **kwargs)

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, decorated or not."""
        call = getattr(self.fn, "__call__", None)  # noqa: B004  the called method itself is needed
        return inspect.iscoroutinefunction(inspect.unwrap(self.fn)) or inspect.iscoroutinefunction(call)

    @property
    def where(self) -> str:
        """The function's `file:line`, if known."""
        return where_defined(self.fn)


@overload
def workflow(fn: Callable[..., Any], /) -> Workflow: ...


@overload
def workflow(
    *, name: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], Workflow]: ...


def workflow(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: float | None = None
) -> Workflow | Callable[[Callable[..., Any]], Workflow]:
    """Decorate a function `fn(example, episode)`, sync or async, as the agent to train.

    Its return value is the episode's output, which must be JSON: text, numbers, lists, dicts, pydantic
    models, dataclasses. `timeout` is in seconds per episode. The function's parameters are checked when it is
    used.
    """

    def make(fn: Callable[..., Any]) -> Workflow:
        return Workflow(_name(fn) if name is None else name, fn, timeout)

    return make if fn is None else make(fn)


def as_workflow(obj: Any, *, arguments: Mapping[str, Any] | None = None) -> Workflow:
    """Return a decorated or plain function as a workflow, with further arguments.

    Raises RequestError if it is not a function, or does not take these arguments.
    """
    if isinstance(obj, functools.partial) and isinstance(obj.func, Workflow):
        agent = replace(obj.func, fn=functools.partial(obj.func.fn, *obj.args, **obj.keywords))
    else:
        agent = obj if isinstance(obj, Workflow) else Workflow(_name(obj), obj)
    if arguments:
        agent = replace(agent, arguments={**agent.arguments, **arguments})
    agent.check()
    return agent


class FunctionWorkflowConfig(WorkflowConfig, name="function"):
    """Agent code named by an import path."""

    function: str
    """Set `package.module:name` of the function, decorated or plain."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Set further keyword arguments of the function."""


register_workflow(config_type=FunctionWorkflowConfig)(
    config_factory(lambda config: as_workflow(import_object(config.function), arguments=config.arguments))
)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


class AgentConfig(WorkflowConfig, name="agent"):
    """An agent with tools, without code."""

    system: str = ""
    """Set the system message. `{name}` stands for an input of the example."""
    model: LlmRef | None = None
    """Name the entry of `llms` that the agent samples from; default: the trained one."""
    tools: Annotated[list[str] | None, ReferenceTo("tools")] = Field(default=None, min_length=1)
    """Name the agent's tool sets; default: all of the config's."""
    max_turns: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """Limit the model's answers to the prompt, including those that call tools."""
    prompt: str = ""
    """Set the user's message. `{name}` stands for an input of the example. Default: the input `messages` or
    `question`, or the only input."""

    def workflow(self, *sets: ToolSet) -> Workflow:
        """Return the agent as a workflow, with additional tool sets."""
        return Workflow(self.type_name, _answer, None, {"config": self, "sets": sets}, sets)

    def messages(self, example: Example) -> list[Message]:
        """Return the messages that an episode begins with. Raises RequestError for an unknown input."""
        system = _fill_inputs(self.system, example, "system")
        return [*([{"role": "system", "content": system}] if system else []), *_prompt(example, self.prompt)]


async def _answer(example: Example, episode: Episode, config: AgentConfig, sets: tuple[ToolSet, ...]) -> str:
    """Answer the prompt, calling tools until the model needs no more."""
    messages = config.messages(example)
    async with episode.tools(*(config.tools or episode.tool_sets), *sets) as tools:
        for turn in range(1, config.max_turns + 1):
            reply = await episode.chat(messages, model=config.model, tools=tools.schemas)
            messages.append(reply.message)
            if not reply.tool_calls:
                return reply.text
            if turn < config.max_turns:
                messages += await tools.call_all(reply.tool_calls)
    episode.note(f"stopped after {config.max_turns} turns, while it was still calling tools")
    return reply.text


def _fill_inputs(text: str, example: Example, key: str) -> str:
    """Fill the example's inputs into the text. Raises RequestError for an unknown input."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in example.inputs:
            raise RequestError(
                f"workflow.{key}: example '{example.id}' has no input '{match[0]}'; inputs: "
                + ", ".join(example.inputs)
            )
        return str(example.inputs[match[1]])

    return re.sub(r"\{(\w+)\}", value, text)


def _prompt(example: Example, template: str) -> list[Message]:
    inputs = example.inputs
    if template:
        return [{"role": "user", "content": _fill_inputs(template, example, "prompt")}]
    if isinstance(inputs.get("messages"), list):
        return list(inputs["messages"])
    if "question" in inputs or len(inputs) == 1:
        return [{"role": "user", "content": str(inputs.get("question", next(iter(inputs.values()))))}]
    raise RequestError(
        f"example '{example.id}' has the inputs {', '.join(inputs) or '(none)'}; name those to ask for: "
        "`workflow: {prompt: '…{name}…'}`"
    )


register_workflow(config_type=AgentConfig)(config_factory(AgentConfig.workflow))
