"""The page of tokens: an episode's exact sequences, in chunks, with what is recorded of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
from etude.core.errors import RequestError
from etude.engines.local import base_folder
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data
from etude.view.episodes import find_siblings, read_record, split_id
from etude.view.pages import library_and_run, page, whole_number

CHUNK = 1000
"""Tokens that are sent at a time."""
_KEPT = 6


class Span(NamedTuple):
    """One answer within a sequence. Its tokens are `ids[start:stop]`."""

    start: int
    stop: int
    call: Call
    answer: Completion


class TokenSequence(NamedTuple):
    """The tokens of one branch of an episode: prompts and answers in turn."""

    model: str
    ids: tuple[int, ...]
    spans: list[Span]
    fault: str
    """Why the branch began, if a prompt repeated a conversation in other tokens."""


@lru_cache(maxsize=_KEPT)
def _read_sequences(path: Path, id: str, created: float) -> list[TokenSequence]:
    """Return an episode's branches that have token ids, by model. Raises RequestError.

    They are read once for all chunks. An episode that was played again was `created` at another time.
    """
    by_model: defaultdict[str, list[Call]] = defaultdict(list)
    with RunFolder.read(path) as run:
        for call in read_record(run, id).calls:
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
        sequences.append(TokenSequence(calls[0].model, ids, spans, fault))
    return sequences


def _sequences(run: RunFolder, id: str) -> list[TokenSequence]:
    """Return the sequences of an episode. Raises RequestError if there are none."""
    sequences = _read_sequences(run.path, id, run.journal.times(id).get(id, 0.0))
    if not sequences:
        raise RequestError(
            "this episode has no token ids, because its engine returned none (for an endpoint, set "
            "return_token_ids: true)"
        )
    return sequences


def _choose(sequences: Sequence[TokenSequence], number: int) -> TokenSequence:
    if number >= len(sequences):
        raise RequestError(f"the episode has {len(sequences)} sequences of tokens, but no number {number}")
    return sequences[number]


def tokens_page(request: Request) -> Response:
    """Show the list of an episode's sequences, and the frame for their tokens."""
    (library, path), id = library_and_run(request), request.path_params["id"]
    number, call = whole_number(request, "sequence"), request.query_params.get("call")
    with RunFolder.read(path) as run:
        sequences = _sequences(run, id)
        phase, rest = split_id(run.journal, id)
        siblings = find_siblings(run.journal, phase, rest.rpartition("/")[0], library.reward(path))
    if call is not None:
        wanted = whole_number(request, "call")
        answering = (
            at for at, each in enumerate(sequences) if any(span.call.index == wanted for span in each.spans)
        )
        if (number := next(answering, -1)) < 0:
            raise RequestError(f"no token ids were recorded for an answer to call {wanted}")
    sequence = _choose(sequences, number)
    context: dict[str, Any] = {
        "sequence": sequence,
        "sampled": sum(span.stop - span.start for span in sequence.spans),
        "has_texts": tokenizer_file(path, sequence.model) is not None,
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
    """Return a chunk of a sequence's tokens as JSON: columns, in which an unknown number is null.

    `spans` are the answers that overlap the chunk.
    """
    (_, path), start = library_and_run(request), whole_number(request, "from")
    with RunFolder.read(path) as run:
        sequences = _sequences(run, request.path_params["id"])
    sequence = _choose(sequences, whole_number(request, "sequence"))
    file = tokenizer_file(path, sequence.model)

    def texts(ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Part of a character gives the replacement sign."""
        if file is None:
            return [f"⟨{id}⟩" for id in ids]
        decoded: list[str] = _tokenizer(file).decode_batch([[id] for id in ids], skip_special_tokens=False)
        return decoded

    stop = min(start + CHUNK, len(sequence.ids))
    ids = sequence.ids[start:stop]
    spans = [span for span in sequence.spans if span.start < stop and span.stop > start]
    logprobs = {
        span.start + at: float(f"{value:.5g}")
        for span in spans
        for at, value in enumerate(span.answer.logprobs or ())
    }
    likeliest = {span.start + at: top for span in spans for at, top in enumerate(span.answer.top_logprobs)}
    columns = {
        "from": start,
        "ids": list(ids),
        "texts": texts(ids),
        "spans": [
            [begin, end, call.index, call.function, answer.model_version]
            for begin, end, call, answer in spans
        ],
        "logprobs": [logprobs.get(at) for at in range(start, stop)],
        "top": {
            at: [(texts([token])[0] if isinstance(token, int) else token, value) for token, value in top]
            for at, top in likeliest.items()
            if start <= at < stop
        },
    }
    return JSONResponse(finite(columns))


def tokenizer_file(run: Path, model: str) -> Path | None:
    """Return where the tokenizer of `model`, an entry of `llms`, is. Does not ask the network."""
    if find_spec("tokenizers") is None:
        return None
    entry = (stored_data(run, required=False).get("llms") or {}).get(model) or {}
    source = str(entry.get("tokenizer") or entry.get("model") or entry.get("model_name") or "")
    # A tiny model is made in the run folder.
    for folder in (base_folder(run, model), Path(source).expanduser() if source else run):
        if (file := folder / "tokenizer.json").is_file():
            return file
    if not source or source.startswith(("/", ".", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, "tokenizer.json")
    except (ImportError, ValueError):  # The extra is not installed, or the source is not a name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
