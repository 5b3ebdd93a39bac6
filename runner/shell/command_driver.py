"""The shell program that makes an ordinary shell a persistent one, and the text handed to it per command. Pure.

The driver speaks with PID 1 on the link (`runner.shell.link`), a socket whose descriptor the command does not have:
the redirection of what is run closes it, and the copy that the shell keeps for itself meanwhile is closed on execve(2).
Per command it reads one order from the link, runs the text that the file `cmd` brings with the three standard streams
redirected to files that the order has named, reports `+` when it begins, and after the end the status, and what a new
shell would need. A successor finds that in the file `state`, which PID 1 wrote. PID 1 asks the kernel for the
directory.

bash has a text of its own, for a third of the time: it reads an order at once (`read -N`), nothing is parsed anew for a
command but the command (`eval`), and no function is called, for bash copies the whole of one for each call. A bash that
is not called so, `/opt/bash5`, say, runs the text for all shells.

Errors of a command name the shell and the lines of the command, never a file of PID 1 (docs/adr/0020-shell-words.md):
- bash names the innermost sourced file, and the shell where there is none. `cmd` only sets a variable to the text, and
  the text is run by `eval`, whose lines bash counts from its own: the loops are one line.
- `return`, and an interrupt, need a function or a sourced file to leave, and in a function `declare` would be local. So
  the loops are a sourced file, and its name is `bash`: in its own directory, and without a search in PATH (`_ENTER`).
- dash and BusyBox sh name the sourced file before all else, and the builtin that runs: `cmd` is sourced, and is one
  `eval`. Before it, a trace that is on is switched off, and on again by the first words that are run (`_TRACE`).

What each odd-looking line is for, each tried in bash, dash and BusyBox sh:
- `command .`: a syntax error in a sourced file ends dash and BusyBox sh unless `command` runs the dot.
- `unset -f command read`: functions of these names would run instead of the builtins. The rest that is used unguarded
  between commands is reserved words, assignments and special builtins, which functions can't replace; in bash they can
  (outside of its POSIX mode), so the way of every command has none of them (`FOREVER`) but `unset`: who makes a
  function of that name has it run before each command.
- the signal trap unwinds everything the command has on the stack, so that nothing after an interrupted line runs. bash:
  `return` in this frame and, through a DEBUG trap, in every frame above; others: an expansion error, which unwinds to
  `command .`, or to `command eval` when it came a moment before or after; hence the backslashes, against aliases in
  what is parsed anew. The guard `__sk_r` makes a late signal harmless. Outside of bash it counts those that come after
  the first (`l`, `ll`, ...): one that finds the driver just behind `eval` must raise nothing, for nothing would catch
  it, and the driver is out of there before it could see eight; a command that caught the error is left by the ninth.
- SIGINT is trapped in bash, for it raises one against itself when a command substitution died of one, and would end.
- a trapped signal interrupts `read` in dash and BusyBox sh, and what it had read of the line is lost. So a line that is
  not whole, that is without its first letter or shorter, is asked for again (`0 r`), a name is never run twice, and a
  shell that can't read at all ends. bash reads on after a signal.
- `__sk_st` sets `$?` to what the previous command left.
- `__sk_st … && :`: a trap on ERR, and `set -e`, take the status of the command before for no failure.
- a text that could not be assigned (`readonly`) ends the shell before `+`: the text before it must not be run again.
- BusyBox sh unwinds an error in a subshell (`(: </nowhere)`) to the `command` outside of it, so that the fork would go
  on as a second driver: what is not the shell itself exits. And it never gets there, but computes for ever, if that
  `command` is in a text (`-c`, `eval`) and not in a file: therefore it reads the program from its standard input, and
  one command is run by a file of its own, within a single `command`.
- a `break` or `continue` outside a loop of the command acts on the loops here, of which there are eight for this one
  reason. At the head of each, `__sk_r` tells whether a command was left that way (1: status 0) or ended (2).
- stdout is redirected for the shell itself (`exec`), for the shell takes back what was redirected for `.` alone before
  it runs a trap on EXIT. stderr is not, or `set -x` would show the driver's work.

What it does not do: `break 8` ends the shell like `exit`. A trap on EXIT of the user's takes the place of the one that
saves the state, so the next shell has the directory and exports from before the command that ended this one; what such
a trap writes to stderr is lost. After `set -n` or `set -r` the shell can't run anything, and is replaced. A trap on
ERR that an earlier command has set also runs for the `eval` of a command that fails. After `return` or an interrupt in
a directory that can't be found again, bash names the path of its loops until it has left them once more elsewhere.
Outside of bash a command's own descriptor 9, and in bash 49, is closed when the command has ended. A limit of open
files below that number costs the shell.

Sources: POSIX.1-2024 XCU 2.8.1 (consequences of shell errors), 2.15 (special builtins); bash(1) "SIGNALS", `trap`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

ABANDON_SIGNAL = 50
"""Asks the driver to leave the command it runs. A realtime signal, so no command expects it."""

VARIABLE = "__sk_driver"
PROGRAM = f'eval "${VARIABLE}"'
"""Program that the shell is started with. The driver comes in `VARIABLE`, so that `ps` shows one short line."""

BASH_PROGRAM = f'{PROGRAM}; while __sk_enter; do command . "$__sk_file"; __sk_s=$? __sk_r=2; done'
"""Program of bash, which reads its loops from the file `bash`: `return`, and an interrupt, leave the reading."""

FOREVER = "while case x in esac;"
"""A condition that always holds and is no command: in bash the user's function `:` would run in the place of the
builtin, time and again."""

_LOOPS = 8
_LOOP_HEADS, _LOOP_ENDS = " ".join([f"{FOREVER} do"] * _LOOPS), "; ".join(["done"] * _LOOPS)

LEAVE_BASH = r"""case $__sk_r.$BASHPID in 1.$$) __sk_a=130
trap "case \$__sk_r.\$BASHPID in 1.\$\$) return 130;; esac" DEBUG; set -T; return 130;; esac"""
"""Commands by which bash leaves a command, without single quotes. A fork of bash that the signal reaches before its own
traps are off has nothing to leave, and would complain of it."""

_HEAD = r"""
unset __sk_driver
if [ -n "${BASH_VERSION-}" ]; then
shopt -s expand_aliases
case $BASH_VERSION in [0-3].*|4.0.*) __sk_b=n;; *) __sk_b=N;; esac
trap '@LEAVE@' @SIGNAL@ INT
else
trap 'case $__sk_r in 1) __sk_a=130 __sk_r=l; { : "${__sk_unset?}"; } 2>/dev/null;;
llllllll) __sk_r=1;; l*) __sk_r=l$__sk_r;; esac' @SIGNAL@
fi
__sk_st() { return "$1"; }
__sk_save() {
command export -p
command printf 'umask '
command umask
command echo "__sk_g=$__sk_g
$__sk_n ."
}
__sk_exit() {
case $__sk_r$__sk_n in ?*[vw]??????????) __sk_r=; command . @DIR@/post >/dev/null;; esac
__sk_save
}
trap '__sk_exit >&@FD@ 2>/dev/null' EXIT
__sk_g=@REVISION@
if [ -s @DIR@/state ]; then
command . @DIR@/state
__sk_o=${OLDPWD-}
command cd -- "${PWD-/}"
OLDPWD=$__sk_o
fi
__sk_n=0 __sk_s=0 __sk_a= __sk_r=2 __sk_o= __sk_f= __sk_l=0 __sk_trace= __sk_lost=
"""

_TRACE = """'{ __sk_trace=; \\command set -x; \\__sk_st "$__sk_o" && \\:; } 2>/dev/null; '"""
"""Commands that switch a trace on again right before a command's own text, and leave `$?` as it is to be."""

