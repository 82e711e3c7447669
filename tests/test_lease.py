"""One driver per output: alive, dead, silent, stopped, released, and several at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sharding_jobs import paths

from sharding import layout, lease
from sharding.errors import CorruptStateError, LeaseHeldError, LeaseLostError
from sharding.lease import Lease, Place, read_lease, this_place
from sharding.manifest import LeaseRecord, encode, now
from sharding.storage import Storage, open_storage

ELSEWHERE = Place("another-host", "another-boot", "pid:[1]", 1, "1")
HOLDER = (
    "import sys; from sharding.lease import Lease, Place; from sharding.storage import open_storage\n"
    "from sharding.errors import LeaseLostError\n"
    "place = Place('another-host', 'another-boot', 'pid:[1]', 1, '1') if sys.argv[2] == 'elsewhere' else None\n"
    "lease = Lease.acquire(open_storage(sys.argv[1]), owner='holder', timeout_s=60, place=place)\n"
    "print(lease.epoch, flush=True)\n"
    "for line in sys.stdin:\n"
    "    try:\n"
    "        if line.strip() == 'beat': lease.beat()\n"
    "        if line.strip() == 'release': lease.release()\n"
    "        if line.strip() == 'beat on':\n"
    "            while True: lease.beat()\n"
    "        print('ok', lease.is_lost(), flush=True)\n"
    "    except LeaseLostError as error:\n"
    "        print('lost', lease.is_lost(), flush=True)\n"
)


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "out"))
    return open_storage(f"{request.getfixturevalue('s3_bucket')}/out")


def no_wait(seconds: float) -> None:
    raise AssertionError("must not wait")


class Holder:
    """A driver in a process of its own, which does what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def holder(storage: Storage, where: str) -> Iterator[Holder]:
    arguments = [sys.executable, "-c", HOLDER, storage.uri, where]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        holder = Holder(process)
        try:
            assert holder.answer() == "1"
            yield holder
        finally:
            process.kill()


def put_record(storage: Storage, place: Place, epoch: int = 1, **changes: object) -> LeaseRecord:
    record = LeaseRecord(
        epoch=epoch,
        owner="someone",
        nonce="n",
        host=place.host,
        pid=place.pid,
        process_start=place.process_start,
        boot_id=place.boot_id,
        pid_namespace=place.pid_namespace,
        beat=0,
        at=now(),
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    storage.write_bytes(layout.lease_path(epoch), encode(record))
    return record


def test_the_first_driver_gets_epoch_one_and_the_next_two(storage: Storage) -> None:
    assert read_lease(storage) is None
    first = Lease.acquire(storage, owner="first", timeout_s=60, wait=no_wait)
    assert first.epoch == 1
    assert not first.is_lost()
    first.release()
    record = read_lease(storage)
    assert record is not None
    assert record.released
    second = Lease.acquire(storage, owner="second", timeout_s=60, wait=no_wait)
    assert second.epoch == 2
    assert first.is_lost()
    first.release()
    assert not second.is_lost()


def test_a_living_owner_on_this_host_is_respected_at_once(storage: Storage) -> None:
    Lease.acquire(storage, owner="me, and alive", timeout_s=60, wait=no_wait)
    with pytest.raises(LeaseHeldError, match=f"me, and alive, process {os.getpid()} on") as caught:
        Lease.acquire(storage, owner="me again", timeout_s=60, wait=no_wait)
    assert caught.value.hint
    assert paths(storage, layout.LEASES) == [layout.lease_path(1)]


def test_a_dead_owner_on_this_host_is_replaced_at_once(storage: Storage) -> None:
    with holder(storage, "here") as dead:
        dead.process.kill()
        dead.process.wait()
        assert Lease.acquire(storage, owner="next", timeout_s=60, wait=no_wait).epoch == 2


def test_remains_of_a_process_count_as_dead(storage: Storage) -> None:
    with holder(storage, "here") as dead:
        dead.process.kill()
        os.waitid(os.P_PID, dead.process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert Lease.acquire(storage, owner="next", timeout_s=60, wait=no_wait).epoch == 2


def test_a_process_number_that_was_given_again_is_not_the_owner(storage: Storage) -> None:
    put_record(storage, replace(this_place(), process_start="1"))
    assert Lease.acquire(storage, owner="next", timeout_s=60, wait=no_wait).epoch == 2


def test_a_stopped_owner_on_this_host_still_holds(storage: Storage) -> None:
    with holder(storage, "here") as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.process.pid, os.WUNTRACED)
        with pytest.raises(LeaseHeldError):
            Lease.acquire(storage, owner="next", timeout_s=0.1, wait=no_wait)


@pytest.mark.parametrize(
    "place",
    [
        ELSEWHERE,
        replace(this_place(), host="another-host"),
        replace(this_place(), boot_id="before-the-restart"),
        replace(this_place(), pid_namespace="another-container"),
    ],
    ids=["host and boot", "host", "boot", "container"],
)
def test_an_owner_elsewhere_is_replaced_after_silence_only(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    put_record(storage, replace(place, process_start="1"))
    looks: list[float] = []
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: sum(looks)))
    assert Lease.acquire(storage, owner="next", timeout_s=30, wait=looks.append).epoch == 2
    assert sum(looks) == pytest.approx(30)
    assert len(looks) == 20


