"""How tar headers are read here: an archive ends with the mark of its end, and half a one never passes for a whole one.

`tarfile` takes a header that it can't read for the end of the archive, unless it is the very first. Serves both who
unpacks for a workspace (in the runner) and who unpacks an image (in nsinit). Source: pax(1) "ustar interchange format",
two records of zeros.
"""

from __future__ import annotations

import tarfile


class StrictHeader(tarfile.TarInfo):
    """Raises `tarfile.ReadError` for what is neither a header nor the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> StrictHeader:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed knows none of these
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None
