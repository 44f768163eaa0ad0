"""OpenMP's threads, set up for machines on which other programs run too."""

from __future__ import annotations

import os

_TURNS = "10000"
_NAMES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def spin_briefly() -> None:
    """Have threads that wait for one another go to sleep soon; a program calls it before it loads torch.

    By default they turn some 300,000 times first, and take the core on which another would be working.
    Beside other programs (load 8, two cores, SmolLM2-135M's shape, two threads) loading and sampling 16 x 8
    tokens three times took 18 and 19 s of CPU time so, and 49 s by default (once). On a machine with nothing
    else to do no difference was seen (152 to 171 and 141 to 171 tokens/s, three runs of each). Where the
    environment says how to wait, it is as it says.
    """
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = _TURNS
