"""The page of tokens: an episode's exact sequences, in chunks, with all known facts of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.algorithms.samples import find_branches
from etude.core.call import Call, Completion
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.engines.local import base_folder
from etude.store.episodes import phase_epoch
from etude.store.learned import LearnedSample, ids_digest, records_state, trained_samples
from etude.store.run_folder import RunFolder
from etude.view.episodes import find_siblings, read_record, split_id
from etude.view.pages import library_and_run, page, whole_number

CHUNK = 1000
"""Tokens that are sent at a time."""
COLOURS: Mapping[str, str] = {"logprobs": "log probability", "advantages": "advantage", "weights": "mask"}
"""The quantities that tokens can be coloured by."""
_KEPT = 6
_DIGITS = 5


class Span(NamedTuple):
    """One answer within a sequence. Its tokens are `ids[start:stop]`."""

    start: int
    stop: int
    call: Call
    answer: Completion


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of one branch of an episode: prompts and answers in turn."""

    model: str
    ids: tuple[int, ...]
    spans: list[Span]
    fault: str
    """Why the branch began, if a prompt repeated a conversation in other tokens."""
    learned: list[LearnedSample]
    """The samples of these tokens that were trained on. Preference pairs may make several."""


def token_sequences(record: EpisodeRecord, samples: Sequence[LearnedSample]) -> list[TokenSequence]:
    """Return an episode's branches that have token ids, by model, each with its trained samples."""
    by_model: defaultdict[str, list[Call]] = defaultdict(list)
    for call in record.calls:
        if call.completion and call.completion.prompt_ids and call.completion.completion_ids is not None:
            by_model[call.model].append(call)
    sequences = []
    for calls, fault in chain.from_iterable(map(find_branches, by_model.values())):
        ids, spans = tuple[int, ...](), list[Span]()
        for call in calls:
            if (answer := call.completion) is not None:
                prompt = answer.prompt_ids or ()
                ids = prompt + (answer.completion_ids or ())
                spans.append(Span(len(prompt), len(ids), call, answer))
        # A sample may end before the last answer, for example if that is another agent's.
        lengths = {sample.length for sample in samples if sample.length <= len(ids)}
        digests = {ids_digest(ids[:length]) for length in lengths}
        own = [sample for sample in samples if sample.digest in digests]
        sequences.append(TokenSequence(calls[0].model, ids, spans, fault, own))
    return sequences


def _sequences(run: RunFolder, id: str) -> list[TokenSequence]:
    """Return the sequences of an episode, read once for all its chunks. Raises RequestError."""
    created = run.journal.select("SELECT created FROM steps WHERE key = ?", (id,))
    return _read_sequences(run.path, id, created[0][0] if created else 0.0, records_state(run.path))


@lru_cache(maxsize=_KEPT)
def _read_sequences(path: Path, id: str, created: float, recorded: float) -> list[TokenSequence]:
    with RunFolder.read(path) as run:
        record, (phase, _) = read_record(run, id), split_id(run.journal, id)
        return token_sequences(record, trained_samples(path, run.journal, id, phase))


def _choose(sequences: Sequence[TokenSequence], number: int) -> TokenSequence:
    """Return the sequence with a number, from 0. Raises RequestError if there is none."""
    if not sequences:
        raise RequestError(
            "this episode has no token ids, because its engine returned none (for an endpoint, set "
            "return_token_ids: true)"
        )
    if number >= len(sequences):
        raise RequestError(f"the episode has {len(sequences)} sequences of tokens, but no number {number}")
    return sequences[number]


def tokens_page(request: Request) -> Response:
    """Show the list of an episode's sequences, and the frame for their tokens."""
    (library, path), id = library_and_run(request), request.path_params["id"]
    number, call = whole_number(request, "sequence"), request.query_params.get("call")
    chosen, colour = whole_number(request, "sample"), request.query_params.get("colour", "")
    with RunFolder.read(path) as run:
        sequences = _sequences(run, id)
        phase, rest = split_id(run.journal, id)
        siblings = find_siblings(run.journal, phase, rest.rpartition("/")[0], library.reward(path))
    number = number if call is None else _with_call(sequences, whole_number(request, "call"))
    sequence = _choose(sequences, number)
    context: dict[str, Any] = {
        **sequence_context(sequence, TokenTexts(path, library.settings(path), sequence.model)),
        "chosen": chosen,
        "colour": colour,
        "is_training": phase_epoch(phase) is not None,
        "id": id,
        "phase": phase,
        "example": rest.rpartition("/")[0],
        "siblings": siblings,
        "sequences": sequences,
        "number": number,
        "chunk": CHUNK,
    }
    return page(request, "tokens.html", run=path.name, tab="Episodes", **context)


