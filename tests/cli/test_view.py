"""`etude view`: the command, in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess

import httpx

from tests.cli.projects import etude
from tests.forked import program


def test_the_link_that_is_printed_opens_the_run(project):
    assert etude("evaluate", "config.yml", "--name", "e").exit_code == 0
    command = [program() / "etude", "view", "e", "--port", "0"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        link = next(found[0] for line in view.stdout if (found := re.search(r"http\S+", line)))
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            page = browser.get(link)
        view.send_signal(signal.SIGINT)
        view.wait(60)
    assert page.status_code == 200 and str(page.url).endswith("/runs/e") and "<h1>e</h1>" in page.text
