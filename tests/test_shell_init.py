"""`jobs submit embed.yaml` typed in real shells: what reaches our program and what stays the shell's builtin."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import shell
from jobs.cli import app
from jobs.verbs import PROGRAM, VERBS
from sharding.errors import InputError

ODD_WORDS = ["x y.yaml", "*", "", "$HOME", "it's", 'say "no"', "-l", "%1", "a\\b", "--set", "model.dtype=float32"]
BUILTIN_USES = ["jobs", "jobs -l", "jobs %1", "jobs -p"]


@pytest.fixture(params=shell.SHELLS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if shutil.which(chosen) is None:
        pytest.skip(f"{chosen} is not installed on this machine")
    return chosen


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that writes its words, one a line, to the file named by RECORD and exits with 7."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    path = folder / PROGRAM
    path.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word" >> "$RECORD"; done\nexit 7\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def command(name: str, *more: str) -> list[str]:
    plain = {"bash": ["bash", "--norc", "--noprofile"], "zsh": ["zsh", "-f"], "fish": ["fish", "--no-config"]}
    return [*plain[name], *more]


def environment(tmp_path: Path, *, path: Path | None = None) -> dict[str, str]:
    folders = ([str(path)] if path else []) + ["/usr/local/bin", "/usr/bin", "/bin"]
    return {"PATH": ":".join(folders), "HOME": str(tmp_path), "RECORD": str(tmp_path / "record"), "TERM": "dumb"}


def status(name: str) -> str:
    return "$status" if name == "fish" else "$?"


def background(name: str) -> str:
    return "$last_pid" if name == "fish" else "$!"


def run(name: str, tmp_path: Path, script: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `script` as a file, not interactively."""
    file = tmp_path / f"script.{name}"
    file.write_text(script)
    return subprocess.run(
        command(name, str(file)), env=environment(tmp_path, path=path), capture_output=True, text=True, timeout=60
    )


def words_received(tmp_path: Path) -> list[str]:
    record = tmp_path / "record"
    return record.read_text().split("\n")[:-1] if record.exists() else []


def quoted(name: str, words: list[str]) -> str:
    return " ".join(shell._fish_quoted(word) if name == "fish" else shlex.quote(word) for word in words)


@pytest.mark.parametrize("on_path", [True, False], ids=["on PATH", "not on PATH"])
def test_every_verb_reaches_the_program_with_its_words_and_its_exit_code(
    name: str, program: Path, tmp_path: Path, on_path: bool
) -> None:
    calls = "\n".join(f"jobs {verb} {quoted(name, ODD_WORDS)}\necho code={status(name)}" for verb in VERBS)
    elsewhere = "/nonexistent/candelabra" if on_path else str(program)
    script = f"{shell.shell_function(name, elsewhere)}\n{calls}\n"
    done = run(name, tmp_path, script, path=program.parent if on_path else None)
    assert done.stderr == ""
    assert done.stdout.split() == ["code=7"] * len(VERBS)
    assert words_received(tmp_path) == [word for verb in VERBS for word in [verb, *ODD_WORDS]]


@pytest.mark.parametrize("use", BUILTIN_USES)
def test_any_other_use_is_the_builtin_to_the_last_byte(name: str, program: Path, tmp_path: Path, use: str) -> None:
    script = f"sleep 60 &\n{use}\necho code={status(name)}\nkill {background(name)}"
    plain = run(name, tmp_path, script)
    wrapped = run(name, tmp_path, f"{shell.shell_function(name, str(program))}\n{script}")
    assert without_numbers(wrapped.stdout) == without_numbers(plain.stdout)
    assert without_numbers(wrapped.stderr).replace("jobs:jobs:", "jobs:") == without_numbers(plain.stderr)
    assert words_received(tmp_path) == []
    assert "code=0" in wrapped.stdout or name == "zsh"


def test_an_unknown_first_word_is_left_to_the_builtin(name: str, program: Path, tmp_path: Path) -> None:
    done = run(name, tmp_path, f"{shell.shell_function(name, str(program))}\njobs submitt\necho code={status(name)}\n")
    assert "submitt" in done.stderr
    assert "code=0" not in done.stdout
    assert words_received(tmp_path) == []


