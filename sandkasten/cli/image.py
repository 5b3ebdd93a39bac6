"""`sandkasten image list | inspect | validate | rm | prune | import`: works on the store itself, but through a serving
daemon where what is in use counts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator

import attrs

from sandkasten.admission.budget import disk_floor_bytes
from sandkasten.cli import nodes
from sandkasten.cli.client import BAD_ARGUMENTS, verb
from sandkasten.cli.common import Stop, load_installed, printable_line, require_root
from sandkasten.cli.output import print_json
from sandkasten.cli.pull import is_left_to_daemon, is_served
from sandkasten.config import Config
from sandkasten.crash import Crash
from sandkasten.errors import ImageInUse, InvalidImage, SandkastenError
from sandkasten.host.paths import DataPaths
from sandkasten.images.catalog import Catalog, Image
from sandkasten.images.damage import find_damage
from sandkasten.images.describing import describe, held_by
from sandkasten.images.importing import import_file, import_tar
from sandkasten.images.layers import LayerMeta, open_store
from sandkasten.images.registry.blobs import Blobs
from sandkasten.model.image import Pruned

_MOST_TOLD = 100
"""Lines of damage; one disk can damage all files of an image."""


def run(arguments: argparse.Namespace) -> int:
    """Perform one action and return its exit status."""
    require_root()
    config = load_installed(arguments)
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    try:
        match arguments.action:
            case "list":
                return _list(catalog, as_json=arguments.json)
            case "validate":
                return _validate(catalog, arguments.name, is_deep=arguments.deep, as_json=arguments.json)
            case "inspect":
                return verb(nodes.inspect_image)(arguments) if is_served(config) else _inspect(catalog, arguments.name)
            case "prune":
                served = is_served(config)  # which knows what pulls are about to use
                return verb(nodes.prune_images)(arguments) if served else _prune(catalog, config, arguments)
            case "rm":
                return _remove(catalog, arguments, config)
            case _:
                return _import(catalog, config, arguments)
    except SandkastenError as error:
        raise Stop(str(error)) from None
    except OSError as error:
        raise Stop(f"{error.filename or catalog.data_dir}: {error.strerror}") from None


def _list(catalog: Catalog, *, as_json: bool) -> int:
    if as_json:
        for image in catalog.shown():
            print_json(attrs.asdict(image) | {"aliases": list(catalog.aliases_of(image.name))})
        return 0
    print(f"{'NAME':<24} {'KIND':<8} {'SIZE':>10}  {'CREATED':<26} SOURCE")
    for image in catalog.shown():
        also = [*image.references, *catalog.aliases_of(image.name)]
        size = f"{image.size_bytes / 1024**2:.1f} MiB" if image.size_bytes else "-"
        source = image.source + (f" (also {', '.join(also)})" if also else "")
        told = f"{printable_line(image.created_at):<26} {printable_line(source)}"
        print(f"{image.name:<24} {image.kind:<8} {size:>10}  {told}")
    return 0


def _validate(catalog: Catalog, name: str, *, is_deep: bool, as_json: bool) -> int:
    problems = catalog.validate(name)
    if is_deep:
        problems += [*itertools.islice(_damage(catalog, name), _MOST_TOLD)]
    if as_json:
        print_json({"name": name, "problems": problems})
    else:
        for problem in problems or ["ok"]:
            print(f"{name}: {problem}")
    return 1 if problems else 0


def _damage(catalog: Catalog, name: str) -> Iterator[str]:
    """Yield what is damaged of an image's layers, one sentence each. Raises `InvalidImage`: it has none."""
    image = catalog.look_up(name)
    if image.kind != "layers":
        raise InvalidImage(f"image {image.name!r} is no list of layers: there is nothing to compare it with")
    for digest in dict.fromkeys(image.layers):
        for path, reason in find_damage(catalog.layer(digest).parent):
            yield f"{digest[:19]}: {printable_line(path)} {reason}"


def _inspect(catalog: Catalog, name: str) -> int:
    image = catalog.look_up(name)
    (found,) = describe(catalog, [image], {}, judges=True)
    problems = [*found.problems, *catalog.validate(name)] if found.problems is not None else None
    print_json(attrs.asdict(found) | {"problems": problems, "in_use": None})  # no daemon tells the uses
    return 0


