"""The things that nodes of a cluster lack, as tasks on them tell: packages, and the run folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from etude.cluster.placement import Node
from etude.core.errors import StoreError, first_line, install_command

Facts: TypeAlias = tuple[bool, list[str], str | None]
"""Whether a file is there with its content, packages that are not installed, and Etude's version."""

_ANSWER_SECONDS = 60.0
_NEEDED = {"runners": ["etude"], "learners": ["etude", "torch", "transformers", "peft", "accelerate"]}


def problems(nodes: Sequence[Node], shared: Path | None) -> list[str]:
    """A sentence for each thing that a node with processes of ours lacks.

    Learners must see the folder `shared`, or the one that it will be made in. This process is connected with
    the cluster.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    problems, look = [], _look()
    with _marked(shared) as (path, content):
        asked = []
        for node in nodes:
            packages = sorted({name for what in node.counts for name in _NEEDED[what]})
            here = NodeAffinitySchedulingStrategy(node.id, soft=False)
            task: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(look)
            asked.append(task.remote(str(path), content, packages))
        for node, answer in zip(nodes, asked, strict=True):
            try:
                problems += _problems_of(node, ray.get(answer, timeout=_ANSWER_SECONDS), path)
            except (GetTimeoutError, RayError) as error:
                problems.append(f"node {node.address} runs no tasks: {first_line(error)}")
    return problems


def _look() -> Callable[[str, str, list[str]], Facts]:
    """The task of a node. It is sent by value, so that a node needs nothing of ours to run it."""

    def look(path: str, content: str, packages: list[str]) -> Facts:
        import importlib.metadata
        import importlib.util
        import pathlib

        lacking = [name for name in packages if importlib.util.find_spec(name) is None]
        try:
            sees = pathlib.Path(path).read_text(encoding="utf-8") == content
        except OSError:
            sees = False
        return sees, lacking, None if "etude" in lacking else importlib.metadata.version("etude")

    return look


def _problems_of(node: Node, facts: Facts, path: Path | None) -> list[str]:
    sees, lacking, installed = facts
    trains, own, problems = "learners" in node.counts, version("etude"), []
    if lacking:
        extra = "local,ray" if trains else "ray"
        problems.append(
            f"node {node.address} lacks {', '.join(lacking)}; there, as here: {install_command(extra)}"
        )
    elif installed != own:
        problems.append(f"node {node.address} has Etude {installed}, and this one {own}: install the same")
    if path is not None and trains and not sees:
        problems.append(
            f"node {node.address} does not see {path.parent}: where learners train, it is on storage that "
            "all nodes mount at the same path, and that the same user may read"
        )
    return problems


@contextlib.contextmanager
def _marked(folder: Path | None) -> Iterator[tuple[Path | None, str]]:
    """A file in the folder, or in the nearest one above that is there, and its content."""
    content = secrets.token_hex(16)
    if folder is None:
        yield None, content
        return
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        descriptor, name = tempfile.mkstemp(prefix=".etude-check-", dir=folder)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}; learners write into a folder there") from error
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        yield path, content
    finally:
        path.unlink(missing_ok=True)
