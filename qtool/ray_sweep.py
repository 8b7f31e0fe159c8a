"""A sweep over the nodes of a Ray cluster: the stages of `sweep`, each run where Ray places it.

Builds and scores run on any node of their kind. What is timed of one model on one kind of node runs on one node,
stage after stage, each asking for all of the node's CPUs, so that nothing else of the sweep can run beside it. When
that node is lost, its trials begin again with the first round on another node of the kind.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from qtool import host, remote, store
from qtool.cluster import Cluster, Failed, Kind, Lost, Node, OutOfMemory, Stopped, kinds
from qtool.core import QtoolError, Recipe, Trial, cache_dir
from qtool.isolate import Outcome
from qtool.plan import Options, Plan, WhyNot, host_name, now
from qtool.progress import Say
from qtool.recipes import Why
from qtool.shared_store import SharedStore, hashes, name_of
from qtool.sweep import Sweep

RETRIES = 3
"""How often Ray runs a build or a score again elsewhere when the node it ran on is lost."""
MOST_AT_ONCE = 16
"""Builds or scores of one kind that are handed to Ray at a time; it runs as many as its nodes can take."""


class NodeGone(Exception):
    """The node whose trials are timed was lost."""


class Reach:
    """The cluster as one sweep uses it: its kinds of node, what they are, and which node of each is timed."""

    def __init__(self, options: Options) -> None:
        """Raises QtoolError for a cluster, a kind or a node that cannot be used."""
        self.shared = options.shared
        if self.shared and "://" not in self.shared:
            self.shared = str(Path(self.shared).absolute())
        self.store = SharedStore(self.shared) if self.shared else None
        self.cluster = Cluster(options.address)
        self.with_gpu = "cuda" in options.devices
        self.kinds = {kind.name: kind for kind in kinds(options.on, self.cluster.nodes(), self.with_gpu)}
        self.told: dict[str, dict[str, Any]] = {}
        self.node: dict[str | None, Node] = {}
        for kind in self.kinds.values():
            self._ask(kind.nodes)

    @property
    def threads(self) -> int:
        """Physical cores of the smallest node: every runtime has as many threads everywhere."""
        return min(told["fingerprint"]["physical_cores"] for told in self.told.values())

    def _ask(self, nodes: Sequence[Node]) -> None:
        """What each node is. Raises QtoolError where one has other libraries or not this machine's cache."""
        marker = cache_dir() / f".seen-by-nodes-{secrets.token_hex(8)}"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        try:
            with ThreadPoolExecutor(min(MOST_AT_ONCE, len(nodes))) as pool:
                told = list(
                    pool.map(
                        lambda node: self._on(node, remote.describe, str(marker.resolve()), self.shared),
                        nodes,
                    )
                )
        except Lost as error:
            raise QtoolError(
                f"a node of the cluster was lost while it was asked: {error}. Try again."
            ) from None
        finally:
            marker.unlink()
        own = host.versions()
        for node, answer in zip(nodes, told, strict=True):
            for name in sorted({*own, *answer["versions"]}):
                here, there = (found.get(name, "none") for found in (own, answer["versions"]))
                if here != there:
                    raise QtoolError(
                        f"node {node.address} has {name} {there}, this machine {here}: no statistic pools versions."
                        " Install the same on every node."
                    )
            if not answer["sees"]:
                raise QtoolError(
                    f"node {node.address} does not see the cache {cache_dir()} of this machine."
                    " Give --shared URL: a folder or s3://... that all machines reach."
                )
            self.told[node.id] = answer

    def _on(self, node: Node, function: Callable[..., Any], *arguments: Any) -> Any:
        gpus = {"num_gpus": node.gpus} if self.with_gpu else {}  # else Ray hides them from the task
        return self.cluster.call(
            function, *arguments, num_cpus=0, max_retries=0, **gpus, **self.cluster.on_node(node)
        )

    def places(
        self, chosen: Mapping[str, Recipe], probed: Mapping[str, Any], baseline: str
    ) -> list[tuple[str | None, WhyNot]]:
        """Each kind with why its first node cannot run a recipe.

        Raises QtoolError for a kind on which the baseline runs on no device.
        """
        devices = ["cpu", *(["cuda"] if self.with_gpu else [])]
        found: list[tuple[str | None, WhyNot]] = []
        for kind in self.kinds.values():
            refused = self._on(
                kind.nodes[0],
                remote.refusals,
                [recipe.model_dump() for recipe in chosen.values()],
                devices,
                probed["data"]["calibration_rows"] > 0,
                probed["model"]["source"],
            )
            whys = [refused.get((baseline, device)) for device in devices]
            if all(whys):
                reason, fix = next(why for why in whys if why)
                raise QtoolError(f"the baseline {baseline} cannot run on a {kind}: {reason}. Try: {fix}.")
            found.append((kind.name, _why_not(refused)))
        return found

    def hosts(self, options: Options) -> dict[str | None, dict[str, Any]]:
        """By kind the node that is timed: its fingerprint, its hash, and how many nodes were begun with.

        A resumed sweep goes on with a node of the same fingerprint, else it begins again on another.
        """
        before = store.read_run(options.out).get("hosts") or {} if options.resume and options.out else {}
        found: dict[str | None, dict[str, Any]] = {}
        for name, kind in self.kinds.items():
            old = next((facts for facts in before.values() if facts.get("kind") == name), None)
            same = [n for n in kind.nodes if old and self._hash(n) == old["hash"]]
            nodes = same or kind.nodes
            attempt = 1 if old is None else old["attempt"] + (not same)
            found[name] = self.take(name, nodes[options.turn % len(nodes)], attempt)
        return found

    def take(self, kind: str | None, node: Node, attempt: int) -> dict[str, Any]:
        """Make `node` the one that is timed of its kind; what `run.json` tells of it."""
        self.node[kind] = node
        return {**self.told[node.id]["fingerprint"], "kind": kind, "attempt": attempt}

    def _hash(self, node: Node) -> str:
        return self.told[node.id]["fingerprint"]["hash"]

    def another(self, kind: str | None, lost: set[str]) -> Node | None:
        """An alive node of the kind that is not among the lost, asked what it is; None where there is none."""
        try:
            now_alive = kinds([kind] if kind else [], self.cluster.nodes(), self.with_gpu)[0]
        except QtoolError:  # none of that name is left
            return None
        for node in now_alive.nodes:
            if node.id in lost:
                continue
            try:
                if node.id not in self.told:
                    self._ask([node])
                if self.cluster.is_alive(node):
                    return node
            except QtoolError:  # a node that joined with other libraries is none to go on with
                continue
        return None

    def sweep(self, plan: Plan, out: Path, writer: store.Writer) -> RaySweep:
        """What `carry_out` runs."""
        return RaySweep(self, plan, out, writer)


