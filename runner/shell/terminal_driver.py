"""The texts a shell sources around a command that runs on a terminal. Pure.

The shell leads its session, so opening the terminal makes it the controlling one, and Ctrl-C there reaches the shell
together with what it runs (one process group, as there is no job control). Therefore:

- `enter` traps INT and QUIT unless the user does: a command whose last program died of it (status 130, 131) is left,
  the way the driver's own signal makes it left. A program that lives through Ctrl-C lets the command go on. A command
  that is busy in the shell itself is PID 1's to end, which sees the key.
- `leave` ignores INT, QUIT and HUP: then PID 1 hangs the terminal up, which takes it from every process of the session,
  and the kernel sends HUP to the session's leader.
- `restore`, before the next command, makes them again what they were.

Whether a user's trap is there is told by the shell's own list, which is written to `traps`: `$(trap)` would be a fork,
and is empty in dash. bash lists what it is asked for; others list all, and setting all of them again changes nothing.

Sources: POSIX.1-2024 XCU 2.15 `trap`; tty_ioctl(4) "Controlling terminal"; `tty_signal_session_leader` in the kernel.
"""

from __future__ import annotations

from runner.shell import command_driver, repl

TERMINAL_TYPE = "xterm-256color"
"""What TERM says on a terminal, unless the shell's says something better than `dumb`."""

_LIST = r"""
__sk_h=
if command test -n "${BASH_VERSION-}"; then command trap -p HUP INT QUIT >|@DIR@/traps
else command trap >|@DIR@/traps; fi
while IFS= command read -r __sk_v; do case $__sk_v in
*__sk_*[\ G]INT) __sk_h=${__sk_h}I;; *[\ G]INT) __sk_h=${__sk_h}i;;
*__sk_*[\ G]QUIT) __sk_h=${__sk_h}Q;; *[\ G]QUIT) __sk_h=${__sk_h}q;; *[\ G]HUP) __sk_h=${__sk_h}h;;
esac; done <@DIR@/traps
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
unset __sk_h
case ${TERM-dumb} in dumb) command export TERM=@TERM@; __sk_t=1;; *) __sk_t=;; esac
"""

_LEAVE = r"""
trap '' HUP INT QUIT
case $__sk_t$TERM in 1@TERM@) command export TERM=dumb;; esac
unset __sk_t
"""

_RESTORE = r"""
trap - HUP INT QUIT
case ${__sk_h-} in *[hiq]*) command . @DIR@/traps;; esac
case ${__sk_h-}${BASH_VERSION-} in *I*.*) trap '@LEAVE@' INT;; *I*) trap - INT;; esac
case ${__sk_h-} in *Q*) trap - QUIT;; esac
unset __sk_h
"""


def enter(directory: str, *, interactive: bool) -> str:
    """Return what comes before a command on a terminal."""
    if interactive:
        on_interrupt = repl.interrupt_action(bash=True), repl.interrupt_action(bash=False)
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


def leave(directory: str) -> str:
    """Return what comes after it, before its status is reported."""
    return (_LIST + _LEAVE).replace("@DIR@", directory).replace("@TERM@", TERMINAL_TYPE)


def restore(directory: str) -> str:
    """Return what comes before the command after it, of whatever kind."""
    return _RESTORE.replace("@DIR@", directory).replace("@LEAVE@", command_driver.LEAVE_BASH)
