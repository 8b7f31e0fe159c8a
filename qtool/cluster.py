"""A Ray cluster as a sweep sees it: connect, its nodes, the kinds of node that --on names, and tasks on them.

Ray places tasks, retries them and notices lost nodes; nothing of that is done here.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from qtool.core import QtoolError, did_you_mean

# Resources every node has; they tell no kind from another.
PLAIN = ("CPU", "GPU", "memory", "object_store_memory")
NODE_ID = "ray.io/node-id"
SHARE = 0.001
"""Of a kind's resource: it says where a task may run, not how much of anything it takes."""


LOOK_S = 10.0
"""How often to look whether a node is left that could run what waits; never while something is timed."""


class Lost(Exception):
    """A task ended without an answer because its worker or its node is gone."""


class Failed(Exception):
    """A task raised what it should not."""


class OutOfMemory(Exception):
    """Ray ended a task because its node ran out of memory."""


class Stopped(Exception):
    """The sweep was interrupted."""


@dataclass(frozen=True)
class Node:
    """An alive node. `cpus` and `gpus` are what Ray may give out there."""

    id: str
    address: str
    cpus: float
    gpus: float
    memory_bytes: float
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """Nodes of one name of --on; `name` is None for all nodes. `options` lets Ray place a task on any of them."""

    name: str | None
    nodes: Sequence[Node]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"kind '{self.name}'" if self.name else "node"


def kinds(names: Sequence[str], nodes: Sequence[Node], with_gpu: bool) -> list[Kind]:
    """One kind a name, or a single one of all nodes that can run the sweep's devices.

    A name is that of a Ray resource, or the value, the key or KEY=VALUE of a node's label, in any case.
    Raises QtoolError for a name that no node answers to, saying what the cluster offers.
    """
    able = [node for node in nodes if node.cpus >= 1]  # a head node often takes no tasks
    if not names:
        able = [node for node in able if node.gpus or not with_gpu]
        if not able:
            what = "a CPU and a GPU" if with_gpu else "a CPU"
            raise QtoolError(
                f"no node of the Ray cluster offers {what} to tasks. Start one, or leave --device out."
            )
        return [Kind(None, able)]
    found = [_kind(name, able) for name in names]
    for kind in found:
        twice = next((k for k in found if k is not kind and {*_ids(k)} & {*_ids(kind)}), None)
        if twice:
            raise QtoolError(
                f"--on {kind.name},{twice.name}: a node is of both kinds. Name kinds that share no node."
            )
    return found


def _ids(kind: Kind) -> list[str]:
    return [node.id for node in kind.nodes]


def _kind(name: str, nodes: Sequence[Node]) -> Kind:
    wanted = name.lower()
    for resource in sorted({r for node in nodes for r in node.resources if _tells(r)}):
        if resource.lower() == wanted:
            own = [node for node in nodes if node.resources.get(resource)]
            return Kind(name, own, {"resources": {resource: SHARE}})
    for key in sorted({key for node in nodes for key in node.labels}):
        for match in (lambda k, v: wanted in (v, f"{k}={v}"), lambda k, v: wanted == k):
            own = [n for n in nodes if key in n.labels and match(key.lower(), n.labels[key].lower())]
            if own:
                values = sorted({node.labels[key] for node in own})
                selector = values[0] if len(values) == 1 else f"in({','.join(values)})"
                return Kind(name, own, {"label_selector": {key: selector}})
    offers = {r for node in nodes for r in node.resources if _tells(r)}
    offers |= {value for node in nodes for key, value in node.labels.items() if key != NODE_ID}
    hint = (
        did_you_mean(wanted, {offer.lower() for offer in offers})
        or " Its nodes have neither labels nor resources of their own."
    )
    raise QtoolError(f"--on {name}: no alive node of the Ray cluster has such a resource or label.{hint}")


def _tells(resource: str) -> bool:
    return resource not in PLAIN and not resource.startswith("node:")


