"""The page in a browser: type, stream, colours, race, errors. Needs Chromium and Playwright."""

from __future__ import annotations

import shutil

import pytest

from tests.server import rig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
WIDTHS = [{"width": 1100, "height": 800}, {"width": 390, "height": 844}]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=WIDTHS, ids=["desk", "phone"])
def page(browser, request):
    page = browser.new_context(viewport=request.param).new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    yield page
    assert not page.wrong
    assert page.evaluate("document.documentElement.scrollWidth") == request.param["width"]


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_chat_race_and_errors(page):
    expect = playwright.expect
    with rig.running(api_key="secret") as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_contain_text("Bearer")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_contain_text("prompt-lookup, k = 6")
        page.fill("#tokens", "60")
        ask(page, "the cat and the cat and the cat")
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator(".numbers")).to_contain_text("drafted")
        expect(page.locator(".text mark").first).to_be_visible()
        page.check("#race")
        ask(page, "the cat and the cat and the cat")
        expect(page.locator(".verdict")).to_contain_text("the same text")
        expect(page.locator(".verdict")).not_to_contain_text("NOT")
        assert page.locator(".answer").count() == 3
        page.uncheck("#race")
        page.fill("#temperature", "-1")
        ask(page, "x")
        expect(page.locator(".error")).to_contain_text("temperature")
        page.fill("#temperature", "0")
        page.fill("#key", "wrong")
        ask(page, "<b>x</b>")
        expect(page.locator(".error").last).to_contain_text("key")
        assert page.locator(".asked b").count() == 0
