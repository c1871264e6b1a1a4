"""Links between pages lead somewhere, also to headings; every page is in the site, which builds without a warning."""

import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("cann_kernels/*.md"),
    *ROOT.glob("examples/**/*.md"),
]  # fmt: skip
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("[", "").replace("]", ""), text)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", title).strip().lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


def test_every_page_is_in_the_navigation_of_the_site_once():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in files(part)]

    listed = files(yaml.safe_load((ROOT / "scripts/docs/mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocs-material needs Python 3.11")
def test_the_site_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(["bash", ROOT / "scripts/docs.sh", site], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {page.stem for page in site.glob("*.html")} >= {page.stem for page in DOCS.glob("*.md")}
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text("utf-8"))
        assert loaded == [], page.name


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocs-material needs Python 3.11")
def test_links_that_lead_nowhere_are_errors_of_the_build(tmp_path):
    for part in ("scripts", "docs"):
        (tmp_path / part).mkdir()
        for path in (ROOT / part).iterdir():
            (tmp_path / part / path.name).symlink_to(path)
    for path in ROOT.iterdir():
        if path.name not in ("scripts", "docs", "runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    links = ("no-such-page.md", "dock.md#no-such-heading", "../no/such/file.py")
    (tmp_path / "docs/index.md").unlink()
    (tmp_path / "docs/index.md").write_text("# Home\n\n" + "\n\n".join(f"[x]({link})" for link in links))
    done = subprocess.run(
        ["bash", tmp_path / "scripts/docs.sh", tmp_path / "site"], capture_output=True, text=True, timeout=900
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert [link for link in links if link.rpartition("#")[2] not in said] == [], said
