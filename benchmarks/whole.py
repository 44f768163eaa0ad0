"""The same training by Etude and by TRL, from the first step to the last, by the clock.

- *larger*: which of two numbers is larger; one turn, all weights of SmolLM2-135M.
- *guess*: a number is guessed in six turns, told after each whether it is higher or lower; Etude alone,
  because TRL's trainer asks once.
- *billion*: LoRA weights on a Qwen2 of 1.4 billion random weights, answers of 64 tokens; on a GPU alone.

Both sides have the same model, prompts, number of answers, limit of tokens, rate and precision, one optimiser
step on all answers of a step, no KL and no validation. Etude journals every call and keeps its versions, as
always; TRL saves nothing. Each side is a process of its own. A step begins where the last one ended; the
first one has everything that is done once, such as compiling.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import argument_parser, print_json, print_table, progress, silent

import etude
from etude.core.call import Completion
from etude.core.episode import EpisodeRecord
from etude.core.interfaces import Progress
from etude.models.source import PACKAGED, locate

ETUDE, TRL = "etude", "trl"
ROWS = 8
"""That TRL trains on at a time without a GPU, to spare memory."""


@dataclass(frozen=True)
class Task:
    """An agent of this file, and how it is trained."""

    agent: str
    reward: str
    max_tokens: int
    rate: float
    lora: bool = False
    only: str = ""
    """The one side that plays it."""
    needs_gpu: bool = False


TASKS = {
    "larger": Task("whole:answer", "whole:correct", 16, 2e-5),
    "guess": Task("whole:guess", "whole:quick_win", 8, 2e-5, only=ETUDE),
    "billion": Task("whole:answer", "whole:shape", 64, 1e-4, lora=True, needs_gpu=True),
}


def question(first: int, second: int) -> str:
    """The question of `larger`."""
    return f"Which number is larger, {first} or {second}? Answer with the number only."


@etude.workflow
async def answer(example: etude.Example, episode: etude.Episode) -> str:
    """Ask once."""
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text


@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    """1 for the number alone, 0.2 for the number among other words."""
    return right(str(example.expected), output)


def right(expected: str, text: str) -> float:
    """The reward of `larger`."""
    return 1.0 if text.strip() == expected else 0.2 if expected in text.split() else 0.0


@etude.evaluator
def shape(example: etude.Example, output: str) -> float:
    """A reward that random weights earn differently."""
    return any_text(output)


def any_text(text: str) -> float:
    """The reward of `billion`."""
    return (sum(map(ord, text)) % 17) / 16


@etude.workflow
async def guess(example: etude.Example, episode: etude.Episode) -> dict[str, Any]:
    """Guess a number from 1 to 20 in six turns."""
    ask = "I think of a number from 1 to 20. Guess it. Answer with one number only."
    secret, messages = int(example.expected), [{"role": "user", "content": ask}]
    for turn in range(1, 7):
        reply = await episode.chat(messages)
        found = re.search(r"\d+", reply.text)
        if found is None or int(found.group()) == secret:
            return {"turns": turn, "won": found is not None}
        told = "Higher." if int(found.group()) < secret else "Lower."
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": told}]
    return {"turns": 6, "won": False}


@etude.evaluator
def quick_win(example: etude.Example, output: dict[str, Any]) -> float:
    """More for fewer turns."""
    return 1.0 - 0.1 * (output["turns"] - 1) if output["won"] else 0.0


def examples(task: str, count: int) -> list[dict[str, Any]]:
    """The rows of a task; the same for both sides."""
    chance, rows = random.Random(3), []
    for number in range(count):
        first, second = chance.sample(range(10, 1000), 2)
        expected = chance.randint(1, 20) if task == "guess" else max(first, second)
        rows.append({"id": str(number), "question": question(first, second), "answer": str(expected)})
    return rows


def find_part(stack: Any) -> str:
    """The part of the work that a thread's stack is in; empty where it waits."""
    files = []
    while stack is not None:
        files.append((stack.f_code.co_filename, stack.f_code.co_name))
        stack = stack.f_back
    if files[0][1] in ("select", "wait", "poll", "get", "_worker") or "selectors" in files[0][0]:
        return ""
    for part, room in (("gradient", "/etude/learner/"), ("sampling", "/etude/engines/")):
        if any(room in file for file, _ in files):
            return part
    return "harness" if any("/etude/" in file for file, _ in files) else ""


