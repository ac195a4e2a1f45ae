"""A Hub on loopback: it speaks as much of the real protocol as making, filling and loading a repository need."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = {"type": "user", "name": "tester", "fullname": "t", "orgs": []}
ROLE = {"auth": {"type": "access_token", "accessToken": {"role": "write"}}}


class Hub:
    """The server; `repos` maps a repository's id to its files."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        # Requests since `POST /fault`, and which of them fails, and how, with all that are for the same path.
        self.count, self.fault, self.failing = 0, (0, ""), ""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sha(self, name: str) -> str:
        files = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in self.repos[name].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, code: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fails(self) -> bool:
        """Whether this request is one that was asked to fail, and has."""
        hub, path = self.hub, self.path.split("?")[0]
        hub.count += 1
        number, kind = hub.fault
        if hub.count == number:
            hub.failing = path
        if path != hub.failing:
            return False
        if kind.isdigit():
            self.answer(int(kind), {"error": "no"})
            return True
        self.close_connection = True
        return True

    def do_POST(self) -> None:
        hub, path, body = self.hub, self.path, self.body()
        if path == "/fault":
            answer = {"count": hub.count, "failed": hub.failing}
            hub.count, hub.failing, hub.fault = 0, "", tuple(json.loads(body))
            return self.answer(200, answer)
        if self.fails():
            return None
        root = f"http://{self.headers['Host']}"
        if path == "/api/repos/create":
            wanted = json.loads(body)["name"]
            name = wanted if "/" in wanted else f"tester/{wanted}"
            code = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, {})
            return self.answer(code, {"url": f"{root}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if found := re.match(r"/api/models/(.+?)/preupload/", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]
            return self.answer(200, {"files": modes})
        if found := re.match(r"/api/models/(.+?)/commit/", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.repos[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            sha = hub.sha(found[1])
            return self.answer(200, {"commitUrl": f"{root}/{found[1]}/commit/{sha}", "commitOid": sha, "success": True})
        return self.answer(404, {"error": "no"})

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        if self.fails():
            return None
        if path == "/":
            return self.answer(200)
        if path == "/api/whoami-v2":
            return self.answer(200, USER | ROLE)
        found = re.match(r"/api/models/([^/]+/[^/]+)(/tree/|/revision/|$)", path)
        if found and found[1] in hub.repos:
            files = hub.repos[found[1]]
            if found[2] == "/tree/":
                listing = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self.answer(200, listing)
            about = {"_id": "1", "id": found[1], "modelId": found[1], "sha": hub.sha(found[1]), "private": False}
            return self.answer(200, about | {"tags": [], "siblings": [{"rfilename": name} for name in files]})
        found = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if found and found[1] in hub.repos:
            headers = {"X-Repo-Commit": hub.sha(found[1])}
            data = hub.repos[found[1]].get(found[2])
            if data is None:
                return self.answer(404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"})
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.answer(200, data, headers | {"ETag": etag, "Accept-Ranges": "bytes"})
        return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET
