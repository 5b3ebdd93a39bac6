"""Texts that a shell sources around a command on a terminal, and the text that makes a shell read its lines from one.
Pure.

The shell leads its session, so opening the terminal makes it the controlling one, and Ctrl-C there reaches the shell
together with what it runs (one process group, as there is no job control). Therefore:

- `enter` sets traps for INT and QUIT where the user has none. If the last program died of the signal (status 130, 131),
  the trap abandons the rest of the command, as the driver's own signal does. If the program survives Ctrl-C, the
  command goes on. A command that keeps the shell itself busy is ended by PID 1, which sees the key.
- `leave` ignores INT, QUIT and HUP, because PID 1 hangs the terminal up afterwards: every process of the session loses
  the terminal, and the kernel sends HUP to the session's leader, which is the shell.
- `restore` sets the user's own traps again, before the next command.

The user's traps are known from the shell's list of traps, which is written to `<order>.traps` and read back at once:
`$(trap)` would be a fork, and is empty in dash. bash lists the traps that are asked for; other shells list all, and to
set all of them again changes nothing.

Reading lines (prompt, editing, unfinished lines, Ctrl-C) runs in the shell itself, in the place of a command, so
directory, variables, functions and aliases are the ones of the commands before and after. Each line goes to the file
`<order>.line` and is sourced, as the driver does with a command.

- Prompt: PS1 if it was set (dash and BusyBox sh come with one), else `sandbox:<directory>$ `; PS2 or `> ` while a child
  with `-n` says that the text ends too early. dash and BusyBox sh do not say it of a here-document, which
  therefore ends with its first line.
- Editing, history and completion: readline in bash (`read -e`); elsewhere what the terminal itself does.
- Ctrl-C at the prompt drops the text; PID 1 adds a line end after it if readline reads, which would go on otherwise,
  and keeps back what is typed after it until readline reads again: in between, the terminal edits lines and takes keys
  for its own. A readline that a trap has interrupted takes the terminal for prepared until one of its reads times out
  (`__sk_y`).
- Ctrl-C elsewhere abandons the line. If a program died of the key, the trap of `enter` does so. If the line keeps the
  shell itself busy, PID 1, which sees the key, sends LINE_SIGNAL, and holds back later input until the shell has taken
  the signal. In bash a trap on DEBUG unwinds functions and sourced files above the depth of this text.
- `exit`, `logout` and end-of-file end the reading of lines and keep the shell. An `exit` inside a longer line ends the
  shell, as in any command, and a `break` outside of a loop ends the reading of lines.

In BusyBox sh an error in a subshell of a line (`(: </nowhere)`) computes until Ctrl-C; `command_driver` has the reason.

There is no job control (Ctrl-Z, fg, bg): in a shell not started as an interactive one bash takes a job that dies of
Ctrl-C for a reason to end itself. A program run as `interactive` has it.

Sources: POSIX.1-2024 XCU 2.8.1, 2.15 `trap`, `sh` option -n; bash(1) `read`, `history`, "PROMPTING"; tty_ioctl(4)
"Controlling terminal"; `tty_signal_session_leader` in the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.shell import command_driver
from runner.shell.command_driver import FOREVER, quote

TERMINAL_TYPE = "xterm-256color"
"""Value of TERM on a terminal, unless the shell has a better one than `dumb`."""

_LIST = r"""
__sk_h= __sk_k=
if command test -n "${BASH_VERSION-}"; then command trap -p HUP INT QUIT >|"@DIR@/$__sk_n.traps"
else command trap >|"@DIR@/$__sk_n.traps"; fi
while IFS= command read -r __sk_v; do __sk_k="$__sk_k$__sk_v
"
case $__sk_v in
*__sk_*[\ G]INT) __sk_h=${__sk_h}I;; *[\ G]INT) __sk_h=${__sk_h}i;;
*__sk_*[\ G]QUIT) __sk_h=${__sk_h}Q;; *[\ G]QUIT) __sk_h=${__sk_h}q;; *[\ G]HUP) __sk_h=${__sk_h}h;;
esac; done <"@DIR@/$__sk_n.traps"
unset __sk_v
"""

_LEAVE_COMMAND_BASH = r"""case $?$__sk_r in @STATUS@1) __sk_a=@STATUS@
trap "case \$__sk_r in 1) return @STATUS@;; esac" DEBUG; set -T; return @STATUS@;; esac"""

_LEAVE_COMMAND = r"""case $?$__sk_r in @STATUS@1) __sk_a=@STATUS@; { : "${__sk_unset?}"; } 2>/dev/null;; esac"""

_ENTER_ONE = r"""
case $__sk_h in *@LETTER@*) ;; *)
if command test -n "${BASH_VERSION-}"; then trap '@BASH@' @NAME@
else trap '@OTHER@' @NAME@; fi;; esac
"""

_ENTER = r"""
unset __sk_h __sk_k
case ${TERM-dumb} in dumb) command export TERM=@TERM@; __sk_t=1;; *) __sk_t=;; esac
"""

_LEAVE = r"""
trap '' HUP INT QUIT
case $__sk_t$TERM in 1@TERM@) command export TERM=dumb;; esac
unset __sk_t
"""

_RESTORE = r"""
trap - HUP INT QUIT
case ${__sk_h-} in *[hiq]*) command eval "$__sk_k";; esac
case ${__sk_h-}${BASH_VERSION-} in *I*.*) trap '@LEAVE@' INT;; *I*) trap - INT;; esac
case ${__sk_h-} in *Q*) trap - QUIT;; esac
unset __sk_h __sk_k
"""


def enter(directory: str, *, interactive: bool) -> str:
    """Return the text before a command on a terminal."""
    if interactive:
        on_interrupt = _interrupt_action(bash=True), _interrupt_action(bash=False)
    else:
        on_interrupt = _with_status(_LEAVE_COMMAND_BASH, 130), _with_status(_LEAVE_COMMAND, 130)
    on_quit = _with_status(_LEAVE_COMMAND_BASH, 131), _with_status(_LEAVE_COMMAND, 131)
    text = _LIST + _trap("INT", "i", on_interrupt) + _trap("QUIT", "q", on_quit) + _ENTER
    return text.replace("@DIR@", directory).replace("@TERM@", TERMINAL_TYPE)


def _with_status(action: str, status: int) -> str:
    return action.replace("@STATUS@", str(status))


def _trap(name: str, letter: str, actions: tuple[str, str]) -> str:
    bash, other = (action.replace("'", "'\\''") for action in actions)
    text = _ENTER_ONE.replace("@BASH@", bash).replace("@OTHER@", other)
    return text.replace("@NAME@", name).replace("@LETTER@", letter)


def leave(directory: str, *, interactive: bool) -> str:
    """Return the text after a command on a terminal, before its status is reported."""
    text = (_FORGET_LINES if interactive else "") + _LIST + _LEAVE
    return text.replace("@DIR@", directory).replace("@TERM@", TERMINAL_TYPE)


def restore() -> str:
    """Return the text before the next command, of whatever kind."""
    return _RESTORE.replace("@LEAVE@", command_driver.LEAVE_BASH)


# Lines read from a terminal -----------------------------------------------------------------------------------------

LINE_SIGNAL = 51
"""Asks the shell to abandon the line that it runs. A realtime signal, so no command expects it."""

_UNWIND_BASH = r"""__sk_u=1
trap "case \$__sk_q\$((\${#BASH_SOURCE[@]}>__sk_d)) in 11) return 130;; esac" DEBUG; set -T
case $((${#BASH_SOURCE[@]}>__sk_d)) in 1) return 130;; esac"""

_UNWIND = r"""__sk_u=1; { : "${__sk_unset?}"; } 2>/dev/null"""

_READ_LINES = r"""
__sk_j=$? __sk_q=0 __sk_u= __sk_w= __sk_i=
if command test -n "${BASH_VERSION-}"; then
__sk_d=${#BASH_SOURCE[@]}
trap 'case $__sk_q.$BASHPID in 1.$$) @UNWIND_BASH@;; esac' @SIGNAL@
__sk_read() { __sk_y=1; IFS= command read -e -r -p "$1" __sk_v; }
__sk_prompt() {
case ${1:+x}$BASH_VERSION in x[0-3].*|x4.[0-3].*) __sk_p=$1;; x*) __sk_p=${1@P};; *) __sk_p="sandbox:$PWD\$ ";; esac
}
case ${__sk_y-} in 1) command read -e -t 0.01 __sk_v;; esac
else
trap 'case $__sk_q in 1) @UNWIND@;; *) case $__sk_i in i) ;; *) __sk_i=j;; esac;; esac' @SIGNAL@
__sk_read() { command printf %s "$1" >&2; IFS= command read -r __sk_v; }
__sk_prompt() { case $1 in ''|'$ '|'# '|'\w \$ ') __sk_p="sandbox:$PWD\$ ";; *) __sk_p=$1;; esac; }
fi
@FOREVER@ do
case $__sk_i,$__sk_w in shown,*) __sk_p=;; *,) __sk_prompt "${PS1-}";; *) __sk_p=${PS2-> };; esac
__sk_i= __sk_v=
if __sk_read "$__sk_p"; then __sk_x=0; else __sk_x=$?; fi
case $__sk_x$__sk_i,$__sk_v in
*i,*) __sk_i= __sk_w=; case ${BASH_VERSION-} in '') command echo >&2;; esac; continue;;
0*) ;;
*j,*) __sk_i=shown; continue;;
1,) case $__sk_w in '') break;; esac; __sk_w=; command echo >&2; continue;;
1,*) ;;
*) __sk_w=; command echo >&2; continue;;
esac
__sk_i=
unset -v __sk_y
__sk_w=$__sk_w$__sk_v
case $__sk_w in
exit|logout|exit\ [0-9]*) case $__sk_w in *[!a-z0-9\ ]*) ;; *) break;; esac;;
*[!\ ]*) ;;
*) __sk_w=; continue;;
esac
command printf '%s\n' "$__sk_w" >|"@DIR@/$__sk_n.line"
case $(LC_ALL=C @SHELL@ -n <"@DIR@/$__sk_n.line" 2>&1)$__sk_w in
*'unexpected end of file'*|*'unexpected EOF'*|*'end of file unexpected'*|*nterminated*|*'EOF in'*|*issing*|\
*here-document*|*[!\\]\\|\\)
__sk_w="$__sk_w
"
continue;;
esac
case ${BASH_VERSION-} in '') ;; *) command history -s -- "$__sk_w";; esac
__sk_w=
command eval '__sk_q=1; \__sk_st "$__sk_j"; \command . "@DIR@/$__sk_n.line"
__sk_j=$? __sk_q=0'
case $__sk_q in 1) __sk_j=130 __sk_q=0;; esac
case $__sk_u${BASH_VERSION-} in 1) __sk_j=130;; 1*) __sk_j=130; trap - DEBUG; set +T;; esac
__sk_u=
done
case $__sk_w in exit\ *) __sk_j=${__sk_w#exit };; esac
unset -v __sk_y
__sk_st "$__sk_j"
"""

_FORGET_LINES = f"""
trap - {LINE_SIGNAL}
unset -f __sk_read __sk_prompt
unset -v __sk_d __sk_i __sk_j __sk_p __sk_q __sk_u __sk_v __sk_w __sk_x
"""
"""Text after the reading of lines, however that ended."""


def read_lines(directory: str, argv: Sequence[str]) -> str:
    """Return the text that reads lines, in the place of a command. `argv` starts a shell of the kind."""
    shell = " ".join(map(quote, argv))
    text = _READ_LINES.replace("@UNWIND_BASH@", _UNWIND_BASH.replace("'", "'\\''")).replace("@UNWIND@", _UNWIND)
    text = text.replace("@FOREVER@", FOREVER)
    return text.replace("@SIGNAL@", str(LINE_SIGNAL)).replace("@DIR@", directory).replace("@SHELL@", shell)


def _interrupt_action(*, bash: bool) -> str:
    """Return the action of Ctrl-C: abandon a line whose last program died of SIGINT; at the prompt, drop the unfinished
    text."""
    unwind = _UNWIND_BASH if bash else _UNWIND
    return f"case $?$__sk_q in 1301) {unwind};; *0) __sk_w= __sk_i=i;; esac"
