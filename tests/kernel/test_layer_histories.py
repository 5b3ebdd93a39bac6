"""Any history of the store of layers: what an image, a session or a pull has is there, and a collection takes all else.

The model is sets of names. Work may be killed at each crash point of the store, after which another store goes on, as
after the death of an nsinit.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nsinit.steps import Crash, StepFailed
from nsinit.storage.layers import LayerDirectory
from nsinit.storage.paths import Layout
from nsinit.wire.protocol import CollectLayers, DeleteImage, PublishImage
from nsinit.wire.verdict import Counts, Unpacked
from sandkasten.images.layers import description
from tests.kernel.test_layer_store import done

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

DIGESTS = [f"sha256:{each * 64}" for each in "123456"]
NAMES = ("one", "two")
SESSIONS = [f"{each:024x}" for each in range(3)]
SIZE = 7

_layers = st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=3, unique=True)
_some = st.sets(st.sampled_from(DIGESTS), max_size=3)
Step = tuple[str, object, object]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("unpack"), st.sampled_from(DIGESTS), st.sampled_from(("", "nsinit.layer.named"))),
    st.tuples(st.just("publish"), st.sampled_from(NAMES), _layers),
    st.tuples(st.just("delete"), st.sampled_from(NAMES), st.sampled_from(("", "nsinit.image.retired"))),
    st.tuples(st.just("begin"), st.sampled_from(SESSIONS), st.sampled_from(NAMES)),
    st.tuples(st.just("end"), st.sampled_from(SESSIONS), st.none()),
    st.tuples(st.just("want"), _some, st.none()),
    st.tuples(st.just("prune"), _some, st.sampled_from(("", "dry", "nsinit.layer.collected"))),
)


@attrs.define
class History:
    """The store in a directory, beside what it should have: layers, images, sessions, and what pulls want."""

    directory: Path
    layers: set[str] = attrs.field(factory=set)
    images: dict[str, list[str]] = attrs.field(factory=dict)
    sessions: dict[str, tuple[str, list[str]]] = attrs.field(factory=dict)
    wanted: set[str] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.open("").layout.make_store()

    def open(self, crash_at: str) -> LayerDirectory:
        return LayerDirectory(Layout(str(self.directory)), Crash(crash_at) if crash_at else None)

    def do(self, work: Callable[[LayerDirectory], object], crash_at: str = "") -> None:
        """Do work; with a crash point in a process that dies there, and then begin anew."""
        if not crash_at:
            work(self.open(""))
            return
        pid = os.fork()
        if pid == 0:
            try:
                work(self.open(crash_at))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the crash point was not met"
        assert os.WTERMSIG(status) == signal.SIGKILL
        self.open("").share()
        done(self.open("").empty_trash())

    @property
    def used(self) -> set[str]:
        lists = [*self.images.values(), *(layers for _, layers in self.sessions.values())]
        return {each for layers in lists for each in layers} | self.wanted

    def unpack(self, digest: str, crash_at: str) -> None:
        def work(store: LayerDirectory) -> None:
            draft = store.make_draft()
            done(store.keep(draft, Unpacked(Counts(1, SIZE, 0), digest.removeprefix("sha256:"), (), ())))
            draft.close()

        if digest not in self.layers:
            self.do(work, crash_at)
            self.layers.add(digest)
        assert self.open("").find(digest) is not None

    def publish(self, name: str, layers: list[str]) -> None:
        def work(store: LayerDirectory) -> None:
            with description(b"{}") as fd:
                done(store.publish(PublishImage(1, name, tuple(layers), replace=True), fd))

        if set(layers) <= self.layers:
            self.do(work)
            self.images[name] = layers
        else:
            with pytest.raises(StepFailed):
                self.do(work)

    def delete(self, name: str, crash_at: str) -> None:
        def work(store: LayerDirectory) -> None:
            done(store.delete(DeleteImage(1, name)))

        if name in self.images and all(name != used for used, _ in self.sessions.values()):
            self.do(work, crash_at)
            del self.images[name]
        else:
            with pytest.raises(StepFailed):
                self.do(work)

    def begin(self, session_id: str, name: str) -> None:
        if session_id not in self.sessions and name in self.images:
            store = self.open("")
            layers = store.layers_of(name)
            Path(store.layout.session_use(session_id)).parent.mkdir(parents=True, exist_ok=True)
            store.note_use(session_id, name, layers)
            self.sessions[session_id] = name, list(layers)

    def end(self, session_id: str, _none: None) -> None:
        if self.sessions.pop(session_id, None) is not None:
            shutil.rmtree(Path(self.open("").layout.session_use(session_id)).parent)

    def want(self, digests: set[str], _none: None) -> None:
        self.wanted = digests & self.layers

    def prune(self, only: set[str], how: str) -> None:
        request = CollectLayers(1, 0, tuple(self.wanted), tuple(only), dry_run=how == "dry")
        gone = (only & self.layers if only else self.layers) - self.used

        def work(store: LayerDirectory) -> None:
            found = done(store.collect(request))
            assert (found.layers, found.freed_bytes) == (len(gone), SIZE * len(gone))

        self.do(work, how if "." in how else "")
        self.layers -= set() if how == "dry" else gone

    def check(self) -> None:
        layout = self.open("").layout
        assert {f"sha256:{each}" for each in os.listdir(layout.layers)} == self.layers
        assert self.used <= self.layers
        assert {each for each in os.listdir(layout.images) if each[0] != "."} == set(self.images)
        assert os.listdir(layout.trash) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=10, max_size=30))
@example(
    [
        *(("unpack", each, "") for each in DIGESTS[:3]),
        ("publish", "one", DIGESTS[:2]),
        ("begin", SESSIONS[0], "one"),
        ("publish", "one", DIGESTS[1:3]),
        ("delete", "one", ""),
        ("prune", set(), "nsinit.layer.collected"),
        ("end", SESSIONS[0], None),
        ("want", {DIGESTS[0]}, None),
        ("prune", set(), "dry"),
        ("prune", set(), ""),
        ("want", set(), None),
        ("prune", set(), ""),
        ("delete", "one", "nsinit.image.retired"),
        ("prune", {DIGESTS[1]}, ""),
        ("unpack", DIGESTS[0], "nsinit.layer.named"),
    ]
)
def test_no_history_takes_a_layer_that_somebody_has(steps: list[Step]) -> None:
    """Published, replaced, deleted, begun, ended, wanted, pruned, killed, in any order: after each step the store has
    what the model has, and an image that a session was begun on is not deleted."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-", dir="/dev/shm") as directory:  # synced without a disk
        history = History(Path(directory))
        for name, *arguments in steps:
            getattr(history, name)(*arguments)
            history.check()
