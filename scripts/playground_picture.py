"""A picture of the server's page after two answers: one with speculation, the same one without.

    medusa serve --heads runs/shipped &
    python scripts/playground_picture.py --url http://127.0.0.1:8000 --out results/playground.png

Needs playwright and a Chromium on the path (Debian's `chromium` will do).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

TIMEOUT_MS = 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--out", type=Path, default="results/playground.png", help="PNG file to write")
    parser.add_argument("--prompt", default="Explain how a rainbow forms, in three sentences.")
    parser.add_argument("--max-tokens", type=int, default=120, help="longest answer")
    parser.add_argument("--width", type=int, default=1100, help="of the window, pixels")
    parser.add_argument("--height", type=int, default=760, help="of the window, pixels")
    parser.add_argument("--dark", action="store_true", help="as a browser set to dark shows it")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("got no chromium on the path, expected one; apt-get install chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size: ViewportSize = {"width": options.width, "height": options.height}
        page = browser.new_page(viewport=size, color_scheme="dark" if options.dark else "light")
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(options.url)
        page.get_by_label("Longest answer").fill(str(options.max_tokens))
        page.get_by_label("Speculate").uncheck()
        ask(page, options.prompt)
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Speculate").check()
        ask(page, options.prompt)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=options.out)
        browser.close()
    print(f"wrote {options.out}")


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Message", exact=True).fill(prompt)
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Answer complete").wait_for()


if __name__ == "__main__":
    main()
