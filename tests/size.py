"""The size of the house: `make size` prints it, and tests/test_architecture.py holds it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure() -> dict[str, int]:
    """Lines and modules of the source, lines of the tests, files of benchmarks, and keys of the config."""
    source, tests = list((ROOT / "src").rglob("*.py")), list((ROOT / "tests").rglob("*.py"))
    keys = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    return {
        "lines of source": sum(map(_lines, source)),
        "modules": len(source),
        "lines of tests": sum(map(_lines, tests)),
        "benchmark files": len(list((ROOT / "benchmarks").glob("*.py"))),
        # The page is made of the code, and held to it by tests/test_docs.py.
        "config keys": sum(line.startswith("| `") for line in keys),
    }


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    for name, count in measure().items():
        print(f"{count:7,}  {name}")
