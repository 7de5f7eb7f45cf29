"""The pages of the project as tests read them: fenced blocks with their language, commands, sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

# What a block may be, and which test looks into it.
LANGUAGES = {
    "sh": "test_pages_run.py runs each command",
    "python": "test_pages_run.py runs each program",
    "dockerfile": "test_pages_run.py follows it without Docker",
    "diff": "test_new_arch.py applies it",
    "json": "test_docs.py reads it as what it is an example of",
    "text": "test_errors_page.py raises each message; test_docs.py looks for each file of a tree",
}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int  # of its first line
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its commands, one a line but for lines that end in a backslash; comments are left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s)# .*", "", line).strip() for line in lines) if line]


def blocks(*languages: str, pages: list[Path] = PAGES) -> list[Block]:
    """All fenced blocks of `pages`, or those in `languages`."""
    found = []
    for page in pages:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            if not languages or match[1] in languages:
                found.append(Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2]))
    return found


def sections(page: Path, level: str = "###") -> dict[str, str]:
    """Heading -> what stands below it."""
    parts = re.split(rf"^{level} (.*)\n", page.read_text(), flags=re.MULTILINE)
    return {
        heading: re.split(r"^#", body, maxsplit=1, flags=re.MULTILINE)[0]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in `text`, heads left out."""
    lines = text.splitlines()
    rows = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|") and before.startswith("|") and not set(line) <= set("|- "):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def anchor(heading: str) -> str:
    """The anchor that a heading gets: "Cold start and serverless" -> "cold-start-and-serverless"."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
