"""Errors that a user can fix."""


class UserError(Exception):
    """Something the user can fix: shown as one line, without a traceback; the exit code is 2."""
