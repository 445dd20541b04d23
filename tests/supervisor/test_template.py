"""Engines that are forked are, to their supervisor, as those that it starts itself."""

import asyncio
import json
import os
import sys

import psutil
import pytest

from workbench.supervisor.cluster_processes import command
from workbench.supervisor.template import EngineTemplate

COMMAND = command("tests.supervisor.forked", "--given")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    "WORKBENCH_PARENT": str(os.getpid()),
    "WORKBENCH_PRELOAD": "numpy,missing_altogether",
    "WORKBENCH_ENGINE": "0",
}


async def made() -> EngineTemplate:
    ready = asyncio.Event()
    template = EngineTemplate(COMMAND, ENVIRONMENT, ready.set)
    assert template.is_waited_for
    assert not template.takes(COMMAND, ENVIRONMENT)
    await asyncio.wait_for(ready.wait(), 60)
    assert not template.is_waited_for
    return template


def test_forked_engines_are_children_with_a_status_and_an_output_of_their_own(tmp_path):
    async def run() -> None:
        template, told = await made(), []
        try:
            for engine in ("1", "2"):
                output = tmp_path / engine
                output.write_text("before\n")
                environment = {**ENVIRONMENT, "WORKBENCH_ENGINE": engine}
                given = [*COMMAND, engine]
                assert template.takes(given, environment)
                pid = template.fork(given, environment, str(output))
                process = psutil.Process(pid)
                assert process.ppid() == os.getpid()
                assert process.wait(60) == 7
                before, said = output.read_text().splitlines()
                assert before == "before"
                told.append(json.loads(said))
        finally:
            template.close()
        assert [one["engine"] for one in told] == ["1", "2"]
        assert told[0]["drawn"] != told[1]["drawn"]
        for one in told:
            assert (one["parent"], one["leads"]) == (os.getpid(), True)
            assert (one["template"], one["arguments"]) == (None, ["--given", one["engine"]])

    asyncio.run(run())


def test_another_interpreter_or_environment_is_not_taken():
    async def run() -> None:
        template = await made()
        try:
            assert template.takes(COMMAND, {**ENVIRONMENT, "WORKBENCH_CORES": "0"})
            assert template.takes(["nsenter", "--net=/run/netns/a", "--", *COMMAND], ENVIRONMENT)
            assert template.takes(command("another.module"), template.shared_environment)
            assert not template.takes(["/usr/bin/python", *COMMAND[1:]], ENVIRONMENT)
            assert not template.takes([sys.executable, "-m", "another.module"], ENVIRONMENT)
            assert not template.takes(["nsenter", "--mount", "--", *COMMAND], ENVIRONMENT)
            assert not template.takes([sys.executable, "relay.py", "host", *COMMAND], ENVIRONMENT)
            assert not template.takes(COMMAND, {**ENVIRONMENT, "OMP_NUM_THREADS": "77"})
            assert not template.takes(COMMAND, {**ENVIRONMENT, "LD_PRELOAD": "its_own.so"})
        finally:
            template.close()
        assert not template.takes(COMMAND, ENVIRONMENT)

    asyncio.run(run())


def test_a_template_that_is_gone_forks_none(tmp_path):
    async def run() -> None:
        template = await made()
        (process,) = [each for each in psutil.Process().children() if COMMAND[-2] in each.cmdline()]
        process.kill()
        process.wait(60)
        with pytest.raises(OSError, match="no process could be forked"):
            template.fork(COMMAND, ENVIRONMENT, str(tmp_path / "output"))
        assert not template.takes(COMMAND, ENVIRONMENT)
        template.close()  # as at the end of a cluster

    asyncio.run(run())


def test_one_that_cannot_begin_is_not_waited_for():
    async def run() -> None:
        ready = asyncio.Event()
        template = EngineTemplate(
            [sys.executable, "-c", "raise SystemExit"], ENVIRONMENT, ready.set
        )
        await asyncio.wait_for(ready.wait(), 60)
        assert not template.is_waited_for
        assert not template.takes(COMMAND, ENVIRONMENT)
        template.close()

    asyncio.run(run())
