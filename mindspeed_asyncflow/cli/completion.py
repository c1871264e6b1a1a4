"""`asyncflow completion`: a script with which a shell completes subcommands, options, choices and settings.

Written out from the parser itself: words that never change need no library in every environment.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from mindspeed_asyncflow.config.keys import all_paths

NAME = "completion"
HELP = "print a script that lets bash or zsh complete subcommands, options and settings"
EXAMPLES = """  asyncflow completion bash > ~/.local/share/bash-completion/completions/asyncflow
  source <(asyncflow completion zsh)"""

_SCRIPT = """\
# Completion of asyncflow; written by `asyncflow completion {shell}`.
{before}_asyncflow() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W {commands} -- "$word"))
        return
    fi
    case "$command $before" in
{values}
    esac
    case "$command" in
{options}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -o bashdefault -F _asyncflow asyncflow
"""
_VALUE = '        {case}) COMPREPLY=($(compgen -W {words} -- "$word")); return;;'
_SETTINGS = """\
        {case}) compopt -o nospace +o filenames 2>/dev/null
            COMPREPLY=($(compgen -W {words} -- "$word")); return;;"""
_OPTIONS = "        {case}) words={words};;"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_asyncflow.cli import build_parser  # which is made of this module too

    print(script(build_parser(), arguments.shell), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The text for `shell`: zsh takes bash's way of completing after one line of its own."""
    (commands,) = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    values, options = [], []
    for name, sub in commands.items():
        of_command = [option for action in sub._actions for option in action.option_strings]
        options.append(_OPTIONS.format(case=name, words=_words(of_command)))
        for action in sub._actions:
            case = "|".join(shlex.quote(f"{name} {option}") for option in action.option_strings)
            if case and "--set" in action.option_strings:
                values.append(_SETTINGS.format(case=case, words=_words(f"{path}=" for path in all_paths())))
            elif case and action.choices:
                values.append(_VALUE.format(case=case, words=_words(action.choices)))
            elif action.choices:
                values.append(_VALUE.format(case=shlex.quote(f"{name} {name}"), words=_words(action.choices)))
    return _SCRIPT.format(
        shell=shell,
        before="autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=_words([*commands, *(o for a in parser._actions for o in a.option_strings)]),
        values="\n".join(values),
        options="\n".join(options),
    )


def _words(words: Iterable[object]) -> str:
    return shlex.quote(" ".join(map(str, words)))
