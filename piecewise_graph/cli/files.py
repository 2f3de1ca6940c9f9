"""The files that commands write: refused before the work, and never with a traceback."""

from __future__ import annotations

from pathlib import Path

from .errors import CommandError


def check_file(option: str, file: Path) -> None:
    """See that `file` can be written, before minutes are spent on what it will hold.

    Raises:
        CommandError: it cannot.
    """
    if not file.parent.is_dir():
        raise CommandError.no_folder(option, file)
    existed = file.exists()
    try:
        with file.open("a", encoding="utf-8"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise CommandError.unwritable(option, file, error.strerror or str(error)) from error


def write_file(option: str, file: Path, text: str) -> None:
    """Write `text`.

    Raises:
        CommandError: the system refuses.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError.unwritable(option, file, error.strerror or str(error)) from error
