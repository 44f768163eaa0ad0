"""The view in a real browser: headless Chromium, a real server, and runs that the store has written."""

import shutil
import threading
from pathlib import Path

import pytest
import uvicorn

from etude.view.app import create_view
from etude.wire.http_server import listen, server_config
from tests.support import wait_until
from tests.view.conftest import KEY

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SECONDS = 60

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed")

PAGES = {
    "runs": "/",
    "run": "/runs/first",
    "phases": "/runs/first/phases",
    "phase": "/runs/first/phases/train/1",
    "found": "/runs/first/phases?q=-failed",
    "group": "/runs/first/groups/train/1/a",
    "plays": "/runs/played/groups/train/1/e",
    "episode": "/runs/first/episodes/train/2/a/0",
    "tokens": "/runs/first/tokens/train/1/a/1",
    "play": "/runs/played/episodes/train/1/e/0",
    "now": "/runs/first/now",
    "config": "/runs/first/config",
    "nowhere": "/nowhere",
}


@pytest.fixture(scope="module")
def address(runs):
    """A server of the runs, in a thread."""
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = create_view(runs, KEY, port=port)
    server = uvicorn.Server(server_config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser(address):
    """Chromium, with the link opened."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.set_page_load_timeout(SECONDS)
    browser.set_script_timeout(SECONDS)
    browser.get(f"{address}/?open={KEY}")
    assert browser.current_url == f"{address}/"
    yield browser
    browser.quit()


def press(browser, keys):
    browser.find_element("tag name", "body").send_keys(keys)


def look(browser, *, dark=False, width=1200):
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_for_everybody(browser, address, name):
    """No violation of axe's rules in light and in dark, no error of a script, and no sideways scrolling."""
    for dark in (False, True):
        look(browser, dark=dark)
        browser.get(address + PAGES[name])
        browser.execute_script(AXE.read_text(encoding="utf-8"))
        result = browser.execute_async_script("axe.run().then(arguments[0])")
        violations = [(each["id"], each["nodes"][0]["html"], each["help"]) for each in result["violations"]]
        assert not violations, violations
    look(browser, width=360)
    browser.get(address + PAGES[name])
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    look(browser, width=390)
    # Of tables, the columns with rewards are seen; of episodes side by side, their headings.
    beyond = browser.execute_script("""
        const words = /reward|mean|spread|validation/i, rights = [];
        for (const table of document.querySelectorAll("table"))
          [...table.rows[0].cells].forEach((head, index) => {
            if (words.test(head.textContent))
              for (const row of table.rows) if (row.cells[index]) rights.push(row.cells[index]);
          });
        rights.push(...document.querySelectorAll(".side h2 .quiet"));
        return rights.filter((each) => each.getBoundingClientRect().right > 390)
          .map((each) => each.outerHTML);
    """)
    assert not beyond
    errors = [each for each in browser.get_log("browser") if "404" not in each["message"]]
    assert not errors, errors


def test_charts_are_drawn(browser, address):
    look(browser)
    browser.get(f"{address}/runs/first")
    figures = browser.find_elements("css selector", "figure[data-chart]")
    wait_until(lambda: len(browser.find_elements("css selector", "figure canvas")) == len(figures) > 3)


@pytest.mark.slow
def test_the_keyboard_goes_everywhere(browser, address):
    look(browser)
    browser.get(f"{address}/")
    press(browser, "j")
    assert browser.switch_to.active_element.text == browser.find_element("css selector", "[data-row]").text
    browser.get(f"{address}/runs/first")
    press(browser, "ge")
    wait_until(lambda: browser.current_url.endswith("/runs/first/phases"))
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("name") == "q"
    browser.switch_to.active_element.send_keys("apples\n")
    wait_until(lambda: "q=apples" in browser.current_url)
    assert browser.find_element("css selector", "[data-row]").text == "train/1/b/0"
    press(browser, "u")
    wait_until(lambda: browser.current_url.endswith("/phases"))
    press(browser, "?")
    assert browser.find_element("css selector", "dialog[open] h2").text == "Keys"


@pytest.mark.slow
def test_tokens_tell_their_numbers_and_have_addresses(browser, address):
    look(browser)
    browser.get(f"{address}/runs/first/tokens/train/1/a/1#t4")
    told = browser.find_element("css selector", ".told")
    wait_until(lambda: "place" in told.text)
    said = " ".join(told.text.split())
    assert "place 4" in said and "probability 0.4966" in said and "call 0, v0" in said
    assert browser.find_elements("css selector", ".tokens i.warm2")


def test_the_tree_of_a_play_shows_who_said_what_and_what_it_was_worth(browser, address):
    look(browser)
    browser.get(f"{address}/runs/played/episodes/train/1/e/0")
    root, *branches = browser.find_elements("css selector", ".play details.branches")
    assert root.find_element("css selector", "summary").text.startswith("2 answers of verifier, worth")
    answers = browser.find_elements("css selector", ".play article")
    assert len(answers) == 2 + 4 + 8 and len(branches) == 2 + 4
    first, hint, decision = (" ".join(each.text.split()) for each in answers[:3])
    assert "verifier answer 1 of 2 round 0" in first and "main why?" in first
    assert "main look at <line> 3" in hint
    assert "decided: the play ends" in decision
    # Of the last answers those that differ from their siblings say by how much.
    worth = [
        each.text for each in browser.find_elements("css selector", ".play .worth .good, .play .worth .bad")
    ]
    assert worth and all(text.startswith(("(+", "(−")) for text in worth)
    # A branch can be folded; from an answer one comes to its call, which is folded too, and to its tokens.
    branches[0].find_element("css selector", "summary").click()
    assert not answers[2].is_displayed() and answers[0].is_displayed()
    call = browser.find_element("css selector", "#call-0")
    assert not call.is_displayed()
    answers[0].find_element("css selector", "a[href='#call-0']").click()
    wait_until(call.is_displayed)
    answers[0].find_element("link text", "tokens").click()
    wait_until(lambda: browser.current_url.endswith("/runs/played/tokens/train/1/e/0?call=0"))