def test_without_kernel_facts_nobody_is_taken_for_dead(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    nowhere = replace(this_place(), boot_id="", pid_namespace="", process_start="")
    put_record(storage, nowhere)

    def beat_once(seconds: float) -> None:
        put_record(storage, nowhere, beat=1)

    with pytest.raises(LeaseHeldError):
        Lease.acquire(storage, owner="next", timeout_s=60, place=nowhere, wait=beat_once)


def test_an_owner_elsewhere_who_beats_is_respected(storage: Storage) -> None:
    with holder(storage, "elsewhere") as other:

        def let_it_beat(seconds: float) -> None:
            other.tell("beat")
            assert other.answer() == "ok False"

        with pytest.raises(LeaseHeldError, match="process 1 on another-host, epoch 1"):
            Lease.acquire(storage, owner="next", timeout_s=60, wait=let_it_beat)


def test_an_owner_elsewhere_who_releases_is_followed_before_the_timeout(storage: Storage) -> None:
    with holder(storage, "elsewhere") as other:

        def let_it_release(seconds: float) -> None:
            other.tell("release")
            assert other.answer() == "ok False"

        assert Lease.acquire(storage, owner="next", timeout_s=3600, wait=let_it_release).epoch == 2


def test_a_stopped_owner_elsewhere_loses_the_lease_and_notices(storage: Storage) -> None:
    with holder(storage, "elsewhere") as other:
        other.tell("beat on")
        with pytest.raises(LeaseHeldError):
            Lease.acquire(storage, owner="next", timeout_s=20)
        other.process.send_signal(signal.SIGSTOP)
        os.waitpid(other.process.pid, os.WUNTRACED)
        taken = Lease.acquire(storage, owner="next", timeout_s=0.3)
        assert taken.epoch == 2
        other.process.send_signal(signal.SIGCONT)
        assert other.answer() == "lost True"
        other.tell("release")
        assert other.answer() == "ok True"
        assert not taken.is_lost()
        taken.beat()
        record = read_lease(storage)
        assert record is not None
        assert (record.epoch, record.released, record.beat) == (2, False, 1)


def test_who_is_overtaken_while_watching_gives_up(storage: Storage) -> None:
    put_record(storage, ELSEWHERE)

    def overtake(seconds: float) -> None:
        put_record(storage, ELSEWHERE, epoch=2)

    with pytest.raises(LeaseHeldError, match="epoch 2"):
        Lease.acquire(storage, owner="slow", timeout_s=60, wait=overtake)


@pytest.mark.parametrize("before", ["nobody", "dead"])
def test_of_several_drivers_at_once_one_wins(storage: Storage, before: str) -> None:
    if before == "dead":
        put_record(storage, replace(this_place(), process_start="1"))
    code = (
        "import sys; from sharding.lease import Lease; from sharding.storage import open_storage\n"
        "from sharding.errors import LeaseHeldError\n"
        "s = open_storage(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()\n"
        "try: print(Lease.acquire(s, owner='x', timeout_s=60).epoch, flush=True)\n"
        "except LeaseHeldError: print('held', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, storage.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    holders = [Holder(process) for process in processes]
    assert [item.answer() for item in holders] == ["ready"] * 3
    for item in holders:
        item.tell("go")
    answers = sorted(item.answer() for item in holders)
    for process in processes:
        process.communicate(timeout=60)
    assert answers == ["2" if before == "dead" else "1", "held", "held"]


def test_a_taker_who_slept_through_epochs_does_not_hold_a_past_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    put_record(storage, this_place(), epoch=20)
    put_record(storage, this_place(), epoch=1, released=True)
    answers = iter([1, 20, 20])
    monkeypatch.setattr(lease, "_highest_epoch", lambda storage: next(answers))
    with pytest.raises(LeaseHeldError, match="epoch 20"):
        Lease.acquire(storage, owner="slow", timeout_s=60, wait=no_wait)
    assert paths(storage, layout.LEASES) == [layout.lease_path(1), layout.lease_path(20)]


def test_old_epochs_do_not_pile_up(storage: Storage) -> None:
    for number in range(1, 15):
        current = Lease.acquire(storage, owner="cron", timeout_s=60, wait=no_wait)
        assert current.epoch == number
        current.release()
    assert len(paths(storage, layout.LEASES)) == 8
    assert paths(storage, layout.LEASES)[-1] == layout.lease_path(14)


def test_beats_are_counted_and_stop_at_the_release(storage: Storage) -> None:
    current = Lease.acquire(storage, owner="me", timeout_s=60)
    current.beat()
    current.beat()
    current.release()
    current.beat()
    record = read_lease(storage)
    assert record is not None
    assert (record.beat, record.released) == (3, True)


def test_an_owner_whose_output_was_removed_has_lost_it(storage: Storage) -> None:
    current = Lease.acquire(storage, owner="me", timeout_s=60)
    storage.delete(layout.lease_path(1))
    assert current.is_lost()
    other = Lease.acquire(storage, owner="other", timeout_s=60)
    assert other.epoch == 1
    with pytest.raises(LeaseLostError):
        current.beat()


def test_a_lease_file_that_cannot_be_read_is_corrupt_state(storage: Storage) -> None:
    storage.write_bytes(layout.lease_path(1), b"{")
    with pytest.raises(CorruptStateError, match=r"lease/000001\.json"):
        Lease.acquire(storage, owner="me", timeout_s=60)
