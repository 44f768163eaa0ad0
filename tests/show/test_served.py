"""A model that a server trained, fetched by its address alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.projects import etude
from tests.server.conftest import model  # noqa: F401  the fixture of the servers' tests
from tests.server.data import ASK, create, supervised, upload, wait
from tests.server.process import ServerProcess
from tests.support import one_quick

KEY = "the-key-of-this-server"


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:  # noqa: F811
    """A server with a key, and LoRA weights that it has trained."""
    with ServerProcess(model, tmp_path_factory.mktemp("server"), key=KEY) as server:
        client = server.client()
        yield SimpleNamespace(server=server, client=client, lora=train(client, 4), base=model)


def train(client: openai.OpenAI, rank: int) -> str:
    options = {"n_epochs": 2, "batch_size": 4, "learning_rate": 0.02, "lora_rank": rank}
    return str(wait(client, create(client, upload(client, supervised(4)), **options).id).fine_tuned_model)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THE_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(trained: SimpleNamespace, name: str, *options: object):
    return etude("export", "--server", trained.server.address, "--api-key-env", "THE_KEY", name, *options)


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


@pytest.mark.parametrize("rank", one_quick(4, 0))
def test_it_loads_in_transformers_with_the_logprobs_that_are_served(trained: SimpleNamespace, rank: int):
    name = trained.lora if rank else train(trained.client, 0)
    done = export(trained, name, "--out", "mine")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "next: etude init my_agent --model mine"
    ids, served = logprobs_served(trained, name)
    loaded = AutoModelForCausalLM.from_pretrained("mine", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained("mine").decode(ids)
    assert logprobs_loaded(loaded, ids, len(served)) == pytest.approx(served, abs=1e-4)
    base = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    assert logprobs_loaded(base, ids, len(served)) != pytest.approx(served, abs=1e-2)
    assert name in Path("mine/README.md").read_text()
    # A second time it is replaced.
    assert export(trained, name, "--out", "mine").exit_code == 0


def test_lora_weights_alone(trained: SimpleNamespace):
    name = trained.lora
    done = export(trained, name, "--lora", "--json")
    assert done.exit_code == 0, done.output
    folder = Path(json.loads(done.stdout)["folder"])
    assert folder.parent == Path.cwd() and (folder / "adapter_config.json").is_file()
    ids, served = logprobs_served(trained, name)
    base = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder)
    assert logprobs_loaded(loaded, ids, len(served)) == pytest.approx(served, abs=1e-4)
    refused = export(trained, "tiny", "--lora")
    assert refused.exit_code == 1 and "has no LoRA weights" in refused.stderr


def test_as_gguf_the_converter_gets_the_whole_model(trained: SimpleNamespace, here: Path):
    """llama.cpp does not take tiny models: a converter in its place writes what it was given."""
    (here / "convert_hf_to_gguf.py").write_text(
        "import json, pathlib, sys\n"
        "names = sorted(path.name for path in pathlib.Path(sys.argv[1]).iterdir())\n"
        "out = sys.argv[sys.argv.index('--outfile') + 1].replace('{ftype}', 'f32')\n"
        "pathlib.Path(out).write_bytes(b'GGUF' + json.dumps(names).encode())\n"
    )
    done = export(trained, trained.lora, "--format", "gguf", "--llama-cpp", here, "--out", "g")
    assert done.exit_code == 0, done.output
    (file,) = Path("g").glob("*.gguf")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {*json.loads(file.read_bytes()[4:])}
    assert "ollama create" in Path("g/README.md").read_text()


def test_what_the_server_refuses_is_said(trained: SimpleNamespace, here: Path):
    unknown = export(trained, "ft:tiny:gone")
    assert unknown.exit_code == 1 and "404" in unknown.stderr and "ft:tiny:gone" in unknown.stderr
    assert "the server lists its models at /v1/models" in unknown.stderr
    keyless = etude("export", "--server", trained.server.address, trained.lora)
    assert keyless.exit_code == 1 and "401" in keyless.stderr and "--api-key-env" in keyless.stderr
    nobody = etude("export", "--server", "http://127.0.0.1:1", "m")
    assert nobody.exit_code == 1 and "ConnectError" in nobody.stderr
    odd = etude("export", "--server", "nowhere", "m")
    assert odd.exit_code == 1 and "an address must begin with http:// or https://" in odd.stderr
    runless = etude("export", "ft:tiny:gone")
    assert runless.exit_code == 2 and "etude export --server ADDRESS ft:tiny:gone" in runless.stderr
    assert etude("export", "--server", trained.server.address, "m", "--push", "me/m").exit_code == 2
    assert [*here.iterdir()] == []


def test_an_archive_that_breaks_off_leaves_nothing(here: Path):
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"\0" * 100)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Broken) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        refused = etude("export", "--server", f"http://127.0.0.1:{broken.server_port}/v1", "m")
        broken.shutdown()
    assert refused.exit_code == 1 and "broke off" in refused.stderr
    assert [*here.iterdir()] == []
