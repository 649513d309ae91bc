"""The router between two fake servers, over real sockets: what passes, and what is kept from clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from support.canary_router import Routed, routed
from support.fake_upstream import FakeUpstream

from chairlift.canary.config import Timeouts
from chairlift.canary.session import SessionRule


def run(test: Callable[[Routed], Awaitable[None]], *upstreams: FakeUpstream, **settings) -> None:
    async def main() -> None:
        async with routed(*upstreams, **settings) as r:
            await test(r)

    asyncio.run(main())


def failed_candidate(r: Routed) -> int:
    return r.router.proxy.logs["candidate"].counts(0)["failed"]


def test_streams_pass_unchanged_and_as_they_come():
    async def check(r: Routed) -> None:
        r.stable.token_gap = 0.2
        times = []
        async with r.http.post(
            f"{r.url}/v1/completions?a=1%262&b=%C3%BC",
            json={"stream": True, "max_tokens": 3},
            headers={"X-Request-Id": "mine", "Authorization": "Bearer secret", "Connection": "X-Hop", "X-Hop": "1"},
        ) as response:
            now = asyncio.get_running_loop().time
            times += [now() async for line in response.content if line.strip()]
            assert response.headers["X-Request-Id"] == "mine"
            assert response.headers["X-Upstream"] == "stable"
        assert len(times) == 5
        assert times[2] - times[0] > 0.3  # not all at the end
        target, headers, _ = r.stable.requests[0]
        assert target == "/v1/completions?a=1%262&b=%C3%BC"
        assert headers["X-Request-ID"] == "mine"
        assert headers["Authorization"] == "Bearer secret"
        assert headers["X-Forwarded-For"] == "127.0.0.1"
        assert "X-Hop" not in headers

    run(check, steps=(0.1, 1.0))


def test_everything_else_is_stables_until_the_rollout_is_complete():
    async def check(r: Routed) -> None:
        for _ in range(4):
            async with r.http.get(f"{r.url}/v1/models") as response:
                assert await response.json() == {"from": "stable"}
                assert "Keep-Alive" not in response.headers
        await r.act("promote")
        await r.act("promote")
        async with r.http.get(f"{r.url}/v1/models") as response:
            assert await response.json() == {"from": "candidate"}

    run(check)


def test_shares_are_within_two_points_over_2000_requests_of_sticky_sessions():
    async def check(r: Routed) -> None:
        sides: dict[str, set[str]] = {}
        off = 0.0
        for step, share in enumerate((0.1, 0.25, 0.5, 1.0)):
            count = 0
            for block in range(5):
                names = [f"{step if n % 2 else 'old'}-{block}-{n % 10}" for n in range(100)]
                got = await asyncio.gather(*(r.ask(stream=False, headers={"X-Session-Id": name}) for name in names))
                for name, (status, side, _) in zip(names, got, strict=True):
                    assert status == 200
                    if side == "stable":
                        assert "candidate" not in sides.get(name, ())  # never back
                    sides.setdefault(name, set()).add(side)
                    count += side == "candidate"
            off += count - 500 * share
            assert abs(count - 500 * share) <= 30  # three sessions
            if share < 1:
                await r.act("promote")
        assert abs(off) <= 40

    fast = {"first_token": 0.0, "token_gap": 0.0}
    run(
        check, FakeUpstream("stable", **fast), FakeUpstream("candidate", **fast), steps=(0.1, 0.25, 0.5, 1.0),
        session=SessionRule(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "streams"),
    [
        ("error", True), ("error", False), ("overloaded", True), ("hang", True), ("hang", False), ("bad_event", True),
        ("error_event", True), ("cut", True), ("hang_in_stream", True), ("not_json", False), ("bad_request", True),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_before_the_first_token_stable_answers(fault: str, streams: bool):
    async def check(r: Routed) -> None:
        got = await asyncio.gather(*(r.ask(stream=streams) for _ in range(8)))
        assert all(status == 200 and side == "stable" and "broken" not in text for status, side, text in got)
        assert failed_candidate(r) == 4
        assert len(r.stable.requests) == 8
        assert len(r.candidate.requests) == 4

    timeouts = Timeouts(first_byte=0.5, idle=0.5, total=0.8)
    run(check, FakeUpstream("stable"), FakeUpstream("candidate", fault=fault), timeouts=timeouts, min_samples=100)


@pytest.mark.parametrize("fault", ["cut", "bad_event", "error_event", "hang_in_stream", "no_done"])
def test_a_stream_that_breaks_later_ends_in_an_error_and_is_not_asked_for_twice(fault: str):
    async def check(r: Routed) -> None:
        got = await asyncio.gather(*(r.ask(max_tokens=6) for _ in range(2)))
        broken = next(text for _, side, text in got if side == "candidate")
        whole = next(text for _, side, text in got if side == "stable")
        assert "broken" not in whole
        *events, last = broken.removeprefix("broken: ").strip().split("\n\n")
        assert "broke off" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert [json.loads(e[6:])["choices"][0]["text"] for e in events[:2]] == [" candidate0", " candidate1"]
        assert len(r.stable.requests) == 1
        assert failed_candidate(r) == 1
        assert "chairlift:canary_broken_streams_total 1.0" in await r.metrics()

    candidate = FakeUpstream("candidate", fault=fault, fault_after=2)
    run(check, FakeUpstream("stable"), candidate, timeouts=Timeouts(idle=0.4), min_samples=100)


def test_a_request_that_both_refuse_is_nobodys_fault_and_shows_stables_words():
    async def check(r: Routed) -> None:
        got = await asyncio.gather(*(r.ask() for _ in range(4)))
        assert [status for status, _, _ in got] == [400] * 4
        assert all("stable says" in text for _, _, text in got)
        counts = r.router.proxy.logs["candidate"].counts(0)
        assert (counts["refused"], counts["failed"]) == (2, 0)

    run(check, FakeUpstream("stable", fault="bad_request"), FakeUpstream("candidate", fault="bad_request"))


def test_what_may_not_be_repeated_is_not():
    async def check(r: Routed) -> None:
        got = await asyncio.gather(*(r.ask(store=True) for _ in range(4)))
        assert sorted(status for status, _, _ in got) == [200, 200, 500, 500]
        assert len(r.stable.requests) == 2

    run(check, FakeUpstream("stable"), FakeUpstream("candidate", fault="error"))


def test_a_candidate_that_is_not_there_is_safe_to_replace_for_any_request():
    async def check(r: Routed) -> None:
        r.vanish("candidate")
        got = await asyncio.gather(*(r.ask(store=True) for _ in range(8)))
        assert {(status, side) for status, side, _ in got} == {(200, "stable")}

    run(check)


def test_stables_own_errors_pass_as_they_are():
    async def check(r: Routed) -> None:
        status, side, text = await r.ask()
        assert (status, side) == (500, "stable")
        assert "stable says error" in text
        r.stable.fault = "hang"
        assert (await r.ask())[0] == 504
        r.stable.fault, r.stable.fault_after = "cut", 2
        _, _, text = await r.ask()
        assert "broken" in text
        r.vanish("stable")
        assert (await r.ask())[0] == 502

    run(check, FakeUpstream("stable", fault="error"), steps=(0.01,), timeouts=Timeouts(first_byte=0.3))


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_hangs_up_ends_the_request_upstream_at_once(streams: bool):
    async def check(r: Routed) -> None:
        asking = [asyncio.create_task(r.ask(stream=streams)) for _ in range(2)]
        await r.until(lambda: r.stable.open and r.candidate.open)
        for task in asking:
            task.cancel()
        await r.until(lambda: r.stable.cancelled == r.candidate.cancelled == 1)
        await r.until(lambda: r.router.proxy.logs["candidate"].counts(0)["client_left"] == 1)
        assert failed_candidate(r) == 0
        assert len(r.stable.requests) == 1  # nobody asks again on behalf of who has left

    run(check, FakeUpstream("stable", first_token=60.0), FakeUpstream("candidate", first_token=60.0))


@pytest.mark.parametrize("side", ["stable", "candidate"])
def test_a_slow_reader_holds_its_server_back_and_no_memory_fills(side: str):
    async def check(r: Routed) -> None:
        upstream = getattr(r, side)
        host, port = r.url.removeprefix("http://").split(":")
        body = json.dumps({"stream": True, "max_tokens": 400_000}).encode()
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await r.until(lambda: upstream.written > 0)
            while True:  # until every buffer on the way is full
                before = upstream.written
                await asyncio.sleep(1.0)
                if upstream.written == before:
                    break
            assert upstream.written < 200_000  # about 130 bytes each: some megabytes lie in the sockets
            assert r.router.proxy.logs[side].open_samples[0].blocked_since is not None
            assert r.router.proxy.logs[side].open_samples[0].age(1e9) < 60
        await r.until(lambda: upstream.cancelled == 1)

    fast = {"first_token": 0.0, "token_gap": 0.0}
    steps = (0.01,) if side == "stable" else (1.0,)
    run(check, FakeUpstream("stable", **fast), FakeUpstream("candidate", **fast), steps=steps)


def test_bodies_have_a_limit():
    async def check(r: Routed) -> None:
        status, _, text = 0, "", ""
        async with r.http.post(f"{r.url}/v1/completions", data=b"x" * 2000) as response:
            status, text = response.status, await response.text()
        assert status == 413
        assert "limit of 1000 bytes" in text

        async def pieces():
            for _ in range(20):
                yield b"x" * 100

        async with r.http.post(f"{r.url}/v1/completions", data=pieces()) as response:
            assert response.status == 413
        assert r.stable.requests == []

    run(check, max_body_bytes=1000)


def test_bodies_that_are_no_json_are_left_to_the_servers():
    async def check(r: Routed) -> None:
        for body in (b"{", b"[]", b"\xff", b""):
            async with r.http.post(f"{r.url}/v1/files", data=body) as response:
                assert response.status in (200, 500)
        async with r.http.delete(f"{r.url}/v1/files/1") as response:
            assert response.status == 200

    run(check)


def test_keys_of_the_servers_take_the_place_of_the_clients():
    async def check(r: Routed) -> None:
        await asyncio.gather(*(r.ask(headers={"Authorization": "Bearer client"}) for _ in range(2)))
        assert r.stable.requests[0][1]["Authorization"] == "Bearer s"
        assert r.candidate.requests[0][1]["Authorization"] == "Bearer c"

    run(check, stable_key="s", candidate_key="c")


def test_a_stable_side_of_another_shape():
    async def check(r: Routed) -> None:
        got = await asyncio.gather(*(r.ask(stream=False, max_tokens=2) for _ in range(2)))
        texts = {side: json.loads(text)["choices"][0]["text"] for _, side, text in got}
        assert texts["stable"] == " stable0 stable1"
        assert r.stable.requests[0][0] == "/generate"
        got = await asyncio.gather(*(r.ask(max_tokens=2) for _ in range(2)))
        assert all("broken" not in text for _, _, text in got)
        assert (await r.ask(prompt=[1, 2], stream=False))[0] in (200, 400)
        await r.act("rollback")
        status, _, text = await r.ask(prompt=[1, 2])
        assert status == 400
        assert "one text" in text

    run(check, adapter="generate")


def test_shadow_answers_are_compared_and_never_seen():
    async def check(r: Routed) -> None:
        r.candidate.name = "stable"
        got = await asyncio.gather(*(r.ask(stream=n % 2 == 0) for n in range(40)))
        assert {(status, side) for status, side, _ in got} == {(200, "stable")}
        results = r.router.proxy.shadow_results
        await r.until(lambda: sum(r.router.proxy.shadow_results.values()) == 20)
        assert (await r.status())["shadow"]["same"] == 20
        r.candidate.name = "other"
        await asyncio.gather(*(r.ask() for _ in range(10)))
        await r.until(lambda: r.router.proxy.shadow_results["different"] == 5)
        r.candidate.fault = "hang_in_stream"
        got = await asyncio.gather(*(r.ask() for _ in range(10)))  # nobody waits for the copies
        assert all("broken" not in text for _, _, text in got)
        r.candidate.fault = "error"
        await asyncio.gather(*(r.ask() for _ in range(4)))
        await r.until(lambda: r.router.proxy.shadow_results["failed"] >= 2)
        assert len(r.stable.requests) == 64
        assert results["failed"] == 0

    run(check, shadow=True, min_samples=1000)


def test_a_client_that_leaves_ends_the_copy_as_well():
    async def check(r: Routed) -> None:
        asking = [asyncio.create_task(r.ask()) for _ in range(2)]
        await r.until(lambda: r.stable.open == 2 and r.candidate.open == 1)
        for task in asking:
            task.cancel()
        await r.until(lambda: r.stable.cancelled == 2 and r.candidate.cancelled == 1)

    run(check, FakeUpstream("stable", first_token=60.0), FakeUpstream("candidate", first_token=60.0), shadow=True)


def test_an_open_stream_ends_in_peace_when_the_router_is_told_to_stop():
    async def check(r: Routed) -> None:
        asking = [asyncio.create_task(r.ask(max_tokens=30)) for _ in range(4)]
        await r.until(lambda: r.stable.open == 2 and r.candidate.open == 2)
        r.serving.cancel()
        got = await asyncio.gather(*asking)
        assert all(status == 200 and "broken" not in text for status, _, text in got)
        with pytest.raises(asyncio.CancelledError):
            await r.serving
        with pytest.raises(aiohttp.ClientError):
            await r.status()

    slow = {"token_gap": 0.03}
    run(check, FakeUpstream("stable", **slow), FakeUpstream("candidate", **slow))
