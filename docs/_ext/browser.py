"""What must hold of the built site in a browser, as a reader meets it: ``nox -s browser``.

The browser is Debian's Chromium, driven by playwright, which brings none of its own here. Each gate takes an open page
and returns findings, a sentence each; `look` tries them on every page of a site.
"""

import collections
import concurrent.futures
import contextlib
import functools
import http.server
import io
import queue
import shutil
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import crawl

__all__ = [
    *("Tab", "accessibility", "figures", "first_screen", "keyboard", "length", "look", "noises", "opened", "overflow"),
    *("search", "served"),
]

#: The window of a reader at a desk, and the widths at which nothing may reach out of the page: the same window at
#: 200 percent, and a telephone.
WIDTH, HEIGHT = 1400, 900
#: Of a lesson.
SCREENS = 8
NARROW = (700, 400)

#: Of so many pages of a tab on which a look of words is in order, its colours are not looked at on others.
PAGES = 3

#: What axe is heard on; "moderate" and "minor" are matters of taste.
IMPACTS = ("serious", "critical")

#: What the theme tells the console of every first visit: it takes the mode that nobody has chosen yet for a wrong one.
#: Its remedy, a default in html_context, leaves a page without JavaScript without colours.
THEME_SAYS = "Got invalid theme mode: . Resetting to auto."

#: What readers search for, and the pages of which one must be among the first three results.
WORDS = {
    "softmax": ("auto_examples/plot_102_softmax.html",),
    "k-means": ("auto_examples/plot_303_kmeans.html",),
    "torch.compile": ("auto_examples/plot_302_numpy_to_cuda.html",),
    "roof": ("glossary.html", "method.html"),
    "L2": ("glossary.html", "auto_examples/plot_002_measuring.html"),
    "128256": ("auto_examples/plot_900_all_results.html",),
    "4090": ("gpus.html",),
}
AMONG = 3

