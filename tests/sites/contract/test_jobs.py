"""Jobs: from their submission until the site may forget them."""

import asyncio
import uuid
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site, SiteFacts
from tests.sites.contract.steps import (
    a_job,
    content,
    ended,
    fate,
    held_job,
    running,
    until,
    until_found,
    until_let_end,
)


class TestJobs:
    async def test_runs_and_ends(self, site: Site) -> None:
        job = await site.submit(a_job("exit 0"))
        state = await until(site, job, ended)
        assert state.reason is Reason.SUCCESS
        explained = await site.explain(job)
        assert (explained.phase, explained.reason) == (state.phase, state.reason)

    async def test_script_arrives_byte_by_byte(self, site: Site, facts: SiteFacts) -> None:
        text = "'$HOME' \"$USER\" `id` $(id) \\n % # ü € 🙂 \t ${X:-y} <&>;"

        script = f"cat > '{facts.workspace}/text' <<'END OF TEXT'\n{text}\nEND OF TEXT\n"
        await until(site, await site.submit(a_job(script)), ended)
        assert (await content(site, "text")).decode() == f"{text}\n"

    async def test_name_is_any_text(self, site: Site) -> None:
        names = ("", "a\nb", "ü 'x' \"y\" $HOME #%", "x" * 300)
        jobs = [await site.submit(replace(a_job("exit 0"), name=name)) for name in names]
        for job in jobs:
            assert (await until(site, job, ended)).reason is Reason.SUCCESS

    async def test_script_has_a_login_shell_where_it_asks(
        self, site: Site, facts: SiteFacts
    ) -> None:
        jobs = {}
        for login_shell in (False, True):
            script = f"shopt login_shell > '{facts.workspace}/{login_shell}'; exit 0"
            submission = replace(a_job(script), login_shell=login_shell)
            jobs[login_shell] = await site.submit(submission)
        for login_shell, job in jobs.items():
            assert (await until(site, job, ended)).reason is Reason.SUCCESS
            told = (await content(site, str(login_shell))).split()
            assert told == [b"login_shell", b"on" if login_shell else b"off"]

    async def test_starts_after_others(self, site: Site, facts: SiteFacts) -> None:
        if not facts.orders_jobs:
            return
        first = await site.submit(held_job(facts, 3))
        while first not in (known := await site.scheduler_ids([first])):
            await asyncio.sleep(0.2)
        after = await site.submit(replace(a_job("exit 0"), after=(known[first],)))
        await until(site, first, running)
        assert (await site.states([after]))[after].phase is Phase.WAITING
        assert (await site.explain(after)).waits in (None, "")
        await until_let_end(site, first, 3)
        assert (await until(site, after, ended)).reason is Reason.SUCCESS

    async def test_unknown_ones_are_explained_as_such(self, site: Site) -> None:
        assert (await site.explain("no-such-job")).phase is Phase.UNKNOWN

    async def test_is_found_by_its_tag(self, site: Site) -> None:
        one, other = a_job("exit 0"), a_job("exit 0")
        jobs = [await site.submit(one), await site.submit(other), await site.submit(one)]
        strangers = {str(uuid.uuid4()): set[str]() for _ in range(50)}
        wanted = {one.tag: {jobs[0], jobs[2]}, other.tag: {jobs[1]}}
        await until_found(site, wanted)
        await until_found(site, {**strangers, **wanted})
        assert await site.find({}) == {}

    async def test_is_cancelled(self, site: Site) -> None:
        job = await site.submit(a_job("exec sleep 300"))
        assert (await until(site, job, running)).reason is None
        await site.cancel([job, "no-such-job"])
        assert (await until(site, job, ended)).reason is Reason.CANCELLED
        assert (await site.explain(job)).reason is Reason.CANCELLED
        await site.cancel([job])

    async def test_states_of_many(self, site: Site, facts: SiteFacts) -> None:
        jobs = await asyncio.gather(*(site.submit(held_job(facts, n)) for n in range(4)))
        # Not one after the other: it is the scheduler that decides which of them start first.
        await asyncio.gather(*(until_let_end(site, job, n) for n, job in enumerate(jobs)))
        found = await site.states([*jobs, "no-such-job"])
        assert [found[job].reason for job in jobs] == [Reason.SUCCESS, *3 * [Reason.EXIT_CODE]]
        assert all(str(n) in found[job].detail for n, job in enumerate(jobs) if n)
        assert "3" in (await site.explain(jobs[3])).detail
        assert found["no-such-job"].phase is Phase.UNKNOWN
        assert await site.states([]) == {}
        seen = await site.glance([*jobs, "no-such-job"])
        # Where one request lists all jobs, it tells of their states, too.
        assert seen is None or {j: s.phase for j, s in seen.items()} == dict.fromkeys(
            jobs, Phase.ENDED
        )

    async def test_is_forgotten(self, site: Site) -> None:
        """A site whose records belong to its scheduler's accounting keeps them."""
        submission = a_job("exit 0")
        job = await site.submit(submission)
        await until(site, job, ended)
        await site.forget([job, "no-such-job"])
        for state in ((await site.states([job]))[job], await site.explain(job)):
            assert state.phase is Phase.UNKNOWN or state.reason is Reason.SUCCESS
        found = await site.find({submission.tag: submission.name})
        assert found[submission.tag] in ([], [job])
        await site.forget([job])

    async def test_is_kept_longer(self, site: Site) -> None:
        job = await site.submit(a_job("exit 0"))
        await site.extend([job, "no-such-job"], 20 * 86_400)
        await site.extend([job], 60)

    @pytest.mark.parametrize(
        "command",
        [
            "echo before >> {log}",
            """printf '%s' "b;e" 'f;o' "r;e" | tr -d ';' >> {log}; echo >> {log}""",
            "if true; then\necho before >> {log}\nfi",
        ],
    )
    async def test_hooks_on_the_login_node(
        self, command: str, site: Site, facts: SiteFacts
    ) -> None:
        log = f"'{facts.workspace}/order'"
        hooked = replace(
            a_job(f"echo job >> {log}"),
            before_on_login=(command.format(log=log), f"echo 'and before' >> {log}"),
            after_on_login=(f"echo after >> {log}",),
        )
        try:
            job = await site.submit(hooked)
        except SiteRejected:  # a site that runs nothing there says so beforehand
            assert await site.find({hooked.tag: hooked.name}) == {hooked.tag: []}
            assert await site.stat("order") is None
            return
        assert (await until(site, job, ended)).reason is Reason.SUCCESS
        assert await content(site, "order") == b"before\nand before\njob\nafter\n"

    @pytest.mark.parametrize("hook", [("true", "exit 4"), ("false",)])
    async def test_hook_that_fails_ends_the_job(
        self, hook: tuple[str, ...], site: Site, facts: SiteFacts
    ) -> None:
        ran = f"touch '{facts.workspace}/ran'"
        result = await fate(site, replace(a_job(ran), before_on_login=hook))
        if isinstance(result, JobState):
            assert result.reason is Reason.LAUNCH_FAILURE
        else:
            assert isinstance(result, SiteRejected)
        assert await site.stat("ran") is None
