"""Downloads against a real HTTP server on this machine."""

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
from dataclasses import replace

import pytest

from steppe.lab import data
from steppe.lab.data import catalog
from steppe.lab.data.catalog import unpack


class Server(http.server.ThreadingHTTPServer):
    """Serves what is in `files`; a name in `cut` breaks off half way."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.cut, self.asked = {}, set(), []
        self.url = f"http://127.0.0.1:{self.server_port}/mirror"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix("/mirror/")
        self.server.asked.append(name)
        body = self.server.files.get(name)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if name in self.server.cut else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def tar_gz(files, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target, kind in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return buffer.getvalue()


def publish(monkeypatch, server, name, files):
    """Make the catalogue expect these files, and the server give them."""
    sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    monkeypatch.setitem(catalog.CATALOGUE, name, replace(catalog.CATALOGUE[name], files=sums))
    server.files.update(files)


GOOD = {
    "cifar-10-batches-py/data_batch_1": b"x" * 300_000,
    "cifar-10-batches-py/batches.meta": b"y",
}


def test_an_archive_is_fetched_unpacked_and_not_fetched_again(tmp_path, monkeypatch, server):
    archive = tar_gz(GOOD | {"cifar-10-batches-py/noise": bytes(range(256)) * 3000})
    publish(monkeypatch, server, "cifar10", {"cifar-10-python.tar.gz": archive})
    root = tmp_path / "new" / "root"
    place = data.fetch("cifar10", root, server.url)
    assert place == root / "cifar-10-batches-py"
    assert (place / "data_batch_1").read_bytes() == b"x" * 300_000
    assert [p.name for p in root.iterdir()] == ["cifar-10-batches-py"]  # nothing left lying about
    assert data.fetch("cifar10", root, server.url) == place
    assert server.asked == ["cifar-10-python.tar.gz"]
    assert "cifar10" in [found.name for found in data.available(root)]


def test_several_files_are_fetched_into_one_folder(tmp_path, monkeypatch, server):
    files = {
        name: gzip.compress(name.encode()) for name in catalog.CATALOGUE["fashion-mnist"].files
    }
    publish(monkeypatch, server, "fashion-mnist", files)
    place = data.fetch("fashion-mnist", tmp_path, server.url + "/")
    assert {p.name: p.read_bytes() for p in place.iterdir()} == files


def test_a_wrong_checksum_leaves_nothing(tmp_path, monkeypatch, server):
    publish(monkeypatch, server, "cifar10", {"cifar-10-python.tar.gz": tar_gz(GOOD)})
    server.files["cifar-10-python.tar.gz"] = tar_gz(GOOD | {"cifar-10-batches-py/more": b"z"})
    with pytest.raises(
        ValueError, match=r"is not the published file: its md5 is [0-9a-f]{32}, expected"
    ):
        data.fetch("cifar10", tmp_path, server.url)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_body_leaves_nothing(tmp_path, monkeypatch, server):
    publish(monkeypatch, server, "cifar10", {"cifar-10-python.tar.gz": tar_gz(GOOD)})
    server.cut.add("cifar-10-python.tar.gz")
    with pytest.raises(
        ConnectionError, match=r"broke off after \d+ of \d+ bytes|could not be downloaded"
    ):
        data.fetch("cifar10", tmp_path, server.url)
    assert list(tmp_path.iterdir()) == []


def test_the_second_file_failing_leaves_nothing(tmp_path, monkeypatch, server):
    files = {name: name.encode() for name in catalog.CATALOGUE["fashion-mnist"].files}
    publish(monkeypatch, server, "fashion-mnist", files)
    del server.files["t10k-labels-idx1-ubyte.gz"]
    with pytest.raises(ConnectionError, match="HTTP Error 404"):
        data.fetch("fashion-mnist", tmp_path, server.url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "links"),
    [
        ({"../outside": b"!"}, ()),
        ({"cifar-10-batches-py/../../outside": b"!"}, ()),
        ({"/tmp/steppe-outside": b"!"}, ()),
        ({}, [("cifar-10-batches-py/link", "/etc/passwd", tarfile.SYMTYPE)]),
        ({}, [("cifar-10-batches-py/link", "../../outside", tarfile.LNKTYPE)]),
        ({}, [("cifar-10-batches-py/device", "", tarfile.CHRTYPE)]),
    ],
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(
    tmp_path, monkeypatch, server, files, links
):
    publish(monkeypatch, server, "cifar10", {"cifar-10-python.tar.gz": tar_gz(GOOD | files, links)})
    root = tmp_path / "root"
    with pytest.raises(ValueError, match="which is no plain file inside its folder"):
        data.fetch("cifar10", root, server.url)
    assert list(root.iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["root"]
    (tmp_path / "a.tar.gz").write_bytes(tar_gz(GOOD | files, links))
    with pytest.raises(ValueError, match="Nothing was unpacked"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_archive_without_its_folder_is_refused(tmp_path, monkeypatch, server):
    publish(
        monkeypatch,
        server,
        "cifar100",
        {"cifar-100-python.tar.gz": tar_gz({"elsewhere/train": b"x"})},
    )
    with pytest.raises(ValueError, match="does not hold the folder cifar-100-python"):
        data.fetch("cifar100", tmp_path, server.url)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_server_is_a_clear_error(tmp_path):
    with pytest.raises(
        ConnectionError, match=r"could not be downloaded .* put the file into the data folder"
    ):
        data.fetch("cifar10", tmp_path, "http://127.0.0.1:9")


def test_only_published_sets_can_be_fetched_or_verified(tmp_path):
    with pytest.raises(ValueError, match="No data set to fetch is called 'cifar'"):
        data.fetch("cifar", tmp_path)
    with pytest.raises(ValueError, match="No data set to verify is called 'cifar'"):
        data.verify("cifar", tmp_path)
    assert data.verify("digits") == "digits: 1,797 samples, built in."


def test_the_root_is_an_environment_variable_or_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path))
    assert data.default_root() == tmp_path
    monkeypatch.delenv("STEPPE_DATA")
    assert data.default_root().parts[-2:] == (".cache", "steppe")
