"""What Accelerate's hooks really do with a model: where each weight is, and what every pass brings over.

Offloaded weights are meta tensors between two calls; a hook's `weights_map` says where they are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import topology

IO = Path("/proc/self/io")


@dataclass(frozen=True)
class Kept:
    """A weight that a hook brings over at every call of `module`. `key` is the same for tied weights."""

    module: Any
    tensor: Any
    place: str
    key: str


def offloaded(model: Any) -> Iterator[Kept]:
    """Every parameter and buffer that a hook brings over, once for each module that has it."""
    for module in model.modules():
        for hook in hooks(module):
            if getattr(hook, "offload", False):
                yield from _kept(module, hook)


def _kept(module: Any, hook: Any) -> Iterator[Kept]:
    from accelerate.utils import named_module_tensors

    tensors = named_module_tensors(
        module,
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    )
    for name, tensor in tensors:
        held, key = hook.weights_map, name
        while hasattr(held, "prefix"):
            key, held = f"{held.prefix}{key}", held.dataset
        in_memory = getattr(held, "state_dict", held)
        if key in in_memory:
            yield Kept(module, tensor, "cpu", f"memory {in_memory[key].data_ptr()}")
        else:
            file = held.index[key]
            yield Kept(
                module, tensor, "disk", f"{file.get('safetensors_file')} {file.get('weight_name', key)}"
            )


def hooks(module: Any) -> Iterator[Any]:
    """Accelerate's hooks of a module, taken out of a sequence of them."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def place(device: Any) -> str | int:
    """cpu, disk, or the number of a GPU, as a map of Accelerate names it in one of its ways."""
    if isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    return kind if kind in ("cpu", "disk", "meta") else int(number or 0)


def found(model: Any, run: Callable[[], Any], parts: Callable[[Any], Iterator[Any]]) -> dict[str, Any]:
    """Where the weights are, and what one pass (`run`) moves: the values of a measurement's `placement`.

    `device_map`: modules with weights of their own by place. Bytes, tied weights once: `resident_bytes` on the
    devices that compute, `cpu_bytes` and `disk_bytes` offloaded. `moved_bytes`: what the hooks bring over in one
    pass, as often as they do; activations that cross between GPUs are not in it. `storage_read_bytes`: what the
    storage delivered during that pass, so that the page cache is told from the disk; None where the kernel does
    not count it. `parts` gives the plain tensors of one.
    """
    kept = list(offloaded(model))
    away = {id(each.tensor): each for each in kept}
    modules: Counter[str] = Counter()
    sizes: dict[Any, tuple[str, int]] = {}
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in own:
            where = away.get(id(tensor))
            for index, part in enumerate(parts(tensor)):
                key = (where.key, index) if where else part.data_ptr()
                sizes[key] = (where.place if where else "resident", part.numel() * part.element_size())
        modules.update(_where(away, weight) for weight in list(module.parameters(recurse=False))[:1])
    total: Counter[str] = Counter()
    for kind, size in sizes.values():
        total[kind] += size
    calls, read = _watch({id(each.module): each.module for each in kept}, run)
    moved = sum(calls[id(each.module)] * _size(each.tensor, parts) for each in kept)
    return {
        "device_map": dict(modules),
        "resident_bytes": total["resident"],
        "cpu_bytes": total["cpu"],
        "disk_bytes": total["disk"],
        "moved_bytes": moved,
        "storage_read_bytes": read,
    } | _gpus(modules)


def _where(away: dict[int, Kept], tensor: Any) -> str:
    if id(tensor) in away:
        return away[id(tensor)].place
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def _size(tensor: Any, parts: Callable[[Any], Iterator[Any]]) -> int:
    return sum(part.numel() * part.element_size() for part in parts(tensor))


def _watch(modules: dict[int, Any], run: Callable[[], Any]) -> tuple[Counter[int], int | None]:
    """How often each module is called in one pass, and bytes that the storage delivered meanwhile."""
    calls: Counter[int] = Counter()
    handles = []
    for number, module in modules.items():

        def count(module: Any, inputs: Any, number: int = number) -> None:
            calls[number] += 1

        handles.append(module.register_forward_pre_hook(count))
    before = storage_read_bytes()
    try:
        if modules:  # a resident model moves nothing: there is nothing to count
            run()
    finally:
        for handle in handles:
            handle.remove()
    after = storage_read_bytes()
    return calls, None if before is None or after is None else after - before


def storage_read_bytes(path: Path = IO) -> int | None:
    """Bytes this process had fetched from storage, page faults included; None where the kernel does not count.

    `read_bytes` of https://man7.org/linux/man-pages/man5/proc_pid_io.5.html.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _gpus(modules: Counter[str]) -> dict[str, Any]:
    """The GPUs as NVML numbers them, where there are several: CUDA may number them differently."""
    names = [name for name in modules if name.startswith("cuda:")]
    if len(names) < 2:
        return {}
    import torch

    uuids = [f"GPU-{torch.cuda.get_device_properties(name).uuid}" for name in names]
    return {"gpus": topology.numbers(uuids)}