def _why_not(refused: Mapping[tuple[str, str], tuple[str, str]]) -> WhyNot:
    def why_not(recipe: Recipe, device: str, **_: Any) -> Why | None:
        found = refused.get((recipe.name, device))
        return Why(*found) if found else None

    return why_not


class RaySweep:
    """All kinds of a sweep side by side, into one run folder, written by this process alone."""

    def __init__(self, reach: Reach, plan: Plan, out: Path, writer: store.Writer) -> None:
        self.reach, self.plan, self.out, self.say = reach, plan, out, Say()
        self.recording, building = Lock(), {key: Lock() for key in plan.artifacts.values()}
        self.record()
        self.model = ""
        self.sweeps = [_OfKind(self, kind, writer, building) for kind in reach.kinds.values()]

    def record(self, lost: Mapping[str, Any] | None = None) -> None:
        """Write the hosts that are timed now, and one that was lost, into `run.json`."""
        with self.recording:
            run = store.read_run(self.out)
            hosts = {host_name(facts): facts for facts in self.plan.hosts.values()}
            if run.get("hosts") == hosts and lost is None:
                return
            run["hosts"], run["host"] = hosts, next(iter(hosts.values()))
            for entry in run["plan"]:
                entry["host"] = host_name(self.plan.hosts[entry["kind"]])
            if lost:
                run["lost"] = [*(run.get("lost") or []), dict(lost)]
            store.write_json(self.out / "run.json", run)

    def go(self) -> None:
        """Raises KeyboardInterrupt when it was stopped, after every task has ended."""
        self._share()
        with ThreadPoolExecutor(len(self.sweeps)) as pool:
            running = [pool.submit(each.go) for each in self.sweeps]
            try:
                for done in wait(running, return_when=FIRST_EXCEPTION).done:
                    done.result()
            except Stopped:
                self.reach.cluster.stop()
                raise KeyboardInterrupt from None
            except BaseException:
                self.reach.cluster.stop()
                raise

    def _share(self) -> None:
        """Put the prepared data and the model where the nodes find them."""
        if self.reach.store is None:
            return
        folder = Path(self.plan.probed["model"]["folder"])
        self.model = name_of(hashes(folder))
        self.reach.store.put("models", self.model, folder)
        self.reach.store.put("data", self.plan.data_dir.name, self.plan.data_dir)


