"""Which devices `CUDA_VISIBLE_DEVICES` gives a process, and what is said where it does not see them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.resources.devices import CudaFacts, Gpu, cuda_obstacle, hidden_devices
from workers.resources.visible import parse_visible

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-63feeb45-94c6-5df0-b1b3-0e8c2d5ff1e3"
GPU = Gpu("NVIDIA H200", 139 << 30, "9.0")
ONE = CudaFacts(module="580.65.06", boards=1, library="13.0", gpus=(GPU,))


@pytest.mark.parametrize(
    ("value", "ids", "kinds"),
    [
        ("", (), ()),
        (" ", (), ()),
        ("0", ("0",), ("index",)),
        ("3, 1", ("3", "1"), ("index", "index")),
        (UUID, (UUID,), ("gpu",)),
        ("GPU-8932f937", ("GPU-8932f937",), ("gpu",)),
        (f"{MIG},{UUID}", (MIG, UUID), ("mig", "gpu")),
        (f"MIG-{UUID}/1/0", (f"MIG-{UUID}/1/0",), ("mig",)),
    ],
)
def test_numbers_and_uuids_of_gpus_and_mig_slices_are_told_apart(
    value: str, ids: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    visible = parse_visible(value)
    assert (visible.ids, visible.kinds, visible.fault) == (ids, kinds, None)


@pytest.mark.parametrize(
    ("value", "ids", "fault"),
    [
        ("-1", (), "no number, GPU or MIG UUID: `-1`"),
        ("NoDevFiles", (), "no number, GPU or MIG UUID: `NoDevFiles`"),
        ("0,1,,2", ("0", "1"), "no number, GPU or MIG UUID: ``"),
        ("cuda:0", (), "no number, GPU or MIG UUID: `cuda:0`"),
        ("1,0,1", ("1", "0"), "named twice: `1`"),
        ("1,01", ("1",), "named twice: `01`"),
        (f"{UUID},{UUID.replace('f', 'F')}", (UUID,), f"named twice: `{UUID.replace('f', 'F')}`"),
    ],
)
def test_what_follows_an_entry_that_names_no_device_is_not_seen(value: str, ids: tuple[str, ...], fault: str) -> None:
    visible = parse_visible(value)
    assert (visible.ids, visible.fault) == (ids, fault)


def test_a_uuid_that_hides_every_device_is_told_with_what_is_wrong_with_it() -> None:
    obstacle = cuda_obstacle(True, replace(ONE, gpus=(), visible="GPU-xyz"))
    assert obstacle is not None
    assert obstacle[0].endswith("hides every device: `GPU-xyz`")
    assert "no number, GPU or MIG UUID: `GPU-xyz`" in obstacle[1]


def test_devices_that_are_named_and_not_there_are_told() -> None:
    assert hidden_devices(ONE) is None
    assert hidden_devices(replace(ONE, visible=MIG)) is None
    hidden = hidden_devices(replace(ONE, visible=f"{UUID},GPU-1234"))
    assert hidden is not None
    assert hidden.endswith("names 2 devices, of which the driver shows 1; the first that it does not know: `GPU-1234`")
    fault = hidden_devices(replace(ONE, visible="0,x"))
    assert fault is not None
    assert fault.endswith("no number, GPU or MIG UUID: `x`")
