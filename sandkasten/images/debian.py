"""Directories and files by which Debian's own tools work in the `host` image: dpkg, apt, adduser, PAM, pip.

Nothing of the machine's `/var` is copied. The list of packages is written afresh, so that a package's dependencies are
met by what lies in `/usr`; of each package its names, versions and relations are told, which `/usr/share/doc` tells as
well. A machine without dpkg gets none of this.
Sources: Debian Policy Manual §9.2 (ids), dpkg(1) FILES, deb-control(5), apt.conf(5), pam.d(5), shadow(5); PEP 668.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

DPKG = "usr/bin/dpkg"
DPKG_STATUS = "var/lib/dpkg/status"
EMPTY = "var/lib/dpkg/available"
_MAX_STATUS_BYTES = 64 * 1024 * 1024
_APT_ID, _MAIL_ID, SHADOW_ID, _STAFF_ID = 42, 8, 42, 50

DIRECTORIES = (
    *(f"etc/apt/{name}" for name in ("apt.conf.d", "auth.conf.d", "keyrings", "preferences.d", "sources.list.d")),
    *("etc/apt/trusted.gpg.d", "etc/cron.d", "etc/cron.daily", "etc/default", "etc/dpkg/dpkg.cfg.d", "etc/init.d"),
    *("etc/logrotate.d", "etc/pam.d", "etc/profile.d", "etc/security", "etc/skel", "etc/systemd/system"),
    *(f"var/lib/dpkg/{name}" for name in ("alternatives", "info", "parts", "triggers", "updates")),
    *("var/backups", "var/cache/apt/archives", "var/cache/debconf", "var/lib/apt/lists", "var/lib/apt/periodic"),
    *("var/lib/misc", "var/lib/pam", "var/log/apt", "var/opt"),
)
OWNED: dict[str, tuple[int, int, int]] = {
    "var/cache/apt/archives/partial": (0o700, _APT_ID, 0),
    "var/lib/apt/lists/partial": (0o700, _APT_ID, 0),
    "var/cache/ldconfig": (0o700, 0, 0),
    "var/local": (0o2775, 0, _STAFF_ID),
    "var/mail": (0o2775, 0, _MAIL_ID),
}
"""Directories with a mode and ids of their own."""

_ACCOUNTS = (
    *(("daemon", 1, 1, "/usr/sbin"), ("bin", 2, 2, "/bin"), ("sys", 3, 3, "/dev"), ("sync", 4, 65534, "/bin")),
    *(("games", 5, 60, "/usr/games"), ("man", 6, 12, "/var/cache/man"), ("lp", 7, 7, "/var/spool/lpd")),
    *(("mail", 8, 8, "/var/mail"), ("news", 9, 9, "/var/spool/news"), ("uucp", 10, 10, "/var/spool/uucp")),
    *(("proxy", 13, 13, "/bin"), ("www-data", 33, 33, "/var/www"), ("backup", 34, 34, "/var/backups")),
    *(("list", 38, 38, "/var/list"), ("irc", 39, 39, "/run/ircd"), ("_apt", _APT_ID, 65534, "/nonexistent")),
)
_GROUPS = (
    "daemon:1 bin:2 sys:3 adm:4 disk:6 lp:7 mail:8 news:9 uucp:10 man:12 proxy:13 kmem:15 dialout:20 fax:21 voice:22 "
    "cdrom:24 floppy:25 tape:26 sudo:27 audio:29 dip:30 www-data:33 backup:34 operator:37 list:38 irc:39 src:40 "
    "shadow:42 utmp:43 video:44 sasl:45 plugdev:46 staff:50 games:60 users:100"
)
PASSWD = "".join(f"{name}:x:{uid}:{gid}:{name}:{home}:/usr/sbin/nologin\n" for name, uid, gid, home in _ACCOUNTS)
GROUP = "".join(f"{entry.replace(':', ':x:')}:\n" for entry in _GROUPS.split())

_ALL = ("auth", "account", "password", "session")
_MODULES = {
    "common-auth": "auth required pam_unix.so\n",
    "common-account": "account required pam_unix.so\n",
    "common-password": "password required pam_unix.so yescrypt\n",
    "common-session": "session required pam_unix.so\n",
    "common-session-noninteractive": "session required pam_unix.so\n",
}
_ROOT_MAY = "auth sufficient pam_rootok.so\n"


def _including(*kinds: str) -> str:
    return "".join(f"@include common-{kind}\n" for kind in kinds)


PAM = {
    **_MODULES,
    "other": _including(*_ALL),
    "login": _including(*_ALL),
    "cron": _including("auth", "account", "session-noninteractive"),
    **dict.fromkeys(("passwd", "chpasswd", "newusers"), _including("password")),
    **dict.fromkeys(("su", "su-l", "chfn", "chsh"), _ROOT_MAY + _including("auth", "account", "session")),
    **dict.fromkeys(("runuser", "runuser-l"), _ROOT_MAY + "session required pam_unix.so\n"),
}

_NO_NETWORK = (
    "grep -q ^nameserver /etc/resolv.conf || "
    "{ echo 'This sandbox has no network: apt can install packages from local files only.' >&2; exit 1; }"
)
FILES = {
    **{f"etc/pam.d/{name}": text for name, text in PAM.items()},
    "etc/apt/apt.conf.d/50sandbox": f'APT::Update::Pre-Invoke {{ "{_NO_NETWORK}"; }};\n',
    "etc/apt/sources.list": "",
    EMPTY: "",
    "var/lib/dpkg/diversions": "",
    "var/lib/dpkg/info/format": "1\n",
    "var/lib/dpkg/statoverride": "",
}


def is_debian(root: Path) -> bool:
    """Return whether a machine has dpkg."""
    return os.path.isfile(root / DPKG)


def shadow_of(text: str, fields: str) -> str:
    """Return the entries of a shadow file for those of `passwd` or `group`: no password opens any of them."""
    return "".join(f"{line.split(':')[0]}:*:{fields}\n" for line in text.splitlines())


def packages_of(root: Path) -> tuple[str, list[str]]:
    """Return dpkg's status of the packages that a machine has, and the names of their lists of files, which are empty
    here: dpkg warns of each that is missing. Without a status that everybody may read both are empty."""
    stanzas, lists = [], []
    for stanza in _status(root).split("\n\n"):
        fields = dict(_fields(stanza))
        if fields.get("Status", "").split() != ["install", "ok", "installed"] or "/" in fields.get("Package", "/"):
            continue
        stanzas.append("".join(f"{name}: {value}\n" for name, value in fields.items()))
        qualifier = f":{fields['Architecture']}" if fields.get("Multi-Arch") == "same" else ""
        lists.append(f"{fields['Package']}{qualifier}.list")
    return "\n".join(stanzas), lists


def _status(root: Path) -> str:
    try:
        status = (root / DPKG_STATUS).lstat()
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & stat.S_IROTH or status.st_size > _MAX_STATUS_BYTES:
            return ""
        return (root / DPKG_STATUS).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _fields(stanza: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of one line. Those of more lines are lists of the machine's own files, and long descriptions."""
    for line in stanza.splitlines():
        name, colon, value = line.partition(":")
        if colon and not line[0].isspace() and value.strip():
            yield name, value.strip()


def managed_markers(root: Path) -> list[str]:
    """Return the files by which pip refuses to install as root (PEP 668), relative to the machine's root. They speak of
    a machine whose packages are the distribution's alone; in a session nothing but the session is at stake."""
    return sorted(str(path.relative_to(root)) for path in (root / "usr/lib").glob("python3*/EXTERNALLY-MANAGED"))
