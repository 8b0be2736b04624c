"""Parts of pages whose numbers are results: whole tables, and words of a sentence. They are found in a page and written again."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from experiments.common import markdown_table

#: A number in text, with its sign. Digits that belong to a name aren't one: those of `llama3.2-1b`, `fsdp=8` and `H100`.
NUMBER = re.compile(r"(?<![\w.,=-])[+-]?\d+(?:[.,]\d+)*(?!\w)")
END = "<!-- end -->\n"

#: A place in a page and what belongs there: start, end, text.
Place = tuple[int, int, str]


class NotFoundError(LookupError):
    """A page doesn't have a part that it should have exactly once."""


@dataclass(frozen=True)
class Table:
    """A table, between the marks `<!-- results: NAME -->` and `<!-- end -->`.

    Attributes:
        page: the page's path in the repository.
        name: of the mark.
        rows: the cells, row by row. The first row has the titles.
    """

    page: str
    name: str
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        return f"the table {self.name}"

    def places(self, text: str) -> Iterator[Place]:
        """The lines between the marks.

        Raises:
            NotFoundError: the page doesn't have these marks once.
        """
        begin = f"<!-- results: {self.name} -->\n"
        before, mark, after = text.partition(begin)
        lines, end, _ = after.partition(END)
        if not (mark and end) or begin in after:
            raise NotFoundError(f"{self.page} should have once: {begin.strip()}, a table, {END.strip()}")
        start = len(before) + len(begin)
        titles, *rows = self.rows
        yield start, start + len(lines), markdown_table(titles, rows) + "\n"


@dataclass(frozen=True)
class Words:
    """Words of a sentence with the numbers that belong there.

    The page has the same words, with line breaks where it likes, and perhaps other numbers. The words are found there by all that
    isn't a number. ` ... ` stands for any text within a paragraph or a cell of a table.

    Attributes:
        page: the page's path in the repository.
        words: the words as the page should have them: `waits 22 ms of 806 ... on 8 GPUs`.
    """

    page: str
    words: str

    def __str__(self) -> str:
        return self.words

    def places(self, text: str) -> Iterator[Place]:
        """The numbers of these words.

        Raises:
            NotFoundError: the page doesn't have these words once.
        """
        found = list(re.finditer(f"({NUMBER.pattern})".join(map(_pattern, NUMBER.split(self.words))), text))
        if len(found) != 1:
            raise NotFoundError(f"{self.page} should have once, and has {len(found)} times: {self.words}")
        for group, number in enumerate(NUMBER.findall(self.words), 1):
            yield *found[0].span(group), number


Part = Table | Words


def _pattern(words: str) -> str:
    """The regular expression of words without numbers."""
    parts = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in words.split(" ... "))
    return r"(?:(?!\n\n|\|)[\s\S])*?".join(parts)


def written(text: str, part: Part) -> str:
    """The text of a page with what belongs into a part of it.

    Raises:
        NotFoundError: the page doesn't have the part exactly once.
    """
    for start, end, right in sorted(part.places(text), reverse=True):
        text = text[:start] + right + text[end:]
    return text


def differing(text: str, part: Part) -> list[str]:
    """What the text of a page has elsewise, line by line: `'806' should be '807': waits 22 ms of 807`.

    Raises:
        NotFoundError: the page doesn't have the part exactly once.
    """
    return [
        f"{shown!r} should be {right!r}: {part}"
        for start, end, rights in part.places(text)
        for shown, right in zip_longest(text[start:end].splitlines(), rights.splitlines(), fillvalue="")
        if shown != right
    ]
