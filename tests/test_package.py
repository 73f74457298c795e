"""The package itself: what it imports, what it ships."""

import os
import pkgutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import steppe

ROOT = Path(__file__).parent.parent


def run(*command, cwd=None):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not cwd}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_core_imports_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); from steppe import *; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - {'steppe', 'torch'} - set(sys.stdlib_module_names)))"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_every_public_name_is_there_and_documented():
    for name in steppe.__all__:
        assert getattr(steppe, name).__doc__ or name == "Schedule", name


def test_dir_shows_what_is_public():
    packages = {"analysis", "integrations", "lab", "report", "testing", "theory"}
    assert set(dir(steppe)) == set(steppe.__all__) | packages | {"__version__"}
    assert set(dir(steppe.lab)) == set(steppe.lab.__all__)
    for name in steppe.lab.__all__:
        assert getattr(steppe.lab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'arpw'"):
        steppe.arpw  # noqa: B018


def test_packages_need_no_import_of_their_own():
    code = "import steppe; print(steppe.analysis.landscape.__name__, steppe.lab.Config().seed)"
    assert run(sys.executable, "-c", code) == "landscape 0\n"


@pytest.mark.parametrize("package", [steppe, steppe.lab])
def test_no_module_hides_a_public_name(package):
    """Importing `steppe.attach` would put a module where the lazy name `attach` belongs."""
    allowed = {"data", "models", "tasks"}  # public because they are modules
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__) - allowed


def test_the_package_does_not_import_the_studies():
    files = (ROOT / "src").rglob("*.py")
    assert not [
        f.name for f in files if "import studies" in (t := f.read_text()) or "from studies" in t
    ]


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {steppe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {steppe.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_of_python_agree():
    """What pyproject.toml requires and names is what the workflow tests, with both commands."""
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kind = "Programming Language :: Python :: 3."
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith(kind)]
    assert project["requires-python"] == f">={named[0]}"
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("the source package has no workflow")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    for name, job in jobs.items():
        assert job["strategy"]["matrix"]["python"] == named, name
        assert any(step.get("run", "").startswith(f"make {name}") for step in job["steps"])


@pytest.mark.slow
def test_compare_runs_from_the_wheel(tmp_path):
    """In an environment of its own, which sees the dependencies installed here but not steppe."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,), (sdist,) = tmp_path.glob("steppe-*.whl"), tmp_path.glob("steppe-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    names = zipfile.ZipFile(wheel).namelist()
    assert "steppe/py.typed" in names
    assert {"steppe/report/assets/report.css", "steppe/report/assets/report.js"} <= set(names)
    assert not any(name.startswith(("tests", "examples", "studies")) for name in names)

    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[-1])").strip())
    others = Path(run(sys.executable, "-c", "import torch; print(torch.__file__)").strip())
    (site / "dependencies.pth").write_text(f"{others.parents[1]}\n")
    run(str(python), "-m", "pip", "install", "-q", "--no-index", f"{wheel}[lab]", cwd=tmp_path)
    where = run(str(python), "-c", "import steppe; print(steppe.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    options = ["--data=digits", "--model=mlp", "--steps=20", "--seeds=2", "--store=runs"]
    command = str(python.with_name("steppe"))
    table = run(command, "compare", "sgd", "rwp", *options, cwd=tmp_path)
    assert "SGD" in table
    assert "RWP" in table
