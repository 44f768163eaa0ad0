"""Record the picture of the view that the README shows: a walk through a run, from its charts to its tokens.

    python web/recording.py RUN [--epoch 3] [--out docs/view.gif]

RUN is a run's folder, such as the one that `make demo` leaves. Needs chromium and chromedriver, selenium and
Pillow.
"""

from __future__ import annotations

import argparse
import io
import secrets
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

import uvicorn
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from etude.view.app import create_view
from etude.wire.http_server import listen, server_config

SIZE = (1000, 780)
"""Pixels of the window, wide and high; its frame takes some 140 of the height."""
COLOURS = 64
MILLISECONDS = 2200
"""For which each picture stands."""
SECONDS = 60
"""That a page may take."""


def main() -> None:
    """Open the pages one after the other, and keep a picture of each."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--epoch", type=int, default=3, help="whose episodes are shown")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "view.gif")
    given = arguments.parse_args()
    run = given.run.resolve()
    listening = listen("127.0.0.1", 0)
    port, key = listening.getsockname()[1], secrets.token_urlsafe(24)
    app = create_view(run.parent, key, port=port)
    server = uvicorn.Server(server_config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        pictures = walk(f"http://127.0.0.1:{port}", key, run.name, given.epoch)
    finally:
        server.should_exit = True
        thread.join()
    first, *others = map(drawn, pictures)
    first.save(given.out, save_all=True, append_images=others, duration=MILLISECONDS, loop=0, optimize=True)


def drawn(picture: bytes) -> Image.Image:
    """A PNG file as a picture of few colours."""
    return Image.open(io.BytesIO(picture)).convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS)


def walk(address: str, key: str, run: str, epoch: int) -> list[bytes]:
    """Pictures of a run's pages, each as a PNG file: the way of somebody who asks why an answer was wrong."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    browser.set_window_size(*SIZE)
    browser.set_page_load_timeout(SECONDS)
    pictures: list[bytes] = []

    def take(scrolled: int = 0) -> None:
        WebDriverWait(browser, SECONDS).until(
            lambda page: page.execute_script("return document.readyState") == "complete"
        )
        browser.execute_script(f"window.scrollTo(0, {scrolled})")
        # Charts and tokens are drawn in the frame after the scripts have run.
        browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 500))"
        )
        pictures.append(browser.get_screenshot_as_png())

    def follow(part: str, number: int = 0) -> None:
        links = browser.find_elements(By.CSS_SELECTOR, f'main a[href*="{part}"]')
        browser.get(links[number].get_attribute("href"))

    try:
        browser.get(f"{address}/?open={key}")
        take()
        browser.get(f"{address}/runs/{quote(run)}")
        take()
        take(scrolled=SIZE[1] // 2)
        browser.get(f"{address}/runs/{quote(run)}/phases/train/{epoch}")
        take()
        follow("/groups/train/")
        take()
        follow("/episodes/train/", 1)
        take()
        follow("/tokens/train/")
        take()
    finally:
        browser.quit()
    return pictures


if __name__ == "__main__":
    main()
