"""Peers of Etude's engine: `generate`, the continuous batching of `transformers`, and vLLM."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as hf_logging

from etude.models.policy import Policy

PROGRAM = "ETUDE_TEST_VLLM"
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Prompts = Sequence[Sequence[int]]
Sample = Callable[[Prompts, int], list[int]]
"""Continues all prompts at once by so many tokens; gives how many logprobs it found for each."""


def generate(policy: Policy, cache: str | None) -> Sample:
    """`model.generate` with a kind of cache, and the logprobs of what was sampled."""
    model = _copied(policy)

    @torch.inference_mode()
    def sample(prompts: Prompts, tokens: int) -> list[int]:
        ids_BT = torch.tensor(prompts, device=model.device)
        found = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new_BT = found.sequences[:, ids_BT.shape[1] :]
        logprobs_BTV = torch.stack(found.logits, dim=1).log_softmax(-1)
        return [len(row) for row in logprobs_BTV.gather(2, new_BT[..., None])[..., 0].tolist()]

    return sample


def continuous(
    policy: Policy, page_size: int = 32, num_blocks: int = 512, max_batch_tokens: int = 256
) -> Sample:
    """`model.generate_batch`, whose manager is kept, and stays as large as its first batch needs it.

    By default with the fastest of several sizes that were tried for small models on a CPU; with its own
    choice it takes half as long again.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _copied(policy)
    # Earlier releases know pages as blocks.
    of_pages = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    wanted = ContinuousBatchingConfig(
        return_logprobs=True,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        **{of_pages: page_size},
    )

    def sample(prompts: Prompts, tokens: int) -> list[int]:
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=-1)
        found = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=wanted,
            persistent_manager=True,
        )
        return [len(one.logprobs) for one in found.values()]

    return sample


def _copied(policy: Policy) -> Any:
    """A model of one's own, that never stops by itself."""
    hf_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = copy.deepcopy(policy.model)
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Vllm:
    """A vLLM in a process of its own, which measures itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cost(self, prompts: Prompts, tokens: int, at_once: int) -> tuple[float, float]:
        """CPU and wall seconds of continuing all prompts, so many at a time."""
        asked = {"prompts": [list(prompt) for prompt in prompts], "tokens": tokens, "at_once": at_once}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found = self._answer()
        if found["counts"] != [tokens] * len(prompts):
            raise SystemExit(f"vLLM gave {found['counts']} logprobs, and {tokens} each were wanted")
        return found["cpu"], found["wall"]

    def wait(self) -> None:
        """Until it is ready."""
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended; run it with the model to see why")
        return dict(json.loads(line))


@contextmanager
def vllm_of(
    policy: Policy, folder: Path, dtype: str = "float32", *, compiled: bool = False, threads: int = 1
) -> Iterator[Vllm | None]:
    """A vLLM for the policy, where ETUDE_TEST_VLLM names its program."""
    program = os.environ.get(PROGRAM)
    if not program:
        yield None
        return
    policy.export(folder)
    process = subprocess.Popen(
        [
            Path(program).with_name("python"),
            Path(__file__).with_name("engine_vllm.py"),
            folder,
            dtype,
            *["compiled"] * compiled,
        ],
        env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        vllm = Vllm(process)
        print("waiting for vLLM", file=sys.stderr, flush=True)
        vllm.wait()
        yield vllm
    finally:
        process.kill()
        process.wait()
