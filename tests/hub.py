"""A Hugging Face hub on this machine: models from memory, with the headers that the hub sends."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import huggingface_hub.constants as of_hub
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = r"(models/)?(?P<name>(datasets/)?[^/]+/[^/]+)"
INFO = re.compile(rf"/api/{NAME}(/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/{NAME}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?")
ACCESS = re.compile(rf"/api/{NAME}/auth-check(?P<write>/write)?")
PATHS = re.compile(rf"/api/{NAME}/paths-info/(?P<revision>[^/]+)")
MODES = re.compile(rf"/api/{NAME}/preupload/(?P<revision>[^/]+)")
COMMITS = re.compile(rf"/api/{NAME}/commit/(?P<revision>[^/]+)")
FILE = re.compile(rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
RANGE = re.compile(r"bytes=(?P<begin>\d+)-(?P<end>\d*)")


@dataclass(kw_only=True)
class HubModel:
    """A repository.

    Attributes:
        card: What the head of its README says.
        refusals: HTTP status of commits that are not taken, from the last.
        token: That opens it; "" for everyone.
        is_gated: Its files are for that token alone, and everyone sees their names.
    """

    files: dict[str, bytes]
    card: dict = field(default_factory=dict)
    token: str = ""
    is_gated: bool = False
    is_read_only: bool = False
    refusals: list[int] = field(default_factory=list)
    num_commits: int = 0


@dataclass(kw_only=True)
class Hub:
    """The server's state.

    Attributes:
        models: By their names; data sets by "datasets/OWNER/NAME".
        requests: Method and path of each, in order.
        waits: It answers when this is set.
    """

    models: dict[str, HubModel] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    waits: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def put(self, name: str, directory: Path | Mapping[str, bytes], **options) -> HubModel:
        """Add a model, of the files of a directory."""
        if isinstance(directory, Path):
            paths = [path for path in directory.rglob("*") if path.is_file()]
            files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
        else:
            files = dict(directory)
        self.models[name] = HubModel(files={"README.md": b"-", **files}, **options)
        return self.models[name]

    def downloads(self, suffix: str = ".safetensors") -> list[str]:
        """Return the paths of files, by their ends, whose content was sent."""
        paths = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return [path for path in paths if path.endswith(suffix)]

    def environment(self, home: Path) -> dict[str, str]:
        """Return with what other processes use this hub."""
        return {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


def _entry(name: str, content: bytes) -> dict:
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 134}
    entry = {"type": "file", "path": name, "rfilename": name, "size": len(content)}
    entry |= {"oid": digest[:40], "blobId": digest[:40]}
    return entry | ({"lfs": lfs} if name.endswith(".safetensors") else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._route({TREE: self._tree, ACCESS: self._access, INFO: self._info, FILE: self._file})

    def do_POST(self) -> None:
        self._route({PATHS: self._paths, MODES: self._modes, COMMITS: self._commit})

    def _route(self, answers: Mapping[re.Pattern[str], Callable[..., None]]) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        self.hub.waits.wait(30)
        for pattern, answer in answers.items():
            found = pattern.fullmatch(path)
            if found:
                answer(**found.groupdict())
                return
        self._refuse(404, "", "Not Found")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_) -> None:
        pass

    def _model(self, name: str, *, of_files: bool = False) -> HubModel | None:
        """Return the model, or refuse as the hub does."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == "expired":
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        model = self.hub.models.get(name)
        if model is not None and model.is_gated and (of_files and token != model.token):
            self._refuse(403 if token else 401, "GatedRepo", "Access to this model is restricted")
            return None
        if model is None or (model.token not in ("", token) and not model.is_gated):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        return model

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _info(self, name: str, revision: str | None) -> None:
        model = self._model(name)
        if model is None:
            return
        if revision not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        files = [_entry(*item) for item in model.files.items()]
        name = name.removeprefix("datasets/")
        found = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}
        found |= {"cardData": model.card, "gated": "auto" if model.is_gated else False}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _access(self, name: str, write: str | None) -> None:
        if self._model(name, of_files=True) is not None:
            is_refused = write is not None and self.hub.models[name].is_read_only
            self._send(403 if is_refused else 200, b"", {})

    def _tree(self, name: str, path: str | None, **_) -> None:
        model = self._model(name)
        if model is None:
            return
        directory = f"{path}/" if path else ""
        files = {file: data for file, data in model.files.items() if file.startswith(directory)}
        if not files and directory:
            self._refuse(404, "EntryNotFound", f"{path} does not exist")
            return
        entries = [_entry(*item) for item in files.items()]
        parents = {str(one) for file in files for one in PurePosixPath(file).parents}
        entries += [{"type": "directory", "path": one, "oid": "0" * 40} for one in parents
                    if f"{one}/".startswith(directory) and one not in (".", path)]  # fmt: skip
        if parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() != "true":
            rest = len(directory)
            entries = [entry for entry in entries if "/" not in entry["path"][rest:]]
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _paths(self, name: str, **_) -> None:
        wanted = parse_qs(self._body().decode()).get("paths", [])
        model = self._model(name)
        if model is None:
            return
        found = [_entry(path, model.files[path]) for path in wanted if path in model.files]
        found += [{"type": "directory", "path": path, "oid": "0" * 40} for path in wanted
                  if any(file.startswith(f"{path}/") for file in model.files)]  # fmt: skip
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _modes(self, name: str, **_) -> None:
        """Answer how files are to be sent: within the commit."""
        files = json.loads(self._body())["files"]
        if self._model(name) is not None:
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in files]  # fmt: skip
            content = json.dumps({"files": modes}).encode()
            self._send(200, content, {"Content-Type": "application/json"})

    def _commit(self, name: str, **_) -> None:
        operations = [json.loads(line) for line in self._body().splitlines()]
        model = self._model(name)
        if model is None:
            return
        if model.refusals:
            self._refuse(model.refusals.pop(), "", "this commit is refused")
            return
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del model.files[value["path"]]
            elif operation["key"] == "file":
                model.files[value["path"]] = base64.b64decode(value["content"])
        model.num_commits += 1
        found = {"commitUrl": f"{self.hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _file(self, name: str, revision: str, file: str) -> None:
        model = self._model(name, of_files=True)
        if model is None:
            return
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif file not in model.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            content = model.files[file]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest[:40]}"'}
            asked = RANGE.fullmatch(self.headers.get("Range", ""))
            if asked is not None:
                end = min(int(asked["end"] or len(content)), len(content) - 1)
                headers["Content-Range"] = f"bytes {asked['begin']}-{end}/{len(content)}"
                content = content[int(asked["begin"]) : end + 1]
            if file.endswith(".safetensors"):
                headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self._send(200 if asked is None else 206, content, headers)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_) -> None:
        """Say nothing of clients that did not wait for an answer."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub of no models."""
    hub = Hub()
    hub.waits.set()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield hub
        hub.waits.set()
        server.shutdown()
        thread.join()


@contextmanager
def used_hub(cache: Path, token: str | None = None) -> Iterator[Hub]:
    """Run a hub that this process uses, with an empty cache."""
    huggingface_hub.HfFileSystem.clear_instance_cache()  # a port may be used a second time
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_hub, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(of_hub, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(of_hub, "HF_HUB_CACHE", str(cache))
        patch.setattr(of_hub, "HF_HUB_OFFLINE", False)
        patch.setattr(of_hub, "HF_TOKEN_PATH", str(cache / "token"))
        if token is None:
            patch.delenv("HF_TOKEN", raising=False)
        else:
            patch.setenv("HF_TOKEN", token)
        yield hub
