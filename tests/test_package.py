"""The package itself: what it imports, what it ships."""

import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import steppe

ROOT = Path(__file__).parent.parent


def run(*command, cwd=None):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
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


@pytest.mark.slow
def test_the_wheel_builds_installs_and_imports(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("steppe-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "steppe/py.typed" in names
    assert {"steppe/report/assets/report.css", "steppe/report/assets/report.js"} <= set(names)
    assert not any(name.startswith(("tests", "examples", "studies")) for name in names)
    run(sys.executable, "-m", "venv", "--system-site-packages", str(tmp_path / "venv"))
    python = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = Path(run(sys.executable, "-c", "import torch; print(torch.__file__)").strip()).parents[1]
    code = f"import sys; sys.path.append({str(site)!r}); import steppe; print(steppe.__file__)"
    where = run(str(python), "-c", code, cwd=tmp_path)
    assert str(tmp_path) in where
