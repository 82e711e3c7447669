"""An embedded Ray for one machine: started with what a job uses and nothing else. Knows no jobs.

`ray.init` starts more than that. Three helpers have nothing to do where one machine runs one job and shows no web page:
the autoscaler's monitor (the cluster never grows), the log monitor (no log is forwarded) and the dashboard. Each is a
Python process that `ray.init` waits for or that takes the processor from the first worker, and the monitor costs a
second more at the end, since it answers no SIGTERM once its GCS is gone. Ray has no public switch for them. Then it
starts one idle worker per CPU and waits until all have come up; a job needs one per replica and starts those itself.
And it may ask the GCS for the new node before the node is there, and then sleep a whole second; here it is asked
once the node has registered.

What is overridden here exists in the Ray versions that the package allows (`tests/test_embedded_ray.py`); where it does
not, Ray starts as it comes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.node

_OBJECT_STORE_BYTES = 80 << 20
_REGISTER_TIMEOUT_S = 30.0
_POLL_S = 0.01


def start_embedded_ray() -> None:
    """Start Ray on this machine and connect to it; `ray.shutdown()` ends all of it.

    Raises:
        ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError: Those of `ray.init`.
    """
    with _lean_node():
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="candelabra",
            _system_config={"prestart_worker_first_driver": False},
        )


@contextlib.contextmanager
def _lean_node() -> Iterator[None]:
    """For this while Ray's head node is one without the idle helpers."""
    module: Any = ray._private.node
    plain: Any = module.Node
    if not all(hasattr(plain, name) for name in ("start_api_server", "start_ray_processes", "get_gcs_client")):
        yield
        return

    class LeanNode(plain):  # type: ignore[misc]
        def __init__(self, ray_params: Any, **options: Any) -> None:
            ray_params.no_monitor = True
            ray_params.include_log_monitor = False
            super().__init__(ray_params=ray_params, **options)

        def start_api_server(self, **_: Any) -> None:
            self._webui_url = None

        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            deadline = time.monotonic() + _REGISTER_TIMEOUT_S
            gcs = self.get_gcs_client()
            while not gcs.get_all_node_info(timeout=_REGISTER_TIMEOUT_S) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    module.Node = LeanNode
    try:
        yield
    finally:
        module.Node = plain
