"""The projects that `etude init --task` writes: a folder each, with `rows.py`, and the files as `*.txt`."""