_KEEP_TRACE = f"case $- in *x*) command set +x; __sk_trace={_TRACE};; *) __sk_trace=;; esac"

_ENTER = r"""
__sk_enter() {
unset -f command
case $__sk_lost in x) return 1;; esac
__sk_lost=x __sk_file=@DIR@/bash __sk_at=$PWD __sk_was=${OLDPWD-} __sk_had=${OLDPWD+x} __sk_opts=:$BASHOPTS:
case :$SHELLOPTS: in *:posix:*) __sk_name=./bash;; *) __sk_name=bash;; esac
command shopt -u expand_aliases sourcepath
command test . -ef "$PWD" && CDPATH= command cd @DIR@ && __sk_file=$__sk_name
return 0
}
"""
"""Function of bash that prepares the reading of `bash`. The file goes by that name where its directory is the current
one, which needs a directory that the shell can come back to; else by its path."""

_BASH = r"""
__sk_lost=;
case $__sk_file in /*) ;; *) CDPATH= command cd -- "$__sk_at";
case $__sk_had in '') command unset -v OLDPWD; command export OLDPWD;; *) OLDPWD=$__sk_was;; esac;; esac;
case $__sk_opts in *:expand_aliases:*) command shopt -s expand_aliases;; esac;
case $__sk_opts in *:sourcepath:*) command shopt -s sourcepath;; esac;
@LOOPS@
case $__sk_r in
'') unset -f command read;;
*) case $__sk_r in 1) __sk_s=0;; esac;
unset -f command read;
__sk_r=;
case $__sk_a in '') ;; *) __sk_s=$__sk_a __sk_a=; trap - DEBUG; set +T;; esac;
case $__sk_n in [vw]*) command . @DIR@/post >/dev/null;; esac;
command echo "$__sk_n $__sk_s" >&@FD@;
command exec >/dev/null;
case $__sk_n in 0) ;; *)
{ command export -p; command umask -p; command echo "__sk_g=$__sk_g"$'\n'"$__sk_n ."; } >&@FD@;; esac;;
esac;
if command read -r "-$__sk_b" 11 -u @FD@ __sk_n; then __sk_f= __sk_r=1;
else __sk_f=x$__sk_f;
case ${#__sk_f} in ??) break 8;; esac;
continue;
fi;
command . @DIR@/cmd || break 8;
case $- in *a*) command export -n __sk_text __sk_before;; esac;
command exec >"@DIR@/$__sk_n.out" || exit;
__sk_o=$__sk_s __sk_s=0;
case $__sk_n in
p*) command echo "$__sk_n +" >&@FD@;
case $__sk_o in 0) ;; *) __sk_st "$__sk_o" && :;; esac;
command eval "$__sk_text" </dev/null 2>"@DIR@/$__sk_n.err" @FD@>&-;;
*) @TRACE@;
{ command echo "$__sk_n +" >&@FD@;
{ command eval "$__sk_before" && { __sk_st "$__sk_o" && :; command eval "$__sk_trace$__sk_text"; }; } @FD@>&-;
} <"@DIR@/$__sk_n.in" 2>"@DIR@/$__sk_n.err";;
esac;
__sk_s=$? __sk_r=2;
case $__sk_trace in '') ;; *) __sk_trace=; command set -x;; esac;
@DONES@;
__sk_lost=x
"""
"""Content of `bash`: the loops, whose body is one round. bash parses it once for each reading, as one line: the lines
of a command count from that of its `eval`."""

