"""`kvhal demo`"""


def command() -> None:
    """x"""
