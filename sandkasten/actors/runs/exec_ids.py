"""Which ids may not be used again in a session: those that clients chose for runs that are not kept any more.

None is ever forgotten while the session lives, by this daemon or the next. When there are as many as may be, or nobody
knows any more which there were, the session takes no new id from a client: nothing is run twice for want of memory.
Ids that the server makes need no place here: a client that sends one can only mean a run that there was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandkasten.actors.runs.run import Run
from sandkasten.model.errors import ExecGone, ExecIdsExhausted
from sandkasten.model.run import is_made
from sandkasten.output.used_ids import UsedIds


class ExecIds:
    """See the module's docstring. The ids of runs that are kept are not in here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = UsedIds()
        self._unwritten: list[int] = []

    def check_new(self, run: Run) -> None:
        """Refuse a run of which nothing is kept, if its id was used or can't be remembered.

        Raises: ExecGone, ExecIdsExhausted.
        """
        if run.has_new_id:
            return
        if self.is_used(run.exec_id):
            raise gone(run.exec_id)
        if not self._used.is_whole:
            raise ExecIdsExhausted(
                "what this session had run was damaged on disk; it takes no exec_id any more, as it may have been used"
            )
        if len(self._used) >= self._limit:
            raise ExecIdsExhausted("this session remembers as many exec_ids as it may", max_exec_ids=self._limit)

    def is_used(self, exec_id: str) -> bool:
        """Whether a run had it of which nothing is kept, or may have had it."""
        return is_made(exec_id) or exec_id in self._used

    def is_remembered(self, exec_id: str) -> bool:
        """Whether a client chose it for a run of which nothing is kept."""
        return exec_id in self._used

    def note_gone(self, exec_id: str) -> None:
        """Nothing is kept any more of the run that had it."""
        digest = None if is_made(exec_id) else self._used.add(exec_id)
        if digest is not None:
            self._unwritten.append(digest)

    def recover(self, used: UsedIds, gone: Iterable[str]) -> None:
        """These are what earlier daemons wrote down."""
        self._used = used
        for exec_id in gone:
            self.note_gone(exec_id)

    # Writing them down

    def take_unwritten(self) -> Sequence[int]:
        """Return the digests to write down now; `not_written` gives them back."""
        taken, self._unwritten = self._unwritten, []
        return taken

    def not_written(self, digests: Sequence[int]) -> None:
        self._unwritten[:0] = digests


def gone(exec_id: str) -> ExecGone:
    return ExecGone("this run is not kept any more", exec_id=exec_id[:128])