def test_command_substitution_still_sees_the_background_jobs(program: Path, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed on this machine")
    script = f'{shell.shell_function("bash", str(program))}\nsleep 60 &\n[ "$(jobs -p)" = "$!" ] && echo same\n'
    # A pipe is the one place where bash treats the plain word apart; docs/shells.md gives this form for it.
    script += '[ "$(command jobs -p | cat)" = "$!" ] && echo same\nkill $!\n'
    assert run("bash", tmp_path, script).stdout.split() == ["same", "same"]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_strict_modes_are_survived(name: str, program: Path, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed on this machine")
    script = (
        f"set -eu\n{shell.shell_function(name, str(program))}\njobs\njobs validate x || echo code=$?\njobs\necho end\n"
    )
    done = run(name, tmp_path, script)
    assert (done.stdout.split(), done.stderr) == (["code=7", "end"], "")
    assert words_received(tmp_path) == ["validate", "x"]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_aliases_neither_break_the_function_nor_leak_into_it(name: str, program: Path, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed on this machine")
    (tmp_path / "function").write_text(shell.shell_function(name, str(program)))
    switch = "shopt -s expand_aliases" if name == "bash" else "setopt aliases"
    hostile = "alias jobs='jobs -l' command='echo leaked' builtin='echo leaked' type='echo leaked' whence='echo leaked'"
    script = f"{switch}\n{hostile}\nalias j=jobs\n. {tmp_path}/function\nunalias jobs\nj validate x\nj\necho end\n"
    for path in (None, program.parent):
        done = run(name, tmp_path, script, path=path)
        assert (done.stdout.split(), done.stderr) == (["end"], "")
    assert words_received(tmp_path) == ["validate", "x"] * 2


def test_without_the_function_the_builtin_answers_and_the_other_name_works(
    name: str, program: Path, tmp_path: Path
) -> None:
    script = (
        f"jobs submit embed.yaml\necho code={status(name)}\n{PROGRAM} submit embed.yaml\necho code={status(name)}\n"
    )
    done = run(name, tmp_path, script, path=program.parent)
    codes = done.stdout.split()
    assert codes[0] != "code=0"
    assert codes[1] == "code=7"
    assert "submit" in done.stderr
    assert words_received(tmp_path) == ["submit", "embed.yaml"]


def test_typed_at_a_terminal_verbs_and_builtin_share_the_word(name: str, program: Path, tmp_path: Path) -> None:
    (tmp_path / "function").write_text(shell.shell_function(name, str(program)))
    lines = [f". '{tmp_path}/function'", "sleep 60 &", "jobs", "jobs -l", "jobs submit 'my embed.yaml'"]
    lines.append(f"kill {background(name)}")
    screen = typed(name, tmp_path, lines)
    assert "sleep 60" in screen[2]
    assert "sleep 60" in screen[3]
    assert "no such job" not in "".join(screen)
    assert words_received(tmp_path) == ["submit", "my embed.yaml"]


def test_the_installed_program_prints_its_own_function_and_is_reached_through_it(name: str, tmp_path: Path) -> None:
    own = " ".join(quoted(name, [word]) for word in shell.own_program(argv0="pytest"))
    load = f"{own} shell-init fish | source" if name == "fish" else f'eval "$({own} shell-init {name})"'
    missing = tmp_path / "no such file.yaml"
    calls = f"jobs validate {quoted(name, [str(missing)])} && echo wrong\njobs schema\necho code={status(name)}"
    script = f"{load}\njobs\n{calls}\n"
    done = run(name, tmp_path, script)
    assert missing.name in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("code=0\n")
    assert "wrong" not in done.stdout


def test_the_program_is_the_called_script_then_its_neighbour_then_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "jobs"
    script.touch()
    python = tmp_path / "python3"
    assert shell.own_program(str(script), str(python)) == (str(script),)
    assert shell.own_program("/somewhere/jobs/__main__.py", str(python)) == (str(python), "-P", "-m", "jobs")
    (tmp_path / PROGRAM).touch()
    assert shell.own_program("/somewhere/jobs/__main__.py", str(python)) == (str(tmp_path / PROGRAM),)


def test_the_function_knows_exactly_the_verbs_of_the_command_line() -> None:
    registered = [
        command.name or str(command.callback.__name__) for command in app.registered_commands if command.callback
    ]
    assert tuple(sorted(registered)) == tuple(sorted(VERBS))


def test_a_shell_without_a_function_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="`ksh`") as caught:
        shell.shell_function("ksh", "candelabra")
    assert caught.value.hint is not None
    assert "bash, zsh, fish" in caught.value.hint


def without_numbers(text: str) -> str:
    """Output with process numbers, CPU shares and script line numbers taken out."""
    return re.sub(r"\d+", "#", text)


BECOME_LEADER = (
    "import os, sys, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def typed(name: str, tmp_path: Path, lines: list[str]) -> list[str]:
    """Type `lines` into an interactive shell on a pseudo-terminal; what the screen showed for each."""
    master, slave = os.openpty()
    env = environment(tmp_path) | {"PS1": "ready> "}
    more = ["-i"] if name != "fish" else ["-i", "--init-command", "function fish_prompt; echo -n 'ready> '; end"]
    shell_process = subprocess.Popen(
        [sys.executable, "-c", BECOME_LEADER, *command(name, *more)], stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    try:
        read_until(master, "ready> ")
        screen = []
        for number, line in enumerate(lines):
            # The token is put together by printf, so that the echo of what was typed does not contain it.
            os.write(master, f"{line}\nprintf 'line-%s-over\\n' {number}\n".encode())
            screen.append(read_until(master, f"line-{number}-over"))
        os.write(master, b"exit\nexit\n")
        return screen
    finally:
        os.close(master)
        shell_process.terminate()
        shell_process.wait(timeout=30)


def read_until(master: int, token: str) -> str:
    seen = ""
    while token not in seen:
        readable, _, _ = select.select([master], [], [], 60)
        assert readable, f"the shell said nothing more; so far: {seen!r}"
        seen += os.read(master, 65536).decode(errors="replace")
    return seen
