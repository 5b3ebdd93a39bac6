"""The command line without a daemon: what it prints, what it refuses, what it writes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import attrs
import pytest

from sandkasten.admission.keys import read_keys
from sandkasten.cli import keys, serve
from sandkasten.cli.common import Stop
from sandkasten.cli.main import main
from sandkasten.cli.notices import notices
from sandkasten.config import Config, ConfigError, IsolationSettings
from sandkasten.host.checks import disk_notices
from sandkasten.installation import plain_settings

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own configuration is seen."""
    for name in [name for name in os.environ if name.startswith("SANDKASTEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_help_needs_nothing_heavy() -> None:
    """Neither trio nor the web framework nor YAML is loaded to print a page of help."""
    code = (
        "import sys, contextlib\nfrom sandkasten.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(sorted({'trio', 'quart', 'hypercorn', 'yaml', 'attrs', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_an_option_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings print the same line and succeed."""
    assert main(["version", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["version"]
    assert main(["version"]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == told != ""


def test_an_image_name_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """`host` and its aliases are made by every start; other names must be an image or lead to one."""
    config = Config(data_dir=tmp_path / "data")
    assert notices(config) == []
    config = attrs.evolve(
        config,
        default_image="pythn",
        allowed_images=("python", "host", "alpine", "node"),
        image_aliases={"python": "host", "node": "node20"},
    )
    default, allowed = notices(config)
    assert "'pythn'" in default
    assert allowed.endswith("'alpine', 'node' yet")
    for name in ("pythn", "alpine", "node20"):
        image = tmp_path / "data/images" / name
        image.mkdir(parents=True)
        (image / "meta.json").write_text('{"kind": "rootfs", "created_at": "", "source": ""}')
    assert notices(config) == []


_REACHED = ("0.0.0.0:80", "[::]:80", "192.0.2.7:80", "node.example:80")


@pytest.mark.parametrize("address", [*_REACHED, "127.9.9.9:80", "[::1]:80", "localhost:80", "unix:/run/x.sock"])
def test_plain_http_beyond_this_machine_is_told(address: str, tmp_path: Path) -> None:
    """Every address that others can reach is named, and only those."""
    found = notices(Config(data_dir=tmp_path, listen=("127.0.0.1:8080", address)))
    assert [each.split()[1] for each in found] == [address] * (address in _REACHED)


def test_a_data_directory_in_memory_or_on_a_small_disk_is_told(tmp_path: Path) -> None:
    """The directory need not exist yet. The free space is the kernel's figure for the place where it would be made."""
    assert disk_notices(tmp_path / "new", 1) == []
    (memory,) = disk_notices(Path("/dev/shm/sandkasten-new/data"), 0)
    assert "on tmpfs" in memory
    free_mb = shutil.disk_usage(tmp_path).free // 2**20
    (small,) = disk_notices(tmp_path / "new", 2 * free_mb)
    assert f"less than the {2 * free_mb} MiB" in small
    assert int(small.split()[1]) == pytest.approx(free_mb, rel=0.1)


def test_merging_that_has_no_effect_is_told(tmp_path: Path) -> None:
    """The notice comes exactly if merging was asked for and the kernel does not merge."""
    switch = Path("/sys/kernel/mm/ksm/run")
    merges = switch.exists() and switch.read_text().strip() == "1"
    for is_asked in (False, True):
        said = notices(Config(data_dir=tmp_path, isolation=IsolationSettings(merge_pages=is_asked)))
        assert len([each for each in said if "nothing is merged" in each]) == (is_asked and not merges)


def test_the_published_client_in_the_same_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both distributions own files of one package."""
    about = tmp_path / "sandkasten-0.3.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sandkasten\nVersion: 0.3.0\n")
    assert notices(Config(data_dir=tmp_path)) == []
    monkeypatch.syspath_prepend(str(tmp_path))
    (told,) = notices(Config(data_dir=tmp_path))
    assert "sandkasten 0.3.0" in told


@pytest.mark.parametrize(("ignored", "count"), [((), 4), ((signal.SIGHUP,), 3), ((signal.SIGHUP, signal.SIGQUIT), 2)])
def test_what_is_ignored_at_the_start_does_not_stop_it(ignored: tuple[signal.Signals, ...], count: int) -> None:
    """nohup(1) is obeyed; SIGINT and SIGTERM always count."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        numbers = serve.stop_signals()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert {signal.SIGINT, signal.SIGTERM} <= set(numbers)
    assert not set(numbers) & set(ignored)
    assert len(numbers) == count


def test_a_mistake_in_the_configuration_is_a_line_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, the sentence on stderr."""
    (tmp_path / "c.yaml").write_text("colour: red")
    (tmp_path / "c.yaml").chmod(0o600)
    assert main(["image", "list", "--config", str(tmp_path / "c.yaml")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sandkasten: unknown key 'colour'")
    assert len(captured.err.splitlines()) == 1


def test_doctor_tells_a_mistake_of_ours_from_a_lack_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and the sentence; nothing was tried."""
    (tmp_path / "c.yaml").write_text("isolation: {required: [landlok]}")
    (tmp_path / "c.yaml").chmod(0o600)
    assert main(["doctor", "--config", str(tmp_path / "c.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sandkasten: isolation.required: 'landlok' is no protection; there are ")
    assert main(["doctor", "--config", "no\x1b[2Jfile"]) == 2
    assert "no\\x1b[2Jfile" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("serve",), ("init",), ("image", "list")])
def test_who_is_not_root_gets_one_sentence(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The sentence says what to do, and nothing is tried."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([*arguments, "--data-dir", str(tmp_path / "data")]) == 1
    assert "sudo" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@root_only
def test_init_makes_what_is_missing_and_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configuration, key and image appear once; a second run changes none of them and tells no secret."""
    config, data = tmp_path / "etc/s.yaml", tmp_path / "data"
    arguments = ["init", "--config", str(config), "--data-dir", str(data)]
    assert main(arguments) == 0
    first = (config.read_bytes(), (data / "api-key").read_bytes(), (data / "images/host").stat().st_ino)
    assert main(["init", "--config", str(config)]) == 0
    assert (config.read_bytes(), (data / "api-key").read_bytes(), (data / "images/host").stat().st_ino) == first
    assert [stat.S_IMODE(path.stat().st_mode) for path in (data, data / "api-key", config)] == [0o700, 0o600, 0o600]
    output = capsys.readouterr().out
    assert first[1].decode().strip() not in output
    assert f"API key: {data / 'api-key'}" in output
    assert "default image: python (alias of host)" in output
    assert (plain_settings(config.read_text()) or {})["data_dir"] == str(data), "clients would need PyYAML"


@root_only
def test_images_are_looked_after_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """List, validate and delete, and a sentence where one can't be."""
    place = ["--data-dir", str(tmp_path / "data")]
    assert main(["init", *place]) == 0
    assert main(["image", "list", *place]) == 0
    assert main(["image", "validate", "python", *place]) == 0
    assert main(["image", "delete", "python", *place]) == 1
    assert main(["image", "validate", "host", "--json", *place]) == 0
    assert main(["image", "rm", "host", "--json", *place]) == 0
    assert main(["image", "validate", "host", *place]) == 1
    assert main(["image", "import", "--name", "x", "--tar", str(tmp_path / "none.tar"), *place]) == 1
    captured = capsys.readouterr()
    assert "this machine (also base, python)" in captured.out
    *_, text, valid, gone = captured.out.splitlines()
    assert (text, valid) == ("python: ok", '{"name":"host","problems":[]}')
    assert gone == '{"name":"host","ok":true,"files_gone":true}'
    assert [line for line in captured.err.splitlines() if "data directory" not in line] == [
        "sandkasten: 'python' is an alias of image 'host'; delete the image",
        "sandkasten: there is no image 'host'",
        f"sandkasten: {tmp_path / 'none.tar'}: No such file or directory",
    ]


@pytest.mark.slow
@root_only
def test_an_image_is_imported_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tar with a shell becomes an image that is listed and sound; what was left out or dropped is said."""
    place = ["--data-dir", str(tmp_path / "data")]
    (tmp_path / "data").mkdir(mode=0o700)
    with tarfile.open(tmp_path / "small.tar", "w") as archive:
        for name, kind, mode in (("etc", tarfile.DIRTYPE, 0o755), ("bin/sh", tarfile.REGTYPE, 0o4755)):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.size = kind, mode, 0
            archive.addfile(member)
        fifo = tarfile.TarInfo("fifo")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
    assert main(["image", "import", "--name", "small", "--tar", str(tmp_path / "small.tar"), *place]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "small: 3 members, 0.0 MiB",
        "small: left out 1 device nodes, FIFOs, unknown members or attributes",
        "small: dropped the setuid or setgid bit of 1 files",
    ]
    assert main(["image", "list", *place]) == 0
    assert re.search(r"^small +layers .* small\.tar$", capsys.readouterr().out, re.MULTILINE)
    assert main(["image", "inspect", "small", *place]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["name"], seen["problems"], seen["in_use"], len(seen["layers"])) == ("small", [], None, 1)
    assert main(["image", "prune", "--older-than", "1s", *place]) == 0
    assert capsys.readouterr().out == "0 layers, 0 broken downloads, 0 B\n"
    assert main(["image", "validate", "small", *place]) == 0
    assert capsys.readouterr().out == "small: ok\n"
    assert main(["image", "import", "--json", "--name", "other", "--tar", str(tmp_path / "small.tar"), *place]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], made["members"], made["skipped"], made["privileged"]) == ("other", 3, 1, 1)


COMMANDS = [
    ["key", "create", "--name", "x"],
    ["key", "list"],
    ["key", "revoke", "x"],
    ["image", "list"],
    ["image", "import", "--name", "x", "--tar", "none.tar"],
    ["security"],
    ["doctor", "--fix"],
]


@root_only
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_makes_no_second_installation(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data directory that isn't there is refused, and named."""
    assert main([*command, "--data-dir", str(tmp_path / "nowhere")]) == 1
    named, refused = capsys.readouterr().err.splitlines()
    assert named == f"sandkasten: configuration without a file, data directory {tmp_path}/nowhere, which does not exist"
    assert f"there is no data directory {tmp_path}/nowhere" in refused
    assert list(tmp_path.iterdir()) == []


@root_only
def test_commands_find_the_installation_that_make_run_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the directory of the checkout no option is needed; the first line names what was found, on stderr."""
    made = tmp_path / ".sandkasten"
    assert main(["init", "--config", str(made / "sandkasten.yaml"), "--data-dir", str(made)]) == 0
    capsys.readouterr()
    for command in (["key", "create", "--name", "ci"], ["key", "list"], ["image", "list"], ["security"], ["doctor"]):
        main(command)
        first = capsys.readouterr().err.splitlines()[0]
        assert first == f"sandkasten: configuration .sandkasten/sandkasten.yaml, data directory {made}"
    assert [each.name for each in read_keys(made / "keys.json")] == ["ci"]


@root_only
def test_a_configuration_that_was_not_named_is_of_somebody_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root in a directory of another user's does not take that user's file, unless that user ran sudo."""
    path = tmp_path / "sandkasten.yaml"
    path.write_text(f"data_dir: {tmp_path}")
    os.chown(path, 4321, 4321)
    assert main(["image", "list"]) == 1
    assert "belongs to user 4321; if it is to count, name it with --config" in capsys.readouterr().err
    assert main(["image", "list", "--config", str(path)]) == 0
    monkeypatch.setenv("SUDO_UID", "4321")
    assert main(["image", "list"]) == 0


def test_an_attempt_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt id is no campaign of no attempts that succeeds."""
    assert main(["security", "--only", "nosuch", "--data-dir", str(tmp_path)]) == 1
    assert "sandkasten: --only: no attempt's id begins with 'nosuch'; the groups are " in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["/dev/full", "closed pipe"])
def test_a_line_that_nobody_can_read_is_logged_and_ends_nothing(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next lines go nowhere, and neither does what the interpreter flushes at its end."""
    if broken == "/dev/full":
        stream = open("/dev/full", "w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = open(writer, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    serve.say("listening")
    serve.say("try")
    assert [(record.message, vars(record)["line"]) for record in caplog.records] == [("stdout_lost", "listening")]
    stream.close()


def test_a_key_is_made_once_and_for_root_alone(tmp_path: Path) -> None:
    """Two starts have the same key; the file is 0600 whatever the umask is."""
    config = Config(data_dir=tmp_path / "data")
    before = os.umask(0)
    try:
        first = keys.with_key(config)
    finally:
        os.umask(before)
    assert first.api_key == keys.with_key(config).api_key
    assert len(first.api_key or "") >= 40
    assert stat.S_IMODE(config.api_key_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.data_dir.stat().st_mode) == 0o700


def test_a_configured_key_makes_no_file(tmp_path: Path) -> None:
    """An operator who brings a key decides where the key is kept."""
    config = Config(data_dir=tmp_path / "data", api_key="given")
    assert keys.with_key(config) == config
    assert not config.data_dir.exists()


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """A copied or restored key file with an open mode is noticed."""
    config = Config(data_dir=tmp_path)
    keys.with_key(config)
    config.api_key_path.chmod(0o644)
    with pytest.raises(Stop, match="other users may read"):
        keys.with_key(config)


def test_a_link_in_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    """Neither written through nor read through."""
    config = Config(data_dir=tmp_path / "data")
    config.data_dir.mkdir()
    config.api_key_path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        keys.with_key(config)
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    """An empty key would be no key."""
    config = Config(data_dir=tmp_path)
    config.api_key_path.touch(0o600)
    with pytest.raises(Stop, match="visible ASCII"):
        keys.with_key(config)


def test_the_line_to_paste_does_not_hold_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line reads the key from its file, over TCP or a unix socket, with quoted paths."""
    config = keys.with_key(Config(data_dir=tmp_path / "my data"))
    serve.greet(config, ["http://127.0.0.1:8080"], key_is_given=False)
    output = capsys.readouterr().out
    assert config.api_key is not None
    assert config.api_key not in output
    assert (
        f"curl -sS http://127.0.0.1:8080/v1/sessions -H \"Authorization: Bearer $(cat '{tmp_path}/my data/api-key')\""
        in output
    )
    assert "--unix-socket /run/s.sock http://localhost/" in serve.curl_line(
        config, ["unix:/run/s.sock"], key_is_given=True
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EADDRINUSE, "address already in use"), "the address is in use"),
        (ConfigError("another daemon uses /x"), "another daemon uses /x"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: /x"),
    ],
)
def test_failures_an_operator_can_mend_are_sentences(error: Exception, words: str) -> None:
    """Also when nurseries have wrapped them; a bug stays a traceback."""
    wrapped = ExceptionGroup("", [ExceptionGroup("", [error])])
    assert words in (serve.explain(wrapped) or "")
    assert serve.explain(ExceptionGroup("", [KeyError("bug")])) is None


def test_a_repeated_listen_option_adds_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP and a unix socket at once, from the command line."""
    from sandkasten.cli.common import load
    from sandkasten.cli.main import make_parser

    arguments = make_parser("serve").parse_args(["serve", "--listen", "127.0.0.1:0", "--listen", f"unix:{tmp_path}/s"])
    monkeypatch.setenv("SANDKASTEN_API_KEY", "from-environment")
    config = load(arguments)
    assert config.listen == ("127.0.0.1:0", f"unix:{tmp_path}/s")
    assert config == attrs.evolve(Config(), listen=config.listen, api_key="from-environment")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run echo hi", "sandkasten run: error: unrecognized arguments: hi; the command comes behind --"),
        ("run --image x -- id", "sandkasten run: error: unrecognized arguments: --image\n"),
        ("workspace", "sandkasten workspace: error: the following arguments are required: {list,create,rm,"),
    ],
)
def test_an_unknown_argument_is_told_with_the_usage_of_its_verb(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a word that should be behind `--`, and an action that is missing."""
    with pytest.raises(SystemExit):
        main(words.split())
    assert said in capsys.readouterr().err
