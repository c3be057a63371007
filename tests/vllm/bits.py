"""A file that is another one by a bit."""

import os


def flip(path: str) -> None:
    """Changes a bit of the last byte but one: of weights, in the last tensor."""
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)
        (low,) = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([low ^ 1]))
