"""The page in a real browser: Debian's chromium, driven by playwright. MEDUSA_SCREENSHOTS: a folder for pictures."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from medusa.infer import generate
from medusa.infer.server.auth import ApiKeys
from serving import KEY, serving

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and os.environ.get("MEDUSA_NEEDS_BROWSER"):
        pytest.fail("no chromium here, and MEDUSA_NEEDS_BROWSER is set")
    if CHROMIUM is None:
        pytest.skip("no chromium here; apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here; pip install playwright")
    with playwright.sync_playwright() as running:
        # A root user has no sandbox for it; it only ever opens our own page.
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    """A fresh page; whatever goes wrong on it fails the test, and so does whatever it fetches from elsewhere."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(served.url) else problems.append(request.url))
    page.set_default_timeout(20_000)
    page.goto(served.url)
    page.get_by_label("Longest answer").fill("80")
    yield page
    context.close()
    # Chromium itself notes every answer of status 400 as an error.
    assert not [problem for problem in problems if not problem.startswith(("data:", "Failed to load resource"))]


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finish(page):
    page.get_by_role("status").filter(has_text="Answer complete").wait_for()


def answers(page):
    return page.locator(".message.assistant .text")


def picture(page, name):
    if folder := os.environ.get("MEDUSA_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_an_answer_streams_in_with_its_drafted_text_marked(page, model):
    expected = generate(model, ["hello"], max_new_tokens=80)[0]
    page.get_by_text("tiny, context of 512 tokens").wait_for()
    ask(page, "hello")
    finish(page)
    assert answers(page).inner_text().split() == expected.text.split()
    spans = answers(page).locator("span")
    kinds = {spans.nth(n).get_attribute("class") for n in range(spans.count())}
    assert kinds == {"drafted", "base"}
    underlined = page.locator(".message .drafted").first.evaluate("node => getComputedStyle(node).textDecorationLine")
    assert underlined == "underline", "not by colour alone"
    assert float(page.locator("#tau").inner_text()) == pytest.approx(expected.stats.mean_acceptance_length, abs=0.01)
    assert float(page.locator("#speed").inner_text()) > 0 and page.locator("#share").inner_text().endswith("%")
    picture(page, "playground")
    page.get_by_label("Mark drafted text").uncheck()
    assert (
        page.locator(".message .drafted").first.evaluate("node => getComputedStyle(node).textDecorationLine") == "none"
    )


def test_speculation_off_gives_the_same_text_and_one_token_a_step(page):
    ask(page, "hello")
    finish(page)
    with_it = answers(page).inner_text()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("switch", name="Speculate").uncheck()
    ask(page, "hello")
    finish(page)
    assert answers(page).inner_text() == with_it and page.locator("#off-tau").inner_text() == "1.00"
    assert page.locator(".message .drafted").count() == 0
    assert float(page.locator("#on-tau").inner_text()) > 1


def test_several_turns_stop_strings_and_temperature_are_sent(page):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_label("Stop strings").fill("END\n\nSTOP")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Longest answer").fill("5")
    page.locator("#temperature").fill("0.7")
    ask(page, "one")
    finish(page)
    ask(page, "two")
    answers(page).nth(1).wait_for()
    finish(page)
    first, second = bodies
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.7, 5, ["END", "STOP"])
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]


def test_escape_stops_an_answer_and_frees_its_row(page, served):
    engine = served.context.service.engine
    step = engine.step

    def slow():
        time.sleep(0.02)
        return step()

    engine.step = slow
    try:
        ask(page, "go on and on")
        answers(page).locator("span").first.wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("status").filter(has_text="Stopped after").wait_for()
        served.wait_idle()
    finally:
        engine.step = step
    assert page.get_by_role("button", name="Send").is_enabled() and answers(page).inner_text()


def test_text_stays_text(page):
    """What a model or a person writes is never taken for HTML."""
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    finish(page)
    assert page.locator(".message img, .message b").count() == 0
    assert "<b>bold</b>" in page.locator(".message.user").inner_text()


def test_errors_are_shown_and_announced(page):
    page.get_by_label("Longest answer").fill("9999")
    ask(page, "too long")
    page.get_by_role("alert").wait_for()
    assert "ask for at most" in page.get_by_role("alert").inner_text()


def test_by_keyboard_alone_and_with_names_for_everything(page):
    page.reload()
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    controls = page.locator("button, input, textarea")
    for n in range(controls.count()):
        named = controls.nth(n).evaluate("node => node.labels?.length || node.textContent.trim().length")
        assert named, f"a control without a name: {controls.nth(n).evaluate('node => node.outerHTML')}"
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1 and page.get_by_role("log").count() == 1


def contrast(page, selector):
    """WCAG's ratio of a text's colour to what is behind it."""
    script = """node => {
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        let back = node;
        while (back && numbers(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
        return [getComputedStyle(node).color, getComputedStyle(back).backgroundColor].map(numbers);
    }"""

    def luminance(colour):
        parts = [value / 255 for value in colour[:3]]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, page.locator(selector).first.evaluate(script)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_light_and_dark(browser, served, scheme):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    page = context.new_page()
    page.goto(served.url)
    page.get_by_label("Longest answer").fill("80")
    ask(page, "hello " * 30)
    finish(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "it must not scroll sideways"
    for selector in (
        "h1",
        "#model",
        ".message.user .text",
        ".message .drafted",
        ".message .base",
        "#send",
        "dt",
        "#status",
    ):
        assert contrast(page, selector) >= 4.5, selector
    picture(page, f"phone-{scheme}")
    assert page.get_by_role("button", name="Send").bounding_box()["height"] >= 44
    context.close()


def test_a_locked_server_asks_for_the_key(browser, model):
    with serving(model, ApiKeys([KEY])) as locked:
        page = browser.new_page()
        page.goto(locked.url)
        page.get_by_text("missing or wrong API key").wait_for()
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").blur()
        page.get_by_text("tiny, context of 512 tokens").wait_for()
        ask(page, "hello")
        finish(page)
        assert answers(page).inner_text() and KEY not in page.content()
        page.close()
