"""An instance in a process of its own, driven by short lines over a Unix socket.

It replaces the network in the serving benchmark. Lines name users and pages; both sides know the
histories (trace.py), so that serving is measured, not parsing. Monotonic time is the machine's, so
a deadline means the same on both sides. Touch this when an instance is driven in another way.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.trace import Histories
from slipstream.errors import SlipstreamError
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig

_CHECKED = 12  # answers kept to be compared with the full pass


class _Worker:
    """One process: an instance, replaced whenever a variant needs another."""

    def __init__(self, bundle: str, candidates: int, first_id: int, num_items: int) -> None:
        self.bundle, self.candidates, self.first_id, self.num_items = (
            bundle,
            candidates,
            first_id,
            num_items,
        )
        self.instance: Instance | None = None
        self.measured: dict[str, Any] | None = None
        self.histories: Histories | None = None
        self.kept: list[tuple[int, int, dict[str, np.ndarray]]] = []

    def configure(self, config: InstanceConfig, length: int) -> dict[str, Any]:
        """Make a fresh instance; the machine is measured once."""
        self.close()
        self.instance = Instance(
            self.bundle, config, None if self.measured is None else CostModel.of(self.measured)
        )
        self.measured = self.measured or self.instance.cost.measured()
        engine = self.instance.engine
        self.histories = Histories(
            length, self.first_id, self.num_items, engine.tasks, engine.max_len
        )
        self.kept.clear()
        tokens = engine.cached_tokens(length)
        return {
            "inline_ms": 1e3 * self.instance.cost.pass_seconds(tokens + self.candidates, 0),
            "hit_ms": 1e3 * self.instance.cost.pass_seconds(8 + self.candidates, tokens),
            "megabytes": engine.prefix_bytes(length) / 1e6,
            "chunk_tokens": self.instance.cost.chunk_for(tokens),
            "max_len": engine.max_len,
        }

    async def serve(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one line with one line."""
        if message["op"] == "configure":
            return self.configure(_config(message["config"]), message["length"])
        assert self.instance is not None and self.histories is not None
        if message["op"] == "inline":
            return {"inline_ms": await self._inline_ms(message["length"])}
        if message["op"] == "stats":
            return self.instance.stats()
        if message["op"] == "score_diff":
            return {"score_diff": self._score_diff()}
        user, page = message["user"], message["page"]
        history = self.histories.of(user, page)
        if message["op"] == "preinfer":
            admission = await self.instance.preinfer(
                str(user), history, rank_in=message["rank_at"] - time.monotonic()
            )
            return {
                "admitted": admission.admitted,
                "reason": admission.reason,
                "backlog": self.instance.backlog,
            }
        items = self.histories.candidates(user, page, self.candidates)
        try:
            answer = await self.instance.rank(
                str(user), history, items, deadline=message["deadline"]
            )
        except SlipstreamError as error:
            return {"error": getattr(error, "reason", type(error).__name__)}
        if len(self.kept) < _CHECKED or np.random.random() < 0.02:
            self.kept = [*self.kept[-_CHECKED + 1 :], (user, page, answer.scores)]
        return {"hit": answer.hit, "backlog": self.instance.backlog}

    async def _inline_ms(self, length: int, repeats: int = 7) -> float:
        """Time in-line ranking of one history at intervals, and return the median."""
        assert self.instance is not None
        engine = self.instance.engine
        histories = Histories(length, self.first_id, self.num_items, engine.tasks, engine.max_len)
        user = next(user for user in range(1000) if histories.length_of(user, 0) == length)
        taken = []
        for _ in range(repeats):
            await asyncio.sleep(0.02)
            history, candidates = (
                histories.of(user, 0),
                histories.candidates(user, 0, self.candidates),
            )
            begin = time.perf_counter()
            await self.instance.rank(
                str(user), history, candidates, deadline=time.monotonic() + 60.0
            )
            taken.append(time.perf_counter() - begin)
        return 1e3 * float(np.median(taken))

    def _score_diff(self) -> float:
        """Return the largest difference between an answer and the full pass without cache."""
        assert self.instance is not None and self.histories is not None
        largest = 0.0
        for user, page, scores in self.kept:
            full = self.instance.engine.rank(
                None,
                self.histories.of(user, page),
                self.histories.candidates(user, page, self.candidates),
            )
            largest = max(
                largest, *(float(np.abs(full[task] - scores[task]).max()) for task in scores)
            )
        return largest

    def close(self) -> None:
        if self.instance is not None:
            self.instance.close()


