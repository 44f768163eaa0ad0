"""The manifests of docs/manifests, as KubeRay's definitions, the shell and Ray's own program take them.

`kuberay.json` has the parts of KubeRay's resource definitions that the manifests use.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema")

MANIFESTS = Path(__file__).parents[2] / "docs" / "manifests"
KINDS = json.loads(Path(__file__).with_name("kuberay.json").read_text(encoding="utf-8"))["kinds"]
SLURM = MANIFESTS / "slurm.sh"


def documents() -> list[tuple[str, dict[str, Any]]]:
    """Each document of the manifests, with the name of its file."""
    return [
        (path.name, document)
        for path in sorted(MANIFESTS.glob("*.yml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def problems(document: dict[str, Any]) -> list[str]:
    """Where a document differs from the definition of its kind."""
    errors = jsonschema.Draft202012Validator(KINDS[document["kind"]]).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


RESOURCES = [
    pytest.param(each, id=f"{name}:{each['kind']}") for name, each in documents() if each["kind"] in KINDS
]


@pytest.mark.parametrize("document", RESOURCES)
def test_kuberay_knows_every_key(document: dict[str, Any]):
    assert problems(document) == []


def scripts() -> dict[str, str]:
    """The shell scripts, with the one inside the config map."""
    inside = next(each for _, each in documents() if each["kind"] == "ConfigMap")["data"]["run.sh"]
    return {"slurm.sh": SLURM.read_text(encoding="utf-8"), "run.sh": inside}


@pytest.mark.parametrize("name", ["slurm.sh", "run.sh"])
def test_the_shell_takes_the_scripts(name: str):
    subprocess.run(["bash", "-n"], input=scripts()[name], text=True, check=True)
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(
        [checker, "--shell", "bash", "-"], input=scripts()[name], text=True, capture_output=True
    )
    assert result.returncode == 0, result.stdout


def test_the_commands_in_the_scripts_are_ours():
    from typer.main import get_command

    from etude.cli.app import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for text in scripts().values():
        for command, rest in re.findall(r"\betude (\w+)([^\n)]*)", text):
            options = {option for parameter in commands[command].params for option in parameter.opts}
            assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= options


STAND_INS = {
    "scontrol": "echo localhost",
    "hostname": 'echo "${HEAD_ADDRESS}"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "etude": 'echo "etude $*"; exec python -c "$PROGRAM"',
}
PROGRAM = "import ray; ray.init('auto'); print('nodes', len(ray.nodes()), ray.cluster_resources()['CPU'])"


@pytest.mark.cluster
def test_the_job_runs_with_ray_on_this_machine(tmp_path: Path):
    """The whole script with Ray's own `symmetric-run`, in a PID namespace: that ends by `ray stop`."""
    ray = pytest.importorskip("ray")
    isolated = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for processes here")
    programs, project = tmp_path / "bin", tmp_path / "project"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").touch()
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A port of its own, beside whatever else runs here; little memory, and no dashboard.
    script = SLURM.read_text().replace(":6379", ":26379")
    script = script.replace(
        "--num-cpus", "--include-dashboard=false --object-store-memory=80000000 --num-cpus"
    )
    (tmp_path / "job.sh").write_text(script)
    result = subprocess.run(
        [*isolated, "bash", str(tmp_path / "job.sh")],
        env={
            **os.environ,
            **{"PATH": path, "HOME": str(tmp_path), "PROJECT": str(project), "PROGRAM": PROGRAM},
            **{"HEAD_ADDRESS": ray.util.get_node_ip_address(), "SLURM_JOB_NODELIST": "localhost"},
            **{"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"},
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "etude train config.yml --name arithmetic --on auto" in result.stdout
    assert "nodes 1 2.0" in result.stdout
