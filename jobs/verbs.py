"""The words of the command line, before any data moves: the program's name and its verbs. Decides nothing.

Three readers share these constants and so cannot drift apart: the command line registers one command per verb, the
shell function of `jobs.shell` lets exactly these words through to the program, and the tests and manifests are checked
against them.
"""

from __future__ import annotations

from typing import Final

PROGRAM: Final = "candelabra"
"""The name under which the program can be typed anywhere. `jobs` is the same program, but a builtin of every shell."""

VERBS: Final[tuple[str, ...]] = (
    "validate",
    "plan",
    "submit",
    "status",
    "resume",
    "retry-failed",
    "report",
    "list",
    "gc",
    "schema",
    "convert",
    "doctor",
    "shell-init",
)
"""Every verb, in the order in which help shows them."""
