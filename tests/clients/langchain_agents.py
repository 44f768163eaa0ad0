"""LangChain's `ChatOpenAI`, `create_agent`, and LangGraph."""

from __future__ import annotations

from typing import Any

from tests.clients.drive import QUESTION, Client, Sum, Target, add, same

CLIENT = Client("langchain")


def _model(target: Target, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=target.model, base_url=target.base_url, api_key=target.api_key, **options)


@CLIENT.feature(calls=3)
async def invoke(target: Target) -> None:
    model = _model(target)
    assert model.invoke(QUESTION).content
    assert (await model.ainvoke(QUESTION)).content
    assert "".join(chunk.content for chunk in model.stream(QUESTION))


@CLIENT.feature()
def responses(target: Target) -> None:
    assert _model(target, use_responses_api=True).invoke(QUESTION).text


@CLIENT.feature(calls=4)
async def structured_output(target: Target) -> None:
    model = _model(target)
    assert isinstance(model.with_structured_output(Sum).invoke(QUESTION), Sum)
    by_function = model.with_structured_output(Sum, method="function_calling")
    assert isinstance(by_function.invoke(QUESTION), Sum)
    by_schema = model.with_structured_output(Sum, method="json_schema", strict=True)
    assert isinstance(await by_schema.ainvoke(QUESTION), Sum)
    as_json = model.with_structured_output(None, method="json_mode")
    assert isinstance(as_json.invoke("Answer in JSON."), dict)


@CLIENT.feature(calls=2)
def bind_tools(target: Target) -> None:
    for choice in ("any", "add"):
        answer = _model(target).bind_tools([add], tool_choice=choice).invoke(QUESTION)
        same({call["name"] for call in answer.tool_calls}, {"add"})


@CLIENT.feature(calls=2, extends=True)
async def agent(target: Target) -> None:
    from langchain.agents import create_agent

    made = create_agent(_model(target), [add], system_prompt="You add.")
    state = await made.ainvoke({"messages": [("user", QUESTION)]})
    same([message.type for message in state["messages"]], ["human", "ai", "tool", "ai"])


@CLIENT.feature()
def agent_structured(target: Target) -> None:
    from langchain.agents import create_agent

    state = create_agent(_model(target), response_format=Sum).invoke({"messages": [("user", QUESTION)]})
    assert isinstance(state["structured_response"], Sum)


@CLIENT.feature(calls=2, extends=True)
async def graph(target: Target) -> None:
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = _model(target).bind_tools([add])

    async def ask(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    # LangGraph reads annotations by name, in the globals of this module.
    ask.__annotations__ = {}
    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("tools", ToolNode([add]))
    builder.add_edge(START, "ask")
    builder.add_conditional_edges("ask", tools_condition)
    builder.add_edge("tools", "ask")
    seen = [
        name
        async for update in builder.compile().astream({"messages": [("user", QUESTION)]})
        for name in update
    ]
    same(seen, ["ask", "tools", "ask"])
