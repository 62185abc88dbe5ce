"""Signals: noted, obeyed where nothing is lost, and within the time that others give."""

import contextlib
import glob
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from fedjax_cluster.interruption import Interrupt, Terminated


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C is heard, also where pytest is a shell's background job, and a closed terminal under nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_is_noted_where_one_is_patient_and_raised_where_it_is_looked_at(number, raised):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        with interrupt.patiently():
            send(number)
            assert interrupt.wanted
        with pytest.raises(raised):
            interrupt.stop_if_wanted("runs/one")
    assert signal.getsignal(number) is before
    assert Interrupt.active is None
    assert Terminated("runs/one").code == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_begins_to_listen_is_noted_and_the_next_one_is_free(monkeypatch, number):
    """Raised there, it left its handlers and itself behind for good: every later run ended at once."""
    before, listen = signal.getsignal(number), Interrupt._listen

    def struck(self):
        listen(self)
        send(number)

    monkeypatch.setattr(Interrupt, "_listen", struck)
    with pytest.raises((KeyboardInterrupt, Terminated)), Interrupt():
        raise AssertionError("it went on")
    assert signal.getsignal(number) is before
    with Interrupt(command=True) as interrupt:  # whoever has it has lines to say before
        assert interrupt.number == number
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    with Interrupt() as interrupt, interrupt.patiently():
        assert not interrupt.wanted


def test_nothing_stays_where_it_cannot_begin_to_listen(monkeypatch):
    def refused(self):
        raise OSError("too many open files")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Interrupt, "_listen", refused)
    with pytest.raises(OSError, match="too many"), Interrupt():
        pass
    assert Interrupt.active is None
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_at_its_end_is_python_s_once_all_is_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        interrupt._stack.callback(send, signal.SIGINT)
    assert Interrupt.active is None
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_is_heard_unless_it_is_ignored():
    with Interrupt() as interrupt, interrupt.patiently():
        send(signal.SIGHUP)
        send(signal.SIGHUP)  # the shell's, and then the system's
        with pytest.raises(Terminated) as ended:
            interrupt.stop_if_wanted("runs/one")
    assert ended.value.code == 129
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    with Interrupt() as interrupt, interrupt.patiently():
        send(signal.SIGHUP)
        assert not interrupt.wanted


def test_one_inside_another_is_that_one():
    with Interrupt() as outer:
        with Interrupt() as inner, inner.patiently():
            send(signal.SIGINT)
        assert inner is outer
        assert Interrupt.active is outer
        assert outer.wanted


def test_elsewhere_than_in_a_patient_part_it_raises_at_once():
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_inside_jaxs_callback_of_the_garbage_collection_it_is_only_noted():
    def _xla_gc_callback():
        signal.raise_signal(signal.SIGINT)

    with Interrupt() as interrupt:
        _xla_gc_callback()
        assert interrupt.wanted
        with pytest.raises(KeyboardInterrupt):
            interrupt.stop_if_wanted()


def test_a_second_ctrl_c_raises_in_a_notebook():
    with Interrupt() as interrupt, interrupt.patiently():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_other_threads_hear_nothing():
    before, found = signal.getsignal(signal.SIGINT), []

    def run():
        with Interrupt() as interrupt:
            found.append((interrupt.wanted, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, True)]


DEAF = """
    import ctypes
    from fedjax_cluster import interruption
    interruption.GRACE = {grace}
    with interruption.Interrupt(command={command}) as interrupt, interrupt.patiently():
        print("deaf", flush=True)
        for _ in range(100):
            ctypes.CDLL(None).usleep(900_000)  # like a compilation: no bytecode is run, and the lock is let go
"""


@pytest.mark.parametrize(
    ("command", "signals", "grace", "status"),
    [
        (True, [signal.SIGTERM], 0.5, 143),
        (False, [signal.SIGTERM], 0.5, 143),
        (True, [signal.SIGINT], 0.5, 130),
        (True, [signal.SIGINT, signal.SIGINT], 60, 130),
    ],
)
def test_what_cannot_be_interrupted_is_ended(command, signals, grace, status):
    code = textwrap.dedent(DEAF).format(command=command, grace=grace)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "deaf\n"
    for left, number in enumerate(signals, 1 - len(signals)):
        process.send_signal(number)
        if left < 0:  # two at once would be one
            assert "again to stop at once" in process.stderr.readline()
    _, error = process.communicate(timeout=10)
    assert process.returncode == status
    assert "Traceback" not in error


SIGNALLED = """
import os, runpy, sys

class WhileImporting:
    def find_spec(self, name, *_):
        if name == "fedjax_cluster.cli":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, WhileImporting())
runpy.run_module("fedjax_cluster", run_name="__main__")
"""


def test_workers_end_with_the_process_that_is_stopped_at_once():
    """The recipe of attacks has one on each core."""
    program = """
        import multiprocessing, sys, time
        from fedjax_cluster.interruption import Interrupt
        with Interrupt(command=True) as interrupt, interrupt.patiently():
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            print(worker.pid, flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        worker = int(process.stdout.readline())
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        try:
            process.communicate(timeout=20)  # to the end of the output, which the worker has open, too
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_while_it_imports_say_nothing(number, status):
    code = SIGNALLED.format(number=int(number))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_signal_ends_a_run_after_a_checkpoint(number, status):
    words = [sys.executable, "-m", "fedjax_cluster", *["run", "fedavg", "--rounds", "100000000", "--run-dir", "my own"]]
    words += ["--checkpoint-every", "1"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    # Rounds are under way: a busy machine may still compile long after the directory is there.
    while not glob.glob("my own/checkpoints/[0-9]*") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=100)
    assert process.returncode == status
    said, left = error.splitlines()
    assert said == "stopping after what is under way; again to stop at once"
    assert left == "interrupted; go on with: fedjax-cluster resume 'my own'"
    assert not os.path.exists("my own/.lock")


IN_A_TERMINAL = """
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the session's own, whose end is told
    import fedjax_cluster as fc
    method = fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=16, steps=1))
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=4)
    fc.simulate(method, federation, rounds=100_000_000, run_dir="own", checkpoint_every=1000, progress=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_directory")
def test_a_terminal_that_closes_ends_a_script_after_a_checkpoint():
    """The bar that it draws there cannot be ended, and said so in place of what ended the run."""
    terminal, inside = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(IN_A_TERMINAL)]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    deadline = time.monotonic() + 200
    shown = b""
    while b"client-rounds/s" not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown = shown[-100:] + os.read(terminal, 65536)
    assert not rounds_saved()
    os.close(terminal)
    assert process.wait(timeout=100) == 129
    assert max(rounds_saved()) > 0
    assert not os.path.exists("own/.lock")


def rounds_saved():
    return [int(name) for name in map(os.path.basename, glob.glob("own/checkpoints/*")) if name.isdecimal()]


def test_what_the_host_of_an_embedded_python_hears_is_left_to_it(monkeypatch):
    heard = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else heard(number))
    before = heard(signal.SIGTERM)
    with Interrupt():
        assert heard(signal.SIGTERM) is before
        assert heard(signal.SIGINT) is not signal.default_int_handler
    assert heard(signal.SIGTERM) is before
