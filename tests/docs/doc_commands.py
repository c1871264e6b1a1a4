"""Commands of the pages. A block is marked by a comment before it, which readers do not see:

<!-- run: cpu -->                    a test runs it
<!-- run: cpu, takes a minute -->    the same, among the nightly tests
<!-- run: npu -->                    a test reads it and runs it up to where a device is needed
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- run: (cpu|npu|ci)(, takes a minute)? -->\n)?```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    kind: str  # cpu | npu | ci, or empty where it has no mark
    long: bool
    text: str


def blocks(*pages: Path) -> list[Block]:
    """All blocks of shell commands, in the order of the pages."""
    return [
        Block(page, kind, bool(long), text)
        for page in pages or PAGES
        for kind, long, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def lines_of(text: str) -> list[list[str]]:
    """The words of each command, comments left out; what a here-document holds is no command."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines for part in line.split(" && ") if (words := shlex.split(part, comments=True))]


COMMAND = re.compile(r"(?:\$ )?(?:\S*/bin/)?asyncflow +([a-z].*)$")


def printed_commands(page: Path) -> list[list[str]]:
    """The words behind `asyncflow` of each command that stands in a line of its own, in a block or indented."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = "".join(re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    lines = [*fenced, *re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)]
    found = [match[1] for line in lines if (match := COMMAND.match(line.strip()))]
    return [shlex.split(command.partition(" > ")[0], comments=True) for command in found]


def named_commands(page: Path) -> list[list[str]]:
    """The same of what stands between backticks, which may be a part of a command only."""
    quoted = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    return [re.split(r"\s+", match[1]) for words in quoted if (match := COMMAND.match(words.strip()))]
