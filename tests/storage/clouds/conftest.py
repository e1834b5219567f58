"""Servers that speak as much of Google's and Azure's protocols for objects as a store needs, conditions on writes among
it.

Made from the public documentation: Cloud Storage's XML API
(https://cloud.google.com/storage/docs/xml-api/reference-methods) and Azure's Blob service
(https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api). Lists come in pages of three. Each request
must be signed by the key that the environment of the test holds.
"""

import base64
import datetime
import email.utils
import hashlib
import hmac
import json
import os
import re
import threading
import time
import urllib.parse
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from serving import Handler, Served

PAGE = 3


class Cloud(Served):
    """Objects by name, each with its bytes, a generation and a time; a subclass speaks a protocol."""

    scheme: str
    no_bucket: str  # the protocol's word for it

    def __init__(self):
        self.objects, self.parts, self.generation, self.log = {}, {}, 0, []
        self.fault = None  # (number of a request, method, path): a status to answer with, or None
        self.lock = threading.RLock()
        cloud = self

        class Answering(Handler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                place, _, query = self.path.partition("?")
                query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
                _, bucket, *rest = urllib.parse.unquote(place).split("/", 2)
                with cloud.lock:
                    cloud.log.append((self.command, self.path))
                    status = cloud.fault(len(cloud.log), self.command, self.path) if cloud.fault else None
                    if status is None and not cloud.signed(self.command, place, query, self.headers):
                        status = 403
                    code = "Refused"
                    if status is None and bucket != "bucket":
                        status, code = 404, cloud.no_bucket
                    if status is None:
                        status, headers, data = cloud.answer(
                            self.command, rest[0] if rest else "", query, self.headers, body
                        )
                    else:
                        headers, data = {}, f"<Error><Code>{code}</Code></Error>".encode()
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        super().__init__(Answering)

    def put(self, name, data):
        self.generation += 1
        self.objects[name] = (data, self.generation, time.time())
        return self.facts(name)

    def facts(self, name):
        data, generation, when = self.objects[name]
        return {
            "ETag": f'"{generation}"',
            "Last-Modified": email.utils.formatdate(when, usegmt=True),
            "x-goog-generation": str(generation),
            "Content-Length": str(len(data)),
        }

    def read(self, method, name, headers):
        """GET and HEAD of an object."""
        if name not in self.objects:
            return 404, {}, b""
        data, facts = self.objects[name][0], self.facts(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range") or headers.get("x-ms-range") or "")
        if method == "HEAD" or asked is None:
            return 200, facts, data
        a, b = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
        if a >= len(data):
            return 416, {}, b""
        part = data[a : b + 1]
        facts |= {"Content-Range": f"bytes {a}-{b}/{len(data)}", "Content-Length": str(len(part))}
        return 206, facts, part

    def listed(self, prefix, delimiter, after):
        """(names, prefixes, where the next page starts) of a page."""
        found = set()
        for name in self.objects:
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                cut = rest.find(delimiter) if delimiter else -1
                found.add((prefix + rest[: cut + 1], True) if cut >= 0 else (name, False))
        page = sorted(e for e in found if e[0] > after)
        more = page[PAGE - 1][0] if len(page) > PAGE else ""
        page = page[:PAGE]
        return [n for n, folder in page if not folder], [n for n, folder in page if folder], more

    def xml(self, text, status=200, **headers):
        return (
            status,
            {"Content-Type": "application/xml", **headers},
            b'<?xml version="1.0" encoding="utf-8"?>' + text.encode(),
        )


class Google(Cloud):
    scheme, no_bucket = "gs", "NoSuchBucket"

    def __init__(self):
        super().__init__()
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.public, self.secret = key.public_key(), text.decode()
        account = {
            "type": "service_account",
            "private_key": self.secret,
            "private_key_id": "k1",
            "client_email": "me@test",
        }
        self.environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_BASE_URL": self.url}
        self.verified = set()

    def signed(self, method, place, query, headers):
        """A token that the service account's key has signed (https://google.aip.dev/auth/4111)."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind == "Bearer" and token not in self.verified:
            try:
                body, _, signature = token.rpartition(".")
                raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
                self.public.verify(raw, body.encode(), padding.PKCS1v15(), hashes.SHA256())
                self.verified.add(token)
            except (InvalidSignature, ValueError):
                return False
        return token in self.verified

    def answer(self, method, name, query, headers, body):
        if not name:
            names, folders, more = self.listed(
                query.get("prefix", ""), query.get("delimiter"), query.get("continuation-token", "")
            )
            rows = [
                f"<Contents><Key>{escape(n)}</Key><LastModified>{stamp(self.objects[n][2])}</LastModified>"
                f'<ETag>"{self.objects[n][1]}"</ETag><Size>{len(self.objects[n][0])}</Size></Contents>'
                for n in names
            ]
            rows += [f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in folders]
            rows += [f"<NextContinuationToken>{escape(more)}</NextContinuationToken>"] * bool(more)
            return self.xml(f"<ListBucketResult>{''.join(rows)}</ListBucketResult>")
        if method in ("GET", "HEAD"):
            return self.read(method, name, headers)
        if method == "DELETE":
            if "uploadId" in query:
                return (204, {}, b"") if self.parts.pop(query["uploadId"], None) is not None else (404, {}, b"")
            return (204, {}, b"") if self.objects.pop(name, None) else (404, {}, b"")
        if method == "POST" and "uploads" in query:
            number = f"u{len(self.log)}"
            self.parts[number] = {}
            return self.xml(
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            )
        if method == "PUT" and "uploadId" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": f'"part{query["partNumber"]}"'}, b""
        if method == "POST":
            parts = self.parts.pop(query["uploadId"])
            facts = self.put(name, b"".join(parts[k] for k in sorted(parts)))
            text = f"<CompleteMultipartUploadResult><ETag>{facts['ETag']}</ETag></CompleteMultipartUploadResult>"
            return self.xml(text, **{"x-goog-generation": facts["x-goog-generation"]})
        wanted = headers.get("x-goog-if-generation-match")
        held = self.objects[name][1] if name in self.objects else 0
        if wanted is not None and int(wanted) != held:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        return 200, {**self.put(name, body), "Content-Length": "0"}, b""


class Azure(Cloud):
    scheme, no_bucket = "az", "ContainerNotFound"

    def __init__(self):
        super().__init__()
        self.secret = base64.b64encode(b"the key of the account").decode()
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": "acct",
            "AZURE_STORAGE_ACCOUNT_KEY": self.secret,
            "AZURE_STORAGE_ENDPOINT": self.url,
        }

    def signed(self, method, place, query, headers):
        """Shared Key (https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key)."""
        length = headers.get("content-length", "")
        lines = [method, "", "", "" if length == "0" else length, "", headers.get("content-type", ""), headers.get("date", ""), "",
                 headers.get("if-match", ""), headers.get("if-none-match", ""), "", headers.get("range", "")]  # fmt: skip
        lines += sorted(f"{k.lower()}:{v}" for k, v in headers.items() if k.lower().startswith("x-ms-"))
        lines += [f"/acct{place}", *sorted(f"{k}:{v}" for k, v in query.items())]
        digest = hmac.new(base64.b64decode(self.secret), "\n".join(lines).encode(), hashlib.sha256).digest()
        return headers.get("authorization") == f"SharedKey acct:{base64.b64encode(digest).decode()}"

    def answer(self, method, name, query, headers, body):
        if query.get("comp") == "list":
            names, folders, more = self.listed(query.get("prefix", ""), query.get("delimiter"), query.get("marker", ""))
            rows = [
                f"<Blob><Name>{escape(n)}</Name><Properties>"
                f"<Last-Modified>{email.utils.formatdate(self.objects[n][2], usegmt=True)}</Last-Modified>"
                f'<Content-Length>{len(self.objects[n][0])}</Content-Length><Content-Type>application/octet-stream</Content-Type><Etag>"{self.objects[n][1]}"</Etag></Properties></Blob>'
                for n in names
            ]
            rows += [f"<BlobPrefix><Name>{escape(n)}</Name></BlobPrefix>" for n in folders]
            return self.xml(
                f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs><NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
            )
        if query.get("comp") == "batch":
            return self.batch(headers, body)
        if method in ("GET", "HEAD"):
            return self.read(method, name, headers)
        if method == "DELETE":
            return (202, {}, b"") if self.objects.pop(name, None) else (404, {}, b"")
        if query.get("comp") == "block":
            self.parts.setdefault(name, {})[query["blockid"]] = body
            return 201, {}, b""
        held = self.objects.get(name)
        if headers.get("if-none-match") == "*" and held is not None:
            return 409, {"x-ms-error-code": "BlobAlreadyExists"}, b"<Error><Code>BlobAlreadyExists</Code></Error>"
        if headers.get("if-match") and (held is None or headers["if-match"] != f'"{held[1]}"'):
            return 412, {"x-ms-error-code": "ConditionNotMet"}, b"<Error><Code>ConditionNotMet</Code></Error>"
        if query.get("comp") == "blocklist":
            parts = self.parts.pop(name)
            body = b"".join(parts[e.text] for e in ElementTree.fromstring(body))
        return 201, {**self.put(name, body), "Content-Length": "0"}, b""

    def batch(self, headers, body):
        """Deletions in one request, each with an answer of its own
        (https://learn.microsoft.com/rest/api/storageservices/blob-batch)."""
        out = []
        for number, path in re.findall(r"Content-ID: (\d+).*?DELETE (\S+) HTTP/1.1", body.decode(), re.S):
            there = self.objects.pop(urllib.parse.unquote(path).split("/", 2)[2], None)
            status = "202 Accepted" if there else "404 The specified blob does not exist."
            code = "" if there else "x-ms-error-code: BlobNotFound\r\n"
            out.append(
                f"--batchresponse_1\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 "
                f"{status}\r\n{code}\r\n"
            )
        text = "".join(out) + "--batchresponse_1--\r\n"
        return 202, {"Content-Type": "multipart/mixed; boundary=batchresponse_1"}, text.encode()


def stamp(when):
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.fixture(params=[Google, Azure], ids=["gs", "az"])
def cloud(request, monkeypatch):
    """A server with an empty bucket, and the environment that leads to it; ``cloud.place`` is in the bucket."""
    pytest.importorskip("obstore")
    pytest.importorskip("cryptography")
    from meshtape.storage.stores import object_store

    for name in [n for n in os.environ if n.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(object_store, "_clients", {})
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    server = request.param()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.place = f"{server.scheme}://bucket/run"
    yield server
    server.close()
