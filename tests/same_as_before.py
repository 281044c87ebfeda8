"""Run an earlier commit and this tree side by side and compare every number they compute.

    python tests/same_as_before.py               # against 0ee4e74, in a temporary checkout
    python tests/same_as_before.py --before DIR --only kernels,serving

Compared: trained weights and checkpoints after 50 steps of every shipped recipe, of every schedule
with row-wise tables, on 1 and 2 ranks, for each kind of table; outputs and gradients of operators;
scores served over HTTP; and that this tree goes on exactly from the earlier tree's checkpoints.
Touch this when a recipe, a schedule or an operator is added that the earlier commit has as well.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COMMIT = "0ee4e74"
ROOT = Path(__file__).resolve().parent.parent
PROBE = ROOT / "tests" / "support" / "same_as_before_kernels.py"
COMMAND = str(ROOT / "tests" / "support" / "seeded_slipstream.py")
SCHEDULES = ("synchronous", "dual_buffer", "frozen_window", "nested", "semi_async", "six_stage")
ROWWISE = ("rowwise_adam", "rowwise_adagrad")
STEPS = 50
SMALL = {"sampler.max_len": 40, "sampler.batch_size": 8, "train.threads": 1, "train.epochs": 1000}
SMALL |= {"train.evaluate_every": 0, "train.tensorboard": False, "train.checkpoint_every": 25}


class Tree:
    """One checkout: its sources, its commands, and where its runs go."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        self.directory, self.scratch = directory, scratch
        self.recipes = directory / "src" / "slipstream" / "recipes"
        self.optimizer_key = (
            "rule" if (directory / "src/slipstream/commands").exists() else "optimizer"
        )
        scratch.mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        paths = os.pathsep.join([str(self.directory / "src"), str(self.directory)])
        return {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": loopback,
        }

    def run(self, *command: str, seconds: float = 900) -> str:
        """What a command prints; its error where it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            env=self.environment,
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise SystemExit(f"{self.directory}: {' '.join(command)} failed\n{done.stderr[-4000:]}")
        return done.stdout

    def recipe(self, name: str, values: dict[str, Any]) -> Path:
        """A shipped recipe cut down for a small store, as a file."""
        import yaml

        content = yaml.safe_load((self.recipes / f"{name}.yaml").read_text())
        for key, value in {**SMALL, **values}.items():
            section, _, field = key.partition(".")
            field = self.optimizer_key if key == "tables.optimizer" else field
            content.setdefault(section, {})[field] = value
        content.pop("data", None)
        if content["task"] == "ranking":
            content["tasks"] = {name: {"column": name} for name in ("click", "like")}
            content |= {"item_features": ["topic"], "user_features": []}
        path = self.scratch / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def train(
        self, store: Path, name: str, values: dict[str, Any], *, ranks: int, out: Path, steps: int
    ) -> None:
        """`slipstream train`, under torchrun where there are several ranks."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        train = [COMMAND, "train", str(self.recipe(name, values)), f"data={store}"]
        self.run(*(launcher if ranks > 1 else []), *train, f"max_steps={steps}", "--out", str(out))


