"""The one exception for faults that a user can mend: files, configurations, requests."""


class KvjaxError(ValueError):
    """Bad input. The message is one line: the thing, what was expected, what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """


def choose(what: str, name: str, allowed) -> str:
    """Return `name` if it is one of `allowed`, else raise `KvjaxError` that lists them."""
    if name in allowed:
        return name
    raise KvjaxError(f"unknown {what} {name!r}: expected one of {', '.join(map(str, allowed))}")
