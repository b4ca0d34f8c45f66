"""Limits on the cost of laying out a coordinator's model, for any config."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessera.shared.model.spec import Model
from tessera.worker.errors import UnsafeConfig
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.config import check_config
from tessera.worker.model.sandbox import FORK_SERVER, ForkServer, Sandbox, TokenizerRequest
from tests.support.pretrained import bert_tokenizer

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
MODEL = Model(config=BERT, head="features", blocks=block_table(instantiate(BERT, "features")))
# A table over all pairs of 65,536 places, made in main memory before there is a parameter to count.
LEVIT = MODEL.model_copy(update={"config": {"model_type": "levit", "image_size": 4096}})


class Ended(Exception):
    """The task is over."""


def test_a_config_that_fills_memory_before_its_first_parameter_is_refused_in_the_child() -> None:
    sandbox = Sandbox(memory_bytes=24 << 20)
    with pytest.raises(UnsafeConfig, match="more than 24 MiB of memory"):
        sandbox.require(LEVIT, None, lambda: None)
    # It is known by now: no second child is started, and so nothing is waited for.
    with pytest.raises(UnsafeConfig, match="more than 24 MiB of memory"):
        sandbox.require(LEVIT, None, pytest.fail)


def test_a_config_that_computes_for_ever_is_refused_in_the_child() -> None:
    with pytest.raises(UnsafeConfig, match="more than 1 s of processor time"):
        Sandbox(memory_bytes=16 << 30, cpu_seconds=1).require(LEVIT, None, lambda: None)


def test_a_model_within_the_limits_is_laid_out_once_for_all_workers_of_a_machine(tmp_path: Path) -> None:
    Sandbox(tmp_path).require(MODEL, None, lambda: None)
    assert len(list(tmp_path.iterdir())) == 1
    Sandbox(tmp_path).require(MODEL, None, pytest.fail)


def test_a_tokenizer_first_converts_the_texts_in_the_child(tmp_path: Path) -> None:
    raw = (bert_tokenizer(tmp_path, ("the", "cat")) / "tokenizer.json").read_text()
    good = TokenizerRequest(tokenizer=raw, texts=(("the cat",), ("dog", "sat")), max_length=8)
    Sandbox().require_tokenizer(good, lambda: None)
    template = json.loads(raw)
    template["post_processor"]["single"] *= 5
    longer = good.model_copy(update={"tokenizer": json.dumps(template)})
    with pytest.raises(UnsafeConfig, match="gives a text more tokens than the site's max_length"):
        Sandbox().require_tokenizer(longer, lambda: None)
    # Repeats each word of each text 2,000,000 times.
    bomb = json.loads(raw)
    bomb["normalizer"] = {"type": "Replace", "pattern": {"String": "t"}, "content": "t " * 2_000_000}
    for by_word, text in ((False, "t" * 200), (True, ("t",) * 200)):
        asked = {"tokenizer": json.dumps(bomb), "texts": (text if by_word else (text,),), "by_word": by_word}
        with pytest.raises(UnsafeConfig, match="converting the texts with it takes more than 128 MiB"):
            Sandbox(memory_bytes=128 << 20).require_tokenizer(good.model_copy(update=asked), lambda: None)


def test_the_child_knows_no_secret_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_WORKER_TOKEN", "tessera_site_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = ForkServer()
    try:
        known = Path(f"/proc/{server._started().pid}/environ").read_bytes()
    finally:
        server.close()
    assert b"PATH=" in known
    assert b"secret" not in known.lower()


CONFINED = """
import os, socket, sys
from tessera.worker.model.sandbox import confine
inside, outside = os.readlink("/proc/self/ns/net"), int(sys.argv[1])
confine()
os.write(1, b"a verdict")
if os.readlink("/proc/self/ns/net") == inside:
    sys.exit(77)
try:
    socket.create_connection(("127.0.0.1", outside), 5)
except OSError:
    sys.exit(0)
