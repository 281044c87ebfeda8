"""Every command and Python block that README, tutorial and guides show runs, on small data.

A small log stands in for MovieLens-1M, `train` gets a few steps, servers a free port. Left out, and
counted: downloads, accelerators, several machines (test_several_machines.py,
test_training_machines.py), HTTPS (test_security.py), and `make`, which the tests themselves are.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support.shop_log import write_shop

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/tutorial.md",
    *(f"docs/guides/{p.name}" for p in (ROOT / "docs/guides").glob("*.md")),
)
LONG = 300.0  # seconds; only ends a command that hangs
FEW_STEPS = ("max_steps=4", "epochs=1", "evaluate_every=1", "sampler.batch_size=16", "threads=1")
FILMS = (1193, 661, 914, 260, 1210, 480, 2858, 1196)
# Their Python runs in test_python_guide.py and test_guide_programs.py.
OTHER_TESTS = ("python.md", "adding-a-model.md", "adding-an-operator.md")
LEFT_OUT = ("data prepare ml-1m", "device=cuda", "--nnodes", "--tls-cert", "--cluster-key-file")

pytestmark = pytest.mark.slow


def shown_commands(page: str) -> list[str]:
    """The commands of a page's indented blocks, continuation lines joined, comments dropped."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    found = re.findall(r"^ {4}((?:slipstream|torchrun) .*)$", text, re.MULTILINE)
    return [re.sub(r"\s{2,}#.*$", "", command).strip() for command in found]


def write_log(path: Path, names: tuple[str, str, str], **actions: str) -> None:
    """A log of 60 users with the films that the pages mention."""
    rng, users, each = np.random.default_rng(0), 60, 30
    films = np.array([*FILMS, *range(2000, 2040)])
    user, item, time = names
    frame = {
        user: np.repeat(np.arange(1, users + 1), each),
        item: rng.choice(films, users * each),
        time: 978_000_000 + np.arange(users * each),
        **{name: rng.integers(0, 2, users * each) for name in actions},
    }
    table = pl.DataFrame(frame)
    table.write_csv(path) if path.suffix == ".csv" else table.write_parquet(path)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, the logs that the guides name, and a store called data/ml-1m."""
    place = tmp_path_factory.mktemp("guides")
    (place / "recipes").symlink_to(ROOT / "src/slipstream/recipes")
    write_log(place / "ratings.csv", ("user_id", "item_id", "timestamp"))
    write_log(place / "clicks.parquet", ("uid", "sku", "ts"))
    vectors = np.random.default_rng(1).normal(size=(len(FILMS), 4)).tolist()
    pl.DataFrame({"item_id": FILMS, "text": vectors}).write_parquet(place / "vectors.parquet")
    names = ("user_id", "item_id", "timestamp")
    write_log(place / "views.csv", names, is_click="0/1", long_view="0/1")
    visits = pl.read_csv(place / "views.csv").with_columns(
        surface=pl.lit("home"), device=pl.lit("app")
    )
    visits.write_csv(place / "visits.csv")
    write_shop(place)  # events.csv and items.csv
    later = "customer;sku;when;what;price\nnew;LAM/9000-X;2027-05-01T08:00:00Z;buy;9.5\n"
    (place / "events-may.csv").write_text(later + later.splitlines()[1].replace("T08", "T09"))
    run("slipstream data prepare ratings.csv --out data/ml-1m", place)
    run(words("slipstream train recipes/ml-1m-hstu.yaml", place), place)
    return place


def words(command: str, place: Path) -> list[str]:
    """The command as this machine runs it: small, and with this Python."""
    parts = shlex.split(command.replace("/fast/tables", str(place / "tables")))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started = [sys.executable, "-m", "slipstream"] if parts[0] == "slipstream" else launcher
    few = FEW_STEPS if {"train", "tune"} & set(parts) else ()
    if "synthetic" in parts:
        few = ("--users", "50", "--items", "40")
    return [*started, *parts[1:], *few]


def run(command: str | list[str], place: Path, **environment: str) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run(
        words(command, place) if isinstance(command, str) else command,
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def served(command: str, place: Path) -> contextlib.AbstractContextManager[str]:
    """`slipstream serve …` on a free port; gives its address."""
    history = f"sqlite:{place / 'history.db'}"
    more = ["--port", "0", "--history", history, "--deadline-ms", "60000"]
    instances = re.search(r"--instances (\d+)", command)
    ready = 1 + (1 if instances is None else int(instances[1]))  # and a router
    return started([*words(command, place), *more], place, ("is ready", ready))


def ensure_bundle(command: str, place: Path) -> None:
    """Export the bundle that a command serves, where the page takes one as given."""
    found = re.search(r"slipstream serve (bundles/[\w-]+)", command)
    if found is not None and not (place / found[1]).exists():
        run(f"slipstream export runs/ml-1m-hstu --out {found[1]}", place)


@contextlib.contextmanager
def started(command: list[str], place: Path, awaited: tuple[str, int]) -> Iterator[str]:
    """A command that serves until it is told to end; gives its address once it says so."""
    process = subprocess.Popen(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        text = ""
        while text.count(awaited[0]) < awaited[1]:
            line = process.stdout.readline()
            assert line, f"{command} ended: {text}"
            text += line
        yield re.findall(r"http://[\d.:]+", text)[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def export_next_version(place: Path) -> None:
    """Put another model where the served one was, as an operator does before a canary."""
    run("slipstream train recipes/ml-1m-hstu.yaml seed=2 --out runs/next", place)
    run("slipstream export runs/next --out bundles/ml-1m --force", place)


def python_blocks(page: str) -> list[str]:
    """The Python of a page: fenced blocks, and indented ones that begin with an import."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    plain = [textwrap.dedent(block).strip("\n") for block in indented]
    return fenced + [block for block in plain if re.match(r"import |from ", block)]


