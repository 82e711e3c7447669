"""Before the journey: the shell function that lets people type `jobs submit embed.yaml`. Edits no profile, runs no job.

`jobs` is a builtin of bash, zsh and fish, so a shell never looks for a program of that name. A function, however, comes
before a regular builtin. The function made here looks at the first word only: one of our verbs goes to the program,
anything else (nothing, `-l`, `%1`) goes on to the builtin, untouched.

Which program: the `candelabra` on PATH at the time of the call, so that an activated environment wins; else the one
that printed the function. It is never `jobs` on PATH, because several systems ship a `/usr/bin/jobs` of their own.

Words are written with a backslash where the shells allow it (`\\command`), which keeps aliases away from them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jobs.verbs import PROGRAM, VERBS
from sharding.errors import InputError

SHELLS: Final = ("bash", "zsh", "fish")

_POSIX: Final = r"""# `jobs VERB ...` runs {program}; any other use of `jobs` is the shell's own builtin.
function jobs {{
  case "${{1-}}" in
    ({verbs})
      if {on_path} >/dev/null; then
        \command {program} "$@"
      else
        {fallback} "$@"
      fi ;;
    (*) \builtin jobs "$@" ;;
  esac
}}
"""

_FISH: Final = """# `jobs VERB ...` runs {program}; any other use of `jobs` is the shell's own builtin.
function jobs --description 'background jobs, or {program} when the first word is one of its verbs'
  if set -q argv[1]; and contains -- $argv[1] {verbs}
    if command -q {program}
      command {program} $argv
    else
      {fallback} $argv
    end
  else
    builtin jobs $argv
  end
end
"""


def shell_function(shell: str, program: str | Sequence[str], verbs: Sequence[str] = VERBS) -> str:
    """Text of a shell function named `jobs`, to be evaluated in a profile.

    Args:
        shell: `bash`, `zsh` or `fish`.
        program: What to run when no `candelabra` is on PATH: one path, or the words of a command.
        verbs: First words that belong to the program.

    Raises:
        InputError: The shell is none of the three.
    """
    words = [program] if isinstance(program, str) else list(program)
    match shell:
        case "bash" | "zsh":
            look = r"\builtin type -P" if shell == "bash" else r"\builtin whence -p"
            return _POSIX.format(
                program=PROGRAM, verbs="|".join(verbs), on_path=f"{look} {PROGRAM}", fallback=shlex.join(words)
            )
        case "fish":
            return _FISH.format(program=PROGRAM, verbs=" ".join(verbs), fallback=" ".join(map(_fish_quoted, words)))
        case _:
            raise InputError(f"no function for this shell: `{shell}`", hint=f"one of: {', '.join(SHELLS)}")


def own_program(argv0: str | None = None, executable: str | None = None) -> tuple[str, ...]:
    """Words of a command that runs this very installation, whatever PATH says.

    The script that was called, when it is ours and still there; else the script beside the interpreter; else the
    interpreter itself with `-P`, which keeps a folder named `jobs` in the working directory from being imported.

    Args:
        argv0: `sys.argv[0]` unless given.
        executable: `sys.executable` unless given.
    """
    script = Path(sys.argv[0] if argv0 is None else argv0)
    interpreter = Path(sys.executable if executable is None else executable)
    if script.name in (PROGRAM, "jobs") and script.is_file():
        return (str(script.absolute()),)
    beside = interpreter.with_name(PROGRAM)
    if beside.is_file():
        return (str(beside),)
    return (str(interpreter), "-P", "-m", "jobs")


def init_line(shell: str) -> str:
    """The line that a person puts into the profile of `shell`."""
    if shell == "fish":
        return f"{PROGRAM} shell-init fish | source"
    return f'eval "$({PROGRAM} shell-init {shell})"'


def _fish_quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
