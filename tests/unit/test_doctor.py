"""What `rollflow doctor` finds: on machines that are made up, and on this one."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from rlcore.checkpoint_engine.segment_file import hold_segment
from rlcore.doctor import examine_machine
from rlcore.doctor.leftovers import check_leftovers
from rlcore.doctor.machine import cores
from rlcore.doctor.servers import prefect_server, ray_cluster, ray_token
from rlcore.doctor.software import compare_versions


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
    found = compare_versions(wanted, installed.get)
    assert [(f.subject, f.level) for f in found] == [("ray", "error"), ("absent", "error")]
    assert "2.59.0, but rollflow needs <2.61,>=2.60" in found[0].message
    assert found[1].message.startswith("not installed")
    (fine,) = compare_versions(wanted[1:3], installed.get)
    assert (fine.level, fine.message) == ("ok", "all 1 in the tested ranges")


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
    (shared / "rollflow-killed.weights").write_bytes(b"x")
    descriptor = hold_segment(shared / "rollflow-alive.weights")
    found = check_leftovers(runs, shared)
    os.close(descriptor)
    ours = [f for f in found if f.subject != "ray"]
    assert [f.subject for f in ours] == ["run killed", "run reused", "shared memory"]
    assert "rollflow resume" in ours[0].fix
    assert "rollflow-killed.weights" in ours[2].message


def test_no_leftovers(tmp_path):
    found = [f for f in check_leftovers(tmp_path / "none", tmp_path) if f.subject != "ray"]
    assert [f.message for f in found] in (["none"], [])