def digest_of_run(run: Path) -> dict[str, str]:
    """Digest of each file of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    found = {}
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        if path.name == "state.json":
            content = json.dumps(json.loads(content), sort_keys=True).encode()
        found[stable_name(path.name)] = hashlib.sha256(content).hexdigest()
    return found


def stable_name(name: str) -> str:
    """Rows a stale schedule remembers: a file that was called `moved-*` before."""
    return re.sub(r"^(moved|stale-rows)-", "stale-rows-", name)


def training_cases() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """Name, recipe, values laid over it, ranks."""
    recipes = sorted(path.stem for path in (ROOT / "src/slipstream/recipes").glob("*.yaml"))
    before = ("demo", "kuairand-pure-ranking", "ml-1m-fuxi", "ml-1m-hstu", "ml-1m-hstu-full")
    for name in (name for name in recipes if name in (*before, "ml-1m-sasrec")):
        # Each tree trains its own shipped recipe; the optimizer of 0ee4e74 where they have changed.
        shipped = "rowwise_adagrad" if name == "kuairand-pure-ranking" else "adamw"
        for ranks in (1, 2):
            yield f"{name}, ranks {ranks}", name, {"tables.optimizer": shipped}, ranks
    for schedule in SCHEDULES:
        for optimizer in ROWWISE:
            values = {"tables.optimizer": optimizer, "train.schedule": schedule}
            yield f"{schedule}, {optimizer}, 1 rank", "ml-1m-hstu", values, 1
        for mesh in ("1x2", "2x1"):
            values = {"tables.optimizer": "rowwise_adam", "train.schedule": schedule}
            values["train.mesh"] = mesh
            yield f"{schedule}, rowwise_adam, mesh {mesh}", "ml-1m-hstu", values, 2
    for tier in ("disk", "hashed"):
        values = {"tables.optimizer": "rowwise_adam", "tables.tier": tier}
        yield f"{tier} tables, 1 rank", "ml-1m-fuxi", values, 1
        yield f"{tier} tables, 2 ranks", "ml-1m-fuxi", values, 2


def compare_training(before: Tree, after: Tree, store: Path, report: "Report") -> None:
    """The same 50 steps by both, then 10 more by this tree from the earlier tree's checkpoint."""
    for number, (name, recipe, values, ranks) in enumerate(training_cases()):
        runs = [tree.scratch / f"run-{number}" for tree in (before, after)]
        for tree, run in zip((before, after), runs, strict=True):
            tree.train(store, recipe, with_places(values, run), ranks=ranks, out=run, steps=STEPS)
        report.add(f"training: {name}", *(digest_of_run(run) for run in runs))
        if values.get("train.schedule") in ("semi_async", "nested") or "tables.tier" in values:
            taken_over = after.scratch / f"resumed-{number}"
            shutil.copytree(runs[0], taken_over)
            for tree, run in ((before, runs[0]), (after, taken_over)):
                values_there = with_places(values, run)
                tree.train(store, recipe, values_there, ranks=ranks, out=run, steps=STEPS + 10)
            report.add(
                f"resumed from the earlier tree's checkpoint: {name}",
                digest_of_run(runs[0]),
                digest_of_run(taken_over),
            )


def with_places(values: dict[str, Any], run: Path) -> dict[str, Any]:
    """Tables on disk lie beside the run."""
    if values.get("tables.tier") != "disk":
        return values
    return {**values, "tables.directory": str(run.with_name(run.name + "-tables"))}


def compare_kernels(before: Tree, after: Tree, report: "Report") -> None:
    """Outputs and gradients of every operator."""
    found = [json.loads(tree.run(str(PROBE)).splitlines()[-1]) for tree in (before, after)]
    for operator in found[0]:
        report.add(f"kernels: {operator}", found[0][operator], found[1].get(operator))


def compare_stores(before: Tree, after: Tree, scratch: Path, report: "Report") -> Path:
    """A store prepared by each; the earlier tree's is the one both train on."""
    arguments = ["-m", "slipstream", "data", "prepare", "synthetic", "--users", "60", "--items"]
    for tree in (before, after):
        tree.run(*arguments, "80", "--seed", "3", "--out", str(tree.scratch / "store"))
    digests = [
        json.loads((tree.scratch / "store" / "store.json").read_text())["digest"]
        for tree in (before, after)
    ]
    report.add("data: a prepared store", *digests)
    return before.scratch / "store"


def compare_serving(before: Tree, after: Tree, store: Path, report: "Report") -> None:
    """Bundles of the earlier tree's models, and what both serve from them over HTTP."""
    for recipe in ("ml-1m-hstu", "kuairand-pure-ranking"):
        run, bundle = before.scratch / f"served-{recipe}", before.scratch / f"bundle-{recipe}"
        optimizer = {"tables.optimizer": "rowwise_adagrad"}
        before.train(store, recipe, optimizer, ranks=1, out=run, steps=STEPS)
        before.run("-m", "slipstream", "export", str(run), "--out", str(bundle))
        again = after.scratch / f"bundle-{recipe}"
        after.run("-m", "slipstream", "export", str(run), "--out", str(again))
        versions = [json.loads((b / "bundle.json").read_text())["version"] for b in (bundle, again)]
        report.add(f"serving: version of the bundle, {recipe}", *versions)
        report.add(
            f"serving: scores, {recipe}",
            *(serve_and_ask(tree, bundle, recipe == "ml-1m-hstu") for tree in (before, after)),
        )


