"""A policy: the model that is sampled and trained, with its tokenizer, template and version."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.core.errors import EngineError, RequestError
from etude.core.job import ModelVersion
from etude.models.device import choose_device, choose_dtype, limit_threads
from etude.models.source import not_loaded, require_source
from etude.models.template import ChatTemplate
from etude.models.weights import digest, load_tensors, save_tensors

WEIGHTS_FILE = "trained.safetensors"
"""The tensors that training changes, by parameter name; what a version is restored from."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """LoRA weights (Hu et al., 2021): train low-rank updates and leave the base as it is."""

    r: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | None = None
    """Module names; None lets peft choose the linear layers of the attention and the MLP."""


class Policy:
    """One set of weights in memory, shared by the engine that samples and the learner that trains.

    `lock` is held by whoever runs the model, so that no token is ever sampled from half-updated
    weights. `weights_id` grows with every change, so that whoever caches activations can notice.
    """

    def __init__(self, model: Any, tokenizer: Any, source: str, device: torch.device) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.device = device
        self.version = 0
        self.weights_id = 0
        self.lock = threading.RLock()
        self.stop_ids = _stop_ids(model, tokenizer)
        self.template = ChatTemplate(tokenizer, self.stop_ids)
        self._base: dict[str, torch.Tensor] | None = None
        self._digests: dict[int, str] = {}
        model.eval()

    @classmethod
    def load(cls, source: str | Path, *, device: str = "auto", dtype: str = "auto") -> Policy:
        """Load a causal LM and its tokenizer from a folder or by its Hugging Face name.

        Raises RequestError when there is no such model or it cannot be used for chat.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        limit_threads()
        _silence_progress_bars()
        where = choose_device(device)
        require_source(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source))
            model = AutoModelForCausalLM.from_pretrained(str(source), dtype=choose_dtype(dtype, where))
        except (OSError, ValueError) as error:
            raise not_loaded(source, error) from error
        return cls(model.to(where), tokenizer, str(source), where)

    @property
    def max_context(self) -> int:
        """Tokens that prompt and completion may have together."""
        return int(getattr(self.model.config, "max_position_embeddings", 4096))

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that training changes, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def use_lora(self, options: LoraOptions, seed: int) -> None:
        """Put LoRA weights on the model, once; they start as the identity, so version 0 is unchanged."""
        from peft import LoraConfig, PeftModel, get_peft_model

        if isinstance(self.model, PeftModel):
            return
        config = LoraConfig(
            r=options.r,
            lora_alpha=options.alpha,
            target_modules=list(options.target_modules) if options.target_modules else "all-linear",
            task_type="CAUSAL_LM",
        )
        with self.lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = get_peft_model(self.model, config)
            self.model.eval()
            self.weights_id += 1
            self._digests.clear()

    @property
    def is_lora(self) -> bool:
        """Whether only LoRA weights are trained."""
        return hasattr(self.model, "peft_config")

    def keep_base(self) -> None:
        """Remember the trainable tensors of version 0, so that the policy can go back to it."""
        if self._base is None:
            self._base = {name: value.detach().clone() for name, value in self.trainable().items()}

    def base_tensors(self) -> Mapping[str, torch.Tensor]:
        """The trainable tensors as they were at version 0; `keep_base` must have been called."""
        if self._base is None:
            raise RuntimeError("keep_base() was not called before training")
        return self._base

    def digest(self) -> str:
        """Hash of the tensors that training changes, as they are now."""
        if self.weights_id not in self._digests:
            with self.lock:
                self._digests = {self.weights_id: digest(self.trainable())}
        return self._digests[self.weights_id]

    def mark_changed(self, version: int) -> None:
        """Say that the weights in memory are now those of `version`."""
        self.version = version
        self.weights_id += 1

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Within the block the weights in memory are those of version 0: the reference model."""
        now = {name: value.detach().clone() for name, value in self.trainable().items()}
        self.load_tensors(self.base_tensors())
        try:
            yield
        finally:
            self.load_tensors(now)

    def save_version(self, folder: Path, number: int) -> ModelVersion:
        """Write the trained tensors of the weights in memory into `folder`, as version `number`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self.trainable(), folder / WEIGHTS_FILE)
        return ModelVersion(number=number, location=str(folder), digest=digest(self.trainable()))

    def adopt(self, version: ModelVersion) -> None:
        """Make `version` the weights in memory. Raises EngineError when its digest does not match."""
        with self.lock:
            if self.version == version.number and self.digest() == version.digest:
                return
            tensors = (
                self.base_tensors()
                if version.number == 0
                else load_tensors(Path(version.location) / WEIGHTS_FILE)
            )
            self.load_tensors(tensors)
            self.mark_changed(version.number)
            if self.digest() != version.digest:
                raise EngineError(
                    f"the weights in {version.location} are not those of version {version.number}: "
                    f"their digest is {self.digest()}, expected {version.digest}"
                )

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the trainable parameters. Raises EngineError when names differ."""
        parameters = self.trainable()
        if parameters.keys() != tensors.keys():
            odd = sorted(parameters.keys() ^ tensors.keys())[:3]
            raise EngineError(f"the saved weights belong to another model or LoRA setting; differing: {odd}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    def export(self, folder: Path, *, merge: bool = True) -> None:
        """Write a folder that `transformers` loads: merged weights, or LoRA weights alone."""
        _silence_progress_bars()
        with self.lock:
            model = self.model
            if self.is_lora and merge:
                import copy

                model = copy.deepcopy(model).merge_and_unload()
            model.save_pretrained(folder, safe_serialization=True)
            self.tokenizer.save_pretrained(folder)


def _silence_progress_bars() -> None:
    """What is happening is told by whoever asked for it."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an assistant's turn, as the model's own files name them."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise RequestError(
            f"the model '{tokenizer.name_or_path}' names no end-of-turn token (eos_token_id); set it in its "
            "generation_config.json"
        )
    return frozenset(found)