_OTHER = r"""
case $__sk_r in
'') ;;
*) case $__sk_r in 1|l*) __sk_s=0;; esac
unset -f command
case $__sk_s${BASH_VERSION-} in 0|*.*) ;; *) command test "/proc/$$" -ef /proc/self || exit "$__sk_s";; esac
__sk_r=
case $__sk_a in '') ;; *) __sk_s=$__sk_a __sk_a=
case ${BASH_VERSION-} in '') ;; *) trap - DEBUG; set +T;; esac;; esac
case $__sk_n in [vw]*) command . @DIR@/post >/dev/null;; esac
command echo "$__sk_n $__sk_s" >&@FD@
command exec >/dev/null
case $__sk_n in 0) ;; *) __sk_save >&@FD@;; esac;;
esac
unset -f command read
if IFS= command read -r __sk_c <&@FD@; then :; else __sk_c=; fi
case $__sk_c in
"$__sk_l") continue;;
[pviw]??????????) __sk_f= __sk_l=$__sk_c __sk_n=$__sk_c;;
*) __sk_f=x$__sk_f
case ${#__sk_f} in ????) break 8;; esac
command echo "0 r" >&@FD@
continue;;
esac
@TRACE@
__sk_o=$__sk_s
@RUN@
case $__sk_r in 1|l*) __sk_s=130 __sk_r=2;; esac
case $__sk_trace in '') ;; *) __sk_trace=; command set -x;; esac
"""

