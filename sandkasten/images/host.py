"""The `host` image: a made `/` over the machine's own `/usr`, with no download.

Owns the recipe. The rule for `/etc`: of the entries in a list, only files that every user of the machine may read are
copied, and no file with a private key in it. Nothing of `/root`, `/home`, `/var` or `/opt` is copied. Files of accounts
are written here, not copied; nsinit writes those of host names for each session, which is faster without files to
replace. What Debian's tools need besides is in `debian.py`.

The image's own `/usr` lies over the machine's in a session. It holds a `python` command where the machine has only
`python3`, since scripts and people ask for `python`, whiteouts of the files by which pip refuses to install, and else
nothing.

A finished image is kept until the recipe, the linker's cache, the packages or these files change (`fingerprint`), then
made anew at a start.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from sandkasten.errors import InvalidImage
from sandkasten.images import debian, rootfs
from sandkasten.images.catalog import HOST, Catalog, Image, now

RECIPE = 3
"""Version of the recipe, to be raised when a change of this module changes the image."""

MERGED_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
DIRECTORIES = (
    *("dev", "proc", "sys", "tmp", "run", "workspace", "home", "home/sandbox", "root", "usr", "etc"),
    *("opt", "srv", "mnt", "media", "var", "var/cache", "var/lib", "var/log", "var/tmp", "var/spool"),
)
MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}
LINKS = {"var/run": "/run", "var/lock": "/run/lock", "etc/mtab": "../proc/self/mounts"}

ETC_COPIED = (
    *(
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "alternatives",
        "ssl/certs",
        "ssl/openssl.cnf",
        "ca-certificates.conf",
    ),
    *(
        "localtime",
        "timezone",
        "os-release",
        "debian_version",
        "lsb-release",
        "protocols",
        "services",
        "rpc",
        "ethertypes",
    ),
    *("mime.types", "mailcap", "magic", "magic.mime", "terminfo", "inputrc", "nanorc", "host.conf", "gai.conf"),
    *("adduser.conf", "debconf.conf", "default/useradd", "deluser.conf", "login.defs", "skel", "security/limits.conf"),
    *("bash_completion.d", "perl", "fonts", "vim", "python3*", "java-*-openjdk", "ImageMagick-*"),
)
ETC_MADE = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    f"{debian.PASSWD}"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash\n",
    "group": f"root:x:0:\ntty:x:5:\n{debian.GROUP}nogroup:x:65534:\nsandbox:x:1000:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "profile": "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n",
    "bash.bashrc": "[ -z \"${PS1-}\" ] || PS1='\\u@\\h:\\w\\$ '\n",
}
PLAIN = {"shadow": "passwd", "gshadow": "group"}
"""Files with the entries of these, and their passwords."""
PROGRAM_DIRECTORIES = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin")
"""Directories of commands inside."""
PYTHON = "usr/bin/python"
MAX_FILE_BYTES = 8 * 1024 * 1024
_PRIVATE = b"PRIVATE KEY"
_PUBLIC_DIRECTORY = stat.S_IROTH | stat.S_IXOTH


def ensure_host_image(catalog: Catalog, *, root: Path = Path("/")) -> Image:
    """Return the `host` image, making it if there is none or it is out of date. `root` is the machine to take it of.

    Raises:
        InvalidImage: the machine's file system can't be used this way.
    """
    fingerprint = _fingerprint(root)
    present = next((image for image in catalog.images() if image.name == HOST), None)
    if present is not None and (present.kind != "host" or present.fingerprint == fingerprint):
        return present  # an imported image that took the name is left alone
    image = Image(name=HOST, kind="host", created_at=now(), source="this machine", fingerprint=fingerprint)
    with catalog.building(HOST) as directory:
        _make_tree(directory / "rootfs", root)
        return catalog.publish(directory, image, replace=True)


def _fingerprint(root: Path) -> str:
    """Return a digest of the image's sources. A change of the machine's libraries changes the linker's cache."""
    sources = [_version(root / "etc/ld.so.cache"), _find_python3(root)]
    if debian.is_debian(root):
        sources += [_version(root / debian.DPKG_STATUS), *debian.managed_markers(root)]
    return hashlib.sha256(f"{RECIPE}/{'/'.join(map(str, sources))}".encode()).hexdigest()[:16]


