"""Model families as they are: the chat templates of TRL's package, and tokenizers built tiny for them.

Run as a module it writes docs/families.md.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.core.errors import EngineError
from etude.models.template import ChatTemplate
from tests.models.shapes import SHAPES, played, thinking, tools

TRL_VERSION = "1.16.0"
"""Whose chat templates the table is made from."""
PAGE = Path(__file__).parents[2] / "docs" / "families.md"

MISTRAL_V13 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As the tokenizers of Mistral's later models write it (Magistral, Devstral)."""


@dataclass(frozen=True)
class Family:
    """Special tokens that a family's tiny tokenizer needs besides those in its template."""

    ends: str
    """The tokens that end a turn, separated by spaces."""
    extra: str = ""
    bos: str = ""
    drifts: str = ""
    """Why its template writes an earlier conversation differently, but for thinking."""


_CHATML = Family("<|im_end|> <|endoftext|>", "<think> </think> <tool_call> </tool_call>")
_NEMOTRON = Family("<|im_end|> <|endoftext|>", "<img> </img> <image>")
_GEMMA = Family("<end_of_turn> <eos>", bos="<bos>")
_GEMMA4 = Family("<turn|> <|tool_response> <eos>", "<|image> <image|>", "<bos>")
_DEEPSEEK = Family("<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>")
_LLAMA = Family("<|eot_id|> <|eom_id|> <|end_of_text|>", bos="<|begin_of_text|>")

FAMILIES = {
    "cohere": Family("<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "cohere2": Family("<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "deepseek_r1_distill": _DEEPSEEK,
    "deepseekv3": replace(
        _DEEPSEEK, drifts="its prompts open a thought, which a call without one leaves out"
    ),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "gemma4_v2": _GEMMA4,
    "gemma4_v3": _GEMMA4,
    "gemma4_v4": _GEMMA4,
    "gemma4_v5": _GEMMA4,
    "glm4moe": Family("<|user|> <|observation|> <|endoftext|>"),
    "gptoss": Family("<|return|> <|call|>", "<|endoftext|> <|constrain|>"),
    "llama3": _LLAMA,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "mistral_v13": Family("</s>", "[THINK] [/THINK] [ARGS]", "<s>"),
    "nemotron_3_nano": _NEMOTRON,
    "nemotron_3_super": _NEMOTRON,
    "nemotron_3_ultra": _NEMOTRON,
    "nemotron_3_5_lightning": _NEMOTRON,
    "phi3": Family("<|end|> <|endoftext|>"),
    "phi3_5": Family("<|end|> <|endoftext|>"),
    "qwen2_5": Family("<|im_end|> <|endoftext|>", "<tool_call> </tool_call>"),
    "qwen3": _CHATML,
    "qwen3_instruct_2507": _CHATML,
    "qwen3_5_think": _CHATML,
    "qwen3_5_nothink": _CHATML,
    "qwen3_6": _CHATML,
    "qwen3_8": _CHATML,
}
"""By the name of the chat template in TRL's package, Mistral's aside. LFM is left out, and models for images,
diffusion and training."""

SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[a-z_]+\|>|</?[a-z_]{3,30}>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,20}\]|\[gMASK\]"
)
"""Text in a template that looks like a special token."""


def source(name: str) -> str:
    """The text of a chat template."""
    if name == "mistral_v13":
        return MISTRAL_V13
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def words(name: str) -> Any:
    """A tokenizer of single bytes and of the family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    facts, text = FAMILIES[name], source(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {*SPECIAL.findall(text), *facts.ends.split(), *facts.extra.split(), *facts.bos.split()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=sorted(special),
        eos_token=facts.ends.split()[0],
        bos_token=facts.bos or None,
        chat_template=text,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def template(name: str) -> ChatTemplate:
    """A family's chat template, with its tiny tokenizer."""
    tokenizer = words(name)
    ends = tokenizer.convert_tokens_to_ids(FAMILIES[name].ends.split())
    return ChatTemplate(tokenizer, frozenset(ends))


def row(name: str) -> list[str]:
    """The line of a family in the table."""
    of = template(name)
    reasons: dict[str, None] = {}
    on_purpose = False
    for shape in SHAPES:
        try:
            play = played(of, shape)
        except EngineError:
            continue  # The template refuses such conversations.
        reasons |= play.drift
        on_purpose |= bool(play.on_purpose)
    extends = "yes, but for thinking that is left out" if on_purpose else "yes"
    why = FAMILIES[name].drifts
    assert bool(reasons) == bool(why), f"{name}: drifts because of {list(reasons)}"
    return [f"`{name}`", tools(of), thinking(of), f"{extends}; drifts, because {why}" if why else extends]


def render() -> str:
    """The page, with its table made anew."""
    heads = ["chat template", "tool calls", "thinking", "extends"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *map(row, FAMILIES))]
    return PAGE.read_text(encoding="utf-8").partition("| ")[0] + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
