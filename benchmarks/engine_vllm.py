"""vLLM in its own environment: samples what it is told to on standard input, and says what that took.

Started by engine_peers.py, with the folder of a model, its precision, and `compiled` where it is to compile.
Imports nothing of Etude.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """A JSON object a line in, one out."""
    # What it logs may go to standard output; the answers are to have that for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1],
        dtype=sys.argv[2],
        enforce_eager="compiled" not in sys.argv[3:],
        max_model_len=1024,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # No detokenising, and the sampled token's logprob alone: the least that it can do.
        wanted = SamplingParams(max_tokens=asked["tokens"], ignore_eos=True, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        wall, cpu = time.perf_counter(), time.process_time()
        found = [
            output
            for at in range(0, len(prompts), asked["at_once"])
            for output in engine.generate(prompts[at : at + asked["at_once"]], wanted, use_tqdm=False)
        ]
        cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        counts = [len(output.outputs[0].logprobs) for output in found]
        print(json.dumps(cost | {"counts": counts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
