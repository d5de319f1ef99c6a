"""`foretell serve --replicas`: starts Ray and the application, and sees them off."""

# pyright: reportMissingImports=false
# (Ray is an extra)

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path

from foretell.config import EngineConfig, ServerConfig, parse_memory
from foretell.server.run import listen

try:
    import ray
    from ray import serve as ray_serve
    from ray.exceptions import RayError
    from ray.serve.schema import LoggingConfig

    from foretell.server.ray_app import application
except ImportError:
    raise ValueError("replicas need Ray: pip install 'foretell[ray]'") from None

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
"""Of Ray, where nothing else is set. By default its workers are nice (15): an engine gets next to
nothing of a core on which something else runs. And after 5 or 10 seconds it gives up a proxy, and
all its connections, that is only late while engines load and compile."""


def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Replicas on this machine, or over the cluster that RAY_ADDRESS names, until this process is
    told to stop (SIGINT, SIGTERM): then answers in progress have ``drain_timeout`` seconds.

    Raises:
        ValueError: the address cannot be listened on, or a replica does not start.
    """
    with listen(server.host, server.port) as free:
        server = dataclasses.replace(server, port=free.getsockname()[1])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        engine = _start_here(engine, server.max_replicas or server.replicas)
    told = threading.Event()  # after Ray, which has handlers of its own
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: told.set())
    try:
        ray_serve.start(
            http_options={"host": server.host, "port": server.port},
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        ray_serve.run(application(engine, server), name="foretell")
        name = server.served_model_name or Path(engine.model).name
        shown = f"[{server.host}]" if ":" in server.host else server.host
        print(f"foretell: {name} at http://{shown}:{server.port}", file=sys.stderr)
        told.wait()
        ray_serve.delete("foretell", _blocking=False)  # else it gives up after a minute
        while "foretell" in ray_serve.status().applications:
            time.sleep(0.2)
    except (RuntimeError, RayError) as error:
        raise ValueError(f"no replica could be started: {error}") from None
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def _start_here(engine: EngineConfig, replicas: int) -> EngineConfig:
    """Ray on this machine alone, and each replica's share of the machine."""
    cores = os.cpu_count() or 1
    memory = parse_memory(engine.kv_memory)
    share = f"{memory / replicas:.6f}" if isinstance(memory, float) else engine.kv_memory
    threads = engine.threads or max(1, cores // replicas)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",
        num_cpus=max(cores, threads * replicas),
        object_store_memory=128 * 2**20,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    return engine.with_(threads=threads, kv_memory=share)
