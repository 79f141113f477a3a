"""The gates of the built site, each on a small site that breaks what it guards."""

import pytest

import browser
import crawl


@pytest.fixture
def site(tmp_path):
    """A site of two pages in which every gate finds nothing: `broken` writes over one of its files."""
    files = {
        "index.html": """<title>Start</title><link rel="stylesheet" href="_static/book.css">
            <h1 id="start">Start</h1><a href="#start">here</a> <a href="pages/one.html?highlight=x#first%20part">one</a>
            <a href="pages/">pages</a> <a href="https://example.org/nowhere">elsewhere</a> <a href="#">up</a>
            <a download href="pages/table.csv">table</a> <img src="picture.png" srcset="picture.png 2x">""",
        "pages/index.html": '<a href="../index.html#start">back</a>',
        "pages/one.html": '<h2 id="first part">First</h2><a name="old"></a><a href="#old">old</a>',
        "pages/table.csv": "M,N\n1,2\n",
        "_static/book.css": "@font-face { src: url('font.woff2') } a { background: url(data:image/png;base64,AA) }",
        "_static/font.woff2": "font",
        "_static/template.html": '<a href="{{ no link }}"></a>',
        "picture.png": "picture",
    }

    def broken(name="index.html", text="", add=""):
        for path, content in {**files, name: (text or files[name]) + add}.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(content)
        return crawl.Site(tmp_path)

    return broken


def test_a_whole_site_passes_the_crawl(site):
    assert [finding for gate in crawl.GATES for finding in gate(site())] == []


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        ({"add": '<a href="pages/two.html">two</a>'}, "index.html: pages/two.html: there is no such file"),
        ({"add": '<a href="#end">end</a>'}, "index.html: #end: the page has no such anchor"),
        ({"add": '<a href="pages/one.html#second">2</a>'}, "index.html: pages/one.html#second: the page has no such"),
        ({"add": '<a href="_static/">folder</a>'}, "index.html: _static/: there is no such file"),
        ({"add": '<a href="../secret.html">out</a>'}, "index.html: ../secret.html: leads out of the site"),
        ({"add": '<script src="missing.js"></script>'}, "index.html: missing.js: there is no such file"),
        ({"add": '<img srcset="picture.png, large.png 2x">'}, "index.html: large.png: there is no such file"),
        (
            {"name": "_static/book.css", "add": "b { background: url(gone.svg) }"},
            "_static/book.css: gone.svg: ",
        ),
    ],
)
def test_a_dead_link_is_found(site, breaks, why):
    (found,) = crawl.dead_links(site(**breaks))
    assert found.startswith(why)


def test_an_empty_download_is_found(site):
    whole = site()
    (whole.folder / "pages/table.csv").write_text("")
    assert crawl.dead_links(whole) == ["index.html: pages/table.csv: the file is empty"]


@pytest.mark.parametrize(
    "breaks",
    [
        {"add": '<script defer src="https://example.org/x.js"></script>'},
        {"add": '<link rel="stylesheet" href="//example.org/x">'},
        {"add": '<img srcset="picture.png, https://example.org/x.png 2x">'},
        {"name": "_static/book.css", "add": '@import "https://example.org/x.css";'},
        {"name": "_static/book.css", "add": "@font-face { src: url('//example.org/font.woff2') }"},
    ],
)
def test_what_loads_from_elsewhere_is_found(site, breaks):
    (found,) = crawl.foreign(site(**breaks))
    assert "example.org" in found


def test_a_link_to_elsewhere_loads_nothing(site):
    assert crawl.foreign(site(add='<link rel="canonical" href="https://example.org/">')) == []


