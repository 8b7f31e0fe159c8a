"""Host facts against other programs' answers and hand-written system files; contention against known load."""

import contextlib
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qtool import contention, host, procfs

linux_only = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads Linux' /proc")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = {
    "proc/self/cgroup": "0::/system.slice/job\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
    "proc/self/mountinfo": (
        "33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    ),
}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        (V2 | {"sys/fs/cgroup/system.slice/job/cpu.max": "150000 100000\n"}, 1.5),
        (V2 | {"sys/fs/cgroup/system.slice/job/cpu.max": "max 100000\n"}, None),
        (
            # a parent's tighter quota binds the child
            V2
            | {
                "sys/fs/cgroup/system.slice/job/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            # a container that sees the host's path, while only its own group is mounted
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n",
                "proc/self/mountinfo": (
                    "33 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
                ),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        ({}, None),
    ],
)
def test_the_cgroup_quota_in_cpus_is_the_tightest_on_the_way_up(
    tmp_path: Path, files: dict[str, str], cpus: float | None
) -> None:
    assert host.cgroup_cpus(tree(tmp_path, files)) == cpus


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("900000 100000", 2)]
)
def test_hyperthreads_count_once_and_part_of_a_cpu_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    files = {"sys/fs/cgroup/system.slice/job/cpu.max": quota}
    for cpu, core in enumerate([0, 1, 0, 1]):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{core}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "0\n"
    monkeypatch.setattr(host, "usable_cpus", lambda: frozenset(range(4)))
    assert host.physical_cores(tree(tmp_path, V2 | files)) == cores


