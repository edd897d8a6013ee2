"""`quire completion`: print a script that completes commands, flags and values in bash, zsh or fish.

The script holds all words, so completion starts no Python process.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from quire.cli.main import ALIASES, COMMANDS
from quire.cli.parser import CommandParser
from quire.frontend.location import BUILT_IN

_USE = {
    "bash": 'eval "$(quire completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(quire completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
_BASH = """\
_quire() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    if [ "$command" = bench ]; then
        if [ "$COMP_CWORD" -eq 2 ]; then
            COMPREPLY=($(compgen -W "{kinds}" -- "$current"))
            return
        fi
        command="bench ${{COMP_WORDS[2]}}"
    fi
    case "$command $previous" in
{values}
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$command" in
{flags}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
        *) COMPREPLY=($(compgen -W "{models}" -- "$current") $(compgen -f -- "$current")) ;;
    esac
}}
complete -o filenames -F _quire quire
"""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """The flags of a command or of a kind of benchmark: `names`, help, and the values of those with choices."""

    command: str
    flags: list[tuple[list[str], str, list[str]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `quire completion`."""
    uses = "; ".join(f"{shell}: {use}" for shell, use in _USE.items()).replace("%", "%%")
    parser.add_argument("shell", choices=_USE, help=f"shell to complete in ({uses})")


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    found = [words for command in COMMANDS for words in command_words(command)]
    if args.shell == "fish":
        print(_fish(found), end="")
        return 0
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    print(begin + _bash(found), end="")
    return 0


def command_words(command: str) -> Iterator[CommandWords]:
    """Yield the flags of a command and of each kind of it."""
    parser = CommandParser(prog=command)
    importlib.import_module(f"quire.cli.{command}").add_arguments(parser)
    yield _words(command, parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for kind, below in action.choices.items():
                yield _words(f"{command} {kind}", below)


def _words(command: str, parser: argparse.ArgumentParser) -> CommandWords:
    flags = []
    for action in parser._actions:
        names = [name for name in action.option_strings if "_" not in name]
        if names or (action.choices and not isinstance(action, argparse._SubParsersAction)):
            flags.append((names, action.help or "", [str(choice) for choice in action.choices or ()]))
    return CommandWords(command, flags)


def _bash(found: list[CommandWords]) -> str:
    values, flags = [], []
    for words in found:
        for names, _, choices in words.flags:
            if names and choices:
                cases = "|".join(f'"{words.command} {name}"' for name in names)
                values.append(f'        {cases}) words="{" ".join(choices)}" ;;')
        every = " ".join(name for names, _, _ in words.flags for name in names)
        flags.append(f'        "{words.command}") words="{every}" ;;')
    kinds = " ".join(words.command.split()[1] for words in found if " " in words.command)
    return _BASH.format(
        commands=" ".join([*COMMANDS, *ALIASES, "help"]),
        kinds=kinds,
        values="\n".join(values),
        flags="\n".join(flags),
        models=" ".join(BUILT_IN),
    )


def _fish(found: list[CommandWords]) -> str:
    lines = [
        f"complete -c quire -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
        for name, text in COMMANDS.items()
    ]
    for words in found:
        command, *kind = words.command.split()
        seen = " ".join(f"; and __fish_seen_subcommand_from {word}" for word in kind)
        when = shlex.quote(f"__fish_seen_subcommand_from {command}{seen}")
        if kind:
            not_yet = shlex.quote(f"__fish_seen_subcommand_from {command}")
            lines.append(f"complete -c quire -n {not_yet} -f -a {kind[0]}")
        for names, help, choices in words.flags:
            options = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in names
            )
            more = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(
                f"complete -c quire -n {when} {options}{more} -d {shlex.quote(help)}".replace("  ", " ")
            )
    return "\n".join(lines) + "\n"
