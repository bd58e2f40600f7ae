"""The one exception that means: the input is wrong, and here is what to do about it."""


class UserError(ValueError):
    """Raised for input that cannot be used: one clear paragraph that says what is wrong and what to change.

    The command line prints the message without a traceback and exits with status 2.
    """
