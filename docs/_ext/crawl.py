"""What must hold of the built site's files, found without a browser and without a network: ``nox -s browser``.

Sphinx checks what it knows of: cross-references. It does not see links in raw HTML, which half of a page is made of.
Here every file of the site is read as it is published. Each gate takes a `Site` and returns findings, a sentence each.
"""

import collections
import html.parser
import os
import re
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Page", "Site", "boxes", "dead_links", "foreign", "heavy_pages", "repeated_ids"]

#: A page's own HTML weighs less, in bytes: a reader may be on a train.
MOST_BYTES = 1_000_000

#: The kinds of <link> that a browser fetches by itself.
FETCHED = {"stylesheet", "preload", "prefetch", "preconnect", "modulepreload", "dns-prefetch", "icon", "manifest"}

#: Tags that lead nowhere and that nothing leads to: most of what a page of code or of numbers is written in.
PLAIN = re.compile(r'</?(?:span|td|th|tr)(?: class="[\w ]*")?>')

STYLE_URL = re.compile(r"""(?:@import\s+|url\()\s*["']?([^"')\s]+)""")


class Page(html.parser.HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text):
        super().__init__()
        self.bytes = len(text.encode())
        self.ids = []
        self.links = []  # what a reader may follow
        self.loads = []  # what a browser fetches by itself
        self.boxes = 0  # what stands under the title
        self.feed(PLAIN.sub("", text))
        self.names = {"top", *self.ids}

    def handle_starttag(self, tag, attributes):
        """Keep the addresses and names of one element."""
        given = {name: value or "" for name, value in attributes}
        self.boxes += "fb-box" in given.get("class", "").split()
        self.ids += [given[name] for name in ("id", "name") if given.get(name) and (name == "id" or tag == "a")]
        self.loads += [given[name] for name in ("src", "data", "poster") if name in given]
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        if "href" in given:
            fetched = tag == "link" and FETCHED & set(given.get("rel", "").split())
            (self.loads if fetched else self.links).append(given["href"])


@dataclass
class Site:
    """A folder of HTML files: the pages in it by their path, and all that is published beside them."""

    folder: Path
    pages: dict = field(default_factory=dict)
    styles: dict = field(default_factory=dict)

    def __post_init__(self):
        """Read every file once."""
        self.folder = Path(self.folder).resolve()
        for path in sorted(self.folder.rglob("*.html")):
            name = path.relative_to(self.folder).as_posix()
            if not name.startswith("_static/"):  # a theme's templates are published too, and nobody opens them
                self.pages[name] = Page(path.read_text(encoding="utf-8"))
        for path in sorted(self.folder.rglob("*.css")):
            self.styles[path.relative_to(self.folder).as_posix()] = STYLE_URL.findall(path.read_text(encoding="utf-8"))


def _why_dead(site, name, address):
    """Why `address`, as written in the file `name`, leads nowhere; None where it does not, or leads elsewhere."""
    parts = urllib.parse.urlsplit(address.strip())
    if parts.scheme or parts.netloc:
        return None
    path = urllib.parse.unquote(parts.path)
    if path.startswith("/"):
        target = site.folder / path.lstrip("/")
    else:
        target = (site.folder / name).parent / path if path else site.folder / name
    target = Path(os.path.normpath(target))
    if not target.is_relative_to(site.folder):
        return "leads out of the site"
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    if target.stat().st_size == 0:
        return "the file is empty"
    page = site.pages.get(target.relative_to(site.folder).as_posix())
    fragment = urllib.parse.unquote(parts.fragment)
    if fragment and page is not None and fragment not in page.names:
        return "the page has no such anchor"
    return None


def dead_links(site):
    """Links, anchors, downloads, pictures, scripts and style sheets of this site that lead nowhere."""
    written = [(name, address) for name, page in site.pages.items() for address in page.links + page.loads]
    written += [(name, address) for name, found in site.styles.items() for address in found]
    checked = dict.fromkeys(written)
    return [f"{name}: {address}: {why}" for name, address in checked if (why := _why_dead(site, name, address))]


def foreign(site):
    """What pages and style sheets would load from elsewhere by themselves; links that a reader follows are none."""
    written = [(name, address) for name, page in site.pages.items() for address in page.loads]
    written += [(name, address) for name, found in site.styles.items() for address in found]
    return [f"{name}: {address}: loads from elsewhere" for name, address in written if _away(address)]


def _away(address):
    return re.match(r"\s*(https?:)?//", address) is not None


def heavy_pages(site):
    """Pages whose own HTML weighs `MOST_BYTES` or more."""
    return [
        f"{name}: {page.bytes:,} bytes of HTML, and a page should have less than {MOST_BYTES:,}"
        for name, page in site.pages.items()
        if page.bytes >= MOST_BYTES
    ]


def repeated_ids(site):
    """Ids that a page has more than once: a link to one of them finds the first."""
    return [
        f"{name}: #{repeated}: more than one element has this id"
        for name, page in site.pages.items()
        for repeated, times in sorted(collections.Counter(page.ids).items())
        if times > 1
    ]


def boxes(site):
    """Pages of the gallery without one box under the title."""
    found = []
    for name, page in site.pages.items():
        stem = name.rpartition("/")[2]
        if not stem.startswith("plot_") or name.startswith("evidence/"):
            continue
        if page.boxes != 1:
            found.append(f"{name}: {page.boxes} boxes under the title, and a page has one")
    return found


GATES = (dead_links, foreign, heavy_pages, repeated_ids, boxes)


def main(folder):
    """Try every gate on the site in `folder`; returns its findings and what was looked at."""
    site = Site(folder)
    found = [finding for gate in GATES for finding in gate(site)]
    links = sum(len(page.links) + len(page.loads) for page in site.pages.values())
    return found, f"{len(site.pages)} pages, {links:,} links"


if __name__ == "__main__":
    findings, looked_at = main(sys.argv[1])
    print(*findings, f"{looked_at}: {len(findings)} findings", sep="\n")
    sys.exit(bool(findings))
