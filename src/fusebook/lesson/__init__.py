"""What a lesson imports: checks, pictures, figures and tables, in text, in a notebook and on the site.

A lesson opens its page by name and calls its methods::

    import fusebook  # first: without a GPU it turns Triton's interpreter on
    import fusebook.lesson as lesson

    page = lesson.open("plot_102_softmax")

On a machine with a GPU a page measures. Without one it replays a record and names it. What a method returns renders
itself on the site and in a notebook, and is printed in a plain script.
"""

from fusebook.extras import extra

with extra("book"):
    from fusebook.lesson._book import Book, book
    from fusebook.lesson._page import Page, open

__all__ = ["Book", "Page", "book", "open"]
