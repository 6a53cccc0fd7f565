"""Text that is safe in HTML, and shapes as SVG. Every name goes through `text` or `attribute`."""

from collections.abc import Iterable
from html import escape

_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if code not in (9, 10)} | {
    127: "\N{REPLACEMENT CHARACTER}"
}
# Marks that turn the direction of text could make a name read as another one.
_CONTROL |= {ord(c): "\N{REPLACEMENT CHARACTER}" for c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def text(value: object, limit: int = 2000) -> str:
    """Any value as the content of an element or a quoted attribute; cut at ``limit`` characters."""
    shown = str(value)
    if len(shown) > limit:
        shown = shown[:limit] + "..."
    return escape(shown.translate(_CONTROL), quote=True)


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; ``content`` is HTML already. ``class_`` stands for class, other underscores for hyphens."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{text(value)}"')
    return f"<{' '.join(parts)}>{content}</{name}>"


def rect(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> str:
    """A rectangle, with a tooltip where ``title`` (plain text) is given."""
    shape = f'<rect class="{class_}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
    return f"{shape}><title>{text(title, 300)}</title></rect>" if title else f"{shape}/>"


def label(x: float, y: float, shown: object, class_: str = "", anchor: str = "start", limit: int = 200) -> str:
    """A line of text."""
    return f'<text class="{class_}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(shown, limit)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return f'<line class="{class_}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Iterable[tuple[float, float]], class_: str, *, close: bool = False) -> str:
    """A polyline through points."""
    steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{class_}" d="M{steps}{" Z" if close else ""}"/>' if steps else ""


def picture(width: float, height: float, content: str, about: str) -> str:
    """An SVG picture; ``about`` says to those who can't see it what it shows."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{text(about)}">{content}</svg>'
    )


def scroll(content: str, about: str, *, tall: bool = False) -> str:
    """A box that scrolls by itself, by keyboard too."""
    class_ = "scroll tall" if tall else "scroll"
    return f'<div class="{class_}" tabindex="0" role="region" aria-label="{text(about)}">{content}</div>'


def swatch(class_: str, shown: str) -> str:
    """An entry of a legend."""
    return f'<span><svg viewBox="0 0 12 12" aria-hidden="true">{rect(0, 0, 12, 12, class_)}</svg>{text(shown)}</span>'


def shorten(shown: str, limit: int) -> str:
    """The end of a long dotted name, which tells more than its beginning."""
    return shown if len(shown) <= limit else "\N{HORIZONTAL ELLIPSIS}" + shown[len(shown) - limit + 1 :]
