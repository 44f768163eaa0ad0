"""Programs as examples, of rows with the columns of Buggy APPS (`lrhammond/buggy-apps`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def programs(split: str) -> Iterator[dict[str, Any]]:
    """The right and the wrong programs of a split; the answer is 1 for a right one, and 0 for a wrong one."""
    for line in (Path(__file__).parent / "programs.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["apps_split"] != split or row["flags"]:
            continue
        for column, answer in (("solutions", 1), ("buggy_solutions", 0)):
            for number, program in enumerate(row[column]):
                yield {
                    "id": f"{row['apps_problem_id']}-{column}-{number}",
                    "question": row["question"],
                    "solution": program["solution"],
                    "answer": answer,
                }
