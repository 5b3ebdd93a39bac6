"""`sandkasten completion bash | zsh | fish`: scripts made of the parsers, which ask for session ids as they complete.

The verbs and options stand in the script, so that only a session's id costs a call of the command. zsh runs bash's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

from sandkasten.cli.main import VERBS, add_arguments

_SESSIONS = "sandkasten ps -q 2>/dev/null"
_CONTEXTS = "sandkasten context list 2>/dev/null | tail -n +2 | cut -c10- | cut -d' ' -f1"


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'bash: eval "$(sandkasten completion bash)"; zsh likewise; fish: sandkasten completion fish | source'
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(command=completion)


def completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    verbs = [_Words.of(verb) for verb in VERBS]
    match arguments.shell:
        case "fish":
            print("\n".join(_fish(verbs)))
        case "zsh":
            print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
            print("\n".join(_bash(verbs)))
        case _:
            print("\n".join(_bash(verbs)))
    return 0


@dataclass
class _Words:
    """Words that may follow a verb: its actions, or its options with their texts, and whether a session is named."""

    verb: str
    options: dict[str, str] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    names_session: bool = False
    names_context: bool = False

    @classmethod
    def of(cls, verb: str) -> _Words:
        parser = argparse.ArgumentParser(prog=verb)
        add_arguments(parser, verb)
        words = cls(verb)
        words._take(parser)
        return words

    def _take(self, parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                self.actions += action.choices
                for inner in action.choices.values():
                    self._take(inner)
            elif action.option_strings and action.help != argparse.SUPPRESS:
                self.options |= dict.fromkeys(action.option_strings, action.help or "")
            elif not action.option_strings:
                self.actions += action.choices or ()
                self.names_session |= str(action.metavar) in ("SESSION", "SRC")
        self.names_context = self.verb == "context"


def _bash(verbs: list[_Words]) -> Iterator[str]:
    yield "_sandkasten() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="${COMP_WORDS[1]}"'
    yield "  local word words= line=$'\\n'"
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'    words="{" ".join(each.verb for each in verbs)} --help --version"'
    yield f'  elif [ "$before" = --context ]; then words="$({_CONTEXTS})"'
    yield '  else case "$verb:$current" in'
    for each in verbs:
        yield f'    {each.verb}:-?*) words="{" ".join(each.options)}" ;;'
    for each in verbs:
        if each.names_session:
            yield f'    {each.verb}:*) words="{" ".join([*each.actions, f"$({_SESSIONS})"])} -" ;;'
        elif each.names_context:
            yield f'    {each.verb}:*) words="{" ".join(each.actions)} $({_CONTEXTS})" ;;'
        elif each.actions:
            yield f'    {each.verb}:*) words="{" ".join(each.actions)}" ;;'
    yield "  esac; fi"
    # compgen -W would expand the words, and so run $(...) in what a server answered.
    yield "  COMPREPLY=()"
    yield "  while read -r word; do"
    yield '    case "$word" in "") ;; "$current"*) COMPREPLY+=("$word") ;; esac'
    yield '  done <<< "${words// /$line}"'
    yield "}"
    yield "complete -o default -F _sandkasten sandkasten"


def _fish(verbs: list[_Words]) -> Iterator[str]:
    yield "complete -c sandkasten -e"
    yield f'complete -c sandkasten -f -l context -x -a "({_CONTEXTS.replace("$", chr(92) + "$")})"'
    for each in verbs:
        about = VERBS[each.verb][1].replace("'", "\\'")
        yield f"complete -c sandkasten -f -n __fish_use_subcommand -a {each.verb} -d '{about}'"
        here = f"complete -c sandkasten -n '__fish_seen_subcommand_from {each.verb}'"
        if each.actions:
            yield f"{here} -f -a '{' '.join(each.actions)}'"
        if each.names_session:
            yield f"{here} -a '({_SESSIONS})'"
        if each.names_context:
            yield f'{here} -f -a "({_CONTEXTS})"'
        for option, text in each.options.items():
            if option != "--context":
                name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                yield f"{here} {name} -d '{text.replace(chr(39), chr(92) + chr(39))}'"