def _version(path: Path) -> str:
    try:
        status = path.stat()
    except FileNotFoundError:
        return "none"
    return f"{status.st_mtime_ns}-{status.st_size}"


def _find_python3(root: Path) -> str | None:
    """Return the machine's `python3`, as seen from inside, if there is no `python`."""
    if any(os.path.lexists(root / directory / "python") for directory in PROGRAM_DIRECTORIES):
        return None
    found = (f"/{directory}/python3" for directory in PROGRAM_DIRECTORIES)
    return next((path for path in found if rootfs.is_program(str(root), path=path)), None)


def _make_tree(target: Path, root: Path) -> None:
    for name in DIRECTORIES:
        _make_directory(target / name, MODES.get(name, 0o755))
    os.chown(target / "home/sandbox", 1000, 1000)
    os.chown(target / "workspace", 1000, 1000)
    for name in MERGED_LINKS:
        _link_merged(target, root, name)
    for pattern in ETC_COPIED:
        for source in sorted((root / "etc").glob(pattern)):
            relative = source.relative_to(root)
            _make_parents(target, relative)
            _copy(source, target / relative)
    for name, text in ETC_MADE.items():
        _write(target / "etc" / name, text.encode(), 0o644)
    for name, link in LINKS.items():
        (target / name).symlink_to(link)
    python3 = _find_python3(root)
    if python3 is not None:
        _make_parents(target, Path(PYTHON))
        (target / PYTHON).symlink_to(python3)
    if debian.is_debian(root):
        _add_debian_files(target, root)


def _add_debian_files(target: Path, root: Path) -> None:
    """Add what Debian's tools need; see `debian.py`."""
    for name in debian.DIRECTORIES:
        _make_parents(target, Path(name))
        _make_directory(target / name)
    for name, (mode, uid, gid) in debian.OWNED.items():
        _make_directory(target / name, mode)
        os.chown(target / name, uid, gid)
    for name, text in debian.FILES.items():
        _write(target / name, text.encode(), 0o644)
    for name, fields in (("shadow", "19000:0:99999:7:::"), ("gshadow", ":")):
        _write(target / "etc" / name, debian.shadow_of(ETC_MADE[PLAIN[name]], fields).encode(), 0o640)
        os.chown(target / "etc" / name, 0, debian.SHADOW_ID)
    status, lists = debian.packages_of(root)
    _write(target / debian.DPKG_STATUS, status.encode(), 0o644)
    for name in lists:  # one empty file: to make each is ten times as long, and there may be thousands
        os.link(target / debian.EMPTY, target / "var/lib/dpkg/info" / name)
    for name in debian.managed_markers(root):
        _make_parents(target, Path(name))
        os.mknod(target / name, stat.S_IFCHR, os.makedev(0, 0))  # a whiteout: overlayfs hides the machine's file


def _make_parents(target: Path, path: Path) -> None:
    for parent in reversed(path.parents[:-1]):
        _make_directory(target / parent)


def _link_merged(target: Path, root: Path, name: str) -> None:
    source = root / name
    if source.is_symlink() and os.readlink(source).lstrip("/").rstrip("/") == f"usr/{name}":
        (target / name).symlink_to(f"usr/{name}")
    elif os.path.lexists(source):
        raise InvalidImage(f"this machine's /{name} is not a link to /usr/{name}; import an image instead of `host`")


def _copy(source: Path, target: Path) -> None:
    """Copy a link as a link, a public regular file with its bytes, a public directory with its public entries."""
    status = source.lstat()
    if stat.S_ISLNK(status.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISDIR(status.st_mode):
        if status.st_mode & _PUBLIC_DIRECTORY == _PUBLIC_DIRECTORY:
            _make_directory(target)
            for entry in sorted(source.iterdir()):
                _copy(entry, target / entry.name)
    elif stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH and status.st_size <= MAX_FILE_BYTES:
        content = source.read_bytes()
        if _PRIVATE not in content:
            _write(target, content, 0o755 if status.st_mode & stat.S_IXOTH else 0o644)
            os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _make_directory(target: Path, mode: int = 0o755) -> None:
    target.mkdir(exist_ok=True)
    target.chmod(mode)  # mkdir(2) applies the umask


def _write(target: Path, content: bytes, mode: int) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(content)
        os.fchmod(fd, mode)
