"""What was meant by words that the command line does not know."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from itertools import pairwise

from mindspeed_asyncflow.config import keys


def unknown_command(word: str, commands: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.7)
    return f"{word!r} is no command; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}")


def unknown_words(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Each of `words`, which `command` has left over, with the setting or option that it is likely to mean."""
    options = [option for action in command._actions for option in action.option_strings]
    said = [f"unrecognized arguments: {' '.join(words)}"]
    for word, after in pairwise([*words, ""]):
        if word.startswith("--") or word.partition("=")[0] in keys.all_paths():
            said.append(_meant(word, after, options))
    return "; ".join(filter(None, said))


def _meant(word: str, after: str, options: Sequence[str]) -> str:
    name, equals, value = word.partition("=")
    setting = _setting(name) if "--set" in options else None
    if setting is not None:
        given = value if equals else "" if after.startswith("-") else after
        return f"a setting is given as --set {setting}={given or 'VALUE'}"
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def _setting(option: str) -> str | None:
    """The setting that has the name of an option such as `--max-lag`, here or in other toolkits."""
    name = option.lstrip("-").replace("-", "_")
    path = name if name in keys.all_paths() else keys.nearest(name)
    known = path is not None and (name in keys.ALIASES or name in (path, path.rpartition(".")[2]))
    return path if known else None
