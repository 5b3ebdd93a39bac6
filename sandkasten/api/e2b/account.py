"""The account that programs of E2B expect: `user`, uid 1000, with the home `/home/user`.

An image may have it (then nothing is changed), else one program as root adds what is missing when the sandbox is made,
to the session's own layer. Requests for files would cost a fork each, as they name a user; the program has its shell
and one more, since all but the home is done by what is built into a shell. The name stands before others of the same
uid, since programs ask for the name of a uid (passwd(5)).
"""

from __future__ import annotations

from sandkasten.model import ExecSpec, Session
from sandkasten.model.errors import InvalidImage
from sandkasten.supervisor import Supervisor

_SCRIPT = """
set -e
h=/home/user
found=no
while IFS=: read -r name _ uid _ _ home _; do
  if [ "$name" = user ]; then [ "$uid" = 1000 ] && [ "$home" = "$h" ] && found=yes; fi
done < /etc/passwd
if [ $found = no ]; then
  s=/bin/sh; [ ! -x /bin/bash ] || s=/bin/bash
  all="user:x:1000:1000:user:$h:$s"
  while IFS= read -r each; do
    case $each in user:*) ;; *) all="$all
$each" ;; esac
  done < /etc/passwd
  printf '%s\\n' "$all" > /etc/passwd
  g=no
  while IFS=: read -r _ _ gid _; do [ "$gid" != 1000 ] || g=yes; done < /etc/group
  [ $g = yes ] || echo user:x:1000: >> /etc/group
fi
if [ ! -d $h ]; then
  install -d -o 1000 -g 1000 $h 2>/dev/null || { mkdir -p $h; chown 1000:1000 $h; }
fi
"""
_ACCOUNT_MS = 20_000


async def ensure_account(supervisor: Supervisor, session: Session) -> None:
    """Add what is missing to a session. Raises `InvalidImage` if that can't be done in its image."""
    spec = ExecSpec(argv=("/bin/sh", "-c", _SCRIPT), user="root", cwd="/", timeout_ms=_ACCOUNT_MS)
    result = await supervisor.exec(session.id, spec)
    if result.end.exit_code != 0:
        reason = result.output[-200:].decode("utf-8", "replace").strip()
        raise InvalidImage(f"the account of E2B's programs can't be made in this image: {reason}", image=session.image)