def _config(fields: dict[str, Any]) -> InstanceConfig:
    from slipstream.serving.instance.trigger import TriggerConfig

    return InstanceConfig(**{**fields, "trigger": TriggerConfig(**fields.get("trigger", {}))})


def _main(path: str, *arguments: Any) -> None:
    sys.setswitchinterval(0.0005)  # the loop must not wait for the compute thread's bytecode
    asyncio.run(_serve(path, _Worker(*arguments)))


async def _serve(path: str, worker: _Worker) -> None:
    gone = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def answer(message: dict[str, Any]) -> None:
            try:
                reply = await worker.serve(message)
            except Exception as error:  # the parent prints it
                reply = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps({"id": message["id"], **reply}).encode() + b"\n")

        while line := await reader.readline():
            task = asyncio.create_task(answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        gone.set()

    server = await asyncio.start_unix_server(connected, path)
    await gone.wait()
    server.close()
    worker.close()


@dataclass
class Link:
    """The parent's end of one worker."""

    process: BaseProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    waiting: dict[int, asyncio.Future[dict[str, Any]]]
    listener: asyncio.Task[None] | None = None
    sent: int = 0

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Send one message and wait for its answer."""
        self.sent += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[self.sent] = future
        self.writer.write(json.dumps({"id": self.sent, **message}).encode() + b"\n")
        return await future

    async def listen(self) -> None:
        """Pass answers to those who wait; a worker that has ended answers with an error."""
        while line := await self.reader.readline():
            reply = json.loads(line)
            self.waiting.pop(reply["id"]).set_result(reply)
        for future in self.waiting.values():
            if not future.done():
                future.set_result({"error": "the worker is gone"})


class Fleet:
    """Several workers; use it with `async with`."""

    def __init__(
        self, count: int, bundle: Path, candidates: int, first_id: int, num_items: int
    ) -> None:
        self.count, self.arguments = count, (str(bundle), candidates, first_id, num_items)
        self.links: list[Link] = []
        self.max_len = 0  # the model's, known once configured

    async def __aenter__(self) -> "Fleet":
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = "1"
        paths = [str(Path(self._folder.name) / f"{number}.sock") for number in range(self.count)]
        processes = [
            context.Process(target=_main, args=(path, *self.arguments), daemon=True)
            for path in paths
        ]
        for process in processes:
            process.start()
        for path, process in zip(paths, processes, strict=True):
            reader, writer = await _connect(path, process)
            link = Link(process, reader, writer, {})
            link.listener = asyncio.create_task(link.listen())
            self.links.append(link)
        return self

    async def configure(
        self, config: dict[str, Any], length: int, expander: bool
    ) -> dict[str, Any]:
        """Give every worker a fresh instance; returns what the first one measured."""
        measured = []
        for number, link in enumerate(self.links):
            shelf = _shared_memory() / f"slipstream-bench-{os.getpid()}-{number}"
            own = dict(config, host_path=str(shelf) if expander else None)
            _forget(shelf)
            measured.append(await link.ask(op="configure", config=own, length=length))
        for reply in measured:
            if "error" in reply:
                raise SlipstreamError(f"a worker of the benchmark failed: {reply['error']}")
        self.max_len = int(measured[0]["max_len"])
        return measured[0]

    async def stats(self) -> dict[str, float]:
        """Sum the counters over the workers."""
        total: dict[str, float] = {}
        for link in self.links:
            for name, value in (await link.ask(op="stats")).items():
                total[name] = total.get(name, 0.0) + value
        total.pop("id", None)
        return total

    async def inline_ms(self, length: int) -> float:
        """Time in-line ranking on all instances at the same moment; returns the slowest."""
        replies = await asyncio.gather(
            *(link.ask(op="inline", length=length) for link in self.links)
        )
        return max(float(reply["inline_ms"]) for reply in replies)

    async def score_diff(self) -> float:
        return max([(await link.ask(op="score_diff"))["score_diff"] for link in self.links])

    async def __aexit__(self, *_: object) -> None:
        for number, link in enumerate(self.links):
            link.writer.close()
            link.process.join(10)
            if link.process.is_alive():
                link.process.terminate()
            (_shared_memory() / f"slipstream-bench-{os.getpid()}-{number}").unlink(missing_ok=True)
        self._folder.cleanup()


def _forget(shelf: Path) -> None:
    """Drop all cached prefixes but keep the memory, so that no run pays for new pages."""
    if shelf.exists():
        with shelf.open("r+b") as file:
            file.write(bytes(4096))


def _shared_memory() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


async def _connect(
    path: str, process: BaseProcess
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.is_alive():
        try:
            return await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.05)
    raise SlipstreamError("a worker of the benchmark did not start")
