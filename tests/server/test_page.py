"""The page in a browser: type, stream, colours, trees, race, errors. Needs Chromium and Playwright.

With FORETELL_SCREENSHOTS=DIR it leaves pictures there, to be looked at.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.server import rig
from tests.server.test_operations import slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
DESK, PHONE = {"width": 1100, "height": 800}, {"width": 390, "height": 844}
CONTEXTS = {
    "desk": {"viewport": DESK},
    "dark": {"viewport": DESK, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "has_touch": True, "device_scale_factor": 2},
}
TEXT = "the cat and the cat and the cat"


@pytest.fixture(scope="module")
def browser():
    playwright.expect.set_options(timeout=60_000)  # busy machines take their time
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=CONTEXTS)
def page(browser, request):
    page = browser.new_context(**CONTEXTS[request.param]).new_page()
    page.kind = request.param
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda asked: None if "//127.0.0.1" in asked.url else wrong.append(asked.url),
    )
    yield page
    assert not wrong
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]


@pytest.fixture(scope="module")
def server():
    with rig.running("prompt-lookup:k=9,ngram_min=1,branches=3,patience=0") as made:
        yield made


def show(page, name: str) -> None:
    if folder := os.environ.get("FORETELL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}-{page.kind}.png")


def ask(page, text: str, tokens: int = 60) -> None:
    page.fill("#tokens", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def colours(page, selector: str) -> str:
    return page.locator(selector).first.evaluate("e => getComputedStyle(e).backgroundColor")


def test_chat_race_and_errors(page):
    expect = playwright.expect
    with rig.running(api_key="secret") as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("asks for its key")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_contain_text("prompt-lookup, k = 6")
        ask(page, TEXT)
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator(".numbers")).to_contain_text("drafted")
        expect(page.locator(".numbers")).to_contain_text("τ")
        expect(page.locator(".text mark").first).to_be_visible()
        expect(page.locator("canvas")).to_be_visible()
        assert colours(page, ".text mark") != colours(page, ".text span")
        assert (colours(page, "body") == "rgb(22, 22, 20)") == (page.kind == "dark")
        page.check("#race")
        ask(page, TEXT)
        expect(page.locator(".verdict")).to_contain_text("the same text")
        expect(page.locator(".verdict")).not_to_contain_text("NOT")
        assert page.locator(".answer").count() == 3
        show(page, "race")
        page.uncheck("#race")
        page.fill("#temperature", "-1")
        ask(page, "x")
        expect(page.locator(".error")).to_contain_text("temperature")
        page.fill("#temperature", "0")
        page.fill("#key", "wrong")
        ask(page, "<b>x</b>")
        expect(page.locator(".error").last).to_contain_text("key")
        assert page.locator(".asked b").count() == 0
        show(page, "errors")


def test_a_step_shows_its_tree(page, server):
    expect = playwright.expect
    page.goto(server.url)
    ask(page, TEXT)
    expect(page.locator("#send")).to_have_text("Send")
    with_draft = page.locator(".step:has(mark)").first
    if page.kind == "phone":
        with_draft.tap()
    else:
        with_draft.hover()
    expect(page.locator(".tree p")).to_have_text(
        re.compile(r"Step \d+: \d+ guessed, [1-9]\d* accepted")
    )
    guessed, accepted = map(
        int, re.findall(r"(\d+) (?:guessed|accepted)", page.inner_text(".tree"))
    )
    assert page.locator(".node.accepted").count() == accepted
    assert page.locator(".node.rejected").count() == guessed - accepted > 0
    assert page.locator(".node.root").count() == page.locator(".node.own").count() == 1
    # The accepted path lies below the root, one node below the other, the target's own last.
    assert page.locator(".root + ul > li > .accepted").count() == 1
    path = " > li > .accepted + ul" * accepted
    assert page.locator(f".root + ul{path} > li > .own").count() == 1
    show(page, "tree")


def test_a_tree_is_in_sight_however_long_the_answer(page, server):
    expect = playwright.expect
    page.set_viewport_size({**page.viewport_size, "height": 500})
    page.goto(server.url)
    ask(page, TEXT, tokens=450)
    expect(page.locator("#send")).to_have_text("Send")
    page.locator(".text").focus()
    page.keyboard.press("Home")
    page.locator(".step").first.scroll_into_view_if_needed()
    assert page.locator(".text").bounding_box()["height"] > 100
    expect(page.locator(".tree p")).to_be_in_viewport(ratio=1)
    expect(page.locator(".tree .own")).to_be_in_viewport(ratio=1)
    show(page, "long")


def test_the_keyboard_is_enough(page, server):
    expect = playwright.expect
    page.goto(server.url)
    page.fill("#tokens", "40")
    page.focus("#prompt")
    page.keyboard.type(TEXT)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Send")
    page.locator(".text").focus()
    for key, step in [("Home", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 1)]:
        page.keyboard.press(key)
        expect(page.locator(".tree p")).to_contain_text(f"Step {step}:")
    page.keyboard.press("End")
    steps = page.locator(".step").count()
    expect(page.locator(".tree p")).to_contain_text(f"Step {steps}:")
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)  # the chart's first bar is the first step
    expect(page.locator(".tree p")).to_contain_text("Step 1:")


def test_an_empty_chat_offers_examples(page, server):
    expect = playwright.expect
    page.goto(server.url)
    page.fill("#tokens", "20")
    example = page.locator(".hello button").first
    text = example.inner_text()
    show(page, "hello")
    example.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".asked")).to_have_text(text)
    expect(page.locator(".hello")).to_have_count(0)
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".caption")).to_have_text(
        re.compile(r"Bars: tokens of each step, \d+ at most. Line: tokens/s, \d+ at most.")
    )


def test_an_answer_may_be_stopped_and_a_chat_begun_anew(page, server):
    expect = playwright.expect
    page.goto(server.url)
    with slow(server):
        ask(page, TEXT, tokens=400)
        expect(page.locator("#send")).to_have_text("Stop")
        expect(page.locator(".step").first).to_be_attached()
        page.keyboard.press("Escape")
        expect(page.locator(".error")).to_contain_text("stopped")
    expect(page.locator("#send")).to_have_text("Send")
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator(".hello")).to_be_visible()
    server.wait_idle()
