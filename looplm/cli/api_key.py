"""The key of a server, as `--api-key` gives it to `looplm serve` and `looplm chat`."""

from looplm.errors import UserError


def check_key(key: str | None) -> None:
    """Raises UserError for a key that no request could carry."""
    if key is None:
        return
    if not key:
        raise UserError("--api-key is empty; give a key, or leave the option out.")
    from looplm.inference.sampling import check_text

    check_text("--api-key", key)
    if key != key.strip() or any(ord(character) < 32 or ord(character) == 127 for character in key):
        raise UserError("--api-key has a space at an end, or a control character, which no HTTP header carries.")
