"""What `rollflow doctor` finds: on machines that are made up, and on this one."""

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from rlcore.checkpoint_engine.segment_file import hold_segment
from rlcore.doctor import examine_machine
from rlcore.doctor.leftovers import check_leftovers, ray_without_driver
from rlcore.doctor.machine import cores, disk, memory, shared_memory
from rlcore.doctor.servers import prefect_server, ray_cluster, ray_token
from rlcore.doctor.software import compare_versions, python
from rlcore.trainer.snapshots import snapshot_root


def test_this_machine():
    findings = examine_machine("runs", {})
    assert {"python", "packages", "cores", "memory", "prefect", "ray", "ray token"} <= {
        finding.subject for finding in findings
    }
    for finding in findings:
        assert finding.fix or finding.level == "ok"
        assert str(finding).startswith(finding.level)


def test_versions_that_clash_are_named():
    wanted = ["ray[default]<2.61,>=2.60", "torch>=2.13", "pytest>=8; extra == 'dev'", "absent"]
    installed = {"ray": "2.59.0", "torch": "2.13.0"}
    found = compare_versions(wanted, installed.get, lambda _: [])
    assert [(f.subject, f.level) for f in found] == [("ray", "error"), ("absent", "error")]
    assert "2.59.0, but rollflow needs <2.61,>=2.60" in found[0].message
    assert found[1].message.startswith("not installed")
    (fine,) = compare_versions(wanted[1:3], installed.get, lambda _: [])
    assert (fine.level, fine.message) == ("ok", "all 1 fit each other")


def test_packages_that_clash_with_each_other_are_named():
    needs = {"torch": ["sympy<2"], "sympy": ["mpmath>=1.3", "torch>=1"], "ray": ["mpmath<1.4"]}
    installed = {"ray": "2.60", "torch": "2.13", "sympy": "1.14", "mpmath": "1.4.1"}
    (found,) = compare_versions(["torch", "ray"], installed.get, lambda name: needs.get(name, []))
    assert (found.level, found.subject) == ("error", "mpmath")
    assert found.message == "1.4.1, but ray needs <1.4"


def test_python_memory_and_disk(tmp_path):
    assert python((3, 11)).level == "ok"
    assert python((3, 14)).level == "error"
    assert python((3, 10)).fix
    assert memory(8 * 2**30).level == "ok"
    assert memory(2**30).level == "warning"
    assert "1.0 GiB free" in memory(2**30).message
    assert "cannot be read" in shared_memory(tmp_path / "none").message
    assert disk(tmp_path / "not" / "there").subject.endswith("not/there)")
    assert disk(Path("/proc/self/runs")).message == "/proc/self is not writable"


def test_little_space_is_told(tmp_path):
    little = shared_memory(tmp_path, lambda _: 64 * 2**20)
    assert (little.level, little.message[:12]) == ("warning", "0.1 GiB free")
    assert "trainer.runs_root" in disk(tmp_path, lambda _: 2**30).fix
    assert disk(tmp_path, lambda _: 2**40).level == "ok"


def test_ray_clusters_without_a_driver():
    found = list(
        ray_without_driver(
            [
                {"name": "raylet", "ppid": 1, "pid": 7},
                {"name": "raylet", "ppid": 30, "pid": 8},
                {"name": "python", "ppid": 1, "pid": 9},
            ]
        )
    )
    assert [finding.message.partition(")")[0] for finding in found] == ["raylet (pid 7"]


def test_cores():
    assert cores(4, None, {}).level == "ok"
    limited = cores(8, 2.5, {})
    assert (limited.level, limited.fix) == ("warning", "set ray.num_threads=2")
    assert "OMP_NUM_THREADS=16" in cores(4, None, {"OMP_NUM_THREADS": "16"}).message


def test_ray_token(tmp_path):
    path = tmp_path / "token"
    given = {"RAY_AUTH_TOKEN_PATH": str(path)}
    assert ray_token(given).level == "error"
    path.write_text("secret")
    path.chmod(0o644)
    assert "can be read by others" in ray_token(given).message
    path.chmod(0o600)
    assert ray_token(given).level == "ok"
    assert "asks nobody" in ray_token({**given, "RAY_AUTH_MODE": "disabled"}).message
    assert ray_token({"RAY_AUTH_TOKEN": "x"}).level == "ok"


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd.server_port
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_servers_that_answer_and_that_do_not(server):
    assert prefect_server({}).level == "ok"
    assert prefect_server({"PREFECT_API_URL": f"http://127.0.0.1:{server}/api"}).level == "ok"
    assert prefect_server({"PREFECT_API_URL": "http://127.0.0.1:1/api"}).level == "error"
    assert "no http address" in prefect_server({"PREFECT_API_URL": "file:///x"}).message
    assert ray_cluster({}).level == "ok"
    assert ray_cluster({"RAY_ADDRESS": f"127.0.0.1:{server}"}).level == "ok"
    assert ray_cluster({"RAY_ADDRESS": "127.0.0.1:1"}).fix


def run_json(folder, run_id, **attempt):
    path = folder / run_id / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"run_id": run_id, "attempts": [attempt]}))


def test_leftovers_of_dead_runs(tmp_path):
    runs, shared = tmp_path / "runs", tmp_path / "shm"
    shared.mkdir()
    me = psutil.Process(os.getpid())
    run_json(runs, "done", pid=1, began=1, outcome="finished")
    run_json(runs, "killed", pid=2**22 + 1, began=1)
    run_json(runs, "alive", pid=me.pid, began=me.create_time() + 5)
    # A process of today has the number that the dead driver had.
    run_json(runs, "reused", pid=me.pid, began=me.create_time() - 100)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    run_json(runs, "elsewhere", pid=2**22 + 1, began=1)
    (runs / "elsewhere" / "run.holder").write_text("run elsewhere (pid 5 on another-host)\n")
    (shared / "rollflow-killed.weights").write_bytes(b"x")
    descriptor = hold_segment(shared / "rollflow-alive.weights")
    forgotten = snapshot_root(runs / "forgotten", shared)
    forgotten.mkdir()
    owner = {"run_folder": str(runs / "forgotten"), "run_id": "forgotten"}
    owner["host"] = socket.gethostname()
    (forgotten / "owner.json").write_text(json.dumps(owner))
    found = check_leftovers(runs, shared)
    os.close(descriptor)
    ours = [f for f in found if f.subject != "ray"]
    assert [f.subject for f in ours] == [
        "run killed",
        "run reused",
        "shared memory",
        "shared memory",
    ]
    assert "rollflow resume" in ours[0].fix
    assert "rollflow-killed.weights" in ours[2].message
    assert str(forgotten) in ours[3].message


def test_no_leftovers(tmp_path):
    found = [f for f in check_leftovers(tmp_path / "none", tmp_path) if f.subject != "ray"]
    assert [f.message for f in found] in (["none"], [])