def test_a_heavy_page_is_found(site):
    assert crawl.heavy_pages(site(add="x" * (crawl.MOST_BYTES - 2000))) == []
    (found,) = crawl.heavy_pages(site(add="×" * (crawl.MOST_BYTES // 2)))  # bytes, not characters
    assert found.startswith("index.html: 1,000,")


def test_an_id_that_stands_twice_is_found(site):
    assert crawl.repeated_ids(site(add='<p id="start">')) == ["index.html: #start: more than one element has this id"]


@pytest.mark.parametrize(("boxes", "why"), [(0, "0 boxes under the title"), (1, None), (2, "2 boxes under the title")])
def test_a_page_without_one_box_is_found(tmp_path, boxes, why):
    box = '<div class="fb-box"><p class="fb-verdict-line">fast</p></div>'
    (tmp_path / "evidence").mkdir()
    (tmp_path / "plot_1.html").write_text(f"<main>{boxes * box}</main>")
    (tmp_path / "evidence" / "plot_1.html").write_text("<main></main>")
    found = crawl.boxes(crawl.Site(tmp_path))
    assert [finding.startswith(f"plot_1.html: {why}") for finding in found] == [True] if why else found == []


# In a browser, as `nox -s browser` looks at the site, which takes its time


in_a_browser = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("playwright", reason="the browser's gates need playwright")
    try:
        assert browser.chromium()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    with browser.opened() as running:
        yield running


MENU = """<html lang="en" data-theme="light" data-mode="light"><title>Page</title>
<style>
  html { background: #fff; color: #000 } html[data-theme=dark] { background: #111; color: #eee }
  html[data-theme=dark] .follows { filter: invert(1) }
  a { color: #00c } html[data-theme=dark] a { color: #9cf }
</style>
<button class="theme-switch-button">theme</button>
<button class="theme-change-button" data-mode="light">light</button>
<button class="theme-change-button" data-mode="dark">dark</button>
<main class="bd-content"><h1>Page</h1>"""
SWITCH = """<script>for (const button of document.querySelectorAll(".theme-change-button"))
  button.onclick = () => Object.assign(document.documentElement.dataset, { theme: button.dataset.mode })</script>"""
FIGURE = """<img alt="a line" class="sphx-glr-single-img {}" src="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'
  width='200' height='100'><rect width='150' height='10' x='20' y='20' fill='{}'/></svg>">"""


@pytest.fixture(scope="module")
def opened(chromium, tmp_path_factory):
    """The folder of a site, and a tab that opens its pages."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "favicon.ico").touch()  # which browsers ask for
    with browser.served(folder) as address:
        yield folder, browser.Tab(chromium, address)


@pytest.fixture
def tab(opened):
    """Opens a page that has not been there before, so that no cache has it."""
    folder, made = opened

    def shown(text):
        name = f"{len([*folder.iterdir()])}.html"
        (folder / name).write_text(text)
        made.open(name)
        return made

    return shown


def _found(gate, tab):
    """The findings of a gate, without the name of the page that each begins with."""
    return [finding.removeprefix(f"{tab.name}: ") for finding in gate(tab)]


@in_a_browser
def test_a_page_in_order_passes_every_gate_of_a_browser(tab):
    page = tab(MENU + FIGURE.format("follows", "black") + '<p><a href="#">a link</a></p></main>' + SWITCH)
    assert [finding for gate in browser.EVERYWHERE for finding in gate(page)] == []


@in_a_browser
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<script>console.error('lost')</script>", "console: lost"),
        ("<script>undefined.name</script>", "error: Cannot read properties of undefined"),
        ("<img src='gone.png'>", "gone.png: status 404"),
        ("<img src='http://example.org/x.png'>", "http://example.org/x.png: a request that leaves the machine"),
        ("<script>fetch('//example.org/x')</script>", "http://example.org/x: a request that leaves the machine"),
    ],
)
def test_errors_and_requests_that_leave_are_found(tab, text, why):
    page = tab(f"<title>Page</title>{text}")
    for _ in range(100):  # what a script fetches is heard of when the browser gets to it
        if page.told:
            break
        page.page.wait_for_timeout(100)
    assert _found(browser.noises, page)[0].startswith(why)


@in_a_browser
def test_what_a_page_says_as_it_is_left_is_not_of_the_next_one(tab):
    tab("<title>Page</title><script>setInterval(() => undefined.late)</script>")
    assert _found(browser.noises, tab("<title>Page</title>")) == []


@in_a_browser
def test_a_lesson_of_too_many_screens_is_found(tab):
    most = browser.SCREENS * browser.HEIGHT
    assert _found(browser.length, tab(f"<section class=fb-lesson style='height: {most}px'></section>")) == []
    fold = "<details><div style='height: 500px'></div></details>"
    assert _found(browser.length, tab(f"<section class=fb-lesson style='min-height: 9px'>{fold}</section>")) == []
    tall = tab(f"<section class=fb-lesson style='height: {most + 90}px'></section>")
    assert _found(browser.length, tall) == ["8.1 screens of 900 pixels, a lesson has at most 8"]


@in_a_browser
def test_a_box_without_a_verdict_on_the_first_screen_is_found(tab):
    box = "<div class=fb-box><p class=fb-verdict-line>true: fast</p></div>"
    assert browser.first_screen(tab(box)) == [] == browser.first_screen(tab("<p>no box</p>"))
    assert browser.first_screen(tab("<div class=fb-box><p>No results.</p></div>"))[0].endswith(
        "no verdict stands under the title"
    )
    (found,) = browser.first_screen(tab("<div style='height: 880px'></div>" + box))
    assert found.endswith("pixels down, on a screen of 900")


@in_a_browser
def test_a_page_wider_than_the_window_is_found(tab):
    scrolls = "<div style='overflow-x: auto'><div style='width: 2000px'>x</div></div>"
    assert browser.overflow(tab(scrolls)) == []
    assert _found(browser.overflow, tab("<div style='width: 600px; height: 1px'></div>"))[0].startswith("608 pixels")
    assert len(browser.overflow(tab("<div style='width: 800px; height: 1px'></div>"))) == 2


@in_a_browser
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (MENU + FIGURE.format("", "black") + SWITCH, "figure 1: the ground has lightness 1.00 in the light and 0.07"),
        (MENU.replace("#111", "#fff") + FIGURE.format("", "black") + SWITCH, "figure 1: the ground has lightness 1.00"),
        (MENU + FIGURE.format("follows", "black"), "its menu of themes does not give the dark one"),
    ],
)
def test_a_figure_or_theme_that_does_not_follow_is_found(tab, text, why):
    assert [finding.startswith(why) for finding in _found(browser.figures, tab(text))] == [True]


#: A table of many rows that are alike, and one that is not.
ROWS = "<table>" + 9 * '<tr><td><a href="#">a word</a></td></tr>' + "<tr><td>{}</td></tr></table>"


@in_a_browser
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<a href="#"><img src="data:,"></a>', ["link-name, in either theme", "image-alt, in either theme"]),
        ('<p style="color: #222">words</p>', ["color-contrast, in the dark theme"]),
        ('<p>words</p><p style="color: #ddd">words</p>', ["color-contrast, in the light theme"]),
        (
            '<p style="color: #767676">words</p><p style="color: #767676; background: #eee">words</p>',
            ["color-contrast"],
        ),
        ('<pre class="highlight">a <span>word</span> <span style="color: #333">word</span></pre>', ["color-contrast"]),
        ('<p>words and <a href="#" style="text-decoration: none; color: #333">words</a></p>', ["link-in-text-block"]),
        (ROWS.format('<a href="#"> </a>'), ["link-name, in either theme"]),
        (ROWS.format('<img src="data:,">'), ["image-alt, in either theme"]),
    ],
)
def test_what_hinders_a_reader_is_found(tab, text, why):
    found = _found(browser.accessibility, tab(MENU + text + "</main>"))
    assert all(any(finding.startswith(part) for finding in found) for part in why), found


@in_a_browser
def test_colours_of_a_look_are_compared_on_the_first_pages_that_have_it_and_are_in_order(tab):
    def compared(style):
        page = tab(f'{MENU}<p style="{style}">words</p></main>')
        return len(browser.accessibility(page)), page.page.locator("p[data-look]").count()

    assert [compared("font-size: 31px") for _ in range(browser.PAGES + 1)] == browser.PAGES * [(0, 1)] + [(0, 0)]
    assert [compared("font-size: 32px; color: #ddd") for _ in range(browser.PAGES + 1)] == [(1, 1)] * (
        browser.PAGES + 1
    )


SEARCH = """<title>Search</title><div id="search-results"></div><script>
const word = new URLSearchParams(location.search).get("q");
const results = { softmax: ["one", "one", "two", "three", "softmax"], roof: ["roof"] }[word] ?? [];
setTimeout(() => { document.getElementById("search-results").innerHTML =
  "<ul>" + results.map((name) => `<li><a href="${name}.html?highlight=x#part">x</a></li>`).join("") + "</ul>" }, 100);
</script>"""


@in_a_browser
def test_a_search_that_does_not_find_a_words_own_page_is_found(chromium, tmp_path):
    (tmp_path / "search.html").write_text(SEARCH)
    (tmp_path / "favicon.ico").touch()
    with browser.served(tmp_path) as address:
        words = {"softmax": ("softmax.html",), "roof": ("method.html", "roof.html")}
        (found,) = browser.search(chromium, address, words)
        assert found.startswith("search for softmax: softmax.html is not among the first of ['one.html', 'two.html'")
        assert browser.search(chromium, address, {"softmax": ("three.html",)}) == []


TABLE = """<title>Results</title><table><thead><tr><th>op</th><th aria-sort="none"><button>us</button></th></tr></thead>
<tbody><tr><td>a</td><td>10</td></tr><tr><td>b</td><td>9.5</td></tr><tr><td>c</td><td>1,200</td></tr></tbody></table>
<script>
const button = document.querySelector("button"), head = button.parentElement, body = document.querySelector("tbody");
const value = (row) => Number(row.cells[1].innerText.replace(",", ""));
button.onclick = () => {
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  body.append(...[...body.rows].sort((a, b) => sign * (value(a) - value(b))));
};
</script>"""


@in_a_browser
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "", None),
        ("<button>us</button>", "us", "no table has a button in its head"),  # where one must be
        ("button.onclick", "button.onmousedown", "Enter on the button of 'us' gives aria-sort ['none']"),
        ('head.ariaSort = sign > 0 ? "ascending" : "descending"', "", "Enter on the button of 'us' gives aria-sort"),
        ("value(a) - value(b)", "0", "the rows are not in the order that the head of 'us' tells of"),
        ("value(a) - value(b)", "value(b) - value(a)", "the rows are not in the order"),
        ("value(a) - value(b)", "a.cells[1].innerText.localeCompare(b.cells[1].innerText)", "the rows are not in the"),
    ],
)
def test_a_table_that_does_not_sort_by_keyboard_is_found(tab, monkeypatch, old, new, why):
    page = tab(TABLE.replace(old, new))
    monkeypatch.setattr(browser, "SORTED", (page.name,))
    found = _found(browser.keyboard, page)
    assert [finding.startswith(why) for finding in found] == [True] if why else found == []


@in_a_browser
def test_a_browser_looks_at_every_page_and_counts(chromium, tmp_path):
    for name, text in {
        "index.html": MENU + SWITCH,
        "two.html": MENU + SWITCH + "<a></a><img>",
        "search.html": '<ul id="search-results"><li><a href="two.html">two</a></li></ul>',  # who finds none waits
    }.items():
        (tmp_path / name).write_text(text)
    found, tried = browser.look(tmp_path)
    assert tried["accessibility"] == tried["overflow"] == 3 and tried["search"] == len(browser.WORDS)
    assert sum("is not among the first of ['two.html']" in finding for finding in found) == len(browser.WORDS)
    assert any(finding.startswith("two.html: image-alt") for finding in found)
