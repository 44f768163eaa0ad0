"""Makes programs.jsonl anew: 180 small problems, each with a right program and a wrong one.

    python make_programs.py [--count 180] [--seed 0] [--out programs.jsonl]

Every label was tried out: the right program passes its tests in the sandbox, the wrong one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from etude.scenarios.programs.generate import generate_rows


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=180, help="problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("programs.jsonl"))
    wanted = parser.parse_args()
    rows = asyncio.run(generate_rows(wanted.count, wanted.seed))
    wanted.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} problems to {wanted.out}")


if __name__ == "__main__":
    main()
