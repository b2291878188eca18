"""The page of `ralo serve` in Chromium: answers grow, modes stand beside dense, figures move, nothing is cut off."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from browsers import browser

pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
pytest.importorskip("uvicorn", reason="needs ralo[serve]")

from playwright.sync_api import Browser, Page, expect, sync_playwright

PHONE, WIDE = (390, 844), (1280, 800)  # CSS pixels
LENGTHS = """() => {
  window.lengths = new Set()
  new MutationObserver(() => lengths.add(document.querySelector(".answer .text")?.textContent.length ?? 0))
    .observe(document.querySelector("#messages"), { childList: true, subtree: true, characterData: true })
}"""
LOOKS = """() => {
  const root = document.documentElement, lines = [], dim = [], small = []
  const channel = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255)
  const parts = colour => colour.match(/[\\d.]+/g).map(Number)
  const paper = e => {
    for (; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor)
      if (colour.length === 3 || colour[3] > 0) return colour
    }
  }
  const seen = (rect, e) => { // the part that boxes around it let through
    let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom]
    for (e = e.parentElement; e; e = e.parentElement) {
      const style = getComputedStyle(e)
      if (style.overflowX === "visible" && style.overflowY === "visible") continue
      const box = e.getBoundingClientRect()
      ;[left, top] = [Math.max(left, box.left), Math.max(top, box.top)]
      ;[right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)]
    }
    return right - left > 1 && bottom - top > 1 ? [left, top, right, bottom] : null
  }
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element), range = document.createRange()
    if (!node.data.trim() || !element.checkVisibility() || element.closest(".unseen, .skip")) continue
    range.selectNodeContents(node)
    const boxes = [...range.getClientRects()].map(r => seen(r, element)).filter(Boolean)
    if (!boxes.length || style.clipPath !== "none") continue
    lines.push(...boxes.map(box => [node.data.trim().slice(0, 40), box]))
    const [a, b] = [light(parts(style.color)), light(paper(element))].sort((x, y) => y - x)
    if ((a + 0.05) / (b + 0.05) < 4.5) dim.push([node.data.trim().slice(0, 40), (a + 0.05) / (b + 0.05)])
    if (parseFloat(style.fontSize) < 12) small.push(node.data)
  }
  const overlapping = []
  lines.forEach(([s, a], i) => lines.slice(0, i).forEach(([t, b]) => {
    if (a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 3 && b[1] < a[3] - 3) overlapping.push([s, t])
  }))
  const outside = lines.filter(([, box]) => box[0] < -1 || box[2] > root.clientWidth + 1).map(([s]) => s)
  return { scroll: root.scrollWidth, client: root.clientWidth, overlapping, outside, dim, small, lines: lines.length }
}"""


@dataclass
class Visit:
    """A page, and what it should not have done."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)  # tests that provoke them clear them
    strangers: list[str] = field(default_factory=list)

    def settle(self, temperature: float | None = 0, most: int | None = 24) -> None:
        self.page.locator("#settings summary").click()
        self.page.get_by_label("Temperature").fill("" if temperature is None else f"{temperature}")
        self.page.get_by_label("Most tokens").fill("" if most is None else f"{most}")
        self.page.locator("#settings summary").click()

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_label("Message").press("Enter")

    def done(self) -> None:
        expect(self.page.get_by_role("button", name="Send")).to_be_visible(timeout=20_000)

    def figure(self, name: str) -> float:
        return float(self.page.locator(f"#{name}").inner_text().replace(",", ""))


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "ralo", "serve", "--port", "0", "--drain-s", "0", *flags]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr
        try:
            line = process.stderr.readline()
            found = re.search(r" at (http://127\.0\.0\.1:\d+)/ ", line)
            assert found, line + process.stderr.read()
            yield found[1], process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--kwta-k", "0.5") as (address, _):
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    command = browser()
    with sync_playwright() as playwright:  # ends with this file: it leaves an event loop in its thread
        opened = playwright.chromium.launch(executable_path=command, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visit]]:
    visits = []

    def go(url: str, size: tuple[int, int] = WIDE, scheme: Any = "light") -> Visit:
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        context.set_default_timeout(15_000)
        new = Visit(context.new_page(), url)
        visits.append(new)
        new.page.on("console", lambda m: new.errors.append(m.text) if m.type in ("error", "warning") else None)
        new.page.on("pageerror", lambda error: new.errors.append(str(error)))
        new.page.on("request", lambda r: None if r.url.startswith(url) else new.strangers.append(r.url))
        new.page.goto(url)
        return new

    yield go
    for one in visits:
        one.page.context.close()
        assert one.errors == [] and one.strangers == []


