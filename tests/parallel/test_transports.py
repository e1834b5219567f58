"""What every transport promises, by one contract: messages of any size arrive, mistakes are told on both sides, ends
are noticed."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import LocalCluster
from distributed.comm import connect, listen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtape.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from meshtape.parallel.base.message_streams import DaskMessages, SocketMessages, encoded
from meshtape.parallel.collectives import pieces, reduction_tree
from meshtape.parallel.collectives.pieces import QUANTUM, Fold, chunks
from meshtape.parallel.transports import frames, memory
from meshtape.parallel.transports.comms import CommStream
from meshtape.parallel.transports.group import SMALL, LinkGroup
from meshtape.parallel.transports.links import Link, StreamLink
from meshtape.parallel.transports.rendezvous import DataPlane
from meshtape.parallel.transports.shared_memory_link import SlotLink
from meshtape.parallel.transports.streams import SocketStream

MESH, SECRET = b"m" * 16, b"s" * 32
RANKS = {0: "rank 0", 1: "rank 1", 2: "rank 2"}

pytestmark = pytest.mark.timeout(300)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results, or errors, of calls that run at the same time."""
    out: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            out[i] = calls[i]()
        except Exception as e:
            out[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert not any(t.is_alive() for t in threads)
    return out


def segments() -> list[str]:
    """Names of shared memory of this process that others could still open."""
    return [p.name for p in memory.ROOT.glob(f"meshtape-{os.getpid()}-*")]


class Contract:
    """Subclasses give ``planes``: three data planes that know the mesh."""

    link: type[Link]
    share = True

    def connected(
        self, planes: Sequence[DataPlane], count: int = 2, epoch: int = 0, timeout: float = 200.0
    ) -> list[LinkGroup]:
        def join(me: int) -> LinkGroup:
            peers = {p: planes[p].address for p in range(count) if p != me}
            group = planes[me].group(MESH, epoch, me, peers, RANKS, timeout, self.share)
            group.connect(peers)
            return group

        groups = together(*[lambda me=me: join(me) for me in range(count)])
        for g in groups:
            assert isinstance(g, LinkGroup), g
            assert {type(x) for x in g.links.values()} <= {self.link}
            g.begin(1, timeout)
        return groups

    @pytest.fixture
    def pair(self, planes: list[DataPlane]) -> list[LinkGroup]:
        return self.connected(planes)

    # ----- messages ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (700, 1000)], ids=str)
    def test_all_processes_exchange_with_all(self, planes, shape):
        groups = self.connected(planes, 3)
        own = [np.full(shape, float(p)) for p in range(3)]
        got = {(a, b): np.full(shape, np.nan) for a in range(3) for b in range(3) if a != b}

        def call(me: int) -> None:
            others = [p for p in range(3) if p != me]
            groups[me].exchange(0, "all", {p: [own[me]] for p in others}, {p: [got[me, p]] for p in others})

        for _ in range(3):
            assert together(*[lambda me=me: call(me) for me in range(3)]) == [None] * 3
            for (_, sender), block in got.items():
                np.testing.assert_array_equal(block, own[sender])
                block[...] = np.nan

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def test_any_messages_of_any_layout(self, pair, data):
        """Several arrays, strided on both sides, of all sizes around the limits, in both directions at once."""
        sizes = st.sampled_from([0, 1, 3, SMALL // 8, SMALL // 8 + 1, QUANTUM // 8 + 5, 3 * QUANTUM // 8])
        dtypes = st.sampled_from(["u1", "f4", "f8", "c16"])

        def arrays() -> tuple[list[np.ndarray], list[np.ndarray]]:
            out, room = [], []
            for n in data.draw(st.lists(sizes, max_size=3)):
                whole = np.arange(2 * n * 3).reshape(n, 6).astype(data.draw(dtypes))
                sent = [whole[:, ::2], whole.reshape(6, n)[:3], whole.reshape(3, 2 * n).T][data.draw(st.integers(0, 2))]
                held = np.zeros((*sent.shape[:-1], sent.shape[-1] * 2), sent.dtype)
                out.append(sent)
                room.append(held[..., ::2] if data.draw(st.booleans()) else np.zeros(sent.shape, sent.dtype))
            return out, room

        (a, room_b), (b, room_a) = arrays(), arrays()
        one, two = pair
        results = together(
            lambda: one.exchange(0, "any", {1: a}, {1: room_a}), lambda: two.exchange(0, "any", {0: b}, {0: room_b})
        )
        assert results == [None, None]
        for sent, got in zip([*a, *b], [*room_b, *room_a], strict=True):
            np.testing.assert_array_equal(got, sent)

    def test_one_way_and_back(self, pair):
        """Only one side sends, again and again: what the other says about it in between does not disturb."""
        one, two = pair
        x, y = np.arange(5.0 * QUANTUM / 8), np.empty(5 * QUANTUM // 8)
        for step in range(4):
            a, b = (one, two) if step != 2 else (two, one)
            to, at = (1, 0) if step != 2 else (0, 1)
            y[:] = 0
            ends = together(
                lambda a=a, to=to, step=step: a.exchange(step, "send", {to: [x]}, {}),
                lambda b=b, at=at, step=step: b.exchange(step, "send", {}, {at: [y]}),
            )
            assert ends == [None, None]
            np.testing.assert_array_equal(y, x)

    def test_many_small_arrays_in_one_message(self, pair):
        one, two = pair
        parts = [np.full(i % 4, i) for i in range(300)]
        got = [np.empty_like(p) for p in parts]
        calls = lambda: one.exchange(0, "p", {1: parts}, {}), lambda: two.exchange(0, "p", {}, {0: got})
        assert together(*calls) == [None, None]
        for p, g in zip(parts, got, strict=True):
            np.testing.assert_array_equal(p, g)

    @pytest.mark.parametrize("large", [False, True])
    def test_contributions_are_joined_in_their_order(self, planes, large, monkeypatch):
        """Of three processes; float sums differ by order, so that equal bits mean equal order."""
        monkeypatch.setattr(pieces, "is_large", lambda out: large)
        groups = self.connected(planes, 3)
        rng = np.random.default_rng(3)
        n = QUANTUM // 4 + 1000
        terms = [rng.normal(size=n).astype("f4") * 10.0**k for k in range(6)]  # process p has terms p and p + 3
        want = reduction_tree.joined(terms, np.add)
        outs = [np.empty(n, "f4") for _ in range(3)]

        def call(me: int) -> None:
            fold = Fold(outs[me], [t if i % 3 == me else None for i, t in enumerate(terms)], np.add, False)
            others = [p for p in range(3) if p != me]
            groups[me].exchange(
                0,
                "sum",
                {p: [(terms[me], terms[me + 3])] for p in others},
                {p: [fold.sink([p, p + 3])] for p in others},
            )
            assert fold.done

        assert together(*[lambda me=me: call(me) for me in range(3)]) == [None] * 3
        for out in outs:
            np.testing.assert_array_equal(out, want)

    # ----- mistakes ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [((3, "all_reduce(a)", 4), (5, "all_gather(b)", 4)), ((3, "all_reduce(a)", 4), (3, "all_gather(b)", 6))],
        ids=["another step", "another size"],
    )
    def test_processes_that_are_elsewhere_in_the_program_both_say_so(self, pair, mine, theirs):
        def call(g: LinkGroup, peer: int, where: tuple[int, str, int]) -> Callable[[], None]:
            step, what, n = where
            return lambda: g.exchange(step, what, {peer: [np.zeros(n)]}, {peer: [np.zeros(n)]})

        for error in together(call(pair[0], 1, mine), call(pair[1], 0, theirs)):
            assert isinstance(error, CollectiveMismatch)
            for words in ("rank 0", "rank 1", "all_reduce(a)", "all_gather(b)", "step 3", "32 bytes"):
                assert words in str(error)

    def test_another_run_or_turn_is_a_mismatch_too(self, pair):
        pair[1].begin(7, 200.0)
        pair[1].turn(2)
        errors = together(
            *[lambda i=i: pair[i].exchange(0, "sum", {1 - i: [np.zeros(1)]}, {1 - i: [np.zeros(1)]}) for i in (0, 1)]
        )
        assert all(
            isinstance(e, CollectiveMismatch) and "run 7, turn 2" in str(e) and "run 1" in str(e) for e in errors
        )

    def test_a_message_of_another_life_of_the_mesh_is_a_mismatch(self, pair):
        pair[1].epoch += 1
        errors = together(
            *[lambda i=i: pair[i].exchange(0, "sum", {1 - i: [np.zeros(1)]}, {1 - i: [np.zeros(1)]}) for i in (0, 1)]
        )
        assert all(isinstance(e, CollectiveMismatch) and "epoch" in str(e) for e in errors), errors

    def test_large_messages_where_small_ones_are_expected(self, pair):
        """The two would travel in different ways."""
        big, small = np.zeros(QUANTUM), np.zeros(3)

        def stops(g: LinkGroup, send: dict[int, Any], receive: dict[int, Any]) -> None:
            try:
                g.exchange(0, "x", send, receive)
            except CollectiveMismatch as e:
                g.abort(str(e))
                g.close()
                raise

        errors = together(
            lambda: stops(pair[0], {1: [big]}, {1: [small]}),
            lambda: stops(pair[1], {0: [np.zeros(3)]}, {0: [np.zeros(5)]}),
        )
        assert isinstance(errors[1], CollectiveMismatch), errors
        assert errors[0] is None or isinstance(errors[0], CollectiveMismatch | RankLost), (
            errors
        )  # None: it is on its way

    def test_silence_is_a_timeout_that_names_who_is_missing(self, planes):
        one, _, _ = self.connected(planes, 3)
        one.begin(1, 0.3)
        with pytest.raises(CollectiveTimeout, match=r"all_reduce\(a\).*: no answer within 0 s from rank 1, rank 2"):
            one.exchange(0, "all_reduce(a)", {}, {1: [np.zeros(1)], 2: [np.zeros(1)]})

    # ----- ends -------------------------------------------------------------------------------------------------------

    def test_an_abort_tells_the_others_why(self, pair):
        pair[0].abort("ValueError: no such thing")
        with pytest.raises(RankLost, match="rank 0 stopped: ValueError: no such thing"):
            pair[1].exchange(0, "sum", {}, {0: [np.zeros(1)]})

    def test_an_abort_is_heard_by_a_process_that_was_sending(self, pair):
        pair[0].abort("ValueError: no such thing")
        pair[0].close()
        big = np.zeros(4_000_000)
        with pytest.raises(RankLost, match=r"rank 0 (stopped: ValueError: no such thing|left)"):
            pair[1].exchange(0, "sum", {0: [big]}, {0: [big]})

    def test_a_process_that_leaves_is_found_out_at_once(self, pair):
        threading.Timer(0.1, pair[0].close).start()
        with pytest.raises(RankLost, match=r"rank 0 left during all_reduce\(a\)"):
            pair[1].exchange(0, "all_reduce(a)", {}, {0: [np.zeros(1)]})

    def test_a_wait_is_ended_from_outside(self, pair):
        threading.Timer(0.1, pair[0].shutdown).start()
        with pytest.raises(RankLost, match="rank 1 left during sum"):
            pair[0].exchange(0, "sum", {}, {1: [np.zeros(1)]})

    def test_who_answers_is_waited_for(self, planes, pair):
        """A process that computes for long is alive, and is told from one that is stopped."""
        pair[0].silence = 0.1
        pair[0].begin(1, 100)
        x, asks, answers = np.zeros(3), pair[0]._answers, list[bool]()
        asked = threading.Event()

        def ask(p: int, seconds: float) -> bool:
            answers.append(asks(p, 60.0))
            if len(answers) == 2:
                asked.set()
            return answers[-1]

        pair[0]._answers = ask

        def late() -> None:
            asked.wait(100)
            pair[1].exchange(0, "late", {0: [np.ones(3)]}, {})

        assert together(lambda: pair[0].exchange(0, "late", {}, {1: [x]}), late) == [None, None]
        np.testing.assert_array_equal(x, 1)
        assert answers[:2] == [True, True]
        pair[0]._answers = lambda p, seconds: False
        with pytest.raises(
            CollectiveTimeout, match=r"sum \(run 1, step 4\): no answer from rank 1, whose process is st"
        ):
            pair[0].exchange(4, "sum", {}, {1: [x]})

    def test_nothing_is_left_behind(self, planes, monkeypatch, eventually):
        made: list[Any] = []

        def remembered(kind: type) -> None:
            def init(self: Any, *args: Any, true: Any = kind.__init__) -> None:
                true(self, *args)
                made.append(self)

            monkeypatch.setattr(kind, "__init__", init)

        for kind in (SocketStream, CommStream, memory.SharedSegment):
            remembered(kind)
        for epoch in range(3):
            self.connected(planes, 3, epoch=epoch)
            assert segments() == []  # without a name from the start: it goes with the last process
        assert len(made) >= 3 * 6  # three pairs, and both ends of each are here
        for p in planes:
            p.unregister_mesh(MESH)
        eventually(lambda: all(x.map.closed if isinstance(x, memory.SharedSegment) else x.fileno() == -1 for x in made))
        assert memory._offered == {}


def opened(*planes: DataPlane) -> Iterator[list[DataPlane]]:
    for p in planes:
        p.register_mesh(MESH, SECRET)
    yield list(planes)
    for p in planes:
        p.close()
    for p in planes:
        assert p._listener is None or p._listener.join(60)


class TestInProcess(Contract):
    link = SlotLink

    @pytest.fixture
    def planes(self) -> Iterator[list[DataPlane]]:
        yield from opened(*[DataPlane("127.0.0.1") for _ in range(3)])


class TestSockets(Contract):
    link, share = StreamLink, False

    @pytest.fixture
    def planes(self) -> Iterator[list[DataPlane]]:
        yield from opened(*[DataPlane("127.0.0.1") for _ in range(3)])


def contexts(certificate: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """As a cluster's ``Security`` makes them: each side shows its certificate."""
    out = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose, cafile=str(certificate))
        context.verify_mode = ssl.CERT_REQUIRED
        context.check_hostname = False
        context.load_cert_chain(str(certificate))
        out.append(context)
    return out[0], out[1]


class TestTls(Contract):
    link, share = StreamLink, False

    @pytest.fixture
    def planes(self, certificate) -> Iterator[list[DataPlane]]:
        yield from opened(*[DataPlane("127.0.0.1", contexts(certificate)) for _ in range(3)])

    def test_who_has_no_certificate_is_not_let_in(self, planes):
        plain = DataPlane("127.0.0.1")
        plain.register_mesh(MESH, SECRET)
        with pytest.raises(CollectiveTimeout, match="no answer from rank 0"):
            plain.group(MESH, 0, 1, {0: planes[0].address}, RANKS, 1.0).connect([0])
        plain.close()
        assert planes[0]._arrived == {}


class TestTlsAndSharedMemory(Contract):
    """What stays on the host need not be encrypted."""

    link = SlotLink

    @pytest.fixture
    def planes(self, certificate, monkeypatch) -> Iterator[list[DataPlane]]:
        monkeypatch.setattr(memory, "process_id", lambda: secrets.token_bytes(16))
        yield from opened(*[DataPlane("127.0.0.1", contexts(certificate)) for _ in range(3)])


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Any]]:
    """Three workers of this process that reach each other by tcp."""
    with LocalCluster(
        n_workers=3, processes=False, protocol="tcp://", dashboard_address=None, silence_logs=50
    ) as cluster:
        yield list(cluster.workers.values())


class TestComms(Contract):
    link, share = StreamLink, False

    @pytest.fixture
    def planes(self, workers) -> Iterator[list[DataPlane]]:
        yield from opened(*[DataPlane(None, None, w) for w in workers])

    def test_no_port_is_opened(self, planes):
        assert all(p._listener is None for p in planes)
        assert [p.address.partition(":")[0] for p in planes] == ["tcp"] * 3


# ----- chunks ---------------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 7, 300, 70_000]), max_size=3).filter(lambda s: np.prod(s) < 4e6),
    itemsize=st.sampled_from([1, 2, 8, 16]),
)
@settings(deadline=None, max_examples=60)
def test_chunks_cover_an_array_once_in_order(shape, itemsize):
    a = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [a[i] for i in chunks(tuple(shape), itemsize)]
    assert all(p.size * itemsize <= QUANTUM or p.size == 1 for p in parts)
    flat = np.concatenate([p.ravel() for p in parts]) if parts else np.zeros(0)
    np.testing.assert_array_equal(flat, a.ravel())


