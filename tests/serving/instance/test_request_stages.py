"""Stages are recorded for their own request only, also on tasks that it starts."""

import asyncio

from slipstream.serving.instance.request_stages import computed_in_line, recorded_stages, stage


def test_stages_are_kept_apart_by_request_and_nest():
    async def work(name: str) -> None:
        with stage(name):
            await asyncio.sleep(0)

    async def request(name: str) -> list[str]:
        with recorded_stages(in_line=name == "a") as stages, stage(f"{name} whole"):
            assert computed_in_line() == (name == "a")
            await asyncio.gather(work(f"{name} one"), work(f"{name} two"))
        assert all(0 <= begin <= end for _, begin, end in stages.found)
        return [each[0] for each in stages.found]

    async def both() -> list[list[str]]:
        return await asyncio.gather(request("a"), request("b"))

    assert asyncio.run(both()) == [["a one", "a two", "a whole"], ["b one", "b two", "b whole"]]


def test_nothing_is_recorded_outside_a_request():
    with stage("lonely"):
        pass
    assert not computed_in_line()
