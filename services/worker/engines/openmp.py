"""GNU OpenMP for engines that link to it: the system's, else the copy another wheel of the lock carries."""

import contextlib
import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = ["library_path"]

_SONAME: Final = "libgomp.so.1"
_CARRIER: Final = "pykdtree"


def library_path(directory: Path) -> str | None:
    """What LD_LIBRARY_PATH must be in a child that links to libgomp; None if it may stay as it is.

    Where the system has no libgomp, `directory` gets a link of the name the loader looks for, since the carried file
    has another. None too where there is no copy to link to: the child then fails to load and says so.
    """
    if _is_on_system():
        return None
    carried = _carried()
    if carried is None:
        return None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = directory / f"{_SONAME}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(carried)
    temporary.replace(directory / _SONAME)
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return f"{directory}:{inherited}" if inherited else str(directory)


def _is_on_system() -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL(_SONAME)
        return True
    return False


def _carried() -> Path | None:
    try:
        files = metadata.files(_CARRIER) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name.startswith("libgomp-")), None)
