"""A policy: the model that is sampled and trained, with its tokenizer, template and version."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import SafetensorError

from etude.config.finetuning import LoraOptions
from etude.core.errors import EngineError, RequestError, StoreError
from etude.core.job import ModelVersion
from etude.models.architecture import BUILDING, count_parameters, language_parts, why_unusable, with_lora
from etude.models.device import choose_device, choose_dtype, limit_threads, release_threads
from etude.models.text_codec import TextCodec, load_generation_config, load_tokenizer
from etude.models.weights import digest, load_model, load_tensors, loading, own_part, silence_transformers
from etude.store.files import WEIGHTS_FILE


class Policy:
    """One set of weights in memory, shared by the engine that samples and the learner that trains.

    Hold `lock` while you run the model, so that no token is ever sampled from half-updated weights.
    `weights_id` grows with every change of the weights, so caches of activations can notice it.
    """

    def __init__(self, model: Any, tokenizer: Any, source: str, device: torch.device) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.device = device
        self.version = 0
        self.weights_id = 0
        self.lock = threading.RLock()
        self.samplers: WeakSet[Any] = WeakSet()
        """The engines that sample from this policy. `free_sampling_memory` is called before training."""
        self.codec = TextCodec.create(tokenizer, model.config, getattr(model, "generation_config", None))
        self.template, self.stop_ids = self.codec.template, self.codec.stop_ids
        self.max_context = self.codec.max_context
        """Maximum number of tokens of prompt and completion together."""
        self._base: dict[str, torch.Tensor] | None = None
        self._reference: dict[str, torch.Tensor] | None = None
        """The trainable tensors before training, if they are not version 0's."""
        self.trained: Policy | None = None
        """The twin that is trained instead of this policy, if any; its weights are adopted in memory."""
        self.shares_base = False
        """Whether other policies may share this policy's tensors in memory."""
        self._digests: dict[int, str] = {}
        if len(parts := language_parts(model)) > 1:
            model.requires_grad_(False)  # Vision and audio parts are not trained on text.
            for part in parts:
                part.requires_grad_(True)
        model.eval()

    @classmethod
    def load(cls, source: str | Path, *, device: str = "auto", dtype: str = "auto") -> Policy:
        """Load a causal LM and its tokenizer from a folder, from a GGUF file, or by its Hugging Face name.

        Raises RequestError if there is no such model, or it cannot be used for chat.
        """
        silence_transformers()
        chosen = choose_device(device)
        with loading(source) as (name, file, config):
            parameters = count_parameters(config)
            limit_threads(parameters)
            kind = choose_dtype(dtype, chosen, parameters)
            tokenizer = load_tokenizer(name, file)
            load_generation_config(name)
            model = load_model(config, name, dtype=kind, **file).to(chosen)
        if reason := why_unusable(model.eval()):
            kind = model.config.model_type
            raise RequestError(f"cannot use the model '{source}' (of the type '{kind}'): {reason}")
        return cls(model, tokenizer, str(source), chosen)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that training changes, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def use_lora(self, options: LoraOptions, seed: int) -> None:
        """Add LoRA weights to the model, once. They start as the identity, so version 0 is unchanged.

        Raises RequestError if they do not fit the model.
        """
        from peft import LoraConfig, PeftModel

        if isinstance(self.model, PeftModel):
            return
        modules = options.target_modules or "all-linear"
        config = LoraConfig(
            r=options.r, lora_alpha=options.alpha, target_modules=modules, task_type="CAUSAL_LM"
        )
        with self.lock, BUILDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = with_lora(self.model, config)
            self.model.eval()
            self.weights_id += 1
            self._digests.clear()

    def twin(self) -> Policy:
        """Copy the policy with its own trainable tensors; frozen tensors are shared."""
        with self.lock:
            shared = {id(value): value for value in self.model.parameters() if not value.requires_grad}
            model, tokenizer = copy.deepcopy(self.model, dict(shared)), copy.deepcopy(self.tokenizer)
            other = Policy(model, tokenizer, self.source, self.device)
            other._base = self._base
            other.version, other.weights_id = self.version, self.weights_id
            return other

    def share_tensors(self) -> Policy:
        """Return another policy on the same tensors in memory, shared until one of the two changes them.

        A policy copies the shared tensors before it trains them all; each policy has its own LoRA weights.
        """
        with self.lock:
            memo: dict[int, Any] = {id(value): value for value in self.model.buffers()}
            for value in self.model.parameters():
                is_float = value.is_floating_point()
                memo[id(value)] = torch.nn.Parameter(value.data, value.requires_grad) if is_float else value
            model, tokenizer = copy.deepcopy(self.model, memo), copy.deepcopy(self.tokenizer)
            other = Policy(model, tokenizer, self.source, self.device)
            other.shares_base = self.shares_base = True
            return other

    def _own_trainable(self) -> None:
        """Copy the trainable tensors that other policies share, before training changes them."""
        if self.shares_base and not self.is_lora:
            for value in self.trainable().values():
                value.data = value.data.clone()
            self.shares_base = False
            self.weights_id += 1

    @property
    def is_lora(self) -> bool:
        """Whether only LoRA weights are trained."""
        return hasattr(self.model, "peft_config")

    def keep_base(self) -> None:
        """Keep a copy of version 0's trainable tensors, so that the policy can return to it."""
        with self.lock:
            self._own_trainable()
        if self._base is None:
            self._base = self.copy_tensors()

    def base_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the trainable tensors from before training; requires an earlier call of `keep_base`."""
        if self._base is None:
            raise RuntimeError("keep_base() was not called before training")
        return self._base if self._reference is None else self._reference

    def begin_from(self, version: ModelVersion) -> None:
        """Let training begin with a version's weights instead of version 0's.

        Raises StoreError if they cannot be read or have changed since they were written.
        """
        self._reference = load_tensors(Path(version.location) / WEIGHTS_FILE)

    def digest(self) -> str:
        """Return the hash of the tensors that training changes, in their current state."""
        with self.lock:
            if self.weights_id not in self._digests:
                self._digests = {self.weights_id: digest(self.trainable())}
            return self._digests[self.weights_id]

    def mark_changed(self, version: int, digest: str | None = None) -> None:
        """Record that memory now holds the weights of `version`; `digest` is their hash, if known."""
        with self.lock:
            self.version = version
            self.weights_id += 1
            self._digests = {} if digest is None else {self.weights_id: digest}

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Load the weights from before training, the reference model, for the duration of the block."""
        with self.lock:
            now = self.copy_tensors()
            self.load_tensors(self.base_tensors())
            try:
                yield
            finally:
                self.load_tensors(now)

    def adopt(self, version: ModelVersion) -> None:
        """Load the weights of `version` into memory.

        Raises StoreError if they cannot be read or have changed since they were written, and EngineError if
        they belong to another version. After an error, the weights in memory are unchanged.
        """
        with self.lock:
            if self.version == version.number and self.digest() == version.digest:
                return
            tensors: Mapping[str, torch.Tensor]
            twin = self.trained
            if twin and twin.version == version.number and twin.digest() == version.digest:
                tensors, actual = twin.trainable(), version.digest
            else:
                # Before any training, the weights in memory are the base.
                base = self.trainable() if self._base is None else self._base
                tensors = load_tensors(Path(version.location) / WEIGHTS_FILE) if version.number else base
                actual = digest(tensors)
            if actual != version.digest:
                raise EngineError(
                    f"the weights in {version.location} are not version {version.number}'s: "
                    f"their digest is {actual}, expected {version.digest}"
                )
            self.load_tensors(tensors)
            self.mark_changed(version.number, actual)
        release_threads()

    def copy_tensors(self) -> dict[str, torch.Tensor]:
        """Copy the trainable tensors in their current state."""
        return {name: value.detach().clone() for name, value in self.trainable().items()}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the trainable parameters. Raises EngineError if names or shapes differ."""
        self._own_trainable()
        parameters = self.trainable()
        odd = sorted(parameters.keys() ^ tensors.keys())
        odd += [name for name in parameters if not odd and parameters[name].shape != tensors[name].shape]
        if odd:
            raise EngineError(
                f"the saved weights belong to another model or LoRA setting; differing: {odd[:3]}"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own_part(tensors[name], parameter))

    def share_out(self, share: Callable[[Any], object], device: torch.device) -> None:
        """Let `share` replace the parameters by their parts on `device`; other processes have the rest."""
        with self.lock:
            share(self.model)
            self.device = device
            if self._base is not None:
                parameters = self.trainable()
                self._base = {name: own_part(value, parameters[name]) for name, value in self._base.items()}

    def export(self, folder: Path, *, merge: bool = True) -> None:
        """Write a folder that `transformers` loads: merged weights, or only the LoRA weights.

        Raises StoreError if writing fails.
        """
        silence_transformers()
        with self.lock:
            model = copy.deepcopy(self.model).merge_and_unload() if self.is_lora and merge else self.model
            if model is self.model and self.is_lora:
                # peft writes the path of the base's folder, which other machines do not have.
                name = Path(self.source).name if Path(self.source).is_absolute() else self.source
                model.peft_config["default"].base_model_name_or_path = name
            # LoRA weights are complete without the base's embeddings, which peft would add.
            options = {} if merge or not self.is_lora else {"save_embedding_layers": False}
            try:
                model.save_pretrained(folder, safe_serialization=True, **options)
                self.tokenizer.save_pretrained(folder)
            except (OSError, SafetensorError) as error:
                raise StoreError(f"cannot write the model to {folder}: {error}") from error


def policy_dtype(source: str | Path, wish: str, device: torch.device) -> torch.dtype:
    """Return the type in which `Policy.load` loads the weights. Raises RequestError as it does."""
    with loading(source) as (_, _, config):
        parameters = count_parameters(config)
    return choose_dtype(wish, device, parameters)
