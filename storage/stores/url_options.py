"""Options of URLs (endpoint, region, encryption, …), which travel inside of a location's text:
``s3://bucket;region=eu-west-1/run``.

A text reaches every process that a plan reaches, so options need no registry on workers. Plans and messages show
locations; an option that may be a secret is therefore refused: credentials come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from ...arrays.core.errors import CheckpointError

# By scheme: our name of an option, and its name in obstore's configuration ("" for what is told with each object).
_COMMON = {"endpoint": "endpoint", "anonymous": "skip_signature", "storage_class": ""}
KNOWN: dict[str, dict[str, str]] = {
    "s3": {
        **_COMMON,
        "region": "region",
        "encryption": "server_side_encryption",
        "kms_key": "sse_kms_key_id",
        "bucket_key": "sse_bucket_key_enabled",
        "requester_pays": "request_payer",
        "virtual_hosted": "virtual_hosted_style_request",
    },
    "gs": {**_COMMON, "endpoint": "base_url"},
    "az": {**_COMMON, "account": "account_name"},
    "memory": {},
    "http": {},
    "https": {},
}
_YES_NO = ("true", "false")
_CHOICES = {  # of the options that take few values
    "encryption": ("AES256", "aws:kms", "aws:kms:dsse"),
    **dict.fromkeys(("anonymous", "bucket_key", "requester_pays", "virtual_hosted"), _YES_NO),
}
_SECRET = re.compile(r"secret|token|passw|passphrase|credential|sas|auth|key|pwd", re.I)
_BEGIN = re.compile(r";(?=[a-z_]+=)")


def divide(authority: str) -> tuple[str, dict[str, str]]:
    """The first part of a URL without its options, and the options.

    >>> divide("bucket;endpoint=http%3A%2F%2Flocalhost;region=eu")
    ('bucket', {'endpoint': 'http://localhost', 'region': 'eu'})
    """
    host, *held = _BEGIN.split(authority)
    return host, {name: unquote(value) for name, _, value in (text.partition("=") for text in held)}


def joined(scheme: str, host: str, given: Mapping[str, object]) -> str:
    """The first part of a URL with its options, in one order; `CheckpointError` for options that there are not."""
    texts = {name: _checked(scheme, name, value) for name, value in given.items()}
    return ";".join([host, *(f"{name}={quote(texts[name], safe='')}" for name in sorted(texts))])


def _checked(scheme: str, name: str, value: object) -> str:
    known = KNOWN.get(scheme)
    if (known is None or name not in known) and _SECRET.search(name):
        raise CheckpointError(
            f"{scheme}:// takes no {name}: an option travels in plans and messages; credentials come from the "
            "environment"
        )
    if known is not None and name not in known:
        raise CheckpointError(f"{scheme}:// has no option {name}; it takes {', '.join(known) or 'none'}")
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int)) or value == "":
        raise CheckpointError(f"{scheme}://: option {name} is a text, a whole number or a boolean, not {value!r:.40}")
    text = str(value)
    allowed = _CHOICES.get(name)
    if known is not None and allowed is not None and text not in allowed:
        raise CheckpointError(f"{scheme}://: option {name} is one of {', '.join(allowed)}, not {text!r:.40}")
    if "@" in text.partition("://")[2] or (name == "endpoint" and not re.fullmatch(r"https?://[^/@?#;]+[^@?#]*", text)):
        # The text is not repeated: it may hold a password.
        raise CheckpointError(
            f"{scheme}://: option {name} is no address http(s)://host[:port][/path] without user, password and query; "
            "mt.storage.options writes it into a location"
        )
    return text


def plain(value: str) -> str | int | bool:
    """An option as Python's own value.

    >>> plain("true"), plain("12"), plain("eu")
    (True, 12, 'eu')
    """
    return {"true": True, "false": False}.get(value, int(value) if re.fullmatch(r"\d{1,18}", value) else value)
