"""The shell program that makes an ordinary shell a persistent one, and the text handed to it per command. Pure.

The driver speaks with PID 1 on the link (`runner.shell.link`), a socket whose descriptor the command does not have:
the redirection of what is run closes it, and the copy that the shell keeps for itself meanwhile is closed on execve(2).
Per command it reads one order from the link, sources `cmd` in itself with the three standard streams redirected to
files that the order has named, reports `+` when it begins, and after the end the directory, the status, and what a new
shell would need. A successor finds that in the file `state`, which PID 1 wrote.

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
  not whole is asked for again (`0 r`), a number is never run twice, and a shell that can't read at all ends.
- `__sk_st` sets `$?` to what the previous command left.
- BusyBox sh unwinds an error in a subshell (`(: </nowhere)`) to the `command` outside of it, so that the fork would go
  on as a second driver: what is not the shell itself exits. And it never gets there, but computes for ever, if that
  `command` is in a text (`-c`, `eval`) and not in a file: therefore it reads the program from its standard input, and
  one command is run by a file of its own, within a single `command`.
- a `break` or `continue` outside a loop of the command acts on the loops here, of which there are eight for this one
  reason. At the head of each, `__sk_r` tells whether a command was left that way (1: status 0) or ended (2).
- a removed directory has no physical name: `pwd -P` fails in bash, and prints an empty line in dash and BusyBox sh.
- stdout is redirected for the shell itself (`exec`), for the shell takes back what was redirected for `.` alone before
  it runs a trap on EXIT. stderr is not, or `set -x` would show the driver's work.

What it does not do: `break 8` ends the shell like `exit`. A trap on EXIT of the user's takes the place of the one that
saves the state, so the next shell has the directory and exports from before the command that ended this one; what such
a trap writes to stderr is lost. After `set -n` or `set -r` the shell can't run anything, and is replaced. Outside of
bash a command's own descriptor 9, and in bash 49, is closed when the command has ended. A limit of open files below
that number costs the shell.

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

FOREVER = "while case x in esac;"
"""A condition that always holds and is no command: in bash the user's function `:` would run in the place of the
builtin, time and again."""

_LOOPS = 8

LEAVE_BASH = r"""case $__sk_r.$BASHPID in 1.$$) __sk_a=130
trap "case \$__sk_r.\$BASHPID in 1.\$\$) return 130;; esac" DEBUG; set -T; return 130;; esac"""
"""Commands by which bash leaves a command, without single quotes. A fork of bash that the signal reaches before its own
traps are off has nothing to leave, and would complain of it."""

DRIVER = r"""
unset __sk_driver
if [ -n "${BASH_VERSION-}" ]; then
shopt -s expand_aliases
trap '@LEAVE@' @SIGNAL@ INT
else
trap 'case $__sk_r in 1) __sk_a=130 __sk_r=l; { : "${__sk_unset?}"; } 2>/dev/null;;
llllllll) __sk_r=1;; l*) __sk_r=l$__sk_r;; esac' @SIGNAL@
fi
__sk_st() { return "$1"; }
__sk_end() {
command test -d "${PWD-}/." && command pwd -P 2>/dev/null || command printf '%s\n' "${PWD-}"
command echo "$__sk_n $__sk_s"
case $__sk_n in 0) ;; *) __sk_save;; esac
}
__sk_save() {
command export -p
command printf '__sk_g=%s\numask ' "$__sk_g"
command umask
command echo "$__sk_n ."
}
__sk_exit() {
case $__sk_m in *v*) __sk_m=-; command . @DIR@/post >/dev/null;; esac
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
__sk_n=0 __sk_m=- __sk_s=0 __sk_a= __sk_r=2 __sk_o= __sk_f= __sk_l=0
@LOOPS@
case $__sk_r in
'') ;;
*) case $__sk_r in 1|l*) __sk_s=0;; esac
unset -f command
case $__sk_s${BASH_VERSION-} in 0|*.*) ;; *) command test "/proc/$$" -ef /proc/self || exit "$__sk_s";; esac
__sk_r=
case $__sk_a in '') ;; *) __sk_s=$__sk_a __sk_a=
case ${BASH_VERSION-} in '') ;; *) trap - DEBUG; set +T;; esac;; esac
command exec >/dev/null
case $__sk_m in *v*) command . @DIR@/post;; esac
__sk_m=-
__sk_end >&@FD@;;
esac
unset -f command read
if IFS=' ' command read -r __sk_n __sk_m __sk_c <&@FD@; then case $__sk_n in '') __sk_c=x;; esac
else __sk_c=x; fi
case $__sk_n in
"$__sk_c")
case $__sk_n in "$__sk_l") continue;; esac
__sk_f= __sk_l=$__sk_n;;
*) __sk_f=x$__sk_f
case ${#__sk_f} in ????) break 8;; esac
command echo "0 r" >&@FD@
continue;;
esac
@RUN@
case $__sk_r in 1|l*) __sk_s=130 __sk_r=2;; esac
@DONES@
"""

_RUN = r"""case $__sk_m in
-) command eval '__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit; \command echo "$__sk_n +" >&@FD@
\__sk_st "$__sk_s"; \command . @DIR@/cmd </dev/null 2>"@DIR@/$__sk_n.err" @FD@>&-
__sk_s=$? __sk_r=2';;
*) command eval '__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit; { \command echo "$__sk_n +" >&@FD@
\command . @DIR@/pre && { \__sk_st "$__sk_s"; \command . @DIR@/cmd; } @FD@>&-
} <"@DIR@/$__sk_n.in" 2>"@DIR@/$__sk_n.err"
__sk_s=$? __sk_r=2';;
esac"""

_RUN_BUSYBOX = r"""command . @DIR@/run; __sk_o=$?
case $__sk_r in 1) __sk_s=$__sk_o __sk_r=2;; esac"""

_RUN_FILE = r"""
__sk_r=1; \command exec >"@DIR@/$__sk_n.out" || \exit
case $__sk_m in
-) \command echo "$__sk_n +" >&@FD@
\__sk_st "$__sk_s"; \. @DIR@/cmd </dev/null 2>"@DIR@/$__sk_n.err" @FD@>&-;;
*) { \command echo "$__sk_n +" >&@FD@
\. @DIR@/pre && { \__sk_st "$__sk_s"; \. @DIR@/cmd; } @FD@>&-; } <"@DIR@/$__sk_n.in" 2>"@DIR@/$__sk_n.err";;
esac
__sk_s=$? __sk_r=2
"""

PLAIN = "-"
WITH_VARIABLES = "v"
WITH_STDIN = "i"


def link_number(path: str) -> int:
    """Return the number that the link has in the shell at `path`. Other shells than bash know numbers of one digit; a
    larger one in bash leaves 9, which scripts like, to commands, and is below what commands lower their limit of open
    files to: the shell must be able to have the number again after each command."""
    return 49 if os.path.basename(os.path.realpath(path)) == "bash" else 9


def driver_text(directory: str, revision: int, *, link: int, is_busybox: bool = False) -> str:
    """Return the program for a shell whose files are in `directory`, a path without shell metacharacters, whose end of
    the link is descriptor `link`, and whose environment has the session's variables as of `revision`. BusyBox sh reads
    the program from its standard input, and needs `busybox_text` in the file `run`."""
    text = DRIVER.replace("@RUN@", _RUN_BUSYBOX if is_busybox else _RUN).replace("@LEAVE@", LEAVE_BASH)
    text = text.replace("@LOOPS@", " ".join([f"{FOREVER} do"] * _LOOPS)).replace(
        "@DONES@", "; ".join(["done"] * _LOOPS)
    )
    text = text.replace("@DIR@", directory).replace("@SIGNAL@", str(ABANDON_SIGNAL)).replace("@FD@", str(link))
    return text.replace("@REVISION@", str(revision))


def busybox_text(directory: str, *, link: int) -> str:
    """Return the content of `run`, which runs one command in BusyBox sh."""
    return _RUN_FILE.replace("@DIR@", directory).replace("@FD@", str(link))


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