class _OfKind(Sweep):
    """The stages of the trials of one kind of node."""

    def __init__(self, whole: RaySweep, kind: Kind, writer: store.Writer, building: dict[str, Lock]) -> None:
        trials = [trial for trial in whole.plan.trials if trial.kind == kind.name]
        super().__init__(replace(whole.plan, trials=trials), whole.out, writer)
        self.sweep, self.reach, self.kind, self.building = whole, whole.reach, kind, building
        self.at_once = max(1, min(MOST_AT_ONCE, int(sum(node.cpus for node in kind.nodes))))
        self.lost: set[str] = set()
        self._stamp()

    def _stamp(self) -> None:
        facts = self.plan.hosts[self.kind.name]
        self.host_hash = facts["hash"]
        self.stamp = {"attempt": facts["attempt"]} if facts["attempt"] > 1 else {}

    def go(self) -> None:
        self._make()
        if not any(trial.recipe == self.plan.baseline for trial in self.plan.runnable):
            return
        while True:
            dead = set(self.dead)
            try:
                self._time()
                return
            except NodeGone as gone:
                if not self._take_over(str(gone)):
                    self._give_up(str(gone))
                    return
                self.dead = dead

    def _take_over(self, cause: str) -> bool:
        """Begin again on another node of the kind; False where there is none."""
        name, old = self.kind.name, self.plan.hosts[self.kind.name]
        self.lost.add(self.reach.node[name].id)
        node = self.reach.another(name, self.lost)
        if node is None:
            return False
        self.plan.hosts[name] = self.reach.take(name, node, old["attempt"] + 1)
        self.sweep.record({"host": host_name(old), "cause": cause, "at": now()})
        self.whole = {k: line for k, line in self.whole.items() if line.stage not in ("measure", "harness")}
        self._stamp()
        self.say(f"{cause}; its trials begin again on node {node.address}")
        return True

    def _give_up(self, cause: str) -> None:
        """A row with the cause for every trial that lacks a round."""
        told = f"{cause}, and no other {self.kind} is alive"
        self.say(told)
        run = store.read_run(self.out)
        done = {
            key
            for key, line in store.current(store.latest(store.read(self.out)), run).items()
            if line.status == "ok"
        }
        for trial in self.plan.runnable:
            rounds = range(1, self.plan.options.rounds + 1)
            missing = next((n for n in rounds if (trial.id, "measure", n) not in done), None)
            if trial.id not in self.dead and missing:
                outcome = Outcome("failed", {}, told, "start such a node, then --resume")
                self._append(trial.id, trial, "measure", missing, outcome)

    def _stop(self) -> None:
        self.reach.cluster.stop()

    def _still_there(self, trial: Trial, stage: str, key: str) -> bool:
        if stage == "build" and self.reach.store:
            return self.reach.store.has("artifacts", self.plan.artifacts[trial.recipe])
        return super()._still_there(trial, stage, key)

    def _label(self, trial: Trial) -> str:
        """Of a file that belongs to a recipe on a device: the kind too where the run has several."""
        several = len(self.reach.kinds) > 1
        kind = re.sub(r"[^\w.-]", "-", self.kind.name or "") if several else ""
        return "-".join(filter(None, (super()._label(trial), kind)))

    def _build_alone(self, trial: Trial) -> Outcome:
        return self._child(trial, "build", {})

    def _child(self, trial: Trial, stage: str, spec: dict[str, Any], number: int | None = None) -> Outcome:
        timed = stage in ("measure", "harness")
        job = remote.Job(
            stage,
            self._spec(trial) | spec,
            self.plan.options.threads,
            self.plan.options.timeout_s,
            self.reach.shared,
            self.plan.data_dir.name,
            self.sweep.model,
            self.plan.artifacts[trial.recipe],
            quiet=not timed,
        )
        try:
            answer = self._alone(job, trial) if timed else self._anywhere(job, trial)
        except OutOfMemory as error:
            return Outcome("oom", {}, str(error), "use a smaller batch or a node with more memory")
        except Failed as error:
            return Outcome(
                "failed", {}, f"on the node: {error}", "see that Ray's node has room, then --resume"
            )
        except Lost as error:
            return Outcome("failed", {}, f"Ray lost its worker: {error}", "then --resume")
        log = self._log(trial, stage, number)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(answer["log"])
        if answer["predictions"] is not None:
            path = self._predictions(trial)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(answer["predictions"])
        return Outcome(answer["status"], answer["values"], answer["error"], answer["next_step"])

    def _alone(self, job: remote.Job, trial: Trial) -> dict[str, Any]:
        """On the timed node, with all that Ray may give out there. Raises NodeGone where it is lost."""
        node, cluster = self.reach.node[self.kind.name], self.reach.cluster
        gpus = {"num_gpus": node.gpus} if trial.device == "cuda" else {}
        try:
            return cluster.call(
                remote.run, job, num_cpus=node.cpus, max_retries=0, **gpus, **cluster.on_node(node)
            )
        except Lost as error:
            if cluster.is_alive(node):
                raise
            raise NodeGone(f"node {node.address} was lost ({error})") from None

    def _anywhere(self, job: remote.Job, trial: Trial) -> dict[str, Any]:
        """On a node of the kind that Ray chooses."""
        cpus = 1.0
        if job.stage == "score":
            cpus = float(min(job.threads, *(node.cpus for node in self.kind.nodes)))
        memory = min(self.plan.build_bytes, *(int(node.memory_bytes) for node in self.kind.nodes))
        gpus = {"num_gpus": 1} if job.stage == "score" and trial.device == "cuda" else {}
        return self.reach.cluster.call(
            remote.run,
            job,
            while_alive=lambda: bool(self._left()),
            num_cpus=cpus,
            memory=memory,
            max_retries=RETRIES,
            **gpus,
            **self.kind.options,
        )

    def _left(self) -> list[Node]:
        own = {node.id for node in self.kind.nodes}
        return [node for node in self.reach.cluster.nodes() if node.id in own]
