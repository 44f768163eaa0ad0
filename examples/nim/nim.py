"""Nim: two players take one to three stones in turn, and who takes the last one wins."""

import random

import etude

FEWEST, MOST, TAKEN = 8, 20, 3


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> float:
    """The trained model and an earlier version of it; the seed says who begins, and with how many stones."""
    draw = random.Random(example.inputs["seed"])
    stones, turn = draw.randint(FEWEST, MOST), draw.choice(["policy", "opponent"])
    while stones:
        reply = await episode.chat([{"role": "user", "content": f"{stones} left"}], model=turn)
        other = "opponent" if turn == "policy" else "policy"
        taken = int(reply.text) if reply.text in ("1", "2", "3") else 0
        if not 1 <= taken <= min(TAKEN, stones):
            episode.note(f"{turn} said {reply.text!r} with {stones} left, and loses")
            return float(other == "policy")
        stones, turn = stones - taken, other
    return float(turn == "opponent")  # It is the turn of the player who did not take the last stone.


@etude.evaluator
def victory(example: etude.Example, output: float) -> float:
    """1 for a game that the trained model has won."""
    return output


def any_move(examples: list[etude.Example], seed: int) -> list[list[dict[str, str]]]:
    """A player who knows the rules and nothing else: each number of stones, with a legal move at random."""
    draw, transcripts = random.Random(seed), []
    for stones in [*range(1, MOST + 1)] * 100:
        move = draw.randint(1, min(TAKEN, stones))
        question = {"role": "user", "content": f"{stones} left"}
        transcripts.append([question, {"role": "assistant", "content": str(move)}])
    return transcripts