#: Pages on which there must be a table to sort.
SORTED = ("auto_examples/plot_900_all_results.html",)

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
#: Drawn by the processor, and looked at by a program.
ARGUMENTS += ["--disable-partial-raster", "--disable-lcd-text", "--num-raster-threads=1", "--disable-smooth-scrolling"]
#: Requests to other machines fail.
ARGUMENTS += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
ARGUMENTS += ["--disable-software-rasterizer", "--disable-features=IsolateOrigins,site-per-process,MediaRouter"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing of it."""

    def log_message(self, *args):
        """Nothing."""

    def copyfile(self, *args):
        """Send a file, unless the page is left before it has arrived."""
        with contextlib.suppress(ConnectionError):
            super().copyfile(*args)


@contextlib.contextmanager
def served(folder):
    """The address at which this machine serves `folder`, for as long as the block lasts."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def chromium():
    """The path of Chromium; where there is none, FileNotFoundError says how to get it."""
    found = shutil.which("chromium")
    if not found:
        raise FileNotFoundError("There is no chromium on the PATH: apt-get install chromium.")
    return found


class Tab:
    """A page that a reader has opened for the first time, and what the browser noticed since.

    One tab opens page after page, in a third of the time of a tab for each. A route that refuses requests would switch
    off the browser's cache, so `ARGUMENTS` keep the browser on this machine.
    """

    def __init__(self, browser, address):
        self.address = address
        size = {"width": WIDTH, "height": HEIGHT}
        self.context = browser.new_context(viewport=size, color_scheme="light", reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.told.append(f"error: {error}"))
        self.page.on("request", self._asked)
        self.page.on("response", self._answered)
        self.looks = collections.Counter()  # on how many pages the colours of a look of words were in order

    def open(self, name):
        """Open a page, on which no choice made on another page has an effect."""
        if self.page.url != "about:blank":
            self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear() }")
            self.page.goto("about:blank")  # what the last page says until it is gone is not of this one
        self.name = name
        self.told = []
        self.page.goto(self.address + name)

    def _said(self, message):
        if message.type == "error" and message.text != THEME_SAYS:
            self.told.append(f"console: {message.text}")

    def _asked(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.told.append(f"{request.url}: a request that leaves the machine")

    def _answered(self, response):
        if response.status >= 400:
            self.told.append(f"{response.url.removeprefix(self.address)}: status {response.status}")

    def theme(self, name):
        """Show the page in the theme "light" or "dark", without its button."""
        self.page.evaluate("t => Object.assign(document.documentElement.dataset, { mode: t, theme: t })", name)

    def press_theme(self, name):
        """Choose the theme in the page's own menu; whether the page has it then."""
        menu = self.page.locator(".theme-switch-button:visible")
        if menu.count():
            menu.first.click()
            self.page.locator(f".theme-change-button[data-mode={name}]:visible").first.click(timeout=5000)
        return self.page.evaluate("document.documentElement.dataset.theme") == name


@contextlib.contextmanager
def opened():
    """A running browser, for as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield browser
        browser.close()


# The gates


def noises(tab):
    """Errors in the console, and requests that failed or would have left the machine."""
    return [f"{tab.name}: {told}" for told in dict.fromkeys(tab.told)]


#: How far down the page the first verdict in the box under its title ends: null where there is no box, 0 where the box
#: has no verdict.
VERDICT = """() => {
  const box = document.querySelector(".fb-box");
  const told = box && box.querySelector(".fb-verdict-line");
  return box && (told ? told.getBoundingClientRect().bottom + scrollY : 0);
}"""


def first_screen(tab):
    """A box under the title that gives no verdict on the first screen."""
    ends = tab.page.evaluate(VERDICT)
    if not ends and (ends == 0 or tab.name.startswith("auto_examples/plot_")):
        return [f"{tab.name}: no verdict stands under the title"]
    if ends is None or ends <= HEIGHT:
        return []
    return [f"{tab.name}: the first verdict in the box ends {ends:.0f} pixels down, on a screen of {HEIGHT}"]


def length(tab):
    """A lesson of more screens than a reader takes; folds are closed."""
    tall = tab.page.evaluate("document.querySelector('section.fb-lesson')?.getBoundingClientRect().height ?? 0")
    if tall <= SCREENS * HEIGHT:
        return []
    return [f"{tab.name}: {tall / HEIGHT:.1f} screens of {HEIGHT} pixels, a lesson has at most {SCREENS}"]


def overflow(tab):
    """Widths at which the page reaches out of the window, so that it must be moved sideways to be read."""
    found = []
    for width in NARROW:
        tab.page.set_viewport_size({"width": width, "height": HEIGHT})
        wide = tab.page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        if wide > width:
            found.append(f"{tab.name}: {wide} pixels wide in a window of {width}")
    tab.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    return found


def _shades(figure):
    """The lightness, 0 to 1, of what a picture lies on, by its rim; and how far what is drawn stands out from it."""
    import numpy as np
    from PIL import Image

    grey = np.asarray(Image.open(io.BytesIO(figure.screenshot())).convert("L"), dtype=float) / 255
    ground = float(np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    return ground, float(np.quantile(np.abs(grey - ground), 0.995))


def figures(tab):
    """A theme that the menu does not give, and figures that do not follow it.

    A figure follows when it lies on the theme's ground and stands out from it as far in the dark as in the light, give
    or take a half.
    """
    pictures = tab.page.locator(".bd-content img.sphx-glr-single-img:visible")
    seen, found = {"light": [_shades(picture) for picture in pictures.all()]}, []  # as every page is opened
    for theme in ("dark", "light"):
        if not tab.press_theme(theme):
            return [f"{tab.name}: its menu of themes does not give the {theme} one"]
        if theme not in seen:
            seen[theme] = [_shades(picture) for picture in pictures.all()]
    for i, ((light, ink), (dark, dark_ink)) in enumerate(zip(seen["light"], seen["dark"], strict=True), 1):
        if light < 0.7 or dark > 0.3 or dark_ink < ink / 2:
            found.append(
                f"{tab.name}: figure {i}: the ground has lightness {light:.2f} in the light and {dark:.2f} in the dark "
                f"theme, and what is drawn is {ink:.2f} and {dark_ink:.2f} away from it"
            )
    return found


def accessibility(tab):
    """What axe finds serious or critical, in both themes. Parts of the page are gone afterwards."""
    from axe_playwright_python.base import AXE_SCRIPT

    tab.page.evaluate(AXE_SCRIPT)
    tab.page.evaluate(Path(__file__).with_name("axe_fast.js").read_text(encoding="utf-8"))
    tab.page.mouse.move(-1, -1)  # a link that comes to lie under it has other colours
    known, looks = [look for look, pages in tab.looks.items() if pages >= PAGES], set()
    for theme in ("dark", "light"):
        tab.theme(theme)
        looks.update(tab.page.evaluate("known => fast.mark(known)", known))
    results = [("in either theme", tab.page.evaluate("fast.structure()"))]
    if looks:
        tab.page.evaluate("fast.prune()")
        for theme in ("light", "dark"):
            tab.theme(theme)
            results.append((f"in the {theme} theme", tab.page.evaluate("fast.colours()")))
    if not any(violations for _, violations in results[1:]):
        tab.looks.update(looks)
    found = []
    for where, violations in results:
        for violation in violations:
            nodes = violation["nodes"]
            if violation["impact"] in IMPACTS:
                more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
                found.append(
                    f"{tab.name}: {violation['rule']}, {where}: {nodes[0]['target']}{more}: {nodes[0]['why'][:200]}"
                )
    return found


def search(browser, address, words=None):
    """Words whose own page is not among the first results of the site's search."""
    found, tab = [], Tab(browser, address)
    for word, wanted in (WORDS if words is None else words).items():
        tab.open(f"search.html?q={urllib.parse.quote(word)}")
        with contextlib.suppress(Exception):  # too few results are told as none
            tab.page.wait_for_function("document.querySelectorAll('#search-results li a').length >= 1", timeout=10_000)
            tab.page.wait_for_function("!document.querySelector('#search-progress')?.textContent", timeout=10_000)
        links = tab.page.locator("#search-results li > a").evaluate_all("links => links.map((link) => link.href)")
        pages = [urllib.parse.urldefrag(link)[0].removeprefix(address).partition("?")[0] for link in links]
        first = list(dict.fromkeys(pages))  # an API entry a line comes from one page
        if not set(wanted) & set(first[:AMONG]):
            found.append(f"search for {word}: {' or '.join(wanted)} is not among the first of {first[:6]}")
        found += noises(tab)
    tab.context.close()
    return found


#: The values of the column of a head, and which way they run.
COLUMN = """head => {
  const rows = [...head.closest("table").tBodies[0].rows];
  return rows.map((row) => row.cells[head.cellIndex].innerText.trim());
}"""


def keyboard(tab):
    """Tables whose heads have buttons, and which do not sort when one has the focus and Enter is pressed."""
    found = []
    buttons = tab.page.locator("th button:visible, th [role=button]:visible")
    if not buttons.count():
        return [f"{tab.name}: no table has a button in its head to sort by"] if tab.name in SORTED else []
    button = buttons.first  # a head may have another behind it, to filter by
    head = button.locator("xpath=ancestor::th[1]")
    button.focus()
    orders = {}
    for _ in range(2):
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_timeout(100)
        orders[head.get_attribute("aria-sort")] = head.evaluate(COLUMN)
    if set(orders) != {"ascending", "descending"}:
        found.append(f"{tab.name}: Enter on the button of {head.inner_text()!r} gives aria-sort {list(orders)}")
    elif not _ascends(orders["ascending"]) or not _ascends(orders["descending"][::-1]):
        found.append(f"{tab.name}: the rows are not in the order that the head of {head.inner_text()!r} tells of")
    return found


def _ascends(texts):
    """Whether texts that begin with numbers ascend by these, and others by their letters; empty ones stand anywhere."""

    def key(text):
        with contextlib.suppress(ValueError):
            return 0, float(text.replace(",", "").replace("%", "").split()[0]), ""
        return 1, 0.0, text.casefold()

    keys = [key(text) for text in texts if text]
    return keys == sorted(keys)


# All of it

#: What is tried on every page, in this order: accessibility leaves little of it.
EVERYWHERE = (first_screen, length, figures, keyboard, overflow, noises, accessibility)


def look(folder, workers=2):
    """Try every gate on the site in `folder`; the findings, and how often each gate was tried."""
    site = crawl.Site(folder)
    # The heaviest page first, so that no worker is left with it at the end. Listings of sources are one template filled
    # forty times: one of them stands for all.
    names = sorted(site.pages, key=lambda name: -site.pages[name].bytes)
    listings = [name for name in names if name.startswith("_modules/")]
    names = [name for name in names if name not in listings[:-1]]
    waiting = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    found, tried = [], dict.fromkeys(("search", *(gate.__name__ for gate in EVERYWHERE)), 0)

    def work(first):
        with opened() as browser:
            if first:
                found.extend(search(browser, address))
                tried["search"] += len(WORDS)
            tab = Tab(browser, address)
            while True:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                tab.open(name)
                for gate in EVERYWHERE:
                    found.extend(gate(tab))
                    tried[gate.__name__] += 1

    with served(folder) as address, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work, i == 0) for i in range(workers)]:
            done.result()
    return found, tried


def main(folder):
    """Look at the site's files and at its pages; the exit status is 1 where something was found."""
    begun = time.monotonic()
    findings, looked_at = crawl.main(folder)
    seen, tried = look(folder)
    findings += seen
    counts = ", ".join(f"{gate} {count}" for gate, count in tried.items())
    print(*sorted(findings), sep="\n")
    print(f"{looked_at}; in the browser: {counts}; {time.monotonic() - begun:.0f} s: {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
