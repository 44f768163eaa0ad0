"""An agent with a calculator: it asks the model, calls the tool if the model wants it, and answers."""

import etude

from task import calculator


@etude.workflow
async def solve(example: etude.Example, episode: etude.Episode) -> str:
    messages = [{"role": "user", "content": example.inputs["question"]}]
    reply = await episode.chat(messages, tools=[calculator])
    if reply.tool_calls:
        call = reply.tool_calls[0]
        result = calculator((call.arguments or {}).get("expression", ""))
        messages += [reply.message, call.result(result)]
        reply = await episode.chat(messages, tools=[calculator])
    return reply.text


@etude.evaluator
def correct(example: etude.Example, output: str) -> bool:
    return output == str(example.expected)
