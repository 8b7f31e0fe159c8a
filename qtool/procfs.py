"""Reads the kernel's small files: what this process may use by CPU affinity and cgroup. Linux, else empty.

Every function takes the root of the file system, so that tests can hand it a tree written by hand.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/")


def usable_cpus() -> frozenset[int]:
    """Logical CPUs that any thread of this process may run on; all of them where there is no affinity."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    # OMP_PROC_BIND ties the main thread to one CPU once a parallel region has run: ask every thread.
    tasks = Path("/proc/self/task")
    usable: set[int] = set()
    for thread in [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [0]:
        with contextlib.suppress(ProcessLookupError):
            usable |= os.sched_getaffinity(thread)
    return frozenset(usable)


def cgroup(controller: str, filename: str, root: Path = ROOT) -> list[str]:
    """Contents of `filename` in this process' cgroup and every one above it, the nearest first (v1 and v2).

    https://docs.kernel.org/admin-guide/cgroup-v2.html. In a container without its own cgroup namespace the
    path is the host's and not mounted; the walk then ends at the mount, which is the container's own group.
    """
    found = []
    for path, mounted, mount in _cgroup_mounts(controller, root):
        inside = path.removeprefix(mounted.rstrip("/")) if path.startswith(mounted) else path
        folder = mount / inside.lstrip("/")
        for level in (folder, *folder.parents):
            if level.is_relative_to(mount) and (content := text(level / filename)):
                found.append(content)
    return found


def _cgroup_mounts(controller: str, root: Path) -> list[tuple[str, str, Path]]:
    """(path of this process in the hierarchy, what of the hierarchy is mounted, where), v1 or v2."""
    paths = {}
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    mounts = []
    for line in (text(root / "proc/self/mountinfo") or "").splitlines():
        where, _, kind = line.partition(" - ")
        filesystem, _, options = kind.split(" ", 2)
        name = "" if filesystem == "cgroup2" else controller
        if filesystem == "cgroup2" or (filesystem == "cgroup" and controller in options.split(",")):
            mounts.append((paths.get(name, "/"), where.split()[3], root / where.split()[4].lstrip("/")))
    return mounts


def text(path: Path) -> str | None:
    """A small system file without its last newline; None where it does not exist or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
