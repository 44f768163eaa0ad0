"""The pages of episodes: phases, their groups, and an episode as turns, as a tree, and as exact tokens."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.algorithms.samples import find_branches, is_play
from etude.config.document import value_at
from etude.core.call import Call, Completion
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.history import Entry, EpochEntry
from etude.engines.local import base_folder
from etude.protocols.tree import WORDS as VERDICTS
from etude.protocols.tree import EpisodeTree, Node, shown_decision
from etude.show.turns import Turn, list_turns
from etude.store.episodes import episode_scores, list_phases, phase_stage, require_episode
from etude.store.histories import read_histories
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, find_episodes, outlines, parse_query
from etude.store.run_folder import RunFolder
from etude.store.stored_config import reward_name, reward_names, stored_data
from etude.view.pages import page, run_path, whole_number

GROUPS, EPISODES = 40, 100
"""The most on one page."""
_SECONDS = 0.4
"""Seconds that one page may search. If it finds too few, the next page continues."""


def phases_page(request: Request) -> Response:
    """Show the phases of a run that have episodes, or with a filter the matches in all phases."""
    with RunFolder.read(run_path(request)) as run:
        phases = list_phases(run.journal)
        if request.query_params.get("q", "").strip():
            return _filtered_page(request, run, phases, None)
        entries = _entries(run.journal)
    rows = [(phase, entries.get(phase_stage(phase))) for phase in phases]
    return page(request, "phases.html", rows=rows)


def phase_page(request: Request) -> Response:
    """Show the groups of a phase by their examples' ids, or with a filter the matching episodes."""
    path = run_path(request)
    phase, after = request.path_params["phase"], request.query_params.get("after", "")
    with RunFolder.read(path) as run:
        phases = list_phases(run.journal)
        if phase not in phases:
            raise RequestError(f"run {run.name} has no episodes of the phase '{phase}'")
        if request.query_params.get("q", "").strip():
            return _filtered_page(request, run, [phase], phase)
        entry = _entries(run.journal).get(phase_stage(phase))
        episodes = outlines(run.journal, f"{phase}/", reward_name(path), after=after)
        by_example = groupby(episodes, lambda episode: episode.example)
        groups = [
            sorted(own, key=lambda episode: episode.generation) for _, own in islice(by_example, GROUPS + 1)
        ]
    # Episodes are read in the order of their names, in which `…/9` comes after `…/11`.
    more = max(each.id for each in groups[GROUPS - 1]) if len(groups) > GROUPS else ""
    same_kind = [each for each in phases if each.partition("/")[0] == phase.partition("/")[0]]
    at = same_kind.index(phase)
    return page(
        request,
        "groups.html" if after else "phase.html",
        phase=phase,
        entry=entry,
        groups=groups[:GROUPS],
        rewards=[episode.reward for group in groups for episode in group],
        rewarded=reward_name(path) if len(reward_names(path)) > 1 else None,
        more=more,
        before=next(iter(same_kind[at + 1 :]), None),
        following=same_kind[at - 1] if at else None,
    )


def split_id(journal: Journal, id: str) -> tuple[str, str]:
    """Split an address within a run into the phase and the rest. Raises RequestError."""
    fits = [phase for phase in list_phases(journal) if id.startswith(f"{phase}/")]
    if not fits:
        raise RequestError(f"the episode id '{id}' does not begin with a known phase")
    phase = max(fits, key=len)
    return phase, id.removeprefix(f"{phase}/")


def _filtered_page(request: Request, run: RunFolder, phases: list[str], phase: str | None) -> Response:
    query, reward = parse_query(request.query_params["q"]), reward_name(run.path)
    after, start = request.query_params.get("after", ""), request.query_params.get("from")
    left = phases[phases.index(start) :] if start in phases else phases
    found = find_episodes(run.journal, left, reward, query, after=after, limit=EPISODES, seconds=_SECONDS)
    template = "filtered_rows.html" if after else "filtered.html"
    return page(request, template, phase=phase, selection=found, query=query.words)


def _entries(journal: Journal) -> dict[tuple[str, int] | None, Entry]:
    """Return the epochs and validations of a run, as `phase_stage` names them."""
    entries: dict[tuple[str, int] | None, Entry] = {}
    for history in read_histories(journal).values():
        for entry in history.entries:
            kind = "train" if isinstance(entry, EpochEntry) else "validation"
            entries.setdefault((kind, entry.epoch), entry)
    return entries


_COLOURS = 6