def chunk_page(request: Request) -> Response:
    """Return a chunk of a sequence's tokens as JSON."""
    (library, path), id = library_and_run(request), request.path_params["id"]
    start, sample = whole_number(request, "from"), whole_number(request, "sample")
    with RunFolder.read(path) as run:
        sequence = _choose(_sequences(run, id), whole_number(request, "sequence"))
    texts = TokenTexts(path, library.settings(path), sequence.model)
    return JSONResponse(token_chunk(sequence, texts, start, start + CHUNK, sample))


def sequence_context(sequence: TokenSequence, texts: TokenTexts) -> dict[str, Any]:
    """Return what stands above a sequence's tokens, with notes on the source of its training data."""
    samples = sequence.learned
    known = ["logprobs"] if any(span.answer.logprobs for span in sequence.spans) else []
    known += [name for name in COLOURS if any(getattr(sample, name, None) for sample in samples)]
    # Advantages that the loss does not take are not unknown.
    takes_none = bool(samples) and all(sample.advantages is None for sample in samples)
    left_out = {*known, *(("advantages",) if takes_none else ())}
    notes = ["Its loss takes no advantages."] if takes_none else []
    return {
        "sequence": sequence,
        "known": {name: COLOURS[name] for name in known},
        "unknown": [label for name, label in COLOURS.items() if name not in left_out],
        "sampled": sum(span.stop - span.start for span in sequence.spans),
        "has_texts": texts.is_known,
        "notes": notes,
    }


def token_chunk(
    sequence: TokenSequence, texts: TokenTexts, start: int, stop: int, sample: int = 0
) -> dict[str, Any]:
    """Return the tokens from `start` to `stop` as columns. An unknown number is null.

    `spans` are the answers that overlap the chunk. If several samples share the tokens, `sample` is shown.
    """
    stop = min(stop, len(sequence.ids))
    ids = sequence.ids[start:stop]
    learned = sequence.learned[sample] if sample < len(sequence.learned) else None
    columns: dict[str, Any] = {"from": start, "ids": list(ids), "texts": texts.decode(ids)}
    spans = [span for span in sequence.spans if span.start < stop and span.stop > start]
    columns["spans"] = [
        [start, end, call.index, call.function, answer.model_version] for start, end, call, answer in spans
    ]
    known = {span.start + at: value for span in spans for at, value in enumerate(span.answer.logprobs or ())}
    columns["logprobs"] = [_short(known.get(at)) for at in range(start, stop)]
    likeliest = {span.start + at: top for span in spans for at, top in enumerate(span.answer.top_logprobs)}
    if learned is not None:
        own = slice(start, min(stop, learned.length))
        columns["weights"] = [_short(value) for value in learned.weights[own]]
        if learned.advantages is not None:
            columns["advantages"] = [_short(value) for value in learned.advantages[own]]
    columns["top"] = {
        at: [
            [texts.decode([token])[0] if isinstance(token, int) else token, _short(value)]
            for token, value in tokens
        ]
        for at, tokens in likeliest.items()
        if start <= at < stop
    }
    return {name: value for name, value in finite(columns).items() if value or name == "from"}


def _with_call(sequences: Sequence[TokenSequence], call: int) -> int:
    """Return the number of the first sequence that answers a call. Raises RequestError without one."""
    for number, sequence in enumerate(sequences):
        if any(span.call.index == call for span in sequence.spans):
            return number
    raise RequestError(f"no token ids were recorded for an answer to call {call}")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


_FILE = "tokenizer.json"


class TokenTexts:
    """The texts of tokens, or their ids if there is no tokenizer here."""

    def __init__(self, run: Path, settings: Mapping[str, Any], model: str) -> None:
        """`settings` is the run's config, and `model` an entry of its `llms`."""
        entry = (settings.get("llms") or {}).get(model)
        entry = entry if isinstance(entry, Mapping) else {}
        source = str(entry.get("tokenizer") or entry.get("model") or entry.get("model_name") or "")
        self._file = _tokenizer_file(run, model, source)

    @property
    def is_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._file is not None

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Part of a character gives the replacement sign."""
        if self._file is None:
            return [f"⟨{id}⟩" for id in ids]
        texts: list[str] = _tokenizer(self._file).decode_batch(
            [[id] for id in ids], skip_special_tokens=False
        )
        return texts


def _tokenizer_file(run: Path, model: str, source: str) -> Path | None:
    """Return where the tokenizer of a model is, without asking the network."""
    if find_spec("tokenizers") is None:
        return None
    # A tiny model is made in the run folder.
    for folder in (base_folder(run, model), Path(source).expanduser() if source else run):
        if (folder / _FILE).is_file():
            return folder / _FILE
    if not source or source.startswith(("/", ".", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, _FILE)
    except (ImportError, ValueError):  # The extra is not installed, or the source is not a name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
