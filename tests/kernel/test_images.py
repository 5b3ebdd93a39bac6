"""Images on the real kernel: the `host` recipe, and archives that try to get out of the unpacking jail."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import pytest

from sandkasten.errors import InvalidImage
from sandkasten.images.catalog import Catalog
from sandkasten.images.host import ensure_host_image
from sandkasten.images.importing import import_tar
from tests.kernel.harness import data_directory, host_plan, running
from tests.waiting import patience

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

Member = tuple[str, bytes, str | bytes]
"""Name, tar type, and content or link target."""


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "data", aliases={"python": "host"})


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory beside the store with one file, checked to be the same afterwards."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "kept").write_text("same")
    yield directory
    assert [(entry.name, entry.read_text()) for entry in directory.iterdir()] == [("kept", "same")]


def assert_nothing_left(data_dir: Path) -> None:
    """Assert that neither an image nor a layer, nor anything of one, is there."""
    assert [each for name in ("images", "layers", "trash") for each in (data_dir / name).glob("*")] == []


SHELL: list[Member] = [("etc", tarfile.DIRTYPE, ""), ("bin/sh", tarfile.REGTYPE, b"#!\n")]


_WRITE: Mapping[str, Literal["w:", "w:gz", "w:bz2", "w:xz"]] = {"": "w:", "gz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}


def make_tar(path: Path, members: list[Member], compression: Literal["", "gz", "bz2", "xz"] = "") -> Path:
    with tarfile.open(path, mode=_WRITE[compression], format=tarfile.PAX_FORMAT) as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                archive.addfile(info)
    return path


# The host image ---------------------------------------------------------------------------------------------------


def test_the_host_image_is_ready_well_under_a_second(tmp_path: Path) -> None:
    """The host image needs no copy and no download; the quickest of three tries counts, for the machine may be busy."""
    taken_s = []
    for number in range(3):
        start_s = time.monotonic()
        ensure_host_image(Catalog(tmp_path / f"data{number}"))
        taken_s.append(time.monotonic() - start_s)
    assert min(taken_s) < patience(0.5)


def test_the_host_image_is_valid_and_made_once(catalog: Catalog) -> None:
    """Made on first use, found by its alias, not made again while nothing changed."""
    first = ensure_host_image(catalog)
    assert ensure_host_image(catalog) == first
    assert catalog.get("python") == first
    assert catalog.validate("host") == []


def test_the_host_image_holds_nothing_private(catalog: Catalog) -> None:
    """No file of accounts, keys or identities of the machine, and no file that not everybody may read."""
    ensure_host_image(catalog)
    root = catalog.trees("host")[0]
    names = {str(path.relative_to(root)) for path in root.rglob("*")}
    for name in ("sudoers", "machine-id", "ssh", "ssl/private", "fstab", "environment", "apt/auth.conf"):
        assert f"etc/{name}" not in names
    for directory in ("root", "home/sandbox", "opt", "run"):
        assert list((root / directory).iterdir()) == []
    assert {path.name for path in (root / "usr").rglob("*") if not path.is_dir()} <= {"python", "EXTERNALLY-MANAGED"}
    assert {path.name for path in (root / "var").rglob("*") if path.is_file() and path.stat().st_size} <= {
        "format",
        "status",
    }
    for name in {"shadow", "gshadow"} & {path.name for path in (root / "etc").iterdir()}:
        assert {line.split(":")[1] for line in (root / "etc" / name).read_text().splitlines()} == {"*"}
        assert stat.S_IMODE((root / "etc" / name).stat().st_mode) == 0o640
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name not in ("shadow", "gshadow"):
            assert path.stat().st_mode & 0o004
            assert b"PRIVATE KEY" not in path.read_bytes()


def test_the_host_image_names_its_own_users(catalog: Catalog) -> None:
    """Accounts of the machine are not told inside."""
    ensure_host_image(catalog)
    lines = (catalog.trees("host")[0] / "etc/passwd").read_text().splitlines()
    names = [line.split(":")[0] for line in lines]
    assert {"root", "daemon", "www-data", "_apt", "nobody", "sandbox"} <= set(names)
    assert [line for line in lines if 1000 <= int(line.split(":")[2]) < 65534] == lines[-1:]
    assert "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash" in lines


def fake_machine(root: Path) -> Path:
    """Make a merged-usr machine with some of everything that the recipe must judge."""
    etc = root / "etc"
    (etc / "ssl/certs").mkdir(parents=True)
    (etc / "python3.99").mkdir()
    for name in ("bin", "sbin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    for name, mode in (("ld.so.cache", 0o644), ("shadow", 0o644), ("services", 0o640), ("python3.99/x", 0o644)):
        (etc / name).write_text(name)
        (etc / name).chmod(mode)
    (etc / "ssl/certs/ca.pem").write_text("CERTIFICATE")
    (etc / "ssl/certs/key.pem").write_text("-----BEGIN RSA PRIVATE KEY-----")
    os.mkfifo(etc / "protocols")
    return root


def test_only_listed_public_regular_files_are_copied(catalog: Catalog, tmp_path: Path) -> None:
    """Unlisted, unreadable and special files and private keys stay out, whatever their mode."""
    ensure_host_image(catalog, root=fake_machine(tmp_path / "machine"))
    etc = catalog.trees("host")[0] / "etc"
    assert (etc / "python3.99/x").read_text() == "python3.99/x"
    assert os.listdir(etc / "ssl/certs") == ["ca.pem"]
    assert not {"shadow", "services", "protocols"} & set(os.listdir(etc))


def test_the_host_image_does_not_depend_on_the_umask(catalog: Catalog, tmp_path: Path) -> None:
    """Directories are open to the sandbox's user even if the operator's umask is strict."""
    before = os.umask(0o077)
    try:
        ensure_host_image(catalog, root=fake_machine(tmp_path / "machine"))
    finally:
        os.umask(before)
    root = catalog.trees("host")[0]
    closed = [path for path in root.rglob("*") if path.is_dir() and not path.stat().st_mode & 0o001]
    assert closed == [root / "root"]


def test_a_changed_linker_cache_makes_a_new_host_image(catalog: Catalog, tmp_path: Path) -> None:
    """After a library was installed the next start has its cache; the old files stay while a session exists."""
    machine = fake_machine(tmp_path / "machine")
    first = ensure_host_image(catalog, root=machine)
    (tmp_path / "data/sessions/abc").mkdir(parents=True)
    (machine / "etc/ld.so.cache").write_text("more libraries")
    second = ensure_host_image(catalog, root=machine)
    assert second.fingerprint != first.fingerprint
    assert (catalog.trees("host")[0] / "etc/ld.so.cache").read_text() == "more libraries"
    (old,) = (tmp_path / "data/images/.retired").iterdir()
    assert (old / "rootfs/etc/ld.so.cache").read_text() == "ld.so.cache"


STATUS = """\
Package: liba
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 1
Conffiles:
 /etc/secret-place 0123