def test_cores_outside_the_affinity_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: frozenset({0, 3, 7}))
    assert host.physical_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (V2 | {"sys/fs/cgroup/system.slice/job/memory.max": "1073741824\n"}, 2**30),
        (V1 | {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "536870912\n"}, 2**29),
    ],
)
def test_a_cgroup_memory_limit_is_the_memory(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert host.memory_bytes(tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    "files",
    [
        V2
        | {
            "sys/fs/cgroup/system.slice/job/memory.max": "1000000\n",
            "sys/fs/cgroup/system.slice/job/memory.current": "400000\n",
        },
        V1
        | {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400000\n",
        },
    ],
)
def test_what_a_cgroup_still_grants_is_what_can_be_taken(tmp_path: Path, files: dict[str, str]) -> None:
    assert host.available_bytes(tree(tmp_path, files)) == 600_000


@linux_only
def test_unlimited_memory_is_what_the_kernel_calls_memtotal(tmp_path: Path) -> None:
    unlimited = V1 | {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n"}
    first = Path("/proc/meminfo").read_text().splitlines()[0].split()
    assert first[0] == "MemTotal:"
    assert host.memory_bytes(tree(tmp_path, unlimited)) == int(first[1]) * 1024


@linux_only
def test_model_and_flags_are_those_lscpu_prints() -> None:
    if shutil.which("lscpu") is None:
        pytest.skip("lscpu is not installed")
    printed = subprocess.run(
        ["lscpu", "--json"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    rows = _flatten(json.loads(printed.stdout)["lscpu"])
    assert host.cpu_flags() == frozenset(rows["Flags:"].split())
    assert host.cpu_model() == rows["Model name:"] or host.family() == "arm"


def _flatten(rows: list[dict]) -> dict[str, str]:
    flat = {}
    for row in rows:
        flat[row["field"]] = row.get("data") or ""
        flat |= _flatten(row.get("children", []))
    return flat


def test_an_installed_version_is_what_the_package_says_of_itself() -> None:
    import numpy
    import psutil
    import yaml

    assert host.installed("numpy") == numpy.__version__
    assert host.installed("psutil") == psutil.__version__
    assert host.installed("yaml") == yaml.__version__
    assert host.installed("no_such_package_at_all") is None


def test_a_folder_of_the_same_name_is_not_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_named_like_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert host.installed("folder_named_like_a_package") is None


def test_asking_about_everything_imports_no_heavy_library() -> None:
    script = (
        "import sys; from qtool import host, memory, timing, gpu; host.fingerprint(); host.versions(); "
        "heavy = {'torch', 'transformers', 'numpy', 'onnxruntime', 'openvino', 'datasets', 'pydantic'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_fingerprint_is_the_same_in_another_process_and_its_hash_covers_every_fact() -> None:
    facts = host.fingerprint()
    script = "from qtool import host; print(host.fingerprint_hash(host.fingerprint()))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host.fingerprint_hash(facts)
    for name in facts:
        assert host.fingerprint_hash(facts | {name: "another"}) != host.fingerprint_hash(facts)


def test_the_hash_is_sha256_of_sorted_json() -> None:
    expected = hashlib.sha256(b'{"a":[1],"b":"x"}').hexdigest()[:16]
    assert host.fingerprint_hash({"b": "x", "a": [1]}) == expected


def test_a_waiting_policy_set_by_the_user_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before = host.fingerprint()
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "OMP_WAIT_POLICY" not in before["environment"]
    assert host.fingerprint()["environment"]["OMP_WAIT_POLICY"] == "passive"


def test_no_driver_means_no_gpu_and_no_error() -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has an NVIDIA GPU")
    assert host.gpus() == []
    assert host.cuda_available() is False


@pytest.mark.parametrize(("visible", "available"), [("", False), ("-1", False), ("0", True), ("1,0", True)])
def test_cuda_visible_devices_can_hide_every_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str, available: bool
) -> None:
    monkeypatch.setattr(host, "gpus", lambda: [{"name": "some GPU"}])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host.cuda_available() is available


@contextlib.contextmanager
def hub(answer: int, delay_s: float = 0.0) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(delay_s)
            self.send_response(answer)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


@pytest.mark.parametrize(("answer", "reachable"), [(200, True), (404, True), (403, False), (503, False)])
def test_a_hub_is_reachable_when_it_answers_for_itself(
    online: pytest.MonkeyPatch, answer: int, reachable: bool
) -> None:
    with hub(answer) as url:
        online.setenv("HF_ENDPOINT", url)
        found, sentence = host.hub_status()
    assert found is reachable
    assert url in sentence


def test_a_hub_that_hangs_is_given_up(online: pytest.MonkeyPatch) -> None:
    with hub(200, delay_s=1.0) as url:
        online.setenv("HF_ENDPOINT", url)
        assert host.hub_status(timeout_s=0.2)[0] is False


def test_a_closed_port_is_unreachable_and_said_so(online: pytest.MonkeyPatch) -> None:
    online.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found, sentence = host.hub_status()
    assert not found
    assert "cannot be reached" in sentence


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_asks_nobody(online: pytest.MonkeyPatch, name: str) -> None:
    online.setenv(name, "1")
    online.setattr(host, "_head", lambda *args: pytest.fail("the network was asked"))
    assert host.hub_status() == (False, f"the hub is switched off by {name}=1")


def test_an_endpoint_without_a_scheme_is_refused_by_name(online: pytest.MonkeyPatch) -> None:
    online.setenv("HF_ENDPOINT", "localhost:8080")
    assert "HF_ENDPOINT is 'localhost:8080'" in host.hub_status()[1]


def counters(at_s: float, own_s: float, busy_s: Sequence[float], **more: Any) -> contention.Snapshot:
    values: dict[str, Any] = {
        "at_s": at_s,
        "own_cpu_s": own_s,
        "busy_s": dict(enumerate(busy_s)),
        "steal_s": dict.fromkeys(range(len(busy_s)), 0.0),
        "usable": frozenset({0, 1}),
        "involuntary_switches": 0,
        "throttled_s": None,
        "oom_kills": 0,
        "load_1min": 1.0,
    }
    return contention.Snapshot(**(values | more))


@pytest.mark.parametrize(
    ("own_s", "busy_s", "ratio", "contended"),
    [
        (10.0, [5.0, 5.0], 0.0, False),  # all that ran was this process
        (10.0, [10.0, 10.0], 0.5, True),  # another one on the second CPU
        (0.0, [0.2, 0.2], 0.02, False),  # daemons
        (19.0, [10.0, 10.0], 0.05, False),  # at the limit
        (20.0, [9.9, 10.0], 0.0, False),  # ticks counted less than the process itself
    ],
)
def test_foreign_load_is_what_was_busy_and_not_ours(
    own_s: float, busy_s: list[float], ratio: float, contended: bool
) -> None:
    found = contention.between(counters(0, 0, [0, 0]), counters(10, own_s, busy_s))
    assert found["foreign_cpu_ratio"] == pytest.approx(ratio)
    assert found["contended"] is contended
    assert (found["reason"] is not None) is contended


def test_load_on_cpus_this_process_may_not_use_is_not_contention() -> None:
    found = contention.between(counters(0, 0, [0, 0, 0, 0]), counters(10, 8, [4, 4, 10, 10]))
    assert found["foreign_cpu_ratio"] == pytest.approx(0.0)


def test_ticks_of_a_short_window_are_not_contention() -> None:
    found = contention.between(counters(0, 0, [0, 0]), counters(0.1, 0.1, [0.07, 0.07]))
    assert found["foreign_cpu_ratio"] == pytest.approx(0.2)
    assert found["contended"] is False


def test_steal_throttling_switches_and_oom_kills_are_differences() -> None:
    before = counters(0, 0, [0, 0], throttled_s=2.0, involuntary_switches=100, oom_kills=3)
    after = counters(
        *(10, 10, [5, 5]),
        steal_s={0: 0.5, 1: 0.3},
        throttled_s=2.5,
        involuntary_switches=150,
        oom_kills=4,
    )
    found = contention.between(before, after)
    assert found["steal_ratio"] == pytest.approx(0.04)
    assert found["throttled_ratio"] == pytest.approx(0.05)
    assert found["involuntary_switches_per_s"] == pytest.approx(5.0)
    assert found["oom_kills"] == 1
    assert found["contended"] is True
    assert "hypervisor took 4%" in found["reason"]
    assert "quota held it back for 5%" in found["reason"]


def test_without_proc_nothing_is_claimed(tmp_path: Path) -> None:
    before = contention.snapshot(tmp_path)
    found = contention.between(before, contention.snapshot(tmp_path))
    assert found["foreign_cpu_ratio"] is None
    assert found["steal_ratio"] is None
    assert found["contended"] is False
    assert "cannot be seen" in found["reason"]


def test_a_proc_stat_that_never_moves_is_no_evidence_of_quiet() -> None:
    found = contention.between(counters(0, 0, [0, 0]), counters(10, 9.5, [0, 0]))
    assert found["foreign_cpu_ratio"] is None
    assert "cannot be seen" in found["reason"]


def test_proc_stat_counts_hundredths_of_a_second_per_cpu() -> None:
    if os.sysconf("SC_CLK_TCK") != 100:
        pytest.skip("this system's tick is not 10 ms")
    stat = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 4000 50 6 7 80 90 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 5\n"
    busy_s, steal_s = contention._cpu_times(stat)
    assert busy_s == pytest.approx({0: 1.63, 1: 0.01})
    assert steal_s == pytest.approx({0: 0.80, 1: 0.0})


@pytest.mark.parametrize(
    ("stat", "throttled_s"),
    [
        ("usage_usec 1\nnr_throttled 3\nthrottled_usec 2500000\n", 2.5),
        ("nr_periods 1\nnr_throttled 3\nthrottled_time 2500000000\n", 2.5),
        ("usage_usec 1\n", None),
    ],
)
def test_throttled_time_is_read_from_both_cgroup_versions(stat: str, throttled_s: float | None) -> None:
    assert contention._throttled(stat) == throttled_s


SPIN = "import time\nwhile time.process_time() < {cpu_s}: pass\nprint('done', flush=True)\ninput()"


@linux_only
def test_a_living_childs_cpu_time_is_our_own() -> None:
    before = contention.snapshot()
    child = subprocess.Popen(
        [sys.executable, "-c", SPIN.format(cpu_s=0.5)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    living = contention.snapshot()
    child.communicate(b"\n")
    reaped = contention.snapshot()
    assert 0.45 <= contention.between(before, living)["own_cpu_s"] <= 0.8
    assert contention.between(living, reaped)["own_cpu_s"] >= 0.0


@linux_only
def test_another_process_on_one_core_is_flagged() -> None:
    # the shell ends at once, so the spinner is nobody's descendant of ours
    spinner = (
        f"{sys.executable} -c 'import time\nwhile time.process_time() < 20: pass' >/dev/null 2>&1 & echo $!"
    )
    started = subprocess.run(["sh", "-c", spinner], stdout=subprocess.PIPE, text=True, check=True)
    try:
        before = contention.snapshot()
        time.sleep(1.0)
        found = contention.between(before, contention.snapshot())
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert found["contended"] is True
    assert found["foreign_cpu_ratio"] > 0.5 / len(procfs.usable_cpus())
    assert "other processes" in found["reason"]
