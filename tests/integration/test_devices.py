"""The device lock names its holder; a cluster that is too small is refused in one message."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.cluster.device_lock import cluster_device_lock, local_device_lock, waited_lock
from rlcore.cluster.start import hold_devices, refuse_small_cluster
from rlcore.config import load_config
from rlcore.errors import ConfigError, DeviceLockError

HOLD = (
    "import sys; from pathlib import Path\n"
    "from rlcore.cluster.device_lock import local_device_lock\n"
    "with local_device_lock('run alpha', Path(sys.argv[1])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


async def take(holder, folder, wait_s):
    async with waited_lock(lambda: local_device_lock(holder, folder), wait_s=wait_s):
        return "taken"


def test_a_second_run_is_refused_with_the_name_of_the_first_and_may_wait(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(DeviceLockError, match=rf"held by run alpha \(pid {first.pid}"):
            asyncio.run(take("run beta", tmp_path, 0))

        async def wait_while_it_ends():
            waiting = asyncio.create_task(take("run beta", tmp_path, 30))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            first.stdin.close()
            return await waiting

        assert asyncio.run(wait_while_it_ends()) == "taken"
    finally:
        first.kill()
        first.wait()


def test_a_folder_of_another_user_is_refused_in_one_message(tmp_path):
    folder = tmp_path
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        folder = Path("/usr")
    with pytest.raises(DeviceLockError, match=rf"{folder}: it belongs to user \d+ "):
        local_device_lock("run alpha", folder)


def test_a_place_for_the_lock_that_is_no_folder_is_refused_in_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceLockError, match="File exists; set TMPDIR"):
        local_device_lock("run alpha", tmp_path / "file")
    # What cannot be opened, for whatever reason.
    (tmp_path / "devices.lock").mkdir()
    with (
        pytest.raises(DeviceLockError, match=r"devices\.lock: Is a directory; does it belong"),
        local_device_lock("run alpha", tmp_path),
    ):
        pass


@pytest.mark.integration
def test_a_shared_cluster_has_one_holder_at_a_time(ray_session):
    with (
        cluster_device_lock("run alpha"),
        pytest.raises(DeviceLockError, match="devices are held by run alpha"),
        cluster_device_lock("run beta"),
    ):
        pass
    with cluster_device_lock("run beta"):
        pass


@pytest.mark.integration
def test_devices_are_free_again_after_a_run_that_failed(ray_session):
    config = load_config("grpo-tiny")

    async def fail():
        async with hold_devices(config, "run alpha"):
            raise RuntimeError("phase failed")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="phase failed"):
            asyncio.run(fail())


def test_a_cluster_that_is_too_small_is_refused_with_the_sum_and_the_fix():
    config = load_config("grpo-tiny", {"ray.address": "10.0.0.7:6379"})
    with pytest.raises(ConfigError, match=r"at 10.0.0.7:6379 has 1 CPUs, the run needs 2; start"):
        refuse_small_cluster(config, 1)
    refuse_small_cluster(config, 2)
