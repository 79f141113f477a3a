"""The gates of the built site, each on a small site that breaks what it guards."""

import pytest

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
