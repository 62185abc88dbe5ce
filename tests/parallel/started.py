"""Processes that tests start, and what they print before they end."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start(*commands, **options):
    """Starts processes, each with its words, in an environment without a terminal."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, **options}
    return [subprocess.Popen([sys.executable, *words], **pipes) for words in commands]


def ended(started, seconds=900):
    """What processes print before they end; those that do not are killed."""
    try:
        return [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
