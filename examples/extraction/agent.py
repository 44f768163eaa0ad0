"""An agent with typed output: the official client's `parse`, and a schema that the model cannot leave."""

import etude

from task import Order


@etude.workflow
async def extract(example: etude.Example, episode: etude.Episode) -> Order | None:
    completion = await episode.openai().chat.completions.parse(
        model="reader", messages=[{"role": "user", "content": example.inputs["note"]}], response_format=Order
    )
    return completion.choices[0].message.parsed


@etude.evaluator
def fields_right(example: etude.Example, output: dict[str, object]) -> float:
    """The share of fields that are as the note has them."""
    right: list[bool] = [output[name] == value for name, value in example.expected.items()]
    return sum(right) / len(right)
