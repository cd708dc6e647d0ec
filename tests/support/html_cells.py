"""Tables and paragraphs that notebooks display."""

from html.parser import HTMLParser

TAGS = {"table", "thead", "tbody", "tr", "th", "td", "p"}


class Cells(HTMLParser):
    """Texts of the cells of a page, row by row, and of its paragraphs; each tag is known, has no attributes and is closed."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.paragraphs, self.open = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS
        assert attributes == []
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "p":
            self.paragraphs[-1] += data
        else:
            assert self.open[-1] in ("th", "td")
            self.rows[-1][-1] += data
