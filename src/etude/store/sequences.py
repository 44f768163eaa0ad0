"""The token sequences of an episode, as they were sampled, with what the learner was given of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from etude.core.call import Call, TopLogprobs
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.store.episodes import epoch_of
from etude.store.journal import Journal
from etude.store.learned import LearnedSample, ids_digest, read_learned
from etude.store.log import histories


@dataclass(frozen=True, slots=True)
class Span:
    """One answer within a sequence: `ids[start:stop]` are its tokens."""

    start: int
    stop: int
    call: int
    """Index of the call within the episode."""
    function: str
    version: int
    """Of the weights that sampled it."""
    logprobs: tuple[float, ...] | None
    """Of its tokens, under the distributions that they were sampled from."""
    top: tuple[TopLogprobs, ...]
    """The likeliest tokens in their places, where they were asked for."""
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """All tokens of one branch of an episode: prompt and answers in turn."""

    model: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    begins: str = ""
    """Why a branch began here and did not go on from the tokens before it; empty for the first one."""
    learned: tuple[LearnedSample, ...] = ()
    """The samples of these tokens that were trained on; of a preference there may be several."""


def sequences_of(record: EpisodeRecord) -> list[TokenSequence]:
    """The branches of an episode, in the order in which they were ended.

    A call goes on from the latest earlier one whose prompt and answer its own prompt begins with.
    """
    calls = [call for call in record.calls if _ids_of(call) is not None]
    parents: dict[int, Call] = {}
    for position, call in enumerate(calls):
        prompt = call.completion.prompt_ids if call.completion is not None else None
        assert prompt is not None
        for earlier in reversed(calls[:position]):
            before = _ids_of(earlier)
            assert before is not None
            if earlier.model == call.model and prompt[: len(before)] == before:
                parents[call.index] = earlier
                break
    continued = {parent.index for parent in parents.values()}
    return [_sequence(call, parents) for call in calls if call.index not in continued]


def _ids_of(call: Call) -> tuple[int, ...] | None:
    """Prompt and answer of a call; None where the engine did not tell their token ids."""
    answer = call.completion
    if answer is None or answer.prompt_ids is None or answer.completion_ids is None:
        return None
    return answer.prompt_ids + answer.completion_ids


def _sequence(last: Call, parents: dict[int, Call]) -> TokenSequence:
    path = [last]
    while path[-1].index in parents:
        path.append(parents[path[-1].index])
    spans = []
    for call in reversed(path):
        answer = call.completion
        assert answer is not None and answer.prompt_ids is not None and answer.completion_ids is not None
        start = len(answer.prompt_ids)
        spans.append(
            Span(
                start=start,
                stop=start + len(answer.completion_ids),
                call=call.index,
                function=call.function,
                version=answer.model_version,
                logprobs=answer.logprobs,
                top=answer.top_logprobs,
                finish_reason=answer.finish_reason,
            )
        )
    first = path[-1]
    begins = ""
    if first.completion is not None and (first.completion.drifted or first.completion.fault):
        why = first.completion.fault or "its template wrote the conversation so far otherwise than before"
        begins = f"call {first.index} began anew: {why}"
    ids = _ids_of(last)
    assert ids is not None
    return TokenSequence(last.model, ids, tuple(spans), begins)


def trained_sequences(run: Path, journal: Journal, record: EpisodeRecord, phase: str) -> list[TokenSequence]:
    """The branches of an episode, each with the samples of it that were trained on.

    Raises StoreError where what was recorded of these cannot be read.
    """
    sequences = sequences_of(record)
    samples = trained_samples(run, journal, record.id, phase)
    by_digest: dict[str, list[LearnedSample]] = {}
    for sample in samples:
        by_digest.setdefault(sample.digest, []).append(sample)
    lengths = sorted({sample.length for sample in samples if sample.length})
    trained = []
    for sequence in sequences:
        # A sample may end before the last answer, as where that one is another agent's.
        digests = [ids_digest(sequence.ids[:length]) for length in lengths if length <= len(sequence.ids)]
        own = tuple(sample for digest in digests for sample in by_digest.get(digest, ()))
        trained.append(replace(sequence, learned=own))
    return trained


def trained_samples(run: Path, journal: Journal, episode: str, phase: str) -> list[LearnedSample]:
    """The samples of an episode that were trained on, also those whose token ids are not known.

    Raises StoreError where what was recorded of these cannot be read.
    """
    epoch = epoch_of(phase)
    if epoch is None:
        return []
    version = _version_after(journal, run.name, epoch + 1)
    return read_learned(run, episode, version=version, epoch=epoch + 1)


def _version_after(journal: Journal, run: str, epoch: int) -> int | None:
    """The version that an epoch made."""
    entries = (entry for history in histories(journal, run).values() for entry in history.epochs)
    versions = (entry.version for entry in entries if entry.epoch == epoch)
    return next((version.number for version in versions if version is not None), None)


def chosen_sequence(sequences: Sequence[TokenSequence], number: int) -> TokenSequence:
    """The sequence of a number, from 0. Raises RequestError where there is none."""
    if not sequences:
        raise RequestError(
            "no token ids were recorded in this episode: its engine does not tell them (of an endpoint: "
            "return_token_ids: true)"
        )
    if not 0 <= number < len(sequences):
        raise RequestError(f"the episode has {len(sequences)} sequences of tokens, and no number {number}")
    return sequences[number]
