"""The file of figures that `--json` names."""

from pathlib import Path

from looplm.errors import UserError


def check_writable(file: Path) -> None:
    """Raises UserError now, rather than after minutes of work, if `file` cannot be written."""
    try:
        file.touch()
    except OSError as error:
        raise UserError(f"--json {file} cannot be written: {error.strerror}.") from None
