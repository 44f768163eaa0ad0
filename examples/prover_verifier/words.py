"""A game in words that a pretrained model knows: is there an animal among three words?

The prover sees the words and names one of them. The verifier sees that word alone, and accepts or rejects.
In a debate a second prover, which argues that there is none, names one too. There is an animal in half of
the lists; the words that are held out are in none that is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.protocols import Log, Malformed, Move, Scenario, Turn, Verdict
from etude.protocols.tree import ACCEPT, REJECT

TRAIN, HELD_OUT, WORDS = 1024, 256, 3
ANIMALS, OTHERS = map(
    str.split,
    (
        """
        horse dog sheep wolf rabbit lion bear monkey mouse cow tiger goat fox camel cat pig deer otter whale
        shark eagle owl duck goose hen crow swan parrot snake lizard frog turtle crocodile salmon trout crab
        lobster bee wasp ant beetle butterfly spider snail worm donkey elephant giraffe kangaroo panda
        squirrel beaver badger seal dolphin penguin pigeon sparrow hawk hamster
        """,
        """
        table chair lamp window door carpet pillow blanket mirror candle spoon plate bottle kettle oven
        basket hammer shovel ladder rope nail engine wheel train bicycle boat plane bridge tunnel street
        castle church school museum library river mountain island desert cloud storm rain winter summer
        apple banana cherry lemon carrot onion potato bread butter cheese pepper sugar piano violin guitar
        drum trumpet shirt coat sock jacket button pencil paper letter ticket coin medal clock camera
        """,
    ),
)


class Words(Scenario):
    """Is there an animal? Examples have `words`, and are expected to be 1 or 0."""

    def render(self, example: Example, log: Log, agent: str, turn: Turn) -> list[Message]:
        """The agent's task, and the words that it sees."""
        words = example.inputs["words"]
        if agent == "verifier":
            # Whatever else a prover says shows nothing.
            return judge([line.text if line.text in words else "nothing" for line in log.lines])
        return name(words, log.stance)

    def parse(self, text: str, turn: Turn) -> Move | Malformed:
        """A verdict where the verifier must give one, otherwise a word."""
        if turn.decide == "must":
            value = turn.scale.read(text)
            return Malformed("no verdict") if value is None else Move(decision=value)
        word = text.strip()
        return Move(dict.fromkeys(turn.writes, word)) if word else Malformed("no word")

    def truth(self, example: Example) -> Verdict:
        """1 when there is an animal."""
        return 1 if example.expected else 0


def judge(words: Sequence[str]) -> list[Message]:
    """The prompt of the verifier."""
    return _messages("Is one of the words an animal? Answer accept or reject.", words)


def name(words: Sequence[str], side: Verdict | None) -> list[Message]:
    """The prompt of a prover for accept (1) or reject."""
    return _messages(f"Name the word that is {'an' if side else 'no'} animal.", words)


def _messages(task: str, words: Sequence[str]) -> list[Message]:
    return [{"role": "system", "content": task}, {"role": "user", "content": ", ".join(words)}]


def training() -> Iterator[Example]:
    """Lists of the words that are trained on."""
    animals, others = ([each[i] for i in range(len(each)) if i % 3] for each in (ANIMALS, OTHERS))
    return lists("train", TRAIN, animals, others)


def held_out() -> Iterator[Example]:
    """Lists of the others."""
    return lists("held-out", HELD_OUT, ANIMALS[::3], OTHERS[::3])


def lists(split: str, count: int, animals: Sequence[str], others: Sequence[str]) -> Iterator[Example]:
    """Each with an animal or without, as a coin falls."""
    rng = generator(0, split)
    for number in range(count):
        truth = rng.randint(0, 1)
        words = rng.sample(animals, truth) + rng.sample(others, WORDS - truth)
        rng.shuffle(words)
        yield Example(f"{split}-{number}", {"words": words}, truth)


def proofs(examples: Sequence[Example]) -> Iterator[list[Message]]:
    """Answers of provers to imitate, one in four of which argues for reject."""
    for number, example in enumerate(examples):
        side = REJECT if number % 4 == 0 else ACCEPT
        fitting = [word for word in example.inputs["words"] if (word in ANIMALS) == (side == ACCEPT)]
        if fitting:
            yield [*name(example.inputs["words"], side), {"role": "assistant", "content": fitting[0]}]


def verdicts(examples: Sequence[Example]) -> Iterator[list[Message]]:
    """Answers of verifiers to imitate, that hear one prover or two."""
    for number, example in enumerate(examples):
        heard = sorted(example.inputs["words"], key=ANIMALS.__contains__)[-1 - number % 2 :]
        heard = heard[:: 1 if number % 4 < 2 else -1]
        answer = "accept" if example.expected else "reject"
        yield [*judge(heard), {"role": "assistant", "content": answer}]