_RUN = r"""case $__sk_n in
p*) command eval '__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit; \command echo "$__sk_n +" >&@FD@
\__sk_st "$__sk_s" && \:; \command . @DIR@/cmd </dev/null 2>"@DIR@/$__sk_n.err" @FD@>&-
__sk_s=$? __sk_r=2';;
*) command eval '__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit; { \command echo "$__sk_n +" >&@FD@
\command . @DIR@/pre && { \__sk_st "$__sk_s" && \:; \command . @DIR@/cmd; } @FD@>&-
} <"@DIR@/$__sk_n.in" 2>"@DIR@/$__sk_n.err"
__sk_s=$? __sk_r=2';;
esac"""

_RUN_BUSYBOX = r"""command . @DIR@/run; __sk_o=$?
case $__sk_r in 1) __sk_s=$__sk_o __sk_r=2;; esac"""

_RUN_FILE = r"""
__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit
case $__sk_n in
p*) \command echo "$__sk_n +" >&@FD@
\__sk_st "$__sk_s" && \:; \. @DIR@/cmd </dev/null 2>"@DIR@/$__sk_n.err" @FD@>&-;;
*) { \command echo "$__sk_n +" >&@FD@
\. @DIR@/pre && { \__sk_st "$__sk_s" && \:; \. @DIR@/cmd; } @FD@>&-; } <"@DIR@/$__sk_n.in" 2>"@DIR@/$__sk_n.err";;
esac
__sk_s=$? __sk_r=2
"""


PLAIN = "p"
WITH_VARIABLES = "v"
WITH_STDIN = "i"
WITH_BOTH = "w"
"""First letters of orders' names. `v` and `w`: `pre` and `post` bring what a command has for itself; `i` and `w`: there
is a file for standard input."""


BASH_LINK = 49
_OTHER_LINK = 9


def link_number(path: str) -> int:
    """Return the number that the link has in the shell at `path`. Other shells than bash know numbers of one digit; a
    larger one in bash leaves 9, which scripts like, to commands, and is below what commands lower their limit of open
    files to: the shell must be able to have the number again after each command."""
    return BASH_LINK if os.path.basename(os.path.realpath(path)) == "bash" else _OTHER_LINK


def driver_text(directory: str, revision: int, *, link: int, is_busybox: bool = False) -> str:
    """Return the program for a shell whose files are in `directory`, a path without shell metacharacters, whose end of
    the link is descriptor `link`, and whose environment has the session's variables as of `revision`. BusyBox sh reads
    the program from its standard input, and needs `busybox_text` in the file `run`; bash needs `bash_text` in `bash`.
    """
    if link == BASH_LINK:
        text = _HEAD + _ENTER
    else:
        body = _OTHER.replace("@RUN@", _RUN_BUSYBOX if is_busybox else _RUN)
        text = f"{_HEAD}{_LOOP_HEADS}{body}{_LOOP_ENDS}\n"
    text = text.replace("@LEAVE@", LEAVE_BASH).replace("@SIGNAL@", str(ABANDON_SIGNAL))
    return _fill(text, directory, link).replace("@REVISION@", str(revision))


