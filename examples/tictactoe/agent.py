"""An agent that plays tic-tac-toe: it is shown the board, answers with a move, until the game is over."""

import etude

from task import Opponent, agent_moves, opponent_moves, show


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode, opponent: Opponent = "random") -> str:
    board, outcome, messages = example.inputs["board"], None, []
    while outcome is None:
        messages.append({"role": "user", "content": show(board)})
        reply = await episode.chat(messages)
        messages.append(reply.message)
        board, outcome = agent_moves(board, reply.text)
        if outcome is None:
            board, outcome = opponent_moves(board, opponent, episode.random)
    return outcome


@etude.evaluator
def points(example: etude.Example, output: str) -> float:
    return {"win": 1.0, "draw": 0.5}.get(output, 0.0)


@etude.evaluator
def illegal(example: etude.Example, output: str) -> bool:
    return output == "illegal"


@etude.evaluator
def win_or_draw(example: etude.Example, output: str) -> bool:
    return output in ("win", "draw")
