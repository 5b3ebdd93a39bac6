"""`sandkasten image build`: an image made of Debian packages, by a recipe or by name, which is root's on this machine;
or, with `-f`, by a Dockerfile, on a server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from sandkasten.cli.client import verb
from sandkasten.cli.common import Stop, load_installed, printable_line, require_root
from sandkasten.cli.output import StepProgress, print_json
from sandkasten.cli.runs import add_session_bounds, memory_mb

if TYPE_CHECKING:
    from sandkasten.images.recipes import Recipe


def add_build(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the action to those of `sandkasten image`, and return its parser."""
    parser = actions.add_parser("build", help="make an image of Debian packages, or by a Dockerfile")
    parser.add_argument("--recipe", metavar="NAME", help="base, python, node, or a file of your own")
    parser.add_argument("--from", dest="source", metavar="DISTRIBUTION:RELEASE", help="by default this machine's own")
    parser.add_argument("--include", metavar="PACKAGES", help="further packages, with commas between them")
    parser.add_argument("--mirror", metavar="URL", help="where packages come from; by default as apt here has them")
    parser.add_argument("--name", help="the image's name, by a Dockerfile also NAME:TAG; by default that of the recipe")
    parser.add_argument("--replace", action="store_true", help="take the place of an image of that name")
    by_file = parser.add_argument_group("by a Dockerfile")
    by_file.add_argument("-f", "--file", metavar="FILE", help="the Dockerfile, - for standard input")
    by_file.add_argument("directory", nargs="?", metavar="DIR", help="where COPY takes files from")
    by_file.add_argument("--build-arg", action="append", default=[], metavar="NAME[=VALUE]", help="no value: ours")
    by_file.add_argument("--target", default="", metavar="STAGE", help="a stage's name; by default the last one")
    by_file.add_argument("--no-cache", action="store_true", help="perform all steps, and keep none for later builds")
    by_file.add_argument("--squash", action="store_true", help="make one layer of all steps, without the cache")
    by_file.add_argument("--debug", action="store_true", help="leave the session of a step that failed, and say its id")
    add_session_bounds(by_file)
    by_file.add_argument("--disk", type=memory_mb, metavar="SIZE", help="of the files that one step changes: 4g")
    by_file.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    parser.set_defaults(command=build)
    return parser


def build(arguments: argparse.Namespace) -> int:
    """Build an image."""
    if arguments.file is not None or arguments.directory is not None:
        from sandkasten.cli.building import build_by_file

        return verb(build_by_file)(arguments)
    from sandkasten.config import ConfigError
    from sandkasten.errors import SandkastenError

    if arguments.recipe is None and arguments.source is None:
        raise Stop("what the image is made of is missing: --recipe NAME, --from DISTRIBUTION:RELEASE, or -f FILE", 2)
    require_root()
    try:
        return _build_system(arguments)
    except (SandkastenError, ConfigError) as error:
        raise Stop(str(error)) from None
    except OSError as error:
        raise Stop(f"{error.filename or 'image build'}: {error.strerror}") from None


def _build_system(arguments: argparse.Namespace) -> int:
    import attrs

    from sandkasten.admission.budget import disk_floor_bytes
    from sandkasten.cli.image import tell_counts
    from sandkasten.crash import Crash
    from sandkasten.images.bootstrap import build_system, find_source
    from sandkasten.images.catalog import Catalog

    name, recipe = _recipe(arguments)
    source = find_source(arguments.source or recipe.source, arguments.mirror)
    config = load_installed(arguments)
    bar = StepProgress(name, is_off=arguments.json)

    def told(number: int, steps: int, step: str) -> None:
        bar.step = step
        bar(number, steps)
        if not (arguments.json or sys.stderr.isatty()):
            print(f"{printable_line(name)}: {step}", file=sys.stderr, flush=True)

    try:
        image, layer = build_system(
            Catalog(config.data_dir),
            name,
            recipe,
            source,
            replace=arguments.replace,
            reserve_bytes=disk_floor_bytes(config.data_dir, config.disk),
            told=told,
            crash=Crash(config.testing.crash_at),
        )
    finally:
        bar.close()
    if arguments.json:
        print_json(attrs.asdict(image) | {"skipped": layer.skipped, "privileged": layer.privileged})
    else:
        tell_counts(image.name, layer)
    return 0


def _recipe(arguments: argparse.Namespace) -> tuple[str, Recipe]:
    """Return the image's name and its recipe."""
    from sandkasten.images.recipes import BARE, Recipe, load_recipe

    packages = [each for each in (arguments.include or "").split(",") if each]
    try:
        added = Recipe(include=packages)
    except ValueError as error:
        raise Stop(f"--include: {error}", 2) from None
    name, recipe = load_recipe(arguments.recipe) if arguments.recipe else (None, BARE)
    name = arguments.name or name
    if name is None:
        raise Stop("the image's name is missing: --name NAME", 2)
    return name, added.on(recipe)
