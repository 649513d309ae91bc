"""Whole rollouts against fake servers: bad candidates lose their traffic, and clients do not notice."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from support.canary_router import KEY, Routed, routed
from support.fake_upstream import FakeUpstream

from chairlift.canary.config import Timeouts
from chairlift.config import ConfigError

# Where time is not what is tested, no pause of the machine may pass for a slow candidate.
BY_ERRORS = "p95_e2e<60s,error_rate<1%"
BY_TIME = "p95_e2e<1s,error_rate<1%"
WINDOW = 30.0


async def load(r: Routed, clients: int, **body) -> list[tuple[int, str, str]]:
    """Clients that ask one thing after another until the rollout has come to an end."""
    got: list[tuple[int, str, str]] = []

    async def client() -> None:
        while r.router.rollout.phase == "running":
            got.append(await r.ask(stream=len(got) % 4 != 0, **body))

    async with asyncio.timeout(200):
        await asyncio.gather(*(client() for _ in range(clients)))
    return got


@pytest.mark.parametrize(
    ("fault", "every", "after"),
    [
        ("slow", 1, 0),
        ("error", 20, 0),
        ("hang", 1, 0),
        ("bad_event", 4, 0),
        ("cut", 4, 0),
        ("error_event", 4, 0),
        ("not_json", 4, 0),
    ],
)
def test_a_bad_candidate_is_rolled_back_within_a_window_and_no_client_sees_an_error(fault: str, every: int, after: int):
    async def main() -> None:
        candidate = FakeUpstream("candidate", fault=fault, fault_every=every, fault_after=after)
        if fault == "slow":
            candidate.fault, candidate.slower_by = None, 1.2
        timeouts = Timeouts(first_byte=30, total=60)
        gates = BY_TIME if fault in ("slow", "hang") else BY_ERRORS
        async with routed(
            FakeUpstream("stable"), candidate, gates=gates, window=WINDOW, timeouts=timeouts, steps=(0.25, 1.0)
        ) as r:
            began = r.router.rollout.events[0].time
            got = await load(r, 24)
            assert r.router.rollout.phase == "rolled_back"
            event = r.router.rollout.events[-1]
            assert event.time - began <= WINDOW
            assert ("p95_e2e" if fault in ("slow", "hang") else "error_rate") in event.reason
            assert all(status == 200 and "broken" not in text for status, _, text in got)
            assert {side for _, side, _ in [await r.ask() for _ in range(4)]} == {"stable"}
            assert (await r.status())["share"] == 0.0

    asyncio.run(main())


def test_a_candidate_that_dies_at_50_percent_is_rolled_back_and_only_open_streams_are_hurt():
    async def main() -> None:
        async with routed(gates=BY_ERRORS, window=WINDOW, steps=(0.1, 0.5, 1.0), down_after=2.0) as r:
            await r.act("promote")
            dead = asyncio.Event()

            async def die() -> None:
                await r.until(lambda: len(r.candidate.requests) > 100)
                hurt = r.candidate.most_open
                r.candidate.fault, r.candidate.fault_every, r.candidate.fault_after = "cut", 1, 0
                r.vanish("candidate")
                assert hurt > 0
                dead.set()

            dying = asyncio.create_task(die())
            got = await load(r, 24)
            await dying
            assert dead.is_set()
            assert r.router.rollout.phase == "rolled_back"
            assert all(status == 200 and "broken" not in text for status, _, text in got)

    asyncio.run(main())


def test_requests_that_hang_on_the_candidate_are_taken_back_by_the_rollback():
    async def main() -> None:
        async with routed(FakeUpstream("stable"), FakeUpstream("candidate", fault="hang")) as r:
            asking = [asyncio.create_task(r.ask(stream=n % 2 == 0)) for n in range(20)]
            await r.until(lambda: r.candidate.open == 10)
            assert (await r.act("rollback"))[0] == 200
            got = await asyncio.gather(*asking)
            assert {(status, side) for status, side, _ in got} == {(200, "stable")}
            await r.until(lambda: r.candidate.cancelled == 10)

    asyncio.run(main())


def test_a_candidate_that_only_fails_its_probes_is_rolled_back_without_traffic():
    async def main() -> None:
        async with routed(health_interval=0.1, down_after=0.5) as r:
            r.vanish("candidate")
            await r.until(lambda: r.router.rollout.phase == "rolled_back")
            assert "down" in r.router.rollout.events[-1].reason
            assert (await r.status())["sides"]["candidate"]["breaker"] != "closed"
            assert (await r.status())["sides"]["stable"]["up"]

    asyncio.run(main())


def test_nothing_is_rolled_back_onto_a_dead_stable():
    async def main() -> None:
        async with routed(health_interval=0.05, down_after=0.3) as r:
            r.vanish("stable")
            r.vanish("candidate")
            await r.until(lambda: r.router.rollout.events[-1].kind == "waiting")
            assert "stable is down as well" in r.router.rollout.events[-1].reason
            async with r.http.get(f"{r.url}/health") as response:
                assert response.status == 503

    asyncio.run(main())


def test_a_good_candidate_goes_to_100_percent_under_load():
    async def main() -> None:
        settings = {"steps": (0.25, 0.5, 1.0), "hold": 0.5, "window": 20.0, "false_pass": 0.3}
        async with routed(gates="p90_e2e<20s,error_rate<5%,vs_stable.p90_e2e<5", **settings) as r:
            r.stable.slower_by = 0.05
            got = await load(r, 24)
            assert [e.kind for e in r.router.rollout.events if e.kind != "waiting"] == [
                "started", "promoted", "promoted", "completed",
            ]  # fmt: skip
            assert all(status == 200 and "broken" not in text for status, _, text in got)
            assert {side for _, side, _ in [await r.ask() for _ in range(4)]} == {"candidate"}

    asyncio.run(main())


def test_operators_steer_by_api_with_the_key_alone():
    async def main() -> None:
        async with routed() as r:
            for key in ("", "wrong", KEY + "x"):
                assert (await r.act("promote", key))[0] == 401
            async with r.http.post(f"{r.url}/canary/promote", headers={"Authorization": KEY}) as response:
                assert response.status == 401
            async with r.http.get(f"{r.url}/canary/promote") as response:
                assert response.status == 405
            async with r.http.post(f"{r.url}/canary/nothing") as response:
                assert response.status == 404
            assert (await r.status())["share"] == 0.5
            code, status = await r.act("hold")
            assert (code, status["phase"]) == (200, "held")
            code, refusal = await r.act("hold")
            assert code == 409
            assert "only a running one" in refusal["error"]["message"]
            assert (await r.act("resume"))[1]["phase"] == "running"
            assert (await r.act("promote"))[1]["share"] == 1.0
            assert (await r.act("rollback"))[1]["share"] == 0.0
            assert (await r.act("promote"))[1]["share"] == 0.5
            kinds = [e["kind"] for e in (await r.status())["events"]]
            assert kinds == ["started", "held", "resumed", "promoted", "rolled_back", "started"]

    asyncio.run(main())


def test_page_status_and_metrics():
    async def main() -> None:
        async with routed() as r:
            await asyncio.gather(*(r.ask() for _ in range(20)))
            await r.until(lambda: r.router.readings and r.router.readings[0].samples == 10)
            async with r.http.get(f"{r.url}/canary") as response:
                page = await response.text()
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert not re.search(r"""(?:src|href)=|url\(|@import""", page)  # nothing from elsewhere
            status = await r.status()
            side = status["sides"]["candidate"]
            assert side["requests"]["answered"] == 10
            assert 0 < side["p50_ttft_s"] <= side["p50_e2e_s"] <= side["p99_e2e_s"]
            assert [g["gate"] for g in status["gates"]] == ["p99_e2e<30s", "error_rate<1%"]
            assert status["gates"][0]["high"] is None  # too few to say; JSON has no infinity
            metrics = await r.metrics()
            for line in (
                'chairlift:canary_requests_total{outcome="answered",side="candidate"} 10.0',
                'chairlift:canary_assigned_total{side="stable"} 10.0',
                "chairlift:canary_share 0.5",
                'chairlift:canary_phase{phase="running"} 1.0',
                'chairlift:canary_up{side="stable"} 1.0',
                'chairlift:canary_gate{gate="error_rate<1%"} 0.0',
                'chairlift:canary_e2e_request_latency_seconds_count{side="candidate"} 10.0',
            ):
                assert line in metrics

    asyncio.run(main())


def test_a_restart_goes_on_where_it_was_and_keeps_sessions_where_they_were(tmp_path: Path):
    path = tmp_path / "state.json"
    ports: dict[str, int] = {}

    async def first() -> dict[str, str]:
        async with routed(state_file=path, steps=(0.1, 0.5, 1.0)) as r:
            ports.update(stable=int(r.router.config.stable[-5:]), candidate=int(r.router.config.candidate[-5:]))
            await r.act("promote")
            names = [f"s{n}" for n in range(40)]
            return {name: (await r.ask(headers={"X-Session-Id": name}))[1] for name in names}

    sides = asyncio.run(first())
    assert sorted(sides.values()).count("candidate") == 20
    document = json.loads(path.read_text())
    assert document["content"]["step"] == 1
    spent = document["content"]["spent_starts"]
    assert spent >= 2

    async def second() -> None:
        from support.canary_router import EACH_ITS_OWN

        from chairlift.canary.config import CanaryConfig
        from chairlift.canary.gates import parse_gates
        from chairlift.canary.router import Router

        settings = {
            "stable": f"http://127.0.0.1:{ports['stable']}", "candidate": f"http://127.0.0.1:{ports['candidate']}",
            "gates": parse_gates("p99_e2e<30s,error_rate<1%"), "state_file": path, "session": EACH_ITS_OWN,
        }  # fmt: skip
        with pytest.raises(ConfigError, match="another rollout"):
            Router(CanaryConfig(**settings, steps=(0.2, 1.0)), KEY)
        router = Router(CanaryConfig(**settings, steps=(0.1, 0.5, 1.0)), KEY)
        assert (router.rollout.share, router.rollout.phase) == (0.5, "running")
        assert [e.kind for e in router.rollout.events] == ["started", "promoted", "restored"]
        assert router.judge.spent_starts == spent + 1  # the budget is not renewed by a restart
        for name, side in sides.items():
            assert router.splitter.is_candidates(f"header {name}") == (side == "candidate")

    asyncio.run(second())


def test_a_bug_in_reading_the_gates_does_not_take_the_traffic_down(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with routed() as r:

            def broken(now: float, *, compare: bool) -> list:
                raise ZeroDivisionError

            r.router.judge.read = broken
            await r.until(lambda: "could not be read" in caplog.text)
            assert {status for status, _, _ in [await r.ask() for _ in range(4)]} == {200}
            assert (await r.act("rollback"))[0] == 200

    asyncio.run(main())
