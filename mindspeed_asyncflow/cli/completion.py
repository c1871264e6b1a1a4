"""`asyncflow completion`: a script with which a shell completes subcommands, options, choices and settings.

Written out from the parser itself: words that never change need no library in every environment.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from mindspeed_asyncflow.config.keys import all_paths, choices

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
    local set= setting=
    if [[ $before == --set && $word == *=* ]]; then  # one word where = does not end one, as in zsh
        setting=${{word%%=*}} set=$setting=
    elif [[ $word == = && ${{COMP_WORDS[COMP_CWORD-2]}} == --set ]]; then
        setting=$before word=
    elif [[ $before == = && ${{COMP_WORDS[COMP_CWORD-3]}} == --set ]]; then
        setting=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case "$setting" in
{settings}
    esac
    if [[ $words ]]; then
        COMPREPLY=($(compgen -P "$set" -W "$words" -- "${{word#"$set"}}"))
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
_OR_FILE = '        {case}) COMPREPLY=($(compgen -W {words} -- "$word") $(compgen -f -- "$word")); return;;'
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
            elif case and (words := _words_of(action)):
                values.append(_OR_FILE.format(case=case, words=_words(words)))
            elif case and action.choices:
                values.append(_VALUE.format(case=case, words=_words(action.choices)))
            elif action.choices:
                values.append(_VALUE.format(case=shlex.quote(f"{name} {name}"), words=_words(action.choices)))
    return _SCRIPT.format(
        shell=shell,
        before="autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=_words([*commands, *(o for a in parser._actions for o in a.option_strings)]),
        settings="\n".join(_OPTIONS.format(case=path, words=_words(words)) for path, words in choices().items()),
        values="\n".join(values),
        options="\n".join(options),
    )


def _words_of(action: argparse.Action) -> list[str]:
    """Those that may stand in place of a file: the small letters of a metavar such as `auto|never|CHECKPOINT`."""
    name = action.metavar if isinstance(action.metavar, str) and "|" in action.metavar else ""
    return [word for word in name.split("|") if word.islower()]


def _words(words: Iterable[object]) -> str:
    return shlex.quote(" ".join(map(str, words)))
