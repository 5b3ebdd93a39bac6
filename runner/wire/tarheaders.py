"""Strict reading of tar headers: an archive ends with the mark of its end, and half an archive never passes for a
whole.

`tarfile` takes a header that it can't read for the end of the archive, unless that header is the first. Shared by the
runner, which unpacks into workspaces, and nsinit, which unpacks images. Source: pax(1) "ustar interchange format" (the
mark is two records of zeros).
"""

from __future__ import annotations

import tarfile

TAPE_BYTES = 32 * 1024
"""Buffer of an archive that is read or written as a stream: at each header, `tarfile` copies what is in it."""


class StrictHeader(tarfile.TarInfo):
    """Header that raises `tarfile.ReadError` for bytes that are neither a header nor the mark."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> StrictHeader:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed knows none of these
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None