@contextlib.contextmanager
def served(tree: Tree, bundle: Path) -> Iterator[str]:
    """The URL of `slipstream serve`."""
    command = [sys.executable, "-u", "-m", "slipstream", "serve", str(bundle), "--port", "0"]
    command += ["--history", f"sqlite:{tree.scratch / bundle.name}.db"]
    process = subprocess.Popen(
        command, env=tree.environment, cwd=tree.scratch, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = None
        for line in process.stdout:
            url = url or next(iter(re.findall(r"http://[\d.:]+", line)), None)
            if "ready" in line or url is not None:
                break
        assert url is not None, "serve printed no address"
        wait_until_ready(url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def wait_until_ready(url: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} is not ready after {seconds:.0f} s")


def serve_and_ask(tree: Tree, bundle: Path, retrieval: bool) -> Any:
    """Scores in line, after a pre-inference, and of a whole recommendation."""
    import pyarrow as pa

    with pa.memory_map(str(bundle / "items.arrow")) as source:
        items = pa.ipc.open_file(source).read_all()["id"].to_pylist()
    answers = []
    with served(tree, bundle) as url:
        for length in (3, 20, 38):
            behaviours = [items[(7 * place) % len(items)] for place in range(length)]
            history = {"items": behaviours, "timestamps": [1000 * place for place in range(length)]}
            if not retrieval:
                history["actions"] = {
                    name: [float(place % 2) for place in range(length)]
                    for name in ("click", "like")
                }
            user, candidates = f"user {length}", items[:10]
            request = {"user": user, "history": history, "candidates": candidates}
            answers.append(ask(url, "rank", request)["scores"])
            ask(url, "preinfer", {"user": user, "history": history})
            answers.append(ask(url, "rank", request)["scores"])
            if retrieval:
                found = ask(url, "recommend", {"user": user, "history": history, "count": 5})
                answers.append([found["items"], found["scores"]])
    return answers


def ask(url: str, what: str, request: dict[str, Any]) -> Any:
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json", "X-Deadline-Ms": "30000"}
    posted = urllib.request.Request(f"{url}/v1/{what}", body, headers)
    with urllib.request.urlopen(posted, timeout=60) as answer:
        return json.load(answer)


class Report:
    """What was compared; prints as it goes."""

    def __init__(self) -> None:
        self.equal = 0
        self.different: list[str] = []

    def add(self, name: str, before: Any, after: Any) -> None:
        same = before == after
        self.equal += same
        print(f"{'same     ' if same else 'DIFFERENT'} {name}", flush=True)
        if not same:
            self.different.append(name)
            print(f"    before: {before}\n    after:  {after}"[:2000], flush=True)


@contextlib.contextmanager
def earlier_tree(given: Path | None, scratch: Path) -> Iterator[Path]:
    """The earlier commit with its kernels built: as given, or checked out for this comparison."""
    if given is not None:
        yield given.resolve()
        return
    place = scratch / "checkout"
    subprocess.run(["git", "worktree", "add", "--detach", str(place), COMMIT], cwd=ROOT, check=True)
    try:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=place, check=True)
        yield place
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def main() -> int:
    """Compare and say how many comparisons differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help=f"a checkout of {COMMIT} with built kernels")
    parser.add_argument("--only", default="kernels,training,serving", help="parts to compare")
    options = parser.parse_args()
    report, parts = Report(), options.only.split(",")
    with tempfile.TemporaryDirectory(prefix="same-as-before-") as folder:
        scratch = Path(folder)
        with earlier_tree(options.before, scratch) as directory:
            before, after = Tree(directory, scratch / "before"), Tree(ROOT, scratch / "after")
            if "kernels" in parts:
                compare_kernels(before, after, report)
            store = compare_stores(before, after, scratch, report)
            compare: dict[str, Callable[[Tree, Tree, Path, Report], None]] = {
                "training": compare_training,
                "serving": compare_serving,
            }
            for part in compare:
                if part in parts:
                    compare[part](before, after, store, report)
    print(f"{report.equal} the same, {len(report.different)} different")
    return 1 if report.different else 0


if __name__ == "__main__":
    sys.exit(main())
