"""mkdocs loads this. Pages link to files outside docs/, which a site does not have: it shows their names instead."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Links that leave docs/ become their text and, where that does not say it, the name of the file."""
    docs = Path(config.docs_dir)

    def shown(found: re.Match) -> str:
        target = (docs / page.file.src_uri).parent / found[2]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: {found[2]} does not exist")
        name = target.resolve().relative_to(docs.parent.resolve()).as_posix()
        return found[1] if name in found[1] else f"{found[1]} (`{name}`)"

    return LINK.sub(shown, markdown)
