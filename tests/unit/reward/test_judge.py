"""A judge's outage looks like an outage, whatever the outage is."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcore.errors import RewardError, RewardTimeoutError
from rlcore.reward.function import Reward

JUDGE = """
import urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info, url):
    with urllib.request.urlopen(f"{url}/{solution_str}") as answer:
        return float(answer.read())
"""


class Judge(BaseHTTPRequestHandler):
    """Answers as the path asks for."""

    def do_GET(self):
        what = self.path.strip("/")
        if what == "nothing":
            time.sleep(30)
            return
        self.send_response(200 if what == "good" else int(what))
        self.end_headers()
        self.wfile.write(b"0.75")

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_judge_that_answers_429_500_and_nothing(make_config, make_task, score_all, url):
    config = make_config(
        JUDGE,
        reward__custom_reward_function__reward_kwargs={"url": url},
        reward__reward_manager__name="rate_limited",
        reward__max_concurrent=2,
        reward__timeout=3.0,
    )
    answers = ["429", "good", "nothing", "500", "good"]
    limited, first, silent, broken, second = score_all(
        config, [make_task(answer) for answer in answers]
    )
    assert first == second == Reward(score=0.75, extra={"acc": 0.75})
    assert isinstance(limited, RewardError)
    assert str(limited).endswith("HTTP Error 429: Too Many Requests")
    assert str(broken).endswith("HTTP Error 500: Internal Server Error")
    assert isinstance(silent, RewardTimeoutError)
