"""mkdocs loads this. Pages link to files outside docs/, which a site does not have: it shows their names instead."""

import logging
import os
import re
from pathlib import Path

log = logging.getLogger("mkdocs.plugins.outside")  # what is warned of there is an error of a strict build
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Links that leave docs/ become their text and, where that does not say it, the name of the file."""
    docs = Path(config.docs_dir)

    def shown(found: re.Match) -> str:
        target = (docs / page.file.src_uri).parent / found[2]
        if not target.exists():
            log.warning("%s: %s does not exist", page.file.src_uri, found[2])
            return found[1]
        name = Path(os.path.normpath(target)).relative_to(docs.parent).as_posix()
        return found[1] if name in found[1] else f"{found[1]} (`{name}`)"

    return LINK.sub(shown, markdown)