# ----- frames ---------------------------------------------------------------------------------------------------------


def test_heads_that_are_none_of_ours_are_not_read():
    place = frames.FramePosition(3, 1, 2)

    def head(kind: bytes, length: int) -> bytes:
        return frames.pack(kind, 7, MESH, place, 1, length, "sum")

    assert frames.unpack(head(frames.DATA, 1 << 40)) == frames.Head(frames.DATA, 7, MESH, place, 1, 1 << 40, "sum")
    assert frames.unpack(head(frames.ABORT, frames.TEXT_LIMIT)) is not None
    assert frames.unpack(head(frames.ABORT, frames.TEXT_LIMIT + 1)) is None  # nobody makes room for more
    assert frames.unpack(head(b"X", 8)) is None
    assert frames.unpack(b"MTX1" + head(frames.DATA, 8)[4:]) is None  # another version's


# ----- messages between a client and a worker -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DaskMessages, SocketMessages])
def test_messages_of_any_size_arrive_in_order_and_nobody_waits_for_a_slow_reader(kind):
    sent: list[Any] = [{"n": 0}, encoded({"n": 1}), {"n": 2, "bytes": b"x" * (9 << 20)}, {"n": 3}]

    async def run() -> list[dict[str, Any]]:
        accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        got: list[dict[str, Any]] = []
        last = asyncio.Event()

        async def serve(comm: Any) -> None:
            accepted.set_result(comm)

        def take(m: dict[str, Any]) -> None:
            got.append(m)
            if m["n"] == 3:
                last.set()

        def send() -> None:  # in another thread, while nobody reads
            for m in sent:
                here.put(m)
                here.wake()

        async with await listen("tcp://127.0.0.1:0", serve) as listener:
            here, there = kind(await connect(listener.contact_address)), kind(await accepted)
            both = [asyncio.ensure_future(here.serve(take))]
            await asyncio.wait_for(asyncio.to_thread(send), 20)
            both.append(asyncio.ensure_future(there.serve(take)))
            await asyncio.wait_for(last.wait(), 20)
            here.abort()
            for ends in both:
                with pytest.raises(OSError):
                    await asyncio.wait_for(ends, 20)
        return got

    got = asyncio.run(run())
    assert [m["n"] for m in got] == [0, 1, 2, 3]
    assert len(got[2]["bytes"]) == 9 << 20