Description: a library
 with a long text

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 2

Package: ../../up
Status: install ok installed
Architecture: all
Version: 3
"""


def test_the_machine_s_packages_count_as_installed(catalog: Catalog, tmp_path: Path) -> None:
    """Names, versions and relations alone, of those that are there; a list that not everybody may read stays out, and a
    change makes a new image."""
    machine = fake_machine(tmp_path / "machine")
    add_program(machine / "usr/bin/dpkg")
    status = machine / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(STATUS)
    first = ensure_host_image(catalog, root=machine)
    dpkg = catalog.trees("host")[0] / "var/lib/dpkg"
    assert (dpkg / "status").read_text() == (
        "Package: liba\nStatus: install ok installed\nArchitecture: amd64\nMulti-Arch: same\nVersion: 1\n"
        "Description: a library\n"
    )
    assert sorted(os.listdir(dpkg / "info")) == ["format", "liba:amd64.list"]
    status.chmod(0o640)
    os.utime(status, ns=(0, 0))
    assert ensure_host_image(catalog, root=machine).fingerprint != first.fingerprint
    assert (catalog.trees("host")[0] / "var/lib/dpkg/status").read_text() == ""


def add_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_a_machine_with_python3_alone_gets_a_python_command(catalog: Catalog, tmp_path: Path) -> None:
    """A link in the image, nothing on the machine; when the machine gets a `python` of its own the link goes."""
    machine = fake_machine(tmp_path / "machine")
    ensure_host_image(catalog, root=machine)
    usr = catalog.trees("host")[0] / "usr"
    assert list(usr.iterdir()) == []
    add_program(machine / "usr/bin/python3")
    with_python3 = ensure_host_image(catalog, root=machine)
    assert [(str(path.relative_to(usr)), path.is_symlink()) for path in sorted(usr.rglob("*"))] == [
        ("bin", False),
        ("bin/python", True),
    ]
    assert os.readlink(usr / "bin/python") == "/usr/bin/python3"
    assert ensure_host_image(catalog, root=machine) == with_python3
    assert sorted(os.listdir(machine / "usr/bin")) == ["python3"]
    add_program(machine / "usr/local/bin/python")
    ensure_host_image(catalog, root=machine)
    assert list((catalog.trees("host")[0] / "usr").iterdir()) == []


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the machine's python3 in /usr")
def test_python_can_be_called_by_that_name_in_a_session(tmp_path: Path) -> None:
    """`python` works by its name and by the path that scripts begin with; the machine's commands are all there beside
    it.
    """
    with data_directory() as data_dir, running(data_dir) as server:
        shutil.rmtree(data_dir / "images/host")
        ensure_host_image(Catalog(data_dir))
        box = server.build(host_plan())
        assert box.run("python -c 'print(6 * 7)' && printf '#!/usr/bin/python\\nprint(7)\\n' >x").out == "42\n"
        assert box.run("chmod +x x && ./x && cd /usr/bin && ls -A").out.split("\n", 1)[1].split() == sorted(
            {"python", *os.listdir("/usr/bin")}, key=lambda name: name.encode()
        )
        box.teardown()


def test_a_machine_without_merged_usr_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """A machine whose programs are not all below /usr gets no host image; the sentence says what to do."""
    machine = fake_machine(tmp_path / "machine")
    (machine / "bin").unlink()
    (machine / "bin").mkdir()
    with pytest.raises(InvalidImage, match=r"/bin is not a link to /usr/bin; import an image"):
        ensure_host_image(catalog, root=machine)
    assert catalog.images() == []


# Archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_an_archive_becomes_an_image(
    catalog: Catalog, tmp_path: Path, compression: Literal["", "gz", "bz2", "xz"]
) -> None:
    """Files, links, owners, modes and times arrive; plain or compressed."""
    members: list[Member] = [
        *SHELL,
        ("./usr/share/deep/file", tarfile.REGTYPE, b"\0\xff"),
        ("usr/share/hard", tarfile.LNKTYPE, "./usr/share/deep/file"),
        ("link", tarfile.SYMTYPE, "/etc"),
    ]
    image, counts = import_tar(catalog, "x", make_tar(tmp_path / "x.tar", members, compression))
    root = catalog.trees("x")[0]
    assert (image.members, image.size_bytes, counts.skipped) == (5, 5, 0)
    assert (root / "usr/share/hard").read_bytes() == b"\0\xff"
    assert (root / "usr/share/hard").stat().st_nlink == 2
    assert os.readlink(root / "link") == "/etc"
    assert (root / "bin/sh").stat().st_mtime == 0
    assert catalog.get("x") == image


def test_owners_and_modes_are_kept_and_privilege_is_not(catalog: Catalog, tmp_path: Path) -> None:
    """Plain ids stay as they are; setuid and setgid of files are dropped and counted; those of directories stay."""
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, kind, content in SHELL:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.size = kind, 0o755, len(content)
            archive.addfile(info, io.BytesIO(content if isinstance(content, bytes) else b""))
        for name, kind, mode in (("su", tarfile.REGTYPE, 0o6755), ("spool", tarfile.DIRTYPE, 0o3777)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = kind, mode, 1000, 65535
            archive.addfile(info)
    _, counts = import_tar(catalog, "x", tmp_path / "x.tar")
    status = (catalog.trees("x")[0] / "su").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1000, 65535, 0o755)
    assert stat.S_IMODE((catalog.trees("x")[0] / "spool").stat().st_mode) == 0o3777
    assert counts.privileged == 1


def long_link_chain(outside: str) -> list[Member]:
    """Make the kind of chain that outgrows PATH_MAX when it is resolved as text, ending outside (CVE-2025-4517)."""
    directory = "d" * 247
    steps: list[Member] = []
    path = ""
    for letter in "abcdefghijklmnop":
        steps.append((f"{path}{directory}", tarfile.DIRTYPE, ""))
        steps.append((f"{path}{letter}", tarfile.SYMTYPE, directory))
        path += f"{directory}/"
    short = "/".join("abcdefghijklmnop")
    link = f"{short}/{'l' * 254}"
    return [
        *steps,
        (link, tarfile.SYMTYPE, "../" * 16),
        ("escape", tarfile.SYMTYPE, f"{link}/../../../../../../../..{outside}"),
        ("escape/kept", tarfile.REGTYPE, b"overwritten"),
        ("escape/new", tarfile.REGTYPE, b"new"),
    ]


HOSTILE: dict[str, Callable[[str], list[Member]]] = {
    "absolute name": lambda outside: [(f"{outside}/kept", tarfile.REGTYPE, b"overwritten")],
    "parent name": lambda outside: [(f"{'../' * 20}{outside}/kept", tarfile.REGTYPE, b"overwritten")],
    "absolute link": lambda outside: [
        ("a", tarfile.SYMTYPE, outside),
        ("a/kept", tarfile.REGTYPE, b"overwritten"),
    ],
    "relative link": lambda outside: [
        ("a", tarfile.SYMTYPE, "../" * 20 + outside),
        ("a/kept", tarfile.REGTYPE, b"overwritten"),
        ("a", tarfile.DIRTYPE, ""),
    ],
    "chain of links": lambda outside: [
        ("a", tarfile.SYMTYPE, "."),
        ("a/b", tarfile.SYMTYPE, ".."),
        ("a/b/c", tarfile.SYMTYPE, f"b/..{outside}"),
        ("c/kept", tarfile.REGTYPE, b"overwritten"),
    ],
    "long chain of links": long_link_chain,
    "hard link": lambda outside: [
        ("h", tarfile.LNKTYPE, f"{outside}/kept"),
        ("h", tarfile.REGTYPE, b"overwritten"),
    ],
    "hard link through a link": lambda outside: [
        ("a", tarfile.SYMTYPE, outside),
        ("h", tarfile.LNKTYPE, "a/kept"),
    ],
    "proc": lambda outside: [
        ("a", tarfile.SYMTYPE, "/proc/1/root" + outside),
        ("a/kept", tarfile.REGTYPE, b"overwritten"),
    ],
}


@pytest.mark.parametrize("attack", sorted(HOSTILE))
def test_no_member_reaches_outside_of_the_new_image(
    catalog: Catalog, tmp_path: Path, outside: Path, attack: str
) -> None:
    """Each attack either fails with a sentence or writes inside; the fixture checks that the outside is the same."""
    tar = make_tar(tmp_path / "x.tar", [*SHELL, *HOSTILE[attack](str(outside))])
    try:
        import_tar(catalog, "x", tar)
        refusal = None
    except InvalidImage as error:
        refusal = str(error)
    if refusal is None:
        inside = [path.read_bytes() for path in catalog.trees("x")[0].rglob("kept")]
        assert set(inside) <= {b"overwritten"}
    else:
        assert "can't be unpacked" in refusal
        assert_nothing_left(tmp_path / "data")


def test_device_nodes_and_fifos_are_left_out(catalog: Catalog, tmp_path: Path) -> None:
    """Device nodes and FIFOs of an archive are counted as skipped and not made."""
    special: list[Member] = [
        ("null", tarfile.CHRTYPE, ""),
        ("disk", tarfile.BLKTYPE, ""),
        ("pipe", tarfile.FIFOTYPE, ""),
    ]
    _, counts = import_tar(catalog, "x", make_tar(tmp_path / "x.tar", [*SHELL, *special]))
    assert counts.skipped == 3
    assert sorted(os.listdir(catalog.trees("x")[0])) == ["bin", "etc"]


def numbers(count: int) -> list[Member]:
    return [(f"f{number}", tarfile.REGTYPE, b"12345678") for number in range(count)]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "/etc is no directory"),
        ([*SHELL, *numbers(20)], "more than 10 members"),
        ([*SHELL, ("big", tarfile.REGTYPE, b"x" * 2000)], "more than 1000 bytes"),
        ([*SHELL, ("n" * 300, tarfile.REGTYPE, b"")], "File name too long"),
        ([*SHELL, ("d/" * 3000, tarfile.DIRTYPE, "")], "File name too long"),
        ([*SHELL, ("s", tarfile.SYMTYPE, "t" * 5000)], "File name too long"),
        ([*SHELL, ("etc", tarfile.REGTYPE, b"")], "/etc is no directory"),
        ([*SHELL, ("bin/sh/x", tarfile.REGTYPE, b"")], "Not a directory"),
        ([("etc", tarfile.DIRTYPE, "")], "there is no shell"),
        ([*SHELL, ("dev", tarfile.SYMTYPE, "/etc")], "/dev is no plain directory"),
    ],
)
def test_what_can_not_be_an_image_is_refused_in_words(
    catalog: Catalog, tmp_path: Path, members: list[Member], words: str
) -> None:
    """Limits, impossible names and unusable roots give a sentence and leave nothing."""
    tar = make_tar(tmp_path / "x.tar", members)
    with pytest.raises(InvalidImage, match=words):
        import_tar(catalog, "x", tar, max_members=10, max_bytes=1000)
    assert_nothing_left(tmp_path / "data")


@pytest.mark.parametrize("damage", ["half", "broken header"])
def test_half_an_archive_is_no_image(catalog: Catalog, tmp_path: Path, damage: str) -> None:
    """A cut or a damaged header behind a whole member is an error, not the end."""
    members = [*SHELL, ("etc/last", tarfile.REGTYPE, b"x")]
    content = bytearray(make_tar(tmp_path / "x.tar", members).read_bytes())
    second = content.index(b"etc/last")
    if damage == "half":
        del content[second:]
    else:
        content[second] ^= 1  # the header's checksum is wrong now
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(InvalidImage, match="broken"):
        import_tar(catalog, "x", tmp_path / "x.tar")
    assert_nothing_left(tmp_path / "data")


@pytest.mark.parametrize("content", [b"", b"no tar at all\n" * 100, b"\x1f\x8b\x08garbage", b"BZh9garbage" * 9])
def test_a_file_that_is_no_archive_is_refused(catalog: Catalog, tmp_path: Path, content: bytes) -> None:
    """Bytes that are no tar archive are refused with a sentence."""
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(InvalidImage, match=r"no tar archive|broken|empty"):
        import_tar(catalog, "x", tmp_path / "x.tar")
    assert_nothing_left(tmp_path / "data")


def test_a_cut_archive_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """Half of a compressed archive does not make an image."""
    members = [*SHELL, ("noise", tarfile.REGTYPE, os.urandom(100_000))]
    whole = make_tar(tmp_path / "x.tar", members, "gz").read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidImage):
        import_tar(catalog, "x", tmp_path / "x.tar")
    assert_nothing_left(tmp_path / "data")


def test_a_header_larger_than_memory_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """A megabyte of gzip that holds a gigabyte of header ends the import, not the machine."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1024**3
    deflate = zlib.compressobj(wbits=-15)
    head = deflate.compress(info.tobuf()) + deflate.flush(zlib.Z_FULL_FLUSH)
    block = deflate.compress(bytes(1024**2)) + deflate.flush(zlib.Z_FULL_FLUSH)  # can be repeated as it is
    (tmp_path / "x.tar").write_bytes(b"\x1f\x8b\x08" + bytes(7) + head + block * 1024)
    with pytest.raises(InvalidImage, match="more than 128 MiB of memory"):
        import_tar(catalog, "x", tmp_path / "x.tar")
    assert_nothing_left(tmp_path / "data")


@pytest.mark.skipif(shutil.which("busybox") is None, reason="needs busybox")
def test_an_image_with_busybox_alone_is_fine(catalog: Catalog, tmp_path: Path) -> None:
    """No bash, no libraries: `sh` as a link is enough."""
    busybox = Path(shutil.which("busybox") or "").read_bytes()
    members: list[Member] = [
        ("bin/busybox", tarfile.REGTYPE, busybox),
        ("bin/sh", tarfile.SYMTYPE, "busybox"),
        ("etc/passwd", tarfile.REGTYPE, b"root:x:0:0::/:/bin/sh\n"),
    ]
    import_tar(catalog, "busybox", make_tar(tmp_path / "x.tar", members))
    assert catalog.validate("busybox") == []
