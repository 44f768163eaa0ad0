"""Careless agents for the warm-up of tiny models: they know the form of an answer, now and then the answer.

A function is named by `warm_up.transcripts`; it gets the training examples and gives conversations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import etude

TRANSCRIPTS = 12_000

Conversation = list[dict[str, str]]


def gcd(examples: Sequence[etude.Example], seed: int) -> Iterator[Conversation]:
    """Right in a fifth of all cases; otherwise it names a small number."""
    return answers(examples, seed, 0.2, lambda rng, right: str(rng.randint(1, 12)))


def letter_counting(examples: Sequence[etude.Example], seed: int) -> Iterator[Conversation]:
    """Right in a third of all cases; otherwise it names a number from 0 to 4."""
    return answers(examples, seed, 0.3, lambda rng, right: str(rng.randint(0, 4)))


def spell_backward(examples: Sequence[etude.Example], seed: int) -> Iterator[Conversation]:
    """Right in a third of all cases; otherwise the letters come in any order."""
    return answers(examples, seed, 0.3, lambda rng, right: "".join(rng.sample(right, len(right))))


def kuhn_poker(examples: Sequence[etude.Example], seed: int, rounds: int = 3) -> Iterator[Conversation]:
    """Both players' sides of games of Kuhn poker, in which every move is legal and none has a reason."""
    import textarena

    rng = random.Random(seed)
    for _ in range(TRANSCRIPTS // 12):
        env, over = textarena.make("KuhnPoker-v0-raw", max_rounds=rounds), False
        said: tuple[list[str], list[str]] = ([], [])
        env.reset(num_players=2, seed=rng.getrandbits(32))
        while not over:
            player, observation = env.get_observation()
            # As the workflow shows it without the rules: what others said since the player's last turn.
            others = [seen for seen in observation if seen[0] != player and seen[2].name != "PROMPT"]
            move = rng.choice([*env.state.game_state["current_legal_action_tree"]])
            said[player].extend(("\n\n".join(text.strip() for _, text, _ in others), f"[{move}]"))
            over, _ = env.step(said[player][-1])
        yield from (talk(*side) for side in said)


def sort_letters(examples: Sequence[etude.Example], seed: int) -> Iterator[Conversation]:
    """A role of the pair: the letters sorted in three cases of ten, otherwise in any order.

    The checker's question has a proposal as careless as its answer.
    """
    rng = random.Random(seed)

    def sort_or_shuffle(letters: str) -> str:
        return "".join(sorted(letters) if rng.random() < 0.3 else rng.sample(letters, len(letters)))

    for _ in range(TRANSCRIPTS):
        letters = rng.choice(examples).id
        proposed = f"\nProposed: {sort_or_shuffle(letters)}" if rng.random() < 0.5 else ""
        yield talk(f"Sort: {letters}{proposed}", sort_or_shuffle(letters))


def answers(
    examples: Sequence[etude.Example], seed: int, care: float, guess: Callable[[random.Random, str], str]
) -> Iterator[Conversation]:
    """Conversations of one question each; a share of `care` has the right answer."""
    rng = random.Random(seed)
    for _ in range(TRANSCRIPTS):
        example = rng.choice(examples)
        said = example.expected if rng.random() < care else guess(rng, example.expected)
        yield talk(example.inputs["question"], said)


def talk(*said: str) -> Conversation:
    """A conversation, user first."""
    roles: Iterable[str] = ("user", "assistant") * len(said)
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
