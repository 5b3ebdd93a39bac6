"""Pulls from a registry that is honest, broken or hostile, over loopback into a store in memory."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from sandkasten.cli.pull_child import ParentStore
from sandkasten.errors import (
    DigestMismatch,
    DiskReserve,
    InvalidImage,
    RegistryRefused,
    RegistryUnauthorized,
    SandkastenError,
    TooLarge,
)
from sandkasten.images.registry import blobs, source
from sandkasten.images.registry import pulling as pulling_module
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.client import Patience, RegistryClient
from sandkasten.images.registry.credentials import Credentials
from sandkasten.images.registry.documents import MAX_DOCUMENT_BYTES, Blob, Platform
from sandkasten.images.registry.pulling import Pull, PullTerms, PullTurns
from sandkasten.images.registry.reference import parse_reference
from sandkasten.images.registry.source import RegistrySource
from sandkasten.model.job import LayerPhase, LayerProgress
from tests.registry import REPOSITORY, Asked, MemoryStore, Registry, Said, digest_of, layer, serving, settings_of
from tests.waiting import patience, until

BIG = layer({"file": bytes(range(256)) * 4000})
SMALL = layer({"other": b"x"})
QUICK = Patience(tries=3, first_wait_s=0.001, silence_s=0.3)
Answering = Callable[[Asked], Said | None]


@contextlib.asynccontextmanager
async def pulling(
    tmp_path: Path,
    reference: str,
    *,
    store: MemoryStore | None = None,
    credentials: Credentials | None = None,
    turns: PullTurns | None = None,
    platform: str = "",
    floor_bytes: int = 0,
    limits: Patience = QUICK,
    **settings: Any,
) -> AsyncIterator[Pull]:
    """Make a pull, which the caller runs."""
    parsed = parse_reference(reference)
    client = RegistryClient(
        parsed.registry, settings_of(**settings), credentials_of=lambda _: credentials, patience=limits
    )
    try:
        yield Pull(
            RegistrySource(parsed, client, Blobs(tmp_path / "blobs", floor_bytes=floor_bytes)),
            PullTerms(
                parsed.name,
                Platform.parse(platform) if platform else Platform.own(),
                store or MemoryStore(),
                settings_of(**settings),
                turns=turns or PullTurns(),
            ),
        )
    finally:
        await client.aclose()


async def pull(tmp_path: Path, reference: str, store: MemoryStore | None = None, **fields: Any) -> MemoryStore:
    """Pull, and return the store."""
    kept = store or MemoryStore()
    with trio.fail_after(patience(20)):
        async with pulling(tmp_path, reference, store=kept, **fields) as work:
            await work.run()
    return kept


def parts(tmp_path: Path) -> list[str]:
    """Return what lies in the directory of blobs."""
    return sorted(path.name for path in (tmp_path / "blobs").iterdir())


# What works ---------------------------------------------------------------------------------------------------------


async def test_an_image_comes_by_tag_and_by_digest_with_its_configuration(tmp_path: Path) -> None:
    """Layers are in order, nothing is left of the download, and a layer that the store has is not asked for."""
    async with serving() as registry:
        digest = registry.push([BIG, SMALL, BIG])
        store = await pull(tmp_path, registry.reference())
        image = store.images["image"]
        assert (image.layers, image.digest) == (tuple(map(digest_of, (BIG, SMALL, BIG))), digest)
        assert (image.tags, image.source, image.platform) == (["latest"], registry.reference(), str(Platform.own()))
        assert (image.config.env, image.config.working_dir) == ({"PATH": "/bin", "A": "b=c"}, "/srv")
        assert parts(tmp_path) == []
        assert registry.count(f"blobs/{digest_of(BIG)}") == 1
        registry.asked.clear()
        await pull(tmp_path, registry.reference(f"@{digest}"), store)
        assert store.images["image"].tags == []
        assert registry.count(digest_of(BIG)) + registry.count(digest_of(SMALL)) == 0


async def test_what_takes_long_is_done_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large document is read, and a large blob is removed, in a thread."""
    seen: dict[str, bool] = {}

    def noting(name: str, real: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        seen[name] = threading.current_thread() is not threading.main_thread()
        return real(*args, **fields)

    for module, name in ((source, "read_document"), (pulling_module, "read_configuration"), (blobs, "_close")):
        monkeypatch.setattr(module, name, partial(noting, name, getattr(module, name)))
    async with serving() as registry:
        registry.push([SMALL])
        await pull(tmp_path, registry.reference())
    assert seen == {"read_document": True, "read_configuration": True, "_close": True}


async def test_an_index_is_resolved_by_platform(tmp_path: Path) -> None:
    """The digest is the index's, which is what the tag names; a platform that is not there is told with those that
    are, and an image for another one is refused."""
    async with serving() as registry:
        entries = []
        for text, tar in (("linux/amd64", BIG), ("linux/arm/v7", SMALL), ("linux/arm/v6", BIG)):
            platform = Platform.parse(text)
            digest = registry.push([tar], platform=platform)
            fields = {"os": platform.os, "architecture": platform.architecture, "variant": platform.variant}
            entries.append({"digest": digest, "size": 1, "platform": fields})
        index = registry.put(json.dumps({"manifests": entries}).encode(), "latest")
        store = await pull(tmp_path, registry.reference(), platform="linux/arm")
        assert (store.images["image"].digest, list(store.layers)) == (index, [digest_of(SMALL)])
        store = await pull(tmp_path, registry.reference(), platform="linux/arm/v6")
        assert store.images["image"].platform == "linux/arm/v6"
        with pytest.raises(InvalidImage, match="there are: linux/amd64, linux/arm/v6, linux/arm/v7"):
            await pull(tmp_path, registry.reference(), platform="linux/riscv64")
        with pytest.raises(InvalidImage, match="is for linux/arm/v6"):
            await pull(tmp_path, registry.reference(f"@{digest}"), platform="linux/amd64")


@pytest.mark.parametrize("tenth", range(1, 10))
async def test_a_download_goes_on_where_its_connection_broke(tmp_path: Path, tenth: int) -> None:
    """The rest is asked for, and no byte comes twice, also by another process that finds the part file."""
    async with serving() as registry:
        registry.push([BIG])
        cut = len(BIG) * tenth // 10
        registry.answer = lambda asked: _of_blob(asked, BIG, Said(200, BIG, cut=cut))
        with pytest.raises(RegistryRefused):
            await pull(tmp_path, registry.reference(), limits=Patience(1, 0.001, 5))
        assert parts(tmp_path) == [f"{digest_of(BIG)[7:]}.part"]
        registry.answer = lambda asked: None
        registry.asked.clear()
        await pull(tmp_path, registry.reference())
        (asked,) = [each for each in registry.asked if digest_of(BIG) in each.path]
        assert asked.headers["range"] == f"bytes={cut}-"
        assert parts(tmp_path) == []


async def test_tries_that_bring_much_are_not_counted(tmp_path: Path) -> None:
    """A connection that breaks ten times is no reason to give up while the blob grows."""
    async with serving() as registry:
        registry.push([BIG])

        def cut(asked: Asked) -> Said | None:
            said = registry.honest(asked)
            return Said(said.status, said.body, said.headers, cut=100_000) if digest_of(BIG) in asked.path else None

        registry.answer = cut
        store = await pull(tmp_path, registry.reference())
        assert list(store.layers) == [digest_of(BIG)]
        assert registry.count(digest_of(BIG)) == 11


@pytest.mark.parametrize("answer", ["whole", "other part"])
async def test_another_answer_than_the_range_starts_over(tmp_path: Path, answer: str) -> None:
    """A registry without ranges, or with wrong ones, still gives the blob."""
    async with serving() as registry:
        registry.push([BIG])
        _leave_part(tmp_path, BIG, BIG[:5000])
        wrong = Said(206, BIG[1:], {"content-range": f"bytes 1-{len(BIG) - 1}/{len(BIG)}"})
        said = Said(200, BIG) if answer == "whole" else wrong
        registry.answer = lambda asked: _of_blob(asked, BIG, said) if "range" in asked.headers else None
        store = await pull(tmp_path, registry.reference())
        assert list(store.layers) == [digest_of(BIG)]


@pytest.mark.parametrize("left", [b"\0" * 5000, BIG + b"x", BIG[:-1] + b"y", b"\1" * len(BIG)])
async def test_a_part_file_is_hashed_again_before_it_counts(tmp_path: Path, left: bytes) -> None:
    """Of a file that lost its content, or is none of this blob, nothing is used."""
    async with serving() as registry:
        registry.push([BIG])
        _leave_part(tmp_path, BIG, left)
        store = await pull(tmp_path, registry.reference())
        assert list(store.layers) == [digest_of(BIG)]


async def test_two_pulls_of_one_image_load_each_layer_once(tmp_path: Path) -> None:
    """The second waits for the first, and finds the layers in the store."""
    async with serving() as registry:
        registry.push([BIG, SMALL])
        turns, store = PullTurns(), MemoryStore()
        async with (
            pulling(tmp_path, registry.reference(), store=store, turns=turns) as first,
            pulling(tmp_path, registry.reference(), store=store, turns=turns) as second,
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first.run)
                nursery.start_soon(second.run)
            phases = [[each.phase for each in work.progress] for work in (first, second)]
        assert (registry.count(digest_of(BIG)), registry.count(digest_of(SMALL))) == (1, 1)
        assert {*phases[0], *phases[1]} == {LayerPhase.DONE, LayerPhase.PRESENT}
        assert (turns.layers, turns.kept) == ({}, ())


async def test_three_blobs_come_and_two_layers_are_unpacked_at_a_time(tmp_path: Path) -> None:
    """Of five, the others wait for their turn."""
    tars = [layer({f"file-{number}": b"x"}) for number in range(5)]
    goes_on, turns = trio.Event(), PullTurns()

    class HeldStore(MemoryStore):
        inside = 0

        async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
            self.inside += 1
            await goes_on.wait()
            return await super().unpack_layer(blob_fd, diff_id)

    async def wait(limiter: trio.CapacityLimiter, count: int) -> None:
        async def is_so() -> bool:
            return limiter.statistics().tasks_waiting == count

        await until(is_so)

    async def are_three_asked() -> bool:
        return sum(registry.count(digest_of(each)) > 0 for each in tars) == 3

    async with serving() as registry:
        registry.push(tars)
        silence = Said(200, b"", length=len(tars[0]), hold=True)
        registry.answer = lambda asked: silence if any(digest_of(each) in asked.path for each in tars) else None
        store = HeldStore()
        limits = Patience(1000, 0.001, 0.3)
        async with (
            pulling(tmp_path, registry.reference(), store=store, turns=turns, limits=limits) as work,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(work.run)
            await wait(turns.downloads, 2)
            await until(are_three_asked)
            registry.answer = lambda _: None
            await wait(turns.unpacks, 3)
            assert store.inside == 2
            goes_on.set()
        assert (store.inside, len(store.layers)) == (5, 5)


async def test_two_processes_load_each_layer_once(tmp_path: Path) -> None:
    """Of two that have a directory of blobs and a store alone in common, the second waits for the first's file, and
    finds the layer in the store by then."""
    async with serving() as registry:
        registry.push([BIG])
        looked, unpacking, goes_on = trio.Event(), trio.Event(), trio.Event()

        class SlowStore(MemoryStore):
            async def has_layer(self, diff_id: str) -> bool:
                if unpacking.is_set():
                    looked.set()
                return await super().has_layer(diff_id)

            async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
                unpacking.set()
                await goes_on.wait()
                return await super().unpack_layer(blob_fd, diff_id)

        store = SlowStore()
        async with (
            pulling(tmp_path, registry.reference(), store=store) as first,
            pulling(tmp_path, registry.reference(), store=store) as second,
        ):
            with trio.fail_after(patience(20)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(first.run)
                    await unpacking.wait()
                    nursery.start_soon(second.run)
                    await looked.wait()
                    goes_on.set()
        assert registry.count(f"blobs/{digest_of(BIG)}") == 1
        assert [work.progress[0].phase for work in (first, second)] == [LayerPhase.DONE, LayerPhase.PRESENT]
        assert parts(tmp_path) == []


async def test_a_layer_that_is_collected_during_a_pull_is_loaded_again(tmp_path: Path) -> None:
    """No image has a layer before the pull's end; an unused one may be deleted then."""

    class CollectedStore(MemoryStore):
        async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
            await super().unpack_layer(blob_fd, diff_id)
            if diff_id == digest_of(SMALL) and registry.count(digest_of(BIG)) == 1:
                del self.layers[digest_of(BIG)]
            return diff_id

    async with serving() as registry:
        registry.push([BIG])
        store = await pull(tmp_path, registry.reference(), CollectedStore())
        registry.push([BIG, SMALL])
        await pull(tmp_path, registry.reference(), store)
        assert store.images["image"].layers == (digest_of(BIG), digest_of(SMALL))
        assert registry.count(f"blobs/{digest_of(BIG)}") == 2


async def test_a_cancelled_pull_leaves_a_part_file_alone(tmp_path: Path) -> None:
    """The next one goes on with that; no layer is in the store, and no name."""
    async with serving() as registry:
        registry.push([BIG])
        asked_for = trio.Event()
        half = Said(200, BIG[: len(BIG) // 2], length=len(BIG), hold=True)

        def answer(asked: Asked) -> Said | None:
            if said := _of_blob(asked, BIG, half):
                asked_for.set()
            return said

        registry.answer = answer
        store = MemoryStore()
        async with (
            pulling(tmp_path, registry.reference(), store=store, limits=Patience(1, 1, 60)) as work,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(work.run)
            await asked_for.wait()
            nursery.cancel_scope.cancel()
        assert (store.layers, store.images) == ({}, {})
        assert parts(tmp_path) == [f"{digest_of(BIG)[7:]}.part"]


async def test_old_part_files_go_unless_somebody_has_them(tmp_path: Path) -> None:
    """Nothing else in the directory is touched."""
    _leave_part(tmp_path, BIG, b"x")
    _leave_part(tmp_path, SMALL, b"y")
    blobs = Blobs(tmp_path / "blobs")
    (tmp_path / "blobs" / "other").touch()
    (tmp_path / "blobs" / "lost+found").mkdir()
    (tmp_path / "blobs" / "link").symlink_to("other")
    (tmp_path / "blobs" / f"{'0' * 64}.part").mkdir()
    assert blobs.sweep(3600) == (0, 0)
    async with serving() as registry:
        registry.push([SMALL])
        async with (
            pulling(tmp_path, registry.reference()) as work,
            work.source.loaded(_blob(SMALL), lambda _: None, needed),
        ):
            assert blobs.sweep(0, dry_run=True) == blobs.sweep(0) == (1, 1)
    assert parts(tmp_path) == [f"{'0' * 64}.part", "link", "lost+found", "other"]


def test_progress_waits_for_nobody() -> None:
    """The process that it is told to reads nothing while it unpacks a layer. What it could not take is told later."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", 1, 0))
        store = ParentStore(ours)
        phases = [LayerPhase.DOWNLOADING, LayerPhase.UNPACKING]

        async def show() -> None:
            for count in range(1000):
                store.show([LayerProgress("x", count, 1000, phases[count % 2])] * 100)
            for _ in range(1000):
                with contextlib.suppress(BlockingIOError):
                    theirs.recv(1 << 20, socket.MSG_DONTWAIT)
            store.show([LayerProgress("x", 1000, 1000, LayerPhase.DONE)])

        trio.run(show)
        assert json.loads(theirs.recv(1 << 20))["layers"] == [["x", 1000, 1000, "done"]]


# What lies ----------------------------------------------------------------------------------------------------------


def _lies() -> Mapping[str, tuple[Answering, type[SandkastenError]]]:
    """Return answers of a hostile registry, and the error that each ends in."""
    layers = [{"digest": digest_of(SMALL), "size": len(SMALL)}]
    many = [layers[0]] * 10_000
    other = BIG[:-1] + b"x"
    return {
        "another blob": (lambda asked: _of_blob(asked, BIG, Said(200, other)), DigestMismatch),
        "another blob, again": (lambda asked: _of_blob(asked, BIG, Said(200, SMALL)), RegistryRefused),
        "a long blob": (lambda asked: _of_blob(asked, BIG, Said(200, BIG + b"x")), DigestMismatch),
        "an endless blob": (lambda asked: _of_blob(asked, BIG, Said(200, b"x" * 65536, endless=True)), DigestMismatch),
        "a silent blob": (
            lambda asked: _of_blob(asked, BIG, Said(200, b"", length=len(BIG), hold=True)),
            RegistryRefused,
        ),
        "a short length": (lambda asked: _of_blob(asked, BIG, Said(200, BIG, length=1000)), RegistryRefused),
        "a huge length": (lambda asked: _of_blob(asked, BIG, Said(200, b"x", length=1 << 60)), DigestMismatch),
        "another manifest": (
            lambda asked: _of_manifest(asked, Said(200, b"{}", {"docker-content-digest": digest_of(b"x")})),
            DigestMismatch,
        ),
        "an endless manifest": (lambda asked: _of_manifest(asked, Said(200, b" " * 65536, endless=True)), TooLarge),
        "a manifest of 1 GB": (lambda asked: _of_manifest(asked, Said(200, b"{", length=1 << 30)), TooLarge),
        "no JSON": (lambda asked: _of_manifest(asked, Said(200, b"[" * 100_000)), InvalidImage),
        "no manifest": (lambda asked: _of_manifest(asked, Said(200, b"{}")), InvalidImage),
        "schema 1": (lambda asked: _of_manifest(asked, Said(200, b'{"fsLayers": [], "layers": [1]}')), InvalidImage),
        "10000 layers": (
            lambda asked: _of_manifest(asked, Said(200, json.dumps({"config": many[0], "layers": many}).encode())),
            TooLarge,
        ),
        "a layer of minus one byte": (
            lambda asked: _of_manifest(
                asked, Said(200, json.dumps({"config": many[0], "layers": [{**many[0], "size": -1}]}).encode())
            ),
            InvalidImage,
        ),
        "a layer of a petabyte": (
            lambda asked: _of_manifest(
                asked, Said(200, json.dumps({"config": many[0], "layers": [{**many[0], "size": 1 << 50}]}).encode())
            ),
            InvalidImage,
        ),
        "a digest that is a path": (
            lambda asked: _of_manifest(
                asked,
                Said(200, json.dumps({"config": many[0], "layers": [{"digest": "sha256:../x", "size": 1}]}).encode()),
            ),
            InvalidImage,
        ),
        "redirects in a circle": (lambda asked: Said(302, headers={"location": asked.path + "x"}), RegistryRefused),
        "a redirect to nowhere": (lambda _: Said(302), RegistryRefused),
        "a redirect to no URL": (lambda _: Said(302, headers={"location": "http://[::1/"}), RegistryRefused),
        "advice in other digits": (lambda _: Said(503, headers={"retry-after": "\xb2"}), RegistryRefused),
        "a token server at no URL": (
            lambda _: Said(401, headers={"www-authenticate": 'Bearer realm="http://[::1/"'}),
            RegistryRefused,
        ),
        "a redirect to a file": (lambda _: Said(302, headers={"location": "file:///etc/passwd"}), RegistryRefused),
        "a redirect with a password": (
            lambda _: Said(302, headers={"location": "https://a:b@example.invalid/"}),
            RegistryRefused,
        ),
        "garbage": (lambda _: Said(99, headers={"x": "y"}), RegistryRefused),
    }


@pytest.mark.parametrize("lie", _lies())
async def test_a_lie_ends_the_pull_with_a_reason_and_without_a_layer(tmp_path: Path, lie: str) -> None:
    """Early, with a bounded number of bytes taken; nothing gets a name."""
    answer, expected = _lies()[lie]
    async with serving() as registry:
        registry.push([BIG])
        registry.answer = answer
        store = MemoryStore()
        with pytest.raises(SandkastenError) as refused:
            await pull(tmp_path, registry.reference(), store)
        assert isinstance(refused.value, expected), refused.value
        assert (store.layers, store.images) == ({}, {})
    assert _bytes_kept(tmp_path) <= len(BIG)


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:9/x",
        "https://127.0.0.1:9/x",
        "http://localhost:9/x",
        "https://localhost:9/x",
        "https://169.254.169.254/latest/meta-data/",
        "http://169.254.169.254/latest/meta-data/",
        "https://[::ffff:169.254.169.254]/x",
        "https://[fd00:ec2::254]/x",
        "https://10.0.0.1/x",
        "https://2852039166/x",
        "https://0x7f.1/x",
        "https://[::1]:9/x",
        "https://0.0.0.0/x",
    ],
)
@pytest.mark.parametrize("how", ["redirect", "token server"])
async def test_a_registry_can_send_nobody_to_a_special_address(tmp_path: Path, place: str, how: str) -> None:
    """Written as an address, as a number, or as a name that leads there: the pull ends before a connection."""
    async with serving() as registry:
        registry.push([BIG])
        said = Said(302, headers={"location": place})
        if how == "token server":
            said = Said(401, headers={"www-authenticate": f'Bearer realm="{place}"'})
        registry.answer = lambda _: said
        with pytest.raises(RegistryRefused, match=r"allow_private|not secure"):
            await pull(tmp_path, registry.reference())


async def test_a_private_registry_must_be_named_by_the_operator(tmp_path: Path) -> None:
    """By the setting that the message names; one that is not on loopback is not asked by plain HTTP."""
    async with serving() as registry:
        with pytest.raises(RegistryRefused, match="allow_private"):
            await pull(tmp_path, registry.reference(), insecure_registries=())
        registry.push([SMALL])
        with pytest.raises(RegistryRefused, match="connection"):  # no TLS there
            await pull(tmp_path, registry.reference(), insecure_registries=(), allow_private=(registry.name,))


async def test_a_redirect_to_a_named_place_is_followed_without_the_credentials(tmp_path: Path) -> None:
    """As registries redirect blobs to a store of objects."""
    async with serving() as registry, serving() as objects:
        registry.push([SMALL])
        objects.answer = lambda _: Said(200, SMALL)
        place = f"http://{objects.name}/signed?x=1"

        def answer(asked: Asked) -> Said | None:
            if asked.headers.get("authorization") != "Basic " + base64.b64encode(b"me:pw").decode():
                return Said(401, headers={"www-authenticate": 'Basic realm="x"'})
            return _of_blob(asked, SMALL, Said(307, headers={"location": place}))

        registry.answer = answer
        await pull(tmp_path, registry.reference(), credentials=Credentials("me", "pw"), allow_private=(objects.name,))
        assert [each.path for each in objects.asked] == ["/signed?x=1"]
        assert "authorization" not in objects.asked[0].headers


async def test_the_target_of_a_redirect_gets_no_login(tmp_path: Path) -> None:
    """The 401 of such a place is a refusal: neither it nor a token server of its own choice sees the password."""
    async with serving() as registry, serving() as objects:
        registry.push([SMALL])
        moved = Said(307, headers={"location": f"http://{objects.name}/x"})
        registry.answer = lambda asked: _of_blob(asked, SMALL, moved)
        me = Credentials("me", "pw")
        for challenge in (f'Bearer realm="http://{objects.name}/token"', "Basic realm=x"):
            said = Said(401, headers={"www-authenticate": challenge})
            objects.answer = lambda _, said=said: said  # type: ignore[misc]  # bound now
            with pytest.raises(RegistryUnauthorized, match=objects.name):
                await pull(tmp_path, registry.reference(), credentials=me, allow_private=(objects.name,))
        assert {each.path for each in objects.asked} == {"/x"}
        assert all("authorization" not in each.headers for each in [*registry.asked, *objects.asked])


async def test_a_registry_by_tls_must_have_a_certificate_for_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an authority that the machine trusts; the name is that of the reference, whatever its address is."""
    pair, trusted = tmp_path / "pair.pem", tmp_path / "trusted.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    new = ("openssl", "req", "-x509", "-days", "2", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    try:
        await trio.run_process([*new, *subject, "-keyout", pair, "-out", trusted], capture_stderr=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    _join(pair, trusted)
    async with serving() as registry:
        registry.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        registry.tls.load_cert_chain(pair)
        registry.push([SMALL])
        place = f"localhost:{registry.port}"
        settings: dict[str, Any] = {"insecure_registries": (), "allow_private": (place, registry.name)}
        with pytest.raises(RegistryRefused, match="certificate"):
            await pull(tmp_path, f"{place}/{REPOSITORY}", **settings)
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        store = await pull(tmp_path, f"{place}/{REPOSITORY}", **settings)
        assert list(store.layers) == [digest_of(SMALL)]
        with pytest.raises(RegistryRefused, match="certificate"):
            await pull(tmp_path, registry.reference(), **settings)


async def test_the_environments_proxy_is_used_but_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy resolves by itself, and gets its own password; an address that is special is refused all the same."""
    async with serving() as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:pw@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        proxy.push([SMALL])
        asked = proxy.honest
        proxy.answer = lambda found: asked(Asked(found.path.removeprefix("http://registry.invalid"), found.headers))
        store = await pull(tmp_path, f"registry.invalid/{REPOSITORY}", insecure_registries=("registry.invalid",))
        assert list(store.layers) == [digest_of(SMALL)]
        wanted = "Basic " + base64.b64encode(b"me:pw").decode()
        assert {each.headers.get("proxy-authorization") for each in proxy.asked} == {wanted}
        count = len(proxy.asked)
        with pytest.raises(RegistryRefused, match="allow_private"):
            await pull(tmp_path, "169.254.169.254/x/y")
        assert len(proxy.asked) == count


# Authentication -----------------------------------------------------------------------------------------------------


def _token_server(registry: Registry, *, wants: str = "", uses: int = 1000) -> list[str]:
    """Have a registry want a token of its own server, which is good for so many requests; return those given."""
    given: list[str] = []
    left = {"": 0}

    def answer(asked: Asked) -> Said | None:
        if asked.path.startswith("/token"):
            if asked.headers.get("authorization", "") != wants:
                return Said(401)
            given.append(f"t{len(given)}")
            left[f"Bearer {given[-1]}"] = uses
            return Said(200, json.dumps({"access_token": given[-1], "expires_in": 300}).encode())
        held = asked.headers.get("authorization", "")
        if left.get(held, 0) <= 0:
            realm = f"http://{registry.name}/token?a=b"
            return Said(401, headers={"www-authenticate": f'Bearer realm="{realm}",service="s",scope="x"'})
        left[held] -= 1
        return None

    registry.answer = answer
    return given


@pytest.mark.parametrize("credentials", [None, Credentials("me", "pw")])
async def test_a_token_is_fetched_once_for_a_pull(tmp_path: Path, credentials: Credentials | None) -> None:
    """With the name and password if there are any, else as anybody; for pulls from that repository alone."""
    async with serving() as registry:
        registry.push([BIG, SMALL])
        given = _token_server(registry, wants=credentials.basic if credentials else "")
        await pull(tmp_path, registry.reference(), credentials=credentials)
        assert len(given) == 1
        (path,) = {each.path for each in registry.asked if each.path.startswith("/token")}
        assert path == f"/token?a=b&service=s&scope=repository%3A{REPOSITORY.replace('/', '%2F')}%3Apull"


async def test_a_token_that_ends_in_the_middle_is_renewed(tmp_path: Path) -> None:
    """The token server said that it lasts longer."""
    async with serving() as registry:
        registry.push([BIG, SMALL])
        given = _token_server(registry, uses=2)
        await pull(tmp_path, registry.reference())
        assert len(given) == 2


async def test_wrong_or_missing_credentials_are_told_without_the_password(tmp_path: Path) -> None:
    """By the status of the registry or its token server; the text of a refusal is not passed on."""
    secret = Credentials("me", "hunter2-secret")
    async with serving() as registry:
        registry.push([SMALL])
        _token_server(registry, wants="Basic other")
        errors: list[SandkastenError] = []
        with pytest.raises(RegistryUnauthorized) as refused:
            await pull(tmp_path, registry.reference(), credentials=secret)
        errors.append(refused.value)
        registry.answer = lambda _: Said(401, headers={"www-authenticate": "Basic realm=x"})
        for credentials in (secret, None):
            with pytest.raises(RegistryUnauthorized) as refused:
                await pull(tmp_path, registry.reference(), credentials=credentials)
            errors.append(refused.value)
        registry.answer = lambda _: None
        with pytest.raises(RegistryRefused, match=r"404 \(MANIFEST_UNKNOWN\)") as missing:
            await pull(tmp_path, registry.reference(":other"))
        errors.append(missing.value)
        assert missing.value.details == {"status": 404, "codes": ["MANIFEST_UNKNOWN"]}
        assert not missing.value.retryable
        said = "".join(f"{error!r} {error.details} {error.__cause__!r}" for error in errors)
        assert secret.password not in said
        assert base64.b64encode(b"me:hunter2-secret").decode() not in said
        assert "secret text" not in said
    assert "hunter2" not in repr(secret)


async def test_a_configuration_has_bounds(tmp_path: Path) -> None:
    """One that is larger is refused before a layer is asked for, and before it itself is where its size says so."""
    own = {"os": "linux", "architecture": Platform.own().architecture, "rootfs": {"diff_ids": [digest_of(SMALL)]}}
    large = json.dumps({**own, "config": {"Labels": {"a": "x" * (256 << 10)}}}).encode()
    huge = json.dumps({**own, "a": "x" * (1 << 20)}).encode()
    async with serving() as registry:
        for config, error, asked in ((large, InvalidImage, 1), (huge, TooLarge, 0)):
            registry.push_manifest(registry.add(config), [registry.add(SMALL)], "latest")
            with pytest.raises(error, match=r"configuration"):
                await pull(tmp_path, registry.reference())
            assert (registry.count(digest_of(config)), registry.count(digest_of(SMALL))) == (asked, 0)


# Mirrors, tries, room -----------------------------------------------------------------------------------------------


async def test_mirrors_are_asked_in_order_and_the_registry_last(tmp_path: Path) -> None:
    """One that is down, does not have the image, lies, or sends too much costs a try each; below a path, as mirrors may
    be."""
    async with serving() as registry, serving() as empty, serving() as lying, serving() as good, serving() as large:
        for each in (registry, lying, good):
            each.push([BIG])
        large.answer = lambda _: Said(200, b" " * (MAX_DOCUMENT_BYTES + 1))
        lying.answer = lambda asked: _of_blob(asked, BIG, Said(200, b"\0" * len(BIG)))
        good.answer = lambda asked: good.honest(Asked(asked.path.removeprefix("/prefix"), asked.headers))
        for mirrors, count in (
            ((f"http://{empty.name}", f"http://{good.name}/prefix/"), 0),
            ((f"http://{empty.name}",), 1),
            ((f"http://{lying.name}",), 1),
            ((f"http://{large.name}",), 1),
            (("http://127.0.0.1:1",), 1),
        ):
            registry.asked.clear()
            store = await pull(tmp_path, registry.reference(), mirrors={registry.name: mirrors})
            assert list(store.layers) == [digest_of(BIG)]
            assert registry.count(digest_of(BIG)) == count


async def test_a_registry_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    """A few times, then its refusal is the answer, with its status; a refusal for good is asked once."""
    async with serving() as registry:
        registry.push([SMALL])
        answers = [Said(503), Said(429, headers={"retry-after": "0"})]
        registry.answer = lambda _: answers.pop() if answers else None
        await pull(tmp_path, registry.reference())
        for status, tries in ((503, 3), (404, 1)):
            registry.asked.clear()
            registry.answer = lambda _, status=status: Said(status)  # type: ignore[misc]  # bound now
            with pytest.raises(RegistryRefused) as refused:
                await pull(tmp_path, registry.reference())
            assert refused.value.details == {"status": status}
            assert len(registry.asked) == tries


async def test_a_pull_that_has_no_room_takes_no_blob(tmp_path: Path) -> None:
    """Neither on the disk nor within the settings."""
    async with serving() as registry:
        registry.push([BIG])
        with pytest.raises(DiskReserve):
            await pull(tmp_path, registry.reference(), floor_bytes=1 << 60)
        registry.push_manifest(registry.add(b"{}"), [{"digest": digest_of(BIG), "size": 2 << 20}], "latest")
        with pytest.raises(InvalidImage, match="rootfs"):
            await pull(tmp_path, registry.reference())
        config = {"rootfs": {"diff_ids": [digest_of(BIG)]}, "os": "linux", "architecture": Platform.own().architecture}
        descriptor = registry.add(json.dumps(config).encode())
        registry.push_manifest(descriptor, [{"digest": digest_of(BIG), "size": 2 << 20}], "latest")
        with pytest.raises(TooLarge):
            await pull(tmp_path, registry.reference(), max_pull_mb=1)
        assert registry.count(digest_of(BIG)) == 0


def _join(pair: Path, certificate: Path) -> None:
    pair.write_text(pair.read_text() + certificate.read_text())


def _bytes_kept(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in tmp_path.rglob("*.part"))


def _of_blob(asked: Asked, data: bytes, said: Said) -> Said | None:
    return said if asked.path.endswith(f"blobs/{digest_of(data)}") else None


def _of_manifest(asked: Asked, said: Said) -> Said | None:
    return said if "/manifests/" in asked.path else None


def _blob(data: bytes) -> Blob:
    return Blob(digest_of(data), len(data))


def _leave_part(tmp_path: Path, data: bytes, content: bytes) -> None:
    (tmp_path / "blobs").mkdir(exist_ok=True)
    (tmp_path / "blobs" / f"{digest_of(data)[7:]}.part").write_bytes(content)


async def needed() -> bool:
    """Say that a blob is still needed."""
    return True