def bash_text(directory: str) -> str:
    """Return the content of `bash`, the loops of a bash."""
    text = _BASH.replace("@LOOPS@", _LOOP_HEADS).replace("@DONES@", _LOOP_ENDS)
    return _fill(text.strip().replace("\n", " "), directory, BASH_LINK) + "\n"


def busybox_text(directory: str, *, link: int) -> str:
    """Return the content of `run`, which runs one command in BusyBox sh."""
    return _fill(_RUN_FILE, directory, link)


def _fill(text: str, directory: str, link: int) -> str:
    return text.replace("@TRACE@", _KEEP_TRACE).replace("@DIR@", directory).replace("@FD@", str(link))


def command_text(text: str, before: str = "", *, link: int) -> str:
    """Return the content of `cmd`: `text` is run, in bash behind `before`, and complains as if it were the whole of
    `-c`, not in the name of a file."""
    if link == BASH_LINK:
        return f"__sk_text={quote(text)} __sk_before={quote(before)}\n"
    return f'\\eval "$__sk_trace"{quote(text)}\n'


def before_text(before: str) -> str:
    """Return the content of `pre`, for other shells than bash: `before` is run, and complains without the file's
    name."""
    return f"\\eval {quote(before)}\n"


def quote(text: str) -> str:
    """Return `text` as one shell word that means exactly itself."""
    return "'" + text.replace("'", "'\\''") + "'"


def news(changes: Sequence[tuple[int, str, str | None]]) -> str:
    """Return the text that takes over changes (number, variable, value or None) of the session's variables.

    A shell that replaces another may know some already, and have changed the variable since: each is done once.
    """
    lines = []
    for number, name, value in changes:
        act = f"unset -v {name}" if value is None else f"export {name}={quote(value)}"
        lines.append(f'command test "$__sk_g" -ge {number} || command {act} 2>/dev/null')
    if changes:
        lines.append(f"__sk_g={max(number for number, _, _ in changes)}")
    return "".join(line + "\n" for line in lines)


def prologue(cwd: str | None, env: Mapping[str, str]) -> str:
    """Return the text before a command that brings its own directory or variables.

    Of each variable the text notes whether it was exported (`e`), only set (`s`) or neither, or can't be changed (`r`),
    which the shell says as well. A failing `cd` makes the whole fail, and then the command is not run.
    """
    lines = ["__sk_e=$(command export -p)"] if env else []
    for index, (name, value) in enumerate(env.items()):
        lines += [
            f"__sk_v{index}=${{{name}-}}",
            f'case ${{{name}+x}}$__sk_e in x*"x {name}="*|x*"export {name}="*) __sk_x{index}=e;;',
            f"x*) __sk_x{index}=s;; *) __sk_x{index}=;; esac",
            f"command export {name}={quote(value)} || __sk_x{index}=r",
        ]
    if cwd is not None:
        lines += ["__sk_pwd=$PWD __sk_old=${OLDPWD-}", f"CDPATH= command cd -- {quote(cwd)}"]
    return "\n".join([*lines, ""])


def epilogue(cwd: str | None, env: Mapping[str, str]) -> str:
    """Return the text after such a command: directory and variables are as before, but for a variable that the command
    made read-only."""
    lines = []
    if cwd is not None:
        lines += ['CDPATH= command cd -- "$__sk_pwd"', "OLDPWD=$__sk_old"]
    for index, name in enumerate(env):
        lines.append(f"case $__sk_x{index} in r) ;; *) command unset -v {name} && case $__sk_x{index} in")
        lines.append(f's) {name}=$__sk_v{index};; e) command export {name}="$__sk_v{index}";; esac;; esac')
    names = [f"__sk_{letter}{index}" for index in range(len(env)) for letter in "xv"]
    lines.append("unset __sk_e __sk_pwd __sk_old " + " ".join(names))
    return "\n".join([*lines, ""])
