"""What the tests of reports read of a page."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page, its texts, and its tables as rows of cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.styles, self.texts = [], [], [], []
        self.tables, self._open = {}, []
        self.feed(text)
        (self.policy,) = (a["content"] for t, a in self.tags if a.get("http-equiv") == "Content-Security-Policy")
        (data,) = (text for kind, text in self.scripts if kind == "application/json")
        self.data = json.loads(data)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag not in ("meta", "img", "input", "line"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append([attrs.get("type"), ""])
        elif tag == "style":
            self.styles.append("")
        elif tag == "table":
            self._rows = self.tables.setdefault(attrs["data-name"], [])
        elif tag == "tr":
            self._row = []
            self._rows.append(self._row)
        elif tag in ("td", "th"):
            self._row.append([attrs, ""])

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1][1] += data
        elif "style" in self._open:
            self.styles[-1] += data
        else:
            self.texts.append(data)
            if "table" in self._open and {"td", "th"} & set(self._open):
                self._row[-1][1] += data

    def column(self, table, title):
        """What stands in a column: the numbers behind it, or the texts where there are none."""
        head, *rows = self.tables[table]
        titles = [text for _, text in head]
        at = titles.index(title)
        cells = [row[at] for row in rows]
        return [float(attrs["data-value"]) if "data-value" in attrs else text for attrs, text in cells]
