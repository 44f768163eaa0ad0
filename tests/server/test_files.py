"""Files of a server, and the limits of uploads and jobs: refused by line and field, and by both numbers."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import FileObject

from etude.core.errors import RequestError
from etude.server.files import check_training_file, read_rows
from etude.wire.http_server import ApiError
from tests.models.tiny_models import policy
from tests.server.data import ASK, YES, dpo, supervised_rows, upload
from tests.server.process import ServerProcess


def test_a_file_comes_back_as_it_was(client: openai.OpenAI) -> None:
    content = "".join(json.dumps(row) + "\r\n\n" for row in supervised_rows(3)).encode()
    made = client.files.create(file=("../../up\\train.jsonl", content), purpose="fine-tune")
    FileObject.model_validate(made.model_dump())
    assert made.bytes == len(content) and made.status == "processed" and made.filename == "train.jsonl"
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert client.files.delete(made.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert caught.value.code == "file_not_found"


def test_an_expiry_that_would_not_be_kept_is_refused(client: openai.OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    content = json.dumps(supervised_rows(1)[0]).encode()
    with pytest.raises(openai.BadRequestError, match="leave 'expires_after' out") as refused:
        client.files.create(file=("a.jsonl", content), purpose="fine-tune", expires_after=expiry)
    assert refused.value.param == "expires_after"


def test_files_come_in_pages_the_newest_first(client: openai.OpenAI) -> None:
    made = [upload(client, supervised_rows(1), f"{number}.jsonl") for number in range(5)]
    assert [file.id for file in client.files.list(limit=2, purpose="fine-tune")][:5] == made[::-1]
    oldest_first = [file.id for file in client.files.list(limit=3, order="asc")]
    assert oldest_first == [file.id for file in client.files.list()][::-1]
    page = client.files.list(limit=2, after=made[3])
    assert [file.id for file in page.data] == [made[2], made[1]]


@pytest.mark.slow
def test_a_large_file_is_taken_whole(client: openai.OpenAI) -> None:
    row = {"messages": [{"role": "user", "content": "0123456789" * 1000}, YES]}
    content = (json.dumps(row) + "\n").encode() * 4000
    made = client.files.create(file=("large.jsonl", content), purpose="fine-tune")
    assert made.bytes == len(content) > 32 * 2**20
    assert client.files.content(made.id).read() == content
    client.files.delete(made.id)


def test_a_file_that_was_deleted_is_named_by_a_job_that_reads_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="file-1 was deleted"):
        next(read_rows(tmp_path / "file-1", "dpo"))


def test_an_upload_that_is_sent_again_is_kept_once(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as pool:
        (made,) = set(pool.map(lambda _: upload(client, supervised_rows(1), "again.jsonl"), range(4)))
    assert sum(file.filename == "again.jsonl" for file in client.files.list()) == 1
    assert upload(client, supervised_rows(2), "again.jsonl") != made
    client.files.delete(made)
    assert upload(client, supervised_rows(1), "again.jsonl") == made, "what was deleted is made anew"


LINE = json.dumps({"messages": [ASK, YES]})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "train.jsonl has no lines"),
        (f"{LINE}\n{{", "train.jsonl, line 2: not JSON"),
        (f"{LINE}\n\n[1]", "line 3: .*`trajectories`"),
        (f"{LINE}\n{json.dumps({'messages': [ASK]})}", "line 2: .* assistant message"),
        (f"{LINE}\n" + LINE.replace("assistant", "robot"), r"line 2: messages\[1\]\.role"),
        (f"{LINE}\n{json.dumps(dpo(1)[0])}", "line 2: .* dpo, .* supervised"),
        (json.dumps({"trajectories": [{"turns": [], "reward": 1}]}), r"line 1: trajectories\[0\]\.turns"),
        (f"{LINE}\n" + "[" * 100_000, "line 2: not JSON"),
        (f'{LINE}\n{{"messages": [{{"role": "user", "content": "\\ud800"}}]}}', "line 2: not JSON"),
        ("\xff\xfe", "line 1: "),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_nothing_is_kept(
    client: openai.OpenAI, content: str, told: str
) -> None:
    before = [file.id for file in client.files.list()]
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.files.create(file=("train.jsonl", content.encode("latin-1")), purpose="fine-tune")
    assert caught.value.code == "invalid_training_file" and caught.value.param == "file"
    assert [file.id for file in client.files.list()] == before


BAD_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [ASK, YES | {"tool_calls": [BAD_CALL]}]}, "arguments .*'add.*' .*broken"),
        ({"messages": [ASK, YES | {"reasoning_content": "well"}]}, "not write .* reasoning_content"),
        ({"messages": [YES, ASK, YES]}, "begins .* assistant"),
    ],
)
def test_what_the_model_could_not_say_is_refused_with_its_line(
    client: openai.OpenAI, row: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"train.jsonl, line 2: .*{told}") as caught:
        upload(client, [supervised_rows(1)[0], row])
    assert caught.value.code == "invalid_training_file"
    pair = dpo(1)[0]
    with pytest.raises(openai.BadRequestError, match=r"line 2: .*(the arguments|does not write|begins)"):
        answer = row["messages"][-1]
        context = [YES | {"tool_calls": [BAD_CALL]}] if row["messages"][0] is YES else []
        upload(client, [pair, pair | {"input": {"messages": [ASK, *context]}, "preferred_output": [answer]}])


def test_what_is_no_upload_is_refused(server: ServerProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a.txt", b"x"), purpose="vision")
    assert caught.value.param == "purpose"
    with server.http() as http:
        assert http.post("/v1/files", json={"file": "x"}).status_code == 400
        assert http.post("/v1/files", data={"purpose": "fine-tune"}).status_code == 400
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert http.post("/v1/files", content=b"--x\r\nbroken", headers=broken).status_code == 400
        assert http.post("/v1/files", content=b"", headers={"content-type": "multipart/form-data"}).is_error


def test_names_cannot_leave_their_folder(server: ServerProcess) -> None:
    with server.http() as http:
        for name in ("..%2F..%2Fserver.db", "../server.db", "%2e%2e/lock", "file-..", "%00"):
            for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/models/{name}"):
                assert http.get(path).status_code in (404, 405), path
                assert http.delete(path).status_code in (404, 405), path
    assert (server.data_dir / "server.db").exists()


def group(**changes: Any) -> dict[str, Any]:
    turn = {"context_ids": [3], "token_ids": [4, 5], "logprobs": [-0.1, -0.2]} | changes
    return {"trajectories": [{"turns": [turn], "reward": 1.0}]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": [-0.1, 7.5]}, r"trajectories\[0\].turns\[0\].logprobs\[1\]: .* 7\.5"),
        ({"logprobs": [-1e308, -0.1]}, r"logprobs\[0\]: .* -100000, "),
        ({"logprobs": [float("nan"), -0.1]}, "not JSON"),
        ({"token_ids": [4, 100]}, r"100 .* token id .* 100 tokens"),
        ({"token_ids": [4, -1]}, r"turns\[0\].token_ids\[1\]: "),
        ({"advantages": [1e300, 1]}, r"advantages\[0\]: .* 1e\+300"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused_with_its_line(
    changes: dict[str, Any], problem: str
) -> None:
    lines = "\n".join(map(json.dumps, (group(), group(**changes)))).encode()
    codec = replace(policy().codec, vocabulary=100)
    with pytest.raises(ApiError, match=rf"(?s)rows.jsonl, line 2: .*{problem}"):
        check_training_file("rows.jsonl", io.BytesIO(lines), codec)


def test_a_server_knows_its_models_vocabulary(server: ServerProcess) -> None:
    client = server.client()
    assert upload(client, [group(token_ids=[4, 200])])
    with pytest.raises(openai.BadRequestError, match=r"line 1: .*100000 .* token id "):
        upload(client, [group(token_ids=[4, 100_000])])