@dataclass
class Watch(Progress):
    """Notes the end of each step, and twenty times a second the part of the work that goes on."""

    first_token: float | None = None
    steps: list[float] = field(default_factory=list)
    """The end of each step, and before them the beginning of the first."""
    tokens: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    is_over: threading.Event = field(default_factory=threading.Event)

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """The first step begins."""
        if not self.steps:
            self.steps.append(time.time())
            threading.Thread(target=self._look, daemon=True).start()

    def episode_finished(self, episode: EpisodeRecord) -> None:
        """Count its tokens."""
        done = [call.completion for call in episode.calls if isinstance(call.completion, Completion)]
        self.tokens += sum(each.usage.completion_tokens for each in done)
        self.first_token = self.first_token or time.time()

    def trained(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """A step has ended."""
        self.steps.append(time.time())

    def skipped(self, epoch: int, reason: str) -> None:
        """A step has ended without an update."""
        self.steps.append(time.time())

    def _look(self) -> None:
        own = threading.get_ident()
        while not self.is_over.wait(0.05):
            seen = {find_part(stack) for thread, stack in sys._current_frames().items() if thread != own}
            for part in ("gradient", "sampling", "harness"):
                if part in seen:
                    self.parts[part] += 1
                    break
            else:
                self.parts["waiting"] += 1


def by_etude(flags: Any) -> dict[str, Any]:
    """Train by `etude.train`."""
    task, watch, use = TASKS[flags.task], Watch(), DeviceUse()
    use.start()
    with tempfile.TemporaryDirectory() as folder:
        etude.train(
            task.agent,
            reward=task.reward,
            examples=examples(flags.task, flags.prompts * (flags.steps + 1)),
            model={"model": flags.model, "max_tokens": task.max_tokens},
            algorithm=etude.Grpo(group=flags.group, examples_per_epoch=flags.prompts),
            backend={"_type": "local", "learning_rate": task.rate}
            | ({"lora": {"r": 16, "alpha": 32}} if task.lora else {}),
            epochs=flags.steps,
            max_concurrency=flags.prompts * flags.group,
            output_dir=folder,
            progress=watch,
        )
    watch.is_over.set()
    looked = sum(watch.parts.values()) or 1
    parts = ("sampling", "gradient", "waiting", "harness")
    share = {part: round(watch.parts[part] / looked, 3) for part in parts}
    assert watch.first_token is not None
    return summarise_steps(watch.steps, use) | {
        "first_episode": round(watch.first_token - flags.began, 2),
        "tokens_per_s": round(watch.tokens / (watch.steps[-1] - watch.steps[0]), 1),
        "share_of_time": share,
    }


def by_trl(flags: Any) -> dict[str, Any]:
    """Train by TRL's GRPOTrainer, which samples by transformers' `generate`."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    from etude.models.device import choose_dtype

    task, on_gpu, ends = TASKS[flags.task], has_gpu(), [0.0]
    number = flags.prompts * flags.group
    rows = min(number, number if on_gpu else ROWS)
    dtype = choose_dtype("auto", torch.device("cuda" if on_gpu else "cpu"), 135_000_000)
    asked = examples(flags.task, flags.prompts * (flags.steps + 1))
    prompts = [[{"role": "user", "content": row["question"]}] for row in asked]

    def reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        texts = [each[0]["content"] for each in completions]
        if flags.task == "billion":
            return [*map(any_text, texts)]
        return [right(wanted, text) for wanted, text in zip(answer, texts, strict=True)]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.time())

    weights = torch.bfloat16 if task.lora else torch.float32
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=weights),
        processing_class=transformers.AutoTokenizer.from_pretrained(flags.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in asked]}),
        callbacks=[Ends()],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if task.lora
        else None,
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=flags.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=number // rows,
            num_generations=flags.group,
            max_completion_length=task.max_tokens,
            temperature=1.0,
            learning_rate=task.rate,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="dapo",
            bf16=dtype == torch.bfloat16,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    ends[0], use = time.time(), DeviceUse()
    use.start()
    trainer.train()
    return summarise_steps(ends, use)


class DeviceUse(threading.Thread):
    """Asks a GPU twice a second how busy it is."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[int] = []

    def run(self) -> None:
        """Ask until the process ends."""
        import torch

        while torch.cuda.is_available():
            self.seen.append(torch.cuda.utilization())
            time.sleep(0.5)


def summarise_steps(ends: Sequence[float], use: DeviceUse) -> dict[str, Any]:
    """The seconds of the first step, the median of the others, and how busy a GPU was."""
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    return {
        "first_step": round(seconds[0], 2),
        "seconds_per_step": round(statistics.median(seconds[1:] or seconds), 2),
        "steps": [round(each, 2) for each in seconds],
        "device_busy": round(statistics.mean(use.seen) / 100, 3) if use.seen else None,
    }


def has_gpu() -> bool:
    """Whether there is a GPU."""
    import torch

    return torch.cuda.is_available()


def find_model(task: Task, folder: Path) -> str:
    """A task's own model. One of random weights is written into `folder`."""
    return billion(folder) if task.needs_gpu else locate(PACKAGED)


def billion(folder: Path) -> str:
    """A model of 1.4 billion random weights with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 49152, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **marks)).to(torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate(PACKAGED)).save_pretrained(folder)
    return str(folder)


def main() -> int:
    """Measure, and print it; the exit code."""
    parser = argument_parser(str(__doc__))
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--side", choices=(ETUDE, TRL), help="only this one, in this process")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, help="in a step (16; on a GPU 32)")
    parser.add_argument("--group", type=int, help="answers of each (8; on a GPU 16)")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--began", type=float, default=time.time(), help="when the process was started")
    flags = parser.parse_args()
    flags.steps = 2 if flags.quick else flags.steps
    if not (flags.prompts and flags.group):
        prompts, group = (4, 4) if flags.quick else (32, 16) if has_gpu() else (16, 8)
        flags.prompts, flags.group = flags.prompts or prompts, flags.group or group
    if flags.side:
        flags.task = flags.task or next(iter(TASKS))
        with tempfile.TemporaryDirectory() as folder:
            flags.model = flags.model or find_model(TASKS[flags.task], Path(folder))
            print(json.dumps((by_etude if flags.side == ETUDE else by_trl)(flags)))
        return 0
    say = silent if flags.json else progress
    sizes = ["--prompts", str(flags.prompts), "--group", str(flags.group)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, task in TASKS.items():
            if name != (flags.task or name) or (task.needs_gpu and not has_gpu()):
                continue
            given = None if task.needs_gpu else flags.model
            model = find_model(task, Path(folder)) if given is None else locate(given)
            for side in (ETUDE, TRL):
                if task.only not in ("", side) or (side == TRL and importlib.util.find_spec("trl") is None):
                    continue
                say(f"{name}, {side}")
                asked = ["--task", name, "--side", side, "--steps", str(flags.steps), *sizes]
                asked += ["--model", model, "--began", str(time.time())]
                told = subprocess.run([sys.executable, __file__, *asked], stdout=subprocess.PIPE, check=True)
                results.setdefault(name, {})[side] = json.loads(told.stdout.splitlines()[-1])
    for sides in results.values():
        if TRL in sides:
            ratio = sides[TRL]["seconds_per_step"] / sides[ETUDE]["seconds_per_step"]
            sides["ratio_vs_trl"] = round(ratio, 2)
    if flags.json:
        print_json({"tasks": results}, {"episodes a step": int(sizes[1]) * int(sizes[3]), "run": 1})
        return 0
    rows = [
        [
            f"{name}, {side}",
            f"{own['seconds_per_step']}",
            f"{own['first_step']}",
            str(own.get("tokens_per_s", "")),
        ]
        for name, sides in results.items()
        for side, own in sides.items()
        if side in (ETUDE, TRL)
    ]
    notes = [
        f"{name}: {', '.join(f'{part} {share:.0%}' for part, share in sides[ETUDE]['share_of_time'].items())}"
        for name, sides in results.items()
    ]
    print_table("One step, in seconds", ["", "a step", "the first", "tokens/s"], rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
