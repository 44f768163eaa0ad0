"""A model that a server trained, fetched by its address alone."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.data import ASK, create, supervised_rows, upload, wait
from tests.server.process import ServerProcess

KEY = "the-key-of-this-server"


@pytest.fixture(scope="module")
def tuning(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server with a key, and LoRA weights that it has trained."""
    with ServerProcess(model, tmp_path_factory.mktemp("server"), key=KEY) as server:
        client, options = server.client(), {"n_epochs": 2, "batch_size": 4, "learning_rate": 0.02}
        job = wait(client, create(client, upload(client, supervised_rows(4)), **options, lora_rank=4).id)
        yield SimpleNamespace(server=server, client=client, lora=job.fine_tuned_model, base=model)


def fetch(trained: SimpleNamespace, name: str, **query: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{trained.server.address}/export/{name}"
    return httpx.get(url, params=query, headers=headers, timeout=60)


def unpack(answer: httpx.Response, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(answer.raise_for_status().content)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def logprobs_served(trained: SimpleNamespace, name: str) -> tuple[list[int], list[float]]:
    """Token ids of a prompt and an answer, and the logprob of each of the answer's."""
    answer = trained.client.chat.completions.create(
        model=name, messages=[ASK], max_tokens=6, seed=3, logprobs=True, extra_body={"return_token_ids": True}
    ).model_dump()
    choice = answer["choices"][0]
    ids = [*answer["prompt_token_ids"], *choice["token_ids"]]
    return ids, [token["logprob"] for token in choice["logprobs"]["content"]]


def logprobs_loaded(loaded: torch.nn.Module, ids: list[int], count: int) -> list[float]:
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits.float().log_softmax(-1)[0]
    places = range(len(ids) - count - 1, len(ids) - 1)
    return [float(logits[place, ids[place + 1]]) for place in places]


def test_it_loads_in_transformers_with_the_logprobs_that_are_served(tuning: SimpleNamespace, tmp_path: Path):
    folder = unpack(fetch(tuning, tuning.lora), tmp_path)
    ids, served = logprobs_served(tuning, tuning.lora)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).decode(ids)
    assert logprobs_loaded(loaded, ids, len(served)) == pytest.approx(served, abs=1e-4)
    base = AutoModelForCausalLM.from_pretrained(tuning.base, dtype=torch.float32)
    assert logprobs_loaded(base, ids, len(served)) != pytest.approx(served, abs=1e-2)


def test_lora_weights_alone(tuning: SimpleNamespace, tmp_path: Path):
    folder = unpack(fetch(tuning, tuning.lora, lora="true"), tmp_path)
    ids, served = logprobs_served(tuning, tuning.lora)
    base = AutoModelForCausalLM.from_pretrained(tuning.base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder)
    assert logprobs_loaded(loaded, ids, len(served)) == pytest.approx(served, abs=1e-4)
    refused = fetch(tuning, "tiny", lora="true")
    assert refused.status_code == 400 and "has no LoRA weights" in refused.text
    assert fetch(tuning, "ft:tiny:gone").status_code == 404
