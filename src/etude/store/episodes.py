"""Episodes in the journal: how they are written, read and listed.

The conversion to JSON and back is exact. A call repeats most of the conversation before it. So it is stored
as its difference to an earlier call, its parent: the number of leading messages and prompt token ids that
they share, and the rest. Token ids are packed as 32-bit integers and logprobs as 64-bit floats, in base64.
Fields with their default values are left out.

Phases with episodes are named `eval`, `validation/5` and `train/3`. `train/3.2` is the second collection of
its kind for an epoch.
"""

import binascii
import json
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from etude.core.call import Call, ChatRequest, Completion, Constraint, Sampling, Usage
from etude.core.episode import EpisodeRecord, Event, Example, Failure, ToolUse
from etude.core.errors import RequestError, StoreError
from etude.core.json_text import jsonable, plain
from etude.core.keys import content_hash
from etude.core.secrets import mask_secrets
from etude.store.journal import Journal, Json, Steps
from etude.store.run_folder import RunFolder

_SAMPLING = TypeAdapter(Sampling)
_PACKED = {"completion_ids": "i", "logprobs": "d"}
"""The fields of a completion that are packed, with the type of number in each."""
_APART = ("messages", "tools", "sampling", "conversation", "earlier", "on_delta")
"""The fields of a request that are encoded separately, or not at all."""


@cache
def _plain_fields(kind: Any, but: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any, tuple[Any, ...]]:
    """Return the names of a dataclass's fields except `but`, a getter of their values, and their defaults."""
    kept = [each for each in fields(kind) if each.name not in but]
    names = tuple(each.name for each in kept)
    made = (each.default_factory for each in kept)
    defaults = (each.default if make is MISSING else make() for each, make in zip(kept, made, strict=True))
    return names, attrgetter(*names), tuple(defaults)


def _non_defaults(value: Any, *but: str) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults, except `but`."""
    names, values_of, defaults = _plain_fields(value.__class__, but)
    known = zip(names, values_of(value), defaults, strict=True)
    return {name: own for name, own, default in known if own is not default and own != default}


def encode_call(call: Call, parent: tuple[str, Call] | None) -> Json:
    """Encode a call. `parent` is an earlier call, with the name under which a decoder finds it."""
    request, (name, before) = call.request, parent or (None, None)
    data = _non_defaults(call, "request", "completion") | _non_defaults(request, *_APART)
    data["messages"] = request.messages
    if before is not None:
        shared = shared_messages(before, request.messages)
        data |= {"parent": [name, shared], "messages": request.messages[shared:]}
    if before is None or before.request.tools != request.tools:
        data["tools"] = request.tools
    if sampling := request.sampling.non_defaults():
        data["sampling"] = to_jsonable_python(sampling)
    if call.error is not None:
        data["error"] = mask_secrets(call.error)
    if (completion := call.completion) is not None:
        answer = _non_defaults(completion, "prompt_ids", "usage", "constraint")
        answer |= {name: _pack(code, answer[name]) for name, code in _PACKED.items() if name in answer}
        if (ids := completion.prompt_ids) is not None:
            known = _token_ids(before)
            shared = len(known)
            if ids[:shared] != known:
                shared = next(at for at, token in enumerate(known) if at == len(ids) or ids[at] != token)
            answer["prompt_ids"] = [shared, _pack("i", ids[shared:])]
        usage = completion.usage
        answer["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
        if completion.constraint is not None:
            answer["constraint"] = asdict(completion.constraint)
        data["completion"] = answer
    return data


def decode_call(data: Json, conversation: str, parent: Call | None) -> Call:
    """Decode what `encode_call` returned. `parent` is the call that `parent_name(data)` names."""
    given = {**data, "conversation": conversation, "messages": tuple(data["messages"])}
    if parent is not None:
        given["messages"] = conversation_so_far(parent)[: given.pop("parent")[1]] + given["messages"]
        given.setdefault("tools", parent.request.tools)
    given["tools"] = tuple(given["tools"])
    given["sampling"] = _SAMPLING.validate_python(given.get("sampling", {}))
    if isinstance(given.get("prompt"), list):
        given["prompt"] = tuple(given["prompt"])
    if "completion" in given:
        given["completion"] = _decode_completion(given["completion"], parent)
    asked = {name: given.pop(name) for name in _plain_fields(ChatRequest)[0] if name in given}
    return Call(request=ChatRequest(**asked), **given)


def parent_name(data: Json) -> str | None:
    """Return the name of the parent that an encoded call is a difference to, or None."""
    return str(data["parent"][0]) if "parent" in data else None


def conversation_so_far(call: Call) -> tuple[Any, ...]:
    """Return the messages of a call, with its answer."""
    messages = call.request.messages
    return messages if call.completion is None else (*messages, call.completion.message)


def shared_messages(before: Call, messages: Sequence[Any]) -> int:
    """Return how many leading messages repeat an earlier call and its answer."""
    earlier = conversation_so_far(before)
    shared = 0
    while shared < min(len(earlier), len(messages)) and earlier[shared] == messages[shared]:
        shared += 1
    return shared


def _decode_completion(data: Json, parent: Call | None) -> Completion:
    given = {**data, "usage": Usage(*data["usage"])}
    given |= {name: _unpack(code, given[name]) for name, code in _PACKED.items() if name in given}
    if "prompt_ids" in given:
        shared, packed = given["prompt_ids"]
        given["prompt_ids"] = _token_ids(parent)[:shared] + _unpack("i", packed)
    given["top_logprobs"] = tuple(
        tuple((token, float(value)) for token, value in top) for top in given.get("top_logprobs", ())
    )
    given["token_texts"] = tuple(given.get("token_texts", ()))
    if "constraint" in given:
        given["constraint"] = Constraint(**given["constraint"])
    return Completion(**given)


def _token_ids(call: Call | None) -> tuple[int, ...]:
    """Return the token ids of a call's prompt and completion, or none if they are unknown."""
    if call is None or call.completion is None:
        return ()
    return (call.completion.prompt_ids or ()) + (call.completion.completion_ids or ())


