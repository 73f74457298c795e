"""The package itself: what it imports, what it ships."""

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
        "import sys, torch; before = set(sys.modules); import steppe; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - {'steppe', 'torch'} - set(sys.stdlib_module_names)))"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_every_public_name_is_there_and_documented():
    for name in steppe.__all__:
        assert getattr(steppe, name).__doc__ or name == "Schedule", name


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