def shown_play(record: EpisodeRecord) -> dict[str, Any] | None:
    """Return the play of an episode for a page, or None for another episode.

    `values` has each agent's mean reward in the whole play, `agents` the numbers of their colours, and `ways`
    the number of leaves. An answer's `values` are the rewards from there on, averaged over its branches. Its
    `gain` is its value to its agent minus the mean of its siblings' (None without siblings).
    """
    if not is_play(record) or record.failure is not None:
        return None
    tree = EpisodeTree.from_json(record.output)
    calls = {call.index: call for call in record.calls}

    def answer(node: Node) -> dict[str, Any]:
        call = calls.get(node.call)
        siblings = tree.children(None if node.parent is None else tree.nodes[node.parent])
        others = [tree.value(each, node.agent) for each in siblings if each.id != node.id]
        return {
            "node": node,
            "said": node.messages,
            "values": {agent: tree.value(node, agent) for agent in tree.agents},
            "gain": tree.value(node, node.agent) - sum(others) / len(others) if others else None,
            "decision": "" if node.decision is None else shown_decision(node.decision),
            "thinking": "" if call is None or call.completion is None else call.completion.thinking,
            "following": [*map(answer, tree.children(node))],
        }

    return {
        "protocol": tree.protocol,
        "truth": VERDICTS[tree.truth],
        "stance": VERDICTS[tree.stance],
        "values": {agent: tree.value(None, agent) for agent in tree.agents},
        "agents": {agent: at % _COLOURS + 1 for at, agent in enumerate(tree.agents)},
        "ways": sum(1 for _ in tree.leaves()),
        "size": len(tree.nodes),
        "answers": [*map(answer, tree.children())],
    }


_TURNS = 200
"""The most on one page."""
_SIBLINGS = 16


def episode_page(request: Request) -> Response:
    """Show one episode."""
    path = run_path(request)
    start = whole_number(request, "turn")
    id, rewards = request.path_params["id"], reward_names(path)
    with RunFolder.read(path) as run:
        record, (phase, _) = require_episode(run, id), split_id(run.journal, id)
        turns = _turns(record)
        siblings = find_siblings(run.journal, phase, record.example.id, next(iter(rewards.values()), None))
        scores = _scores(run.journal, id, rewards)
    return page(
        request,
        "turns.html" if start else "episode.html",
        record=record,
        phase=phase,
        turns=turns[start : start + _TURNS],
        more=start + _TURNS if len(turns) > start + _TURNS else 0,
        play=shown_play(record),
        scores=scores,
        siblings=siblings,
    )


def group_page(request: Request) -> Response:
    """Show the episodes of one example in a phase next to each other."""
    path = run_path(request)
    with RunFolder.read(path) as run:
        phase, example = split_id(run.journal, request.path_params["id"])
        siblings = find_siblings(run.journal, phase, example, reward_name(path))
        if not siblings:
            raise RequestError(f"run {run.name} has no episodes of the example '{example}' in {phase}")
        records = [(each, require_episode(run, each.id)) for each in siblings[:_SIBLINGS]]
    shown = [(each, record, _turns(record), shown_play(record)) for each, record in records]
    told = records[0][1].example
    return page(request, "group.html", phase=phase, example=told, siblings=siblings, shown=shown)


def find_siblings(journal: Journal, phase: str, example: str, reward: str | None) -> list[EpisodeOutline]:
    """Return outlines of the episodes of an example in a phase."""
    episodes = outlines(journal, f"{phase}/{example}/", reward)
    return sorted((each for each in episodes if each.example == example), key=lambda each: each.generation)


def _turns(record: EpisodeRecord) -> list[Turn]:
    failure = record.failure
    ends = [] if failure is None else [Turn("failure", failure.kind, failure.reason, is_bad=True)]
    return [*list_turns(record), *ends]


def _scores(journal: Journal, id: str, rewards: Mapping[str | None, str]) -> list[dict[str, Any]]:
    """Return an episode's scores, each with whose reward it is: ` of prover`, or None for other scores."""
    scores = []
    for name, stored in episode_scores(journal, id).items():
        targets = [target for target, reward in rewards.items() if reward == name]
        whose = f" of {', '.join(filter(None, targets))}" if any(targets) else "" if targets else None
        told = {part: stored.get(part) for part in ("score", "reasoning", "error")}
        scores.append({"name": name, "reward_of": whose, **told})
    return scores


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
        for call in require_episode(run, id).calls:
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
    path, id = run_path(request), request.path_params["id"]
    number, call = whole_number(request, "sequence"), request.query_params.get("call")
    with RunFolder.read(path) as run:
        sequences = _sequences(run, id)
        phase, rest = split_id(run.journal, id)
        example = rest.rpartition("/")[0]
        siblings = find_siblings(run.journal, phase, example, reward_name(path))
    if call is not None:
        wanted = whole_number(request, "call")
        answering = (
            at for at, each in enumerate(sequences) if any(span.call.index == wanted for span in each.spans)
        )
        if (number := next(answering, -1)) < 0:
            raise RequestError(f"no token ids were recorded for an answer to call {wanted}")
    sequence = _choose(sequences, number)
    return page(
        request,
        "tokens.html",
        sequence=sequence,
        sampled=sum(span.stop - span.start for span in sequence.spans),
        has_texts=tokenizer_file(path, sequence.model) is not None,
        id=id,
        phase=phase,
        example=example,
        siblings=siblings,
        sequences=sequences,
        number=number,
        chunk=CHUNK,
    )


def chunk_page(request: Request) -> Response:
    """Return a chunk of a sequence's tokens as JSON: columns, in which an unknown number is null.

    `spans` are the answers that overlap the chunk.
    """
    path, start = run_path(request), whole_number(request, "from")
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
    entry = value_at(stored_data(run, required=False), ("llms", model)) or {}
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
