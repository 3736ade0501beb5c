"""The servers of a Mooncake store: who holds what, what a death costs, what a bad address says."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

import psutil
import pytest
from real_parts.project import REFERENCE

from rlcore.buffer.mooncake_store import MooncakeServers
from rlcore.config.queue import MooncakeStoreConfig
from rlcore.errors import ActorUnavailableError, ConfigError

pytestmark = pytest.mark.integration
MIB = 1024**2
SETTINGS = MooncakeStoreConfig(
    auto_init=True,
    master_server_address="127.0.0.1:0",
    local_hostname="127.0.0.1",
    global_segment_size=64 * MIB,
    local_buffer_size=16 * MIB,
)
HOLDS = (
    "import sys, time\n"
    "from rlcore.buffer.mooncake_store import MooncakeServers\n"
    "from rlcore.config.queue import MooncakeStoreConfig\n"
    "servers = MooncakeServers(MooncakeStoreConfig.model_validate_json(sys.argv[1]))\n"
    "print(servers.start()[0], flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def servers():
    servers = MooncakeServers(SETTINGS)
    yield servers
    servers.stop()
    assert not helpers()


def helpers():
    """The store's processes below this one."""
    names = ("mooncake_master", "rlcore.buffer.mooncake_store")
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            found.update({name: process for name in names if name in command})
    return found


def client(master):
    """A store's client that brings no memory of its own."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0
    return store


def until(true, seconds=20):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_rows_outlive_the_client_that_wrote_them_and_a_dead_master_is_started_anew(servers):
    master, metadata = servers.start()
    assert metadata == "P2PHANDSHAKE"
    assert master.startswith("127.0.0.1:")
    writes = (
        "import sys\nfrom mooncake.store import MooncakeDistributedStore\n"
        "store = MooncakeDistributedStore()\n"
        f"store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, {16 * MIB}, 'tcp', '', sys.argv[1])\n"
        "assert store.put('row', b'abc') == 0\nstore.close()\n"
    )
    subprocess.run([sys.executable, "-c", writes, master], check=True, timeout=60)
    with closing(client(master)) as reader:
        assert reader.get("row") == b"abc"
        old = helpers()["mooncake_master"]
        listening = {c.laddr.ip for c in old.net_connections() if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        os.kill(old.pid, signal.SIGKILL)
        until(lambda: helpers().get("mooncake_master", old).pid != old.pid)
        servers.check()
        # Its keys are gone, and rows can be written again.
        until(lambda: reader.put("row", b"new") == 0 and reader.get("row") == b"new")


def test_a_dead_holder_is_named(servers):
    servers.start()
    holder = helpers()["rlcore.buffer.mooncake_store"]
    os.kill(holder.pid, signal.SIGKILL)

    def is_named():
        try:
            servers.check()
        except ActorUnavailableError as error:
            return "holder" in str(error) and "died (exit code -9)" in str(error)
        return False

    until(is_named)


def test_the_servers_end_with_a_host_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, SETTINGS.model_dump_json()], stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline().startswith(b"127.0.0.1:")
        below = list(helpers().values())
        assert len(below) == 2
        host.kill()
        psutil.wait_procs(below, timeout=20)
    assert not any(p.is_running() for p in below)


def test_a_store_of_someone_elses_is_joined_and_an_address_without_one_is_refused(servers):
    master, metadata = servers.start()
    elsewhere = {"auto_init": False, "master_server_address": master, "metadata_server": metadata}
    joined = MooncakeServers(SETTINGS.model_copy(update=elsewhere))
    try:
        assert joined.start() == (master, metadata)
    finally:
        joined.stop()
    assert sorted(helpers()) == ["mooncake_master", "rlcore.buffer.mooncake_store"]
    nobody = {"auto_init": False, "master_server_address": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"master_server_address=127\.0\.0\.1:1: nothing listens"):
        MooncakeServers(SETTINGS.model_copy(update={**nobody, "metadata_server": metadata})).start()
    taken = {"master_server_address": master}
    with pytest.raises(ConfigError, match=r"no mooncake_master can listen there .*in use"):
        MooncakeServers(SETTINGS.model_copy(update=taken)).start()


def test_the_package_is_needed_only_for_the_store():
    code = "import sys, rlcore.cluster.queue_host; print('mooncake' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_whole_run_keeps_its_rows_in_a_mooncake_store_and_trains_the_same_weights(
    joined, reference_run
):
    store = "transfer_queue.backend"
    folder = joined.root / "by-mooncake-store"
    code, text = joined.run(
        "train", "grpo-tiny", *REFERENCE, f"trainer.runs_root={joined.root / 'runs-mooncake'}",
        f"trainer.default_local_dir={folder}",
        f"{store}.storage_backend=MooncakeStore",
        f"{store}.MooncakeStore.auto_init=true",
        f"{store}.MooncakeStore.master_server_address=localhost:0",
        f"{store}.MooncakeStore.global_segment_size={64 * MIB}",
        f"{store}.MooncakeStore.local_buffer_size={16 * MIB}",
    )  # fmt: skip
    assert code == 0, text[-4000:]
    by_mooncake, by_default = (
        (run / "model" / "model.safetensors").read_bytes() for run in (folder, reference_run)
    )
    assert by_mooncake == by_default
    assert not helpers()
