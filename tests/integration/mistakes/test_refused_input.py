"""Bad input gets one paragraph with the key or path and the remedy, and exit code 2.

There is no stack trace, and no process starts.
"""

from __future__ import annotations

import subprocess

import pytest


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rolout.n=4", ["rolout.n", "Did you mean 'rollout.n'?"]),
        ("model.path=/does/not/exist", ["model.path='/does/not/exist'", "save_pretrained"]),
        ("trainer.output_dir=/dev/null/x", ["/dev/null/x", "trainer.output_dir"]),
        ("trainer.min_free_disk_mb=100000000", ["trainer.min_free_disk_mb", "Free some space"]),
        ("trainer.network_interface=eth77", ["trainer.network_interface", "'eth77'", "lo (127.0.0.1)"]),
        ("data.train_size=100000", ["data.train_size=100000", "data.val_size"]),
    ],
)
def test_bad_input_is_refused_before_anything_starts(app, override, words):
    done = app(override, timeout=500)
    assert done.code == 2, (done.out, done.err)
    # The banner of a run. A slow start prints its current phase.
    assert "rl-app-ppo" not in done.out
    assert not done.folder.exists()
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("kib", "named"),
    [
        pytest.param(24, "metrics.jsonl", marks=pytest.mark.slow),
        pytest.param(200, "checkpoint", marks=pytest.mark.nightly),
    ],
)
def test_a_disk_that_fills_up_ends_the_run_with_a_message_and_keeps_what_was_written(app, tmp_path, kib, named):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system; runs where the tests run as root")
    try:
        done = app(
            f"trainer.output_dir={disk}",
            "trainer.min_free_disk_mb=0",
            "trainer.total_training_steps=3",
            "trainer.test_freq=1",
        )
        assert done.code == 2, (done.out, done.err)
        assert done.err.startswith("error: ")
        assert "No space left on device" in done.err
        assert named in done.err
        assert "Traceback" not in done.err + done.out
        assert (disk / "run" / "config.yaml").stat().st_size > 0
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
