"""As much of the Hub's API as pushing and fetching need, on loopback; repositories live in memory."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """repositories[name][revision]: files by path. requests: (method, path) as they came. tokens: of each request."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.token: str | None = None  # the one that is asked for
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def sha(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()

    def revision_of(self, repo: str, name: str) -> str | None:
        """The branch of that name or commit."""
        branches = self.repositories.get(repo, {})
        return next((branch for branch in branches if name in (branch, self.sha(repo, branch))), None)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, path))
        self.hub.tokens.append(token)
        if self.hub.token and token != self.hub.token:
            return self.reply(401, {"error": "Invalid credentials"}, X_Error_Code="RepoNotFound")
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if parts[:2] == ["api", "models"]:
            return self.api("/".join(parts[2:4]), parts[4:], body)
        if parts[2:3] == ["resolve"]:
            return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self.reply(404, {"error": f"no such path {path}"})

    do_GET = do_POST = do_HEAD = do_PUT = handle_request

    def create(self, wanted: dict[str, Any]) -> None:
        name = wanted["name"] if "/" in wanted["name"] else f"{wanted.get('organization')}/{wanted['name']}"
        self.hub.repositories.setdefault(name, {"main": {}})
        self.hub.private[name] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.reply(200, {"url": f"{self.hub.endpoint}/{name}", "name": name})

    def api(self, repo: str, rest: list[str], body: bytes) -> None:
        kind, name = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        if kind == "branch":
            branches = self.hub.repositories[repo]
            branches[name] = dict(branches["main"])
            return self.reply(200, {})
        branch = self.hub.revision_of(repo, name)
        if branch is None:
            code = "RevisionNotFound" if repo in self.hub.repositories else "RepoNotFound"
            return self.reply(404, {"error": "not found"}, X_Error_Code=code)
        files = self.hub.repositories[repo][branch]
        if kind == "preupload":
            asked = json.loads(body)["files"]
            return self.reply(200, {"files": [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked
            ]})  # fmt: skip
        if kind == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            sha = self.hub.sha(repo, branch)
            return self.reply(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha})
        if kind == "tree":
            return self.reply(200, [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ])  # fmt: skip
        return self.reply(200, {
            "_id": "1", "id": repo, "sha": self.hub.sha(repo, branch), "private": self.hub.private.get(repo, False),
            "siblings": [{"rfilename": path} for path in files], "tags": [], "downloads": 0, "likes": 0,
        })  # fmt: skip

    def resolve(self, repo: str, name: str, path: str) -> None:
        branch = self.hub.revision_of(repo, name)
        files = self.hub.repositories.get(repo, {}).get(branch or "", {})
        if path not in files:
            return self.reply(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        return self.reply(200, files[path], ETag=etag, X_Repo_Commit=self.hub.sha(repo, branch or ""))
