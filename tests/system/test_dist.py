"""Wheel and sdist hold what they should, and install with and without a compiler.

Nothing is downloaded: the fresh environments see the libraries of this one through a .pth file.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import slipstream
from benchmarks.serving.bundle import random_bundle

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("build") is None, reason="the package `build` is not installed"),
]
ROOT = Path(__file__).parent.parent.parent
FILES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt", "LICENSE"),
    *("README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"),
)
FOLDERS = ("src", "native", "benchmarks", "tests")
SMALL_OP = """
import torch
import slipstream as ss
from slipstream.ops import native
from slipstream.ops.attention import hstu_attention
q, k, v = (torch.ones(3, 1, 4) for _ in range(3))
out = hstu_attention(q, k, v, torch.tensor([0, 2, 3]), divisor=2.0)
assert out.shape == (3, 1, 4) and bool(torch.isfinite(out).all())
print(ss.__file__)
print(native.status())
"""


def run(*words: object, cwd: Path, **settings: str) -> str:
    """The output of a command that must succeed, away from this checkout."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=surroundings | settings,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy without anything compiled before."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    build_path = str(Path(find_spec("build").origin).parent.parent)
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy),
        cwd=copy,
        PYTHONPATH=build_path,
    )
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def fresh_environment(place: Path) -> Path:
    """A new environment without Slipstream that sees the libraries of this one."""
    venv.create(place, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / version / "site-packages"
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin" / "python"


def install(python: Path, what: Path, **settings: str) -> None:
    """Install an archive and nothing else, with the pip of this environment."""
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"),
        *("--no-build-isolation", "--no-index", "--ignore-installed", what),
        cwd=python.parent,
        **settings,
    )


def check_installed(python: Path) -> str:
    """Run the command and a small operator; the answer is the status of the kernels."""
    version = run(python.parent / "slipstream", "--version", cwd=python.parent)
    assert version.strip() == slipstream.__version__
    where, status = run(python, "-c", SMALL_OP, cwd=python.parent).splitlines()
    assert Path(where).is_relative_to(python.parent.parent)
    return status


def check_page(python: Path) -> None:
    """Serve a bundle by the installed command; the page is at its root."""
    bundle = python.parent / "bundle"
    random_bundle(bundle, {"kind": "hstu", "dim": 8, "blocks": 1, "heads": 1}, num_items=10)
    words = [python.parent / "slipstream", "serve", bundle, "--port", "0"]
    words += ["--history", f"sqlite:{python.parent / 'history.db'}", "--state", python.parent]
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=python.parent,
        env={**surroundings, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        text = ""
        while text.count("is ready") < 2:
            line = process.stdout.readline()
            assert line, text
            text += line
        url = re.search(r"http://[0-9.:]+", text)
        assert url is not None
        with urllib.request.urlopen(url.group() + "/", timeout=60) as answer:
            assert b"<title>slipstream" in answer.read().lower()
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_the_wheel_holds_recipes_kernels_and_types_but_no_benchmarks_or_tests(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = archive.namelist()
    for recipe in (ROOT / "src" / "slipstream" / "recipes").glob("*.yaml"):
        assert f"slipstream/recipes/{recipe.name}" in names
    assert "slipstream/py.typed" in names
    assert [name for name in names if name.startswith("slipstream/ops/_native_")]
    packages = {name.split("/")[0] for name in names}
    assert packages == {"slipstream", f"slipstream-{slipstream.__version__}.dist-info"}
    folders = {Path(name).parts[1] for name in names if len(Path(name).parts) > 2}
    assert {"cli", "bench", "ops", "serving", "ui"} <= folders
    page = ROOT / "src" / "slipstream" / "ui" / "static"
    for file in [path for path in page.rglob("*") if path.is_file()]:
        assert f"slipstream/ui/static/{file.relative_to(page).as_posix()}" in names


def test_the_sdist_holds_the_native_sources(built):
    with tarfile.open(built[1]) as archive:
        names = archive.getnames()
    top = f"slipstream-{slipstream.__version__}"
    for source in (ROOT / "native").glob("*"):
        assert f"{top}/native/{source.name}" in names
    assert not [name for name in names if name.endswith(".so")]
    assert not [name for name in names if name.startswith((f"{top}/benchmarks", f"{top}/tests"))]


def test_the_wheel_runs_with_its_kernels(built, tmp_path):
    python = fresh_environment(tmp_path / "environment")
    install(python, built[0])
    assert "_native_" in check_installed(python)
    check_page(python)


def test_the_sdist_installs_and_runs_without_a_compiler(built, tmp_path):
    python = fresh_environment(tmp_path / "environment")
    missing = str(tmp_path / "no-such-compiler")
    install(python, built[1], CC=missing, CXX=missing)
    assert not list((tmp_path / "environment").rglob("_native_*.so"))
    assert "not built" in check_installed(python)
    check_page(python)
