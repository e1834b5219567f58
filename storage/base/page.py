"""A page of the checkpoint browser, as an object for its caller."""

from __future__ import annotations

from html import escape


class Page:
    """A page of the browser that this process serves. It shows itself as a link; `url` is its address."""

    def __init__(self, url: str, what: str) -> None:
        self.url = url
        self.what = what

    def __repr__(self) -> str:
        return f"<browse {self.what} at {self.url}>"

    def _repr_html_(self) -> str:
        return (
            f'<p>Browse <code>{escape(self.what)}</code> at <a href="{escape(self.url)}" target="_blank" '
            f'rel="noopener">{escape(self.url)}</a></p>'
        )
