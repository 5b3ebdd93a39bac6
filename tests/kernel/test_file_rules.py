"""File rules of a session: where its commands may write, and where from they may read and execute."""

from __future__ import annotations

import pytest

from nsinit.kernel import landlock
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.model import ExecSpec, FileRules, SessionSpec
from sandkasten.model.errors import InvalidRequest

ABI = landlock.probe_abi()
needs_rules = pytest.mark.skipif(ABI < landlock.FILES_ABI, reason=f"needs Landlock ABI 3, not {ABI}")

TRY = """
touch made 2>/dev/null && echo made; echo x 2>/dev/null >> kept && echo written; : 2>/dev/null > kept && echo emptied
mkdir d 2>/dev/null && echo directory; mv kept moved 2>/dev/null && echo moved
rm -f kept moved 2>/dev/null && echo removed
"""


async def output(supervisor: LocalSupervisor, session_id: str, command: str, **how: object) -> list[str]:
    result = await supervisor.exec(session_id, ExecSpec(command, **how))  # type: ignore[arg-type]
    return result.output.decode().split()


@needs_rules
@pytest.mark.parametrize("user", [None, "root"])
async def test_commands_write_only_where_it_is_allowed(supervisor: LocalSupervisor, user: str | None) -> None:
    """Making, changing, emptying, renaming and removing files work below the writable paths and nowhere else, root or
    not.
    """
    rules = FileRules(writable=("/tmp",))
    session = await supervisor.create(SessionSpec(filesystem=rules, user=user))
    async with supervisor.files(session.id).open_write("/workspace/kept") as writer:
        await writer.send(b"content")
        await writer.commit()
    all_of_it = ["made", "written", "emptied", "directory", "moved", "removed"]
    assert await output(supervisor, session.id, f"cd /tmp; echo > kept; {TRY}") == all_of_it
    for how in ({}, {"stateless": True}):
        assert await output(supervisor, session.id, f"cd /workspace; {TRY} cat kept", **how) == ["content"]
    assert await output(supervisor, session.id, "mv /tmp/d /workspace/ 2>/dev/null; ls /workspace") == ["kept"]
    assert await output(
        supervisor, session.id, "echo > /dev/null; echo x > /dev/stdout; head -c1 /dev/zero | wc -c"
    ) == [
        *("x", "1"),
    ]
    await supervisor.destroy(session.id)


@needs_rules
async def test_commands_read_and_execute_only_where_it_is_allowed(supervisor: LocalSupervisor) -> None:
    """Writable paths are readable too; a link from an allowed path to a forbidden one can't be followed."""
    rules = FileRules(readable=("/usr", "/etc/passwd"), writable=("/workspace",))
    session = await supervisor.create(SessionSpec(filesystem=rules))
    script = """
cat /etc/passwd >/dev/null && echo passwd; cat /etc/group 2>/dev/null >/dev/null && echo group
ls /etc 2>/dev/null; ls /tmp 2>/dev/null && echo tmp; cp /bin/true /workspace/t && /workspace/t && echo own
ln -s /etc/group link; cat link 2>/dev/null >/dev/null && echo link
python3 -c 'print("python")'
"""
    assert await output(supervisor, session.id, script) == ["passwd", "own", "python"]
    await supervisor.destroy(session.id)


@needs_rules
async def test_the_file_api_is_not_bound(supervisor: LocalSupervisor) -> None:
    """File rules bind commands and not the file API: the holder of the key writes files where commands can't."""
    session = await supervisor.create(SessionSpec(filesystem=FileRules(writable=())))
    async with supervisor.files(session.id).open_write("/workspace/given") as writer:
        await writer.send(b"given")
        await writer.commit()
    assert await output(supervisor, session.id, "cat given; echo x 2>/dev/null > given; cat given") == ["givengiven"]
    await supervisor.destroy(session.id)


@needs_rules
@pytest.mark.parametrize("path", ["/no/such/place", "/proc/self/root", "relative", "/tmp/\n"])
async def test_a_rule_that_can_not_be_kept_is_refused(supervisor: LocalSupervisor, path: str) -> None:
    """A rule with a missing path, a path through a link of the kernel's, or a senseless path: no session is made, and
    no weaker rule is used.
    """
    for rules in (FileRules(readable=("/usr", path)), FileRules(writable=(path,))):
        with pytest.raises(InvalidRequest) as refused:
            await supervisor.create(SessionSpec(filesystem=rules))
        assert refused.value.details == {"filesystem": "can't be kept here"}


async def test_a_kernel_without_whole_rules_refuses_the_session(supervisor: LocalSupervisor) -> None:
    """Landlock before ABI 3 lets a file be emptied where nothing may be written: a session with file rules is refused
    there.
    """
    spec = SessionSpec(filesystem=FileRules(writable=("/tmp",)))
    if landlock.FILES_ABI <= ABI:
        session = await supervisor.create(spec)
        assert await output(supervisor, session.id, "touch /workspace/x 2>/dev/null || echo refused") == ["refused"]
        await supervisor.destroy(session.id)
    else:
        with pytest.raises(InvalidRequest):
            await supervisor.create(spec)