sys.exit(1)
"""


def test_the_child_reaches_no_network_and_writes_no_verdict_on_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", CONFINED, port], stdout=subprocess.PIPE, check=False)
    assert done.stdout == b""
    if done.returncode == 77:
        pytest.skip("this system lets no user create a namespace")
    assert done.returncode == 0


def test_verdicts_that_nobody_used_for_thirty_days_are_removed(tmp_path: Path) -> None:
    now, day = time.time(), 86400
    Sandbox(tmp_path).require(MODEL, None, lambda: None)
    (used,) = tmp_path.iterdir()
    old, recent, abandoned = (tmp_path / name for name in ("old", "recent", "old.lock"))
    for path, age in ((used, 31), (old, 31), (recent, 29), (abandoned, 31)):
        path.touch()
        os.utime(path, (now - age * day, now - age * day))
    # To be asked for is a use, without another child.
    Sandbox(tmp_path).require(MODEL, None, pytest.fail)
    Sandbox(tmp_path).sweep(now)
    assert {*tmp_path.iterdir()} == {used, recent}
    Sandbox(tmp_path).sweep(now + 31 * day)
    assert not [*tmp_path.iterdir()]
    Sandbox(None).sweep(now)
    Sandbox(tmp_path / "never-made").sweep(now)


@pytest.mark.long
def test_a_limit_that_the_machine_sets_already_is_no_fault_of_the_model() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (50, 50));"
        "from tessera.worker.model.sandbox import Sandbox; from tessera.shared.model.spec import Model;"
        f"model = Model.model_validate_json({MODEL.model_dump_json()!r});"
        "Sandbox(cpu_seconds=600).require(model, None, lambda: None)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_being_killed_is_no_verdict_on_a_model() -> None:
    sandbox = Sandbox()

    def kill() -> None:
        for child in psutil.Process(FORK_SERVER._process.pid).children() if FORK_SERVER._process else ():
            child.kill()

    with pytest.raises(RuntimeError, match="was killed"):
        sandbox.require(LEVIT, None, kill)
    sandbox.require(MODEL, None, lambda: None)


def test_a_sigterm_to_all_processes_is_no_verdict_on_a_model() -> None:
    sent = 0

    def check() -> None:
        nonlocal sent
        server = psutil.Process(FORK_SERVER._process.pid) if FORK_SERVER._process else None
        if server and (children := server.children()):
            for process in (server, *children):
                process.send_signal(signal.SIGTERM)
            sent += 1
        if sent == 3:
            raise Ended

    with pytest.raises(Ended):
        Sandbox().require(LEVIT, None, check)


def test_a_task_that_ends_ends_its_child(tmp_path: Path) -> None:
    def check() -> None:
        raise Ended

    with pytest.raises(Ended):
        Sandbox(tmp_path).require(LEVIT, None, check)
    assert not list(tmp_path.glob("*[!k]")), "an unfinished child left a verdict"


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        *((kind, {"depths": [10**8]}) for kind in ("convnext", "convnextv2", "pvt", "segformer", "swin")),
        *((kind, {"depths": [5 * 10**6]}) for kind in ("focalnet", "poolformer", "cvt")),
        ("cvt", {"depth": [1 << 19] * 3}),
    ],
)
def test_counts_in_lists_are_bounded_as_counts_are(model_type: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(UnsafeConfig, match=r"depths?: is more than 1048576"):
        check_config({"model_type": model_type, **sizes})


def test_token_ids_and_rope_values_are_no_counts() -> None:
    check_config(
        {
            "model_type": "whisper",
            "suppress_tokens": [1, 2, 7, 50_257, 50_358, 50_359, 50_360, 50_361, 50_362] * 100,
            "begin_suppress_tokens": [220, 50_257],
            "forced_decoder_ids": [[1, 50_259], [2, 50_359], [3, 50_363]],
            "max_source_positions": 1500,
            "num_mel_bins": 80,
        }
    )
    check_config({"model_type": "llama", "rope_theta": 500_000_000, "max_position_embeddings": 10_485_760})
