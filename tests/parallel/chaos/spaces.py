"""Name spaces of Linux: of networks and mounts that end with the process. :func:`enter` says which of them are to be
had here."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000
_REC, _PRIVATE = 16384, 1 << 18
BRIDGE, HOST = "chaos", "10.77.0.1"


def unshare(flags: int) -> None:
    """Leave the name spaces of the parent. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def ip(*words: str, of: int | None = None, tool: str = "ip") -> None:
    """Run ``ip`` (or ``tc``), in the name space of a process."""
    there = [] if of is None else ["nsenter", "-t", str(of), "-n"]
    subprocess.run([*there, tool, *words], check=True, capture_output=True, text=True)


def mounted(where: str, megabytes: int) -> None:
    """A file system in memory. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"chaos", where.encode(), b"tmpfs", ctypes.c_ulong(0), f"size={megabytes}m".encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter() -> dict[str, str]:
    """Go where networks and mounts may be changed, before any thread starts. Returns why not, by what is missing:
    ``disk``, ``cut``, ``slow``, ``lossy``; ``shared`` where shared memory is that of everybody."""
    uid, gid = os.getuid(), os.getgid()
    try:
        try:
            unshare(NEWNS | NEWNET)
        except OSError:  # not root: in a name space of users of our own we are
            unshare(NEWNS | NEWNET | NEWUSER)
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                Path(f"/proc/self/{name}").write_text(text)
    except OSError as e:
        return dict.fromkeys(("disk", "cut", "slow", "lossy", "shared"), f"no name spaces here: {e}")
    missing: dict[str, str] = {}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
    try:  # in which nothing is left but by us
        mounted("/dev/shm", 512)
    except OSError as e:
        missing["shared"] = str(e)
    try:
        ip("link", "set", "lo", "up")
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{HOST}/16", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        ip("link", "add", "try0", "type", "veth", "peer", "name", "try1")
    except (OSError, subprocess.SubprocessError) as e:
        why = f"no network of our own here: {getattr(e, 'stderr', '') or e}".strip()
        return missing | dict.fromkeys(("cut", "slow", "lossy"), why)
    for name, words in (("slow", SLOW), ("lossy", LOSSY)):
        try:
            ip("qdisc", "replace", "dev", "try0", "root", *words, tool="tc")
        except (OSError, subprocess.SubprocessError) as e:
            missing[name] = f"this kernel has no {words[0]}: {getattr(e, 'stderr', '') or e}".strip()
    ip("link", "del", "try0")
    return missing


SLOW = ("tbf", "rate", "2mbit", "burst", "16kb", "latency", "200ms")
LOSSY = ("netem", "loss", "20%", "delay", "30ms", "20ms")


def address_of(number: int) -> str:
    return f"10.77.{1 + number // 250}.{1 + number % 250}"


def plug_in(pid: int, number: int) -> str:
    """Connect a process in a network of its own to ours. Returns its address."""
    name, address = f"w{number}", address_of(number)
    ip("link", "add", name, "type", "veth", "peer", "name", "eth", "netns", str(pid))
    ip("link", "set", name, "master", BRIDGE, "up")
    ip("link", "set", "lo", "up", of=pid)
    ip("addr", "add", f"{address}/16", "dev", "eth", of=pid)
    ip("link", "set", "eth", "up", of=pid)
    return address


def unmounted(where: str) -> None:
    """The end of :func:`mounted`."""
    ctypes.CDLL(None).umount2(where.encode(), 2)
