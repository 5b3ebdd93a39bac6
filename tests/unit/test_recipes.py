"""Recipes of images, and where the packages of one come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandkasten.cli.serve import greet
from sandkasten.config import Config, ConfigError
from sandkasten.images.bootstrap import find_source, has_subordinate_ids, reason_of
from sandkasten.images.recipes import load_recipe, shipped

OS_RELEASE = 'ID=debian\nVERSION_CODENAME="bookworm"\n'
ONE_LINE = "deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib\n"
FIELDS = "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


def machine(tmp_path: Path, **sources: str) -> Path:
    """Make the part of /etc that says what a machine is and where its packages are."""
    written(tmp_path / "os-release", OS_RELEASE)
    for name, text in sources.items():
        written(tmp_path / "apt/sources.list.d" / name.replace("_", "."), text)
    return tmp_path


def test_the_shipped_recipes_add_to_each_other() -> None:
    """Each has the base's packages and user; those of the checkout's `config/images` are the same files."""
    base = load_recipe("base")[1]
    for name in shipped():
        own, recipe = load_recipe(name)
        assert own == name
        assert set(base.include) <= set(recipe.include)
        assert recipe.config.user == "user"
        assert recipe.config.env["LANG"] == "C.UTF-8"
        assert (recipe.digest == base.digest) == (name == "base")
    checkout = Path(__file__).parents[2] / "config/images"
    assert (
        sorted(path.stem for path in checkout.iterdir()) == shipped() == ["base", "code-interpreter", "node", "python"]
    )


def test_a_recipe_of_a_file_extends_one_that_ships(tmp_path: Path) -> None:
    """Lists are added at the end, variables replaced, and what it says itself goes first."""
    text = "extends: base\nfrom: debian:trixie\ninclude: [jq, git]\nenv: {LANG: C}\nworkdir: /srv\nrun: ['true']\n"
    name, recipe = load_recipe(str(written(tmp_path / "own.yaml", text)))
    base = load_recipe("base")[1]
    assert (name, recipe.source, recipe.workdir, recipe.user) == ("own", "debian:trixie", "/srv", "user")
    assert recipe.include == (*base.include, "jq")
    assert recipe.run == (*base.run, "true")
    assert recipe.env == {**base.env, "LANG": "C"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packages: [a]", "unknown key 'packages'; there are extends, from, include"),
        ("include: [1.10]", "expected text, not 1.1 at include"),
        ("include: jq", "expected a list, not 'jq' at include"),
        ("include: ['-o=x']", "'-o=x' is no package"),
        ("include: ['jq,sudo']", "'jq,sudo' is no package"),
        ("exclude: [usr]", "'usr' is no absolute path"),
        ("env: {A B: x}", "'A B' is no name of a variable"),
        ("extends: none", "there is no recipe 'none': name a file, or one of base, code-interpreter, node, python"),
        ("extends: bad.yaml", "more than 8 recipes extend each other"),
        ("include: [a]\ninclude: [b]", "'include' is given twice"),
        ("[a]", "must be a mapping"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    """The file, the key and what is expected."""
    path = written(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as refused:
        load_recipe(str(path))
    assert said in str(refused.value)
    assert "none" in said or str(path) in str(refused.value)


def test_a_recipe_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Commands of a recipe run as root."""
    path = written(tmp_path / "own.yaml", "extends: base\n")
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="other users may write"):
        load_recipe(str(path))


@pytest.mark.parametrize("text", [ONE_LINE, FIELDS])
def test_packages_come_from_where_the_machine_has_its_own(tmp_path: Path, text: str) -> None:
    """In both of apt's formats; archives of others for the same release, and of other releases, are left out."""
    kind = "list" if text is ONE_LINE else "sources"
    others = {
        "docker_list": "deb https://other.example/debian bookworm stable\n",
        "newer_list": ONE_LINE.replace("bookworm", "trixie"),
        "off_list": f"# {ONE_LINE}",
        "old_bak": ONE_LINE,
    }
    etc = machine(tmp_path, **{f"own_{kind}": text}, **others)
    own = find_source(etc=etc)
    assert (str(own), own.entries) == ("debian:bookworm", (str(etc / f"apt/sources.list.d/own.{kind}"),))
    assert find_source("debian:bookworm", etc=etc) == own
    for wanted in ("debian:sid", "ubuntu:bookworm"):
        with pytest.raises(ConfigError, match=f"no source of {wanted}: name one with --mirror"):
            find_source(wanted, etc=etc)


def test_a_mirror_is_named_without_a_password(tmp_path: Path) -> None:
    """A password would be in the image, and in the arguments of programs; so would that of the machine's own source."""
    etc = machine(tmp_path, own_list=ONE_LINE.replace("//", "//me:secret@"))
    named = find_source("debian:trixie", "https://mirror.example/debian", etc=etc)
    assert named.entries == ("deb https://mirror.example/debian trixie main",)
    with pytest.raises(ConfigError, match=r"own.list has a password"):
        find_source(etc=etc)
    for mirror in ("https://me:secret@mirror.example/", "ftp://mirror.example/", "https://a b", "-o", ""):
        with pytest.raises(ConfigError, match="the mirror is a URL"):
            find_source("debian:trixie", mirror, etc=etc)
    with pytest.raises(ConfigError, match="is no release"):
        find_source("bookworm", etc=etc)


@pytest.mark.parametrize(
    ("text", "has"), [("root:100000:65536\n", True), ("root:100000:65535\nme:1:99999\n", False), ("", False)]
)
def test_root_is_given_away_where_it_has_ids_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has: bool
) -> None:
    """In both files, with the program that maps them."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/usr/bin/newuidmap")
    written(tmp_path / "subuid", text)
    written(tmp_path / "subgid", text)
    assert has_subordinate_ids(tmp_path) is has
    (tmp_path / "subgid").unlink()
    assert not has_subordinate_ids(tmp_path)


def test_a_start_tells_of_recipes_while_sessions_see_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image of the default's name, or none that it leads to, ends the advice."""
    for name, kind, told in (("host", "host", True), ("python", "layers", False)):
        meta = {"kind": kind, "created_at": "", "source": ""}
        written(tmp_path / "images" / name / "meta.json", json.dumps(meta))
        greet(Config(data_dir=tmp_path), ["http://127.0.0.1:1"], key_is_given=True)
        assert ("sandkasten image build --recipe python" in capsys.readouterr().out) is told


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["I: a", "E: none such", "E: apt-get -oA=<$fd> failed", "E: mmdebstrap failed to run"], "none such"),
        (["I: a", "useradd: taken", "E: command failed: chroot x", "E: mmdebstrap failed to run"],
         "a command of the recipe failed: useradd: taken"),
        (["E: command failed: chroot x"], "command failed: chroot x"),
        (["E: mmdebstrap failed to run"], "mmdebstrap failed to run"),
        (["I: a"], ""),
    ],
)  # fmt: skip
def test_the_reason_is_what_was_said_first(lines: list[str], reason: str) -> None:
    """By apt or by a command; the rest repeats arguments."""
    assert reason_of(lines) == reason