def _pack(code: str, numbers: Sequence[int] | Sequence[float]) -> str:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return binascii.b2a_base64(packed, newline=False).decode("ascii")


def _unpack(code: str, text: str) -> tuple[Any, ...]:
    packed = array(code)
    packed.frombytes(binascii.a2b_base64(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def encode_episode(record: EpisodeRecord, names: Mapping[int, str]) -> Json:
    """Encode a finished episode. Calls that are journalled separately appear by their names.

    `names` has those by index. The other calls have failed, and are stored in full here.
    """
    failure = record.failure
    return {
        "episode": record.id,
        "generation": record.generation,
        "example": encode_example(record.example),
        "calls": [names.get(call.index) or encode_call(call, None) for call in record.calls],
        "events": [
            _non_defaults(replace(event, text=mask_secrets(event.text)))
            | ({} if event.tool is None else {"tool": asdict(event.tool)})
            for event in record.events
        ],
        "output": record.output,
        "failure": None if failure is None else [failure.kind, mask_secrets(failure.reason), failure.origin],
        "seconds": record.seconds,
    }


def encode_example(example: Example) -> Json:
    """Return an example as JSON."""
    try:
        return plain(example)
    except TypeError:
        # Images and such are only described. If needed, they are read from the dataset again.
        inputs = {str(name): jsonable(value) for name, value in example.inputs.items()}
        return {"id": example.id, "inputs": inputs, "expected": jsonable(example.expected)}


def example_digest(encoded: Json) -> str:
    """Return a short digest of an encoded example."""
    return content_hash(json.dumps(encoded, sort_keys=True))


EVALUATION = "eval"
"""The phase of `etude evaluate`."""

_PHASE = re.compile(r"(train|validation)/(\d+)(?!\w)([^./]*)(?:\.(\d+))?")


def call_key(episode_id: str, name: str) -> str:
    """Return the journal key of an episode's call."""
    return f"{episode_id}/call/{name}"


def score_key(episode_id: str, evaluator: str, label: str = "score") -> str:
    """Return the journal key of an evaluator's score. Scores that were made again have another `label`."""
    return f"{episode_id}/{label}/{evaluator}"


def episode_scores(journal: Journal, episode_id: str, label: str = "score") -> dict[str, Json]:
    """Return the result of each evaluator for an episode: `score`, `reasoning`, `error`."""
    prefix = score_key(episode_id, "", label)
    return {key.removeprefix(prefix): stored for key, stored in journal.scan(prefix)}


class CallReader:
    """Reads the calls of one episode, which are stored as differences to each other."""

    def __init__(self, journal: Steps, episode_id: str) -> None:
        self._journal = journal
        self._episode_id = episode_id
        self._known: dict[str, Call] = {}

    def add(self, name: str, call: Call) -> None:
        """Remember a call that is being stored under `name`."""
        self._known[name] = call

    def read(self, name: str) -> Call:
        """Return the call stored under `name`. Raises StoreError when it is not in the journal."""
        pending: list[tuple[str, Json]] = []
        following: str | None = name
        while following is not None and following not in self._known:
            data = self._journal.get(call_key(self._episode_id, following))
            if data is None:
                raise StoreError(
                    f"{self._journal.path}: call {following} of episode {self._episode_id} is missing, so "
                    f"the run's database is incomplete; start a new run"
                )
            pending.append((following, data))
            following = parent_name(data)
        while pending:
            self.decode(*pending.pop())
        return self._known[name]

    def decode(self, name: str, data: Json) -> Call:
        """Decode a call that was stored under `name`. Unknown parents are read from the journal."""
        above = parent_name(data)
        parent = None if above is None else self.read(above)
        call = self._known[name] = decode_call(data, self._episode_id, parent)
        return call


def read_episode(journal: Steps, episode_id: str, example: Example | None = None) -> EpisodeRecord | None:
    """Return the finished episode with this id, or None. `example` replaces the one that was stored."""
    data = journal.get(episode_id)
    is_finished = isinstance(data, dict) and "episode" in data and "calls" in data
    return _decode_episode(journal, data, example) if is_finished else None


def require_episode(run: RunFolder, episode_id: str) -> EpisodeRecord:
    """Return the finished episode of a run with this id. Raises RequestError if there is none."""
    record = read_episode(run.journal, episode_id)
    if record is None:
        raise RequestError(
            f"run {run.name} has no finished episode '{episode_id}'; an episode is named by its phase, "
            f"example and generation. `etude episodes {run.path}` lists them"
        )
    return record


async def write_episode(journal: Steps, record: EpisodeRecord) -> None:
    """Store an episode that was not played here, each call as its difference to the one before."""
    names: dict[int, str] = {}
    before: tuple[str, Call] | None = None
    for call in record.calls:
        if call.completion is not None:
            names[call.index] = name = f"logged/{call.index}"
            await journal.put(call_key(record.id, name), encode_call(call, before))
            before = name, call
    await journal.put(record.id, encode_episode(record, names))


def _decode_episode(journal: Steps, data: Json, example: Example | None = None) -> EpisodeRecord:
    """Decode what `encode_episode` returned. `example` replaces the stored example."""
    reader = CallReader(journal, data["episode"])
    calls = [
        reader.read(stored) if isinstance(stored, str) else decode_call(stored, data["episode"], None)
        for stored in data["calls"]
    ]
    return EpisodeRecord(
        id=data["episode"],
        example=example or Example(**data["example"]),
        generation=data["generation"],
        calls=tuple(calls),
        events=tuple(
            Event(**each | {"tool": ToolUse(**each["tool"])} if "tool" in each else each)
            for each in data["events"]
        ),
        output=data["output"],
        failure=None if data["failure"] is None else Failure(*data["failure"]),
        seconds=data["seconds"],
    )


_IS_EPISODE = "substr(value, 1, 12) = '{\"episode\": '"
"""Matches the output of `encode_episode`. Nothing else in a journal begins like it."""


def stored_episodes(journal: Journal, prefix: str = "", *, after: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the ids and JSON of the finished episodes whose id starts with `prefix`, in the order of ids.

    `after` is an id: begin after it.
    """
    return journal.scan(prefix, start=f"{after}\0" if after else None, where=_IS_EPISODE)


def iter_episodes(journal: Journal, prefix: str = "") -> Iterator[EpisodeRecord]:
    """Yield the finished episodes whose id starts with `prefix`, in the order of ids."""
    for _, data in stored_episodes(journal, prefix):
        yield _decode_episode(journal, data)


def episode_phase(data: Json) -> str:
    """Return the phase of a stored episode."""
    return str(data["episode"]).removesuffix(f"/{data['example']['id']}/{data['generation']}")


_NEXT = f"SELECT key, value FROM steps WHERE key >= ? AND {_IS_EPISODE} ORDER BY key LIMIT 1"


def list_phases(journal: Journal) -> list[str]:
    """Return the phases that have episodes, in the order of `latest_first`. Reads one episode of each."""
    phases: list[str] = []
    first = ""
    while rows := journal.select(_NEXT, (first,)):
        phases.append(episode_phase(json.loads(rows[0][1])))
        first = f"{phases[-1]}0"  # "0" sorts after "/", so this skips the rest of the phase.
    return sorted(phases, key=latest_first)


def choose_phase(journal: Journal, wish: str | None) -> str:
    """Return the phase `wish`, or the latest one. Raises RequestError if there is none."""
    phases = list_phases(journal)
    if not phases:
        raise RequestError(f"{journal.path} has no episodes yet")
    if wish is not None and wish not in phases:
        raise RequestError(f"there are no episodes of the phase '{wish}'; there are: {', '.join(phases)}")
    return wish or phases[0]


def phase_stage(name: str) -> tuple[str, int] | None:
    """Return what a phase, or the phase of an episode, was collected for: `train` and 3 for `train/3-k2.2`.

    Evaluations and warm-ups have None.
    """
    match = _PHASE.match(name)
    return None if match is None else (match[1], int(match[2]))


def latest_first(phase: str) -> tuple[int, int, str, int]:
    """Sort key for phases: evaluations, validations, training, each latest first. The warm-up is last."""
    match = _PHASE.fullmatch(phase)
    if match is None:
        return (0 if phase == EVALUATION else 4 if phase.startswith("warm-up/") else 1, 0, phase, 0)
    return (2 if match[1] == "validation" else 3, -int(match[2]), match[3], -int(match[4] or 1))