def program(page: str, url: str) -> str:
    """A page's Python as this machine runs it: no download, a few steps, the running server."""
    text = "\n\n".join(python_blocks(page))
    text = text.replace('ss.prepare("ml-1m", out="data/ml-1m")', 'ss.load("data/ml-1m")')
    text = re.sub(r",\s*max_steps=[\d_]+", "", text).replace("trials=16", "trials=2")
    few = "max_steps=4, epochs=1, evaluate_every=1, threads=1, "
    text = re.sub(r'(data="data/ml-1m"|data=store), ?', rf"\1, {few}", text)
    text = re.sub(r"data=store\)", f"data=store, {few})", text)
    text = text.replace("http://127.0.0.1:8000", url)
    if "await " not in text:
        return text
    inside = textwrap.indent(text, "    ")
    return f"import asyncio\n\n\nasync def main():\n{inside}\n\n\nasyncio.run(main())\n"


def run_python(page: str, place: Path, url: str) -> None:
    """Run a page's Python after its commands."""
    if not python_blocks(page) or page.endswith(OTHER_TESTS):
        return
    source = program(page, url)
    if "from ray" in source and find_spec("ray") is None:
        return  # the extra is not installed; so tests/serving/test_ray.py is skipped, too
    if "Client(" in source:
        run("slipstream client events ann 2858,1196", place, SLIPSTREAM_URL=url)
    if "ss.train(" in source:
        shutil.rmtree(place / "runs")
        shutil.rmtree(place / "bundles", ignore_errors=True)  # as the page's commands made them
    (place / "page.py").write_text(source)
    printed = run([sys.executable, "page.py"], place)
    assert "from ray" not in source or printed.splitlines()[-1].startswith("200 "), printed


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_python_block_of_the_page_runs(
    page: str, workplace: Path, tmp_path: Path
):
    place = tmp_path / "copy"
    shutil.copytree(workplace, place, symlinks=True)
    with contextlib.ExitStack() as servers:
        url = ""
        for command in shown_commands(page):
            if any(reason in command for reason in LEFT_OUT):
                continue
            ensure_bundle(command, place)
            if "slipstream serve" in command and "--check" in command:
                run([*words(command, place), "--port", "0"], place)
            elif "slipstream serve" in command:
                servers.close()
                url = servers.enter_context(served(command, place))
            elif command.startswith("slipstream ui"):
                page_words = [*words(command, place), "--port", "0"]
                with (
                    started(page_words, place, ("the page is at", 1)) as address,
                    urllib.request.urlopen(f"{address}/v1/page", timeout=60) as answer,
                ):
                    assert b'"runs":true' in answer.read()
            elif "slipstream client" in command and not url:
                continue  # shown before a server is
            elif "client reload --share" in command:
                export_next_version(place)
                run(command, place, SLIPSTREAM_URL=url)
            elif "train" in command.split():
                if "--out" not in command:  # another recipe's run is never continued
                    shutil.rmtree(place / "runs")
                run(command, place)
            else:
                run(command, place, SLIPSTREAM_URL=url)
        run_python(page, place, url)


def test_the_pages_show_commands_and_few_are_left_out():
    assert sum(len(python_blocks(page)) for page in PAGES) >= 15
    commands = [command for page in PAGES for command in shown_commands(page)]
    left_out = [each for each in commands if any(reason in each for reason in LEFT_OUT)]
    assert len(commands) >= 30 and len(left_out) <= 9
