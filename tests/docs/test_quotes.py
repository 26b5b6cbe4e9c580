"""What pages quote as output is what the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import DOCS, OTHERS, PAGES, README, ROOT, blocks_of

PROGRAMS = ("dask_p2p", "deploy", "benchmarks")
QUOTING = [page for page in (README, *OTHERS, *PAGES) if page.name != "CHANGELOG.md"]
#: Blocks of text that are diagrams.
DIAGRAMS = [
    DOCS / name for name in ("design.md", "how-to/host-arrays.md", "how-to/streamed-fields.md")
]
#: Messages and titles of other programs.
FOREIGN = {
    "Aggregate time per action",
    "Fine performance metrics",
    "Host key is not trusted",
    "No such file or directory",
}


VALUE = "\0"  # stands for a value in a text


@cache
def patterns():
    """Return a pattern for each text in the programs, and the number of its letters.

    Parts between commas, and sentences, also count: a line may be put together from several.
    """
    texts = {text for folder in PROGRAMS for text in texts_of(ROOT / folder)}
    texts |= {part for text in texts for part in re.split(r", |\. ", text)}
    return [
        (re.compile(re.escape(text).replace(VALUE, ".*"), re.S), letters_in(text)) for text in texts
    ]


def texts_of(folder):
    for path in folder.rglob("*.sh"):
        yield from re.findall(r'"([^"\n]*)', path.read_text("utf-8"))
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
                )
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # `print` may put a value after a colon.
                yield node.value + f" {VALUE}" * node.value.endswith(":")


def letters_in(text):
    return sum(map(str.isalpha, text))


def is_printed(text):
    letters = letters_in(text)
    return any(
        count
        and 3 * count >= letters
        and (pattern.fullmatch(text) or pattern.fullmatch(f"{text} "))  # the line may go on
        for pattern, count in patterns()
    )


def quoted_outputs():
    """Yield the lines of output that pages quote, in the parts that are printed together."""
    for page in QUOTING:
        for block in blocks_of(page):
            if block.language == "text" and page not in DIAGRAMS:
                is_row = False
                for line in block.text.splitlines():
                    cells = re.split(r"\s{2,}", line.strip())
                    if len(cells) < 3:
                        is_row, cells = False, line.split(", ")
                    elif is_row:
                        continue
                    else:
                        is_row = True  # the first line of a table has its titles
                    if not line.startswith((">>>", "...")):
                        yield from ((block.where, cell) for cell in cells if letters_in(cell))


def quoted_sentences():
    for page in QUOTING:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
        for sentence in re.findall(r"`([A-Z][a-z]*(?:\s[a-zA-Z,]+){2,}[.:]?)`", text):
            yield str(page.relative_to(ROOT)), " ".join(sentence.split())


@pytest.mark.parametrize("quotes", [quoted_outputs, quoted_sentences])
def test_what_pages_quote_is_printed(quotes):
    all_quotes = list(quotes())
    unknown = [(where, quote) for where, quote in all_quotes if not is_printed(quote)]
    assert {(where, quote) for where, quote in unknown if quote not in FOREIGN} == set()
    assert len(all_quotes) > len(unknown)


def test_texts_that_are_not_printed_are_unknown():
    assert not is_printed("Nothing is in the way.")
    assert not is_printed("exchange of one block")
