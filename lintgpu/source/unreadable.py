"""The one error of reading a file."""

from __future__ import annotations


class UnreadableFile(Exception):
    """A file that cannot be read or parsed; str() of it is one line.

    `line` and `column` count from 1 in characters, 0 where there is no position. `kind` is missing, directory,
    permission, size, encoding, language or syntax.
    """

    def __init__(self, path: str, line: int, column: int, message: str, kind: str = "syntax") -> None:
        self.path = path
        self.line = line
        self.column = column
        self.message = " ".join(message.split())
        self.kind = kind
        super().__init__(self.path, self.line, self.column, self.message, self.kind)

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line else self.path
        return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in f"{place}: {self.message}")