class Cluster:
    """The cluster this process is connected to, and the tasks that it waits for."""

    def __init__(self, address: str | None) -> None:
        """Raises QtoolError where Ray is not installed or the cluster does not answer.

        Without an address: the cluster of RAY_ADDRESS, else one that runs on this machine, else a new one.
        """
        if importlib.util.find_spec("ray") is None:
            raise QtoolError("--executor ray needs Ray: pip install 'qtool[ray]'.")
        _quiet(address)
        import logging

        import ray
        from ray.exceptions import RayError

        self.stopped, self._lock, self._waiting = Event(), Lock(), set[Any]()
        self._functions: dict[Callable[..., Any], Any] = {}
        if not ray.is_initialized():
            # Ray takes SIGTERM for itself, and the command line has its own end to it
            before = signal.getsignal(signal.SIGTERM)
            own: dict[str, Any] = {} if address else {"include_dashboard": False}
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
            except ImportError as error:  # the client is an extra of Ray's
                raise QtoolError(f"--address {address}: {error}. Try: pip install 'ray[client]'.") from None
            except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
                reason = " ".join(str(error).split())[:200]
                raise QtoolError(
                    f"cannot connect to Ray at {address or os.environ.get('RAY_ADDRESS') or 'this machine'}: {reason}."
                    " Start it with ray start --head, or give --address HOST:6379 or ray://HOST:10001."
                ) from None
            finally:
                if self._on_main_thread():
                    signal.signal(signal.SIGTERM, before)

    @staticmethod
    def _on_main_thread() -> bool:
        import threading

        return threading.current_thread() is threading.main_thread()

    def nodes(self) -> list[Node]:
        """The alive nodes, in an order that does not change from call to call."""
        import ray

        found = []
        for told in ray.nodes():
            if not told["Alive"]:
                continue
            has = told["Resources"]
            found.append(
                Node(
                    told["NodeID"],
                    told["NodeManagerAddress"],
                    has.get("CPU", 0.0),
                    has.get("GPU", 0.0),
                    has.get("memory", 0.0),
                    {name: amount for name, amount in has.items() if _tells(name)},
                    dict(told.get("Labels") or {}),
                )
            )
        return sorted(found, key=lambda node: (node.address, node.id))

    def on_node(self, node: Node) -> dict[str, Any]:
        """Options of a task that may run on this node alone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        while_alive: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Any:
        """What `function` returns, run as a Ray task; blocks meanwhile.

        Ray waits for ever for a node that no longer is: `while_alive` is asked now and then whether one could come.
        Raises Lost, OutOfMemory, Failed, Stopped, and QtoolError where the function does.
        """
        import ray
        from ray import exceptions as gone

        with self._lock:
            if self.stopped.is_set():
                raise Stopped
            # made once: each remote function is sent to the cluster and kept there
            made = self._functions.setdefault(function, ray.remote(function))
            reference = made.options(**options).remote(*arguments)
            self._waiting.add(reference)
        try:
            while while_alive and not ray.wait([reference], timeout=LOOK_S)[0]:
                if not while_alive():
                    ray.cancel(reference, force=True)
                    raise Lost("no node that could run it is alive")
            return ray.get(reference)
        except gone.TaskCancelledError:
            raise Stopped from None
        except gone.OutOfMemoryError as error:
            raise OutOfMemory(_first_line(error)) from None
        except gone.RayTaskError as error:
            if isinstance(error.cause, QtoolError):
                raise error.cause from None
            raise Failed(f"{type(error.cause).__name__}: {_first_line(error.cause)}") from None
        except gone.RayError as error:
            if self.stopped.is_set():
                raise Stopped from None
            raise Lost(_first_line(error)) from None
        finally:
            with self._lock:
                self._waiting.discard(reference)

    def is_alive(self, node: Node) -> bool:
        """Whether a node still runs tasks: asked of it, because Ray learns of a loss some seconds later."""
        from qtool import remote

        try:
            self.call(remote.ping, num_cpus=0, max_retries=0, **self.on_node(node))
        except Lost:
            return False
        return True

    def stop(self) -> None:
        """Ends the tasks that run, with their children, and those that wait."""
        import ray

        with self._lock:
            self.stopped.set()
            waiting = list(self._waiting)
        for reference in waiting:
            ray.cancel(reference, force=True)


def _first_line(error: Exception) -> str:
    """The first sentence: Ray goes on with advice on its own tools."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[0].split(". ")[0].split())[:300]


def _quiet(address: str | None) -> None:
    """Ray's switches, before its first import: they are read then. What the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # by default a task that Ray ended for memory is tried again without end
    os.environ.setdefault("RAY_task_oom_retries", "0")
    if address is None and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