def _prune(catalog: Catalog, config: Config, arguments: argparse.Namespace) -> int:
    grace_s, dry_run = arguments.older_than, arguments.dry_run
    steps = catalog.cached_steps(grace_s)
    held = held_by(catalog, steps) if dry_run else Pruned(0, 0)
    with open_store(catalog.data_dir) as store:
        for image in [] if dry_run else steps:
            with contextlib.suppress(ImageInUse):
                store.delete_image(image.name)
                gone = store.collect(grace_s=0, only=image.layers)
                held = Pruned(held.layers + gone.layers, held.freed_bytes + gone.freed_bytes, images=held.images + 1)
        found = store.collect(grace_s=grace_s, dry_run=dry_run)
    blobs, blob_bytes = Blobs(DataPaths(config.data_dir).blobs).sweep(grace_s, dry_run=dry_run)
    freed_bytes = held.freed_bytes + found.freed_bytes + blob_bytes
    nodes.tell_pruned(arguments, Pruned(held.layers + found.layers, freed_bytes, blobs, held.images))
    return 0


def _remove(catalog: Catalog, arguments: argparse.Namespace, config: Config) -> int:
    name, crash = arguments.name, Crash(config.testing.crash_at)
    image = catalog.get_own(name)
    if image.kind == "layers":
        if is_left_to_daemon(config):
            return verb(nodes.remove_image)(arguments)
        with open_store(catalog.data_dir, crash_at=crash.take_foreign()) as store:
            try:
                store.delete_image(image.name)
            except ImageInUse as error:
                ready = "the daemon, until a create names another image" if is_served(config) else "the next daemon"
                raise Stop(f"{error}, or a sandbox with it is ready for {ready}") from None
            store.collect(grace_s=0, only=image.layers)
        gone = True
    else:
        gone = catalog.delete(name)
    if arguments.json:
        print_json({"name": name, "ok": True, "files_gone": gone})
        return 0
    print(f"{name}: deleted" + ("" if gone else "; its files go at the next start that finds no session"))
    return 0


def _import(catalog: Catalog, config: Config, arguments: argparse.Namespace) -> int:
    """Import what `--tar` names, which is a root file system and may be a pipe, or find out what `FILE` is."""
    crash = Crash(config.testing.crash_at)
    if (arguments.file is None) == (arguments.tar is None):
        raise Stop("name one file: FILE, - for standard input, or by --tar", BAD_ARGUMENTS)
    if arguments.tar is not None:
        if arguments.name is None or arguments.ref is not None or arguments.replace:
            raise Stop("--tar takes a --name, and neither --ref nor --replace", BAD_ARGUMENTS)
        return _tell_rootfs(*import_tar(catalog, arguments.name, arguments.tar, crash=crash), as_json=arguments.json)
    from sandkasten.cli.importing import opened_archive, take_layers

    with opened_archive(arguments.file, config) as (fd, title):
        name = take_layers(config, fd, title, arguments)
        if name is None:
            if arguments.name is None or arguments.ref is not None or arguments.replace:
                raise Stop(f"{title} is no archive of images: it takes a --name, and neither --ref nor --replace")
            reserve_bytes = disk_floor_bytes(config.data_dir, config.disk)
            os.lseek(fd, 0, os.SEEK_SET)
            found = import_file(catalog, arguments.name, fd, title, reserve_bytes=reserve_bytes, crash=crash)
            return _tell_rootfs(*found, as_json=arguments.json)
    image = catalog.get(name)
    if arguments.json:
        print_json(attrs.asdict(image))
    else:
        print(f"{image.name}: {len(image.layers)} layers, {image.size_bytes / 1024**2:.1f} MiB")
    return 0


def _tell_rootfs(image: Image, counts: LayerMeta, *, as_json: bool) -> int:
    if as_json:
        print_json(attrs.asdict(image) | {"skipped": counts.skipped, "privileged": counts.privileged})
        return 0
    tell_counts(image.name, counts)
    return 0


def tell_counts(name: str, layer: LayerMeta) -> None:
    """Print what came into an image of one layer, and what did not."""
    print(f"{name}: {layer.entries} members, {layer.size_bytes / 1024**2:.1f} MiB")
    if layer.skipped:
        print(f"{name}: left out {layer.skipped} device nodes, FIFOs, unknown members or attributes")
    if layer.privileged:
        print(f"{name}: dropped the setuid or setgid bit of {layer.privileged} files")