def asked(url: str, model: str, text: str, most: int) -> str:
    """What the API answers."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": most}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_an_answer_grows_and_the_next_goes_on_from_it(visit: Any, url: str) -> None:
    v = visit(url)
    v.settle(temperature=0.7, most=300)
    v.page.evaluate(LENGTHS)
    v.ask("Once upon a time")
    v.done()
    text = v.page.locator(".answer .text").text_content()
    lengths = [n for n in v.page.evaluate("[...lengths]") if n]
    assert len(lengths) >= 2 and lengths == sorted(lengths) and lengths[-1] == len(text)
    expect(v.page.locator(".answer .note")).to_contain_text(re.compile(r"^300 tokens · [\d.,]+ tokens/s, cut at its"))
    expect(v.page.locator("#state")).to_contain_text("300 tokens")
    with v.page.expect_request("**/v1/chat/completions") as sent:
        v.ask("And then?")
    v.done()
    told = [(m["role"], m["content"]) for m in sent.value.post_data_json["messages"]]
    assert told == [("user", "Once upon a time"), ("assistant", text), ("user", "And then?")]
    v.page.get_by_role("button", name="Clear").click()
    expect(v.page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("how", ["click", "Escape", "Clear"])
def test_stop(visit: Any, url: str, how: str) -> None:
    v = visit(url)
    v.settle(temperature=0.7, most=None)
    v.page.context.new_cdp_session(v.page).send("Emulation.setCPUThrottlingRate", {"rate": 4})
    v.ask("The sea")
    expect(v.page.locator(".growing .text")).not_to_be_empty()
    v.page.wait_for_timeout(1000)  # a page that cannot keep up with the tokens hears no button
    if how == "Escape":
        v.page.keyboard.press("Escape")
    else:
        v.page.get_by_role("button", name="Stop" if how == "click" else "Clear").click()
    v.done()
    if how == "Clear":
        expect(v.page.locator(".turn")).to_have_count(0)
    else:
        expect(v.page.locator(".answer .note")).to_contain_text("stopped")
    expect(v.page.locator("#running")).to_have_text("0", timeout=15_000)  # the server stopped too


def test_side_by_side(visit: Any, url: str) -> None:
    v = visit(url)
    v.settle()
    v.page.get_by_label("Side by side").check()
    v.ask("The king said")
    v.done()
    modes, dense = v.page.locator(".answer").all()
    for one, title in ((modes, "With modes"), (dense, "Dense")):
        assert one.locator("h3").inner_text() == title
        expect(one.locator(".note")).to_contain_text(re.compile(r"^24 tokens · [\d.,]+ tokens/s"))
    (left, top), (right, beside) = ((b["x"], b["y"]) for b in (modes.bounding_box(), dense.bounding_box()))
    assert left < right and top == beside
    assert dense.locator(".text").text_content() == asked(url, "mini:dense", "The king said", 24)
    v.page.get_by_role("button", name="Go on from this one: Dense").click()
    with v.page.expect_request("**/v1/chat/completions") as sent:
        v.ask("So")
    v.done()
    assert sent.value.post_data_json["messages"][1]["content"] == dense.locator(".text").text_content()
    v.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert modes.bounding_box()["x"] == dense.bounding_box()["x"], "stacked on a phone"


def test_the_panel_moves(visit: Any, url: str) -> None:
    v = visit(url)
    v.settle(most=600)
    v.ask("In the beginning")
    v.done()
    v.page.wait_for_timeout(1200)  # one more poll, and what other tests left in the last seconds weighs little
    expect(v.page.locator("#speed")).to_have_text(re.compile("[1-9]"))
    expect(v.page.locator("#read")).to_have_text(re.compile("[1-9]"))
    with_modes = v.figure("read")
    expect(v.page.locator("#modes li")).to_contain_text(re.compile(r"kwta\s*on\s*quality gap [\d.]+ %"))
    expect(v.page.locator(".layers li")).to_have_count(8)
    shares = [int(s[:-2]) for s in v.page.locator(".layers .value").all_inner_texts()]
    assert all(20 < share < 90 for share in shares)
    bars = v.page.locator(".bar i").evaluate_all("es => es.map(e => e.offsetWidth / e.parentElement.offsetWidth)")
    assert bars == pytest.approx([s / 100 for s in shares], abs=0.03)
    expect(v.page.locator("#guard-note")).to_contain_text("with dense; nothing was switched.")
    v.page.get_by_label("Dense").check()
    v.settle(most=1500)
    v.ask("In the beginning")
    until = time.monotonic() + 15
    while v.figure("read") < 1.05 * with_modes:
        assert time.monotonic() < until
        v.page.wait_for_timeout(200)
    v.done()
    assert "at most" in v.page.locator("#speed-past").get_attribute("aria-label")


def test_a_hidden_page_does_not_ask(visit: Any, url: str) -> None:
    v = visit(url)
    calls: list[str] = []
    v.page.on("request", lambda r: calls.append(r.url) if r.url.endswith("/live") else None)
    hide = "Object.defineProperty(document, 'hidden', {{ get: () => {}, configurable: true }});"
    show = "document.dispatchEvent(new Event('visibilitychange'))"
    v.page.wait_for_timeout(300)
    v.page.evaluate(hide.format("true") + show)
    v.page.wait_for_timeout(200)
    calls.clear()
    v.page.wait_for_timeout(1500)
    assert calls == []
    v.page.evaluate(hide.format("false") + show)
    v.page.wait_for_timeout(300)
    assert len(calls) == 1


def test_refusals_are_shown_and_the_message_is_kept(visit: Any, url: str) -> None:
    v = visit(url)
    v.ask("word " * 5000)
    expect(v.page.get_by_role("alert")).to_contain_text("the model's context is 4096: shorten it")
    assert v.page.get_by_label("Message").input_value().startswith("word word")
    assert len(v.errors) == 1 and "400" in v.errors[0]
    v.errors.clear()
    v.settle(temperature=7)
    v.ask("too hot")
    expect(v.page.get_by_label("Temperature")).to_be_visible()
    expect(v.page.locator(".turn")).to_have_count(1)


def test_a_model_s_text_is_text(visit: Any, url: str) -> None:
    v = visit(url)
    bad = "<img src=x onerror=alert(1)>\n<b>"
    parts = [{"choices": [{"delta": {"content": bad}}]}, {"error": {"message": f"broken {bad}"}}]
    body = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
    v.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))
    v.ask(bad)
    v.done()
    assert v.page.locator(".answer .text").text_content() == v.page.locator(".asked .text").text_content() == bad
    expect(v.page.get_by_role("alert")).to_contain_text("broken <img")
    assert v.page.locator("#messages img, #messages b").count() == 0
    v.page.unroute("**/v1/chat/completions")
    v.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body[:-60]))
    v.ask("again")
    expect(v.page.get_by_role("alert").last).to_contain_text("The connection ended before the answer did.")


def test_without_modes_and_without_a_server(visit: Any) -> None:
    with served() as (address, process):
        v = visit(address, PHONE)
        expect(v.page.locator("#switch-note")).to_contain_text("started without modes")
        expect(v.page.get_by_label("Dense")).to_be_checked()
        assert all(radio.is_disabled() for radio in v.page.get_by_role("radio").all())
        v.settle()
        v.ask("Hello")
        v.done()
        expect(v.page.locator(".answer .note")).to_contain_text("24 tokens")
        v.page.get_by_role("button", name="Live").click()
        expect(v.page.locator("#modes-note")).to_have_text("No mode is on: every token reads all weights.")
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        v.ask("Are you there?")
        expect(v.page.get_by_role("alert")).to_contain_text("The server does not answer.")
        expect(v.page.locator("#live-state")).to_contain_text("The server does not answer.")
        v.errors.clear()


def test_a_key_is_asked_for_and_the_guard_is_heard(visit: Any) -> None:
    with served("--kwta-k", "0.5", "--guard-kl", "0.0001", "--api-key", "secret") as (address, _):
        v = visit(address)
        expect(v.page.get_by_label("API key")).to_be_focused()
        v.page.keyboard.type("wrong")
        v.page.keyboard.press("Enter")
        expect(v.page.locator("#key-note")).to_have_text("That key was refused.")
        v.page.get_by_label("API key").fill("secret")
        v.page.keyboard.press("Enter")
        expect(v.page.get_by_label("API key")).to_be_hidden()
        expect(v.page.get_by_label("Message")).to_be_focused()
        v.settle(most=100)
        v.ask("Hello")
        v.done()
        expect(v.page.locator(".answer .note")).to_contain_text("100 tokens")
        expect(v.page.locator("#events li").first).to_contain_text(re.compile(r"kwta off at token \d+: KL"))
        expect(v.page.locator("#modes .off")).to_have_text("off")
        assert v.errors and all("401" in error for error in v.errors)
        v.errors.clear()
        v.page.reload()
        expect(v.page.locator("#model")).to_contain_text("mini")
        assert v.page.evaluate("localStorage.length") == 0
        v.page.goto(f"{address}/docs")
        expect(v.page.get_by_role("heading", name="POST /v1/chat/completions")).to_be_visible()


def test_keys_and_names(visit: Any, url: str) -> None:
    v = visit(url)
    expect(v.page.get_by_role("radio", name="Modes")).to_be_enabled()
    order = []
    for _ in range(9):
        v.page.keyboard.press("Tab")
        order.append(v.page.evaluate("document.activeElement.id || document.activeElement.textContent || 'radios'"))
        assert v.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", order
    controls = ["radios", "messages", "prompt", "send", "clear", "Settings"]
    assert order == ["Skip to the message", "API", *controls, "live"]
    v.page.locator("#settings summary").press("Enter")
    expect(v.page.get_by_label("Seed")).to_be_visible()
    v.page.get_by_role("radio", name="Modes").press("ArrowRight")
    expect(v.page.get_by_label("Dense")).to_be_checked()
    v.page.get_by_label("Message").press("a")
    v.page.get_by_label("Message").press("Shift+Enter")
    assert v.page.get_by_label("Message").input_value() == "a\n"
    nodes = v.page.context.new_cdp_session(v.page).send("Accessibility.getFullAXTree")["nodes"]
    focusable = [n for n in nodes if any(p["name"] == "focusable" for p in n.get("properties", ()))]
    assert len(focusable) >= 14
    assert [n for n in focusable if not n.get("name", {}).get("value")] == []
    log = v.page.get_by_role("log")
    assert log.get_attribute("aria-live") == "polite" and log.get_attribute("aria-label") == "Conversation"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_nothing_is_cut_off_or_dim(visit: Any, url: str, size: tuple[int, int], scheme: str) -> None:
    v = visit(url, size, scheme)
    v.settle(most=60)
    v.page.get_by_label("Side by side").check()
    v.ask("A word that is long: " + "x" * 120)
    v.done()
    expect(v.page.locator(".layers li")).to_have_count(8)
    check(v.page)
    v.page.locator("#settings summary").click()
    check(v.page)
    if size == PHONE:
        v.page.get_by_role("button", name="Live").click()
        expect(v.page.locator("#live")).to_be_focused()
        expect(v.page.get_by_label("Seed")).to_be_hidden()
        assert v.page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "the message stays in sight"
        v.page.locator("#live").evaluate("e => e.scrollTop = e.scrollHeight")
        check(v.page)
        v.page.keyboard.press("Escape")
        expect(v.page.locator("#live")).to_be_hidden()
    v.page.goto(f"{url}/docs")
    check(v.page)


def check(page: Page) -> None:
    found = page.evaluate(LOOKS)
    assert found["scroll"] <= found["client"] and found["lines"] > 10
    wrong = {name: found[name] for name in ("overlapping", "outside", "dim", "small") if found[name]}
    assert wrong == {}


def test_less_motion(visit: Any, url: str) -> None:
    v = visit(url)
    v.page.emulate_media(reduced_motion="reduce")
    moving = "[...document.querySelectorAll('*')].filter(e => parseFloat(getComputedStyle(e).transitionDuration))"
    assert v.page.evaluate(f"{moving}.length") == 0
