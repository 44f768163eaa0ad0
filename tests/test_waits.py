"""No wait of the source is without a limit: each has one of its own, or stands below with what ends it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_architecture import modules

FOR_OTHERS = {"wait", "join", "acquire", "communicate", "recv", "readline", "readexactly", "wait_closed"}
"""Methods that wait for an event, a thread, a lock, a process or a peer. Tasks that are awaited, gathered or
waited for with `asyncio.wait` wait for one of these in their turn."""

PROGRAMS = {"run", "check_call", "check_output"}
"""Functions of `subprocess` that wait."""

CONTEXT = {
    "wanted_widths",
    "_function",
    "_within",
    "_entered",
    "_in_the_making",
    "_apart",
    "_inside",
    "where",
}
"""Context variables, which are there at once."""

ENDED_BY = {
    # By the end of what is watched: these tasks live as long as it, and are cancelled with their owner.
    "inference.embedded._admit: self._wake.wait()": "a request, or `close`",
    "integrations.mcp.source._hold: self._closing.wait()": "`close`; each call has `call_timeout`",
    "integrations.verifiers.play._serve: self._over.wait()": "`close`, which waits `STOP_SECONDS`",
    "runners.program.keep: self._is_over.wait()": "the end of the runner, when its head is gone too",
    "runners.process.ended: self._process.wait()": "the end of a runner, which the pool watches and kills",
    "cluster.runners._wait: self._killed.wait()": "the end of an actor, or its kill",
    "server.scheduler.start: process.wait()": "the end of a job",
    "server.scheduler._listen: nursery.wait()": "the end of the nursery, whose output has ended before",
    "store.database._take: self._queue.get()": "an operation, or `close`",
    "backends.cluster_learners._end_of: team.wait()": "the end of a team; `job_timeout`",
    # By the kill right before it.
    "rollout.program._end_of: process.wait()": "SIGKILL",
    "rollout.program._end_of: guard.wait()": "SIGKILL",
    "runners.process.ended: self._guard.wait()": "SIGKILL",
    "backends.cluster_learners._work: team.wait()": "SIGKILL",
    "backends.cluster_learners._work: guard.wait()": "SIGKILL",
    # By an event that is set right before it: a thread that looks at it ends.
    "jobs.part.asked_to_end: thread.join()": "`over`; each look has a time limit",
    "telemetry.prometheus.served: thread.join()": "`shutdown` before it",
    "core.threads.work: queue.get()": "the end of the program, whose daemon it is",
    "store.database.close: self._thread.join()": "the end of what came in, which the disk takes or refuses",
    # By a task that has a limit.
    "rollout.collector.collect: finished.get()": "`eval.general.timeout` of each episode",
    "rewards.gathering.output_of: slots.acquire()": "the evaluators' `timeout`",
    "wire.gateway._streamed: news.get()": "the answer, whose call has a limit, or its failure",
    "wire.gateway._events: news.get()": "the same",
    "server.scheduler._fork: self._started.get()": "the nursery's answer or end",
    # By the process that started this one: its end closes the pipe.
    "runners.program.main: sys.stdin.readline()": "the head's line, or its end",
}
"""The end of each wait that has no limit of its own. In a run the watchdog watches them all."""


def waits(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The waits of a module without a limit, with the function they are in."""
    for function in [tree, *_functions(tree)]:
        name = getattr(function, "name", "")
        for call, limited in _calls(function, limited=False):
            if not limited and _waits_for_ever(call):
                yield name, call


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _calls(node: ast.AST, *, limited: bool) -> Iterator[tuple[ast.Call, bool]]:
    """The calls in a function, without those of functions in it; whether a time limit is around each."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        around = limited
        if isinstance(child, ast.AsyncWith):
            around = around or any("timeout" in ast.unparse(item.context_expr) for item in child.items)
        if isinstance(child, ast.Call):
            yield child, around
        yield from _calls(child, limited=around)


def _waits_for_ever(call: ast.Call) -> bool:
    if any(keyword.arg == "timeout" for keyword in call.keywords) or not isinstance(call.func, ast.Attribute):
        return False
    whose = ast.unparse(call.func.value)
    if whose == "subprocess":
        return call.func.attr in PROGRAMS
    if whose in ("asyncio", "os.path") or isinstance(call.func.value, ast.Constant):
        return False
    if call.func.attr == "get":
        # Of a queue; context variables are asked by constants' and classes' names.
        return not call.args and not call.keywords and whose not in CONTEXT and whose.strip("_").islower()
    # With an argument these have a limit, or are other methods of the same name: `", ".join(words)`.
    return call.func.attr in FOR_OTHERS and not call.args


def test_every_wait_has_a_limit_or_something_that_ends_it():
    found = {
        f"{name.removeprefix('etude.')}.{function}: {ast.unparse(call)}"
        for name, tree in modules().items()
        for function, call in waits(tree)
    }
    assert sorted(found - ENDED_BY.keys()) == []
    assert sorted(ENDED_BY.keys() - found) == []


def test_no_wait_loses_a_cancellation():
    """`asyncio.wait_for` of Python 3.11 does, when what it waits for ends at the same moment.

    `asyncio.timeout` does not.
    """
    found = [
        f"{name}:{call.lineno}"
        for name, tree in modules().items()
        for call, _ in _calls(tree, limited=False)
        if ast.unparse(call.func) == "asyncio.wait_for"
    ]
    assert found == []
